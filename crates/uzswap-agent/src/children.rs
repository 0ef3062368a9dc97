//! Our threads in a child of a program that was taken over: see [`crate::forking`].

use crate::stage::{self, Stage};
use crate::{AGENT, copies, inside, seccomp};
use std::io;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_sys::process;

/// Starts our threads in a child that was made past the C library's `fork`, where no handler has
/// done so. uzswap leaves a child alone that may not start threads.
pub fn attend() {
    if !stage::change(Stage::Bare, Stage::Managed) {
        return;
    }
    let Some(agent) = AGENT.get() else { return };
    let inside = inside();
    let has_threads = agent.pager.after_fork().is_ok();
    if let Some(front) = crate::front() {
        front.is_past_library.store(true, Relaxed);
        front.forked();
    }
    copies::begin_child();
    if !has_threads || crate::start().is_err() {
        drop(inside);
        seccomp::leave(agent, NO_THREADS);
    }
}

const NO_THREADS: &str =
    "it was forked where no thread can be started: raise its limit of processes (ulimit -u)";

/// Registers the handler that starts threads in children. Called once, after the pager is made.
pub fn watch() -> io::Result<()> {
    extern "C" fn in_child() {
        attend();
        crate::front().inspect(|front| front.is_past_library.store(false, Relaxed));
    }
    process::at_fork(None, None, Some(in_child))
}
