//! `uzswap run --in-process`: programs of another C library, musl, are not kept small. They run as
//! without uzswap, both as the command and when a program of glibc starts them.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::{as_nobody, skip};

/// A heap of 48 MB, read by threads and written by a fork.
const HEAP: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
enum { COUNT = 6000, BYTES = 8000 };
static unsigned char *blocks[COUNT];
static unsigned long sum(void) {
    unsigned long all = 0;
    for (int i = 0; i < COUNT; i++)
        for (int at = 0; at < BYTES; at += 100) all = all * 31 + blocks[i][at];
    return all;
}
static void *add(void *answer) { *(unsigned long *)answer = sum(); return NULL; }
int main(void) {
    for (int i = 0; i < COUNT; i++) {
        memset(blocks[i] = malloc(BYTES), i * 7, BYTES);
        if (i % 100 == 0) usleep(10000);
    }
    for (int i = 0; i < COUNT; i += 3) blocks[i] = realloc(blocks[i], BYTES + i);
    unsigned long all[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, add, &all[i]);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) if (all[i] != all[0]) return 3;
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < COUNT; i++) memset(blocks[i], 1, BYTES);
        _exit(sum() == all[0] ? 4 : 0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status || sum() != all[0]) return 5;
    printf("%lu\n", all[0]);
    sleep(2);
    return 7;
}
"#;

/// A folder with the program, linked by this compiler with these options; `None` if musl is not
/// installed.
fn folder(compiler: &str, options: &[&str]) -> Option<tempfile::TempDir> {
    if !Command::new("musl-gcc").arg("--version").output().is_ok_and(|o| o.status.success()) {
        skip("musl-gcc is not installed (Debian's musl-tools)");
        return None;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    std::fs::write(folder.path().join("program.c"), HEAP).unwrap();
    let mut compile = Command::new(compiler);
    compile.args(["-O1", "-pthread", "program.c", "-o", "program"]).args(options);
    assert!(compile.current_dir(folder.path()).status().unwrap().success());
    Some(folder)
}

/// Runs a command as nobody, if this is root. Kills it if it hangs.
fn run(folder: &Path, words: &[&str]) -> Output {
    let mut command = as_nobody(folder);
    command.args(["timeout", "--signal=KILL", "100"]).args(words).current_dir(folder);
    command.output().unwrap()
}

const RUN: [&str; 6] = ["./uzswap", "run", "--in-process", "--memory", "24M", "--"];
const BY_PYTHON: &str = "import subprocess, sys; sys.exit(subprocess.run('./program').returncode)";
/// Ways to start the program.
const STARTS: [&[&str]; 4] = [
    &["./program"],
    &["env", "./program"],
    &["sh", "-c", "./program; exit $?"],
    &["python3", "-c", BY_PYTHON],
];

/// Output and status must be as alone, by each way to start the program. Returns standard error.
fn compare(folder: &Path) -> Vec<String> {
    let alone = run(folder, &["./program"]);
    assert_eq!(alone.status.code(), Some(7), "{alone:?}");
    let compare = |words: &&[&str]| {
        let with = run(folder, &[&RUN, *words].concat());
        let said = String::from_utf8_lossy(&with.stderr).into_owned();
        assert_eq!(with.stdout, alone.stdout, "{words:?}: {said}");
        assert_eq!(with.status.code(), Some(7), "{words:?}: {said}");
        said
    };
    STARTS.iter().map(compare).collect()
}

/// One line of each run must give the reason why the program was left alone.
fn check(options: &[&str], of_command: &str, of_another: &str) {
    let Some(folder) = folder("musl-gcc", options) else { return };
    let all = compare(folder.path());
    for (said, reason) in all.iter().zip([of_command, of_another, of_another, of_another]) {
        assert!(said.contains(reason), "{said}");
    }
}

#[test]
fn a_program_of_musl_runs_without_uzswap_and_is_named() {
    check(&[], "has another C library than glibc", "its C library is not glibc");
}

#[test]
fn a_static_program_of_musl_runs_without_uzswap_and_is_named() {
    const COMMAND: &str = "is statically linked and loads no library";
    check(&["-static"], COMMAND, "it is linked statically");
}

#[test]
fn where_there_is_musl_programs_of_glibc_are_kept_small() {
    let Some(folder) = folder("cc", &[]) else { return };
    for said in compare(folder.path()) {
        assert!(said.contains("memory of 1 processes was kept small"), "{said}");
    }
}
