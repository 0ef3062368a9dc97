//! `uzswap run --in-process` with a command that cannot be kept small: the command runs as without
//! uzswap, with the same output and status. One line names the reason.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use uzswap_tests::{OWN_CALL, as_nobody, compile, seconds};

/// The lines of standard error.
fn said(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect()
}

/// The command printed `hello` and ended with status 7. One line of uzswap names the reason.
fn check(output: &Output, reason: &str) {
    let said = said(output);
    assert_eq!(output.status.code(), Some(7), "{said:?}");
    assert_eq!(output.stdout, b"hello\n", "{said:?}");
    assert_eq!(said.iter().filter(|line| line.contains(reason)).count(), 1, "{said:?}");
}

const HELLO: [&str; 3] = ["sh", "-c", "echo hello; exit 7"];
const RUN: [&str; 6] = ["run", "--quiet", "--in-process", "--memory", "64M", "--"];

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can mount");
    }
    is_root
}

/// Runs a shell script in a mount namespace of its own. `$1` is the folder; `$nobody` makes a
/// command an ordinary user's.
fn in_namespace(folder: &Path, script: &str) -> Output {
    let nobody =
        "nobody='setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all'\n";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--", "sh", "-ec"]).arg(format!("{nobody}{script}"));
    command.arg("sh").arg(folder).output().unwrap()
}

#[test]
fn a_static_program_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let text = "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 7; }\n";
    compile(folder.path(), text, &["-static"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(RUN).arg(folder.path().join("program"));
    check(&command.output().unwrap(), "program is statically linked and loads no library");
}

const GO: &str = r#"
package main
import "syscall"
func main() { syscall.Write(1, []byte("hello\n")); syscall.Exit(7) }
"#;

#[test]
fn a_static_program_of_another_kind_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let go = folder.path().join("go");
    fs::write(folder.path().join("main.go"), GO).unwrap();
    let mut build = Command::new("go");
    build.args(["build", "-o", "go", "main.go"]).current_dir(folder.path());
    build.env("CGO_ENABLED", "0").env("GOCACHE", folder.path().join("cache"));
    let programs = [
        ("go", build.output().is_ok_and(|output| output.status.success()).then_some(vec![go])),
        ("busybox", busybox().map(|path| [vec![path], HELLO.map(Into::into).to_vec()].concat())),
    ];
    for (name, words) in programs {
        let Some(words) = words else {
            println!("skipped: there is no {name}");
            continue;
        };
        let mut command = as_nobody(folder.path());
        command.arg(folder.path().join("uzswap")).args(RUN).args(words);
        let reason = format!("{name} is statically linked and loads no library");
        check(&command.output().unwrap(), &reason);
    }
}

/// A static busybox, from Debian's package busybox-static.
fn busybox() -> Option<PathBuf> {
    let path = PathBuf::from("/bin/busybox");
    let linked = Command::new("ldd").arg(&path).output().ok()?;
    (path.exists() && !linked.status.success()).then_some(path)
}

/// Answers as a kernel with larger pages.
const LARGE_PAGES: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/auxv.h>
#include <unistd.h>
enum { BYTES = 65536 };
unsigned long getauxval(unsigned long type) {
    unsigned long (*own)(unsigned long) = (unsigned long (*)(unsigned long))dlsym(RTLD_NEXT, "getauxval");
    return type == AT_PAGESZ ? BYTES : own(type);
}
long sysconf(int name) {
    long (*own)(int) = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_PAGESIZE ? BYTES : own(name);
}
"#;

#[test]
fn a_kernel_with_other_pages_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), LARGE_PAGES, &["-shared", "-fPIC"]);
    let mut command = as_nobody(folder.path());
    command.env("LD_PRELOAD", folder.path().join("program"));
    command.arg(folder.path().join("uzswap")).args(RUN).args(HELLO);
    let output = command.output().unwrap();
    check(&output, "this kernel's pages have 64 KiB");
    let said = said(&output).join("\n");
    assert_eq!(said.matches("this kernel's pages").count(), 1, "{said}");
}

