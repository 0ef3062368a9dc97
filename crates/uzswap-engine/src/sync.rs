//! Locks and atomics, so that the model checker can put its own in their place.
//!
//! **Order** in which locks are taken (a thread that holds one may take only those to its right):
//!
//! writer → entry → share record's entry → scratch, or an LRU shard → size class → sections
//!
//! Against the order only `try_lock` is used: by compaction, which holds a size class and tries
//! entries.

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, TryLockError, atomic};
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::{Mutex, MutexGuard, TryLockError, atomic};

/// Locks, taking a poisoned lock as the bug that it is: a thread panicked half way through a
/// change, and going on could hand out wrong bytes.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a thread panicked while it held this lock; its data cannot be trusted")
}

/// Locks if that needs no waiting.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::WouldBlock) => None,
        Err(TryLockError::Poisoned(_)) => {
            panic!("a thread panicked while it held this lock; its data cannot be trusted")
        }
    }
}

/// Waits a little longer each time: spin, then yield, then sleep.
///
/// The last step matters under real-time priorities: a thread that only yields would never let a
/// holder of ordinary priority on the same CPU finish.
pub(crate) struct Backoff {
    round: u32,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { round: 0 }
    }

    #[cfg(not(feature = "shuttle"))]
    pub(crate) fn wait(&mut self) {
        const SPINS: u32 = 64;
        const SLEEPS: u32 = SPINS + 8;
        const SLEEP: std::time::Duration = std::time::Duration::from_micros(50);
        match self.round {
            0..SPINS => std::hint::spin_loop(),
            SPINS..SLEEPS => std::thread::yield_now(),
            _ => std::thread::sleep(SLEEP),
        }
        self.round = self.round.saturating_add(1);
    }

    #[cfg(feature = "shuttle")]
    pub(crate) fn wait(&mut self) {
        self.round += 1;
        shuttle::thread::yield_now();
    }
}
