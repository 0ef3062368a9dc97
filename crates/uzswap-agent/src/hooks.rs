//! The functions of this library that the preloaded library calls.

use crate::{alone, copies, descriptors, devices, fork_room, forking, request, stage};
use crate::{thread_locals, visits};
use libc::{c_int, pid_t, sigaction as Action};
use std::ptr;
use uzswap_region::signals;
use uzswap_tree::front::{FORM, Fork, Front, Hooks};

/// See [`uzswap_tree::front::BEGIN`].
#[unsafe(no_mangle)]
extern "C" fn uzswap_agent(front: &'static Front) -> *const Hooks {
    // This comes first, since all other code may use thread variables.
    if front.form != FORM || !thread_locals::prepare(front) {
        return ptr::null();
    }
    crate::begin(front);
    &HOOKS
}

static HOOKS: Hooks = Hooks {
    look: request::look,
    wait: request::wait,
    watch: crate::watch_from_here,
    start_watching: crate::watch_from_now,
    fork,
    in_child: forking::in_child,
    sigaction,
    signal,
    sysv_signal,
    alone: descriptors::unshare,
    restrict: alone::restrict,
    threads: alone::count,
    hands_over: devices::note,
    visit: visits::on_early_call,
    end: thread_locals::end,
};

unsafe extern "C" fn fork(next: Fork) -> pid_t {
    let is_copied = fork_room::make();
    // SAFETY: the caller's promise.
    let child = forking::fork(|| unsafe { next() });
    let is_watched = is_copied || crate::has_own_allocator();
    if child == 0 && is_watched && !stage::is_taken_over() {
        // A child that only writes to memory of its parent's never asks for memory.
        copies::begin_child();
        crate::watch_from_now();
    }
    child
}

unsafe extern "C" fn sigaction(number: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the arguments are the caller's responsibility.
    unsafe { signals::set_action(number, new, old) }
}

unsafe extern "C" fn signal(number: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler(number, handler) }
}

unsafe extern "C" fn sysv_signal(number: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler_once(number, handler) }
}
