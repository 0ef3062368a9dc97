//! `uzswap run --in-process`: unchanged programs in a part of their memory, as a user without
//! privileges; each system call with paged-out memory (`tests/src/bin/absent`).

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "in_process/programs.rs"]
mod programs;

use programs::make_input;
use rustix::process::{Pid, Signal};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant, SystemTime};
use uzswap_tests::{as_nobody, compile, is_full, nobody, wait_for};

/// Runs a command as nobody, if this is root. HERE stands for the folder.
fn run(folder: &Path, words: &[&str]) -> Output {
    let mut command = as_nobody(folder);
    command.args(words.iter().map(|word| word.replace("HERE", folder.to_str().unwrap())));
    command.output().unwrap()
}

/// 50 MB of noise, in two processes that change their copies at the same time.
const NOISE: &str = r#"
import hashlib, os, random
noise = random.Random(1)
pages = [noise.randbytes(4000) for i in range(12500)]
sums = [hashlib.md5(page).digest() for page in pages]
def check(): assert [hashlib.md5(page).digest() for page in pages] == sums
def change(first):
    for i in range(first, len(pages), 3):
        pages[i] = noise.randbytes(4000)
        sums[i] = hashlib.md5(pages[i]).digest()
for turn in range(2):
    child = os.fork()
    change(turn if child else 2)
    check()
    if child == 0: os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
check()
print(len(pages))
"#;

#[test]
fn pages_that_do_not_fit_go_to_the_disk_and_a_fork_has_a_copy_of_them() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("noise.py"), NOISE).unwrap();
    let start = ["HERE/uzswap", "run", "--in-process", "--memory", "32M", "--backing"];
    let program = ["--", "/usr/bin/python3", "-I", "HERE/noise.py"];
    let without = run(folder.path(), &[&start[..], &["none"], &program].concat());
    let said = String::from_utf8_lossy(&without.stderr);
    assert!(!without.status.success() && said.contains("no memory is left"), "{said}");
    assert!(!said.contains("  backing "), "{said}");
    let with = run(folder.path(), &[&start[..], &["HERE:1G"], &program].concat());
    let said = String::from_utf8_lossy(&with.stderr);
    assert!(with.status.success(), "{}: {said}", with.status);
    assert!(said.contains("  backing "), "{said}");
    assert_eq!(with.stdout, b"12500\n");
}

#[test]
fn whatever_a_program_does_to_its_memory_no_byte_is_wrong() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let seconds = if is_full() { "600" } else { "5" };
    let command = ["HERE/torture", seconds, "1", "HERE"];
    let with = in_process(folder.path(), "48M", &command);
    assert!(String::from_utf8_lossy(&with.stdout).contains("no wrong byte"));
}

/// Runs a command alone. It must succeed.
fn run_well(folder: &Path, command: &[&str]) -> Output {
    let without = run(folder, command);
    let said = String::from_utf8_lossy(&without.stderr);
    assert!(without.status.success(), "by itself: {}: {said}", without.status);
    without
}

/// Runs a command alone, and in-process in each of these memories. It must succeed with the same
/// output.
fn compare(folder: &Path, memories: &[&str], command: &[&str]) {
    let without = run_well(folder, command);
    for memory in memories {
        let began = Instant::now();
        let with = in_process(folder, memory, command);
        println!("in {memory}: {:.1} s", began.elapsed().as_secs_f64());
        assert_eq!(with.stdout, without.stdout, "{}", String::from_utf8_lossy(&with.stderr));
    }
}

/// Compares the output of a C program.
fn compare_compiled(text: &str, options: &[&str], memory: &str) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), text, options);
    compare(folder.path(), &[memory], &["HERE/program"]);
}

