//! The functions that the preloaded library calls in this one, once it has loaded it.

use crate::{AGENT, adoption, forking, inside, locals, stacks};
use libc::{c_int, pid_t, sigaction as Action, stack_t};
use std::ptr;
use std::sync::PoisonError;
use uzswap_region::signals;
use uzswap_tree::front::{FORM, Fork, Front, Hooks};

/// See [`uzswap_tree::front::BEGIN`].
#[unsafe(no_mangle)]
extern "C" fn uzswap_agent(front: &'static Front) -> *const Hooks {
    // First: all else may have variables of its thread's.
    if front.form != FORM || !locals::prepare(front) {
        return ptr::null();
    }
    crate::begin(front);
    &HOOKS
}

static HOOKS: Hooks = Hooks {
    look: crate::look,
    wait: crate::wait_before_more,
    watch: crate::watch_from_here,
    start_watching: crate::watch_from_now,
    fork,
    in_child: forking::in_child,
    sigaction,
    signal,
    sysv_signal,
    sigaltstack,
    end: locals::end,
};

unsafe extern "C" fn fork(next: Fork) -> pid_t {
    // SAFETY: the caller's promise.
    forking::fork_quietly(|| unsafe { next() })
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

unsafe extern "C" fn sigaltstack(new: *const stack_t, old: *mut stack_t) -> c_int {
    // SAFETY: the caller passes a description, or null.
    if let Some(stack) = unsafe { new.as_ref() } {
        let _inside = inside();
        let start = stack.ss_sp as usize;
        let stacks = &adoption::SIGNAL_STACKS;
        let mut stacks = stacks.lock().unwrap_or_else(PoisonError::into_inner);
        stacks.push(start..start + stack.ss_size);
    }
    // SAFETY: the arguments are the caller's; errno is the thread's own.
    unsafe {
        match stacks::set(AGENT.get(), new, old) {
            0 => 0,
            error => {
                *libc::__errno_location() = -error as c_int;
                -1
            }
        }
    }
}
