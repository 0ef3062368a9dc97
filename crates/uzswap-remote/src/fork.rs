//! A fork. The segments that only the store had are copied to the child's local file. The child
//! becomes a separate client.

use crate::store::{Keeper, lock};
use crate::table::{LOCAL, REMOTE};
use crate::tiers::{Inner, LocalSpace, Tiers, UpkeepState};
use std::io;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::backing::SEGMENT_BYTES;

/// Locks that are held while a process forks.
pub struct BeforeFork<'a> {
    work: MutexGuard<'a, UpkeepState>,
    keeper: MutexGuard<'a, Keeper>,
    space: MutexGuard<'a, LocalSpace>,
    /// Segments that only the store has, with their slots in the child.
    moved: Vec<(usize, u32)>,
}

impl Tiers {
    /// Locks all parts that must be at rest during a fork.
    pub fn before_fork(&self) -> BeforeFork<'_> {
        let inner = &*self.0;
        let work = lock(&inner.work);
        let mut keeper = inner.store.keeper();
        inner.store.tend(&mut keeper);
        BeforeFork { work, keeper, space: lock(&inner.space), moved: Vec::new() }
    }

    /// Gives the child each segment that only the store has. `write` writes to the child's local
    /// backing, at an offset. Fails if a segment cannot be read or written, or if the child's
    /// backing has no room.
    pub fn give_to_child(
        &self,
        before: &mut BeforeFork<'_>,
        mut write: impl FnMut(u64, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let inner = &*self.0;
        let BeforeFork { work, space, moved, .. } = before;
        for segment in 0..inner.table.count() {
            let old = inner.table.get(segment);
            if old & (REMOTE | LOCAL) != REMOTE {
                continue;
            }
            let length = inner.table.length(segment);
            work.buffer.fill(0);
            inner.read_far(segment, old, 0, &mut work.buffer[..length])?;
            let taken = space.free.len().checked_sub(moved.len() + 1);
            let slot = space.free[taken.ok_or(io::ErrorKind::StorageFull)?];
            write(Inner::local_offset(slot, 0), &work.buffer[..SEGMENT_BYTES])?;
            moved.push((segment, slot));
        }
        space.free.reserve(1);
        Ok(())
    }

    /// Makes the child a client of its own, whose segments are all local.
    pub fn in_child(&self, before: BeforeFork<'_>) -> io::Result<()> {
        let inner = &*self.0;
        let BeforeFork { work: _work, mut keeper, mut space, moved } = before;
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