/// Runs a command in-process. It must succeed, and its memory must have been kept small.
fn in_process(folder: &Path, memory: &str, command: &[&str]) -> Output {
    let options = ["HERE/uzswap", "run", "--in-process", "--memory", memory, "--"];
    let with = run(folder, &[&options, command].concat());
    let said = String::from_utf8_lossy(&with.stderr);
    let told = String::from_utf8_lossy(&with.stdout);
    assert!(with.status.success(), "{}: {said}{told}", with.status);
    let was_kept_small = said.contains("was kept small") && !said.contains("of 0 processes");
    assert!(was_kept_small, "{said}");
    with
}

#[test]
fn a_call_whose_memory_is_out_answers_as_with_its_memory_in() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::create_dir(folder.path().join("files")).unwrap();
    fs::set_permissions(folder.path().join("files"), fs::Permissions::from_mode(0o777)).unwrap();
    let with = in_process(folder.path(), "48M", &["HERE/absent", "HERE/files"]);
    assert!(String::from_utf8_lossy(&with.stdout).contains("calls compared"));
}

/// 40 MiB from an allocator other than the C library's.
const SANITIZED: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void) {
    char *blocks[40];
    long sum = 0;
    for (int i = 0; i < 40; i++) memset(blocks[i] = malloc(1 << 20), i, 1 << 20);
    for (int turn = 0; turn < 20; turn++)
        for (int i = 0; i < 40; i++)
            for (int at = 0; at < 1 << 20; at += 64) sum += blocks[i][at];
    for (int i = 0; i < 40; i++) free(blocks[i] = realloc(blocks[i], 100));
    printf("%ld\n", sum);
}
"#;

/// A small signal stack between pieces of the program's own memory, and a handler that writes to
/// paged-out memory.
const SMALL_STACK: &str = r#"
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>
enum { AROUND = 65536, BYTES = 64 << 20 };
static unsigned char *large;
static int file;
static unsigned long next;
static void handle(int number) {
    next = (next * 1103515245 + 12345) % (BYTES - 65536);
    if (write(file, large + next, 65536) != 65536) _exit(3);
}
int main(void) {
    unsigned char *around = malloc(2 * AROUND);
    memset(around, 0x5a, 2 * AROUND);
    stack_t stack = { .ss_sp = around + AROUND, .ss_size = getauxval(AT_MINSIGSTKSZ) + 2048 };
    struct sigaction action = { .sa_handler = handle, .sa_flags = SA_ONSTACK };
    stack_t told;
    file = open("/dev/null", O_WRONLY);
    if (sigaltstack(&stack, 0) || sigaction(SIGUSR1, &action, 0)) return 4;
    large = malloc(BYTES);
    for (int at = 0; at < BYTES; at++) large[at] = at >> 9;
    for (int turn = 0; turn < 4000; turn++) {
        raise(SIGUSR1);
        for (int at = 0; at < AROUND; at++) if (around[at] != 0x5a) return 5;
        large[turn * 4096L * 31 % BYTES] = 1;
    }
    if (sigaltstack(0, &told)) return 6;
    if (told.ss_sp != stack.ss_sp || told.ss_size != stack.ss_size) return 6;
    puts("whole");
}
"#;

#[test]
fn a_handler_on_a_small_stack_of_its_own_writes_over_nothing() {
    // Without this option the dynamic linker would look a function up at its first call, which
    // takes much of the stack.
    compare_compiled(SMALL_STACK, &["-Wl,-z,now"], "40M");
}

