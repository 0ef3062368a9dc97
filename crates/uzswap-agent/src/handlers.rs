//! Runs the program's signal handlers where they would run without us, with the registers that they
//! would see.
//!
//! ```text
//! kernel → `arrive`, on our stack, all signals blocked
//!        → the frame is copied to the program's stack, which may have to be brought in
//!        → the kernel's stack and the mask are set → the handler → `leave`
//!        → the mask that the handler has left, without ours → rt_sigreturn
//! ```
//! A handler that interrupts a replaced call sees the thread as it would be in the kernel: at its
//! `syscall`. So the handler may unwind from there (`pthread_cancel`, exceptions), or report the
//! address. When the handler returns, the thread continues in our code, unless the handler has set
//! another address. If the handler never returns, the call is over: [`crate::thread`].

#[cfg(target_arch = "aarch64")]
#[path = "handlers/aarch64.rs"]
mod processor;
#[cfg(target_arch = "x86_64")]
#[path = "handlers/x86_64.rs"]
mod processor;

use crate::signals::{KernelAction, OURS, never_blocked};
use crate::{seen, stacks, stage, thread};
use processor::{NOP, RED_ZONE, UserContext, go, go_back};
use std::ptr;
use uzswap_calls::{Call, CallFrame, CallRegisters, Patcher, raw};
use uzswap_sys::fault_signals::Versioned;

const SA_RESTORER: u64 = 0x0400_0000;
const SA_ONSTACK: u64 = libc::SA_ONSTACK as u64;
const SA_NODEFER: u64 = libc::SA_NODEFER as u64;
const SIGNALS: usize = 64;
/// A flag of a signal stack: the kernel forgets the stack while a handler runs on that stack.
const AUTODISARM: i32 = 1 << 31;

/// An action of the program's, which other threads read while it is replaced.
struct Entry(Versioned<4>);

static ACTIONS: [Entry; SIGNALS + 1] = [const { Entry(Versioned::zeros()) }; SIGNALS + 1];

impl Entry {
    /// Called in our own code, so that no handler of this thread waits for the entry.
    fn set(&self, action: &KernelAction) {
        let KernelAction { handler, flags, restorer, mask } = *action;
        self.0.set([handler, flags, restorer, mask]);
    }

    fn get(&self) -> KernelAction {
        let [handler, flags, restorer, mask] = self.0.get();
        KernelAction { handler, flags, restorer, mask }
    }
}

/// True if the handler is neither SIG_DFL nor SIG_IGN.
pub fn is_function(handler: u64) -> bool {
    ![libc::SIG_DFL, libc::SIG_IGN].contains(&(handler as usize))
}

fn own_handler() -> u64 {
    arrive as extern "C" fn(_, _, _) -> ! as usize as u64
}

fn of_kernel(signal: u64) -> KernelAction {
    let mut action = KernelAction { handler: 0, flags: 0, restorer: 0, mask: 0 };
    let arguments = [signal, 0, &raw mut action as u64, 8, 0, 0];
    // SAFETY: without a new action, the kernel writes the present one to `action`, which has that
    // type.
    unsafe { raw(libc::SYS_rt_sigaction as u64, arguments) };
    action
}

/// True if a signal with this action begins in our code. In a program that is left alone, only
/// handlers on a signal stack do: we have exchanged that stack.
fn is_wrapped(signal: u64, action: &KernelAction) -> bool {
    let is_dump = || action.handler == libc::SIG_DFL as u64 && is_dumped(signal);
    match stage::is_left() {
        _ if stage::is_confined() => false,
        true => is_function(action.handler) && action.flags & SA_ONSTACK != 0,
        false => is_function(action.handler) || is_dump(),
    }
}

/// True if the default action of a signal is a core dump, before which all pages are brought in.
fn is_dumped(signal: u64) -> bool {
    seen::DUMPED & 1 << (signal - 1) != 0
}

/// The program's action for a signal.
pub fn of_program(signal: u64) -> KernelAction {
    let now = of_kernel(signal);
    match ACTIONS.get(signal as usize) {
        Some(entry) if now.handler == own_handler() => entry.get(),
        _ => now,
    }
}

