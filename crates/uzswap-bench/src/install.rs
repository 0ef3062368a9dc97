//! Installs missing programs that benchmarks need.

use crate::error::{Context, Failure};
use std::path::Path;
use std::process::{Command, Stdio};

/// True if a program is in the PATH.
pub fn is_there(program: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|folder| folder.join(program).exists())
}

/// Runs a script in a folder. Shows its output only if it fails.
pub fn shell(script: &str, folder: &Path) -> Result<(), Failure> {
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(folder).stdin(Stdio::null());
    command.env("DEBIAN_FRONTEND", "noninteractive");
    let output = command.output().context(script)?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it failed");
    Err(Failure::new(format!("{script}: {last}")))
}

/// Installs Debian packages, unless a shell command succeeds.
pub fn require(is_there: &str, names: &[&str]) -> Result<(), Failure> {
    match shell(is_there, Path::new("/")) {
        Ok(()) => Ok(()),
        Err(_) => packages(names),
    }
}

pub fn packages(names: &[&str]) -> Result<(), Failure> {
    let names = names.join(" ");
    eprintln!("uzswap-bench: installing {names}");
    let install =
        format!("apt-get -qq update && apt-get -qq install -y --no-install-recommends {names}");
    shell(&install, Path::new("/"))
        .map_err(|error| Failure::new(format!("install {names} by hand ({error})")))
}
