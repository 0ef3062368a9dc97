//! The list of changes to the machine, each written down before it is made, and their undoing.
//!
//! A machine has one swap device, so there is one such list, in [`FOLDER`]. The holder of the lock
//! beside the list is responsible for it: the keeper, and its daemon, which inherits the lock. If
//! there is a list and the lock is free, both were killed, and the next keeper undoes the changes.

use crate::device::folder::{self, FOLDER, Lock, disk, mount};
use crate::device::group_change::GroupChange;
use crate::device::processes::ProcessId;
use crate::device::switching_off;
use crate::device::wire::RunInfo;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use uzswap_block::{Transport, TransportKind, serving};
use uzswap_sys::{fuse, swap};

const STATE: &str = "state.json";

/// The kernel's zswap would take pages before they reach any device.
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// True if the kernel's zswap takes pages on this machine.
pub fn zswap_is_on() -> bool {
    fs::read_to_string(ZSWAP).is_ok_and(|value| value.trim() == "Y")
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaChange {
    pub device: PathBuf,
    /// The part of the disk that the device is over, bytes.
    pub part: Range<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunChange {
    /// The process.
    #[serde(flatten)]
    pub run: RunInfo,
    /// The group of the run's command.
    pub place: Option<GroupChange>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerState {
    pub keeper: Option<ProcessId>,
    pub daemon: Option<ProcessId>,
    /// The transport of requests to the daemon.
    pub transport: String,
    /// True if another daemon can continue after this one is killed.
    pub outlives_daemon: bool,
    /// The areas, in the order in which the kernel fills them. An area that was switched off by
    /// hand stays in the list while it has a device.
    pub areas: Vec<AreaChange>,
    /// The process that makes a further area.
    #[serde(default)]
    pub area_maker: Option<ProcessId>,
    /// True if the kernel's zswap was on.
    pub zswap_was_on: bool,
    /// The keeper's own group, if it has made one.
    pub group: Option<GroupChange>,
    /// True for `serve`, which runs until it gets a signal to end. A keeper of runs ends with the
    /// last run.
    pub is_serving: bool,
    pub runs: Vec<RunChange>,
}

/// A step of the undoing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// Stops the undoing if pages may be on an area.
    Look,
    /// Removes the devices.
    Detach,
    /// Ends the daemon, and stops the undoing if the daemon does not end.
    EndDaemon,
    /// Removes mounts and groups, and restores settings.
    Restore,
    /// Removes the folder, unless an earlier step failed.
    Remove,
}

/// The steps in their order. After the second check an area cannot be switched on again, because
/// the devices are gone.
pub const UNDO: [Undo; 6] =
    [Undo::Look, Undo::Detach, Undo::Look, Undo::EndDaemon, Undo::Restore, Undo::Remove];

/// Answers requests with errors, until it is dropped.
pub type StandIn = Box<dyn Transport>;

impl LedgerState {
    /// Reads the list. If there is none, returns the default.
    pub fn read() -> io::Result<Self> {
        let path = Path::new(FOLDER).join(STATE);
        let mut file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other?,
        };
        let metadata = file.metadata()?;
        folder::check_owner(&metadata, &path)?;
        if metadata.mode() & WRITTEN_BY_OTHERS != 0 {
            return Err(io::Error::other("users other than its owner may write it"));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// True if a keeper lives, or a daemon that will start one.
    pub fn is_attended(&self) -> bool {
        [self.keeper, self.daemon].iter().flatten().any(ProcessId::is_alive)
    }

    /// Replaces the list atomically.
    pub fn write(&self) -> io::Result<()> {
        let fresh = Path::new(FOLDER).join("state.new");
        folder::write(&fresh, &serde_json::to_vec(self)?)?;
        fs::rename(fresh, Path::new(FOLDER).join(STATE))
    }

    /// The run that limits the group in this folder.
    pub fn run_in(&self, folder: &Path) -> Option<&RunChange> {
        self.runs.iter().find(|run| run.place.as_ref().is_some_and(|place| place.folder == folder))
    }

    /// The devices of the areas.
    pub fn devices(&self) -> impl Iterator<Item = &PathBuf> {
        self.areas.iter().map(|area| &area.device)
    }

    fn transport(&self) -> TransportKind {
        self.transport.parse().unwrap_or(TransportKind::Fuse)
    }

    /// Our areas that the kernel lists, with the bytes on each. The kernel lists an area until its
    /// last page is read back. Fails if the list cannot be read. After a failure, any area may be
    /// on.
    pub fn areas_on(&self) -> io::Result<Vec<swap::Area>> {
        let is_ours = |area: &swap::Area| {
            self.areas.iter().any(|ours| ours.device == area.path)
                && serving::is_ours(self.transport(), &area.path, Path::new(FOLDER))
        };
        Ok(swap::areas()?.into_iter().filter(is_ours).collect())
    }

    /// The parts of the disk with a device: the kernel may have an area on each, now or after a
    /// `swapon` by hand. Forgets areas whose device is gone, but none that the kernel lists: a
    /// device may not be recognized as ours after the file below it was unmounted.
    pub fn taken_parts(&mut self) -> Vec<Range<u64>> {
        let (transport, folder) = (self.transport(), Path::new(FOLDER));
        let listed = swap::areas();
        let is_listed = |device: &PathBuf| {
            listed.as_ref().map_or(true, |areas| areas.iter().any(|area| area.path == *device))
        };
        self.areas.retain(|area| {
            is_listed(&area.device) || serving::is_ours(transport, &area.device, folder)
        });
        self.areas.iter().map(|area| area.part.clone()).collect()
    }

    /// True if pages may be on an area, or on an area that is being made. Then no process of the
    /// cache may be ended and nothing removed.
    pub fn is_in_use(&self) -> bool {
        let is_made = self.area_maker.is_some_and(|maker| !maker.is_over());
        is_made || self.areas_on().map_or(true, |areas| !areas.is_empty())
    }

    /// Switches the kernel's zswap off, if it is on.
    pub fn switch_zswap_off(&mut self) -> io::Result<()> {
        if !zswap_is_on() {
            return Ok(());
        }
        self.zswap_was_on = true;
        self.write()?;
        fs::write(ZSWAP, "N")
    }

    /// Has the kernel read back all readable pages of a killed daemon, and forget the areas. Ends
    /// the commands of killed runs. Returns the failures.
    fn empty(&mut self) -> Vec<String> {
        let mut troubles = Vec::new();
        // First of all: a thread that waits for a page cannot end before it is answered. The
        // stand-in is dropped when the areas are off, and no thread waits any more.
        let _stand_in = self.stand_in().unwrap_or_else(|error| {
            troubles.push(error.to_string());
            None
        });
        for run in std::mem::take(&mut self.runs) {
            if let Some(place) = &run.place {
                note(&mut troubles, "end a command", place.end());
            }
        }
        note(&mut troubles, "", self.areas_on().and_then(|on| switching_off::all(&on)));
        troubles
    }

    /// Undoes everything, and removes the folder. Returns the changes that could not be undone.
    /// Undoing may be repeated, since steps that are already done cause no failure. While the
    /// kernel lists an area, nothing under it is touched; not even `end_daemon` is called.
    pub fn undo(&mut self, end_daemon: Option<&mut dyn FnMut() -> io::Result<()>>) -> Vec<String> {
        let mut troubles = Vec::new();
        let mut end = end_daemon.into_iter();
        for step in UNDO {
            match step {
                Undo::Look if self.is_in_use() => {
                    return vec!["the kernel still reads back the swapped pages".into()];
                }
                Undo::EndDaemon => {
                    if let Some(Err(error)) = end.next().map(|end| end()) {
                        troubles.push(format!("end the daemon: {error}"));
                        return troubles;
                    }
                }
                // After a failure the folder stays, so that the next keeper tries again.
                Undo::Remove if !troubles.is_empty() => {}
                Undo::Look => {}
                Undo::Detach => self.detach(&mut troubles),
                Undo::Restore => self.restore(&mut troubles),
                Undo::Remove => {
                    // An error means that the folder is not empty, or gone.
                    let _ = fs::remove_dir(mount());
                    let _ = folder::remove(Path::new(FOLDER));
                }
            }
        }
        troubles
    }

    fn detach(&self, troubles: &mut Vec<String>) {
        let transport = self.transport();
        for device in self.devices() {
            if serving::is_ours(transport, device, Path::new(FOLDER)) {
                let what = format!("detach {}", device.display());
                note(troubles, &what, serving::detach(transport, device));
            }
        }
    }

    fn restore(&self, troubles: &mut Vec<String>) {
        for path in [disk(), mount()] {
            if fuse::is_mounted(&path) {
                note(troubles, &format!("unmount {}", path.display()), fuse::unmount(&path));
            }
        }
        if self.zswap_was_on {
            note(troubles, "switch the kernel's zswap on again", fs::write(ZSWAP, "Y"));
        }
        if let Some(place) = &self.group {
            note(troubles, "leave the daemon's group", place.leave());
        }
    }

    /// Starts a stand-in for a dead daemon whose devices wait for another daemon. A thread that
    /// waits for a page then gets an error, and the areas can be switched off.
    pub fn stand_in(&self) -> io::Result<Option<StandIn>> {
        let devices: Vec<_> = self.areas_on()?.into_iter().map(|area| area.path).collect();
        serving::stand_in(self.transport(), &devices).map_err(|error| {
            io::Error::other(format!("answer for the devices of a dead daemon: {error}"))
        })
    }
}

const WRITTEN_BY_OTHERS: u32 = 0o022;

fn note(troubles: &mut Vec<String>, what: &str, result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if what.is_empty() => troubles.push(error.to_string()),
        Err(error) => troubles.push(format!("{what}: {error}")),
    }
}

/// The outcome of [`clean_up`].
#[derive(Debug, Default)]
pub struct CleanedUp {
    /// The changes that were undone, in words.
    pub done: Vec<String>,
    /// The changes that could not be undone.
    pub left: Vec<String>,
    /// True if the kernel still lists an area of ours.
    pub is_in_use: bool,
}

/// Undoes the changes of a keeper and a daemon that were killed. The caller has the lock.
pub fn clean_up(_lock: &Lock) -> CleanedUp {
    let mut state = match LedgerState::read() {
        Ok(state) if state == LedgerState::default() => return CleanedUp::default(),
        Ok(state) => state,
        Err(error) => {
            let left = vec![format!(
                "{FOLDER}/{STATE}: {error}; undo the changes by hand, and remove the file"
            )];
            return CleanedUp { left, ..CleanedUp::default() };
        }
    };
    let runs: Vec<_> = state.runs.iter().map(|run| run.run.pid.to_string()).collect();
    let mut left = state.empty();
    left.extend(state.undo(None));
    let of = if runs.is_empty() { String::new() } else { format!(" ({})", runs.join(", ")) };
    let done = vec![format!("cleaned up after a killed run{of}")];
    let is_in_use = state.is_in_use();
    CleanedUp { done: if left.is_empty() { done } else { Vec::new() }, left, is_in_use }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_comes_back_as_it_was_written() {
        let place = GroupChange {
            folder: "/sys/fs/cgroup/a/uzswap-1".into(),
            is_v2: true,
            around: None,
            moved: Some(("/sys/fs/cgroup/a/rest".into(), "/sys/fs/cgroup/a".into())),
            borrowed: Some(vec![("/sys/fs/cgroup/b/memory.high".into(), "max".into())]),
        };
        let run = RunInfo { pid: 1, command: "make".into(), memory: 1 << 20 };
        let state = LedgerState {
            keeper: Some(ProcessId { pid: 2, started: 3 }),
            transport: "fuse".into(),
            areas: vec![AreaChange { device: "/dev/loop7".into(), part: 0..1 << 28 }],
            runs: vec![RunChange { run, place: Some(place) }],
            ..LedgerState::default()
        };
        let text = serde_json::to_vec(&state).unwrap();
        assert_eq!(serde_json::from_slice::<LedgerState>(&text).unwrap(), state);
    }
}
