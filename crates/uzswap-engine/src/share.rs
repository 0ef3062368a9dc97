//! Share records, each for a page of several entries.
//!
//! A record is an entry like any other, under a key of an area of its own: it owns the object, is
//! on the LRU, is written back and moved. The entries that share a record have only its key. The
//! record counts these entries, and the last to leave frees it.

use crate::ids::{Area, SwapEntry};
use crate::index::{Index, TRUNK_ENTRIES};
use crate::sync::{Mutex, lock};
use crate::table::ChunkedTable;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

struct FreeRecords {
    /// Freed records.
    keys: Vec<SwapEntry>,
    /// Records below this offset are made.
    made: u32,
    /// True if a record was asked for while few were spare. A cache without identical pages makes
    /// no records.
    asked: bool,
}

/// See the module.
pub(crate) struct Shares {
    area: Area,
    /// The number of entries that share each record; written under the lock of the record's entry.
    counts: ChunkedTable<AtomicU32, TRUNK_ENTRIES>,
    unused: Mutex<FreeRecords>,
}

impl Shares {
    /// Records for an index of `pages_max` pages: one for eight pages, in an area taken from the
    /// index.
    pub(crate) fn new(index: &Index, pages_max: u32) -> Option<Self> {
        let trunks = (pages_max as usize / 8).div_ceil(TRUNK_ENTRIES).max(1);
        let area = index.add_records((trunks * TRUNK_ENTRIES) as u32)?;
        Some(Self {
            area,
            counts: ChunkedTable::new(trunks * TRUNK_ENTRIES),
            unused: Mutex::new(FreeRecords { keys: Vec::new(), made: 0, asked: false }),
        })
    }

    /// Keys that [`Self::new`] takes from an index of `pages_max` pages, at most.
    pub(crate) fn keys_for(pages_max: u32) -> u32 {
        pages_max / 8 + TRUNK_ENTRIES as u32
    }

    /// True if a key is a record's.
    pub(crate) fn contains(&self, key: SwapEntry) -> bool {
        self.area.contains(key)
    }

    /// The number of entries that share the record.
    pub(crate) fn count(&self, record: SwapEntry) -> &AtomicU32 {
        let offset = (record.0 - self.area.first) as usize;
        self.counts.get(offset).expect("a record in use was made")
    }

    /// A spare record, if there is one.
    pub(crate) fn take(&self) -> Option<SwapEntry> {
        let mut unused = lock(&self.unused);
        unused.asked |= unused.keys.len() < Self::READY;
        unused.keys.pop()
    }

    /// Gives a record back. Its entry is absent.
    pub(crate) fn give(&self, record: SwapEntry) {
        debug_assert_eq!(self.count(record).load(Relaxed), 0);
        lock(&self.unused).keys.push(record);
    }

    /// With fewer spare records than this, another trunk of records is made.
    const READY: usize = TRUNK_ENTRIES.div_ceil(16);

    fn wants_provision(&self) -> bool {
        let unused = lock(&self.unused);
        unused.asked && unused.made < self.area.pages
    }

    /// Makes another trunk of records when few are spare. Allocates. Fails without memory.
    pub(crate) fn provision(&self, index: &Index) -> io::Result<()> {
        if !self.wants_provision() {
            return Ok(());
        }
        let first = lock(&self.unused).made;
        let Some(key) = self.area.entry(first) else { return Ok(()) };
        index.provision()?;
        if index.view().ensure(key).is_err() {
            return Ok(()); // Stores took the spare trunks; the next call tries again.
        }
        self.counts.make(first as usize / TRUNK_ENTRIES, || AtomicU32::new(0))?;
        let made = first + TRUNK_ENTRIES as u32;
        // Space for every record, so that giving back never allocates. The space is allocated
        // before the lock is taken, because stores wait for the lock.
        let mut keys = Vec::new();
        keys.try_reserve_exact(made as usize)?;
        let mut unused = lock(&self.unused);
        if unused.made != first {
            return Ok(()); // Another thread made it just now.
        }
        unused.asked = false;
        unused.made = made;
        keys.append(&mut unused.keys);
        keys.extend((first..made).rev().filter_map(|offset| self.area.entry(offset)));
        std::mem::swap(&mut keys, &mut unused.keys);
        Ok(())
    }

    /// Takes over the records that another process has left: those with entries. None is shared
    /// yet, and none is unused.
    pub(crate) fn adopt(&self, index: &Index) -> io::Result<()> {
        let made = index.adopted_trunks(self.area);
        for chunk in 0..made {
            self.counts.make(chunk, || AtomicU32::new(0))?;
        }
        lock(&self.unused).made = (made * TRUNK_ENTRIES) as u32;
        Ok(())
    }

    /// True if the record with this key is made.
    pub(crate) fn has_made(&self, key: SwapEntry) -> bool {
        self.contains(key) && key.0 - self.area.first < lock(&self.unused).made
    }

    /// Makes the absent records unused.
    pub(crate) fn recover(&self, is_absent: impl Fn(SwapEntry) -> bool) -> io::Result<()> {
        let made = lock(&self.unused).made;
        let mut keys = Vec::new();
        keys.try_reserve_exact(made as usize)?;
        let all = (0..made).rev().filter_map(|offset| self.area.entry(offset));
        keys.extend(all.filter(|key| is_absent(*key)));
        lock(&self.unused).keys = keys;
        Ok(())
    }

    /// Bytes of counts and of the list of unused records (not of the records' entries).
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.unused).made as usize * size_of::<SwapEntry>() + self.counts.bytes()
    }
}