/// Sets the program's action; returns the kernel's answer. `is_other` if the caller borrows this
/// memory (`vfork`). The handlers of such a caller do not begin in our code. Called in our own
/// code.
pub fn set(signal: u64, action: &KernelAction, is_other: bool) -> i64 {
    let mut given = KernelAction { mask: action.mask & !never_blocked(), ..*action };
    if let Some(entry) = ACTIONS.get(signal as usize)
        && is_wrapped(signal, action)
        && !is_other
    {
        entry.set(&given);
        // All signals are blocked, because no other handler may begin on our stack meanwhile.
        const FORM: u64 = SA_RESTORER | SA_ONSTACK | libc::SA_SIGINFO as u64;
        let restorer = leave_in_place();
        let (handler, flags) = (own_handler(), action.flags & !SA_NODEFER | FORM);
        given = KernelAction { handler, flags, restorer, mask: !(OURS | FAULTS) };
    }
    let arguments = [signal, &raw const given as u64, 0, 8, 0, 0];
    // SAFETY: the program's own action, by way of `arrive`.
    unsafe { raw(libc::SYS_rt_sigaction as u64, arguments) }
}

/// The kernel ends a process that blocks the signal of a fault.
const FAULTS: u64 = 1 << (libc::SIGBUS - 1) | 1 << (libc::SIGILL - 1) | 1 << (libc::SIGSEGV - 1);

/// Sets if the kernel begins our own handler of a signal on the thread's signal stack. The takeover
/// does not ask for this while it stops threads: the program's signal stack may be too small, and
/// no page is absent yet.
pub fn begin_on_stack(signal: i32, is_so: bool) {
    let mut action = of_kernel(signal as u64);
    action.flags = if is_so { action.flags | SA_ONSTACK } else { action.flags & !SA_ONSTACK };
    let arguments = [signal as u64, &raw const action as u64, 0, 8, 0, 0];
    // SAFETY: our own handler, begun elsewhere.
    unsafe { raw(libc::SYS_rt_sigaction as u64, arguments) };
}

/// Takes over the actions that the program has set. Called while all other threads stand still.
pub fn take_over() {
    let others = (1..=SIGNALS as u64).filter(|signal| OURS & 1 << (signal - 1) == 0);
    for signal in others {
        let action = of_kernel(signal);
        if is_wrapped(signal, &action) && action.handler != own_handler() {
            // An error would mean that there is no such signal.
            let _ = set(signal, &action, false);
        }
    }
}

/// Gives the kernel the program's handlers back where possible, when uzswap leaves the program
/// alone.
pub fn give_back() {
    for signal in 1..=SIGNALS as u64 {
        if of_kernel(signal).handler == own_handler() {
            // An error would mean that there is no such signal.
            let _ = set(signal, &of_program(signal), false);
        }
    }
}

/// The data to continue a thread, on the stack beside the handler's frame.
pub struct After {
    /// The true state, if the handler saw another state; else null.
    interrupted: *mut UserContext,
    /// The instruction and the stack that the handler was shown.
    shown: [u64; 2],
    /// The replaced call that was interrupted; null if there was none.
    call: *const CallFrame,
}

/// The kernel begins this for each signal that the program handles.
extern "C" fn arrive(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) -> ! {
    let action = ACTIONS.get(signal as usize).unwrap_or(&ACTIONS[0]).get();
    // SAFETY: the kernel's own arguments.
    unsafe { deliver(&action, signal, info, context.cast()) }
}

/// Runs a handler of the program's as the kernel would.
///
/// # Safety
/// The kernel has given these arguments to a handler of ours. The caller's stack is no longer
/// needed.
pub unsafe fn deliver_from(
    action: &libc::sigaction,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) -> ! {
    // SAFETY: the caller's promise.
    unsafe { deliver(&KernelAction::of(action), signal, info, context.cast()) }
}

