//! Buffers of a thread that serves a fault: one set per CPU, so that threads on different
//! CPUs write to no cache line in common.

#![expect(
    unsafe_code,
    reason = "a lane gives the memory of its own buffer back: the buffer's pages are read under the lane's lock alone"
)]

use crate::staging::BATCH;
use crossbeam_utils::CachePadded;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_policy::ahead::Streams;
use uzswap_sys::cpu;
use uzswap_sys::map::Mapping;

macro_rules! counts {
    ($($variant:ident $name:literal)*) => {
        /// The counts of lanes.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Count { $($variant),* }
        /// The names of the counts, in the order of [`Count`].
        pub(crate) const COUNTS: [&str; COUNT] = [$($name),*];
        const COUNT: usize = [$($name),*].len();
    };
}

counts! {
    Faults "faults"
    FaultsStaged "faults_staged"
    FaultsUntouched "faults_untouched"
    FaultsWaited "faults_waited_for_memory"
    FaultsGuarded "faults_guarded"
    Around "fault_around_pages"
    Ahead "read_ahead_pages"
}

/// Loaded pages that a lane notes: those of two batches.
const LOADED_MAX: usize = 2 * BATCH;

pub(crate) struct Lane {
    /// The buffer into which a single page is decoded.
    pub(crate) page: Box<Page>,
    /// The number of pages that are charged but not made yet.
    pub(crate) credit: i64,
    pub(crate) streams: Streams,
    /// The first pages, with their regions, that came from the cache since reclaim last checked.
    /// The cache still has their copies.
    loaded: Vec<(u32, u32)>,
    /// The memory into which a window of pages is decoded: addresses for a batch.
    window: Option<Mapping>,
    /// The charged pages of `window`.
    window_pages: usize,
    /// The largest window since reclaim looked.
    window_used: usize,
    counts: [u64; COUNT],
}

impl Lane {
    fn new() -> Self {
        Self {
            page: Box::new([0; PAGE_BYTES]),
            credit: 0,
            streams: Streams::default(),
            loaded: Vec::with_capacity(LOADED_MAX),
            window: None,
            window_pages: 0,
            window_used: 0,
            counts: [0; COUNT],
        }
    }

    /// Notes that a page came from the cache, which still has a copy of it.
    pub(crate) fn note_loaded(&mut self, region: u32, page: u32) {
        if self.loaded.len() < LOADED_MAX {
            self.loaded.push((region, page));
        }
    }

    /// Gives up the pages that this lane has charged for later, and returns their number.
    fn take_charged(&mut self) -> i64 {
        self.window = None;
        std::mem::take(&mut self.credit) + std::mem::take(&mut self.window_pages) as i64
    }

    /// Gives back the part of the lane's buffer that no window has used since the last call, and
    /// returns the number of pages in that part.
    fn take_unused(&mut self) -> i64 {
        let used = std::mem::take(&mut self.window_used);
        let unused = self.window_pages.saturating_sub(used);
        let Some(window) = self.window.as_ref().filter(|_| unused > 0) else { return 0 };
        // SAFETY: nothing reads a window's pages after they were copied in, under the lane's lock.
        let discarded = unsafe { window.discard_part(used * PAGE_BYTES, unused * PAGE_BYTES) };
        if discarded.is_err() {
            return 0;
        }
        self.window_pages = used;
        unused as i64
    }

    pub(crate) fn count(&mut self, what: Count, by: u64) {
        self.counts[what as usize] += by;
    }

    /// The address of a buffer for up to `pages` pages, and the number of pages that it has room
    /// for. `charge` is asked for the pages that the lane lacks. `None` if there is room for one
    /// page at most.
    pub(crate) fn window(
        &mut self,
        pages: usize,
        charge: impl FnOnce(i64) -> bool,
    ) -> Option<(usize, usize)> {
        if self.window.is_none() {
            self.window = Mapping::reserved(BATCH * PAGE_BYTES).ok();
        }
        let window = self.window.as_ref()?;
        let pages = pages.min(BATCH);
        if pages > self.window_pages && charge((pages - self.window_pages) as i64) {
            self.window_pages = pages;
        }
        let pages = pages.min(self.window_pages);
        self.window_used = self.window_used.max(pages);
        (pages > 1).then(|| (window.as_ptr() as usize, pages))
    }
}

