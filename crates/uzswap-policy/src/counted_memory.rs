//! Memory that present pages and the pool's compressed pages share.
//!
//! The caller decides which page leaves. The pool has at most seven eighths of the memory, as in a
//! pager, or less by [`PoolShare`]. Beyond that, the page that left first goes to the backing. A
//! page that was loaded since is spared once, as in the engine.

use crate::pager_memory::{PAGE_BYTES, PagerMemory};
use crate::pool_share::{Loaded, PoolShare};
use std::collections::VecDeque;

/// Bytes of an object in the pool besides its content: its header, the rest of its size class, and
/// its entry in the index.
const OBJECT_BYTES: u16 = 36;

/// Sizes of objects that share memory in the pool.
const CLASS_BYTES: u16 = 32;
const CLASSES: usize = 4096 / CLASS_BYTES as usize + 1;

/// Memory that a class takes besides its objects: half of four frames.
const OPEN_BYTES: u64 = 8192;

/// Bytes of a sealed record on the backing besides its object, and the unit to which a record is
/// padded.
const RECORD_BYTES: u64 = 32;
const RECORD_UNIT: u64 = 16;

/// The most bytes between two records that one read covers.
const GAP_MAX: u64 = 32 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageLocation {
    Nowhere,
    /// `copy`: bytes of the page's copy in the pool, or 0.
    There {
        copy: u16,
    },
    Pool {
        bytes: u16,
    },
    Backing(PlaceOnBacking),
}

/// The bytes of a record. Records that were written one after the other follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PlaceOnBacking {
    start: u64,
    end: u64,
}

impl PlaceOnBacking {
    /// True if one read covers both records.
    pub(crate) fn is_followed_by(self, next: Self) -> bool {
        (self.end..=self.end + GAP_MAX).contains(&next.start)
    }
}

/// A page's location, and how often it left.
#[derive(Debug, Clone, Copy)]
struct Counted {
    location: PageLocation,
    times: u32,
    /// True if the page's object was loaded since it was written to the pool or spared.
    is_loaded: bool,
}

/// The place of a page before a touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Was {
    Nowhere,
    Memory,
    Pool,
    Backing,
}

/// Traffic with the backing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Bytes of objects that were written.
    pub(crate) written: u64,
    /// The time of reads, ns.
    pub(crate) read_nanos: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Memory {
    room: PagerMemory,
    there: u64,
    /// Bytes of the pool.
    pool: u64,
    /// Objects of each class.
    objects: Box<[u32; CLASSES]>,
    pages: Vec<Counted>,
    /// Pages in the order in which they left, each with its count of departures then. An entry is
    /// valid while the page still has this count.
    left: VecDeque<(u32, u32)>,
    share: PoolShare,
    steps: u32,
    /// Faults that loaded pages.
    loads: u64,
    /// Reads of the backing.
    reads: u64,
    /// Bytes that were written to the backing, with those of records.
    end_of_backing: u64,
    /// The traffic that the caller has not yet taken.
    traffic: Traffic,
}

impl Memory {
    pub(crate) fn new(pages: usize, room: PagerMemory) -> Self {
        let page = Counted { location: PageLocation::Nowhere, times: 0, is_loaded: false };
        Self {
            room,
            there: 0,
            pool: 0,
            objects: Box::new([0; CLASSES]),
            pages: vec![page; pages],
            left: VecDeque::new(),
            share: PoolShare::default(),
            steps: 0,
            loads: 0,
            reads: 0,
            end_of_backing: 0,
            traffic: Traffic::default(),
        }
    }

    pub(crate) fn there(&self) -> u64 {
        self.there
    }

    pub(crate) fn pool(&self) -> u64 {
        self.pool
    }

    /// Pages that fit beside the present pool.
    pub(crate) fn capacity(&self) -> usize {
        (self.room.bytes().saturating_sub(self.pool) / PAGE_BYTES).max(1) as usize
    }

    /// True if another page may come.
    pub(crate) fn has_room(&self) -> bool {
        self.there == 0 || (self.there + 1) * PAGE_BYTES + self.pool <= self.room.bytes()
    }

