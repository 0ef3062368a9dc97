//! Threads of a simulation, which run one at a time and switch by a seed: the same seed gives the
//! same history.
//!
//! A thread may lose its turn before it takes a lock, after it has released one, where it waits for
//! another thread, and where it calls [`step`]. Between two such points it runs alone. The orders
//! of single loads and stores are the model checker's task.
//!
//! Threads run at different speeds. Each may be delayed at any point, for a few steps of the others
//! or for thousands: bugs show at unexpectedly long delays. Delays are likelier at points that
//! threads seldom reach in a history; otherwise most delays would fall on the common points.
//!
//! Without the feature `simulation` none of this is compiled in.

#[cfg(feature = "simulation")]
pub use on::*;

#[cfg(not(feature = "simulation"))]
mod off {
    /// No thread takes turns.
    #[inline(always)]
    pub fn number() -> Option<usize> {
        None
    }

    /// Does nothing.
    #[inline(always)]
    pub fn step() {}

    /// Does nothing.
    #[inline(always)]
    pub fn wait() {}

    /// Does nothing.
    #[inline(always)]
    pub fn wait_for_lock() {}
}
#[cfg(not(feature = "simulation"))]
pub use off::*;

/// Dropped when a lock is released: another thread may then get the turn.
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
        // Threads that take no turns read this in signal handlers, so it has no destructor.
        static NUMBER: Cell<Option<usize>> = const { Cell::new(None) };
    }

    struct Shared {
        state: Mutex<State>,
        /// One for each thread, and one for the caller of [`run`], which waits for their end.
        turns: Vec<Condvar>,
    }

    struct State {
        current: usize,
        threads: Vec<Thread>,
        noise: u64,
        pace: Pace,
        steps: u64,
        since_max: u64,
        /// The number of visits to each point.
        visits: BTreeMap<&'static Location<'static>, u64>,
        failed: Option<String>,
    }

    struct Thread {
        runs: bool,
        /// The thread waits for another thread's lock. It needs no turn until a lock is released.
        is_blocked: bool,
        /// The thread is delayed until [`State::steps`] reaches this, if others can run.
        held_until: u64,
        /// Consecutive waits without any other step.
        waits: u64,
        /// Turns that the thread gets while the slowest thread gets one.
        speed: u64,
        steps: u64,
        /// Steps of this thread since its last [`begin`].
        since: u64,
        /// Steps of each thread that this thread has seen since its last [`begin`].
        seen: [u64; THREADS_MAX],
    }

    /// The maximum number of threads that take turns.
    const THREADS_MAX: usize = 8;

    /// Consecutive waits after which all delays end, because the thread waits for a delayed thread.
    const WAITS_MAX: u64 = 5000;

    /// Steps of another thread that count as seen between two own steps, at most: a thread does not
    /// see the steps that others take during its delay.
    const SEEN_MAX: u64 = 100;

    /// The body of a thread.
    pub type ThreadBody<'a> = Box<dyn FnOnce() + Send + 'a>;

    /// The chances of switches.
    #[derive(Debug, Clone, Copy)]
    pub struct Pace {
        /// One step in this many passes the turn on.
        pub turn: u64,
        /// One such step in this many delays the thread for longer.
        pub hold: u64,
    }

    const SPEEDS: [u64; 3] = [1, 8, 64];

    /// The first visits to a point that count as seldom. Of later visits, an ever smaller share
    /// counts as seldom.
    const SELDOM: u64 = 16;

    /// The maximum number of steps of a delay.
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

        /// True if a thread is to be delayed here, because threads seldom reach this point.
        fn is_seldom(&mut self, at: &'static Location<'static>) -> bool {
            if self.pace.hold == u64::MAX {
                return false;
            }
            let visits = self.visits.entry(at).or_default();
            *visits += 1;
            let visits = *visits;
            self.below(visits) < SELDOM && self.below(8) == 0
        }

        /// Delays a thread for up to `steps_max` steps. A delay twice as long is half as likely.
        fn hold(&mut self, own: usize, steps_max: u64) {
            let longest = steps_max >> self.below(u64::from(steps_max.ilog2()));
            self.threads[own].held_until = self.steps + self.below(longest);
        }

        /// Passes the turn to a thread that can run, perhaps the same thread; `false` if none can.
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

    /// The reason why a thread may lose its turn.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Why {
        /// No other reason.
        Step,
        Wait,
        Lock,
        /// The thread does something slow while others take up to this many steps.
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
            // After a failure no thread runs, so that an unfinished change stays unfinished.
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
                panic!("the action of thread {own} has not ended after {since} steps");
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

    /// A point at which another thread may get the turn.
    #[track_caller]
    pub fn step() {
        let at = Location::caller();
        with_own(|shared, own| shared.step(own, Why::Step, Some(at)));
    }

    /// The calling thread waits for another.
    pub fn wait() {
        with_own(|shared, own| shared.step(own, Why::Wait, None));
    }

    /// The calling thread does something slow while others take up to `steps_max` steps.
    pub fn pause(steps_max: u64) {
        with_own(|shared, own| shared.step(own, Why::Pause(steps_max), None));
    }

    /// The calling thread waits until a lock is released.
    pub fn wait_for_lock() {
        with_own(|shared, own| shared.step(own, Why::Lock, None));
    }

    pub(super) fn let_go() {
        with_own(Shared::let_go);
    }

    /// The calling thread begins a new action. The count of its steps starts again.
    pub fn begin() {
        with_own(|shared, own| {
            let thread = &mut shared.state().threads[own];
            (thread.since, thread.seen) = (0, [0; THREADS_MAX]);
        });
    }

    /// Steps of another thread that this thread saw during its action: at most [`SEEN_MAX`] between
    /// two own steps.
    pub fn seen(thread: usize) -> u64 {
        let mut seen = 0;
        with_own(|shared, own| seen = shared.state().threads[own].seen[thread]);
        seen
    }

    /// Runs threads to their end, one at a time, and returns the number of steps. A thread may take
    /// `since_max` steps between two calls of [`begin`].
    ///
    /// The error is the message of a thread that panicked. The other threads then never continue.
    pub fn run(
        seed: u64,
        pace: Pace,
        since_max: u64,
        all: Vec<ThreadBody<'static>>,
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
                // No thread can run, because this was the last, or because it kept a lock that the
                // others wait for.
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
                Box::new(move || (0..20).for_each(|_| lock(&log).push(own))) as ThreadBody<'static>
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
        fn a_thread_without_an_end_and_one_that_panics_are_reported() {
            let endless: ThreadBody<'static> = Box::new(|| {
                loop {
                    wait();
                }
            });
            assert!(run(1, PACE, 100, vec![endless]).is_err_and(|text| text.contains("not ended")));
            let wrong: ThreadBody<'static> = Box::new(|| panic!("wrong"));
            let waits: ThreadBody<'static> = Box::new(|| (0..50).for_each(|_| wait()));
            assert_eq!(run(1, PACE, 100, vec![waits, wrong]), Err("wrong".into()));
        }

        #[test]
        fn locks_that_are_taken_in_two_orders_are_reported() {
            let locks = Arc::new([Lock::new(()), Lock::new(())]);
            let both = |first: usize| {
                let locks = locks.clone();
                let twice = move |_| {
                    let _first = lock(&locks[first]);
                    let _second = lock(&locks[1 - first]);
                };
                Box::new(move || (0..50).for_each(twice)) as ThreadBody<'static>
            };
            assert!(run(1, PACE, 10_000, vec![both(0), both(0)]).is_ok());
            let met = run(1, PACE, 10_000, vec![both(0), both(1)]);
            assert_eq!(met, Err("each thread waits for a lock that another one has".into()));
        }

        #[test]
        fn a_lock_that_is_never_released_is_reported() {
            let kept = Arc::new(Lock::new(()));
            let (first, other) = (kept.clone(), kept);
            let keeps: ThreadBody<'static> = Box::new(move || std::mem::forget(lock(&first)));
            let wants: ThreadBody<'static> =
                Box::new(move || (0..50).for_each(|_| drop(lock(&other))));
            let left = run(1, PACE, 10_000, vec![keeps, wants]);
            assert!(left.is_err_and(|text| text.contains("wait")));
        }
    }
}
