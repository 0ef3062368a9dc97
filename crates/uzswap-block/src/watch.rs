//! The server's threads that watch the queue, and the waking of the others.
//!
//! A parked thread is called for one purpose: to watch, or to help with another thread's large
//! write. Each parked thread sleeps on its own word, so a call wakes one thread. The thread that
//! parked last is called first, since its memory is still in the CPU's cache. One lock guards this
//! state. A thread takes the lock to park, to leave or to call, not for each request.

use crate::batch::Batch;
use crate::team::{CpuCount, Rest, Rota};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The threads of a server.
pub(crate) struct Watch {
    /// Threads that watch. There is at least one, unless all threads do long work.
    watchers: AtomicUsize,
    /// CPUs that are up. More watchers than CPUs are useless.
    cpus: CpuCount,
    parked: Mutex<Parked>,
    /// The condition variable that each thread sleeps on.
    calls: Box<[Condvar]>,
}

struct Parked {
    /// Threads that wait for a call. The last to park is at the end.
    waiting: Vec<usize>,
    /// For each thread, the work that it was called for and has not begun.
    called: Box<[Option<Call>]>,
    rota: Rota,
    closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Watch,
    /// Help with the batch of that thread.
    Help(usize),
    /// Look at the rota: the called thread may be one that is to leave.
    Look,
}

/// The reason why a watcher that parked came back.
#[derive(PartialEq, Eq)]
pub(crate) enum Parking {
    /// The thread may not park, since it is the last watcher.
    Refused,
    /// Another thread called the thread back to watch.
    Called,
    /// The thread must leave, and does not watch any more.
    Left,
}

impl Watch {
    /// For `threads` threads. The first `there` of them exist, and none watches yet.
    pub(crate) fn new(there: usize, threads: usize) -> Self {
        Self {
            watchers: AtomicUsize::new(0),
            cpus: CpuCount::default(),
            parked: Mutex::new(Parked {
                waiting: Vec::with_capacity(threads),
                called: vec![None; threads].into(),
                rota: Rota::new(there, threads),
                closed: false,
            }),
            calls: (0..threads).map(|_| Condvar::new()).collect(),
        }
    }

    fn parked(&self) -> MutexGuard<'_, Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if another watcher would help.
    pub(crate) fn has_room(&self) -> bool {
        self.watchers.load(Relaxed) < self.cpus.get()
    }

