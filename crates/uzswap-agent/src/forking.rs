//! Forks: the child goes on with a copy of everything, pool and index too, by the fork itself.
//!
//! All work is stopped from the moment before the kernel makes the child. It is stopped around the
//! system call, not in a handler of `pthread_atfork`: the C library still uses memory in between,
//! which may have to be brought in. Threads are started again where that is safe, in such a
//! handler.

use crate::{AGENT, Agent, Inside, inside, layout, memory};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_region::BeforeFork;
use uzswap_sys::bus::Blocked;
use uzswap_sys::process;

/// Nothing of this library moves.
pub struct Still<L, M> {
    inside: Inside,
    layout: L,
    pages: BeforeFork,
    memory: ManuallyDrop<M>,
}

/// This process has been forked, and has no threads of ours yet.
static IS_BARE: AtomicBool = AtomicBool::new(false);

/// Waits until nothing of this library moves. Errors: there is no room for a child's needs.
pub fn before(agent: &Agent) -> io::Result<Still<impl Sized, impl Sized>> {
    let inside = inside();
    let layout = layout::lock();
    let pages = agent.pager.before_fork()?;
    // Last: nothing is allocated or freed from here on.
    Ok(Still { inside, layout, pages, memory: ManuallyDrop::new(memory::lock()) })
}

impl<L, M> Still<L, M> {
    /// In the parent, or where there is no child: all goes on.
    pub fn in_parent(self) {
        let Self { inside, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        pages.in_parent();
        drop(layout);
        drop(inside);
    }

    /// In the child, before anything of the program runs there.
    pub fn in_child(self) {
        let Self { inside, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        if pages.in_child().is_err() {
            crate::die("a forked process cannot have a userfaultfd of its own");
        }
        drop(layout);
        IS_BARE.store(true, Relaxed);
        drop(inside);
    }
}

/// The holder does work of ours that a child must not find half done: its thread is not there.
static QUIET: Mutex<()> = Mutex::new(());

/// Held while a thread of ours is at work; a fork waits for it.
pub fn at_work() -> MutexGuard<'static, ()> {
    QUIET.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a fork while nothing of ours is under way. The C library's functions around it, and the
/// program's, may take memory: so this stands before `fork` itself, and their locks are not held.
pub fn fork_quietly(fork: impl FnOnce() -> libc::pid_t) -> libc::pid_t {
    // A handler that forks, too, would wait for its own thread.
    let _blocked = Blocked::all();
    let quiet = at_work();
    if AGENT.get().is_some() {
        let child = fork();
        drop(quiet);
        return child;
    }
    let inside = inside();
    let memory = memory::lock();
    let child = fork();
    drop(memory);
    drop(inside);
    drop(quiet);
    if child == 0 && crate::has_own_allocator() {
        crate::watch_from_now();
    }
    child
}

/// Has children of a process that has not been taken over be watched when they grow.
pub extern "C" fn in_child() {
    if AGENT.get().is_none() {
        crate::unwatch();
    }
}

/// Has threads started in children. Once, after the pager is made.
pub fn watch() -> std::io::Result<()> {
    extern "C" fn in_child() {
        if !IS_BARE.swap(false, Relaxed) {
            return;
        }
        let Some(agent) = AGENT.get() else { return };
        let _inside = inside();
        if agent.pager.after_fork().is_err() || crate::start(crate::Begin::Again).is_err() {
            crate::die("a forked process cannot have threads of its own");
        }
    }
    process::at_fork(None, None, Some(in_child))
}
