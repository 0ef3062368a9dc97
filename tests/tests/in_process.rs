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

/// Runs it as nobody, if this is root; the program, where anybody may read it.
fn run(folder: &Path, options: &[&str]) -> Output {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    for name in ["uzswap", "libuzswap_agent.so"] {
        fs::copy(program(name), folder.join(name)).unwrap();
    }
    fs::write(folder.join("program.py"), PROGRAM).unwrap();
    let mut command = Command::new("setpriv");
    if rustix::process::geteuid().is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]);
    }
    command.args(options.iter().map(|option| option.replace("HERE", folder.to_str().unwrap())));
    command.args(["/usr/bin/python3", "-I"]).arg(folder.join("program.py"));
    command.arg(folder.join("file")).env_remove("XDG_RUNTIME_DIR").output().unwrap()
}

#[test]
fn a_program_in_a_part_of_its_memory_computes_what_it_did_without_privileges() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let without = run(folder.path(), &["env"]);
    let with = ["HERE/uzswap", "run", "--in-process", "--memory", "64M", "--"];
    let with = run(folder.path(), &with);
    let said = String::from_utf8_lossy(&with.stderr).into_owned();
    assert!(without.status.success(), "{}", String::from_utf8_lossy(&without.stderr));
    assert!(with.status.success(), "{}: {said}", with.status);
    assert_eq!(with.stdout, without.stdout, "{said}");
    let was_kept_small = said.contains("was kept small") && !said.contains("of 0 processes");
    assert!(was_kept_small, "{said}");
}