    pub(crate) fn place(&self, page: usize) -> Was {
        match self.pages[page].location {
            PageLocation::Nowhere => Was::Nowhere,
            PageLocation::There { .. } => Was::Memory,
            PageLocation::Pool { .. } => Was::Pool,
            PageLocation::Backing(_) => Was::Backing,
        }
    }

    /// Brings an absent page in, and drops its copy.
    pub(crate) fn come(&mut self, page: usize) {
        self.drop_page(page);
        self.pages[page].location = PageLocation::There { copy: 0 };
        self.there += 1;
    }

    /// Brings an absent page in. The pool keeps its copy.
    pub(crate) fn come_beside_copy(&mut self, page: usize) {
        let copy = match self.pages[page].location {
            PageLocation::Pool { bytes } => bytes,
            _ => 0,
        };
        let known = &mut self.pages[page];
        (known.location, known.is_loaded) = (PageLocation::There { copy }, true);
        self.there += 1;
    }

    /// Drops the copy of a present page.
    pub(crate) fn drop_copy(&mut self, page: usize) {
        if let PageLocation::There { copy } = &mut self.pages[page].location {
            let bytes = std::mem::take(copy);
            self.free(bytes);
        }
    }

    /// Takes memory of the pool for an object of `bytes`; none for 0.
    fn allocate(&mut self, bytes: u16) {
        if bytes > 0 {
            let class = &mut self.objects[usize::from(bytes / CLASS_BYTES).min(CLASSES - 1)];
            self.pool += u64::from(bytes + OBJECT_BYTES) + if *class == 0 { OPEN_BYTES } else { 0 };
            *class += 1;
        }
    }

    /// Gives the memory of an object back.
    fn free(&mut self, bytes: u16) {
        if bytes > 0 {
            let class = &mut self.objects[usize::from(bytes / CLASS_BYTES).min(CLASSES - 1)];
            *class -= 1;
            self.pool -= u64::from(bytes + OBJECT_BYTES) + if *class == 0 { OPEN_BYTES } else { 0 };
        }
    }

    /// True if the pool has more than half of the memory.
    pub(crate) fn is_mostly_pool(&self) -> bool {
        self.pool > self.room.bytes() / 2
    }

    /// Moves a page to the pool, where it has `bytes`. There it is the newest.
    pub(crate) fn leave(&mut self, page: usize, bytes: u16) {
        let is_loaded = matches!(self.pages[page].location, PageLocation::There { copy: 1.. });
        self.drop_copy(page);
        self.there -= 1;
        let known = &mut self.pages[page];
        known.location = PageLocation::Pool { bytes };
        known.is_loaded &= is_loaded;
        self.list(page);
        self.allocate(bytes);
        self.write_back();
    }

    /// Makes a page the newest of those that left.
    fn list(&mut self, page: usize) {
        let known = &mut self.pages[page];
        known.times = known.times.wrapping_add(1);
        self.left.push_back((page as u32, known.times));
    }

    /// Writes the oldest objects to the backing while the pool is too large. The object of a
    /// present page is a copy. Pages of one repeated word have no object.
    fn write_back(&mut self) {
        let mut chances = self.left.len();
        while self.pool > self.room.pool_bytes_max(self.steps)
            && let Some((page, times)) = self.left.pop_front()
        {
            let page = page as usize;
            let known = &mut self.pages[page];
            let (PageLocation::There { copy: bytes } | PageLocation::Pool { bytes }) =
                known.location
            else {
                continue;
            };
            if known.times != times || bytes == 0 {
                continue;
            }
            if chances > 0 && std::mem::take(&mut known.is_loaded) {
                chances -= 1;
                self.list(page);
                continue;
            }
            let start = self.end_of_backing;
            let end = start + (RECORD_BYTES + u64::from(bytes)).next_multiple_of(RECORD_UNIT);
            known.location = match known.location {
                PageLocation::There { .. } => PageLocation::There { copy: 0 },
                _ => PageLocation::Backing(PlaceOnBacking { start, end }),
            };
            self.end_of_backing = end;
            self.traffic.written += u64::from(bytes);
            self.free(bytes);
        }
    }

