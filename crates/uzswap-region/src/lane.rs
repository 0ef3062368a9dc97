//! What a thread needs while it serves a fault: one of it per CPU, so that threads on different
//! CPUs write to no cache line in common.

use crate::staging::{BATCH, Staging};
use crate::streams::Streams;
use crossbeam_utils::CachePadded;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::cpu;
use uzswap_sys::map::Mapping;

macro_rules! counts {
    ($($variant:ident $name:literal)*) => {
        /// What lanes count.
        #[derive(Debug, Clone, Copy)]
        pub(crate) enum Count { $($variant),* }
        /// Their names, in the order of [`Count`].
        pub(crate) const COUNTS: [&str; COUNT] = [$($name),*];
        const COUNT: usize = [$($name),*].len();
    };
}

counts! {
    Faults "faults"
    FaultsStaged "faults_staged"
    FaultsUntouched "faults_untouched"
    FaultsWaited "faults_waited_for_memory"
    Around "fault_around_pages"
}

/// Frames with memory, to decode pages into and then move to a region.
pub(crate) struct Fill {
    pub(crate) base: usize,
    pub(crate) next: usize,
    /// The batch of the staging area that they are, or none for the lane's own.
    batch: Option<u32>,
}

impl Fill {
    pub(crate) fn left(&self) -> usize {
        BATCH - self.next
    }
}

/// See the module.
pub(crate) struct Lane {
    /// Where a single page is decoded to.
    pub(crate) page: Box<Page>,
    /// Pages charged and not yet made.
    pub(crate) credit: i64,
    pub(crate) streams: Streams,
    pub(crate) fill: Option<Fill>,
    own: Mapping,
    counts: [u64; COUNT],
}

impl Lane {
    fn new() -> io::Result<Self> {
        let own = Mapping::reserved(BATCH * PAGE_BYTES)?;
        own.keep_apart()?;
        Ok(Self {
            page: Box::new([0; PAGE_BYTES]),
            credit: 0,
            streams: Streams::default(),
            fill: None,
            own,
            counts: [0; COUNT],
        })
    }

    pub(crate) fn count(&mut self, what: Count, by: u64) {
        self.counts[what as usize] += by;
    }

    /// Makes sure that there are frames to fill: a batch of the staging area that is full of unused
    /// ones, or else the lane's own, for which `charge` is asked.
    pub(crate) fn ready(&mut self, staging: &Staging, charge: impl FnOnce(i64) -> bool) -> bool {
        if self.fill.is_some() {
            return true;
        }
        if let Some(batch) = staging.take_full() {
            let base = staging.address(batch as usize * BATCH);
            self.fill = Some(Fill { base, next: 0, batch: Some(batch) });
        } else if charge(BATCH as i64) {
            if self.own.populate().is_err() {
                return false;
            }
            self.fill = Some(Fill { base: self.own.as_ptr() as usize, next: 0, batch: None });
        }
        self.fill.is_some()
    }

    /// Notes that frames have been moved to a region.
    pub(crate) fn used(&mut self, staging: &Staging, frames: usize) {
        let Some(fill) = &mut self.fill else { return };
        fill.next += frames;
        if fill.next == BATCH {
            if let Some(batch) = fill.batch {
                staging.give_hole(batch);
            }
            self.fill = None;
        }
    }
}

/// All of them.
pub(crate) struct Lanes {
    lanes: Box<[CachePadded<Mutex<Lane>>]>,
}

impl Lanes {
    pub(crate) fn new() -> io::Result<Self> {
        let lane = |_| Ok(CachePadded::new(Mutex::new(Lane::new()?)));
        Ok(Self { lanes: (0..cpu::possible()).map(lane).collect::<io::Result<_>>()? })
    }

    pub(crate) fn len(&self) -> usize {
        self.lanes.len()
    }

    /// This CPU's, or any that is free where another thread was preempted in this one.
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

    /// Sums of what was counted.
    pub(crate) fn counts(&self) -> [u64; COUNT] {
        let mut sums = [0; COUNT];
        for lane in &self.lanes {
            let lane = lane.lock().unwrap_or_else(PoisonError::into_inner);
            sums.iter_mut().zip(lane.counts).for_each(|(sum, count)| *sum += count);
        }
        sums
    }
}
