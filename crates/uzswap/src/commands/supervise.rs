//! A running command, by the swap device or in-process: its program file, the signals for it, its
//! exit status and its report.

use crate::error::Failure;
use crate::stdio::say;
use serde::Serialize;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Metadata};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;
use uzswap_sys::process;

/// The interval at which figures are read, and the group is checked for trouble.
pub const TICK: Duration = Duration::from_millis(200);

/// The exit status as a shell gives it: 128 plus the signal's number for a process that a signal
/// ended.
pub fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => crate::EXIT_FAILURE,
    }
}

/// The path of a command. Checks that it can be run, before anything is set up.
pub fn find_command(name: &OsStr) -> Result<PathBuf, Failure> {
    let shown = name.display();
    let paths: Vec<PathBuf> = if name.as_encoded_bytes().contains(&b'/') {
        vec![PathBuf::from(name)]
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
        std::env::split_paths(&folders).map(|folder| folder.join(name)).collect()
    };
    let there = paths.into_iter().filter_map(|path| Some((path.metadata().ok()?, path)));
    let there: Vec<_> = there.collect();
    let is_absent = there.is_empty();
    let may_run = |file: &Metadata| file.is_file() && file.permissions().mode() & 0o111 != 0;
    if let Some((_, path)) = there.into_iter().find(|(file, _)| may_run(file)) {
        return Ok(path);
    }
    Err(match is_absent {
        true => Failure::command(format!("{shown}: no such command; check its name and PATH"), 127),
        false => Failure::command(
            format!("{shown}: cannot be run; it is a folder or not executable (chmod +x)"),
            126,
        ),
    })
}

/// How many times the user has asked for the command's end.
#[derive(Default)]
pub struct Interrupts(u32);

impl Interrupts {
    /// Passes a signal on to the command, unless it came from the terminal, which signals the
    /// command itself. `true` at the second request to end: the caller then kills all processes.
    pub fn pass_on(&mut self, pid: i32, signal: i32, from_terminal: bool) -> bool {
        self.0 += u32::from(signal == libc::SIGINT || signal == libc::SIGTERM);
        if self.0 > 1 {
            say!("uzswap: interrupted again: killing all processes of the command");
            return true;
        }
        if !from_terminal {
            // An error means that the command has just ended.
            let _ = process::kill(pid, signal);
        }
        false
    }
}

/// Writes the report of a run to a file, as JSON.
pub fn write_report(path: &Path, report: &impl Serialize) -> Result<(), Failure> {
    let json = serde_json::to_vec_pretty(report).map_err(|e| Failure::new(e.to_string()))?;
    fs::write(path, json).map_err(|error| {
        Failure::new(format!(
            "cannot write {}: {error}; name a file that you may write",
            path.display()
        ))
    })
}
