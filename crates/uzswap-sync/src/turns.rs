//! Threads that run one at a time and change places where a seed says, for a simulator: the same
//! seed gives the same history.
//!
//! A thread may lose its turn before it takes a lock, after it has let one go, where it waits for
//! another thread, and where it calls [`step`]. What happens between two such places happens at
//! once; the orders of single loads and stores are the model checker's business.
//!
//! Threads are not equally fast, and each may be held up at any place, for a few steps of the
//! others or for so many that they do a thousand things meanwhile: mistakes are where nobody
//! expected to be kept that long. That is likelier where threads seldom come by in a history: what
//! they do all the time would else be held up instead.
//!
//! Without the feature `simulation` nothing of this is compiled in.

#[cfg(feature = "simulation")]
pub use on::*;

#[cfg(not(feature = "simulation"))]
mod off {
    /// Nobody takes turns.
    #[inline(always)]
    pub fn number() -> Option<usize> {
        None
    }

    /// Goes on.
    #[inline(always)]
    pub fn step() {}

    /// Goes on.
    #[inline(always)]
    pub fn wait() {}

    /// Goes on.
    #[inline(always)]
    pub fn wait_for_lock() {}
}
#[cfg(not(feature = "simulation"))]
pub use off::*;

/// Something was let go: another may have the turn.
#[derive(Debug)]
pub(crate) struct Released;

#[cfg(feature = "simulation")]
impl Drop for Released {
    fn drop(&mut self) {
        on::let_go();
    }
}

#[cfg(feature = "simulation")]
mod on {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;
    use std::panic::Location;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
    use std::thread;

    thread_local! {
        static OWN: RefCell<Option<(Arc<Shared>, usize)>> = const { RefCell::new(None) };
        // Without a destructor: threads that take no turns look at it in signal handlers.
        static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    }

    struct Shared {
        state: Mutex<State>,
        /// One for each thread, and one for who waits for their end.
        turns: Vec<Condvar>,
    }

    struct State {
        current: usize,
        threads: Vec<Thread>,
        noise: u64,
        pace: Pace,
        steps: u64,
        since_max: u64,
        /// How often threads have come by at each place.
        visits: BTreeMap<&'static Location<'static>, u64>,
        failed: Option<String>,
    }

    struct Thread {
        runs: bool,
        /// Wants a lock that another one has: it needs no turn until one is let go.
        is_blocked: bool,
        /// It is held up until that many steps have been taken, if others can go on.
        held_until: u64,
        /// How often in a row it has waited and done nothing else.
        waits: u64,
        /// How many turns it gets while the slowest get one.
        speed: u64,
        steps: u64,
        /// Of these, since it said so last.
        since: u64,
        /// And those of each thread that it saw since then.
        seen: [u64; THREADS_MAX],
    }

    /// Threads that take turns, at most.
    const THREADS_MAX: usize = 8;

    /// Whoever waits so often in a row waits for a thread that is held up: nobody is any more.
    const WAITS_MAX: u64 = 5000;

    /// Steps of another thread that one sees between two of its own, at most: whoever is held up
    /// himself does not see what others do.
    const SEEN_MAX: u64 = 100;

    /// What a thread does.
    pub type Work<'a> = Box<dyn FnOnce() + Send + 'a>;

    /// How often things change.
    #[derive(Debug, Clone, Copy)]
    pub struct Pace {
        /// At one step of so many the turn is given away.
        pub turn: u64,
        /// At one such step of so many the thread is held up for longer.
        pub hold: u64,
    }

    const SPEEDS: [u64; 3] = [1, 8, 64];

    /// Of the times that threads come by at a place, so many of the first are seldom; later ever
    /// fewer.
    const SELDOM: u64 = 16;

    /// A thread is held up for at most so many steps.
    const HOLD_MAX: u64 = 1 << 19;

    impl State {
        fn below(&mut self, end: u64) -> u64 {
            self.noise ^= self.noise >> 12;
            self.noise ^= self.noise << 25;
            self.noise ^= self.noise >> 27;
            self.noise.wrapping_mul(0x2545_f491_4f6c_dd1d) % end
        }

        fn steps_of_all(&self) -> [u64; THREADS_MAX] {
            std::array::from_fn(|number| self.threads.get(number).map_or(0, |thread| thread.steps))
        }

        /// Whether a thread is held up for being at a place where it seldom is.
        fn is_seldom(&mut self, at: &'static Location<'static>) -> bool {
            if self.pace.hold == u64::MAX {
                return false;
            }
            let visits = self.visits.entry(at).or_default();
            *visits += 1;
            let visits = *visits;
            self.below(visits) < SELDOM && self.below(8) == 0
        }

        /// For at most so many steps, and half as often for twice as long.
        fn hold(&mut self, own: usize, steps_max: u64) {
            let longest = steps_max >> self.below(u64::from(steps_max.ilog2()));
            self.threads[own].held_until = self.steps + self.below(longest);
        }

