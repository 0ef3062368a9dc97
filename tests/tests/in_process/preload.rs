//! `uzswap run --in-process`: the small library that programs preload, and how it loads the
//! agent.

#![allow(clippy::unwrap_used, reason = "tests")]

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::{OWN_CALL, as_nobody, compile, program, seconds};

/// A folder with a C program, and its library if `library` has text.
fn folder(text: &str, library: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path();
    let mut options = vec!["-pthread"];
    if !library.is_empty() {
        fs::write(path.join("library.c"), library).unwrap();
        make_library(path, "library.c", "library.so");
        options.extend(["-Wl,-rpath,.", "-L.", "-Wl,--no-as-needed"]);
    }
    compile(path, text, &options);
    folder
}

fn make_library(folder: &Path, text: &str, name: &str) {
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-fPIC", "-shared", "-pthread", text, "-o", name]).current_dir(folder);
    assert!(compiler.status().unwrap().success());
}

/// Runs a command in this memory, as nobody if this is root. Kills it if it hangs.
fn run(folder: &Path, memory: &str, command: &[&str]) -> Output {
    let mut run = as_nobody(folder);
    run.args(["timeout", "--signal=KILL", &seconds(60)]);
    run.arg(folder.join("uzswap")).args(["run", "--in-process", "--memory", memory, "--"]);
    run.args(command).current_dir(folder).output().unwrap()
}

fn said(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {said}", output.status);
    said
}

#[test]
fn the_preloaded_library_takes_two_mappings_and_loads_nothing_else() {
    let bytes = fs::read(program("libuzswap_preload.so")).unwrap();
    let file = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
    let endian = file.endian();
    let kinds = file.elf_program_headers().iter().map(|header| header.p_type(endian));
    let kinds: Vec<u32> = kinds.collect();
    let count = |kind| kinds.iter().filter(|other| **other == kind).count();
    assert_eq!((count(object::elf::PT_LOAD), count(object::elf::PT_GNU_RELRO)), (2, 0));
    let imports = file.imports().unwrap();
    assert!(!imports.is_empty());
    let text = String::from_utf8_lossy(&bytes);
    assert!(text.contains("libc.so.6") && !text.contains("libgcc_s.so"));
}

/// Prints, at several sizes, the libraries of ours that it has loaded, and its number of threads.
const SIZES: &str = r#"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    for (int step = 0; step < 2; step++) {
        char line[4096];
        int has_preload = 0, has_agent = 0, threads = 0;
        FILE *maps = fopen("/proc/self/maps", "r");
        while (fgets(line, sizeof line, maps)) {
            has_preload |= strstr(line, "libuzswap_preload.so") != NULL;
            has_agent |= strstr(line, "libuzswap_agent.so") != NULL;
        }
        fclose(maps);
        DIR *tasks = opendir("/proc/self/task");
        for (struct dirent *task; (task = readdir(tasks)) != NULL;) threads += *task->d_name != '.';
        closedir(tasks);
        printf("%d %d %d\n", has_preload, has_agent, threads);
        // Allocates 60 MiB, and frees each block immediately. Then allocates 20 MiB, and keeps
        // them.
        for (int i = 0; !step && i < 60 * 16; i++) free(memset(malloc(65536), 1, 65536));
        for (int i = 0; !step && i < 20; i++) memset(malloc(1 << 20), 1, 1 << 20);
        if (!step) usleep(300000);
    }
}
"#;

const SMALL_AND_GROWN: &str = "1 0 1\n1 1 3\n";

#[test]
fn a_small_program_has_neither_the_agent_nor_a_thread() {
    let folder = folder(SIZES, "");
    let output = run(folder.path(), "1G", &["./program"]);
    said(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), SMALL_AND_GROWN);
}

/// Uses the allocator's functions by their addresses.
const ADDRESSES: &str = r#"
#include <stdlib.h>
void *(*by_address[])(size_t) = { malloc };
void (*other)(void *) = free;
"#;

#[test]
fn a_program_for_fixed_addresses_that_uses_those_of_the_allocator_has_none_of_its_own() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), &format!("{ADDRESSES}{SIZES}"), &["-no-pie", "-fno-pie"]);
    let output = run(folder.path(), "1G", &["./program"]);
    said(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), SMALL_AND_GROWN);
    // Debian's Python is a program for fixed addresses that uses the address of `malloc`.
    let read = "print('libuzswap_agent' in open('/proc/self/maps').read())";
    let output = run(folder.path(), "1G", &["/usr/bin/python3", "-I", "-c", read]);
    said(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "False\n");
}

