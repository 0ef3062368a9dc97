//! Suspending processes of a memory group: the freezer of cgroup version 2.
//!
//! A frozen process runs no code of its own until it is resumed. Otherwise it is like any process:
//! its parent gets no signal, and SIGKILL ends it. A child that the process was just starting is
//! born frozen.

use crate::cgroup::{Group, Version, listed, own_path};
use std::fs;
use std::io;
use std::path::PathBuf;

/// A frozen group that processes are moved to, and back from.
#[derive(Debug)]
pub struct Freezer {
    path: PathBuf,
    /// The group that the processes come from, as a folder and by the kernel's name.
    home: PathBuf,
    home_name: String,
}

impl Freezer {
    /// Makes a freezer for those processes of `group` that were not moved to another group. The
    /// freezer is removed with the group. Errors: `NotFound` where the unified hierarchy is not
    /// mounted.
    pub fn create(group: &Group) -> io::Result<Self> {
        let path = group.freezer().ok_or(io::ErrorKind::NotFound)?;
        let (home, home_name) = group.unified_home().ok_or(io::ErrorKind::NotFound)?;
        fs::create_dir(&path)?;
        let freezer = Self { path, home, home_name };
        fs::write(freezer.path.join("cgroup.freeze"), "1")?;
        Ok(freezer)
    }

    /// Suspended processes.
    pub fn processes(&self) -> Vec<i32> {
        listed(&self.path)
    }

    /// Suspends a process. Errors: `NotFound` if the process has ended, `InvalidInput` if the
    /// process is in a group of its own choice.
    pub fn suspend(&self, pid: i32) -> io::Result<()> {
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        if own_path(&groups, Version::V2) != Some(&self.home_name) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
    }

    /// Resumes a process. Errors: `NotFound` when it is gone.
    pub fn resume(&self, pid: i32) -> io::Result<()> {
        fs::write(self.home.join("cgroup.procs"), pid.to_string())
    }

    /// Resumes all processes, now and in future.
    pub fn thaw(&self) {
        // After an error the loop resumes the processes one by one.
        let _ = fs::write(self.path.join("cgroup.freeze"), "0");
        for pid in self.processes() {
            // An error means that the process is gone.
            let _ = self.resume(pid);
        }
    }
}