/// Threads on stacks from `malloc`, with variables of more than a page. The stacks get cold before
/// the threads use memory that is paged out.
const STACKS: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { BYTES = 64 << 20, STACK = 1 << 18, THREADS = 8, TURNS = 20 };
static unsigned char *large;
static __thread unsigned char variables[12000];
static pthread_barrier_t barrier;
static void *run(void *number) {
    long own = (long)number, sum = 0;
    memset(variables, own, sizeof variables);
    for (int turn = 0; turn < 4; turn++) {
        pthread_barrier_wait(&barrier);
        for (long at = own * 4096 * 4; at < BYTES; at += THREADS * 4096 * 4) sum += large[at + 1];
    }
    for (unsigned at = 0; at < sizeof variables; at++) sum += variables[at] != own;
    return (void *)sum;
}
int main(void) {
    pthread_t threads[THREADS];
    pthread_attr_t attributes;
    long sum = 0;
    large = malloc(BYTES);
    for (int at = 0; at < BYTES; at++) large[at] = at >> 9;
    pthread_attr_init(&attributes);
    pthread_barrier_init(&barrier, 0, THREADS + 1);
    for (int turn = 0; turn < TURNS; turn++) {
        for (long at = 0; at < THREADS; at++) {
            void *stack = memset(malloc(STACK), 0x5a, STACK);
            pthread_attr_setstack(&attributes, stack, STACK);
            if (pthread_create(&threads[at], &attributes, run, (void *)at)) return 3;
        }
        for (int each = 0; each < 4; each++) {
            for (int at = 0; at < BYTES; at += 4096) large[at]++;
            pthread_barrier_wait(&barrier);
        }
        for (int at = 0; at < THREADS; at++) {
            void *one;
            if (pthread_join(threads[at], &one)) return 4;
            sum += (long)one;
        }
    }
    printf("%ld\n", sum);
}
"#;

#[test]
fn a_threads_variables_stay_wherever_its_stack_is() {
    compare_compiled(STACKS, &["-pthread"], "40M");
}

#[test]
fn a_program_with_a_sanitizer_is_left_alone_and_keeps_its_allocator() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    // ThreadSanitizer needs addresses that are not random, and would report races of our threads.
    let command = "TSAN_OPTIONS=report_bugs=0 setarch -R HERE/uzswap run --in-process \
                   --memory 32M -- HERE/program";
    for sanitizer in ["-fsanitize=address", "-fsanitize=thread"] {
        compile(folder.path(), SANITIZED, &[sanitizer]);
        let with = run(folder.path(), &["sh", "-c", command]);
        let said = String::from_utf8_lossy(&with.stderr);
        assert!(with.status.success(), "{sanitizer}, {}: {said}", with.status);
        assert_eq!(String::from_utf8_lossy(&with.stdout), "255590400\n");
        assert!(said.contains("built with a sanitizer") && said.contains("of 1 it could not be"));
    }
}

/// The program's own allocator, which the C library uses too. It maps memory while it holds its
/// lock.
const ALLOCATOR: &str = r#"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
enum { CHUNK = 4 << 20 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *free_from, *free_to;
static void asked(void);
void *malloc(size_t bytes) {
    asked();
    bytes = (bytes + 31) & ~(size_t)15;
    pthread_mutex_lock(&lock);
    if (free_to - free_from < (long)bytes) {
        free_from = mmap(0, CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        free_to = free_from + CHUNK;
    }
    size_t *block = (size_t *)free_from;
    free_from += bytes;
    pthread_mutex_unlock(&lock);
    *block = bytes - 16;
    return block + 2;
}
void free(void *block) {}
void *calloc(size_t count, size_t each) { return memset(malloc(count * each), 0, count * each); }
void *realloc(void *block, size_t bytes) {
    void *other = malloc(bytes);
    size_t before = block ? ((size_t *)block)[-2] : 0;
    return memcpy(other, block, before < bytes ? before : bytes);
}
int posix_memalign(void **at, size_t by, size_t bytes) {
    *at = (void *)(((size_t)malloc(bytes + by) + by) & ~(by - 1));
    return 0;
}
void *aligned_alloc(size_t by, size_t bytes) {
    void *at;
    return posix_memalign(&at, by, bytes), at;
}
"#;

/// 48 MiB, in a thread and in a fork.
const FILLS: &str = r#"
static void asked(void) {}
static void *fill(void *sum) {
    static char *blocks[48 * 16];
    for (int i = 0; i < 48 * 16; i++) {
        memset(blocks[i] = malloc(65536), i, 65536);
        usleep(500);
    }
    for (int i = 0; i < 48 * 16; i++)
        for (int at = 0; at < 65536; at += 64) *(long *)sum += blocks[i][at];
    return 0;
}
int main(void) {
    long sum = 0;
    pthread_t thread;
    int status = 0;
    if (fork()) wait(&status);
    pthread_create(&thread, 0, fill, &sum);
    pthread_join(thread, 0);
    printf("%ld\n", sum);
    return status != 0;
}
"#;

#[test]
fn an_allocator_of_the_programs_own_may_hold_its_lock_while_it_takes_memory() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), &format!("{ALLOCATOR}{FILLS}"), &["-pthread", "-fno-builtin"]);
    compare(folder.path(), &["32M"], &["timeout", "120", "HERE/program"]);
}