/// The lanes of all CPUs.
pub(crate) struct Lanes {
    lanes: Box<[CachePadded<Mutex<Lane>>]>,
    ahead: CachePadded<Mutex<Lane>>,
}

impl Lanes {
    pub(crate) fn new() -> Self {
        let lane = || CachePadded::new(Mutex::new(Lane::new()));
        Self { lanes: (0..cpu::possible()).map(|_| lane()).collect(), ahead: lane() }
    }

    pub(crate) fn len(&self) -> usize {
        self.lanes.len() + 1
    }

    /// The lane of the read-ahead thread.
    pub(crate) fn ahead(&self) -> MutexGuard<'_, Lane> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lane of this CPU, or a free lane if a preempted thread holds this CPU's.
    pub(crate) fn here(&self) -> MutexGuard<'_, Lane> {
        let here = cpu::current() % self.lanes.len();
        for step in 0..self.lanes.len() {
            match self.lanes[(here + step) % self.lanes.len()].try_lock() {
                Ok(lane) => return lane,
                Err(TryLockError::Poisoned(lane)) => return lane.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        self.lanes[here].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the loaded pages that the free lanes have noted.
    pub(crate) fn take_loaded(&self) -> Vec<(u32, u32)> {
        let free = self.lanes.iter().filter_map(|lane| lane.try_lock().ok());
        // Nothing is allocated under a lane's lock.
        let mut loaded = Vec::with_capacity(self.lanes.len() * LOADED_MAX);
        free.for_each(|mut lane| loaded.append(&mut lane.loaded));
        loaded
    }

    /// Takes the pages that free lanes have charged for later, and returns their number. Each CPU
    /// has such pages, so with many CPUs they are a large part of a small budget.
    pub(crate) fn take_charged(&self) -> i64 {
        let all = self.lanes.iter().chain([&self.ahead]);
        all.filter_map(|lane| lane.try_lock().ok()).map(|mut lane| lane.take_charged()).sum()
    }

    /// Takes the pages of buffers that free lanes have not used since the last call, and returns
    /// their number.
    pub(crate) fn take_unused(&self) -> i64 {
        let all = self.lanes.iter().chain([&self.ahead]);
        all.filter_map(|lane| lane.try_lock().ok()).map(|mut lane| lane.take_unused()).sum()
    }

    pub(crate) fn all(&self) -> Vec<MutexGuard<'_, Lane>> {
        let all = self.lanes.iter().chain([&self.ahead]);
        all.map(|lane| lane.lock().unwrap_or_else(PoisonError::into_inner)).collect()
    }

    /// Sums of the counts.
    pub(crate) fn counts(&self) -> [u64; COUNT] {
        let mut sums = [0; COUNT];
        for lane in self.lanes.iter().chain([&self.ahead]) {
            let lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
            sums.iter_mut().zip(lane.counts).for_each(|(sum, count)| *sum += count);
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_lanes_give_up_the_pages_that_they_have_charged() {
        let lanes = Lanes::new();
        let (_, pages) = lanes.here().window(8, |_| true).unwrap();
        lanes.ahead().credit = 5;
        let (taken, kept) = {
            let mut used = lanes.ahead();
            used.credit += 1;
            (lanes.take_charged(), used.credit)
        };
        assert_eq!((taken, kept), (pages as i64, 6), "a lane in use keeps its own");
        assert_eq!((lanes.take_charged(), lanes.take_charged()), (6, 0));
        assert!(lanes.here().window(8, |_| false).is_none(), "it has no room left");
    }

    #[test]
    fn a_lane_gives_back_the_part_of_its_buffer_that_it_does_not_use() {
        let lanes = Lanes::new();
        let mut lane = lanes.ahead();
        lane.window(64, |_| true).unwrap();
        assert_eq!(lane.take_unused(), 0, "it was used just now");
        lane.window(4, |_| panic!("it has 64 pages")).unwrap();
        assert_eq!((lane.take_unused(), lane.take_unused()), (60, 4));
        let (at, pages) = lane.window(8, |pages| pages == 8).unwrap();
        assert_eq!((at % PAGE_BYTES, pages), (0, 8));
        drop(lane);
        assert_eq!((lanes.take_unused(), lanes.take_unused()), (0, 8));
    }
}
