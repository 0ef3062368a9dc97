//! Waiting for another thread without a lock to sleep on.

/// Waits a little longer each time: spin, then yield, then sleep.
///
/// The last step matters under real-time priorities: a thread that only yields would never let a
/// holder of ordinary priority on the same CPU finish.
#[derive(Debug, Default)]
pub struct Backoff {
    round: u32,
}

impl Backoff {
    /// A backoff that has not waited yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits.
    #[cfg(not(feature = "shuttle"))]
    pub fn wait(&mut self) {
        const SPINS: u32 = 64;
        const SLEEPS: u32 = SPINS + 8;
        const SLEEP: std::time::Duration = std::time::Duration::from_micros(50);
        if crate::turns::number().is_some() {
            return crate::turns::wait();
        }
        match self.round {
            0..SPINS => std::hint::spin_loop(),
            SPINS..SLEEPS => std::thread::yield_now(),
            _ => std::thread::sleep(SLEEP),
        }
        self.round = self.round.saturating_add(1);
    }

    /// Lets the model checker's other threads run.
    #[cfg(feature = "shuttle")]
    pub fn wait(&mut self) {
        self.round += 1;
        shuttle::thread::yield_now();
    }
}
