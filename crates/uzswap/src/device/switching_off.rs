//! Switching areas off, by a process of its own: the kernel ends such a process first when memory
//! runs out.

use crate::device::processes::OWN_PROGRAM;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uzswap_sys::{cpu, process, swap};

/// How often to ask again while another process switches an area off.
const ANOTHER_IS_AT_IT: Duration = Duration::from_millis(50);

/// Errors: the swapped pages would not fit in memory.
pub fn check_room(areas: &[swap::Area]) -> io::Result<()> {
    let used: u64 = areas.iter().map(|area| area.used).sum();
    let available = cpu::memory_info()?.available;
    if used <= available {
        return Ok(());
    }
    let (used, available) = (crate::size::show(used), crate::size::show(available));
    Err(io::Error::other(format!(
        "cannot switch swapping off: {used} are swapped out and {available} of memory are free; \
         free memory and try again"
    )))
}

/// Has the kernel read everything back and forget the areas, the last first.
pub fn all(on: &[swap::Area]) -> io::Result<()> {
    if on.is_empty() {
        return Ok(());
    }
    let mut child = start(on)?;
    outcome(on, child.wait()?.success())
}

/// Starts that process.
pub fn start(areas: &[swap::Area]) -> io::Result<Child> {
    Command::new(OWN_PROGRAM)
        .arg("switch-off")
        .args(areas.iter().rev().map(|area| &area.path))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// The outcome.
pub fn outcome(areas: &[swap::Area], is_done: bool) -> io::Result<()> {
    if is_done {
        return Ok(());
    }
    let devices: Vec<_> = areas.iter().map(|area| area.path.display().to_string()).collect();
    Err(io::Error::other(format!(
        "cannot switch swapping to {} off: memory ran out; free memory and try again",
        devices.join(", ")
    )))
}

/// `uzswap switch-off`: the process for it.
pub fn run(devices: &[PathBuf]) -> io::Result<()> {
    // Marked as its parent is, it would find less memory for the pages that it reads back. An
    // error: the parent was not permitted to mark itself.
    let _ = process::set_io_flusher(false);
    devices.iter().try_for_each(|device| one(device))
}

/// Until the kernel does not list the area any more. It returns EINVAL for an area that is off, and
/// for one that another process is switching off. That one is still read back, and is on again if
/// the other process is ended.
fn one(device: &Path) -> io::Result<()> {
    loop {
        match swap::off(device) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                if !swap::areas()?.iter().any(|area| area.path == device) {
                    return Ok(());
                }
                std::thread::sleep(ANOTHER_IS_AT_IT);
            }
            other => return other,
        }
    }
}
