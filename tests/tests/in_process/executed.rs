//! `uzswap run --in-process`: memory that may be written and executed at the same time. Each habit
//! is a function of `habits/executed.c`.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_tests::{finish_habit, habit_folder};

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
    let folder = habit_folder("executed.c", &[]);
    for means in ["userfaultfd", "guards"] {
        for habit in HABITS {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = finish_habit(folder.path(), &command);
            assert_eq!(out, "30000\n", "{means}, {habit}: {told}");
            assert!(told.contains(REASON), "{means}, {habit}: {told}");
        }
    }
}

#[test]
fn a_program_that_writes_and_executes_memory_is_managed_and_sees_no_difference() {
    let folder = habit_folder("executed.c", &[]);
    for habit in ["threads", "changed", "denied", "places", "refused"] {
        let (alone, _) = finish_habit(folder.path(), &format!("./program {habit}"));
        for means in ["userfaultfd", "guards"] {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = finish_habit(folder.path(), &command);
            assert_eq!(out, alone, "{means}, {habit}: {told}");
            let is_managed = told.contains("memory of") && !told.contains("memory of 0 processes");
            assert!(is_managed && !told.contains(REASON), "{means}, {habit}: {told}");
        }
    }
}
