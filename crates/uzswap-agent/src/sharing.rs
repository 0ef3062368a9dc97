//! Threads and processes that the program itself makes by `clone` with CLONE_VM. They use this
//! process's memory, and the variables of one of its threads.
//!
//! The agent serves a fault with variables of the faulting thread (`thread`, `stacks`, buffers of
//! the compressor), which it finds by the register of the thread's block. Two threads with one
//! block would change the same variables at the same time. A thread whose block the C library has
//! not made has no such variables. So uzswap leaves a program alone that is about to make such a
//! thread. It does not take a program over that has such a thread. A child of `vfork` has its
//! parent's block, too, but the parent stands still.
//!
//! The same holds for a thread with its own table of descriptors ([`crate::descriptors`]).

use crate::seccomp::leave;
use crate::{Agent, looker, robust};
use std::fs;
use uzswap_calls::{Call, Outcome, older, raw, stop};
use uzswap_sys::{fault_signals, process};

/// Looks at a `clone` with CLONE_VM, before it is made.
pub fn before_clone(agent: &Agent, flags: u64) {
    const BORROWED: u64 = libc::CLONE_VFORK as u64;
    const OF_THREAD: u64 = (libc::CLONE_THREAD | libc::CLONE_SETTLS) as u64;
    const FILES: u64 = libc::CLONE_FILES as u64;
    if flags & BORROWED == 0 && flags & OF_THREAD != OF_THREAD {
        leave_alone(agent, MAKES);
    } else if flags & BORROWED == 0 && flags & FILES == 0 {
        leave_alone(agent, PARTS);
    }
}

/// A child that borrows its parent's memory (`vfork`) soon becomes another program.
fn leave_alone(agent: &Agent, reason: &str) {
    if !fault_signals::is_other_process() {
        leave(agent, reason);
    }
}

const PARTS: &str = "it makes a thread with descriptors of its own (clone)";
const MAKES: &str = "it makes a thread past the C library, without variables of its own (clone)";
const MOVES: &str = "it gives a thread other variables than the C library has made (arch_prctl)";

/// `arch_prctl`: before a thread gets another block, the agent brings all memory in.
pub fn set_block(agent: &Agent, call: &mut Call) -> Outcome {
    const SET_FS: u64 = 0x1002;
    const GET_FS: u64 = 0x1003;
    if call.arguments[0] == SET_FS {
        let mut present = 0u64;
        let ask = [GET_FS, &raw mut present as u64, 0, 0, 0, 0];
        // SAFETY: the kernel writes the address to the given place.
        let is_told = unsafe { raw(older::SYS_arch_prctl as u64, ask) } == 0;
        if !is_told || present != call.arguments[1] {
            leave_alone(agent, MOVES);
        }
        return Outcome::Bare;
    }
    crate::buffers::touched(agent, call, &[1])
}

/// A thread or child of the program's that has the variables of another thread. A child that is
/// about to become another program is gone in a moment. `ours` are threads of ours.
pub fn find(ours: &[i32]) -> Option<Sharer> {
    find_thread(ours).or_else(|| looker::apart(child))
}

/// As [`find`], among the threads alone. A new thread has its list in a moment.
pub fn find_thread(ours: &[i32]) -> Option<Sharer> {
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    looker::apart(|| thread(ours).or_else(|| apart(ours, me)))
}

/// The kind and number of a thread or a child, and the reason.
pub type Sharer = (&'static str, i32, &'static str);

const VARIABLES: &str = "the variables of another thread";
const DESCRIPTORS: &str = "descriptors of its own";

/// The reason why the program cannot be taken over.
pub fn reason((kind, number, has): Sharer) -> String {
    format!("its {kind} {number} has {has}")
}

/// A thread that shares its descriptors with none of our threads.
fn apart(ours: &[i32], me: i32) -> Option<Sharer> {
    let is_apart = |thread: &i32| {
        let is_programs = *thread != me && !ours.contains(thread);
        is_programs && process::has_other_descriptors(*thread, me) && !is_over(*thread)
    };
    stop::threads().ok()?.into_iter().find(is_apart).map(|one| ("thread", one, DESCRIPTORS))
}

fn thread(ours: &[i32]) -> Option<Sharer> {
    // The caller is a thread of ours. If even that thread has no list, the kernel has no robust
    // locks, and no list is missing.
    if !has_list(0) {
        return None;
    }
    let is_bare = |thread: &i32| !ours.contains(thread) && !has_list(*thread) && !is_over(*thread);
    stop::threads().ok()?.into_iter().find(is_bare).map(|one| ("thread", one, VARIABLES))
}

fn child() -> Option<Sharer> {
    let threads = stop::threads().ok()?;
    let mut children = threads.iter().flat_map(|thread| {
        let listed = fs::read_to_string(format!("/proc/self/task/{thread}/children"));
        let numbers = listed.unwrap_or_default();
        numbers.split_whitespace().filter_map(|one| one.parse().ok()).collect::<Vec<i32>>()
    });
    let has_memory = |child: &i32| process::has_parents_memory(*child);
    children.find(has_memory).map(|child| ("child", child, VARIABLES))
}

/// True if a thread has a list of robust locks, as each has that the C library made.
fn has_list(thread: i32) -> bool {
    robust::list_of(thread) != Some(0)
}

/// True if a thread has ended. The kernel lists a process's first thread until the last thread
/// ends.
fn is_over(thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    let state = stat.rsplit(") ").next().and_then(|rest| rest.bytes().next());
    state.is_none_or(|state| matches!(state, b'Z' | b'X'))
}
