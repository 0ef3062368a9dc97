//! Programs in `habits/`: compiled into a folder of their own, and run there.

use crate::{OLD_LIBRARIES, as_nobody, seconds};
use std::path::Path;
use std::process::{Command, Output};

/// A folder with one of the programs, compiled with these options.
pub fn habit_folder(program: &str, options: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("habits").join(program);
    let mut compiler = Command::new("cc");
    compiler.arg("-O1").args(options).args(["-pthread", "-o", "program"]).arg(source);
    compiler.args(OLD_LIBRARIES).current_dir(&folder);
    assert!(compiler.status().expect("a C compiler").success());
    folder
}

/// Runs a shell command as nobody, if this is root. Kills it if it hangs.
pub fn run_habit(folder: &Path, command: &str) -> Output {
    let mut run = as_nobody(folder);
    run.args(["timeout", "--signal=KILL", &seconds(120), "sh", "-c", command]);
    run.current_dir(folder).output().expect("setpriv, timeout and a shell")
}

/// As [`run_habit`]. Returns the output, which must be that of a success, and the messages.
pub fn finish_habit(folder: &Path, command: &str) -> (String, String) {
    let Output { status, stdout, stderr } = run_habit(folder, command);
    let [out, told] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(status.success(), "{command}: {status}: {out}{told}");
    (out, told)
}
