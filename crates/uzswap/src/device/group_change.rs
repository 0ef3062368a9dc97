//! A group of processes, the changes that made it, and their undoing.

use crate::device::processes::{self, PATIENCE};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;
use uzswap_sys::cgroup::{Group, Version};

/// A group of processes, and the changes that made it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupChange {
    pub folder: PathBuf,
    /// True if the group is of cgroup version 2.
    pub is_v2: bool,
    /// The parent group, if it is removed together with this group.
    pub around: Option<PathBuf>,
    /// The group that its former neighbours were moved to, and the group they came from.
    pub moved: Option<(PathBuf, PathBuf)>,
    /// The attributes, before the change, of a group that is not ours.
    #[serde(default)]
    pub borrowed: Option<Vec<(PathBuf, String)>>,
}

impl GroupChange {
    pub fn group(&self) -> Group {
        Group::at(if self.is_v2 { Version::V2 } else { Version::V1 }, self.folder.clone())
    }

    /// Kills all processes in the group, if the group is ours.
    pub fn kill(&self) {
        if self.borrowed.is_none() {
            self.group().kill();
        }
    }

    /// Kills all processes of the group and removes the group. A group that is not ours gets its
    /// attributes back.
    pub fn end(&self) -> io::Result<()> {
        let group = self.group();
        if let Some(attributes) = &self.borrowed {
            // A group that is gone needs no attributes back.
            let mut there = attributes.iter().filter(|(path, _)| path.exists());
            return there.try_for_each(|(path, value)| {
                fs::write(path, value)
                    .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
            });
        }
        let is_empty = processes::wait_for(PATIENCE, || {
            group.kill();
            group.processes().is_empty()
        });
        if !is_empty {
            let what = format!("processes in {} do not end", group.path().display());
            return Err(io::Error::other(what));
        }
        self.remove()
    }

    /// Removes the group and the groups that were made around it. The kernel may need a moment to
    /// forget a group's last process.
    pub fn remove(&self) -> io::Result<()> {
        let groups = std::iter::once(self.group());
        let around = self.around.iter().map(|path| Group::at(Version::V2, path.clone()));
        for group in groups.chain(around) {
            let mut last = Ok(());
            processes::wait_for(Duration::from_secs(2), || {
                last = group.remove();
                last.is_ok()
            });
            last.map_err(|error| {
                io::Error::other(format!("remove {}: {error}", group.path().display()))
            })?;
        }
        if let Some((to, from)) = &self.moved {
            let (to, from) =
                (Group::at(Version::V2, to.clone()), Group::at(Version::V2, from.clone()));
            from.keep_memory_back()?;
            for pid in to.processes() {
                // An error means that the process has just ended.
                let _ = from.enter(pid);
            }
            to.remove()?;
        }
        Ok(())
    }

    /// Moves this process and its children out of the group, and removes the group.
    pub fn leave(&self) -> io::Result<()> {
        let group = self.group();
        if let Some(parent) = group.parent() {
            parent.enter(std::process::id() as i32)?;
            for pid in group.processes() {
                // An error means that the process has just ended.
                let _ = parent.enter(pid);
            }
        }
        self.remove()
    }
}