/// A program with 40 MiB. It gets this memory by its own system call, by the C library's `syscall`,
/// or by the C library's functions for aligned memory.
const OWN_CALLS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(ALIGNED)
static char *map(long bytes) {
    static int turn;
    void *block = NULL;
    if (turn++ % 2) return aligned_alloc(64, bytes);
    return posix_memalign(&block, 64, bytes) ? NULL : block;
}
#elif defined(LIBRARY)
static char *map(long bytes) {
    long protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    return (char *)syscall(SYS_mmap, 0L, bytes, protection, flags, -1L, 0L);
}
#else
static char *map(long bytes) {
    long protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    return (char *)own_call(SYS_mmap, 0, bytes, protection, flags, -1, 0);
}
#endif
int main(void) {
    long wrong = 0;
    char *all[40];
    for (int i = 0; i < 40; i++) {
        memset(all[i] = map(1 << 20), i + 1, 1 << 20);
        usleep(30000);
    }
    for (int i = 0; i < 40; i++)
        for (int at = 0; at < 1 << 20; at += 4096) wrong += all[i][at] != i + 1;
    sleep(2);
    puts(wrong ? "wrong" : "hello");
    return 7;
}
"#;

#[test]
fn a_program_that_takes_memory_past_the_c_library_is_named_or_kept_small() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let run = |flags: &[&str], reason: &str| {
        compile(folder.path(), &[OWN_CALL, OWN_CALLS].concat(), &[&["-O1"], flags].concat());
        let mut command = as_nobody(folder.path());
        command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "24M"]);
        check(&command.arg(folder.path().join("program")).output().unwrap(), reason);
    };
    run(&[], "program: it takes memory by system calls of its own");
    for flag in ["-DLIBRARY", "-DALIGNED"] {
        run(&[flag], "memory of 1 processes was kept small");
    }
}

/// Grows a little, and executes itself with another environment.
const OTHER_ENVIRONMENT: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **arguments) {
    int mib = count > 1 ? 14 : 40;
    for (int i = 0; i < mib; i++) memset(malloc(1 << 20), 1, 1 << 20);
    sleep(count > 1 ? 1 : 3);
    char *none[] = { NULL }, *other[] = { "LD_PRELOAD=libm.so.6", NULL };
    if (count > 1)
        execle(arguments[0], arguments[0], NULL, strcmp(arguments[1], "none") ? other : none);
    puts("hello");
    return 7;
}
"#;

#[test]
fn a_program_that_was_started_with_another_environment_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), OTHER_ENVIRONMENT, &["-O1"]);
    for environment in ["none", "other"] {
        let mut command = as_nobody(folder.path());
        command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "512M"]);
        command.arg(folder.path().join("program")).arg(environment);
        check(&command.output().unwrap(), "left program: its LD_PRELOAD lacks the library");
    }
}

/// Grows. Has a child that shares its memory for some seconds, or no child.
const SHARING: &str = r#"
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static int rest(void *unused) { (void)unused; sleep(4); _exit(0); }
int main(int count, char **arguments) {
    static char *blocks[40];
    for (int i = 0; i < 40; i++) memset(blocks[i] = malloc(1 << 20), i, 1 << 20), usleep(4000);
    char *stack = (char *)malloc(1 << 16) + (1 << 16);
    if (count > 1 && waitpid(clone(rest, stack, CLONE_VM | SIGCHLD, NULL), NULL, 0) < 0) return 1;
    for (int i = 0; i < 40; i++)
        for (int at = 0; at < 1 << 20; at++) if (blocks[i][at] != i) return 2;
    puts("hello");
    return arguments[0] ? 7 : 0;
}
"#;

#[test]
fn a_program_with_a_child_in_its_memory_is_named_and_the_child_is_not() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), SHARING, &["-O1"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "32M"]);
    let output = command.arg(folder.path().join("program")).arg("shares").output().unwrap();
    check(&output, "left program: it makes a thread past the C library");
    let count = said(&output).iter().filter(|line| line.contains("left program")).count();
    assert_eq!(count, 1, "{output:?}");
}

