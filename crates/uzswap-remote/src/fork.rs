//! A fork: the child has the segments that only the store had in its own file, and is a client of
//! its own.

use crate::store::{Keeper, lock};
use crate::table::{LOCAL, REMOTE};
use crate::tiers::{Inner, Space, Tiers, Work};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::backing::SEGMENT_BYTES;

/// Held while a process forks.
pub struct BeforeFork<'a> {
    _work: MutexGuard<'a, Work>,
    keeper: MutexGuard<'a, Keeper>,
    space: MutexGuard<'a, Space>,
    /// Segments that only the store has, and their slots in the child.
    moved: Vec<(usize, u32)>,
}

impl Tiers {
    /// Locks the parts that a fork must find at rest. Segments that only the store has are written
    /// to the child's file. Errors: one of them cannot be read, or the file has no room.
    pub fn before_fork(&self, childs: Option<&OwnedFd>) -> io::Result<BeforeFork<'_>> {
        let inner = &*self.0;
        let mut work = lock(&inner.work);
        let mut keeper = inner.store.keeper();
        inner.store.tend(&mut keeper);
        let mut space = lock(&inner.space);
        let mut moved = Vec::new();
        for segment in 0..inner.table.count() {
            let old = inner.table.get(segment);
            if old & (REMOTE | LOCAL) != REMOTE {
                continue;
            }
            let file = childs.ok_or(io::ErrorKind::Unsupported)?;
            let length = inner.table.length(segment);
            work.buffer.fill(0);
            inner.read_far(segment, old, 0, &mut work.buffer[..length])?;
            let taken = space.free.len().checked_sub(moved.len() + 1);
            let slot = space.free[taken.ok_or(io::ErrorKind::StorageFull)?];
            let mut at = 0;
            while at < SEGMENT_BYTES {
                let to = Inner::local_offset(slot, 0) + at as u64;
                at += rustix::io::pwrite(file, &work.buffer[at..], to)?;
            }
            moved.push((segment, slot));
        }
        space.free.reserve(1);
        Ok(BeforeFork { _work: work, keeper, space, moved })
    }

    /// In the child: a client of its own, whose segments are all local.
    pub fn in_child(&self, before: BeforeFork<'_>) -> io::Result<()> {
        let inner = &*self.0;
        let BeforeFork { _work, mut keeper, mut space, moved } = before;
        let left = space.free.len() - moved.len();
        space.free.truncate(left);
        space.used += moved.len();
        for (segment, slot) in moved {
            inner.table.set_place(segment, slot, inner.table.length(segment));
            let old = inner.table.get(segment);
            inner.table.swap(segment, old & !REMOTE | LOCAL);
        }
        for segment in 0..inner.table.count() {
            let old = inner.table.get(segment);
            inner.table.swap(segment, old & !REMOTE);
        }
        lock(&inner.dead).clear();
        inner.bytes.store(0, Relaxed);
        inner.process.store(std::process::id(), Relaxed);
        inner.store.go_on_in_fork(&mut keeper)
    }
}
