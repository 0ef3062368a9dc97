//! Memory cgroups, of either version of the interface.

use crate::process;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Which interface the machine's memory controller is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy of its own.
    V1,
    /// The unified hierarchy.
    V2,
}

/// Where the memory controller is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its interface.
    pub version: Version,
    /// Where it is mounted.
    pub root: PathBuf,
}

impl Hierarchy {
    /// Finds it; `None` when this machine or container has no memory controller.
    pub fn find() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let controllers =
            |root: &Path| fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
        Self::among(&mounts, |root| controllers(root).split_whitespace().any(|c| c == "memory"))
    }

    fn among(mounts: &str, has_memory: impl Fn(&Path) -> bool) -> Option<Self> {
        mounted(mounts).find_map(|(root, kind, options)| match kind {
            "cgroup" if options.split(',').any(|option| option == "memory") => {
                Some(Self { version: Version::V1, root })
            }
            "cgroup2" if has_memory(&root) => Some(Self { version: Version::V2, root }),
            _ => None,
        })
    }

    /// Makes a group directly under the root. Errors: `PermissionDenied` where the hierarchy is
    /// mounted read-only, as in most containers.
    pub fn create(&self, name: &str) -> io::Result<Group> {
        if self.version == Version::V2 {
            // Children have the controller only if the parent passes it on.
            fs::write(self.root.join("cgroup.subtree_control"), "+memory")?;
        }
        let path = self.root.join(name);
        fs::create_dir(&path)?;
        Ok(Group { version: self.version, path })
    }

    /// The group that this process is in.
    pub fn own(&self) -> Option<Group> {
        let text = fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = own_path(&text, self.version)?;
        Some(Group { version: self.version, path: self.root.join(path.trim_start_matches('/')) })
    }

    /// A group that exists already.
    pub fn group(&self, name: &str) -> Group {
        Group { version: self.version, path: self.root.join(name) }
    }
}

/// One group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    version: Version,
    path: PathBuf,
}

/// What a group's processes did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in memory now.
    pub current: u64,
    /// Most bytes in memory at any time.
    pub peak: u64,
    /// Major faults: those that waited for a device.
    pub major_faults: u64,
    /// Processes that the kernel ended because the limit could not be held.
    pub oom_kills: u64,
}

impl Group {
    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Limits the memory of the group, bytes; swap stays unlimited.
    pub fn set_limit(&self, bytes: u64) -> io::Result<()> {
        let file = match self.version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        fs::write(self.path.join(file), bytes.to_string())
    }

    /// Has the kernel's OOM killer wait for us, or not: with `hold`, processes that no memory can
    /// be found for sleep until some is freed or the limit is raised. On version 2, which has
    /// no such switch, nothing is changed.
    pub fn hold_oom_killer(&self, hold: bool) -> io::Result<()> {
        match self.version {
            Version::V1 => {
                fs::write(self.path.join("memory.oom_control"), u8::from(hold).to_string())
            }
            Version::V2 => Ok(()),
        }
    }

    /// Whether processes of the group sleep because the OOM killer is held.
    pub fn waits_for_memory(&self) -> bool {
        let control = fs::read_to_string(self.path.join("memory.oom_control"));
        self.version == Version::V1 && control.is_ok_and(|text| field(&text, "under_oom") > 0)
    }