    /// Parks the watching thread `number`, unless it is the last watcher. While parked, it may be
    /// called to help: then it calls `help` with the number of the thread whose batch needs
    /// helpers.
    pub(crate) fn park(&self, number: usize, help: impl Fn(usize)) -> Parking {
        if self.watchers.load(Relaxed) <= 1 {
            return Parking::Refused;
        }
        let mut parked = self.parked();
        let less = |watchers: usize| (watchers > 1 && !parked.closed).then(|| watchers - 1);
        if self.watchers.fetch_update(SeqCst, SeqCst, less).is_err() {
            return Parking::Refused;
        }
        if parked.rota.leaves(number) {
            return Parking::Left;
        }
        parked.waiting.push(number);
        loop {
            match parked.called[number].take() {
                Some(Call::Watch) => return Parking::Called,
                Some(call) => {
                    if let Call::Help(other) = call {
                        drop(parked);
                        help(other);
                        parked = self.parked();
                    }
                    // All others may have begun long work since, and found no thread to call.
                    if self.watchers.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
                        return Parking::Called;
                    }
                    if parked.rota.leaves(number) {
                        return Parking::Left;
                    }
                    parked.waiting.push(number);
                }
                None if parked.closed => return Parking::Called,
                None => {
                    let call = &self.calls[number];
                    parked = call.wait(parked).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// Calls the thread that parked last; `false` if there is none.
    fn call_one(&self, parked: &mut Parked, call: Call) -> bool {
        let Some(number) = parked.waiting.pop() else { return false };
        parked.called[number] = Some(call);
        self.calls[number].notify_one();
        true
    }

    /// Makes a parked thread a watcher, if there is one.
    pub(crate) fn call(&self) {
        let mut parked = self.parked();
        if self.call_one(&mut parked, Call::Watch) {
            self.watchers.fetch_add(1, SeqCst);
        }
    }

    /// The caller stops watching. If it was the last watcher, it calls a parked thread.
    pub(crate) fn leave(&self) {
        if self.watchers.fetch_sub(1, SeqCst) == 1 {
            self.call();
        }
    }

    pub(crate) fn come_back(&self) {
        self.watchers.fetch_add(1, SeqCst);
    }

    /// Wakes parked threads, at most one for each other CPU, to help with the batch of thread
    /// `number`.
    pub(crate) fn share(&self, number: usize, batch: &Batch) {
        let mut parked = self.parked();
        // Under the lock, so that a called thread cannot leave before it is counted.
        let called =
            (1..self.cpus.get()).take_while(|_| self.call_one(&mut parked, Call::Help(number)));
        called.for_each(|_| batch.expect());
    }

    /// Takes back the calls for helpers that no thread has answered.
    pub(crate) fn unshare(&self, number: usize, batch: &Batch) {
        let mut parked = self.parked();
        let Parked { waiting, called, .. } = &mut *parked;
        for (helper, call) in called.iter_mut().enumerate() {
            if *call == Some(Call::Help(number)) {
                *call = None;
                waiting.push(helper);
                batch.leave();
            }
        }
    }

    pub(crate) fn close(&self) {
        self.parked().closed = true;
        self.calls.iter().for_each(Condvar::notify_one);
    }
}

impl Rest for Watch {
    fn cpus(&self) -> &CpuCount {
        &self.cpus
    }

    fn with_rota<T>(&self, change: impl FnOnce(&mut Rota) -> T) -> T {
        change(&mut self.parked().rota)
    }

    /// Calls the thread that parked first, if there is one, to check the rota.
    fn wake_one(&self) {
        let mut parked = self.parked();
        if !parked.waiting.is_empty() {
            let number = parked.waiting.remove(0);
            parked.called[number] = Some(Call::Look);
            self.calls[number].notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServerConfig;
    use crate::team::{Team, Work};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    const CPUS: usize = 3;
    const REQUESTS: usize = 60_000;

    /// A server without a kernel. Requests are numbers, and every third is a large write.
    struct Play {
        watch: Watch,
        next: AtomicUsize,
        done: AtomicUsize,
        batches: Box<[Batch]>,
        helped: AtomicUsize,
        quiet: AtomicBool,
    }

    impl Play {
        /// True if the thread continues.
        fn park(&self, number: usize) -> bool {
            let parking = self.watch.park(number, |other| {
                self.helped.fetch_add(1, Relaxed);
                self.batches[other].leave();
            });
            parking != Parking::Left
        }
    }

    impl Work for Play {
        type Rest = Watch;

        fn run(self: Arc<Self>, number: usize) {
            self.watch.come_back();
            if !self.park(number) {
                return;
            }
            while !self.quiet.load(Relaxed) {
                let request = self.next.fetch_add(1, Relaxed);
                // At times the queue is empty, and after the last request for good.
                if request.is_multiple_of(5) || request >= REQUESTS {
                    if !self.park(number) {
                        return;
                    }
                    std::thread::yield_now();
                } else if request.is_multiple_of(3) {
                    self.watch.leave();
                    let batch = &self.batches[number];
                    batch.start(0, 0);
                    self.watch.share(number, batch);
                    std::thread::yield_now();
                    self.watch.unshare(number, batch);
                    batch.finish().unwrap();
                    self.watch.come_back();
                }
                self.done.fetch_add(1, Relaxed);
            }
        }

        fn rest(&self) -> &Watch {
            &self.watch
        }
    }

    #[test]
    fn a_thread_always_watches_though_threads_help_and_come_and_go() {
        let config = ServerConfig::for_cpus(CPUS);
        let play = Arc::new(Play {
            watch: Watch::new(config.threads_always(), config.threads),
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            batches: (0..config.threads).map(|_| Batch::default()).collect(),
            helped: AtomicUsize::new(0),
            quiet: AtomicBool::new(false),
        });
        let team = Team::start(play.clone(), &config).unwrap();
        (0..CPUS).for_each(|_| team.cpu_came().unwrap());
        let (mut waited, mut turns) = (0, 0);
        while play.done.load(Relaxed) < REQUESTS {
            turns += 1;
            // All CPUs but one leave, and one more CPU comes than there are numbers.
            let cpus = [1, CPUS + 1][turns % 2];
            while play.watch.cpus.get() > cpus {
                team.cpu_went();
            }
            while play.watch.cpus.get() < cpus {
                team.cpu_came().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
            let parked = play.watch.parked();
            let watchers = play.watch.watchers.load(SeqCst);
            let (waiting, there) = (parked.waiting.len(), config.threads - parked.rota.away());
            assert!(watchers > 0 || waiting < there, "{watchers} watch, {waiting} of {there} wait");
            waited = waited.max(waiting);
        }
        let is_left = |threads: usize| play.watch.parked().rota.away() == config.threads - threads;
        while play.watch.cpus.get() > 0 {
            team.cpu_went();
        }
        let began = Instant::now();
        while !is_left(config.threads_always()) && began.elapsed() < Duration::from_secs(60) {
            std::thread::yield_now();
        }
        assert!(is_left(config.threads_always()), "those that are always there stay, and no more");
        play.quiet.store(true, Relaxed);
        play.watch.close();
        drop(team);
        assert!(waited > 0 && play.helped.load(Relaxed) > 0, "threads parked and helped");
    }
}
