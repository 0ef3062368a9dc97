//! Memory that present pages and the pool's compressed pages share.
//!
//! The caller decides which page leaves. The pool has at most seven eighths of the memory, as in a
//! pager. Beyond that, the page that left first goes to the backing.

use std::collections::VecDeque;

/// Bytes of a present page.
pub const PAGE_BYTES: u64 = 4096;

/// Bytes of an object in the pool besides its content: its header, the rest of its size class, and
/// its entry in the index.
const OBJECT_BYTES: u16 = 36;

/// Sizes of objects that share memory in the pool.
const CLASS_BYTES: u16 = 32;
const CLASSES: usize = 4096 / CLASS_BYTES as usize + 1;

/// Memory that a class takes besides its objects: half of four frames.
const OPEN_BYTES: u64 = 8192;

/// One part in this many of the memory stays for pages.
const PART_FOR_PAGES: u64 = 8;

/// The location of a page.
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
    Backing,
}

/// The place of a page before a touch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Was {
    Nowhere,
    Memory,
    Pool,
    Backing,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Memory {
    bytes: u64,
    there: u64,
    /// Bytes of the pool.
    pool: u64,
    /// Objects of each class.
    objects: Box<[u32; CLASSES]>,
    /// The place of each page, and how often the page left.
    places: Vec<(PageLocation, u32)>,
    /// Pages in the order in which they left, each with its count of departures then. An entry is
    /// valid while the page still has this count.
    left: VecDeque<(u32, u32)>,
}

impl Memory {
    pub(crate) fn new(pages: usize, bytes: u64) -> Self {
        let places = vec![(PageLocation::Nowhere, 0); pages];
        let objects = Box::new([0; CLASSES]);
        Self { bytes, there: 0, pool: 0, objects, places, left: VecDeque::new() }
    }

    pub(crate) fn there(&self) -> u64 {
        self.there
    }

    pub(crate) fn pool(&self) -> u64 {
        self.pool
    }

    /// Pages that fit beside the present pool.
    pub(crate) fn capacity(&self) -> usize {
        (self.bytes.saturating_sub(self.pool) / PAGE_BYTES).max(1) as usize
    }

    /// True if another page may come.
    pub(crate) fn has_room(&self) -> bool {
        self.there == 0 || (self.there + 1) * PAGE_BYTES + self.pool <= self.bytes
    }

    pub(crate) fn place(&self, page: usize) -> Was {
        match self.places[page].0 {
            PageLocation::Nowhere => Was::Nowhere,
            PageLocation::There { .. } => Was::Memory,
            PageLocation::Pool { .. } => Was::Pool,
            PageLocation::Backing => Was::Backing,
        }
    }

    /// Brings an absent page in, and drops its copy.
    pub(crate) fn come(&mut self, page: usize) {
        self.drop_page(page);
        self.places[page].0 = PageLocation::There { copy: 0 };
        self.there += 1;
    }

    /// Brings an absent page in. The pool keeps its copy.
    pub(crate) fn come_beside_copy(&mut self, page: usize) {
        let copy = match self.places[page].0 {
            PageLocation::Pool { bytes } => bytes,
            _ => 0,
        };
        self.places[page].0 = PageLocation::There { copy };
        self.there += 1;
    }

    /// Drops the copy of a present page.
    pub(crate) fn drop_copy(&mut self, page: usize) {
        if let PageLocation::There { copy } = &mut self.places[page].0 {
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
        self.pool > self.bytes / 2
    }

    /// Moves a page to the pool, where it has `bytes`. Returns the bytes that went to the backing.
    pub(crate) fn leave(&mut self, page: usize, bytes: u16) -> u64 {
        self.drop_copy(page);
        self.there -= 1;
        let (place, times) = &mut self.places[page];
        *place = PageLocation::Pool { bytes };
        *times = times.wrapping_add(1);
        self.left.push_back((page as u32, *times));
        self.allocate(bytes);
        let mut written = 0;
        while self.pool > self.bytes - self.bytes / PART_FOR_PAGES
            && let Some((page, times)) = self.left.pop_front()
        {
            if let (PageLocation::Pool { bytes }, left) = self.places[page as usize]
                && left == times
            {
                self.free(bytes);
                self.places[page as usize].0 = PageLocation::Backing;
                written += u64::from(bytes);
            }
        }
        written
    }

    /// The program gives a page back, wherever it is.
    pub(crate) fn drop_page(&mut self, page: usize) {
        match std::mem::replace(&mut self.places[page].0, PageLocation::Nowhere) {
            PageLocation::There { copy } => {
                self.free(copy);
                self.there -= 1;
            }
            PageLocation::Pool { bytes } => self.free(bytes),
            PageLocation::Nowhere | PageLocation::Backing => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_and_pool_are_one_sum() {
        let mut memory = Memory::new(4, 3 * PAGE_BYTES);
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
        let mut memory = Memory::new(1, 8 * PAGE_BYTES);
        memory.come(0);
        memory.leave(0, 900);
        memory.come_beside_copy(0);
        assert_eq!((memory.pool(), memory.there()), (9128, 1));
        memory.drop_copy(0);
        assert_eq!((memory.pool(), memory.there()), (0, 1));
    }

    #[test]
    fn pages_that_left_first_go_to_the_backing_when_the_pool_is_full() {
        let mut memory = Memory::new(9, 4 * PAGE_BYTES);
        let written = (0..3).map(|page| {
            memory.come(page);
            memory.leave(page, 3000)
        });
        assert_eq!(written.collect::<Vec<_>>(), [0, 0, 3000], "7/8 of 16 384 are 14 336");
        assert_eq!([0, 1, 2].map(|page| memory.place(page)), [Was::Backing, Was::Pool, Was::Pool]);
        assert_eq!(memory.pool(), 8192 + 2 * 3036);
    }
}
