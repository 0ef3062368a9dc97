//! `uzswap run --in-process` where a seccomp filter denies userfaultfd, as Docker's default profile
//! does. Pages then leave by guards or by page protection. Where a filter denies these too, the
//! command runs without uzswap.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;
use uzswap_tests::{as_nobody, compile, forking_heap, functions_in_c, is_full};

/// Runs a program under Docker's default profile for a container without capabilities (moby,
/// profiles, seccomp/default.json of 2026). It denies this list and `clone` of namespaces, and
/// answers `clone3` as if that did not exist. A further argument denies a single call, instead of
/// the list or besides it.
const FILTER: &str = r#"
import ctypes, os, struct, sys
calls = ctypes.CDLL(None, use_errno=True)
LOAD, EQUALS, HAS, RETURN = 0x20, 0x15, 0x45, 0x06
DENIED, ABSENT, ALLOWED = 0x00050001, 0x00050026, 0x7fff0000
CLONE3, NAMESPACES = 435, 0x7e020000
if os.uname().machine == 'x86_64':
    CLONE, PWRITE64, USERFAULTFD = 56, 18, 323
    denied = [103, 134, 136, 139, 153, 155, 156, 161, *range(163, 186), 212, 227, 236, 237, 238,
              239, 246, 248, 249, 250, 256, 272, 279, 298, 300, 304, 308, 312, 313, 320, 321]
else:
    CLONE, PWRITE64, USERFAULTFD = 220, 68, 282
    denied = [18, 39, 40, 41, 42, 51, 58, 60, 89, 97, 104, 105, 106, 112, 116, 142, 161, 162, 170,
              217, 218, 219, 224, 225, *range(235, 240), 241, 262, 265, 268, 272, 273, 280, 294]
denied += [USERFAULTFD, *range(425, 434), 438, 440, 442, 443, 450]
which, command = sys.argv[1], sys.argv[2:]
if which == 'userfaultfd': denied = [USERFAULTFD]
if which == 'pwrite64': denied += [PWRITE64]
steps = [(LOAD, 0, 0, 0)]
for number in denied: steps += [(EQUALS, 0, 1, number), (RETURN, 0, 0, DENIED)]
steps += [(EQUALS, 0, 1, CLONE3), (RETURN, 0, 0, ABSENT), (EQUALS, 0, 3, CLONE), (LOAD, 0, 0, 16)]
steps += [(HAS, 0, 1, NAMESPACES), (RETURN, 0, 0, DENIED), (RETURN, 0, 0, ALLOWED)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in steps))
class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('code', ctypes.c_void_p)]
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
assert calls.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
given = Program(len(steps), ctypes.addressof(code))
assert calls.prctl(SECCOMP, FILTER, ctypes.byref(given), 0, 0) == 0, ctypes.get_errno()
os.execv(command[0], command)
"#;

const PROFILE: &str = "profile";
const JUST_USERFAULTFD: &str = "userfaultfd";
const AND_PWRITE64: &str = "pwrite64";

/// The means by which pages leave when userfaultfd is denied, with the report's words. The second
/// is for a kernel without guards.
const MEANS: [(&str, &str); 2] =
    [("guards", "by guard pages, slower"), ("protection", "by protection, slower yet")];

/// Runs uzswap under the filter, and as nobody if this is root: `/dev/userfaultfd` is root's.
fn run_under(which: &str, folder: &Path, means: &str, words: &[&str]) -> Output {
    let mut command = as_nobody(folder);
    command.env("UZSWAP_MEANS", means);
    let filter = folder.join("filter.py");
    fs::write(&filter, FILTER).unwrap();
    command.args(["/usr/bin/python3", "-I"]).arg(filter).arg(which);
    command.arg(folder.join("uzswap")).args(words).current_dir(folder);
    command.output().unwrap()
}

