//! Which of the server's threads watch the queue, and what wakes the others.
//!
//! A thread that is parked is called for one thing: to watch, or to help with another's large
//! write. Each sleeps by itself, and the one that parked last is called first, since its memory is
//! still in the CPU's cache: a call wakes one thread. One lock guards it all; it is taken when a
//! thread parks, leaves or is called, not for each request.

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
    /// What each thread sleeps on.
    calls: Box<[Condvar]>,
}

struct Parked {
    /// Threads that wait to be called, the last to park at the end.
    waiting: Vec<usize>,
    /// For each thread, what it was called for and has not begun.
    called: Box<[Option<Call>]>,
    closed: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Watch,
    /// With the batch of that thread.
    Help(usize),
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
        Self {
            watchers: AtomicUsize::new(1),
            watchers_max: cpus,
            parked: Mutex::new(Parked {
                waiting: Vec::with_capacity(threads),
                called: vec![None; threads].into(),
                closed: false,
            }),
            calls: (0..threads).map(|_| Condvar::new()).collect(),
        }
    }

    fn parked(&self) -> MutexGuard<'_, Parked> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another watcher would be of use.
    pub(crate) fn has_room(&self) -> bool {
        self.watchers.load(Relaxed) < self.watchers_max
    }

    /// Parks thread `number`, a watcher, unless it is the last; it calls `help` with the number of
    /// another thread whose batch waits for helpers.
    pub(crate) fn park(&self, number: usize, help: impl Fn(usize)) -> Parking {
        if self.watchers.load(Relaxed) <= 1 {
            return Parking::Refused;
        }
        let mut parked = self.parked();
        let less = |watchers: usize| (watchers > 1 && !parked.closed).then(|| watchers - 1);
        if self.watchers.fetch_update(SeqCst, SeqCst, less).is_err() {
            return Parking::Refused;
        }
        parked.waiting.push(number);
        loop {
            match parked.called[number].take() {
                Some(Call::Watch) => return Parking::Called,
                Some(Call::Help(other)) => {
                    drop(parked);
                    help(other);
                    parked = self.parked();
                    // All others may have turned to long work meanwhile, and found nobody to call.
                    if self.watchers.compare_exchange(0, 1, SeqCst, SeqCst).is_ok() {
                        return Parking::Called;
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

    /// The caller stops watching for a while; another takes over if it was the last.
    pub(crate) fn leave(&self) {
        if self.watchers.fetch_sub(1, SeqCst) == 1 {
            self.call();
        }
    }

    pub(crate) fn come_back(&self) {
        self.watchers.fetch_add(1, SeqCst);
    }

    /// Wakes parked threads, as many as there are other CPUs, to help with the batch of thread
    /// `number`.
    pub(crate) fn share(&self, number: usize, batch: &Batch) {
        let mut parked = self.parked();
        // Under the lock: who is called cannot leave before it is expected.
        let called =
            (1..self.watchers_max).take_while(|_| self.call_one(&mut parked, Call::Help(number)));
        called.for_each(|_| batch.expect());
    }

    /// Takes back the calls for helpers that nobody has answered.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    const THREADS: usize = 6;
    const REQUESTS: usize = 60_000;

    /// A server without a kernel: requests are numbers, of which every third is a large write.
    struct Play {
        watch: Watch,
        next: AtomicUsize,
        done: AtomicUsize,
        batches: Box<[Batch]>,
        helped: AtomicUsize,
        quiet: AtomicBool,
    }

    impl Play {
        fn park(&self, number: usize) {
            self.watch.park(number, |other| {
                self.helped.fetch_add(1, Relaxed);
                self.batches[other].leave();
            });
        }

        fn serve(&self, number: usize) {
            if number > 0 {
                self.watch.come_back();
                self.park(number);
            }
            while !self.quiet.load(Relaxed) {
                let request = self.next.fetch_add(1, Relaxed);
                // Now and then the queue is empty, and after the last request for good.
                if request.is_multiple_of(5) || request >= REQUESTS {
                    self.park(number);
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
    }

    #[test]
    fn somebody_always_watches_and_all_who_help_leave() {
        let play = Arc::new(Play {
            watch: Watch::new(THREADS, 3),
            next: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            batches: (0..THREADS).map(|_| Batch::default()).collect(),
            helped: AtomicUsize::new(0),
            quiet: AtomicBool::new(false),
        });
        let (ended, end) = channel::<()>();
        for number in 0..THREADS {
            let (play, ended) = (play.clone(), ended.clone());
            std::thread::spawn(move || {
                play.serve(number);
                drop(ended);
            });
        }
        drop(ended);
        let mut before = 0;
        while play.done.load(Relaxed) < REQUESTS {
            std::thread::sleep(Duration::from_millis(1));
            let watchers = play.watch.watchers.load(SeqCst);
            let waiting = play.watch.parked().waiting.len();
            assert!(watchers > 0 || waiting < THREADS, "{watchers} watch, {waiting} wait");
            before = before.max(waiting);
        }
        play.quiet.store(true, Relaxed);
        play.watch.close();
        let patience = Duration::from_secs(120);
        assert_eq!(end.recv_timeout(patience), Err(RecvTimeoutError::Disconnected), "all left");
        assert!(before > 0 && play.helped.load(Relaxed) > 0, "threads parked and helped");
    }
}
