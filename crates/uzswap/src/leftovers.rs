//! Undoing what a session changed, step by step from its written state; and finding sessions whose
//! owner was killed.

use crate::error::Failure;
use crate::session::{ProcessId, SESSIONS, State, mount_of, restore_zswap};
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use uzswap_block::control;
use uzswap_sys::cgroup::{Group, Hierarchy};
use uzswap_sys::{fuse, loopdev, process, swap};

/// How long a process gets to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Undoes everything in `state` and removes `folder`; what could not be undone. Steps that are done
/// already are no trouble, so it can be repeated. While a living daemon holds pages that the kernel
/// cannot read back now, nothing under them is touched.
pub fn undo(folder: &Path, state: &State) -> Vec<String> {
    let mut troubles = Vec::new();
    let mut step = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            troubles.push(format!("{what}: {error}"));
        }
    };
    let group = state.cgroup.as_ref().zip(Hierarchy::find()).map(|(name, h)| h.group(name));
    if let Some(group) = &group {
        kill_all(group);
    }
    let mount = mount_of(folder);
    if let Some(device) = &state.device {
        let ours = loopdev::backing_file(device).is_some_and(|file| file.starts_with(&mount));
        if ours && is_swapped_to(device) {
            let off = swap_off(device);
            let kept = off.is_err() && state.daemon.is_some_and(|daemon| daemon.is_alive());
            step(&format!("switch swapping to {} off", device.display()), off);
            if kept {
                return troubles;
            }
        }
        if ours && loopdev::backing_file(device).is_some() {
            let gone = loopdev::detach(device).or_else(|error| match error.raw_os_error() {
                Some(libc::ENXIO) => Ok(()), // It let go by itself.
                _ => Err(error),
            });
            step(&format!("detach {}", device.display()), gone);
        }
    }
    if let Some(daemon) = state.daemon.filter(|daemon| daemon.pid as u32 != std::process::id()) {
        step("end the daemon", end(daemon));
    }
    for path in [mount.join(control::DISK), mount.clone()] {
        if fuse::is_mounted(&path) {
            step(&format!("unmount {}", path.display()), fuse::unmount(&path));
        }
    }
    if let Some(group) = &group {
        step(&format!("remove {}", group.path().display()), remove(group));
    }
    if state.zswap_was_on {
        step("switch the kernel's zswap on again", restore_zswap());
    }
    if troubles.is_empty() {
        // Kept otherwise, so that the next one tries again.
        let _ = fs::remove_dir(&mount);
        let _ = fs::remove_dir_all(folder);
    }
    troubles
}

/// Cleans up after sessions whose owner is gone: what was done, and what could not be.
pub fn clean_up() -> (Vec<String>, Vec<String>) {
    let folders = fs::read_dir(SESSIONS).into_iter().flatten().flatten().map(|entry| entry.path());
    let (mut cleaned, mut left) = (Vec::new(), Vec::new());
    for folder in folders {
        let Ok(state) = State::read(&folder) else { continue };
        if state.owner.is_some_and(|owner| owner.is_alive()) {
            continue;
        }
        if state.daemon.is_some_and(|daemon| daemon.is_alive()) && wait_until_gone(&folder) {
            continue; // The daemon, whose owner just died, has cleaned up.
        }
        let troubles = undo(&folder, &state);
        match troubles.is_empty() {
            true => cleaned.push(format!("cleaned up after a killed run ({})", folder.display())),
            false => left.push(format!("{}: {}", folder.display(), troubles.join("; "))),
        }
    }
    (cleaned, left)
}

/// Cleans up before something new is started, and says so.
pub fn clean_up_first() {
    let (cleaned, left) = clean_up();
    for line in cleaned.iter().chain(&left) {
        eprintln!("uzswap: {line}");
    }
}

/// `uzswap clean`.
pub fn clean() -> Result<(), Failure> {
    let (cleaned, left) = clean_up();
    cleaned.iter().for_each(|line| println!("{line}"));
    if cleaned.is_empty() && left.is_empty() {
        println!("nothing to clean up");
    }
    match left.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(left.join("; "))),
    }
}

fn wait_until_gone(folder: &Path) -> bool {
    wait_for(Duration::from_secs(3), || !folder.exists())
}

fn wait_for(patience: Duration, done: impl Fn() -> bool) -> bool {
    let begin = Instant::now();
    while !done() {
        if begin.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

fn kill_all(group: &Group) {
    wait_for(PATIENCE, || {
        group.signal(libc::SIGKILL);
        group.processes().is_empty()
    });
}

/// Whether pages may be on the session's device.
pub fn is_in_use(state: &State) -> bool {
    state.device.as_deref().is_some_and(is_swapped_to)
}

fn is_swapped_to(device: &Path) -> bool {
    swap::areas().is_ok_and(|areas| areas.iter().any(|area| area.path == device))
}

fn swap_off(device: &Path) -> io::Result<()> {
    loop {
        match swap::off(device) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn end(daemon: ProcessId) -> io::Result<()> {
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        if !daemon.is_alive() {
            return Ok(());
        }
        let _ = process::kill(daemon.pid, signal);
        if wait_for(PATIENCE, || !daemon.is_alive()) {
            return Ok(());
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Removes a group; the kernel may take a moment to forget its last process.
fn remove(group: &Group) -> io::Result<()> {
    let mut last = Ok(());
    for _ in 0..100 {
        last = group.remove();
        if last.is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    last
}

/// A line on a session's folder.
pub fn describe(folder: &Path) -> String {
    let alive = State::read(folder).is_ok_and(|s| s.owner.is_some_and(|owner| owner.is_alive()));
    let what = if alive { "is running" } else { "was killed; the next run or serve cleans up" };
    format!("{}: {what}", folder.display())
}
