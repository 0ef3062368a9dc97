//! The faults that handler threads serve at this moment.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*, fence};

/// The most threads that serve messages: they share one queue in the kernel.
pub(crate) const HANDLERS_MAX: usize = 8;

#[derive(Default)]
pub(crate) struct Handlers {
    turns: [CachePadded<Turns>; HANDLERS_MAX],
    begun: AtomicUsize,
}

/// Counts how often a handler thread began and ended serving a fault: odd while it serves one.
#[derive(Default)]
pub(crate) struct Turns(AtomicU64);

impl Handlers {
    /// The count for a handler thread that begins. The thread that had this count before has ended.
    pub(crate) fn next(&self) -> &Turns {
        &self.turns[self.begun.fetch_add(1, Relaxed) % HANDLERS_MAX]
    }

    /// Waits until handler threads have served their present faults. A thread that waits for a page
    /// may continue before a handler serves its message, because another thread has brought the
    /// page in. The continued thread may then unmap the region.
    pub(crate) fn wait(&self) {
        fence(SeqCst);
        for Turns(turns) in self.turns.iter().map(|turns| &**turns) {
            let seen = turns.load(Acquire);
            while !seen.is_multiple_of(2) && turns.load(Acquire) == seen {
                std::thread::yield_now();
            }
        }
    }
}

impl Turns {
    pub(crate) fn serve<R>(&self, serve: impl FnOnce() -> R) -> R {
        // Ordered before the search for the region: see [`Handlers::wait`].
        self.0.fetch_add(1, Relaxed);
        fence(SeqCst);
        let result = serve();
        self.0.fetch_add(1, Release);
        result
    }
}
