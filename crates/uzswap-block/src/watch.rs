//! Which of the server's threads watch the queue, and what wakes the others.
//!
//! A parked thread is called either to watch or to help with another's large write. One lock
//! guards both; it is taken when a thread parks, leaves or is called, not for each request.

use crate::batch::Batch;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The threads of a server.
pub(crate) struct Watch {
    /// Those that watch. At least one, unless all threads are at long work.
    watchers: AtomicUsize,
    /// Watchers that are worth having: no more than CPUs.
    watchers_max: usize,
    parked: Mutex<Parked>,
    call: Condvar,
}

struct Parked {
    threads: usize,
    /// Threads called to watch that have not left yet.
    called: usize,
    /// Threads whose batch wants helpers, one number for each. Never more than there are threads.
    wanted: Vec<usize>,
    closed: bool,
}

/// What became of a watcher that went to park.
#[derive(PartialEq, Eq)]
pub(crate) enum Parking {
    /// It may not: it is the last one.
    Refused,
    /// It was called back to watch.
    Called,
}

impl Watch {
    /// For `threads` threads on `cpus` CPUs; the first watches from the start.
    pub(crate) fn new(threads: usize, cpus: usize) -> Self {
        let parked =
            Parked { threads: 0, called: 0, wanted: Vec::with_capacity(threads), closed: false };
        Self {
            watchers: AtomicUsize::new(1),
            watchers_max: cpus,
            parked: Mutex::new(parked),
            call: Condvar::new(),
        }
    }

    fn parked(&self) -> MutexGuard<'_, Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another watcher would be of use.
    pub(crate) fn has_room(&self) -> bool {
        self.watchers.load(Relaxed) < self.watchers_max
    }

    /// Parks the caller, a watcher, unless it is the last; it calls `help` with the number of
    /// another thread whose batch waits for helpers.
    pub(crate) fn park(&self, help: impl Fn(usize)) -> Parking {
        if self.watchers.load(Relaxed) <= 1 {
            return Parking::Refused;
        }
        let mut parked = self.parked();
        let less = |watchers: usize| (watchers > 1 && !parked.closed).then(|| watchers - 1);
        if self.watchers.fetch_update(SeqCst, SeqCst, less).is_err() {
            return Parking::Refused;
        }
        parked.threads += 1;
        while parked.called == 0 && !parked.closed {
            if let Some(number) = parked.wanted.pop() {
                parked.threads -= 1;
                drop(parked);
                help(number);
                parked = self.parked();
                parked.threads += 1;
            } else {
                parked = self.call.wait(parked).unwrap_or_else(PoisonError::into_inner);
            }
        }
        parked.called = parked.called.saturating_sub(1);
        parked.threads -= 1;
        Parking::Called
    }

    /// Makes a parked thread a watcher, if there is one.
    pub(crate) fn call(&self) {
        let mut parked = self.parked();
        if parked.threads > parked.called {
            parked.called += 1;
            self.watchers.fetch_add(1, SeqCst);
            // All: one that wakes first may have taken a batch instead.
            self.call.notify_all();
        }
    }

    /// The caller stops watching for a while; another takes over if it was the last.
    pub(crate) fn leave(&self) {
        if self.watchers.fetch_sub(1, SeqCst) == 1 {
            self.call();
        }
    }

    pub(crate) fn come_back(&self) {
        self.watchers.fetch_add(1, SeqCst);
    }

    /// Wakes parked threads, as many as there are other CPUs, to help with the caller's batch.
    pub(crate) fn share(&self, number: usize, batch: &Batch) {
        let mut parked = self.parked();
        let free = parked.threads.saturating_sub(parked.called + parked.wanted.len());
        for _ in 0..free.min(self.watchers_max.saturating_sub(1)) {
            batch.expect();
            parked.wanted.push(number);
            self.call.notify_one();
        }
    }

    /// Takes back the calls for helpers that nobody has answered.
    pub(crate) fn unshare(&self, number: usize, batch: &Batch) {
        let mut parked = self.parked();
        let before = parked.wanted.len();
        parked.wanted.retain(|wanted| *wanted != number);
        (parked.wanted.len()..before).for_each(|_| batch.leave());
    }

    pub(crate) fn close(&self) {
        self.parked().closed = true;
        self.call.notify_all();
    }
}