/// An allocator in a library, of functions that are enough for the program below.
const IN_LIBRARY: &str = r#"
#include <stddef.h>
#include <string.h>
void *malloc(size_t bytes) {
    static char memory[1 << 20];
    static size_t used;
    return used += (bytes + 15) & -16ul, memory + used - ((bytes + 15) & -16ul);
}
void free(void *block) {}
void *calloc(size_t count, size_t each) { return memset(malloc(count * each), 0, count * each); }
void *realloc(void *block, size_t bytes) { return memcpy(malloc(bytes), block, bytes); }
"#;

#[test]
fn a_librarys_allocator_is_found_beside_such_a_program() {
    let text = r#"
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
void *(*by_address[])(size_t) = { malloc };
int main(void) {
    static char maps[1 << 16];
    int file = open("/proc/self/maps", O_RDONLY);
    for (long at = 0, got; (got = read(file, maps + at, sizeof maps - 1 - at)) > 0; at += got) {}
    return !strstr(maps, "libuzswap_agent.so");
}
"#;
    let folder = folder("int main(void) {}", IN_LIBRARY);
    let options = ["-no-pie", "-fno-pie", "-Wl,-rpath,.", "-Wl,--no-as-needed", "library.so"];
    compile(folder.path(), text, &options);
    said(&run(folder.path(), "1G", &["./program"]));
}

/// Processes in which one thread forks all the time, and the children load a library. Another
/// thread allocates so much that the agent is loaded. A child that finds a lock taken would hang,
/// and ends by a signal.
const FORKING: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int is_done;
static void *fork_on(void *unused) {
    (void)unused;
    while (!is_done) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            _exit(dlopen("libm.so.6", RTLD_NOW) ? 0 : 3);
        }
        int status;
        if (child > 0 && (waitpid(child, &status, 0) != child || status)) _exit(4);
    }
    return NULL;
}
int main(void) {
    for (int i = 0; i < 300; i++) {
        pid_t child = fork();
        if (child == 0) {
            pthread_t threads[2];
            for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, fork_on, NULL);
            usleep(i * 7);
            char *block = malloc(64 << 20);
            memset(block, 1, 1 << 16);
            usleep(4000);
            is_done = 1;
            for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) return 5;
    }
}
"#;

#[test]
fn forks_find_the_dynamic_linker_whole_while_the_agent_is_loaded() {
    let folder = folder(FORKING, "");
    said(&run(folder.path(), "2G", &["./program"]));
}

/// A library that grows and forks while it is being loaded, under the dynamic linker's lock.
const GROWING_LIBRARY: &str = r#"
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
enum { PIECES = 90 };
static unsigned char *pieces[PIECES];
int is_whole(void) {
    for (int i = 0; i < PIECES; i++)
        for (int at = 0; at < 1 << 20; at += 512)
            if (pieces[i][at] != (unsigned char)(i + at / 4096)) return 0;
    return 1;
}
__attribute__((constructor)) static void grow(void) {
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = malloc(1 << 20);
        for (int at = 0; at < 1 << 20; at++) pieces[i][at] = i + at / 4096;
        if (i % 20) continue;
        pid_t child = fork();
        if (child == 0) _exit(0);
        int status = 1;
        if (waitpid(child, &status, 0) != child || status) _exit(4);
    }
}
"#;

const LOADING: &str = r#"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    void *library = dlopen("./library.so", RTLD_NOW);
    int (*is_whole)(void) = (int (*)(void))dlsym(library, "is_whole");
    for (int i = 0; i < 30; i++) {
        memset(malloc(1 << 18), i, 1 << 18);
        usleep(10000);
        if (!is_whole()) return 5;
    }
}
"#;

#[test]
fn a_library_may_grow_and_fork_while_it_is_loaded() {
    let folder = folder(LOADING, GROWING_LIBRARY);
    let said = said(&run(folder.path(), "64M", &["./program"]));
    assert!(said.contains("memory of 1 processes was kept small"), "{said}");
}

