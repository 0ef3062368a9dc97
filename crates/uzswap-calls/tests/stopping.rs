//! The threads of this very program are stopped.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_calls::stop;

const SIGNAL: i32 = libc::SIGUSR1;

static ROUNDS: AtomicU64 = AtomicU64::new(0);

extern "C" fn met(_: i32) {
    _ = stop::stay(0);
}

/// Sets the limit of descriptors, and returns the earlier limit.
fn limit(descriptors: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes and reads a valid structure.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        let before = limit.rlim_cur;
        limit.rlim_cur = descriptors;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
        before
    }
}

/// True if another thread does anything while all others are stopped; `None` if they were not.
fn runs_while_stopped() -> Option<bool> {
    stop::others(SIGNAL, &[], stop::threads, stop::waited_call, |staying| {
        let before = ROUNDS.load(Relaxed);
        std::thread::sleep(Duration::from_millis(20));
        assert!(staying.len() >= 2, "the test's main thread, and the one that counts");
        ROUNDS.load(Relaxed) != before
    })
}

#[test]
fn all_threads_stand_still_or_nothing_is_done() {
    // SAFETY: an action of zeros is valid; the handler has the form of the flags.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = met as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(SIGNAL, &action, std::ptr::null_mut()), 0);
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Relaxed) {
                ROUNDS.fetch_add(1, Relaxed);
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        let first = runs_while_stopped();
        // No descriptor is left to list the threads.
        let before = limit(0);
        let without_list = stop::others(SIGNAL, &[], stop::threads, stop::waited_call, |_| ());
        limit(before);
        let second = runs_while_stopped();
        done.store(true, Relaxed);
        assert_eq!((first, without_list, second), (Some(false), None, Some(false)));
    });
}
