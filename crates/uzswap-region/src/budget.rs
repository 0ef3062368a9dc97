//! The memory that a pager takes, and may take.
//!
//! The memory is counted in pages: *charged* ones (resident, staged, or reserved for either) and
//! those of the cache. A page is charged before it is made, so the sum never exceeds the budget.
//! Threads charge 32 pages at a time, so that not every fault writes the count.

use rustix::thread::futex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::*, fence};
use std::time::Duration;
use uzswap_engine::PAGE_BYTES;

/// The interval at which a thread without room checks whether the budget has grown.
const LOOK: Duration = Duration::from_millis(5);

pub(crate) struct Budget {
    /// Bytes that everything together may take.
    bytes: AtomicI64,
    charged: AtomicI64,
    /// Pages that may be charged: the budget without the cache, and without the memory that the
    /// cache is about to take.
    limit: AtomicI64,
    /// Pages that the cache is about to take.
    ahead: AtomicI64,
    /// Rung when reclaim should run.
    bell: Bell,
    /// Counts each return of charged pages to the budget, for threads that wait for pages.
    returned: AtomicU32,
    waiting: AtomicU32,
    /// No page can be taken out any more.
    exhausted: AtomicBool,
    /// The number of charged pages when none of them could leave; 0 after a page has left.
    stuck: AtomicI64,
    /// Every request for pages succeeds.
    lifted: AtomicBool,
    /// True while the process is suspended: every request for pages waits until that is over.
    suspended: AtomicBool,
    /// A thread without room waits for the budget to grow, instead of ending the process.
    patient: AtomicBool,
    /// Threads that wait in this way.
    starved: AtomicU32,
}

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        Self {
            bytes: AtomicI64::new(bytes as i64),
            charged: AtomicI64::new(0),
            limit: AtomicI64::new(0),
            ahead: AtomicI64::new(0),
            bell: Bell::default(),
            returned: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            exhausted: AtomicBool::new(false),
            stuck: AtomicI64::new(0),
            lifted: AtomicBool::new(false),
            suspended: AtomicBool::new(false),
            patient: AtomicBool::new(false),
            starved: AtomicU32::new(0),
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed) as u64
    }

    pub(crate) fn set_bytes(&self, bytes: u64) {
        self.bytes.store(bytes as i64, Relaxed);
    }

    /// Sets how much the cache takes, and how much more it is about to take.
    pub(crate) fn set_cache_bytes(&self, bytes: usize, ahead: usize) {
        let left = self.bytes.load(Relaxed) - bytes as i64;
        let ahead = (ahead / PAGE_BYTES) as i64;
        self.ahead.store(ahead, Relaxed);
        self.limit.store(left.div_euclid(PAGE_BYTES as i64) - ahead, Relaxed);
    }

    /// Lets threads have the pages that the cache is about to take, until the cache's size is set
    /// again. Called when no page can be taken out.
    pub(crate) fn lend_ahead(&self) {
        self.limit.fetch_add(self.ahead.swap(0, Relaxed), Relaxed);
    }

    /// Bytes that everything together takes.
    pub(crate) fn used(&self) -> u64 {
        let free = self.room() + self.ahead.load(Relaxed);
        self.bytes().saturating_add_signed(-free * PAGE_BYTES as i64)
    }

    pub(crate) fn charged(&self) -> i64 {
        self.charged.load(Relaxed)
    }

    pub(crate) fn limit(&self) -> i64 {
        self.limit.load(Relaxed)
    }

    /// Pages that can still be charged.
    pub(crate) fn room(&self) -> i64 {
        self.limit() - self.charged()
    }

    /// Pages that reclaim keeps free ahead of need: a 64th of all, and at least two batches.
    pub(crate) fn margin(&self) -> i64 {
        (self.limit() / 64).clamp(128.min(self.limit() / 4), 16384)
    }

    /// Charges pages if there is room.
    pub(crate) fn try_charge(&self, pages: i64) -> bool {
        if self.is_suspended() && !self.lifted.load(Relaxed) {
            return false;
        }
        let before = self.charged.fetch_add(pages, Relaxed);
        let room = self.limit() - before - pages;
        if room < self.margin() {
            self.ring();
        }
        let is_granted = room >= 0 || self.lifted.load(Relaxed);
        if !is_granted {
            self.charged.fetch_sub(pages, Relaxed);
        }
        is_granted
    }

    /// Charges up to `pages` pages, as far as there is room, and returns how many it has charged.
    pub(crate) fn charge_some(&self, pages: i64) -> i64 {
        let some = pages.min(self.room());
        if some > 0 && self.try_charge(some) { some } else { 0 }
    }

    /// While this is set, no thread waits for room, because no thread makes room.
    pub(crate) fn set_lifted(&self, lifted: bool) {
        self.lifted.store(lifted, Relaxed);
        self.changed();
    }

    /// In a suspended process no thread gets pages, but reclaim continues.
    pub(crate) fn set_suspended(&self, suspended: bool) {
        if self.suspended.swap(suspended, Relaxed) != suspended {
            self.changed();
        }
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.suspended.load(Relaxed)
    }

    /// Charges pages without room, because their memory exists already.
    pub(crate) fn charge_anyway(&self, pages: i64) {
        self.charged.fetch_add(pages, Relaxed);
    }

    pub(crate) fn give_back(&self, pages: i64) {
        self.charged.fetch_sub(pages, Relaxed);
        self.changed();
    }

    /// Wakes threads that wait for room.
    pub(crate) fn changed(&self) {
        self.exhausted.store(false, Relaxed);
        self.returned.fetch_add(1, SeqCst);
        if self.waiting.load(SeqCst) != 0 {
            wake_all(&self.returned);
        }
    }

    /// Says that reclaim finds nothing more to take out.
    pub(crate) fn set_exhausted(&self) {
        self.exhausted.store(true, Relaxed);
        self.returned.fetch_add(1, SeqCst);
        wake_all(&self.returned);
    }

    /// Notes that none of the charged pages can leave: they are pinned, or being brought in.
    pub(crate) fn set_stuck(&self) {
        self.stuck.store(self.charged().max(0), Relaxed);
    }

    pub(crate) fn set_moving(&self) {
        self.stuck.store(0, Relaxed);
    }

    /// Charged pages of which none could leave when reclaim last found no room; otherwise 0.
    pub(crate) fn stuck(&self) -> i64 {
        self.stuck.load(Relaxed)
    }

    /// Charges pages. Without room it waits for reclaim; `false` if there will be no room.
    pub(crate) fn charge(&self, pages: i64) -> bool {
        let mut refused = 0;
        loop {
            let seen = self.returned.load(Acquire);
            if self.try_charge(pages) {
                return true;
            }
            if self.exhausted.load(Relaxed) && !self.is_suspended() {
                // Reclaim found nothing. Try once more, in case reclaim said so before this wait
                // began.
                refused += 1;
                if refused > 3 {
                    return false;
                }
                self.exhausted.store(false, Relaxed);
            }
            // In a suspended process reclaim continues by itself, and each step would ring again.
            if !self.is_suspended() {
                self.ring();
            }
            self.waiting.fetch_add(1, SeqCst);
            wait(&self.returned, seen);
            self.waiting.fetch_sub(1, SeqCst);
        }
    }

    /// Charges a page as [`Self::charge`] does, and waits while the pager is patient.
    pub(crate) fn charge_patiently(&self) -> bool {
        if self.charge(1) {
            return true;
        }
        self.starved.fetch_add(1, Relaxed);
        let mut is_charged = false;
        while !is_charged && self.patient.load(Relaxed) {
            std::thread::sleep(LOOK);
            is_charged = self.charge(1);
        }
        self.starved.fetch_sub(1, Relaxed);
        is_charged
    }

    pub(crate) fn set_patient(&self, patient: bool) {
        self.patient.store(patient, Relaxed);
    }

    pub(crate) fn is_starved(&self) -> bool {
        self.starved.load(Relaxed) > 0
    }

    /// Makes reclaim look. If the bell was rung already, this costs a fence and a load.
    pub(crate) fn ring(&self) {
        // Pairs with the fence in `Bell::wait`: if this thread finds the bell rung, the thread that
        // takes the ring sees the change. Without the fences a processor could read the bell before
        // the change is visible, and reclaim would sleep with work to do.
        fence(SeqCst);
        if !self.bell.is_rung() {
            // Only a few threads wait. All check, and one finds the work.
            self.bell.ring();
        }
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }
}

/// The word on which threads of a pager wait for work.
#[derive(Default)]
pub(crate) struct Bell(AtomicU32);

impl Bell {
    fn is_rung(&self) -> bool {
        self.0.load(Relaxed) != 0
    }

    /// Wakes the waiting threads, unless the bell is rung already.
    pub(crate) fn ring(&self) {
        if self.0.swap(1, AcqRel) == 0 {
            wake_all(&self.0);
        }
    }

    pub(crate) fn wait(&self) {
        while self.0.swap(0, AcqRel) == 0 {
            wait(&self.0, 0);
        }
        // The fence comes before the caller looks for work: see `Budget::ring`.
        fence(SeqCst);
    }
}

/// Waits while a word has a value. Returns early at a signal.
pub(crate) fn wait(word: &AtomicU32, value: u32) {
    // The wait ends by a signal or a change of the word. The caller checks again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, None);
}

pub(crate) fn wake_all(word: &AtomicU32) {
    // With a valid address this cannot fail.
    let _ = futex::wake(word, futex::Flags::PRIVATE, i32::MAX as u32);
}
