//! Memory cgroups, of either version of the interface.

use crate::process;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The interface on which the machine's memory controller is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// A hierarchy of its own.
    V1,
    /// The unified hierarchy.
    V2,
}

/// The hierarchy that has the memory controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hierarchy {
    /// Its interface.
    pub version: Version,
    /// Its mount point.
    pub root: PathBuf,
}

impl Hierarchy {
    /// Finds the hierarchy; `None` when this machine or container has no memory controller.
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

    /// True if a group can keep the kernel's zswap away from its pages (version 2, Linux 5.19).
    pub fn can_refuse_zswap(&self) -> bool {
        let has_file = |group: &Path| group.join("memory.zswap.max").exists();
        let mut groups = fs::read_dir(&self.root).into_iter().flatten().flatten();
        self.version == Version::V2 && groups.any(|entry| has_file(&entry.path()))
    }

    /// The group at the top, as far as this process can see.
    pub fn top(&self) -> Group {
        Group { version: self.version, path: self.root.clone() }
    }

    /// The group of this process. Returns the top group where this process cannot see its own, as
    /// in a container that shows only the groups below its own.
    pub fn own(&self) -> Group {
        self.of("self").unwrap_or_else(|| self.top())
    }

    /// The group that a process is in.
    pub fn of_process(&self, pid: i32) -> Option<Group> {
        self.of(&pid.to_string())
    }

    fn of(&self, process: &str) -> Option<Group> {
        let text = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
        let path = self.root.join(own_path(&text, self.version)?.trim_start_matches('/'));
        path.is_dir().then_some(Group { version: self.version, path })
    }
}

/// A memory cgroup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    version: Version,
    path: PathBuf,
}

/// The usage of a group's processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in memory now.
    pub current: u64,
    /// The peak of bytes in memory; 0 where the kernel does not report it (version 2 before 5.19).
    pub peak: u64,
    /// Bytes swapped out now.
    pub swapped: u64,
    /// Major faults: faults that waited for a device.
    pub major_faults: u64,
    /// Processes that the kernel ended because the limit could not be held.
    pub oom_kills: u64,
}

impl Group {
    /// The group with this folder.
    pub fn at(version: Version, path: PathBuf) -> Self {
        Self { version, path }
    }

    /// Its version of the interface.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The child group with this name.
    pub fn child(&self, name: &str) -> Self {
        Self { version: self.version, path: self.path.join(name) }
    }

    /// The group around it; `None` at the top of the mount.
    pub fn parent(&self) -> Option<Self> {
        let path = self.path.parent()?.to_owned();
        let is_group = path.join("cgroup.procs").exists();
        is_group.then_some(Self { version: self.version, path })
    }

    /// Makes a child group with the memory controller. Errors: `EBUSY` on version 2 for a group
    /// that has processes itself and is not at the very top; `PermissionDenied`, and
    /// `ReadOnlyFilesystem` as in most containers; `AlreadyExists`.
    pub fn make_child(&self, name: &str) -> io::Result<Self> {
        self.pass_memory_on()?;
        let child = self.child(name);
        fs::create_dir(&child.path)?;
        Ok(child)
    }

