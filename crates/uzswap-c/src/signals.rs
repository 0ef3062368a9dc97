//! `sigaction` and `signal` for the program. If a pager serves faults by SIGBUS, the program's own
//! handler gets the signals from outside of regions.

use std::ffi::c_int;
use uzswap_region::signals;

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the arguments are the caller's responsibility.
    unsafe { signals::set_action(signal, new, old) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler(signal, handler) }
}

/// `signal` with the semantics of System V, for programs that ask for it.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler_once(signal, handler) }
}