/// Runs `program` in a sandbox, by this command. `None` if sandboxes are denied.
fn in_sandbox(folder: &Path, memory: &str, sandbox: &[&str]) -> Option<Output> {
    let mut tried = as_nobody(folder);
    let is_permitted = tried.args(sandbox).arg("true").output().is_ok_and(|o| o.status.success());
    if !is_permitted {
        println!("skipped: {sandbox:?} is denied, or is not installed");
        return None;
    }
    let mut command = as_nobody(folder);
    command.args(["timeout", "--signal=KILL", &seconds(100)]).arg(folder.join("uzswap"));
    command.args(["run", "--in-process", "--memory", memory, "--"]).args(sandbox);
    Some(command.arg(folder.join("program")).output().unwrap())
}

#[test]
fn a_program_with_its_own_number_in_a_sandbox_is_known_by_it() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), OTHER_ENVIRONMENT, &["-O1"]);
    let unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork"];
    let own_proc = [&unshare[..], &["--mount-proc"]].concat();
    if let Some(output) = in_sandbox(folder.path(), "32M", &own_proc) {
        check(&output, "memory of 1 processes was kept small");
        assert!(!said(&output).iter().any(|line| line.contains("left program")), "{output:?}");
    }
    if let Some(output) = in_sandbox(folder.path(), "32M", &unshare) {
        check(&output, "left program: its /proc is of another PID namespace");
        assert!(said(&output).iter().any(|line| line.contains("of 1 it could not be")));
    }
}

#[test]
fn a_program_in_a_sandbox_with_another_dev_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), OTHER_ENVIRONMENT, &["-O1"]);
    let sandbox = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev"];
    if let Some(output) = in_sandbox(folder.path(), "32M", &sandbox) {
        check(&output, "left program: the file that the run's processes share is out of its reach");
    }
}

/// Permits all calls but one, which the filter turns into a signal. Then grows.
const FILTERED: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) {
    struct sock_filter filter[] = { { 0x20, 0, 0, 0 }, { 0x15, 0, 1, SYS_getppid },
                                    { 6, 0, 0, SECCOMP_RET_TRAP }, { 6, 0, 0, SECCOMP_RET_ALLOW } };
    struct sock_fprog program = { 4, filter };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 1;
    for (int i = 0; i < 40; i++) memset(malloc(1 << 20), 1, 1 << 20);
    sleep(3);
    puts("hello");
    return 7;
}
"#;

#[test]
fn a_program_that_filters_its_calls_from_the_start_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), FILTERED, &["-O1"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "24M"]);
    let output = command.arg(folder.path().join("program")).output().unwrap();
    check(&output, "left program: it filters its own system calls (seccomp)");
}

/// Permits hardly any call, for all threads, when our thread watches. A call of ours would end the
/// program.
const CONFINED: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int main(void) {
    for (int i = 0; i < 24; i++) memset(malloc(1 << 20), 1, 1 << 20);
    struct sock_filter filter[] = { { 0x20, 0, 0, 0 }, { 0x15, 3, 0, SYS_write },
                                    { 0x15, 2, 0, SYS_clock_nanosleep },
                                    { 0x15, 1, 0, SYS_exit_group },
                                    { 6, 0, 0, SECCOMP_RET_KILL_PROCESS },
                                    { 6, 0, 0, SECCOMP_RET_ALLOW } };
    struct sock_fprog program = { 6, filter };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    unsigned for_all = SECCOMP_FILTER_FLAG_TSYNC;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, for_all, &program)) return 1;
    nanosleep(&(struct timespec) { 0, 500000000 }, NULL);
    write(1, "hello\n", 6);
    _exit(7);
}
"#;

#[test]
fn no_thread_of_ours_makes_a_call_below_a_program_s_filter() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), CONFINED, &["-O1"]);
    for _ in 0..10 {
        let mut command = as_nobody(folder.path());
        command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "64M"]);
        let output = command.arg(folder.path().join("program")).output().unwrap();
        check(&output, "left program: it filters its own system calls (seccomp)");
    }
}

