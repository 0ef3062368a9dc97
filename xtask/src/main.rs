//! Chores of this repository: `cargo run -p xtask -- docs` writes the generated documents, `tidy`
//! checks that they are fresh and that the house rules hold, `install` installs the C library and,
//! where it is asked for, all the rest, `dist` makes packages, `vm` runs tests in virtual machines.

#![forbid(unsafe_code)]

mod dist;
mod docs;
mod header;
mod install;
mod manual;
mod tidy;
mod vm;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What fails ends with a message for a person.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The folder that everything is built in.
fn target(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root.join("target"))
}

/// What a program prints that ends well.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("{command:?}: {}: {said}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    match std::env::args().nth(1).as_deref() {
        Some("docs") => docs::write(root),
        Some("tidy") => tidy::check(root),
        Some("vm") => vm::run(root, std::env::args().skip(2)),
        Some("dist") => dist::run(root, std::env::args().skip(2)),
        Some("install") => install::run(root, std::env::args().skip(2)),
        _ => {
            eprintln!(
                "usage: cargo run -p xtask -- docs|tidy|vm|dist|install [--prefix DIR] [--destdir DIR]"
            );
            ExitCode::from(2)
        }
    }
}
