//! Threads that run one at a time and change places where a seed says, for a simulator: the same
//! seed gives the same history.
//!
//! A thread may lose its turn before it takes a lock, after it has let one go, where it waits for
//! another thread, and where it calls [`step`]. What happens between two such places happens at
//! once; the orders of single loads and stores are the model checker's business.
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
}
#[cfg(not(feature = "simulation"))]
pub use off::*;

/// Something was let go: another may have the turn.
#[derive(Debug)]
pub(crate) struct Released;

#[cfg(feature = "simulation")]
impl Drop for Released {
    fn drop(&mut self) {
        step();
    }
}

#[cfg(feature = "simulation")]
mod on {
    use std::cell::{Cell, RefCell};
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
        runs: Vec<bool>,
        noise: u64,
        /// At one step of so many the turn is given away.
        changes: u64,
        steps: u64,
        /// Of each thread since it said so last.
        since: Vec<u64>,
        since_max: u64,
        failed: Option<String>,
    }

    /// What a thread does.
    pub type Work<'a> = Box<dyn FnOnce() + Send + 'a>;

    impl State {
        fn below(&mut self, end: u64) -> u64 {
            self.noise ^= self.noise >> 12;
            self.noise ^= self.noise << 25;
            self.noise ^= self.noise >> 27;
            self.noise.wrapping_mul(0x2545_f491_4f6c_dd1d) % end
        }

        /// Gives the turn to one that runs, the same or another.
        fn pass_on(&mut self) {
            let running = self.runs.iter().filter(|runs| **runs).count() as u64;
            if running > 0 {
                let chosen = self.below(running) as usize;
                let mut running = self.runs.iter().enumerate().filter(|(_, runs)| **runs);
                self.current = running.nth(chosen).map_or(self.current, |(number, _)| number);
            }
        }
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

        fn step(&self, own: usize, waits: bool) {
            let mut state = self.state();
            state.steps += 1;
            state.since[own] += 1;
            if state.since[own] > state.since_max {
                let steps = state.since_max;
                drop(state);
                panic!("what thread {own} does has not ended after {steps} steps");
            }
            let changes = state.changes;
            if waits || state.below(changes) == 0 {
                state.pass_on();
                if state.current != own {
                    self.turns[state.current].notify_one();
                    drop(self.wait_for(state, own));
                }
            }
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
    pub fn step() {
        with_own(|shared, own| shared.step(own, false));
    }

    /// The calling thread waits for another.
    pub fn wait() {
        with_own(|shared, own| shared.step(own, true));
    }

    /// What the calling thread does next is a new thing: it may take as many steps again.
    pub fn begin() {
        with_own(|shared, own| shared.state().since[own] = 0);
    }

    /// Runs threads to their end, one at a time; the steps that were taken. At one step of
    /// `changes` the turn is given away. What one does between two calls of [`begin`] may take
    /// `since_max` steps.
    ///
    /// Errors: a thread panicked, with its message. The others then stay where they are, for ever.
    pub fn run(
        seed: u64,
        changes: u64,
        since_max: u64,
        all: Vec<Work<'static>>,
    ) -> Result<u64, String> {
        let state = State {
            current: 0,
            runs: vec![true; all.len()],
            noise: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            changes,
            steps: 0,
            since: vec![0; all.len()],
            since_max,
            failed: None,
        };
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
                state.runs[own] = false;
                if let Err(panic) = done {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).into()));
                    state.failed = Some(text.unwrap_or_default());
                }
                state.pass_on();
                shared.turns[state.current].notify_one();
                shared.turns[end].notify_one();
            });
        }
        let mut state = shared.state();
        while state.failed.is_none() && state.runs.contains(&true) {
            state = shared.turns[end].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.failed.take().map_or(Ok(state.steps), Err)
    }

    #[cfg(all(test, not(feature = "shuttle")))]
    mod tests {
        use super::*;
        use crate::{Mutex as Lock, lock};

        fn history(seed: u64) -> (Vec<usize>, u64) {
            let log = Arc::new(Lock::new(Vec::new()));
            let work = |own: usize| {
                let log = log.clone();
                Box::new(move || (0..20).for_each(|_| lock(&log).push(own))) as Work<'static>
            };
            let steps = run(seed, 4, 1000, (0..3).map(work).collect()).expect("nothing fails");
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
            assert!(run(1, 4, 100, vec![endless]).is_err_and(|text| text.contains("not ended")));
            let wrong: Work<'static> = Box::new(|| panic!("wrong"));
            let waits: Work<'static> = Box::new(|| (0..50).for_each(|_| wait()));
            assert_eq!(run(1, 4, 100, vec![waits, wrong]), Err("wrong".into()));
        }
    }
}