/// Before the program begins, sets a signal stack that is too small for a fault handler.
const STACK_LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
int has_stack;
__attribute__((constructor)) static void set(void) {
    stack_t stack = { .ss_sp = malloc(6144), .ss_size = 6144 };
    has_stack = sigaltstack(&stack, NULL) == 0;
}
"#;

/// Uses paged-out memory in handlers on that stack.
const ON_STACK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { PIECES = 90 };
static unsigned char *pieces[PIECES];
static volatile int at, wrong, count;
static void look(int signal) {
    (void)signal;
    unsigned char *piece = pieces[count++ % PIECES];
    for (at = 0; at < 1 << 20; at += 8192) wrong += piece[at] != (unsigned char)(at / 4096);
}
int main(void) {
    stack_t stack;
    int *has_stack = dlsym(RTLD_DEFAULT, "has_stack");
    if (!has_stack || !*has_stack || sigaltstack(NULL, &stack) || stack.ss_size != 6144) return 3;
    struct sigaction action = { .sa_handler = look, .sa_flags = SA_ONSTACK };
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < PIECES; i++) {
        pieces[i] = malloc(1 << 20);
        for (int at = 0; at < 1 << 20; at++) pieces[i][at] = at / 4096;
        usleep(2000);
    }
    for (int i = 0; i < 4 * PIECES; i++) raise(SIGUSR1);
    return wrong ? 5 : count == 4 * PIECES ? 0 : 6;
}
"#;

#[test]
fn a_stack_for_signals_from_before_the_program_began_is_known() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path();
    fs::write(path.join("library.c"), STACK_LIBRARY).unwrap();
    make_library(path, "library.c", "library.so");
    compile(path, ON_STACK, &["-Wl,--no-as-needed", "./library.so", "-rdynamic"]);
    let said = said(&run(path, "48M", &["./program"]));
    assert!(said.contains("memory of 1 processes was kept small"), "{said}");
}

#[test]
fn where_the_agent_cannot_be_loaded_a_program_runs_without_uzswap_and_says_so_once() {
    let grows = "x = [bytes([i % 251]) * 65536 for i in range(640)]; print(sum(map(len, x)))";
    let folder = folder("int main(void) { return 0; }", "");
    let path = folder.path();
    fs::write(path.join("other.c"), "int uzswap_other;").unwrap();
    for (name, reason) in [("text", "invalid ELF header"), ("other", "is of another version")] {
        let mut run = as_nobody(path);
        if name == "text" {
            let text = "no library, and longer than a header of one. ".repeat(9);
            fs::write(path.join("libuzswap_agent.so"), text).unwrap();
        } else {
            make_library(path, "other.c", "libuzswap_agent.so");
        }
        run.arg(path.join("uzswap")).args(["run", "--in-process", "--memory", "32M", "--"]);
        let output = run.args(["/usr/bin/python3", "-I", "-c", grows]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "41943040\n");
        let said = said(&output);
        assert_eq!(said.matches("this program runs without: ").count(), 1, "{said}");
        assert!(said.contains(reason) && said.contains(", of 1 it could not be"), "{said}");
    }
}

/// `dlsym` as before glibc 2.34: it gets a buffer from `calloc`, once in each thread.
const OLD_DLSYM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
typedef void *Search(void *, const char *);
void *dlsym(void *library, const char *name) {
    static Search *search;
    static __thread void *buffer;
    if (!search) search = (Search *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!search) search = (Search *)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (!buffer) buffer = calloc(1, 32);
    return search(library, name);
}
"#;

#[test]
fn a_search_for_an_allocator_may_ask_for_memory_itself() {
    let folder = folder(
        r#"
        #include <stdio.h>
        #include <stdlib.h>
        int main(void) {
            char *first = calloc(1, 100), *second = realloc(malloc(10), 5000);
            puts(first && second ? "memory" : "none");
            return 0;
        }
    "#,
        "",
    );
    fs::write(folder.path().join("old.c"), OLD_DLSYM).unwrap();
    make_library(folder.path(), "old.c", "old.so");
    // This library comes after ours, which calls it. So its search covers the libraries after ours.
    let program = ["sh", "-c", "LD_PRELOAD=$LD_PRELOAD:./old.so exec ./program"];
    let output = run(folder.path(), "64M", &program);
    let said = said(&output);
    assert_eq!(output.stdout, b"memory\n", "{said}");
}