/// Runs a command in this memory under the filter, by each means. The command must be taken over,
/// succeed, and have the same output as alone.
fn check(folder: &Path, memory: &str, words: &[&str]) {
    let options = ["run", "--in-process", "--memory", memory, "--"];
    for (means, by) in MEANS {
        let with = run_under(PROFILE, folder, means, &[&options, words].concat());
        let said = String::from_utf8_lossy(&with.stderr);
        assert!(with.status.success(), "{}: {said}", with.status);
        assert!(said.contains("kept small") && !said.contains(" 0 processes"), "{said}");
        // If the kernel has no guards, uzswap uses protection in the first run, too.
        assert!(said.contains(by) || said.contains(MEANS[1].1), "{said}");
        compare(folder, words, &with);
    }
}

fn compare(folder: &Path, words: &[&str], with: &Output) {
    let said = String::from_utf8_lossy(&with.stderr);
    let without = as_nobody(folder).args(words).current_dir(folder).output().unwrap();
    assert!(without.status.success());
    assert_eq!(with.stdout, without.stdout, "{said}");
}

#[test]
fn under_dockers_profile_a_python_program_computes_in_half_of_its_memory() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), forking_heap()).unwrap();
    check(folder.path(), "64M", &["/usr/bin/python3", "-I", "program.py", "file"]);
}

#[test]
fn under_dockers_profile_gcc_makes_the_same_object_in_half_of_its_memory() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("part.c"), functions_in_c(0, 700)).unwrap();
    let command = "gcc -O1 -S part.c -o - | md5sum";
    check(folder.path(), "32M", &["sh", "-c", command]);
}

/// The program has inaccessible memory of its own. Its handler of SIGSEGV must run only for faults
/// there. Memory that the program protects, opens again, moves and drops must keep its content.
const OWN_FAULTS: &str = r#"
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
enum { MIB = 1 << 20, BYTES = 96 * MIB, PART = 2 * MIB };
static volatile int faults;
static char *guarded;
static sigjmp_buf back;
static void on_fault(int number, siginfo_t *info, void *context) {
    char *at = info->si_addr;
    if (at < guarded || at >= guarded + PART) _exit(9);
    if (faults++ % 2) siglongjmp(back, 1);
    mprotect(guarded, PART, PROT_READ | PROT_WRITE);
}
static void fill(char *at, int seed, long bytes) {
    for (long i = 0; i < bytes; i += 64) *(int *)(at + i) = (int)(i * 31 + seed);
}
static void check(char *at, int seed, long bytes, int status) {
    for (long i = 0; i < bytes; i += 64)
        if (*(int *)(at + i) != (int)(i * 31 + seed)) _exit(status);
}
int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigset_t all;
    sigaction(SIGSEGV, &action, NULL);
    char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int part = 0; part < BYTES / PART; part++) {
        fill(memory + (long)part * PART, part, PART);
        usleep(40000);
    }
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    for (int part = 0; part < BYTES / PART; part++)
        check(memory + (long)part * PART, part, PART, 13);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    guarded = memory + 8 * PART;
    mprotect(guarded, PART, PROT_NONE);
    check(memory, 0, PART, 2);
    check(guarded, 8, PART, 3);
    if (faults != 1) return 4;
    mprotect(guarded, PART, PROT_READ);
    for (int part = 20; part < 40; part++) check(memory + (long)part * PART, part, PART, 5);
    if (!sigsetjmp(back, 1)) guarded[5] = 1;
    if (faults != 2) return 6;
    mprotect(guarded, PART, PROT_READ | PROT_WRITE);
    madvise(memory + 10 * PART + 4096, 5 * 4096, MADV_DONTNEED);
    for (int i = 0; i < 5 * 4096; i++) if (memory[10 * PART + 4096 + i]) return 7;
    check(memory + 10 * PART, 10, 4096, 8);
    fill(memory + 10 * PART, 10, PART);
    char *moved = mmap(NULL, PART, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(moved, 77, PART);
    for (int turn = 0; turn < 2; turn++) {
        for (int part = 0; part < BYTES / PART; part++)
            check(memory + (long)part * PART, part, PART, 10);
        moved = mremap(moved, PART << turn, PART << (turn + 1), MREMAP_MAYMOVE);
        if (moved == MAP_FAILED) return 11;
        check(moved, 77, PART, 12);
    }
    printf("%d\n", faults);
    fflush(stdout);
    signal(SIGSEGV, SIG_DFL);
    mprotect(guarded, PART, PROT_NONE);
    guarded[0] = 1;
    return 14;
}
"#;

