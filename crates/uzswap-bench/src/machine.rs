//! Changes of the machine by a benchmark, and their undoing.
//!
//! Before a change is made, its undoing is written to a journal. The changes of a configuration are
//! undone in reverse order when they are dropped. The changes of a killed benchmark are undone by
//! the next benchmark, in [`recover`]. A lock excludes a second benchmark.

use crate::error::{Context, Failure};
use crate::install::shell;
use rustix::fs::{FallocateFlags, FlockOperation};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uzswap_sys::cgroup::{Group, Hierarchy};
use uzswap_sys::loopdev::LoopDevice;
use uzswap_sys::{process, swap};

const JOURNAL: &str = "/run/uzswap-bench.json";
const LOCK: &str = "/run/uzswap-bench.lock";
/// The zram device that is used.
pub const ZRAM: &str = "/sys/block/zram0";

/// The speed of a disk like that of the original measurement: bytes and operations a second, in
/// each direction.
pub const DISK_BYTES: u64 = 58_000_000;
/// See [`DISK_BYTES`].
pub const DISK_OPERATIONS: u64 = 120;

/// The folder of limits for the whole machine, which only version 1 has. A limit stays with a
/// device's number until it is set to zero.
pub const THROTTLES: &str = "/sys/fs/cgroup/blkio";

/// The lock of the running benchmark.
pub struct Lock(#[expect(dead_code, reason = "unlocks when it is closed")] File);

/// Undoes the changes of a killed benchmark. Fails if a benchmark is running.
pub fn recover() -> Result<Lock, Failure> {
    let lock = File::options().write(true).create(true).truncate(false).open(LOCK);
    let lock = lock.context(LOCK)?;
    if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Err(Failure::new("another benchmark runs on this machine; wait for its end"));
    }
    if let Ok(text) = fs::read(JOURNAL) {
        let journal = serde_json::from_slice(&text).context(JOURNAL)?;
        eprintln!("uzswap-bench: undoing the changes of a killed benchmark");
        drop(Changes { journal });
    }
    Ok(Lock(lock))
}

/// The undoing of a change. Doing it twice does no harm.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Undo {
    Write { path: PathBuf, value: String },
    SwapOff { path: PathBuf },
    RemoveFile { path: PathBuf },
    RemoveGroup { name: String },
    Unmount { path: PathBuf },
}

impl Undo {
    fn run(&self) -> io::Result<()> {
        match self {
            Self::Write { path, value } => fs::write(path, value),
            Self::SwapOff { path } => {
                let on = swap::areas()?.iter().any(|area| area.path == *path);
                if on { swap::off(path) } else { Ok(()) }
            }
            Self::RemoveFile { path } => match fs::remove_file(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            },
            Self::Unmount { path } => {
                let mounts = fs::read_to_string("/proc/self/mounts")?;
                let target = path.display().to_string();
                let is_mounted = mounts.lines().any(|line| line.split(' ').nth(1) == Some(&target));
                if is_mounted { uzswap_sys::fuse::unmount(path) } else { Ok(()) }
            }
            Self::RemoveGroup { name } => {
                let Some(hierarchy) = Hierarchy::find() else { return Ok(()) };
                remove(&hierarchy.top().child(name))
            }
        }
    }
}