/// Forbids, for all threads, that a file is opened, and grows. Then does so a second time, and asks
/// for a filter that the kernel refuses.
const FILTERED_AGAIN: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
static void grow(void) {
    for (int i = 0; i < 24; i++) memset(malloc(1 << 20), 1, 1 << 20);
}
int main(void) {
    struct sock_filter filter[] = { { 0x20, 0, 0, 0 }, { 0x15, 1, 0, SYS_open },
                                    { 0x15, 0, 1, SYS_openat },
                                    { 6, 0, 0, SECCOMP_RET_KILL_PROCESS },
                                    { 6, 0, 0, SECCOMP_RET_ALLOW } };
    struct sock_fprog program = { 5, filter }, wrong = { 0, filter };
    unsigned for_all = SECCOMP_FILTER_FLAG_TSYNC;
    grow();
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    for (int i = 0; i < 2; i++)
        if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, for_all, &program)) return 1;
    if (!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, for_all, &wrong)) return 2;
    grow();
    usleep(300000);
    write(1, "hello\n", 6);
    _exit(7);
}
"#;

#[test]
fn a_second_filter_comes_below_the_first_one() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), &[OWN_CALL, FILTERED_AGAIN].concat(), &["-O1"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "64M"]);
    let output = command.arg(folder.path().join("program")).output().unwrap();
    check(&output, "left program: it filters its own system calls (seccomp)");
}

#[test]
fn a_program_in_an_emulator_leaves_its_memory_to_that() {
    let emulator = format!("/usr/bin/qemu-{}", std::env::consts::ARCH);
    if !Path::new(&emulator).exists() {
        return println!("skipped: there is no qemu-user");
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), SHARING, &["-O1"]);
    let mut command = as_nobody(folder.path());
    command.args(["timeout", "--signal=KILL", &seconds(60)]).arg(folder.path().join("uzswap"));
    command.args(["run", "--in-process", "--memory", "32M", &emulator]);
    let output = command.arg(folder.path().join("program")).output().unwrap();
    check(&output, "memory of 1 processes was kept small");
    let reason = "an emulator makes its system calls (qemu-user, valgrind, proot)";
    assert!(said(&output).iter().any(|line| line.contains(reason)), "{output:?}");
}

#[test]
fn a_runtime_folder_of_another_user_is_passed_over() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let theirs = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut command = as_nobody(folder.path());
    command.env("XDG_RUNTIME_DIR", theirs.path()).arg(folder.path().join("uzswap"));
    let output = command.args(RUN).args(HELLO).output().unwrap();
    assert_eq!((output.status.code(), output.stdout), (Some(7), b"hello\n".to_vec()));
    if is_root() {
        assert_eq!(fs::read_dir(theirs.path()).unwrap().count(), 0, "it is root's");
    }
}

#[test]
fn a_run_without_a_folder_for_the_shared_file_says_so() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let _ = as_nobody(folder.path());
    let script = r#"
        for place in /dev/shm /tmp; do mount -t tmpfs -o ro tmpfs $place; done
        exec $nobody env -u XDG_RUNTIME_DIR "$1/uzswap" run --quiet --in-process --memory 64M -- \
            sh -c 'echo hello; exit 7'
    "#;
    check(
        &in_namespace(folder.path(), script),
        "no folder takes the file that the processes share",
    );
}

#[test]
fn libraries_that_may_not_be_executed_are_named() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let _ = as_nobody(folder.path());
    fs::create_dir_all(folder.path().join("bin")).unwrap();
    fs::create_dir_all(folder.path().join("lib/uzswap")).unwrap();
    fs::rename(folder.path().join("uzswap"), folder.path().join("bin/uzswap")).unwrap();
    symlink("bin/uzswap", folder.path().join("linked")).unwrap();
    let script = r#"
        mount -t tmpfs -o noexec tmpfs "$1/lib/uzswap"
        cp "$1"/libuzswap_*.so "$1/lib/uzswap"
        exec $nobody env -u XDG_RUNTIME_DIR "$1/linked" run --quiet --in-process --memory 64M -- \
            sh -c 'echo hello; exit 7'
    "#;
    check(&in_namespace(folder.path(), script), "mounted noexec");
}

