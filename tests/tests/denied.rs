//! `uzswap run --in-process` where a seccomp filter denies userfaultfd, as Docker's default profile
//! does: the command runs as without it.

#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::Output;
use uzswap_tests::as_nobody;

/// Becomes a program that may call all but userfaultfd, which answers `EPERM`.
const FILTER: &str = r#"
import ctypes, os, struct, sys
calls = ctypes.CDLL(None, use_errno=True)
LOAD, EQUALS, RETURN = 0x20, 0x15, 0x06
USERFAULTFD, DENY, ALLOW = 323, 0x00050001, 0x7fff0000
steps = [(LOAD, 0, 0, 0), (EQUALS, 0, 1, USERFAULTFD), (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in steps))
class Program(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('code', ctypes.c_void_p)]
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
assert calls.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
given = Program(len(steps), ctypes.addressof(code))
assert calls.prctl(SECCOMP, FILTER, ctypes.byref(given), 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// Runs uzswap under the filter, as nobody, if this is root: `/dev/userfaultfd` is root's.
fn run(folder: &Path, words: &[&str]) -> Output {
    let mut command = as_nobody(folder);
    let filter = folder.join("filter.py");
    fs::write(&filter, FILTER).unwrap();
    command.args(["/usr/bin/python3", "-I"]).arg(filter).arg(folder.join("uzswap")).args(words);
    command.output().unwrap()
}

#[test]
fn where_userfaultfd_is_denied_a_command_runs_as_without_and_one_line_says_so() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let command = ["sh", "-c", "echo \"preloaded: $LD_PRELOAD\"; exit 7"];
    let start = ["run", "--in-process", "--memory", "64M", "--"];
    let output = run(folder.path(), &[&start[..], &command].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert_eq!(output.stdout, b"preloaded: \n");
    assert_eq!(said.lines().count(), 1, "{said}");
    for part in ["userfaultfd is not permitted", "seccomp=", "commands run without"] {
        assert!(said.contains(part), "{said}");
    }
    let doctor = run(folder.path(), &["doctor"]);
    let told = String::from_utf8_lossy(&doctor.stdout);
    let (_, told) = told.split_once("in-process (run --in-process): ").unwrap();
    assert!(told.starts_with("does not work here"), "{told}");
    // The same words, with what comes after the name of what was looked at.
    let reason = said.trim_end().strip_prefix("uzswap: in-process: ").unwrap();
    assert!(told.contains(reason), "{told}");
}

#[test]
fn where_userfaultfd_is_denied_a_backing_that_cannot_be_is_refused_all_the_same() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let options = ["run", "--in-process", "--memory", "64M", "--backing", "/proc:1G"];
    let output = run(folder.path(), &[&options[..], &["--", "true"]].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--backing /proc"), "{said}");
}
