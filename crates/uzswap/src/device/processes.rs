//! Our processes: identified, started, and waited for.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use uzswap_sys::process;

/// The file of the program that this process runs, even if it was renamed, replaced or removed.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// The time that a process may take to end.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Identifies a process, even after another process has got its number.
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

    /// True if none of the process's threads runs any more, and the kernel no longer writes to its
    /// memory. The kernel may take for ever to close the files of the process, so we do not wait
    /// for that.
    pub fn is_over(&self) -> bool {
        !process::has_memory(self.pid)
            || process::start_time(self.pid).is_some_and(|started| started != self.started)
    }

    /// True if the process still exists.
    pub fn is_alive(&self) -> bool {
        process::start_time(self.pid) == Some(self.started)
    }

    /// True if the process has begun to end, or has ended.
    pub fn is_ending(&self) -> bool {
        process::is_ending(self.pid) || !self.is_alive()
    }
}

/// Calls `done` every few milliseconds until it returns true or `patience` is over. Returns its
/// last result.
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