/// Traces a command as a debugger does, and prints how many threads it has seen begin.
const TRACER: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int count, char **words) {
    int status, threads = 0;
    pid_t one = fork();
    if (!one) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
        return execv(words[1], words + 1);
    }
    waitpid(one, &status, 0);
    ptrace(PTRACE_SETOPTIONS, one, 0, PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK);
    for (ptrace(PTRACE_CONT, one, 0, 0); (one = waitpid(-1, &status, __WALL)) > 0;) {
        int signal = WIFSTOPPED(status) ? WSTOPSIG(status) : 0;
        threads += status >> 16 != 0;
        int is_ours = signal == SIGTRAP || signal == SIGSTOP;
        if (signal) ptrace(PTRACE_CONT, one, 0, is_ours ? 0 : signal);
        else if (WIFEXITED(status)) count = WEXITSTATUS(status);
    }
    printf("%d\n", threads);
    return count;
}
"#;

/// A program with an allocator of its own.
const OWN_ALLOCATOR: &str = r#"
#include <string.h>
#include <unistd.h>
static char memory[1 << 20], *at = memory;
void *malloc(size_t bytes) { return at += (bytes + 15) & -16ul, at - ((bytes + 15) & -16ul); }
void free(void *block) {}
void *calloc(size_t count, size_t each) { return malloc(count * each); }
void *realloc(void *block, size_t bytes) { return memmove(malloc(bytes), block, bytes); }
int main(void) { return write(1, "hello\n", 6) + 1; }
"#;

#[test]
fn a_debugger_sees_no_threads_of_ours_in_a_program_with_its_own_allocator() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), TRACER, &[]);
    fs::rename(folder.path().join("program"), folder.path().join("tracer")).unwrap();
    compile(folder.path(), OWN_ALLOCATOR, &["-fno-builtin"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(RUN);
    command.args(["tracer", "program"].map(|name| folder.path().join(name)));
    let output = command.output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(7), "{said:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello\n0\n", "{said:?}");
    let reason = "a debugger traces it, which would see our faults as its own";
    assert_eq!(said.iter().filter(|line| line.contains(reason)).count(), 1, "{said:?}");
}

/// A lock guards the allocator. A child that was forked past the C library allocates.
const FORKED_PAST: &str = r#"
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *next, *end;
void *malloc(size_t bytes) {
    pthread_mutex_lock(&lock);
    bytes = (bytes + 31) & ~15ul;
    if (next == NULL || end - next < (long)bytes) {
        size_t more = bytes > 4 << 20 ? bytes : 4 << 20;
        next = (char *)syscall(SYS_mmap, NULL, more, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = next + more;
    }
    *(size_t *)next = bytes;
    void *block = next + 16;
    next += bytes;
    pthread_mutex_unlock(&lock);
    return block;
}
void free(void *block) { (void)block; }
void *calloc(size_t count, size_t bytes) { return memset(malloc(count * bytes), 0, count * bytes); }
void *realloc(void *old, size_t bytes) {
    void *block = malloc(bytes);
    size_t had = old ? *(size_t *)((char *)old - 16) - 16 : 0;
    return old ? memcpy(block, old, had < bytes ? had : bytes) : block;
}
int main(void) {
    int status;
    int child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        alarm(60);
        for (int i = 0; i < 40; i++) memset(malloc(1 << 20), 1, 1 << 20);
        puts("hello");
        fflush(stdout);
        _exit(7);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
"#;

#[test]
fn a_fork_past_the_c_library_with_its_own_allocator_is_named() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), FORKED_PAST, &["-O1", "-fno-builtin", "-pthread"]);
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "24M"]);
    let output = command.arg(folder.path().join("program")).output().unwrap();
    check(&output, "left program: it was forked past the C library");
}