/// See [`deliver_from`].
///
/// # Safety
/// See [`deliver_from`].
unsafe fn deliver(
    action: &KernelAction,
    signal: i32,
    info: *mut libc::siginfo_t,
    context: *mut UserContext,
) -> ! {
    if !is_function(action.handler) {
        seen::complete();
        // SAFETY: the caller's promise.
        unsafe { die_by(signal, info, context) };
    }
    // SAFETY: the kernel's description, which is the handler's to change.
    let interrupted = unsafe { &mut *context };
    let own = if action.flags & SA_NODEFER == 0 { 1 << (signal - 1) } else { 0 };
    let mask = (interrupted.mask | action.mask | own) & !never_blocked();
    let frame = processor::frame_of(context);
    let mut plan = Plan {
        frame,
        signal: signal as u64,
        info,
        context,
        handler: action.handler,
        stack: ptr::null(),
        mask,
        leave: leave_in_place(),
    };
    let kernels = stacks::ours().filter(|_| stacks::is_on_ours(frame));
    let sp = interrupted.stack_pointer() as usize;
    let is_on_calls = stacks::is_on_calls(sp);
    if kernels.is_none() && !is_on_calls && !is_astray(action, interrupted, frame, sp) {
        // The thread has no signal stack of ours, so the handler is on the right stack.
        // SAFETY: the kernel's frame is the handler's.
        unsafe { go(&plan) }
    }
    let sp = if is_on_calls { stacks::below_calls() } else { sp };
    if stacks::is_on_ours(sp) {
        // There is no room where the handler was to run: the kernel would end the process.
        // SAFETY: the caller's promise.
        unsafe { die_by(signal, info, context) };
    }
    // The program's stack may have to be brought in. If this signal is ours, the kernel has blocked
    // the signals by which pages come in.
    if OURS & 1 << (signal - 1) != 0 {
        unblock_ours();
    }
    // SAFETY: as above.
    plan.context = unsafe { copy(action, interrupted, info, sp) };
    plan.frame = processor::frame_of(plan.context);
    // SAFETY: the frame was just made.
    plan.info = unsafe { processor::info_of(plan.context) };
    plan.leave = leave();
    plan.stack = kernels.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the frame is a copy of the kernel's, on the program's stack.
    unsafe { go(&plan) }
}

fn unblock_ours() {
    let set = OURS;
    let arguments = [libc::SIG_UNBLOCK as u64, &raw const set as u64, 0, 8, 0, 0];
    // SAFETY: the set outlives the call, which changes nothing but the thread's mask.
    unsafe { raw(libc::SYS_rt_sigprocmask as u64, arguments) };
}

/// True if the kernel has begun a handler on the program's stack for signals because we asked for
/// that, and the program did not.
fn is_astray(action: &KernelAction, interrupted: &UserContext, frame: usize, sp: usize) -> bool {
    let start = interrupted.stack.ss_sp as usize;
    let stack = start..start.saturating_add(interrupted.stack.ss_size);
    action.flags & SA_ONSTACK == 0 && stack.contains(&frame) && !stack.contains(&sp)
}

/// Ends the process as the signal would have. The signal is sent again, and arrives when the thread
/// continues.
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn die_by(signal: i32, info: *mut libc::siginfo_t, context: *mut UserContext) -> ! {
    let default = KernelAction { handler: 0, flags: SA_RESTORER, restorer: 0, mask: 0 };
    let arguments = [signal as u64, &raw const default as u64, 0, 8, 0, 0];
    let own = rustix::process::getpid().as_raw_nonzero().get() as u64;
    let thread = rustix::thread::gettid().as_raw_nonzero().get() as u64;
    let again = [own, thread, signal as u64, info as u64, 0, 0];
    // SAFETY: the default is any process's, and a process may send itself any description.
    unsafe {
        raw(libc::SYS_rt_sigaction as u64, arguments);
        if raw(libc::SYS_rt_tgsigqueueinfo as u64, again) != 0 {
            // The queue is full: without the description.
            raw(libc::SYS_tgkill as u64, [own, thread, signal as u64, 0, 0, 0]);
        }
        go_back(context)
    }
}

/// Copies the kernel's frame to where the handler runs, as the kernel would have made it there.
///
/// # Safety
/// The arguments are the kernel's.
unsafe fn copy(
    action: &KernelAction,
    interrupted: &UserContext,
    info: *const libc::siginfo_t,
    sp: usize,
) -> *mut UserContext {
    let programs = stacks::programs();
    let asked = stacks::of_handlers().filter(|_| action.flags & SA_ONSTACK != 0);
    let is_elsewhere = |stack: &std::ops::Range<usize>| {
        programs.ss_flags & AUTODISARM != 0 || !stack.contains(&sp)
    };
    let top = asked.filter(is_elsewhere).map_or(sp - RED_ZONE, |stack| stack.end);
    let call = thread::with(|thread| thread.call.replace(ptr::null()));
    let after = After { interrupted: ptr::null_mut(), shown: [0; 2], call };
    // SAFETY: on the program's stack, below all that the program uses. If the stack cannot be
    // written, it has overflowed, and `deliver` handles the fault, since our stack is in use.
    let mut given = unsafe { &mut *processor::copy(interrupted, info, top, after) };
    given.stack = programs;
    if let Some(registers) = shown(call, interrupted) {
        let shown = [registers.instruction, registers.stack()];
        let after = After { interrupted: ptr::from_mut(given), shown, call };
        // SAFETY: as above, below the first copy; no other thread uses either.
        given = unsafe { &mut *processor::copy_again(given, info, after) };
        given.show(&registers);
    }
    if programs.ss_flags & AUTODISARM != 0 && top != sp - RED_ZONE {
        stacks::set_programs(stacks::NONE);
    }
    given
}