/// Gives 64 KiB of present memory back in any thread that asks for memory, as jemalloc does. In a
/// fork, the first threads to ask are our threads, and the thread that starts them.
const GIVES_BACK: &str = r#"
enum { PAGE = 4096, PAGES = 12288, RECENT = 1024, EACH = 16 };
static char *pages;
static int given;
static void asked(void) {
    int at = pages ? __atomic_fetch_add(&given, EACH, __ATOMIC_SEQ_CST) : RECENT;
    if (at < RECENT) madvise(pages + at * PAGE, EACH * PAGE, MADV_DONTNEED);
}
static int check(char *memory) {
    usleep(500000);
    int most = given < RECENT ? given : RECENT;
    madvise(memory, PAGES * (long)PAGE, MADV_PAGEOUT);
    for (long i = 0; i < PAGES * (long)PAGE; i += PAGE - 1)
        if (memory[i] != (i / PAGE < most ? 0 : i / PAGE % 100 + 1)) return 1;
    return 0;
}
int main(void) {
    long bytes = PAGES * (long)PAGE;
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int turn = 0; turn < 2; turn++)
        for (long i = 0; i < PAGES; i++) memset(memory + i * PAGE, i % 100 + 1, PAGE);
    for (long i = 0; i < RECENT; i++) memory[i * PAGE]++, memory[i * PAGE]--;
    int status = 0;
    pages = memory;
    if (!fork()) _exit(check(memory));
    wait(&status);
    printf("%d\n", status);
    return 0;
}
"#;

#[test]
fn an_allocator_may_give_memory_back_in_our_threads() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), &format!("{ALLOCATOR}{GIVES_BACK}"), &["-pthread", "-fno-builtin"]);
    compare(folder.path(), &["32M"], &["timeout", "120", "HERE/program"]);
}

/// Has 80 MB, and prints the output of `uzswap status`.
const WATCHED: &str = r#"
import json, os, subprocess, sys, time
pages = [bytes([i % 251]) * 4000 for i in range(20000)]
# Other tests have runs of the same user meanwhile.
own = ' %d python3: ' % os.getpid()
line = ''
for turn in range(100):
    assert all(page[7] == i % 251 for i, page in enumerate(pages))
    said = subprocess.run([sys.argv[1], 'status'], capture_output=True, text=True).stdout
    line = ''.join(line for line in said.splitlines() if own in line)
    if ' compressed to ' in line: break
    time.sleep(0.1)
print(line)
said = subprocess.run([sys.argv[1], 'status', '--json'], capture_output=True, text=True).stdout
print(json.dumps([run for run in json.loads(said) if run.get('in_process') == os.getppid()]))
"#;

#[test]
fn an_ordinary_user_needs_no_option_but_the_memory_and_sees_the_figures() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), WATCHED).unwrap();
    let report = folder.path().join("report");
    let command = ["/usr/bin/python3", "-I", "HERE/program.py", "HERE/uzswap"];
    let start = ["HERE/uzswap", "run", "--memory", "64M", "--report", "HERE/report", "--"];
    let output = run(folder.path(), &[&start[..], &command].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("in-process: memory of 1 processes was kept small"), "{said}");
    let told = String::from_utf8_lossy(&output.stdout);
    let (line, json) = told.split_once('\n').expect("two lines");
    assert!(line.contains("compressed to") && line.contains(" faults"), "{told}");
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    let process = &json[0]["processes"][0];
    assert_eq!(process["name"], "python3", "{told}");
    assert!(process["out"].as_u64() > Some(1 << 20) && process["memory"].as_u64() > Some(1 << 20));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert!(report["faults"].as_u64() > Some(100) && report["stores"].as_u64() > Some(100));
    assert!(report["ratio"].as_f64() > Some(2.0), "{report}");
    // Without a size, all memory is the limit.
    let output = run(folder.path(), &["HERE/uzswap", "run", "--", "sh", "-c", "exit 7"]);
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("0 processes was kept small"), "{said}");
    // Options that only root may use are refused, with the remedy.
    for option in ["--include-pool", "--user=root", "--pool=8M", "--threads=4", "--metrics=/run/m"]
    {
        let output = run(folder.path(), &["HERE/uzswap", "run", option, "--", "true"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("--device, as root"), "{said}");
    }
}

