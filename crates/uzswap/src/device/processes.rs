//! The processes of ours: told apart from others with their numbers, started, and waited for.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use uzswap_sys::process;

/// The file of the program that this process runs, even if it was renamed, replaced or removed.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// How long a process gets to end.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// A process, so that another one with its number is not mistaken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
}

impl ProcessId {
    /// The process with this number now.
    pub fn of(pid: u32) -> Option<Self> {
        let pid = pid as i32;
        Some(Self { pid, started: process::start_time(pid)? })
    }

    /// This process.
    pub fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// True if it does nothing any more: no thread of it executes anything, and the kernel writes
    /// nothing into its memory. The rest of it may take for ever to close its files, and nobody
    /// waits for that.
    pub fn is_over(&self) -> bool {
        !process::has_memory(self.pid)
            || process::start_time(self.pid).is_some_and(|started| started != self.started)
    }

    /// True if it is still there.
    pub fn is_alive(&self) -> bool {
        process::start_time(self.pid) == Some(self.started)
    }

    /// True if it has begun to end, or has ended.
    pub fn is_ending(&self) -> bool {
        process::is_ending(self.pid) || !self.is_alive()
    }
}

/// Looks every few milliseconds until `done` or the patience is over; whether it was done.
pub fn wait_for(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !done() {
        if begin.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}