#[test]
fn without_userfaultfd_a_programs_own_faults_stay_its_own() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), OWN_FAULTS, &[]);
    let command = "./program; echo status $?";
    check(folder.path(), "48M", &["sh", "-c", command]);
}

#[test]
fn without_userfaultfd_no_byte_is_wrong_whatever_a_program_does_to_its_memory() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let place = folder.path().to_str().unwrap();
    let torture = folder.path().join("torture");
    let seconds = if is_full() { "600" } else { "5" };
    let command = [torture.to_str().unwrap(), seconds, "1", place];
    let start = ["run", "--in-process", "--memory", "48M", "--"];
    for (means, _) in MEANS {
        let with = run_under(PROFILE, folder.path(), means, &[&start[..], &command].concat());
        let said = String::from_utf8_lossy(&with.stderr);
        let is_managed = said.contains("of 1 processes");
        assert!(with.status.success() && is_managed, "{means}: {}: {said}", with.status);
        assert!(String::from_utf8_lossy(&with.stdout).contains("no wrong byte"));
    }
}

#[test]
fn without_userfaultfd_a_call_whose_memory_is_out_answers_as_with_its_memory_in() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let files = folder.path().join("files");
    fs::create_dir(&files).unwrap();
    fs::set_permissions(&files, fs::Permissions::from_mode(0o777)).unwrap();
    let absent = folder.path().join("absent");
    let command = [absent.to_str().unwrap(), files.to_str().unwrap()];
    // The profile denies some of the calls, but all must be compared.
    let start = ["run", "--in-process", "--memory", "48M", "--"];
    let command = [&start[..], &command].concat();
    for (means, _) in MEANS {
        let with = run_under(JUST_USERFAULTFD, folder.path(), means, &command);
        let said = String::from_utf8_lossy(&with.stderr);
        let is_slower = said.contains("slower");
        assert!(with.status.success() && is_slower, "{means}: {}: {said}", with.status);
        assert!(String::from_utf8_lossy(&with.stdout).contains("calls compared"));
    }
}

#[test]
fn where_protection_is_denied_too_a_command_runs_without_uzswap_and_one_line_says_so() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let command = ["sh", "-c", "echo \"preloaded: $LD_PRELOAD\"; exit 7"];
    let start = ["run", "--in-process", "--memory", "64M", "--"];
    let output =
        run_under(AND_PWRITE64, folder.path(), "userfaultfd", &[&start[..], &command].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert_eq!(output.stdout, b"preloaded: \n");
    assert_eq!(said.lines().count(), 1, "{said}");
    for part in [
        "userfaultfd is not permitted",
        "seccomp=",
        "/proc/self/mem",
        "the command runs without uzswap",
    ] {
        assert!(said.contains(part), "{said}");
    }
    let doctor = run_under(AND_PWRITE64, folder.path(), "userfaultfd", &["doctor"]);
    let told = String::from_utf8_lossy(&doctor.stdout);
    let (_, told) = told.split_once("in-process (run --in-process): ").unwrap();
    assert!(told.starts_with("does not work here"), "{told}");
    // doctor gives the same reason, with details behind the name of the check.
    let reason = said.trim_end().strip_prefix("uzswap: in-process: ").unwrap();
    let reason = reason.strip_suffix("; the command runs without uzswap").unwrap();
    assert!(told.contains(reason), "{told}");
}

#[test]
fn where_userfaultfd_is_denied_a_backing_that_cannot_be_is_refused_all_the_same() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let options = ["run", "--in-process", "--memory", "64M", "--backing", "/proc:1G"];
    let command = [&options[..], &["--", "true"]].concat();
    let output = run_under(PROFILE, folder.path(), "userfaultfd", &command);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--backing /proc"), "{said}");
}
