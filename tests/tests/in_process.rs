//! `uzswap run --in-process`: programs that know nothing of it, as a user without any privilege.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::program;

/// A heap of 70 MB that is read by forks, threads, files and other programs.
const PROGRAM: &str = r#"
import ctypes, errno, hashlib, os, subprocess, sys, threading
pages = [bytes([i % 251]) * 600 + str(i).encode() for i in range(110000)]
def digest():
    sums = hashlib.md5()
    for page in pages: sums.update(page)
    return sums.hexdigest()
before = digest()
for turn in range(2):
    child = os.fork()
    if child == 0:
        same = digest() == before
        for i in range(0, len(pages), 3): pages[i] = b'x'
        os._exit(0 if same else 3)
    assert digest() == before
    assert os.waitpid(child, 0)[1] == 0, 'a fork saw other bytes'
path = sys.argv[1]
whole = b''.join(pages[:20000])
with open(path, 'wb') as file: file.write(whole)
with open(path, 'rb') as file: assert file.read() == whole
told = subprocess.run(['md5sum'], input=whole, capture_output=True).stdout.split()[0].decode()
assert told == hashlib.md5(whole).hexdigest(), 'a pipe had other bytes'
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('bytes', ctypes.c_size_t)]
calls = ctypes.CDLL(None, use_errno=True)
part = Part(ctypes.cast(pages[7], ctypes.c_void_p), 1 << 63)
assert calls.writev(1, ctypes.byref(part), 1) == -1 and ctypes.get_errno() == errno.EINVAL
assert calls.poll(ctypes.c_void_p(4096), ctypes.c_ulong(0xffffffff), 0) == -1, 'too many'
sums = []
def add(first):
    sums.append(sum(sum(page[::50]) for page in pages[first::4]))
threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert digest() == before
print(before, sum(sums))
"#;

/// Runs a command as nobody, if this is root, with programs where anybody may read them. HERE is
/// the folder.
fn run(folder: &Path, words: &[&str]) -> Output {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    for name in ["uzswap", "libuzswap_agent.so", "absent"] {
        fs::copy(program(name), folder.join(name)).unwrap();
    }
    let mut command = Command::new("setpriv");
    if rustix::process::geteuid().is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]);
    }
    command.args(words.iter().map(|word| word.replace("HERE", folder.to_str().unwrap())));
    command.env_remove("XDG_RUNTIME_DIR").output().unwrap()
}

#[test]
fn a_program_in_a_part_of_its_memory_computes_what_it_did_without_privileges() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), PROGRAM).unwrap();
    let program = ["/usr/bin/python3", "-I", "HERE/program.py", "HERE/file"];
    compare(folder.path(), "64M", &program);
}

/// Runs a command by itself and in-process: it ends well and says the same.
fn compare(folder: &Path, memory: &str, command: &[&str]) {
    let without = run(folder, command);
    assert!(without.status.success(), "{}", String::from_utf8_lossy(&without.stderr));
    let with = in_process(folder, memory, command);
    assert_eq!(with.stdout, without.stdout, "{}", String::from_utf8_lossy(&with.stderr));
}

/// Runs a command in-process: it ends well, and its memory was kept small.
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
fn a_call_whose_memory_is_out_does_what_it_does_with_memory() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::create_dir(folder.path().join("files")).unwrap();
    fs::set_permissions(folder.path().join("files"), fs::Permissions::from_mode(0o777)).unwrap();
    let with = in_process(folder.path(), "48M", &["HERE/absent", "HERE/files"]);
    assert!(String::from_utf8_lossy(&with.stdout).contains("calls compared"));
}

/// 40 MiB from an allocator that is not the C library's.
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

#[test]
fn a_program_with_a_sanitizer_is_left_alone_and_keeps_its_allocator() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.c"), SANITIZED).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-fsanitize=address", "program.c", "-o", "program"]);
    assert!(compiler.current_dir(folder.path()).status().unwrap().success());
    let command = ["HERE/uzswap", "run", "--in-process", "--memory", "32M", "--", "HERE/program"];
    let with = run(folder.path(), &command);
    let said = String::from_utf8_lossy(&with.stderr);
    assert!(with.status.success(), "{}: {said}", with.status);
    assert_eq!(String::from_utf8_lossy(&with.stdout), "255590400\n");
    assert!(said.contains("built with a sanitizer") && said.contains("of 1 it could not be"));
}
