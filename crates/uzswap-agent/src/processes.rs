//! Calls about signals, processes and descriptors.

use crate::execute::bytes_of;
use crate::pins::{Pins, peek, peek_bytes, poke, refuse};
use crate::signals::{self, KernelAction, OURS};
use crate::{Agent, adoption, forking, handlers, inside, layout, own_descriptors, sharing, stage};
use std::mem::MaybeUninit;
use std::ptr;
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;
use uzswap_sys::{fault_signals, thread_memory};

/// `rt_sigprocmask`: our signals are never blocked. Without an agent, this library itself made the
/// call.
pub fn mask(agent: Option<&Agent>, call: &mut Call) -> Outcome {
    let [how, set, old, bytes, ..] = call.arguments;
    let _holds = agent.map(|agent| pin_both(agent, set, old, bytes));
    let mut arguments = call.arguments;
    let given;
    if set != 0 && how != libc::SIG_UNBLOCK as u64 && bytes == 8 {
        let Some(asked) = set_at(set) else { return refuse(call, libc::EFAULT) };
        given = asked & !signals::never_blocked();
        arguments[1] = &raw const given as u64;
    }
    // SAFETY: the program's own call, with a set that lacks some signals.
    call.result = unsafe { raw(call.number, arguments) };
    Outcome::Done
}

/// A signal set of the program's; `None` if no memory is mapped at the address. Most sets are on
/// the thread's present stack, which is read directly.
fn set_at(at: u64) -> Option<u64> {
    const NEAR: u64 = 4096;
    let here = &raw const at as u64;
    if at.is_multiple_of(8) && (here..here + NEAR).contains(&at) {
        // SAFETY: on this thread's stack, above the part in use.
        return Some(unsafe { *(at as *const u64) });
    }
    peek::<u64>(at)
}

/// Keeps in memory the pages that a call reads or writes.
fn pin_both(agent: &Agent, read: u64, written: u64, bytes: u64) -> Pins<'_> {
    let mut pins = Pins::new(agent);
    pins.pin(read, bytes);
    pins.pin(written, bytes);
    pins
}

/// `rt_sigaction`: our signals stay ours, and handlers of others do not block them.
pub fn action(agent: &Agent, call: &mut Call) -> Outcome {
    let [signal, new, old, bytes, ..] = call.arguments;
    let is_ours = (1..=64).contains(&signal) && OURS & 1 << (signal - 1) != 0;
    if is_ours && bytes == 8 {
        return action_of_ours(agent, call);
    }
    let _holds = pin_both(agent, new, old, size_of::<KernelAction>() as u64);
    if bytes != 8 {
        // SAFETY: the kernel refuses it.
        call.result = unsafe { raw(call.number, call.arguments) };
        return Outcome::Done;
    }
    let before = (old != 0).then(|| handlers::of_program(signal));
    call.result = 0;
    if new != 0 {
        let Some(action) = peek::<KernelAction>(new) else { return refuse(call, libc::EFAULT) };
        // Under a filter this function must make no other call.
        let _inside = (!stage::is_confined()).then(inside);
        call.result = handlers::set(signal, &action, fault_signals::is_other_process());
    } else if !(1..=64).contains(&signal) {
        call.result = -i64::from(libc::EINVAL);
    }
    if let Some(before) = before.filter(|_| call.result == 0)
        && !poke(old, &before)
    {
        return refuse(call, libc::EFAULT);
    }
    Outcome::Done
}

/// `rt_sigaction` of a signal of ours, by a library that does not call the preloaded `sigaction`.
/// The program's handler gets the signals that are not ours. A child that shares this memory, and
/// is about to execute another program, changes nothing.
fn action_of_ours(agent: &Agent, call: &mut Call) -> Outcome {
    let [signal, new, old, ..] = call.arguments;
    let _holds = pin_both(agent, new, old, size_of::<KernelAction>() as u64);
    let given = match new {
        0 => None,
        _ => match peek::<KernelAction>(new) {
            Some(given) => Some(given.to_libc()).filter(|_| !fault_signals::is_other_process()),
            None => return refuse(call, libc::EFAULT),
        },
    };
    // SAFETY: all-zero bytes are a valid action.
    let mut before = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
    let given = given.as_ref().map_or(ptr::null(), ptr::from_ref);
    {
        let _inside = inside();
        // SAFETY: an action or null, and room for an action.
        unsafe { fault_signals::set_action(signal as i32, given, &raw mut before) };
    }
    if old != 0 && !poke(old, &KernelAction::of(&before)) {
        return refuse(call, libc::EFAULT);
    }
    call.result = 0;
    Outcome::Done
}