    /// Gives the child groups the memory controller.
    pub fn pass_memory_on(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => fs::write(self.path.join("cgroup.subtree_control"), "+memory"),
        }
    }

    /// Undoes [`Self::pass_memory_on`], so that the group may have processes itself again.
    pub fn keep_memory_back(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => fs::write(self.path.join("cgroup.subtree_control"), "-memory"),
        }
    }

    /// Makes a child group without a controller.
    pub fn make_plain_child(&self, name: &str) -> io::Result<Self> {
        let child = self.child(name);
        fs::create_dir(&child.path)?;
        Ok(child)
    }

    /// Moves a process into the group. Errors: `NotFound` (ESRCH) when there is no such process.
    pub fn enter(&self, pid: i32) -> io::Result<()> {
        fs::write(self.entrance(), pid.to_string())
    }

    /// Limits the memory of the group in bytes; swap stays unlimited. On version 1 a limit that
    /// cannot be kept is refused (`EBUSY`). On version 2 such a limit would kill processes
    /// immediately. So this reclaims memory first, and refuses a limit that reclaim does not reach.
    ///
    /// On version 2 the kernel keeps the group at `bytes` by reclaim and delay (`memory.high`), and
    /// kills processes only beyond `bytes + slack`. Version 1 has one limit.
    pub fn set_limit(&self, bytes: u64, slack: u64) -> io::Result<()> {
        if self.version == Version::V1 {
            return fs::write(self.path.join("memory.limit_in_bytes"), bytes.to_string());
        }
        let most = bytes.saturating_add(slack);
        fs::write(self.path.join("memory.high"), bytes.to_string())?;
        let excess = |group: &Self| group.number("memory.current").saturating_sub(most);
        if excess(self) > 0 {
            // An error means that the kernel reclaimed less, or is older than 5.19.
            let _ = fs::write(self.path.join("memory.reclaim"), excess(self).to_string());
        }
        if excess(self) > 0 {
            return Err(rustix::io::Errno::BUSY.into());
        }
        fs::write(self.path.join("memory.max"), most.to_string())
    }

    /// Keeps the kernel's zswap from taking the group's pages. `false` where a group has no such
    /// switch: version 1, and Linux before 5.19.
    pub fn refuse_zswap(&self) -> bool {
        self.version == Version::V2 && fs::write(self.path.join("memory.zswap.max"), "0").is_ok()
    }

    /// Disables the kernel's OOM killer for the group, or enables it. While it is disabled,
    /// processes without memory sleep until some is freed or the limit is raised. Version 2 has no
    /// such switch, so this changes nothing there.
    pub fn suspend_oom_killer(&self, suspend: bool) -> io::Result<()> {
        match self.version {
            Version::V1 => {
                fs::write(self.path.join("memory.oom_control"), u8::from(suspend).to_string())
            }
            Version::V2 => Ok(()),
        }
    }

    /// True if processes of the group sleep because the OOM killer is disabled.
    pub fn waits_for_memory(&self) -> bool {
        let control = fs::read_to_string(self.path.join("memory.oom_control"));
        self.version == Version::V1 && control.is_ok_and(|text| field(&text, "under_oom") > 0)
    }

    /// Makes the kernel reclaim as much memory from the group as it can.
    pub fn reclaim(&self) -> io::Result<()> {
        match self.version {
            Version::V1 => fs::write(self.path.join("memory.force_empty"), "0"),
            Version::V2 => {
                fs::write(self.path.join("memory.reclaim"), self.usage().current.to_string())
            }
        }
    }

    /// The least limit of memory plus swap, in bytes, of this group and its ancestors, and the file
    /// of that limit. `None` without a limit.
    pub fn swap_limit(&self) -> Option<(u64, PathBuf)> {
        let name = match self.version {
            Version::V1 => "memory.memsw.limit_in_bytes",
            Version::V2 => "memory.swap.max",
        };
        self.least(name)
    }

    /// The least limit of memory alone, with its file.
    pub fn memory_limit(&self) -> Option<(u64, PathBuf)> {
        let names: &[_] = match self.version {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.high", "memory.max"],
        };
        names.iter().filter_map(|name| self.least(name)).min()
    }

    /// The least limit of memory, in bytes, of this group and its ancestors, and the group that has
    /// that limit.
    pub fn limiting(&self) -> Option<(u64, Self)> {
        let (bytes, file) = self.memory_limit()?;
        Some((bytes, Self { version: self.version, path: file.parent()?.to_owned() }))
    }

    /// Bytes of memory of the group and of groups below, without file pages that the kernel can
    /// drop. `None` where the kernel does not report it.
    pub fn needed_bytes(&self) -> Option<u64> {
        let current = match self.version {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        };
        needed(self.version, &self.text(current), &self.text("memory.stat"))
    }

    /// The least number in the files of this name, of this group and its ancestors.
    fn least(&self, name: &str) -> Option<(u64, PathBuf)> {
        let mut found: Option<(u64, PathBuf)> = None;
        let mut group = Some(self.clone());
        while let Some(at) = group {
            let file = at.path.join(name);
            let value = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
            // Version 1 has a number near 2^63 for "no limit".
            let value = value.filter(|value| *value < 1 << 62);
            found = found.into_iter().chain(value.map(|value| (value, file))).min();
            group = at.parent();
        }
        found
    }

    /// The file to which a process writes `0` to move itself into the group.
    pub fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// All descendants of this group, each before its parent.
    fn descendants(&self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            let inner = Self { version: self.version, path: entry.path() };
            found.extend(inner.descendants());
            found.push(inner.path);
        }
        found
    }

    /// Processes in the group itself.
    pub fn direct_processes(&self) -> Vec<i32> {
        listed(&self.path)
    }

    /// Processes in the group and in groups below.
    pub fn processes(&self) -> Vec<i32> {
        let groups = self.descendants();
        groups.iter().chain([&self.path]).flat_map(|group| listed(group)).collect()
    }

    /// The folder of its freezer: inside the group, so that memory is charged as before. Where the
    /// memory controller is on a hierarchy of its own, the freezer is at the top of the unified
    /// hierarchy.
    pub fn freezer(&self) -> Option<PathBuf> {
        match self.version {
            Version::V1 => Some(unified_root()?.join(self.path.file_name()?)),
            Version::V2 => Some(self.path.join(FREEZER)),
        }
    }

    /// The group of the unified hierarchy in which this group's processes start, if this process
    /// starts them: its folder, and its name.
    pub(crate) fn unified_home(&self) -> Option<(PathBuf, String)> {
        let root = unified_root()?;
        let folder = match self.version {
            Version::V1 => Hierarchy { version: Version::V2, root: root.clone() }.own().path,
            Version::V2 => self.path.clone(),
        };
        let name = format!("/{}", folder.strip_prefix(&root).ok()?.display());
        Some((folder, name))
    }

    /// Sends a signal to each of its processes, including those of groups below.
    pub fn signal(&self, signal: i32) {
        for pid in self.processes() {
            // An error means that the process has just ended.
            let _ = process::kill(pid, signal);
        }
    }

    /// Kills all of its processes: atomically where the kernel can (5.14, version 2), otherwise the
    /// present ones.
    pub fn kill(&self) {
        if fs::write(self.path.join("cgroup.kill"), "1").is_err() {
            self.signal(libc::SIGKILL);
        }
    }

    /// The usage of its processes so far; zeros where the kernel does not report it.
    pub fn usage(&self) -> Usage {
        let v1 = || {
            let current = self.number("memory.usage_in_bytes");
            Usage {
                current,
                peak: self.number("memory.max_usage_in_bytes"),
                swapped: self.number("memory.memsw.usage_in_bytes").saturating_sub(current),
                major_faults: field(&self.text("memory.stat"), "total_pgmajfault"),
                oom_kills: field(&self.text("memory.oom_control"), "oom_kill"),
            }
        };
        match self.version {
            Version::V1 => v1(),
            Version::V2 => Usage {
                current: self.number("memory.current"),
                peak: self.number("memory.peak"),
                swapped: self.number("memory.swap.current"),
                major_faults: field(&self.text("memory.stat"), "pgmajfault"),
                oom_kills: field(&self.text("memory.events"), "oom_kill"),
            },
        }
    }

    fn text(&self, file: &str) -> String {
        fs::read_to_string(self.path.join(file)).unwrap_or_default()
    }

    fn number(&self, file: &str) -> u64 {
        self.text(file).trim().parse().unwrap_or(0)
    }

    /// Removes the group, its descendants and its freezer. All must be empty. A group that does not
    /// exist any more is no error.
    pub fn remove(&self) -> io::Result<()> {
        let outer = self.freezer().filter(|freezer| !freezer.starts_with(&self.path));
        let inner = self.descendants();
        for path in inner.iter().chain(&outer).chain([&self.path]) {
            match fs::remove_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }
}

