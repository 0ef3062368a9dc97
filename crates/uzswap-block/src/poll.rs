//! Decides how long a thread polls for the next request before it sleeps.

use std::time::{Duration, Instant};

/// A yield that takes longer gave the CPU to a program. A sleeping thread then takes no time from
/// the program and is woken before it. A polling thread waits for its turn.
const YIELD_MAX: Duration = Duration::from_micros(50);

/// Times in a row that the thread sleeps without polling after such a yield.
const UNPOLLED: u32 = 64;

/// Decides when a thread stops polling.
pub(crate) struct Poll {
    length: Duration,
    since: Instant,
    /// Times left to sleep without polling.
    unpolled: u32,
}

impl Poll {
    /// Polls for `length` at a time.
    pub(crate) fn new(length: Duration) -> Self {
        Self { length, since: Instant::now(), unpolled: 0 }
    }

    /// Begins to poll after work.
    pub(crate) fn begin(&mut self) {
        self.since = Instant::now();
    }

    /// True if the thread would poll now.
    pub(crate) fn is_patient(&self) -> bool {
        self.unpolled == 0 && self.since.elapsed() < self.length
    }

    /// Yields, and returns true if the caller should poll again. Otherwise the caller should sleep.
    pub(crate) fn again(&mut self) -> bool {
        if !self.is_patient() {
            self.unpolled = self.unpolled.saturating_sub(1);
            return false;
        }
        // A yield, since the thread that brings the next request may need this CPU.
        let yielded = Instant::now();
        std::thread::yield_now();
        if yielded.elapsed() > YIELD_MAX {
            self.unpolled = UNPOLLED;
        }
        true
    }
}
