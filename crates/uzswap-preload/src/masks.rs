//! Masks of signals.

use libc::{c_int, c_long, sigset_t};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A set of one signal, as the kernel has it.
pub const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// Signals that must reach the agent.
static OURS: AtomicU64 = AtomicU64::new(bit(libc::SIGBUS) | bit(libc::SIGILL));

pub fn ours() -> u64 {
    OURS.load(Relaxed)
}

pub fn add_ours(signal: c_int) {
    OURS.fetch_or(bit(signal), Relaxed);
}

/// `rt_sigprocmask` without our signals: 0, or -1 and `errno`.
///
/// # Safety
/// As of the call.
pub unsafe fn set_mask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_long {
    // The C library's own two signals, which a program may not block.
    const INTERNAL: u64 = 0b11 << 31;
    let kept = if how == libc::SIG_UNBLOCK { 0 } else { ours() | INTERNAL };
    // Signals from 1 on: the C library's set begins with the kernel's.
    // SAFETY: the caller passes a set, or null.
    let set = unsafe { set.cast::<u64>().as_ref() }.map(|set| *set & !kept);
    let set = set.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, set, old, size_of::<u64>()) }
}

/// Sets a mask that the thread had before, without our signals. The mask keeps the C library's own
/// two signals, because threads of the C library block one of them.
///
/// # Safety
/// The pointer refers to a set.
pub unsafe fn set_whole_mask(set: *const sigset_t) {
    let (how, none) = (libc::SIG_SETMASK, ptr::null_mut::<sigset_t>());
    // SAFETY: the caller's promise; the C library's set begins with the kernel's.
    unsafe {
        let set = *set.cast::<u64>() & !ours();
        libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const set, none, size_of::<u64>());
    }
}
