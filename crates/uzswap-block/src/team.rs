//! The threads of a server: some that always exist, and some for each CPU that is up.
//!
//! A thread's number is that of its connection and buffer. A surplus thread ends when it next has
//! nothing to do; no thread waits for that.

use crate::config::{STACK_BYTES, ServerConfig};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use uzswap_engine::{CpuState, StateDoc};

/// The work of a team's threads.
pub(crate) trait Work: Send + Sync + 'static {
    /// The place of idle threads.
    type Rest: Rest;

    /// Works as thread `number`, until no work will come or the thread has left.
    fn run(self: Arc<Self>, number: usize);

    /// The place of idle threads.
    fn rest(&self) -> &Self::Rest;
}

/// The place of idle threads.
pub(crate) trait Rest {
    /// The CPUs that the threads serve on.
    fn cpus(&self) -> &CpuCount;

    /// Accesses the rota. Every idle thread may read it.
    fn with_rota<T>(&self, change: impl FnOnce(&mut Rota) -> T) -> T;

    /// Wakes an idle thread, if there is one, to check the rota.
    fn wake_one(&self);
}

/// The number of CPUs that are up.
#[derive(Default)]
pub(crate) struct CpuCount(AtomicUsize);

impl CpuCount {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }

    fn add(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    fn remove(&self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Decides which threads exist.
pub(crate) struct Rota {
    /// Surplus threads, which are to leave.
    leaving: usize,
    /// Numbers without a thread.
    away: Vec<usize>,
    /// Threads that are wanted, but have no number.
    missing: usize,
}

impl Rota {
    /// The first `there` of `threads` numbers have a thread.
    pub(crate) fn new(there: usize, threads: usize) -> Self {
        let mut away = Vec::with_capacity(threads);
        away.extend((there..threads).rev());
        Self { leaving: 0, away, missing: 0 }
    }

    /// True if the idle thread is to leave. By then it has left the rota.
    pub(crate) fn leaves(&mut self, number: usize) -> bool {
        let leaves = self.leaving > 0;
        if leaves {
            self.leaving -= 1;
            // No allocation: each number is in `away` at most once.
            self.away.push(number);
        }
        leaves
    }

    /// Number of threads that are away.
    #[cfg(test)]
    pub(crate) fn away(&self) -> usize {
        self.away.len()
    }

    /// One more thread is wanted. Returns the number of a thread to start.
    fn recall(&mut self) -> Option<usize> {
        if self.leaving > 0 {
            self.leaving -= 1;
            return None;
        }
        let number = self.away.pop();
        self.missing += usize::from(number.is_none());
        number
    }

    /// One thread less is wanted. True if a thread is to leave.
    fn dismiss(&mut self) -> bool {
        let leaves = self.missing == 0;
        if leaves {
            self.leaving += 1;
        } else {
            self.missing -= 1;
        }
        leaves
    }
}

/// The threads as a state of a CPU.
pub(crate) const STATE: (&str, StateDoc) = (
    "threads",
    [
        "two threads that serve requests (none with `--threads`), one more that may watch the \
         queue, and one more part that a large write is cut into",
        "They leave when they have nothing to do; until then they serve on.",
    ],
);

/// The threads of a server. Dropping a team waits for its threads: `work` must have ended before.
pub(crate) struct Team<W> {
    pub(crate) work: Arc<W>,
    threads_per_cpu: usize,
    /// The threads, by number.
    threads: Mutex<Box<[Option<JoinHandle<()>>]>>,
}

impl<W: Work> Team<W> {
    /// Starts the threads that always exist. [`Self::cpu_state`] starts those for CPUs.
    pub(crate) fn start(work: Arc<W>, config: &ServerConfig) -> io::Result<Arc<Self>> {
        let team = Self {
            work,
            threads_per_cpu: config.threads_per_cpu,
            threads: Mutex::new((0..config.threads).map(|_| None).collect()),
        };
        for number in 0..config.threads_always() {
            team.start_one(number)?;
        }
        Ok(Arc::new(team))
    }

    fn threads(&self) -> MutexGuard<'_, Box<[Option<JoinHandle<()>>]>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_one(&self, number: usize) -> io::Result<()> {
        let mut threads = self.threads();
        if let Some(before) = threads[number].take() {
            // The last thread of this number has left, and is about to end.
            drop(before.join());
        }
        let work = self.work.clone();
        let thread = Builder::new().name(format!("uzswap-{number}")).stack_size(STACK_BYTES);
        threads[number] = Some(thread.spawn(move || work.run(number))?);
        Ok(())
    }

    pub(crate) fn cpu_came(&self) -> io::Result<()> {
        let rest = self.work.rest();
        rest.cpus().add();
        for started in 0..self.threads_per_cpu {
            let Some(number) = rest.with_rota(Rota::recall) else { continue };
            if let Err(error) = self.start_one(number) {
                rest.with_rota(|rota| rota.away.push(number));
                self.send_away(started);
                rest.cpus().remove();
                return Err(error);
            }
        }
        Ok(())
    }

    pub(crate) fn cpu_went(&self) {
        self.work.rest().cpus().remove();
        self.send_away(self.threads_per_cpu);
    }

    fn send_away(&self, threads: usize) {
        let rest = self.work.rest();
        for _ in 0..threads {
            if rest.with_rota(Rota::dismiss) {
                rest.wake_one();
            }
        }
    }

    /// The part of each CPU in the team; nothing after the team is dropped.
    pub(crate) fn cpu_state(self: &Arc<Self>) -> CpuState {
        let (came, went) = (Arc::downgrade(self), Arc::downgrade(self));
        CpuState::new(
            STATE.0,
            STATE.1,
            move |_, _| came.upgrade().map_or(Ok(()), |team| team.cpu_came()),
            move |_, _| {
                went.upgrade().iter().for_each(|team| team.cpu_went());
                Ok(())
            },
        )
    }
}

impl<W> Drop for Team<W> {
    fn drop(&mut self) {
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        threads.iter_mut().filter_map(Option::take).for_each(|thread| drop(thread.join()));
    }
}
