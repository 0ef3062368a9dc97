//! `uzswap run --in-process`: a program finds itself as it does alone: in its signal handlers, and
//! in its own files of `/proc`. Each habit is a function of `habits/interrupted.c` or
//! `habits/itself.c`.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_tests::{finish_habit, habit_folder};

const RUN: &str = "./uzswap run --in-process --memory 32M --";

/// Compares each habit's output with and without uzswap, which must keep the process small.
fn compare(program: &str, habits: &[&str]) {
    let folder = habit_folder(program, &[]);
    for habit in habits {
        let (alone, _) = finish_habit(folder.path(), &format!("./program {habit}"));
        for means in ["userfaultfd", "guards"] {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = finish_habit(folder.path(), &command);
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
fn handlers_begin_on_a_thread_s_own_stack_after_one_from_before_the_take_over() {
    compare("interrupted.c", &["handlers_from_before"]);
}

#[test]
fn a_program_counts_neither_threads_nor_descriptors_of_ours() {
    compare("itself.c", &["threads", "texts", "descriptors"]);
}

#[test]
fn a_program_in_a_sandbox_of_its_own_counts_no_threads_of_ours() {
    let folder = habit_folder("forks.c", &[]);
    let (alone, _) = finish_habit(folder.path(), "./program counts_in_sandbox");
    let (out, told) = finish_habit(folder.path(), &format!("{RUN} ./program counts_in_sandbox"));
    assert_eq!(out, alone, "{told}");
    assert!(told.contains("left program: it has no /proc"), "{told}");
}

#[test]
fn a_command_ignores_and_blocks_the_signals_of_its_caller() {
    let folder = habit_folder("itself.c", &[]);
    let command = "grep -E 'SigBlk|SigIgn' /proc/self/status";
    for before in ["", "env --ignore-signal=HUP,PIPE,CHLD --block-signal=USR1,TERM,CHLD"] {
        let (alone, _) = finish_habit(folder.path(), &format!("{before} {command}"));
        let (out, told) = finish_habit(folder.path(), &format!("{before} {RUN} {command}"));
        assert_eq!(out, alone, "{told}");
    }
}