    /// The traffic with the backing since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        std::mem::take(&mut self.traffic)
    }

    /// The place of a page that is on the backing.
    pub(crate) fn on_backing(&self, page: usize) -> Option<PlaceOnBacking> {
        match self.pages[page].location {
            PageLocation::Backing(place) => Some(place),
            _ => None,
        }
    }

    /// Counts a fault that loaded pages, and its reads of the backing.
    pub(crate) fn count_load(&mut self, reads: u64) {
        self.loads += 1;
        self.reads += reads;
        self.traffic.read_nanos += reads * self.room.read_nanos();
        if self.room.has_backing() {
            let pool = self.loads.saturating_sub(self.reads);
            let read_nanos = self.reads * self.room.read_nanos();
            let loaded = Loaded { pool, reads: self.reads, read_nanos };
            self.steps = self.share.tend(self.steps, loaded);
            self.write_back();
        }
    }

    /// The program gives a page back, wherever it is.
    pub(crate) fn drop_page(&mut self, page: usize) {
        match std::mem::replace(&mut self.pages[page].location, PageLocation::Nowhere) {
            PageLocation::There { copy } => {
                self.free(copy);
                self.there -= 1;
            }
            PageLocation::Pool { bytes } => self.free(bytes),
            PageLocation::Nowhere | PageLocation::Backing(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_pool_are_one_sum() {
        let mut memory = Memory::new(4, PagerMemory::of_bytes(3 * PAGE_BYTES));
        (0..3).for_each(|page| memory.come(page));
        assert!(!memory.has_room());
        memory.leave(0, 900);
        // 900 bytes of the object, 36 of metadata, and 8192 for the rest of its size class.
        assert_eq!((memory.has_room(), memory.pool(), memory.capacity()), (false, 9128, 1));
        memory.leave(1, 900);
        assert_eq!(memory.pool(), 9128 + 936, "its class has memory already");
        memory.drop_page(1);
        memory.come(0);
        assert_eq!((memory.pool(), memory.there()), (0, 2));
    }

    #[test]
    fn a_page_that_comes_beside_its_copy_takes_both() {
        let mut memory = Memory::new(1, PagerMemory::of_bytes(8 * PAGE_BYTES));
        memory.come(0);
        memory.leave(0, 900);
        memory.come_beside_copy(0);
        assert_eq!((memory.pool(), memory.there()), (9128, 1));
        memory.drop_copy(0);
        assert_eq!((memory.pool(), memory.there()), (0, 1));
    }

    #[test]
    fn pages_that_left_first_go_to_the_backing_when_the_pool_is_full() {
        let mut memory = Memory::new(9, PagerMemory::of_bytes(4 * PAGE_BYTES));
        let written = (0..3).map(|page| {
            memory.come(page);
            memory.leave(page, 3000);
            memory.take_traffic().written
        });
        assert_eq!(written.collect::<Vec<_>>(), [0, 0, 3000], "7/8 of 16 384 are 14 336");
        assert_eq!([0, 1, 2].map(|page| memory.place(page)), [Was::Backing, Was::Pool, Was::Pool]);
        assert_eq!(memory.pool(), 8192 + 2 * 3036);
        // A page that was loaded is spared once, so page 1 does not leave next.
        memory.come_beside_copy(1);
        memory.come(3);
        memory.leave(3, 3000);
        assert_eq!([1, 2].map(|page| memory.place(page)), [Was::Memory, Was::Backing]);
        let [first, second] = [0, 2].map(|page| memory.on_backing(page).expect("it went there"));
        assert!(first.is_followed_by(second) && !second.is_followed_by(first));
    }

    #[test]
    fn a_pool_that_serves_many_faults_gives_its_oldest_pages_to_the_backing() {
        let mut memory = Memory::new(4000, PagerMemory::of_pager(24 << 20, Some(100_000)));
        for page in 0..4000 {
            memory.come(page);
            memory.leave(page, 3000);
        }
        assert_eq!(memory.take_traffic(), Traffic::default());
        (0..24 * 1024).for_each(|_| memory.count_load(0));
        let Traffic { written, read_nanos } = memory.take_traffic();
        assert!(written > 4_000_000 && read_nanos == 0, "{written} bytes");
        assert_eq!([0, 3999].map(|page| memory.place(page)), [Was::Backing, Was::Pool]);
        (0..1024).for_each(|_| memory.count_load(1));
        assert_eq!(memory.take_traffic(), Traffic { written: 0, read_nanos: 102_400_000 });
    }
}
