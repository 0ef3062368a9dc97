//! The cost of locks: how often each kind is taken, the time waited for it, and the time held.
//!
//! Without the feature `profile` none of this is compiled in. With the feature, a lock costs one
//! more load while counting is off, and two clock reads while it is on.

#[cfg(feature = "profile")]
pub use on::*;

#[cfg(not(feature = "profile"))]
mod off {
    /// Nothing is counted.
    #[inline(always)]
    pub fn is_on() -> bool {
        false
    }

    use crate::held::Known;
    use crate::turns::Released;

    /// A wait for a lock.
    #[derive(Debug)]
    pub struct Waiting;

    impl Waiting {
        /// Starts now.
        #[inline(always)]
        pub fn start(_kind: &'static str) -> Self {
            Self
        }

        /// The lock was taken.
        #[inline(always)]
        pub fn end(self) {}
    }

    /// A lock that counts as held until this value is dropped.
    #[derive(Debug)]
    pub struct HeldLock {
        _known: Known,
        _released: Released,
    }

    impl HeldLock {
        /// Starts now, for the lock at this address.
        #[inline(always)]
        pub fn start(kind: &'static str, _at: usize) -> Self {
            Self { _known: Known::start(kind), _released: Released }
        }
    }
}
#[cfg(not(feature = "profile"))]
pub use off::*;

#[cfg(feature = "profile")]
mod on {
    use crate::held::Known;
    use crate::turns::Released;
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::sync::{Mutex, PoisonError};
    use std::time::{Duration, Instant};

    static ON: AtomicBool = AtomicBool::new(false);
    static TELLS_APART: AtomicBool = AtomicBool::new(false);
    /// Counts of threads that have called [`flush`].
    static ALL: Mutex<Vec<LockProfile>> = Mutex::new(Vec::new());

    thread_local! {
        static OWN: RefCell<Vec<LockProfile>> = const { RefCell::new(Vec::new()) };
    }

    /// The cost of one kind of lock.
    #[derive(Debug, Clone, Default)]
    pub struct LockProfile {
        /// The type that the lock protects.
        pub name: &'static str,
        /// Times that the lock was taken.
        pub acquisitions: u64,
        /// Acquisitions that had to wait.
        pub contended: u64,
        /// Time waited.
        pub waited: Duration,
        /// Time held.
        pub held: Duration,
        /// Acquisitions of each lock of this kind, by address, if locks are told apart.
        each: HashMap<usize, u64>,
    }

    impl LockProfile {
        /// Acquisitions of the busiest lock of this kind.
        pub fn of_the_busiest(&self) -> u64 {
            self.each.values().copied().max().unwrap_or_default()
        }
    }

    /// Turns counting on or off.
    pub fn switch(on: bool) {
        ON.store(on, Relaxed);
    }

    /// Turns the separate count of each lock of a kind on or off. This count takes time while a
    /// lock is held, so `held` grows.
    pub fn tell_apart(on: bool) {
        TELLS_APART.store(on, Relaxed);
    }

    /// True if locks are counted.
    #[inline]
    pub fn is_on() -> bool {
        ON.load(Relaxed)
    }

    /// Adds the counts of the calling thread to the result of [`take`]. Each thread calls it before
    /// it ends.
    pub fn flush() {
        let own = OWN.with(|own| std::mem::take(&mut *own.borrow_mut()));
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        own.iter().for_each(|kind| add(&mut all, kind));
    }

    /// Returns the counts of all threads that called [`flush`], and resets them.
    pub fn take() -> Vec<LockProfile> {
        std::mem::take(&mut *ALL.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(kinds: &mut Vec<LockProfile>, more: &LockProfile) {
        match kinds.iter_mut().find(|kind| kind.name == more.name) {
            Some(kind) => {
                kind.acquisitions += more.acquisitions;
                kind.contended += more.contended;
                kind.waited += more.waited;
                kind.held += more.held;
                for (at, acquisitions) in &more.each {
                    *kind.each.entry(*at).or_default() += acquisitions;
                }
            }
            None => kinds.push(more.clone()),
        }
    }

    fn count(name: &'static str, change: impl FnOnce(&mut LockProfile)) {
        OWN.with_borrow_mut(|own| {
            let at = own.iter().position(|kind| kind.name == name);
            let at = at.unwrap_or_else(|| {
                own.push(LockProfile { name, ..LockProfile::default() });
                own.len() - 1
            });
            change(&mut own[at]);
        });
    }

    /// A wait for a lock.
    #[derive(Debug)]
    pub struct Waiting {
        kind: &'static str,
        since: Option<Instant>,
    }

    impl Waiting {
        /// Starts now.
        pub fn start(kind: &'static str) -> Self {
            Self { kind, since: is_on().then(Instant::now) }
        }

        /// The lock was taken.
        pub fn end(self) {
            if let Some(since) = self.since {
                let waited = since.elapsed();
                count(self.kind, |kind| {
                    kind.contended += 1;
                    kind.waited += waited;
                });
            }
        }
    }

    /// A lock that counts as held until this value is dropped.
    #[derive(Debug)]
    pub struct HeldLock {
        kind: &'static str,
        at: usize,
        since: Option<Instant>,
        _known: Known,
        _released: Released,
    }

    impl HeldLock {
        /// Starts now, for the lock at this address.
        pub fn start(kind: &'static str, at: usize) -> Self {
            Self {
                kind,
                at,
                since: is_on().then(Instant::now),
                _known: Known::start(kind),
                _released: Released,
            }
        }
    }

    impl Drop for HeldLock {
        fn drop(&mut self) {
            if let Some(since) = self.since {
                let held = since.elapsed();
                count(self.kind, |kind| {
                    kind.acquisitions += 1;
                    kind.held += held;
                    if TELLS_APART.load(Relaxed) {
                        *kind.each.entry(self.at).or_default() += 1;
                    }
                });
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn waiting_for_locks_and_holding_them_is_counted_by_kind() {
            struct Tally(u32);
            let [mutex, other] = [0, 0].map(|number| crate::Mutex::new(Tally(number)));
            let (about, told) = std::sync::mpsc::channel();
            tell_apart(true);
            switch(true);
            crate::lock(&other).0 += 1;
            let held = crate::lock(&mutex);
            let least = std::thread::scope(|scope| {
                let other = scope.spawn(|| {
                    about.send(std::fs::read_link("/proc/thread-self")).expect("it is awaited");
                    crate::lock(&mutex).0 += 1;
                    flush();
                });
                let thread = told.recv().expect("it tells").expect("/proc is mounted");
                let state = std::path::Path::new("/proc").join(thread).join("stat");
                // From its message on, the thread sleeps only for the lock.
                while !std::fs::read_to_string(&state).expect("it lives").contains(") S ") {
                    std::thread::yield_now();
                }
                let asleep = Instant::now();
                std::thread::sleep(Duration::from_millis(5));
                let least = asleep.elapsed();
                drop(held);
                other.join().expect("it only counts");
                least
            });
            flush();
            switch(false);
            tell_apart(false);
            assert_eq!(crate::lock(&mutex).0, 1);
            let kinds = take();
            let kind = kinds.iter().find(|kind| kind.name.ends_with("Tally"));
            let kind = kind.expect("it was taken");
            assert_eq!((kind.acquisitions, kind.contended), (3, 1));
            assert_eq!(kind.of_the_busiest(), 2);
            assert!(kind.waited >= least && kind.held >= least, "{kind:?}, {least:?}");
        }
    }
}