/// A program that chooses descriptor numbers by `dup2` while its memory is managed.
const DESCRIPTORS: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { BYTES = 64 << 20 };
int main(void) {
    unsigned char *large = malloc(BYTES);
    for (int at = 0; at < BYTES; at++) large[at] = at >> 9;
    for (int to = 3; to < 64; to++) if (dup2(1, to) != to) return to;
    for (int at = 0; at < BYTES; at++) if (large[at] != (unsigned char)(at >> 9)) return 1;
    for (int at = 3; at < 64; at++) if (close(at)) return 2;
    puts("whole");
}
"#;

#[test]
fn a_program_may_have_the_descriptors_that_it_asks_for() {
    compare_compiled(DESCRIPTORS, &[], "32M");
}

/// A process with one thread may make calls that processes with several threads may not
/// (`unshare`), and starts faster.
#[test]
fn a_small_program_has_no_thread_of_ours() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let start = ["HERE/uzswap", "run", "--in-process", "--memory", "1G", "--"];
    let look = ["grep", "Threads", "/proc/self/status"];
    let output = run(folder.path(), &[&start[..], &look].concat());
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(told.contains("Threads:\t1\n"), "{told}");
}

#[test]
fn load_control_suspends_compilers_and_all_end_well() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    make_input(folder.path());
    let report = folder.path().join("report");
    let make = ["sh", "-c", "cd HERE && make -s -j6 -f makefile && cat part*.o | md5sum"];
    let alone = run(folder.path(), &make);
    fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path()).for_each(|path| {
        if path.extension().is_some_and(|kind| kind == "o") {
            fs::remove_file(path).unwrap();
        }
    });
    let start = ["HERE/uzswap", "run", "--in-process", "--memory", "80M"];
    let start = [&start[..], &["--report", "HERE/report", "--"]].concat();
    let held = run(folder.path(), &[&start[..], &make].concat());
    let said = String::from_utf8_lossy(&held.stderr);
    assert!(held.status.success(), "{}: {said}", held.status);
    assert_eq!(held.stdout, alone.stdout, "{said}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    assert!(report["load_control"]["suspensions"].as_u64() > Some(0), "{report}");
}

/// The next run removes the file of a killed run, unless the file is locked. A locked file belongs
/// to a run in another PID namespace, whose processes have other numbers.
#[test]
fn a_run_removes_the_files_that_a_killed_run_has_left() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let start = |command: &[&str]| {
        let mut run = as_nobody(folder.path());
        run.env("XDG_RUNTIME_DIR", folder.path()).arg(folder.path().join("uzswap"));
        run.args(["run", "--in-process", "--memory", "1G", "--"]).args(command);
        run
    };
    let files = || {
        let entries = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let is_of_a_run = |path: &Path| path.to_str().unwrap().contains("/uzswap-");
        entries.filter(|path| is_of_a_run(path)).collect::<Vec<_>>()
    };
    // The file of a run that was killed before it wrote to the file.
    let unwritten = folder.path().join("uzswap-1");
    let is_old = SystemTime::now() - Duration::from_secs(100);
    fs::File::create(&unwritten).unwrap().set_modified(is_old).unwrap();
    let command = ["sh", "-c", "echo > \"$XDG_RUNTIME_DIR/began\"; exec sleep 1000"];
    let mut killed = start(&command).process_group(0).spawn().unwrap();
    assert!(wait_for(|| folder.path().join("began").exists()));
    assert_eq!(files().len(), 1, "and not {}", unwritten.display());
    let file = files().pop().unwrap();
    let group = Pid::from_child(&killed);
    rustix::process::kill_process_group(group, Signal::KILL).unwrap();
    assert!(!killed.wait().unwrap().success());
    // The killed run's command may exist until its parent has waited for it.
    assert!(wait_for(|| rustix::process::test_kill_process_group(group).is_err()));
    let held = fs::File::open(&file).unwrap();
    held.lock_shared().unwrap();
    assert!(start(&["true"]).status().unwrap().success());
    assert_eq!(files(), [file]);
    drop(held);
    assert!(start(&["true"]).status().unwrap().success());
    assert_eq!(files().len(), 0);
}

