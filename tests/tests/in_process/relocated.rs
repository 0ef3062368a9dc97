//! A library's constants that the dynamic linker relocates leave by `uzswap run --in-process`, and
//! every reader finds them. The library is in `habits/relocated.c`, with the programs that read it.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::Command;
use uzswap_tests::{finish_habit, habit_folder};

const RUN: &str = "./uzswap run --in-process --memory 32M --";

#[test]
fn relocated_constants_leave_and_every_reader_finds_them() {
    let folder = habit_folder("relocated.c", &[]);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("habits/relocated.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-DLIBRARY", "-o", "library.so"]).arg(source);
    assert!(compiler.args(["-Wl,-z,relro"]).current_dir(&folder).status().unwrap().success());
    for habit in ["constant", "changed"] {
        let (alone, _) = finish_habit(folder.path(), &format!("./program {habit}"));
        for means in ["userfaultfd", "userfaultfd-copies", "guards"] {
            let command = format!("UZSWAP_MEANS={means} {RUN} ./program {habit}");
            let (out, told) = finish_habit(folder.path(), &command);
            assert_eq!(out, alone, "{means}, {habit}: {told}");
            assert!(told.contains("memory of 1 processes"), "{means}, {habit}: {told}");
            // Memory that may only be read stays if userfaultfd is denied. (So does memory of a
            // library that the program loads later, but it may be loaded after the take-over.)
            let stays = told.contains("this memory is its own copy of a file");
            assert!(habit == "changed" || stays == (means == "guards"), "{means}, {habit}: {told}");
        }
    }
}
