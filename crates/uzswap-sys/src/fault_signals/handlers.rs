//! The program's handlers of a signal, which our handler passes signals to.

use super::versioned::Versioned;
use libc::{c_int, sigaction as Action};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// The maximum number of handlers that are kept for a signal. A further handler replaces the last.
const HANDLERS_MAX: usize = 8;

/// The program's handlers of a signal. The first is the handler that the program had before us or
/// has set since. The others were set without our knowledge. Each of these takes our handler for
/// its predecessor, and may pass a signal on to us. We then pass the signal to that handler's
/// predecessor in this list.
pub struct Handlers {
    pub all: [Handler; HANDLERS_MAX],
    pub count: AtomicUsize,
    /// The thread that runs a handler that was set without our knowledge, and the handler: thread ×
    /// 256 + index + 1.
    pub passing: AtomicU64,
}

/// A handler of the program's: the function, its flags, and a mask whose lowest bit is signal 1.
/// Other threads may read a handler while it is replaced.
pub struct Handler(Versioned<3>);

impl Handlers {
    pub const fn new() -> Self {
        let (count, passing) = (AtomicUsize::new(1), AtomicU64::new(0));
        Self { all: [const { Handler::none() }; HANDLERS_MAX], count, passing }
    }

    /// The index of the last handler.
    pub fn last(&self) -> usize {
        self.count.load(Acquire) - 1
    }

    /// The index of the handler for a signal.
    pub fn next(&self, thread: u64) -> usize {
        let passing = self.passing.load(Acquire);
        let (whose, place) = (passing >> 8, passing & 0xff);
        if whose == thread && place > 0 {
            (place as usize - 1).saturating_sub(1)
        } else {
            self.last()
        }
    }

    /// Adds a handler that was set without our knowledge, unless it is known.
    pub fn push(&self, action: &Action) {
        let is_known = |handler: &Handler| handler.get().sa_sigaction == action.sa_sigaction;
        let count = self.count.load(Acquire);
        if self.all[1..count].iter().any(is_known) {
            return;
        }
        let at = count.min(HANDLERS_MAX - 1);
        self.all[at].set(action);
        self.count.store(at + 1, Release);
    }
}

impl Handler {
    const fn none() -> Self {
        const { assert!(libc::SIG_DFL == 0) };
        Self(Versioned::zeros())
    }

    /// The caller blocks signals. Otherwise a signal handler could interrupt the caller, and then
    /// wait for it.
    pub fn set(&self, action: &Action) {
        let is_in = |signal: &c_int| {
            // SAFETY: a set, and a signal.
            unsafe { libc::sigismember(&action.sa_mask, *signal) == 1 }
        };
        let mask = (1..=64).filter(is_in).fold(0, |mask, signal| mask | 1 << (signal - 1));
        self.0.set([action.sa_sigaction as u64, action.sa_flags as u64, mask]);
    }

    pub fn get(&self) -> Action {
        let [function, flags, mask] = self.0.get();
        action(function as usize, flags as c_int, mask)
    }
}

/// An action of these parts.
pub fn action(function: usize, flags: c_int, mask: u64) -> Action {
    let mut action = MaybeUninit::<Action>::zeroed();
    // SAFETY: an action of zeros is valid, and its mask a set.
    unsafe {
        let to = action.assume_init_mut();
        (to.sa_sigaction, to.sa_flags) = (function, flags);
        for signal in (1..=64).filter(|signal| mask & 1 << (signal - 1) != 0) {
            libc::sigaddset(&mut to.sa_mask, signal);
        }
        action.assume_init()
    }
}
