//! The locks that a thread holds, recorded in builds with debug assertions. A test can then assert
//! that no thread waits for memory while it holds a lock that a serving thread takes.

#[cfg(debug_assertions)]
mod known {
    use std::cell::Cell;

    /// The maximum number of locks that are recorded for a thread.
    const LOCKS: usize = 128;

    thread_local! {
        // An allocator may read these, so they have no destructor and allocate nothing.
        static KINDS: [Cell<&'static str>; LOCKS] = const { [const { Cell::new("") }; LOCKS] };
        static COUNT: Cell<usize> = const { Cell::new(0) };
    }

    /// Records a lock of the calling thread until this is dropped.
    #[derive(Debug)]
    pub(crate) struct Known(&'static str);

    impl Known {
        pub(crate) fn start(kind: &'static str) -> Self {
            let count = COUNT.replace(COUNT.get() + 1);
            KINDS.with(|kinds| {
                if let Some(slot) = kinds.get(count) {
                    slot.set(kind);
                }
            });
            Self(kind)
        }
    }

    impl Drop for Known {
        fn drop(&mut self) {
            let count = COUNT.replace(COUNT.get() - 1);
            KINDS.with(|kinds| {
                let known = &kinds[..count.min(LOCKS)];
                // A thread mostly releases the lock that it took last.
                if let Some(at) = known.iter().rposition(|slot| slot.get() == self.0) {
                    known[at].set(known[known.len() - 1].get());
                }
            });
        }
    }

    /// Calls `look` with the kind of each lock that the calling thread holds. Allocates nothing.
    pub fn held(mut look: impl FnMut(&'static str)) {
        let count = COUNT.get().min(LOCKS);
        KINDS.with(|kinds| kinds[..count].iter().for_each(|slot| look(slot.get())));
    }
}

#[cfg(not(debug_assertions))]
mod known {
    /// Nothing is recorded.
    #[derive(Debug)]
    pub(crate) struct Known;

    impl Known {
        #[inline(always)]
        pub(crate) fn start(_kind: &'static str) -> Self {
            Self
        }
    }

    /// Calls nothing.
    pub fn held(_look: impl FnMut(&'static str)) {}
}

pub(crate) use known::Known;
pub use known::held;
