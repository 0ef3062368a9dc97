//! Chores of this repository. `cargo run -p xtask -- docs` writes the generated documents. `tidy`
//! checks that they are fresh and that the house rules hold; `words` lists sentences that break
//! STYLE.md. `install` installs the C library and, on request, everything else. `dist` makes
//! packages, `tests` runs all tests, `vm` runs them in virtual machines, `roots` with other C
//! libraries, and `cross` builds for aarch64.

#![forbid(unsafe_code)]

mod cross;
mod dist;
mod docs;
mod header;
mod install;
mod lanes;
mod manual;
mod portable;
mod release;
mod results;
mod roots;
mod tidy;
mod vm;
mod wheel;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The error is a message for a person.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The folder of cargo's builds.
fn target(root: &Path) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root.join("target"))
}

/// Runs a program and returns its output. A failing program is an error.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("{command:?}: {}: {said}", output.status).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The files with an extension below a folder, relative to it.
fn files(root: &Path, wanted: &str) -> Vec<PathBuf> {
    let mut folders = vec![root.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let is_ours = name != "target" && !name.as_encoded_bytes().starts_with(b".");
            if path.is_dir() && is_ours {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == wanted) {
                files.push(path.strip_prefix(root).unwrap_or(&path).to_owned());
            }
        }
    }
    files.sort();
    files
}

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."));
    match std::env::args().nth(1).as_deref() {
        Some("docs") => docs::write(root),
        Some("tidy") => tidy::check(root),
        Some("words") => tidy::words(root, std::env::args().skip(2)),
        Some("tests") => lanes::run(root, std::env::args().skip(2)),
        Some("vm") => vm::run(root, std::env::args().skip(2)),
        Some("roots") => roots::run(root, std::env::args().skip(2)),
        Some("cross") => cross::run(root, std::env::args().skip(2)),
        Some("dist") => dist::run(root, std::env::args().skip(2)),
        Some("install") => install::run(root, std::env::args().skip(2)),
        _ => {
            eprintln!(
                "usage: cargo run -p xtask -- docs|tidy|words|tests|vm|roots|cross|dist|install [--prefix DIR] [--destdir DIR]"
            );
            ExitCode::from(2)
        }
    }
}
