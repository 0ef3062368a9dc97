//! The faults that handler threads serve at this moment.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*, fence};

/// Threads that serve messages, at most: they share one queue in the kernel.
pub(crate) const HANDLERS_MAX: usize = 8;

/// See the module.
#[derive(Default)]
pub(crate) struct Handlers {
    turns: [CachePadded<Turns>; HANDLERS_MAX],
    begun: AtomicUsize,
}

/// How often a handler thread began to serve a fault and how often it was done: odd while it serves
/// one.
#[derive(Default)]
pub(crate) struct Turns(AtomicU64);

impl Handlers {
    /// Those of a thread that begins. A thread that had them before has ended.
    pub(crate) fn next(&self) -> &Turns {
        &self.turns[self.begun.fetch_add(1, Relaxed) % HANDLERS_MAX]
    }

    /// Waits until no handler thread serves a fault that it began to before. A thread that waited
    /// for a page may go on before its own message is served, when another thread has brought the
    /// page in. Then it may unmap the region.
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
    /// Serves a fault.
    pub(crate) fn serve<R>(&self, serve: impl FnOnce() -> R) -> R {
        // Ordered before the look for the region: see [`Handlers::wait`].
        self.0.fetch_add(1, Relaxed);
        fence(SeqCst);
        let result = serve();
        self.0.fetch_add(1, Release);
        result
    }
}
