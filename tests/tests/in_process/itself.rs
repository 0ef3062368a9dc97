//! `uzswap run --in-process`: a program finds itself as it does alone: in its signal handlers, and
//! in its own files of `/proc`. Each habit is a function of `habits/interrupted.c` or
//! `habits/itself.c`.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::as_nobody;

/// A folder with one of the programs.
fn folder(program: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("habits").join(program);
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

/// Compares each habit's output with and without uzswap, which must keep the process small.
fn compare(program: &str, habits: &[&str]) {
    let folder = folder(program);
    for habit in habits {
        let (alone, _) = run(folder.path(), &format!("./program {habit}"));
        for means in ["userfaultfd", "guards"] {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = run(folder.path(), &command);
            assert_eq!(out, alone, "{means}, {habit}: {told}");
            assert!(!told.contains("memory of 0 processes"), "{means}, {habit}: {told}");
        }
    }
}

#[test]
fn handlers_that_begin_behind_a_change_of_maps_fork_and_jump() {
    compare("interrupted.c", &["forks_in_handlers", "jumps_out_of_changes"]);
}

#[test]
fn a_program_counts_neither_threads_nor_descriptors_of_ours() {
    compare("itself.c", &["threads", "texts", "descriptors"]);
}
