//! One budget for a tree of processes: a file that all of them map, with a slot for each.
//!
//! Each process writes how much it has, and reads how much the others have. The first to ask gets
//! the rest, but every process that has much may have an equal part: so the first gives back what
//! it has above that once another needs it. A process that has died has nothing.

use rustix::fs::{self, Mode, OFlags};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Processes that are counted at once.
pub const SLOTS: usize = 1000;
/// A process that has less than this part of the whole is not asked for anything.
const SMALL: u64 = 16;

/// The file's content: 64 bytes, then the slots.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// Bytes for all.
    pub total: AtomicU64,
    /// Processes that took over their memory, in all.
    pub managed: AtomicU64,
    /// Processes that could not, in all.
    pub unmanaged: AtomicU64,
    /// The most that all had at once, bytes.
    pub peak: AtomicU64,
    reserved: [u64; 4],
    slots: [Slot; SLOTS],
}

#[derive(Debug)]
#[repr(C)]
struct Slot {
    process: AtomicU32,
    reserved: u32,
    /// Anonymous memory, bytes.
    used: AtomicU64,
}

/// The table, and this process's slot in it.
#[derive(Debug)]
pub struct Tree {
    table: &'static Table,
    slot: AtomicUsize,
}

impl Tree {
    /// Makes the file of a tree, which may have `total` bytes, and which this process watches
    /// without being of it. Errors: the file is there already.
    pub fn create(path: &Path, total: u64) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        fs::ftruncate(&file, size_of::<Table>() as u64)?;
        let tree = Self::map(path)?;
        tree.table.total.store(total, Relaxed);
        Ok(tree)
    }

    /// Joins the tree of a file.
    pub fn join(path: &Path) -> io::Result<Self> {
        let tree = Self::map(path)?;
        tree.rejoin();
        Ok(tree)
    }

    fn map(path: &Path) -> io::Result<Self> {
        let file =
            fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())?;
        let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, size_of::<Table>());
        if fs::fstat(&file)?.st_size < bytes as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a new mapping of a file of this size; what is in it are atomics, which any
        // process of the tree may write, and it stays until the process ends.
        let table = unsafe {
            let at = mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &file, 0)?;
            &*at.cast::<Table>()
        };
        Ok(Self { table, slot: AtomicUsize::new(SLOTS) })
    }

    /// The table.
    pub fn table(&self) -> &'static Table {
        self.table
    }

    /// Takes a slot; in a fork, instead of the parent's. Where all are taken, this process is not
    /// counted.
    pub fn rejoin(&self) {
        self.slot.store(self.take_slot().unwrap_or(SLOTS), Relaxed);
    }

    fn take_slot(&self) -> Option<usize> {
        let me = std::process::id();
        self.table.slots.iter().position(|slot| {
            let process = slot.process.load(Relaxed);
            let is_mine = (process == 0 || !exists(process))
                && slot.process.compare_exchange(process, me, Relaxed, Relaxed).is_ok();
            if is_mine {
                slot.used.store(0, Relaxed);
            }
            is_mine
        })
    }

    /// Writes how much this process has, and returns how much it may have.
    pub fn allowance(&self, used: u64) -> u64 {
        let own = self.slot.load(Relaxed);
        if let Some(slot) = self.table.slots.get(own) {
            slot.used.store(used, Relaxed);
        }
        let total = self.table.total.load(Relaxed);
        let (mut others, mut large) = (0, 1);
        for (at, slot) in self.table.slots.iter().enumerate() {
            let process = slot.process.load(Relaxed);
            if process == 0 || at == own {
                continue;
            }
            let theirs = slot.used.load(Relaxed);
            if theirs > 0 && !exists(process) {
                slot.used.store(0, Relaxed);
                continue;
            }
            others += theirs;
            large += u64::from(theirs > total / SMALL);
        }
        self.table.peak.fetch_max(others + used, Relaxed);
        total.saturating_sub(others).max(total / large)
    }
}

fn exists(process: u32) -> bool {
    // Another user's cannot be signalled, and is there.
    let process = rustix::process::Pid::from_raw(process as i32);
    let Some(process) = process else { return false };
    rustix::process::test_kill_process(process) != Err(rustix::io::Errno::SRCH)
}