/// The name of a group's freezer, a child group.
const FREEZER: &str = "held";

/// The processes in a group, by its folder.
pub(crate) fn listed(group: &Path) -> Vec<i32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The mount of the unified hierarchy, with or without the memory controller.
pub fn unified_root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounted(&mounts).find(|(_, kind, _)| *kind == "cgroup2").map(|(root, ..)| root)
}

/// Mounts: the folder, the kind of file system, and the options.
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

/// [`Group::needed_bytes`], by the group's count and its statistics.
fn needed(version: Version, current: &str, stat: &str) -> Option<u64> {
    let (clean, dirty) = match version {
        Version::V1 => {
            (["total_inactive_file", "total_active_file"], ["total_dirty", "total_writeback"])
        }
        Version::V2 => (["inactive_file", "active_file"], ["file_dirty", "file_writeback"]),
    };
    let sum = |names: [&str; 2]| names.map(|name| field(stat, name)).iter().sum::<u64>();
    let current: u64 = current.trim().parse().ok()?;
    Some(current.saturating_sub(sum(clean).saturating_sub(sum(dirty))))
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
    fn memory_counts_without_the_clean_pages_of_files_on_either_interface() {
        let inner = "inactive_file 9\nactive_file 9\ndirty 9\n";
        let whole =
            "total_inactive_file 40\ntotal_active_file 20\ntotal_dirty 7\ntotal_writeback 3\n";
        assert_eq!(needed(Version::V1, "100\n", &format!("{inner}{whole}")), Some(50));
        let stat = "inactive_file 40\nactive_file 20\nfile_dirty 7\nfile_writeback 3\n";
        assert_eq!(needed(Version::V2, "100\n", stat), Some(50));
        assert_eq!(needed(Version::V2, "max", stat), None);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "pgfault 7\ntotal_pgmajfault 12\npgmajfault 3\n";
        assert_eq!(field(text, "pgmajfault"), 3);
        assert_eq!(field(text, "total_pgmajfault"), 12);
        assert_eq!(field(text, "pgmaj"), 0);
    }
}