#[test]
fn a_program_may_map_memory_by_a_function_of_its_own() {
    let folder = folder(
        r#"
        #define _GNU_SOURCE
        #include <stdio.h>
        #include <stdlib.h>
        #include <sys/mman.h>
        #include <sys/syscall.h>
        #include <unistd.h>
        void *mmap(void *at, size_t bytes, int access, int flags, int file, off_t offset) {
            return (void *)syscall(SYS_mmap, at, bytes, access, flags, file, offset);
        }
        int main(void) {
            int access = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
            char *own = mmap(NULL, 4096, access, flags, -1, 0);
            char *large = malloc(1 << 20);
            puts(own != MAP_FAILED && large ? "memory" : "none");
            return 0;
        }
    "#,
        "",
    );
    let output = run(folder.path(), "64M", &["./program"]);
    let said = said(&output);
    assert_eq!(output.stdout, b"memory\n", "{said}");
}

/// A program whose allocator works from `main` on. Before `main` only the dynamic linker calls it,
/// and only to load another library.
const LATE_ALLOCATOR: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static char *at;
static int *freed;
void *malloc(size_t bytes) {
    static char early[65536];
    static size_t used;
    bytes = (bytes + 31) & -16ul;
    if (!freed) return used += bytes, used > sizeof early ? NULL : early + used - bytes;
    return at += bytes, at - bytes;
}
void free(void *block) {
#if defined(WAITS)
    while (!*(int *volatile *)&freed) {}
#elif defined(ABORTS)
    if (!freed) fputs("too early\n", stderr), abort();
#elif defined(WORKS)
    if (!freed) return;
#endif
    if (block) ++*freed;
}
void *calloc(size_t count, size_t each) {
    void *block = malloc(count * each);
    return block ? memset(block, 0, count * each) : NULL;
}
void *realloc(void *block, size_t bytes) {
    void *other = malloc(bytes);
    return block && other ? memcpy(other, block, bytes) : other;
}
int main(void) {
    static char memory[1 << 20];
    static int count;
    static void *volatile block;
    at = memory, freed = &count;
    free(block = malloc(10));
    puts(count ? "freed" : "none");
    return fflush(stdout);
}
"#;

#[test]
fn an_allocator_that_works_from_main_on_is_left_alone() {
    let reason = "left program: its allocator does not work before the program begins";
    for (way, is_left) in [("ENDS", true), ("WAITS", true), ("ABORTS", true), ("WORKS", false)] {
        let folder = folder(&format!("#define {way}\n{LATE_ALLOCATOR}"), "");
        let output = run(folder.path(), "64M", &["./program"]);
        let said = said(&output);
        assert_eq!(output.stdout, b"freed\n", "{way}: {said}");
        assert_eq!(said.contains(reason), is_left, "{way}: {said}");
        assert!(!said.contains("too early"), "{way}: {said}");
    }
}

/// Grows beyond its budget in two threads, and reads all of it. Each has large variables.
const LARGE_VARIABLES: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static __thread char variables[BYTES];
static void *grow(void *wrong) {
    char *blocks[30];
    memset(variables, 7, sizeof variables);
    for (int i = 0; i < 30; i++) {
        memset(blocks[i] = malloc(1 << 20), i, 1 << 20);
        usleep(4000);
    }
    for (int i = 0; i < 30; i++)
        for (int at = 0; at < 1 << 20; at++) *(long *)wrong += blocks[i][at] != i;
    for (int i = 0; i < BYTES; i++) *(long *)wrong += variables[i] != 7;
    return NULL;
}
int main(void) {
    pthread_t other;
    long wrong[2] = { 0, 0 };
    pthread_create(&other, NULL, grow, &wrong[1]);
    grow(&wrong[0]);
    pthread_join(other, NULL);
    if (wrong[0] || wrong[1]) return 1;
    puts("whole");
}
"#;

#[test]
fn threads_of_ours_have_room_beside_large_variables_of_each_thread() {
    for bytes in ["60000", "250000", "3000000"] {
        let folder = folder(&LARGE_VARIABLES.replace("BYTES", bytes), "");
        let output = run(folder.path(), "32M", &["./program"]);
        let told = said(&output);
        assert_eq!(output.stdout, b"whole\n", "{bytes}: {told}");
        assert!(told.contains("memory of 1 processes was kept small"), "{bytes}: {told}");
    }
}

