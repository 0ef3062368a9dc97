//! Switches areas off in a separate process, because the kernel first ends a process that is in
//! swapoff when memory runs out.

use crate::device::processes::OWN_PROGRAM;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uzswap_sys::{cpu, process, swap};

/// The pause before the next try while another process switches the area off.
const ANOTHER_IS_AT_IT: Duration = Duration::from_millis(50);

/// Fails if the swapped pages would not fit in memory.
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

/// Has the kernel read everything back and forget the areas, the last area first.
pub fn all(on: &[swap::Area]) -> io::Result<()> {
    if on.is_empty() {
        return Ok(());
    }
    let is_done = start(on)?.wait()?.success();
    if is_done { Ok(()) } else { Err(failed(on)) }
}

/// Starts a process that switches the areas off.
pub fn start(areas: &[swap::Area]) -> io::Result<Child> {
    Command::new(OWN_PROGRAM)
        .arg("switch-off")
        .args(areas.iter().rev().map(|area| &area.path))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// The error if that process fails.
pub fn failed(areas: &[swap::Area]) -> io::Error {
    let devices: Vec<_> = areas.iter().map(|area| area.path.display().to_string()).collect();
    io::Error::other(format!(
        "cannot switch swapping to {} off: memory ran out; free memory and try again",
        devices.join(", ")
    ))
}

/// `uzswap switch-off`: that process.
pub fn run(devices: &[PathBuf]) -> io::Result<()> {
    // With its parent's mark (PR_SET_IO_FLUSHER), this process would find less memory for the pages
    // that it reads back. An error means that the parent lacks the mark, for want of permission.
    let _ = process::set_io_flusher(false);
    devices.iter().try_for_each(|device| one(device))
}

fn one(device: &Path) -> io::Result<()> {
    let is_listed = || Ok(swap::areas()?.iter().any(|area| area.path == device));
    while let Some(pause) = ask_again(swap::off(device), is_listed)? {
        std::thread::sleep(pause);
    }
    Ok(())
}

/// When to call swapoff again after its answer; `None` if the area is off. The kernel answers
/// EINVAL for an area that is off, and for one that another process is switching off. The latter
/// still has pages, and is on again if the other process is killed. So the kernel's list decides.
pub fn ask_again(
    answer: io::Result<()>,
    is_listed: impl FnOnce() -> io::Result<bool>,
) -> io::Result<Option<Duration>> {
    match answer {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Some(Duration::ZERO)),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            Ok(is_listed()?.then_some(ANOTHER_IS_AT_IT))
        }
        other => other.map(|()| None),
    }
}
