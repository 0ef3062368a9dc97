//! Atomics and epochs, so that the model checker can put its own in their place.

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::atomic;
#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::atomic;

use crossbeam_epoch::Guard;

/// Holds back the freeing of what other threads unlink from now on.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn pin() -> Guard {
    crossbeam_epoch::pin()
}

/// The same for threads of the model checker, which are all one to the system: each call is a
/// thread of its own to the epochs.
#[cfg(feature = "shuttle")]
pub(crate) fn pin() -> Guard {
    static COLLECTOR: std::sync::LazyLock<crossbeam_epoch::Collector> =
        std::sync::LazyLock::new(crossbeam_epoch::Collector::new);
    COLLECTOR.register().pin()
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
