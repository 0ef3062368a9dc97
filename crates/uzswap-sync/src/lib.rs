//! Locks, atomics and epochs. They are in one place so that the model checker can replace them, and
//! their cost can be counted.
//!
//! The engine and the range index share state between threads only by these.

#![forbid(unsafe_code)]

mod backoff;
mod held;
mod lock;
pub mod profile;
pub mod turns;

pub use backoff::Backoff;
pub use held::held;
pub use lock::{Mutex, MutexGuard, lock, try_lock};

#[cfg(feature = "shuttle")]
pub use shuttle::sync::atomic;
#[cfg(not(feature = "shuttle"))]
pub use std::sync::atomic;

use crossbeam_epoch::Guard;

/// While the guard lives, memory that other threads unlink stays. A thread's first call allocates.
#[cfg(not(feature = "shuttle"))]
pub fn pin() -> Guard {
    crossbeam_epoch::pin()
}

/// Pins under the model checker. Its threads all run on one thread of the system, so each call
/// registers a thread of its own with the epochs.
#[cfg(feature = "shuttle")]
pub fn pin() -> Guard {
    static COLLECTOR: std::sync::LazyLock<crossbeam_epoch::Collector> =
        std::sync::LazyLock::new(crossbeam_epoch::Collector::new);
    COLLECTOR.register().pin()
}
