//! Counts the pages that left and the pages that came back, from which the order learns.
//!
//! When a page leaves, its word notes the moment, as a count of pages that left. So a fault knows
//! how many other pages have left since then. Each processor has its own counts. Faults share only
//! the cache line of the moment, which reclaim writes once for 64 pages.

use crate::page::word::{MOMENTS, Word};
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_policy::order::{self, LEVELS, Seen};
use uzswap_sys::cpu;

/// The number of departures that share a moment. A moment recurs after 2^26 departures.
const MOMENT: u64 = 16;

pub(crate) struct Returns {
    departed: CachePadded<AtomicU64>,
    /// Pages that left with a copy that was not known to be out of date.
    compared: AtomicU64,
    of_processors: Box<[CachePadded<OfProcessor>]>,
}

/// The counts of a processor.
#[derive(Default)]
struct OfProcessor {
    /// Pages that returned, by level.
    returned: [AtomicU64; LEVELS],
    /// Faults that brought pages from the cache: a page or a window of pages each.
    loads: AtomicU64,
}

impl Returns {
    pub(crate) fn new() -> Self {
        Self {
            departed: CachePadded::new(AtomicU64::new(0)),
            compared: AtomicU64::new(0),
            of_processors: (0..cpu::possible()).map(|_| CachePadded::default()).collect(),
        }
    }

    /// The word of a page that leaves now. In its frame it had the word `was`. A page that came in
    /// beside another was not judged, so the order learns nothing from it.
    pub(crate) fn departs(&self, was: Word) -> Word {
        if !was.has(Word::USED) {
            return Word::STORED;
        }
        let moment = self.departed.load(Relaxed) / MOMENT % MOMENTS;
        // 0 means no moment.
        Word::stored(was.level(), (moment as u32).max(1))
    }

    /// Counts pages that left; `compared` of them had a copy.
    pub(crate) fn count_departed(&self, pages: u64, compared: u64) {
        self.departed.fetch_add(pages, Relaxed);
        self.compared.fetch_add(compared, Relaxed);
    }

    /// The level of a page that a fault brings back from the cache.
    pub(crate) fn level_from_cache(&self, word: Word, capacity: u64) -> u8 {
        if word.moment() == 0 {
            return 0;
        }
        let now = self.departed.load(Relaxed) / MOMENT;
        let distance = now.wrapping_sub(word.moment().into()) % MOMENTS * MOMENT;
        if order::is_return(distance, capacity) {
            self.count(word.level());
        }
        order::level_of_return(word.level(), distance, capacity)
    }

    /// The level of a page that a fault brings back from the staging area.
    pub(crate) fn level_from_staging(&self, word: Word) -> u8 {
        if word.has(Word::USED) {
            self.count(word.level());
        }
        order::raised(word.level())
    }

    /// Counts a fault that brings pages from the cache.
    pub(crate) fn count_load(&self) {
        self.here().loads.fetch_add(1, Relaxed);
    }

    /// All faults until now that brought pages from the cache.
    pub(crate) fn loads(&self) -> u64 {
        self.of_processors.iter().map(|one| one.loads.load(Relaxed)).sum()
    }

    fn count(&self, level: u8) {
        self.here().returned[usize::from(level)].fetch_add(1, Relaxed);
    }

    fn here(&self) -> &OfProcessor {
        &self.of_processors[cpu::current() % self.of_processors.len()]
    }

    /// All returns until now; `unchanged` pages were found equal to their copies.
    pub(crate) fn seen(&self, unchanged: u64) -> Seen {
        let mut returned = [0; LEVELS];
        for here in self.of_processors.iter().map(|one| &one.returned) {
            returned.iter_mut().zip(here).for_each(|(sum, one)| *sum += one.load(Relaxed));
        }
        Seen { returned, compared: self.compared.load(Relaxed), unchanged }
    }
}
