//! The program's handlers of a signal, which our handler passes signals to.

use libc::{c_int, sigaction as Action};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering::*, fence};

/// Most handlers of one signal that are kept; beyond that the last one is replaced.
const HANDLERS_MAX: usize = 8;

/// The program's handlers of a signal. The first is the one that it had before us or has set since.
/// Behind it are those that were set without our knowledge. Each of these believes that ours was
/// before it, and may pass a signal on: then the signal goes to the one before it here.
pub struct Handlers {
    pub all: [Handler; HANDLERS_MAX],
    pub count: AtomicUsize,
    /// The thread that is in one of those, and the handler: thread × 256 + index + 1.
    pub passing: AtomicU64,
}

/// A handler of the program's and its flags: an action of the kernel's, which other threads read
/// while it is replaced. `version` is odd meanwhile.
pub struct Handler {
    version: AtomicU32,
    function: AtomicUsize,
    flags: AtomicI32,
    /// Signals from 1 on.
    mask: AtomicU64,
}

impl Handlers {
    pub const fn new() -> Self {
        let (count, passing) = (AtomicUsize::new(1), AtomicU64::new(0));
        Self { all: [const { Handler::none() }; HANDLERS_MAX], count, passing }
    }

    /// The index of the last one.
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
        let is_known = |handler: &Handler| handler.function.load(Relaxed) == action.sa_sigaction;
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
        let (version, function) = (AtomicU32::new(0), AtomicUsize::new(libc::SIG_DFL));
        Self { version, function, flags: AtomicI32::new(0), mask: AtomicU64::new(0) }
    }

    /// The caller blocks signals, so that a handler here does not wait for its own thread.
    pub fn set(&self, action: &Action) {
        let mut version = self.version.load(Relaxed);
        loop {
            version &= !1;
            match self.version.compare_exchange_weak(version, version + 1, Acquire, Relaxed) {
                Ok(_) => break,
                Err(now) => version = now,
            }
        }
        fence(Release);
        let is_in = |signal: &c_int| {
            // SAFETY: a set, and a signal.
            unsafe { libc::sigismember(&action.sa_mask, *signal) == 1 }
        };
        let mask = (1..=64).filter(is_in).fold(0, |mask, signal| mask | 1 << (signal - 1));
        self.function.store(action.sa_sigaction, Relaxed);
        self.flags.store(action.sa_flags, Relaxed);
        self.mask.store(mask, Relaxed);
        self.version.store(version + 2, Release);
    }

    pub fn get(&self) -> Action {
        loop {
            let version = self.version.load(Acquire);
            let function = self.function.load(Relaxed);
            let (flags, mask) = (self.flags.load(Relaxed), self.mask.load(Relaxed));
            fence(Acquire);
            if version.is_multiple_of(2) && self.version.load(Relaxed) == version {
                return action(function, flags, mask);
            }
            std::hint::spin_loop();
        }
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
