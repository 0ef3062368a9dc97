//! `uzswap run --in-process`: memory that may be written and executed at the same time. Each habit
//! is a function of `habits/executed.c`.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::as_nobody;

/// The program in a folder of its own.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("habits/executed.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-pthread", "-o", "program"]).arg(source);
    assert!(compiler.current_dir(&folder).status().unwrap().success());
    folder
}

/// Runs a shell command as nobody, if this is root. Kills it if it hangs. Returns its output, which
/// must be that of a success, and its messages.
fn run(folder: &Path, command: &str) -> (String, String) {
    let mut run = as_nobody(folder);
    run.args(["timeout", "--signal=KILL", "120", "sh", "-c", command]);
    let Output { status, stdout, stderr } = run.current_dir(folder).output().unwrap();
    let [out, told] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(status.success(), "{command}: {status}: {out}{told}");
    (out, told)
}

const RUN: &str = "./uzswap run --in-process --memory 32M --";
const REASON: &str = "it generates code that makes system calls itself";

#[test]
fn a_program_is_left_alone_before_it_runs_a_system_call_that_it_has_written() {
    const HABITS: [&str; 7] = [
        "mapped_before",
        "mapped_after",
        "mapped_unreadable",
        "protected_after",
        "behind_other_code",
        "moved",
        "in_a_child",
    ];
    let folder = folder();
    for means in ["userfaultfd", "guards"] {
        for habit in HABITS {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = run(folder.path(), &command);
            assert_eq!(out, "30000\n", "{means}, {habit}: {told}");
            assert!(told.contains(REASON), "{means}, {habit}: {told}");
        }
    }
}

#[test]
fn a_program_that_writes_and_executes_memory_is_managed_and_sees_no_difference() {
    let folder = folder();
    for habit in ["threads", "changed", "denied", "places", "refused"] {
        let (alone, _) = run(folder.path(), &format!("./program {habit}"));
        for means in ["userfaultfd", "guards"] {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = run(folder.path(), &command);
            assert_eq!(out, alone, "{means}, {habit}: {told}");
            let is_managed = told.contains("memory of") && !told.contains("memory of 0 processes");
            assert!(is_managed && !told.contains(REASON), "{means}, {habit}: {told}");
        }
    }
}