    /// Has the kernel take as much memory from the group as it can.
    pub fn reclaim(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => fs::write(self.path.join("memory.force_empty"), "0"),
            Version::V2 => {
                fs::write(self.path.join("memory.reclaim"), self.usage().current.to_string())
            }
        }
    }

    /// The file to which a process writes `0` to move itself into the group.
    pub fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Processes in the group, those in its freezer included.
    pub fn processes(&self) -> Vec<i32> {
        let mut all = listed(&self.path);
        if self.version == Version::V2 {
            all.extend(listed(&self.path.join(FREEZER)));
        }
        all
    }

    /// Where its freezer is: inside it, so that memory is charged as before, or, where the memory
    /// controller is on a hierarchy of its own, at the top of the unified one.
    pub fn freezer(&self) -> Option<PathBuf> {
        match self.version {
            Version::V1 => Some(unified_root()?.join(self.path.file_name()?)),
            Version::V2 => Some(self.path.join(FREEZER)),
        }
    }

    /// The group of the unified hierarchy that its processes start in, if this one started them:
    /// its folder, and its name.
    pub(crate) fn unified_home(&self) -> Option<(PathBuf, String)> {
        let root = unified_root()?;
        let folder = match self.version {
            Version::V1 => Hierarchy { version: Version::V2, root: root.clone() }.own()?.path,
            Version::V2 => self.path.clone(),
        };
        let name = format!("/{}", folder.strip_prefix(&root).ok()?.display());
        Some((folder, name))
    }

    /// Sends a signal to each of its processes.
    pub fn signal(&self, signal: i32) {
        for pid in self.processes() {
            // An error: it has just ended.
            let _ = process::kill(pid, signal);
        }
    }

    /// What its processes did so far; zeros where the kernel does not say.
    pub fn usage(&self) -> Usage {
        let (current, peak, faults, oom) = match self.version {
            Version::V1 => (
                "memory.usage_in_bytes",
                "memory.max_usage_in_bytes",
                "total_pgmajfault",
                "memory.oom_control",
            ),
            Version::V2 => ("memory.current", "memory.peak", "pgmajfault", "memory.events"),
        };
        let read = |file: &str| fs::read_to_string(self.path.join(file)).unwrap_or_default();
        let number = |file: &str| read(file).trim().parse().unwrap_or(0);
        Usage {
            current: number(current),
            peak: number(peak),
            major_faults: field(&read("memory.stat"), faults),
            oom_kills: field(&read(oom), "oom_kill"),
        }
    }

    /// Removes the group and its freezer, which must be empty. Not an error: it is gone already.
    pub fn remove(&self) -> io::Result<()> {
        for path in self.freezer().iter().chain([&self.path]) {
            match fs::remove_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }
}

/// A group's freezer in it.
const FREEZER: &str = "held";

/// The processes in a group, by its folder.
pub(crate) fn listed(group: &Path) -> Vec<i32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Where the unified hierarchy is mounted, with or without the memory controller.
pub fn unified_root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounted(&mounts).find(|(_, kind, _)| *kind == "cgroup2").map(|(root, ..)| root)
}

/// What is mounted: where, as what kind of file system, with which options.
fn mounted(mounts: &str) -> impl Iterator<Item = (PathBuf, &str, &str)> {
    mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        Some((fields.next()?.into(), fields.next()?, fields.next()?))
    })
}

/// The path in a line `number:controllers:path` of /proc/PID/cgroup.
pub(crate) fn own_path(text: &str, version: Version) -> Option<&str> {
    text.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let is_it = match version {
            Version::V1 => controllers.split(',').any(|name| name == "memory"),
            Version::V2 => controllers.is_empty(),
        };
        is_it.then_some(path)
    })
}

/// The value of a line `name value`.
fn field(text: &str, name: &str) -> u64 {
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .and_then(|value| value.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_controller_is_found_on_either_interface() {
        let v1 = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                  cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                  cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
                  cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        let found = Hierarchy::among(v1, |_| false).unwrap();
        assert_eq!((found.version, found.root), (Version::V1, "/sys/fs/cgroup/memory".into()));
        let v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        let found = Hierarchy::among(v2, |_| true).unwrap();
        assert_eq!((found.version, found.root), (Version::V2, "/sys/fs/cgroup".into()));
        assert_eq!(Hierarchy::among(v2, |_| false), None);
    }

    #[test]
    fn the_own_group_is_found_on_either_interface() {
        let text = "5:cpu,cpuacct:/a\n4:memory:/jobs/b\n0::/c\n";
        assert_eq!(own_path(text, Version::V1), Some("/jobs/b"));
        assert_eq!(own_path(text, Version::V2), Some("/c"));
        assert_eq!(own_path("", Version::V1), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "pgfault 7\ntotal_pgmajfault 12\npgmajfault 3\n";
        assert_eq!(field(text, "pgmajfault"), 3);
        assert_eq!(field(text, "total_pgmajfault"), 12);
        assert_eq!(field(text, "pgmaj"), 0);
    }
}