/// Functions that the agent imports. A library of the program may define the same functions. The
/// library's function would then run in our threads, for which no memory may be out.
const IMPORTS: &str = "
    memcmp bcmp memcpy memmove memset strlen strchr
    pthread_attr_destroy pthread_attr_init pthread_attr_setstack pthread_attr_setstacksize
    pthread_create pthread_detach pthread_getspecific pthread_join pthread_tryjoin_np
    pthread_key_create pthread_key_delete pthread_mutex_lock pthread_mutex_unlock
    pthread_once pthread_self pthread_setname_np pthread_setspecific pthread_sigmask
    __pthread_key_create __libc_current_sigrtmax __register_atfork __sigaction ssignal sysv_signal
    raise sigaddset sigdelset sigfillset sigismember abort exit
    __errno_location environ __environ getauxval gnu_get_libc_version
    sched_getaffinity sched_getcpu sysconf
    _dl_find_object dl_iterate_phdr dlsym __tls_get_addr __cxa_finalize
    _ITM_deregisterTMCloneTable _ITM_registerTMCloneTable __gmon_start__
    __res_init freeaddrinfo gai_strerror getaddrinfo
    clock fflush fprintf fwrite stderr getcwd realpath
    ZSTD_trace_compress_begin ZSTD_trace_compress_end
    ZSTD_trace_decompress_begin ZSTD_trace_decompress_end
";

#[test]
fn the_agent_opens_files_and_asks_the_time_by_no_function_that_a_program_may_have() {
    let bytes = fs::read(program("libuzswap_agent.so")).unwrap();
    let file = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
    let symbols = file.dynamic_symbols().filter(|symbol| symbol.is_undefined());
    let names = symbols.map(|symbol| symbol.name().unwrap().to_owned());
    let is_new = |name: &String| !IMPORTS.split_whitespace().any(|known| known == name);
    let new: Vec<String> = names.filter(|name| !name.is_empty() && is_new(name)).collect();
    assert!(new.is_empty(), "{new:?}: see crates/uzswap-agent/src/kernel.rs");
}

/// A library that defines functions of the C library. None may be called.
const OTHER_FUNCTIONS: &str = r#"
#define CALL(function) long function(void) { end(#function); }
static void end(const char *function) {
    long bytes = 0;
    while (function[bytes]) bytes++;
    own_call(SYS_write, 2, (long)function, bytes, 0, 0, 0);
    for (;;) own_call(SYS_exit_group, 3, 0, 0, 0, 0, 0);
}
CALL(open) CALL(open64) CALL(close) CALL(read) CALL(readv) CALL(pread) CALL(pread64) CALL(readlink)
CALL(write) CALL(writev) CALL(pwrite64) CALL(fstat) CALL(fstat64) CALL(stat64) CALL(lstat64)
CALL(statx) CALL(fstatfs) CALL(lseek64) CALL(fsync) CALL(ftruncate64) CALL(fcntl) CALL(unlink)
CALL(poll) CALL(munmap) CALL(mprotect) CALL(madvise) CALL(mincore) CALL(sigaltstack) CALL(getpid)
CALL(getrandom) CALL(gettid) CALL(clock_gettime) CALL(clock_nanosleep) CALL(sched_yield)
CALL(process_vm_writev)
int touch(void) { return 1; }
"#;

/// Grows beyond its budget, and reads all of its memory twice.
const GROWING: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int touch(void);
int main(void) {
    static char *blocks[60];
    for (int i = 0; i < 60; i++) {
        memset(blocks[i] = malloc(1 << 20), i + touch(), 1 << 20);
        usleep(4000);
    }
    for (int i = 0; i < 120; i++)
        for (int at = 0; at < 1 << 20; at++)
            if (blocks[i % 60][at] != i % 60 + 1) return 1;
    puts("whole");
}
"#;

#[test]
fn functions_of_the_program_s_libraries_are_called_by_the_program_alone() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("library.c"), [OWN_CALL, OTHER_FUNCTIONS].concat()).unwrap();
    make_library(folder.path(), "library.c", "library.so");
    compile(folder.path(), GROWING, &["-Wl,--no-as-needed", "./library.so"]);
    let output = run(folder.path(), "32M", &["./program"]);
    let said = said(&output);
    assert_eq!(output.stdout, b"whole\n", "{said}");
    assert!(said.contains("memory of 1 processes was kept small"), "{said}");
}