fn remove(group: &Group) -> io::Result<()> {
    for _ in 0..100 {
        group.signal(signal_hook::consts::SIGKILL);
        if group.remove().is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    group.remove()
}

/// Changes to the machine, undone when dropped.
pub struct Changes {
    journal: Vec<Undo>,
}

impl Changes {
    /// No changes yet. Only one value may exist at a time, since it owns the journal.
    pub fn begin() -> Self {
        Self { journal: Vec::new() }
    }

    fn note(&mut self, undo: Undo) -> Result<(), Failure> {
        self.journal.push(undo);
        let text = serde_json::to_vec(&self.journal).context(JOURNAL)?;
        fs::write(JOURNAL, text).context(JOURNAL)
    }

    /// Writes a value to a file of /proc/sys or /sys.
    pub fn set(&mut self, path: &str, value: &str) -> Result<(), Failure> {
        let before = fs::read_to_string(path).context(path)?;
        // In a choice such as "lzo [lz4] zstd", the chosen word.
        let chosen = before.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
        let value_before = chosen.map_or(before.trim(), |(chosen, _)| chosen).to_owned();
        self.note(Undo::Write { path: path.into(), value: value_before })?;
        fs::write(path, value).context(&format!("{path}: write {value}"))
    }

    /// Writes `value` now and `after` at the end.
    pub fn set_until(&mut self, path: &Path, value: &str, after: &str) -> Result<(), Failure> {
        self.note(Undo::Write { path: path.into(), value: after.into() })?;
        fs::write(path, value).context(&format!("{}: write {value}", path.display()))
    }

    /// Makes zram0 a device of `bytes`.
    pub fn zram(&mut self, compressor: &str, bytes: u64) -> Result<(), Failure> {
        let path = Path::new(ZRAM);
        // The reset at the end restores the default compressor.
        self.set_until(&path.join("reset"), "1", "1")?;
        for (setting, value) in [("comp_algorithm", compressor), ("disksize", &bytes.to_string())] {
            fs::write(path.join(setting), value).context(&format!("zram0: {setting}"))?;
        }
        Ok(())
    }

    /// Makes a file of `bytes`, all of them reserved on the disk.
    fn file(&mut self, path: &Path, bytes: u64) -> Result<File, Failure> {
        let what = path.display().to_string();
        let folder = path.parent().unwrap_or(Path::new("/"));
        let free = process::free_disk_bytes(folder).context(&what)?;
        if free < bytes {
            let [needed, free] = [bytes >> 20, free >> 20];
            return Err(Failure::new(format!(
                "{what}: {needed} MiB are needed there and {free} MiB are free; make room"
            )));
        }
        self.note(Undo::RemoveFile { path: path.into() })?;
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path);
        let file = file.context(&what)?;
        let reserved = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes);
        reserved.context(&what)?;
        Ok(file)
    }

    /// Makes a swap file of `bytes`, which the kernel uses before all other areas.
    pub fn swap_file(&mut self, path: &Path, bytes: u64) -> Result<(), Failure> {
        self.file(path, bytes)?;
        self.swap_on(path, bytes)
    }

    /// Makes a swap file behind a loop device, which merges operations on neighbouring pages before
    /// the disk counts them.
    pub fn swap_file_merged(&mut self, path: &Path, bytes: u64) -> Result<(), Failure> {
        let file = self.file(path, bytes)?;
        let device =
            LoopDevice::attach(file.as_raw_fd(), 0..bytes, 4096).context("a loop device")?;
        // The kernel detaches the loop device when the swap area is off.
        self.swap_on(device.path(), bytes)
    }

    /// Mounts a file system of `bytes` on a disk with the speed of [`DISK_BYTES`] and
    /// [`DISK_OPERATIONS`]. The undoing removes its content.
    pub fn slow_disk(&mut self, folder: &Path, bytes: u64) -> Result<(), Failure> {
        fs::create_dir_all(folder).context(&folder.display().to_string())?;
        let image = self.file(&folder.with_extension("image"), bytes)?;
        let disk =
            LoopDevice::attach(image.as_raw_fd(), 0..bytes, 4096).context("a loop device")?;
        let device = disk.path().display().to_string();
        // No journal, and no table that is written later: only swap is to write to the disk.
        let options = "-q -F -O ^has_journal -N 1024 -E nodiscard,lazy_itable_init=0";
        shell(&format!("mkfs.ext4 {options} {device}"), Path::new("/"))?;
        self.note(Undo::Unmount { path: folder.into() })?;
        let flags = rustix::mount::MountFlags::NOATIME;
        rustix::mount::mount(disk.path(), folder, "ext4", flags, None::<&std::ffi::CStr>)
            .context(&format!("{device}: mount"))?;
        let number = fs::metadata(disk.path()).context(&device)?.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        for (what, limit) in [("bps", DISK_BYTES), ("iops", DISK_OPERATIONS)] {
            for direction in ["read", "write"] {
                let path = format!("{THROTTLES}/blkio.throttle.{direction}_{what}_device");
                let [on, off] = [limit, 0].map(|value| format!("{number} {value}"));
                self.set_until(Path::new(&path), &on, &off)?;
            }
        }
        Ok(())
    }

    /// Makes the kernel swap to a file or device of `bytes` before all other areas.
    pub fn swap_on(&mut self, path: &Path, bytes: u64) -> Result<(), Failure> {
        let what = path.display().to_string();
        let pages = u32::try_from(bytes / 4096).unwrap_or(u32::MAX);
        swap::write_header(path, pages, "bench").context(&what)?;
        self.note(Undo::SwapOff { path: path.into() })?;
        swap::on(path, swap::PRIORITY_MAX).context(&format!("{what}: swapon"))
    }

    /// Makes a memory cgroup of `bytes`.
    pub fn group(&mut self, bytes: u64) -> Result<Group, Failure> {
        let hierarchy = Hierarchy::find().ok_or_else(|| {
            Failure::new("no memory cgroup is mounted, so nothing can be limited")
        })?;
        let name = "uzswap-bench";
        self.note(Undo::RemoveGroup { name: name.into() })?;
        let group = hierarchy.top().make_child(name).context("a memory cgroup")?;
        group.set_limit(bytes, 0).context("a memory cgroup")?;
        Ok(group)
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        let mut failed = false;
        while let Some(undo) = self.journal.pop() {
            if let Err(error) = undo.run() {
                eprintln!("uzswap-bench: cannot undo {undo:?}: {error}; undo it by hand");
                failed = true;
            }
        }
        if !failed {
            // An error means that there is no journal.
            let _ = fs::remove_file(JOURNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_does_not_fit_is_not_begun() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("swap");
        let error = Changes::begin().file(&path, 1 << 60).unwrap_err().to_string();
        assert!(error.contains("MiB are free; make room"), "{error}");
        assert!(!path.exists());
    }
}
