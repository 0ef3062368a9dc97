//! Memory that is counted in total: pages that are there, and the compressed ones of the pool.
//!
//! It decides nothing about which page leaves. The pool has at most seven eighths of all, as a
//! pager's has; beyond that, the page that left first goes to the backing.

use std::collections::VecDeque;

/// Bytes of a page that is there.
pub const PAGE_BYTES: u64 = 4096;

/// The part of the memory that stays for pages.
const PART_FOR_PAGES: u64 = 8;

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageLocation {
    Nowhere,
    There,
    Pool { bytes: u16 },
    Backing,
}

/// Where a page was that is touched.
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
    pool: u64,
    /// Each with how often the page left.
    places: Vec<(PageLocation, u32)>,
    /// Pages of the pool in the order in which they left. An entry holds for a page that left as
    /// often.
    left: VecDeque<(u32, u32)>,
}

impl Memory {
    pub(crate) fn new(pages: usize, bytes: u64) -> Self {
        let places = vec![(PageLocation::Nowhere, 0); pages];
        Self { bytes, there: 0, pool: 0, places, left: VecDeque::new() }
    }

    pub(crate) fn there(&self) -> u64 {
        self.there
    }

    pub(crate) fn pool(&self) -> u64 {
        self.pool
    }

    /// Pages that there may be beside the present pool.
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
            PageLocation::There => Was::Memory,
            PageLocation::Pool { .. } => Was::Pool,
            PageLocation::Backing => Was::Backing,
        }
    }

    /// A page comes that is not there. Its copy is dropped.
    pub(crate) fn come(&mut self, page: usize) {
        self.drop_page(page);
        self.places[page].0 = PageLocation::There;
        self.there += 1;
    }

    /// A page that is there leaves, and has so many bytes in the pool. Bytes that went to the
    /// backing for it.
    pub(crate) fn leave(&mut self, page: usize, bytes: u16) -> u64 {
        self.there -= 1;
        let (place, times) = &mut self.places[page];
        *place = PageLocation::Pool { bytes };
        *times = times.wrapping_add(1);
        self.left.push_back((page as u32, *times));
        self.pool += u64::from(bytes);
        let mut written = 0;
        while self.pool > self.bytes - self.bytes / PART_FOR_PAGES
            && let Some((page, times)) = self.left.pop_front()
        {
            if let (PageLocation::Pool { bytes }, left) = self.places[page as usize]
                && left == times
            {
                self.pool -= u64::from(bytes);
                self.places[page as usize].0 = PageLocation::Backing;
                written += u64::from(bytes);
            }
        }
        written
    }

    /// The program gives a page back, wherever it is.
    pub(crate) fn drop_page(&mut self, page: usize) {
        match std::mem::replace(&mut self.places[page].0, PageLocation::Nowhere) {
            PageLocation::There => self.there -= 1,
            PageLocation::Pool { bytes } => self.pool -= u64::from(bytes),
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
        memory.leave(0, 2000);
        assert!(!memory.has_room(), "2 x 4096 + 2000 leave no page");
        memory.leave(1, 1000);
        assert_eq!((memory.has_room(), memory.pool(), memory.capacity()), (true, 3000, 2));
        memory.drop_page(0);
        memory.come(1);
        assert_eq!((memory.pool(), memory.there()), (0, 2));
    }

    #[test]
    fn pages_that_left_first_go_to_the_backing_when_the_pool_is_full() {
        let mut memory = Memory::new(9, 2 * PAGE_BYTES);
        let written = (0..3).map(|page| {
            memory.come(page);
            memory.leave(page, 3000)
        });
        assert_eq!(written.collect::<Vec<_>>(), [0, 0, 3000], "7/8 of 8192 are 7168");
        assert_eq!([0, 1, 2].map(|page| memory.place(page)), [Was::Backing, Was::Pool, Was::Pool]);
        assert_eq!(memory.pool(), 6000);
    }
}
