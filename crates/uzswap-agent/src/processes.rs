//! Calls about signals, processes and descriptors.

use crate::calls::refuse;
use crate::{Agent, forking, inside};
use libc::c_long;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;

/// Signals that must reach us: a fault, and a replaced instruction.
pub const OURS: u64 = 1 << (libc::SIGBUS - 1) | 1 << (libc::SIGILL - 1);

/// Descriptors of ours, which the program must not close: without them its pages are gone.
static DESCRIPTORS: [AtomicI32; 8] = [const { AtomicI32::new(-1) }; 8];

/// Notes which descriptors are ours.
pub fn keep(descriptors: &[i32]) {
    for (place, descriptor) in DESCRIPTORS.iter().zip(descriptors) {
        place.store(*descriptor, Relaxed);
    }
}

fn is_ours(descriptor: i32) -> bool {
    descriptor >= 0 && DESCRIPTORS.iter().any(|ours| ours.load(Relaxed) == descriptor)
}

/// `rt_sigprocmask`: ours are never blocked.
pub fn mask(call: &mut Call) -> Outcome {
    let [how, set, old, bytes, ..] = call.arguments;
    if set == 0 || how == libc::SIG_UNBLOCK as u64 || bytes != 8 {
        return Outcome::Bare;
    }
    // SAFETY: the program passes a set of eight bytes; a fault in reading it is served.
    let set = unsafe { *(set as *const u64) } & !OURS;
    // SAFETY: as the program asked for it, but for two signals.
    call.result = unsafe { raw(call.number, [how, &raw const set as u64, old, bytes, 0, 0]) };
    Outcome::Done
}

/// An action as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct KernelAction {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

/// `rt_sigaction`: our signals stay ours, also in a child that shares this memory and is about to
/// become another program; in handlers of others ours are not blocked.
pub fn action(call: &mut Call) -> Outcome {
    let [signal, new, old, bytes, ..] = call.arguments;
    if new == 0 || bytes != 8 {
        return Outcome::Bare;
    }
    if (1..=64).contains(&signal) && OURS & 1 << (signal - 1) != 0 {
        call.result = 0;
        return Outcome::Done;
    }
    // SAFETY: the program passes an action, as the kernel knows it.
    let mut action = unsafe { *(new as *const KernelAction) };
    action.mask &= !OURS;
    // SAFETY: as the program asked for it, but for two signals.
    call.result = unsafe { raw(call.number, [signal, &raw const action as u64, old, bytes, 0, 0]) };
    Outcome::Done
}

/// `fork`: the child has all of this process's memory, and what is kept of it.
pub fn fork(agent: &Agent, call: &mut Call) -> Outcome {
    let still = forking::before(agent);
    // SAFETY: the child has this stack, as a copy.
    call.result = unsafe { raw(call.number, call.arguments) };
    match call.result {
        0 => still.in_child(),
        _ => still.in_parent(),
    }
    Outcome::Done
}

/// `clone`: of a thread, or of a child that shares this memory, nothing is to be done.
pub fn clone(agent: &Agent, call: &mut Call) -> Outcome {
    let [flags, stack, ..] = call.arguments;
    if flags & libc::CLONE_VM as u64 != 0 {
        return Outcome::Bare;
    }
    if stack != 0 {
        return refuse(call, libc::EAGAIN);
    }
    fork(agent, call)
}

/// `clone3`: likewise. What does not share memory is asked for again by `clone`.
pub fn clone3(call: &mut Call) -> Outcome {
    // SAFETY: the program passes its arguments, of which the flags are the first eight bytes.
    let flags = unsafe { *(call.arguments[0] as *const u64) };
    match flags & libc::CLONE_VM as u64 {
        0 => refuse(call, libc::ENOSYS),
        _ => Outcome::Bare,
    }
}

/// `close`.
pub fn close(call: &mut Call) -> Outcome {
    if is_ours(call.arguments[0] as i32) {
        return refuse(call, libc::EBADF);
    }
    Outcome::Bare
}

/// `close_range`: all but ours.
pub fn close_range(call: &mut Call) -> Outcome {
    let [first, last, flags, ..] = call.arguments;
    let mut kept: Vec<u64> = {
        let _inside = inside();
        let ours = DESCRIPTORS.iter().map(|ours| ours.load(Relaxed)).filter(|ours| *ours >= 0);
        ours.map(|ours| ours as u64).filter(|ours| (first..=last).contains(ours)).collect()
    };
    kept.sort_unstable();
    let mut from = first;
    call.result = 0;
    for end in kept.iter().copied().chain([last.saturating_add(1)]) {
        if from < end {
            // SAFETY: a part of what the program asked for.
            let result = unsafe { raw(call.number, [from, end - 1, flags, 0, 0, 0]) };
            call.result = if result < 0 { result } else { call.result };
        }
        from = end + 1;
    }
    let _inside = inside();
    drop(kept);
    Outcome::Done
}

/// `dup2`, `dup3`.
pub fn duplicate(call: &mut Call) -> Outcome {
    if is_ours(call.arguments[1] as i32) {
        return refuse(call, libc::EBUSY);
    }
    Outcome::Bare
}

/// `execve`: the path and all strings are brought in, again if some have left meanwhile.
pub fn execute(agent: &Agent, call: &mut Call) -> Outcome {
    let _ = (0..8).any(|_| try_to_execute(agent, call));
    Outcome::Done
}

/// Whether that was the last word.
fn try_to_execute(agent: &Agent, call: &mut Call) -> bool {
    let strings = match call.number as c_long {
        libc::SYS_execve => [1, 2],
        _ => [2, 3],
    };
    let path = call.arguments[strings[0] - 1];
    bring_in_string(agent, path);
    for at in strings.map(|argument| call.arguments[argument]) {
        let mut at = at;
        while at != 0 {
            bring_in(agent, at, 8);
            // SAFETY: the program passes a list of strings that ends with a null.
            let string = unsafe { *(at as *const u64) };
            if string == 0 {
                break;
            }
            bring_in_string(agent, string);
            at += 8;
        }
    }
    // SAFETY: the call is the program's, made as it asked; if it is done, this is another program.
    call.result = unsafe { raw(call.number, call.arguments) };
    call.result != -i64::from(libc::EFAULT)
}

/// Brings memory in. It is not held: a child that shares this memory could not let it go.
fn bring_in(agent: &Agent, at: u64, bytes: usize) -> bool {
    let range = at as usize..at as usize + bytes;
    let is_adopted = agent.pager.hold(range.clone());
    agent.pager.unhold(range);
    is_adopted
}

/// Brings a string in, page by page up to its end.
fn bring_in_string(agent: &Agent, at: u64) {
    let mut at = at;
    while at != 0 && bring_in(agent, at, 1) {
        let end = (at + 1).next_multiple_of(PAGE_BYTES as u64);
        // SAFETY: adopted memory of the program's, which a string lies in.
        if (at..end).any(|byte| unsafe { *(byte as *const u8) } == 0) {
            return;
        }
        at = end;
    }
}
