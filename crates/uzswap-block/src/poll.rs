//! How long a thread looks for the next request before it sleeps.

use std::time::{Duration, Instant};

/// A yield that takes longer gave the CPU to a program. Then a thread that sleeps takes no time
/// from the program and is woken before it, whereas a thread that polls waits for its turn.
const YIELD_MAX: Duration = Duration::from_micros(50);

/// Times that it sleeps at once after such a yield.
const UNPOLLED: u32 = 64;

/// One thread's patience.
pub(crate) struct Poll {
    length: Duration,
    since: Instant,
    /// Times to come, its CPU being wanted by others.
    unpolled: u32,
}

impl Poll {
    /// Polls for `length` at a time.
    pub(crate) fn new(length: Duration) -> Self {
        Self { length, since: Instant::now(), unpolled: 0 }
    }

    /// There was something to do.
    pub(crate) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// True if it would poll now.
    pub(crate) fn is_patient(&self) -> bool {
        self.unpolled == 0 && self.since.elapsed() < self.length
    }

    /// True, after a yield, if the caller shall look again; otherwise it sleeps now.
    pub(crate) fn again(&mut self) -> bool {
        if !self.is_patient() {
            self.unpolled = self.unpolled.saturating_sub(1);
            return false;
        }
        // Not a mere spin: the thread that would bring the request may need this CPU.
        let yielded = Instant::now();
        std::thread::yield_now();
        if yielded.elapsed() > YIELD_MAX {
            self.unpolled = UNPOLLED;
        }
        true
    }
}
