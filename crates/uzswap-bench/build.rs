//! Tells the program the commit that it was built from, for reports.

use std::process::Command;

fn main() {
    // A second work tree has its own file, elsewhere. Cargo runs this again each time if the file
    // does not exist.
    let log = parsed(&["--git-path", "logs/HEAD"]).unwrap_or_else(|| "build.rs".into());
    println!("cargo:rerun-if-changed={log}");
    let commit = parsed(&["--short=10", "HEAD"]).unwrap_or_else(|| "unknown commit".into());
    println!("cargo:rustc-env=UZSWAP_COMMIT={commit}");
}

/// The answer of `git rev-parse`; `None` outside of a repository.
fn parsed(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("rev-parse").args(arguments).output().ok()?;
    let text = output.status.success().then_some(output.stdout)?;
    Some(String::from_utf8(text).ok()?.trim().to_owned())
}