/// A run of another version may be going on, and its processes have its file mapped.
#[test]
fn a_run_removes_the_file_of_another_version_once_no_process_has_it_mapped() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let own = |program: &str| {
        let mut command = as_nobody(folder.path());
        command.env("XDG_RUNTIME_DIR", folder.path()).arg(program);
        command
    };
    let run = || {
        let mut run = own(folder.path().join("uzswap").to_str().unwrap());
        let arguments = ["run", "--in-process", "--memory", "1G", "--", "true"];
        assert!(run.args(arguments).status().unwrap().success());
    };
    let maps = "import mmap, os, sys\n\
                with open('uzswap-1', 'xb+') as file:\n    \
                    file.write(b'another version' * 9999)\n    \
                    file.flush()\n    \
                    os.utime('uzswap-1', (0, 0))\n    \
                    mapped = mmap.mmap(file.fileno(), 4096)\n\
                open('began', 'x')\n\
                sys.stdin.read()";
    let mut other = own("/usr/bin/python3");
    other.args(["-c", maps]).current_dir(folder.path()).stdin(Stdio::piped());
    let mut other = other.spawn().unwrap();
    assert!(wait_for(|| folder.path().join("began").exists()));
    run();
    let file = folder.path().join("uzswap-1");
    assert!(file.exists());
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    run();
    assert!(!file.exists());
}

/// Has a child of 24 MiB that is killed, and never waits for it.
const NEVER_WAITS: &str = r#"
import os, signal, sys, time
ends = os.pipe()
child = os.fork()
if child == 0:
    memory = b"x" * (24 << 20)
    os.write(ends[1], b"x")
    time.sleep(1000)
os.read(ends[0], 1)
time.sleep(0.5)
os.kill(child, signal.SIGKILL)
open("child", "w").write(str(child))
time.sleep(1000)
"#;

#[test]
fn only_processes_that_live_are_listed() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), NEVER_WAITS).unwrap();
    let _ = as_nobody(folder.path());
    let start = |arguments: &[&str]| {
        let mut command = nobody();
        command.env("XDG_RUNTIME_DIR", folder.path()).arg(folder.path().join("uzswap"));
        command.args(arguments).current_dir(&folder);
        command
    };
    let command = ["run", "--in-process", "--memory", "1G", "--", "/usr/bin/python3", "program.py"];
    let mut run = start(&command).process_group(0).spawn().unwrap();
    let child = || fs::read_to_string(folder.path().join("child")).unwrap_or_default();
    assert!(wait_for(|| !child().is_empty()));
    let list = || String::from_utf8(start(&["status"]).output().unwrap().stdout).unwrap();
    let name = format!("run --in-process ({})", run.id());
    let has = |text: &str| list().contains(text);
    assert!(wait_for(|| has(&name) && !has(&format!(" {} ", child()))), "{}", list());
    rustix::process::kill_process_group(Pid::from_child(&run), Signal::KILL).unwrap();
    assert!(!run.wait().unwrap().success());
    assert!(wait_for(|| !has(&name)), "{}", list());
}