/// `fork`: the child has all of this process's memory, its compressed pages included.
pub fn fork(agent: &Agent, call: &mut Call) -> Outcome {
    make_child(agent, call, call.arguments, 0)
}

/// Makes a child with memory of its own. If the child is to have another stack, it switches to that
/// stack when it leaves our code. Until then it runs on its copy of the calling thread's stack.
fn make_child(agent: &Agent, call: &mut Call, arguments: [u64; 6], stack: u64) -> Outcome {
    let Ok(still) = forking::before(agent) else { return refuse(call, libc::ENOMEM) };
    // SAFETY: the child has this stack, as a copy.
    call.result = unsafe { raw(call.number, arguments) };
    forking::note();
    if call.result != 0 {
        still.in_parent();
        return Outcome::Done;
    }
    still.in_child();
    if stack == 0 {
        return Outcome::Done;
    }
    call.arguments[1] = stack;
    Outcome::OnStack
}

/// A child with memory of its own may not share descriptors with its parent: the descriptors that
/// serve its faults would be the parent's.
const SHARED: u64 = libc::CLONE_FILES as u64;

/// `clone`: for a thread, or a child that shares this memory, memory that the kernel writes later
/// is given back.
pub fn clone(agent: &Agent, call: &mut Call) -> Outcome {
    let [flags, stack, parent, fourth, fifth, _] = call.arguments;
    // Processors differ in the order of the last two.
    let is_child_first = cfg!(target_arch = "x86_64");
    let (child, block) = if is_child_first { (fourth, fifth) } else { (fifth, fourth) };
    const WRITTEN: i32 = libc::CLONE_PARENT_SETTID
        | libc::CLONE_CHILD_SETTID
        | libc::CLONE_CHILD_CLEARTID
        | libc::CLONE_PIDFD;
    if flags & libc::CLONE_VM as u64 == 0 {
        if flags & WRITTEN as u64 != 0 {
            layout::give_back(agent, parent, 4);
            layout::give_back(agent, child, 4);
        }
        let mut arguments = call.arguments;
        (arguments[0], arguments[1]) = (flags & !SHARED, 0);
        return make_child(agent, call, arguments, stack);
    }
    sharing::before_clone(agent, flags);
    expect_thread(agent, flags);
    for (at, bytes) in [(parent, 4), (child, 4)] {
        layout::give_back(agent, at, bytes);
    }
    give_block_back(agent, flags, block);
    // No argument gives the stack's size: this is the part that a thread touches before it makes a
    // call.
    layout::give_back(agent, stack.saturating_sub(FIRST), FIRST);
    Outcome::Bare
}

/// Prepares for another thread in this memory. A child that borrows the memory (`vfork`) is no such
/// thread, since its parent stands still.
fn expect_thread(agent: &Agent, flags: u64) {
    if flags & libc::CLONE_VFORK as u64 == 0 {
        agent.pager.set_only_thread(None);
    }
}

/// Gives a new thread's block and variables back to the program, because the thread's fault handler
/// uses some of the variables.
fn give_block_back(agent: &Agent, flags: u64, block: u64) {
    if flags & libc::CLONE_SETTLS as u64 != 0 {
        let range = adoption::up_to_end(thread_memory::block_of(block as usize));
        layout::give_back(agent, range.start as u64, range.len() as u64);
    }
}

/// The part of its stack that a new thread touches before it has a signal stack.
const FIRST: u64 = 64 << 10;

/// The beginning of `clone_args`, of the kernel's first version.
#[derive(Clone, Copy)]
#[repr(C)]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child: u64,
    parent: u64,
    exit_signal: u64,
    stack: u64,
    stack_bytes: u64,
    block: u64,
}

/// The child begins without handlers, ours among them.
const CLEARED: u64 = 1 << 32;