        /// Gives the turn to one that can go on, the same or another; `false` if none can.
        fn pass_on(&mut self) -> bool {
            let steps = self.steps;
            let goes_on = |thread: &Thread| thread.runs && !thread.is_blocked;
            let speed = |thread: &Thread| match goes_on(thread) && thread.held_until <= steps {
                true => thread.speed,
                false => 0,
            };
            let all = self.threads.iter().map(speed).sum();
            if all == 0 {
                let held = (0..self.threads.len()).filter(|thread| goes_on(&self.threads[*thread]));
                let first = held.min_by_key(|thread| self.threads[*thread].held_until);
                self.current = first.unwrap_or(self.current);
                return first.is_some();
            }
            let mut chosen = self.below(all);
            let is_chosen = |thread: &Thread| match chosen.checked_sub(speed(thread)) {
                Some(left) => {
                    chosen = left;
                    false
                }
                None => true,
            };
            self.current = self.threads.iter().position(is_chosen).expect("less than all");
            true
        }
    }

    /// Why a thread may lose its turn.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Why {
        /// None.
        Step,
        Wait,
        Lock,
        /// What it does takes so many steps at most.
        Pause(u64),
    }

    impl Shared {
        fn state(&self) -> MutexGuard<'_, State> {
            self.state.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn wait_for<'a>(
            &self,
            mut state: MutexGuard<'a, State>,
            own: usize,
        ) -> MutexGuard<'a, State> {
            // After a failure nobody goes on: what was being changed is as it is.
            while state.current != own || state.failed.is_some() {
                state = self.turns[own].wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state
        }

        fn step(&self, own: usize, why: Why, at: Option<&'static Location<'static>>) {
            let mut state = self.state();
            state.steps += 1;
            let thread = &mut state.threads[own];
            thread.steps += 1;
            thread.since += 1;
            thread.is_blocked = why == Why::Lock;
            thread.waits = if why == Why::Wait { thread.waits + 1 } else { 0 };
            let since = thread.since;
            if since > state.since_max {
                drop(state);
                panic!("what thread {own} does has not ended after {since} steps");
            }
            if state.threads[own].waits > WAITS_MAX {
                state.threads.iter_mut().for_each(|thread| thread.held_until = 0);
            }
            let Pace { turn, hold } = state.pace;
            let is_seldom = at.is_some_and(|at| state.is_seldom(at));
            if why == Why::Step && !is_seldom && state.below(turn) > 0 {
                return;
            }
            if let Why::Pause(steps) = why {
                state.hold(own, steps);
            } else if why == Why::Step && (is_seldom || state.below(hold) == 0) {
                state.hold(own, HOLD_MAX);
            }
            if !state.pass_on() {
                drop(state);
                panic!("each thread waits for a lock that another one has");
            }
            if state.current != own {
                self.turns[state.current].notify_one();
                let before = state.steps_of_all();
                let mut state = self.wait_for(state, own);
                let after = state.steps_of_all();
                for (thread, seen) in state.threads[own].seen.iter_mut().enumerate() {
                    *seen += (after[thread] - before[thread]).min(SEEN_MAX);
                }
            }
        }

        fn let_go(&self, own: usize) {
            self.state().threads.iter_mut().for_each(|thread| thread.is_blocked = false);
            self.step(own, Why::Step, None);
        }
    }

    /// The calling thread's number, if it takes turns.
    pub fn number() -> Option<usize> {
        NUMBER.get()
    }

    fn with_own(act: impl FnOnce(&Shared, usize)) {
        if number().is_some()
            && !thread::panicking()
            && let Some((shared, own)) = OWN.with_borrow(Clone::clone)
        {
            act(&shared, own);
        }
    }

    /// A place at which another thread may have the turn.
    #[track_caller]
    pub fn step() {
        let at = Location::caller();
        with_own(|shared, own| shared.step(own, Why::Step, Some(at)));
    }

    /// The calling thread waits for another.
    pub fn wait() {
        with_own(|shared, own| shared.step(own, Why::Wait, None));
    }

    /// The calling thread does something that takes a while: for at most so many steps others go
    /// on.
    pub fn pause(steps_max: u64) {
        with_own(|shared, own| shared.step(own, Why::Pause(steps_max), None));
    }

    /// The calling thread waits until a lock is let go.
    pub fn wait_for_lock() {
        with_own(|shared, own| shared.step(own, Why::Lock, None));
    }

    pub(super) fn let_go() {
        with_own(Shared::let_go);
    }

    /// What the calling thread does next is a new thing: it may take as many steps again.
    pub fn begin() {
        with_own(|shared, own| {
            let thread = &mut shared.state().threads[own];
            (thread.since, thread.seen) = (0, [0; THREADS_MAX]);
        });
    }

    /// Steps of another thread that the calling one saw while doing what it does: at most
    /// [`SEEN_MAX`] between two of its own.
    pub fn seen(thread: usize) -> u64 {
        let mut seen = 0;
        with_own(|shared, own| seen = shared.state().threads[own].seen[thread]);
        seen
    }

    /// Runs threads to their end, one at a time; the steps that were taken. What one does between
    /// two calls of [`begin`] may take `since_max` steps.
    ///
    /// Errors: a thread panicked, with its message. The others then stay where they are, for ever.
    pub fn run(
        seed: u64,
        pace: Pace,
        since_max: u64,
        all: Vec<Work<'static>>,
    ) -> Result<u64, String> {
        let mut state = State {
            current: 0,
            threads: Vec::new(),
            noise: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            pace,
            steps: 0,
            since_max,
            visits: BTreeMap::new(),
            failed: None,
        };
        for _ in &all {
            let speed = SPEEDS[state.below(SPEEDS.len() as u64) as usize];
            state.threads.push(Thread {
                runs: true,
                is_blocked: false,
                held_until: 0,
                waits: 0,
                speed,
                steps: 0,
                since: 0,
                seen: [0; THREADS_MAX],
            });
        }
        let end = all.len();
        let turns = (0..=end).map(|_| Condvar::new()).collect();
        let shared = Arc::new(Shared { state: Mutex::new(state), turns });
        for (own, work) in all.into_iter().enumerate() {
            let shared = shared.clone();
            thread::spawn(move || {
                OWN.set(Some((shared.clone(), own)));
                NUMBER.set(Some(own));
                drop(shared.wait_for(shared.state(), own));
                let done = catch_unwind(AssertUnwindSafe(work));
                NUMBER.set(None);
                OWN.set(None);
                let mut state = shared.state();
                state.threads[own].runs = false;
                if let Err(panic) = done {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).into()));
                    state.failed = Some(text.unwrap_or_default());
                }
                // Nobody can: it was the last, or has left the others without a lock.
                if !state.pass_on() && state.threads.iter().any(|thread| thread.runs) {
                    let text = format!("thread {own} has ended, and others wait for a lock");
                    state.failed.get_or_insert(text);
                }
                shared.turns[state.current].notify_one();
                shared.turns[end].notify_one();
            });
        }
        let mut state = shared.state();
        while state.failed.is_none() && state.threads.iter().any(|thread| thread.runs) {
            state = shared.turns[end].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.take().map_or(Ok(state.steps), Err)
    }

    #[cfg(all(test, not(feature = "shuttle")))]
    mod tests {
        use super::*;
        use crate::{Mutex as Lock, lock};

        const PACE: Pace = Pace { turn: 4, hold: 16 };

        fn history(seed: u64) -> (Vec<usize>, u64) {
            let log = Arc::new(Lock::new(Vec::new()));
            let work = |own: usize| {
                let log = log.clone();
                Box::new(move || (0..20).for_each(|_| lock(&log).push(own))) as Work<'static>
            };
            let steps = run(seed, PACE, 1000, (0..3).map(work).collect()).expect("nothing fails");
            let log = lock(&log).clone();
            (log, steps)
        }

        #[test]
        fn a_seed_gives_one_history_and_another_seed_another() {
            assert_eq!(history(1), history(1));
            assert_ne!(history(1), history(2));
        }

        #[test]
        fn what_has_no_end_and_what_panics_is_told() {
            let endless: Work<'static> = Box::new(|| {
                loop {
                    wait();
                }
            });
            assert!(run(1, PACE, 100, vec![endless]).is_err_and(|text| text.contains("not ended")));
            let wrong: Work<'static> = Box::new(|| panic!("wrong"));
            let waits: Work<'static> = Box::new(|| (0..50).for_each(|_| wait()));
            assert_eq!(run(1, PACE, 100, vec![waits, wrong]), Err("wrong".into()));
        }

        #[test]
        fn locks_that_are_taken_in_two_orders_are_told() {
            let locks = Arc::new([Lock::new(()), Lock::new(())]);
            let both = |first: usize| {
                let locks = locks.clone();
                let twice = move |_| {
                    let _first = lock(&locks[first]);
                    let _second = lock(&locks[1 - first]);
                };
                Box::new(move || (0..50).for_each(twice)) as Work<'static>
            };
            assert!(run(1, PACE, 10_000, vec![both(0), both(0)]).is_ok());
            let met = run(1, PACE, 10_000, vec![both(0), both(1)]);
            assert_eq!(met, Err("each thread waits for a lock that another one has".into()));
        }

        #[test]
        fn a_lock_that_is_never_let_go_is_told() {
            let kept = Arc::new(Lock::new(()));
            let (first, other) = (kept.clone(), kept);
            let keeps: Work<'static> = Box::new(move || std::mem::forget(lock(&first)));
            let wants: Work<'static> = Box::new(move || (0..50).for_each(|_| drop(lock(&other))));
            let left = run(1, PACE, 10_000, vec![keeps, wants]);
            assert!(left.is_err_and(|text| text.contains("wait")));
        }
    }
}