/// The registers that the handler is to see of a thread that was interrupted in our code.
fn shown(call: *const CallFrame, interrupted: &UserContext) -> Option<CallRegisters> {
    let at = interrupted.instruction() as usize;
    // SAFETY: null, or the frame of the call that this thread is in.
    let Some(frame) = (unsafe { call.as_ref() }) else {
        let instruction = Patcher::site_of_bare(at)? as u64;
        return Some(CallRegisters { instruction, ..interrupted.registers() });
    };
    if !own_code().contains(&at) {
        return None;
    }
    let is_made = (frame.call.result != Call::NOT_MADE).then_some(frame.call.result);
    // SAFETY: in code of ours.
    let is_behind = unsafe { processor::is_behind_call(at) };
    let answer = interrupted.result();
    let ended = is_behind.then_some(answer).filter(|answer| *answer == -i64::from(libc::EINTR));
    // SAFETY: as above.
    Some(unsafe { frame.registers(is_made.or(ended)) })
}

/// The addresses of this library's code.
fn own_code() -> std::ops::Range<usize> {
    unsafe extern "C" {
        /// The linker defines both symbols: where this library begins, and where its code ends.
        static __ehdr_start: u8;
        static etext: u8;
    }
    (&raw const __ehdr_start) as usize..(&raw const etext) as usize
}

/// The address to which a handler returns that ran on a copy.
fn leave() -> u64 {
    behind_nop(processor::leave_copy)
}

/// The address to which a handler returns that ran where the kernel had begun it.
fn leave_in_place() -> u64 {
    behind_nop(processor::leave_kernels)
}

fn behind_nop(leave: unsafe extern "C" fn()) -> u64 {
    (leave as usize + NOP) as u64
}

/// How a handler is begun.
#[repr(C)]
pub struct Plan {
    /// The stack pointer.
    frame: usize,
    signal: u64,
    info: *mut libc::siginfo_t,
    context: *mut UserContext,
    handler: u64,
    /// The signal stack to register with the kernel; null to leave the present one.
    stack: *const libc::stack_t,
    mask: u64,
    /// The address to which the handler returns.
    leave: u64,
}

/// Ends a handler that ran on a copy; returns the state to continue with.
unsafe extern "C" fn end(context: *mut UserContext) -> *mut UserContext {
    // SAFETY: the handler returned to `leave` with the stack that it was given.
    unsafe {
        let given = &mut *context;
        let After { interrupted, shown, call } = *processor::after(context);
        let mut to = context;
        if let Some(interrupted) = interrupted.as_mut() {
            // The thread continues where it was interrupted, unless the handler has changed the
            // address.
            if [given.instruction(), given.stack_pointer()] == shown {
                interrupted.mask = given.mask;
                interrupted.stack = given.stack;
                to = interrupted;
                thread::with(|thread| thread.call.set(call));
            }
        } else {
            thread::with(|thread| thread.call.set(call));
        }
        let to = &mut *to;
        // Like the kernel, restores the signal stack unless the stack is in use.
        let is_used = stacks::of_handlers().is_some_and(|on| on.contains(&(context as usize)));
        if !is_used {
            stacks::set_programs(to.stack);
        }
        if let Some(ours) = stacks::ours().filter(|_| !stage::is_confined()) {
            to.stack = ours;
        }
        to.mask &= !never_blocked();
        to
    }
}

/// Ends a handler that ran where the kernel had begun it.
unsafe extern "C" fn end_in_place(context: *mut UserContext) -> *mut UserContext {
    // SAFETY: the handler returned to `leave_in_place` with the stack as the kernel gave it.
    let to = unsafe { &mut *context };
    to.mask &= !never_blocked();
    // A handler from before the take-over sets the signal stack of that time when it returns.
    if let Some(ours) = stacks::ours().filter(|_| !stage::is_confined()) {
        to.stack = ours;
    }
    to
}