/// `clone3`, as [`clone`].
pub fn clone3(agent: &Agent, call: &mut Call) -> Outcome {
    let [at, bytes, ..] = call.arguments;
    if stage::is_left() {
        return match peek::<CloneArguments>(at) {
            Some(arguments) if arguments.flags & CLEARED != 0 => refuse(call, libc::ENOSYS),
            _ => Outcome::Bare,
        };
    }
    if !(size_of::<CloneArguments>()..=PAGE_BYTES).contains(&(bytes as usize)) {
        // The kernel refuses the call.
        return Outcome::Bare;
    }
    let mut pins = Pins::new(agent);
    pins.pin(at, bytes);
    let Some(arguments) = peek::<CloneArguments>(at) else { return refuse(call, libc::EFAULT) };
    if arguments.flags & libc::CLONE_VM as u64 == 0 {
        return clone3_apart(agent, call, pins);
    }
    if arguments.flags & CLEARED != 0 {
        // An absent page would end such a child. The error is that of a kernel before Linux 5.5,
        // after which callers use `clone`.
        return refuse(call, libc::ENOSYS);
    }
    drop(pins);
    sharing::before_clone(agent, arguments.flags);
    expect_thread(agent, arguments.flags);
    // The arguments must be present. They are not pinned, because a child could not unpin them.
    layout::give_back(agent, at, bytes);
    for (at, bytes) in [
        (arguments.pidfd, 4),
        (arguments.child, 4),
        (arguments.parent, 4),
        (arguments.stack, arguments.stack_bytes),
    ] {
        layout::give_back(agent, at, bytes);
    }
    give_block_back(agent, arguments.flags, arguments.block);
    Outcome::Bare
}

/// `clone3` of a child with memory of its own.
fn clone3_apart(agent: &Agent, call: &mut Call, mut pins: Pins<'_>) -> Outcome {
    // Indexes of fields in `clone_args`, of eight bytes each.
    const FLAGS: usize = 0;
    const WRITTEN: [usize; 3] = [1, 2, 3];
    const STACK: usize = 5;
    const STACK_BYTES: usize = 6;
    const TIDS: usize = 8;
    let [at, bytes, ..] = call.arguments;
    let mut given = [0u64; PAGE_BYTES / size_of::<u64>()];
    if peek_bytes(at, &mut bytes_of(&mut given)[..bytes as usize]) < bytes as usize {
        return refuse(call, libc::EFAULT);
    }
    for place in WRITTEN {
        layout::give_back(agent, given[place], 4);
    }
    pins.pin(given[TIDS], PAGE_BYTES as u64);
    let stack = given[STACK].wrapping_add(given[STACK_BYTES]);
    let is_cleared = given[FLAGS] & CLEARED != 0;
    given[FLAGS] &= !(SHARED | CLEARED);
    (given[STACK], given[STACK_BYTES]) = (0, 0);
    let arguments = [given.as_ptr() as u64, bytes, 0, 0, 0, 0];
    if !is_cleared {
        return make_child(agent, call, arguments, stack);
    }
    // No handler may begin in the child before the handlers are cleared.
    let mask = signals::block();
    let outcome = make_child(agent, call, arguments, stack);
    if call.result == 0 {
        clear_handlers();
    }
    signals::set_mask(mask);
    outcome
}

/// Clears the handlers as the kernel does for a child, except our own.
fn clear_handlers() {
    let _inside = inside();
    let default = KernelAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    for signal in 1..=64 {
        if OURS & 1 << (signal - 1) != 0 {
            fault_signals::clear_action(signal as i32);
        } else if handlers::is_function(handlers::of_program(signal).handler) {
            // An error would mean that there is no such signal.
            let _ = handlers::set(signal, &default, false);
        }
    }
}

pub fn close(call: &mut Call) -> Outcome {
    if own_descriptors::is_ours(call.arguments[0] as i32) {
        return refuse(call, libc::EBADF);
    }
    Outcome::Bare
}

/// `close_range`: all but ours. The kernel reads 32 bits of each bound; callers leave garbage in
/// the others.
pub fn close_range(call: &mut Call) -> Outcome {
    let [first, last, flags, ..] = call.arguments;
    let [first, last] = [first, last].map(|bound| u64::from(bound as u32));
    if first > last {
        // The kernel refuses the call.
        return Outcome::Bare;
    }
    let mut kept: Vec<u64> = {
        let _inside = inside();
        let ours = own_descriptors::all();
        ours.map(|ours| ours as u64).filter(|ours| (first..=last).contains(ours)).collect()
    };
    kept.sort_unstable();
    let mut from = first;
    call.result = 0;
    for end in kept.iter().copied().chain([last + 1]) {
        if from < end {
            // SAFETY: a part of the program's request.
            let result = unsafe { raw(call.number, [from, end - 1, flags, 0, 0, 0]) };
            call.result = if result < 0 { result } else { call.result };
        }
        from = end + 1;
    }
    let _inside = inside();
    drop(kept);
    Outcome::Done
}

pub fn duplicate(call: &mut Call) -> Outcome {
    if own_descriptors::is_ours(call.arguments[1] as i32) {
        return refuse(call, libc::EBUSY);
    }
    Outcome::Bare
}
