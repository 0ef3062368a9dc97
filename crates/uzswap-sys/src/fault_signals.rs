//! Handlers of SIGBUS, SIGSEGV and SIGILL: we serve our faults, and pass all others to the
//! program's handler.
//!
//! The kernel knows only our handler. This module keeps the program's handlers, those from before
//! ours and those from after. A preloaded library directs `sigaction` to [`set_action`];
//! [`take_back`] finds handlers that were set without our knowledge.
//!
//! The handler runs on the alternate stack of the thread that faulted, or on the thread's own stack
//! if the thread has no alternate one. It takes some hundred bytes of that stack, because faults
//! are served on stacks of ours ([`crate::stack`]). All signals are blocked, so that no other
//! handler runs while the thread holds our locks. `errno` is preserved.

mod fetch;
mod handlers;
mod versioned;

use crate::processor::{self, Cause, Registers};
use crate::stack::Stacks;
use crate::uffd::Fault;
pub use fetch::{OnFetch, on_fetch};
use handlers::{Handlers, action};
use libc::{c_int, sigaction as Action};
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
pub use versioned::Versioned;

/// Serves a fault; `false` if the fault is not ours.
pub type Serve = fn(Fault) -> bool;

/// Our function for a signal, and the program's handlers of it.
struct Hook {
    serve: OnceLock<Serve>,
    handlers: Handlers,
}

impl Hook {
    const fn new() -> Self {
        Self { serve: OnceLock::new(), handlers: Handlers::new() }
    }
}

static BUS: Hook = Hook::new();
static SEGV: Hook = Hook::new();
static ILL: Hook = Hook::new();
static SENT: OnceLock<fn(&mut Stopped) -> bool> = OnceLock::new();
static ILLEGAL: OnceLock<fn(usize) -> Option<usize>> = OnceLock::new();
static DELIVER: OnceLock<Deliver> = OnceLock::new();
static BEFORE_DEFAULT: OnceLock<fn()> = OnceLock::new();

/// Begins a handler of the program's as the kernel would, and does not return. Gets the program's
/// action and the arguments of our handler, and may abandon the stack of our handler.
pub type Deliver = unsafe fn(&Action, c_int, *mut libc::siginfo_t, *mut libc::c_void) -> !;

/// A thread that a signal has stopped, and where it continues.
#[derive(Debug)]
pub struct Stopped {
    /// The next instruction.
    pub instruction: usize,
    /// The stack pointer.
    pub stack: usize,
    /// The result of a system call, if the instruction before is one. If the next instruction is a
    /// call, on x86-64 its number, and on aarch64 its first argument.
    pub result: i64,
    /// The address behind the last system call, if the thread was in a call (an x86-64 keeps that
    /// address in a register; 0 on aarch64).
    pub behind: usize,
    /// The number of the last system call, if the processor keeps it (aarch64).
    pub number: Option<i64>,
    /// The registers with the arguments of a system call. The call leaves these registers as they
    /// are.
    pub arguments: [u64; 6],
    /// Signals that the thread blocks, from 1 on.
    pub blocked: u64,
    /// The signal stack that the kernel will have for the thread when it continues.
    pub signal_stack: libc::stack_t,
    /// The value that was sent with the signal (`sigqueue`), if any.
    pub value: Option<usize>,
    /// True if the kernel names no sender, because it had no room for the signal's value.
    pub has_lost_value: bool,
}
static STACKS: OnceLock<Stacks> = OnceLock::new();

/// The process of these handlers. A process from `vfork` runs in our memory until it executes
/// another program, and may set its own handlers.
static PROCESS: AtomicU32 = AtomicU32::new(0);

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// The C library's `sigaction`, by a name that no library overrides.
    #[link_name = "__sigaction"]
    fn real_sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int;
}
#[cfg(not(target_env = "gnu"))]
use libc::sigaction as real_sigaction;

/// The kernel's present action for a signal.
fn of_kernel(signal: c_int) -> io::Result<Action> {
    let mut action = MaybeUninit::<Action>::zeroed();
    // SAFETY: without a new action, the kernel writes the present one to `action`, which has that
    // type.
    match unsafe { real_sigaction(signal, std::ptr::null(), action.as_mut_ptr()) } {
        // SAFETY: an action of zeros is valid, and so is the action that the kernel wrote.
        0 => Ok(unsafe { action.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel call our handler.
fn install(signal: c_int) -> io::Result<()> {
    let flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    let mut ours = action(handle as *const () as usize, flags, 0);
    // SAFETY: the mask is a set; the handler has the form of SA_SIGINFO.
    let done = unsafe {
        libc::sigfillset(&mut ours.sa_mask);
        // A replaced call of the C library raises SIGILL.
        libc::sigdelset(&mut ours.sa_mask, libc::SIGILL);
        add_cancellation(&mut ours.sa_mask);
        real_sigaction(signal, &ours, std::ptr::null_mut())
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Adds the signal by which the C library cancels threads, which `sigfillset` leaves out. The C
/// library's handler unwinds a thread that may be cancelled at any time, and our locks would stay
/// taken.
fn add_cancellation(set: &mut libc::sigset_t) {
    const SIGCANCEL: u64 = 32;
    // SAFETY: the C library's set begins with the kernel's.
    unsafe { *std::ptr::from_mut(set).cast::<u64>() |= 1 << (SIGCANCEL - 1) };
}

fn hook_of(signal: c_int) -> Option<&'static Hook> {
    let hook = match signal {
        libc::SIGBUS => &BUS,
        libc::SIGSEGV => &SEGV,
        libc::SIGILL => &ILL,
        _ => return None,
    };
    if signal != libc::SIGILL && ARE_GIVEN_BACK.load(Acquire) {
        return None;
    }
    (hook.serve.get().is_some() && PROCESS.load(Relaxed) == std::process::id()).then_some(hook)
}

/// True after [`give_back`].
static ARE_GIVEN_BACK: AtomicBool = AtomicBool::new(false);

/// Sets the program's fault handlers in the kernel again, so that we get no fault from now on.
/// SIGILL stays ours.
pub fn give_back() {
    let signals = [libc::SIGBUS, libc::SIGSEGV].map(|signal| (signal, hook_of(signal)));
    ARE_GIVEN_BACK.store(true, Release);
    for (signal, hook) in signals {
        let Some(hook) = hook else { continue };
        let programs = hook.handlers.all[0].get();
        // An error would mean that there is no such signal.
        // SAFETY: an action of the program's.
        let _ = unsafe { real_sigaction(signal, &programs, std::ptr::null_mut()) };
    }
}

/// Directs faults to us again, if the program has set a handler of SIGBUS past us: that handler
/// gets the faults that are not ours. Does nothing before [`on_bus`].
pub fn take_back() -> io::Result<()> {
    let Some(hook) = hook_of(libc::SIGBUS) else { return Ok(()) };
    let _blocked = Blocked::all();
    let now = of_kernel(libc::SIGBUS)?;
    if now.sa_sigaction == handle as *const () as usize {
        return Ok(());
    }
    hook.handlers.push(&now);
    install(libc::SIGBUS)
}

/// The `sigaction` of a program whose SIGBUS is ours (and SIGILL, where instructions were
/// replaced). For these signals it reads and sets the handler that gets the signals that are not
/// ours. For all other signals it is the C library's `sigaction`.
///
/// # Safety
/// As of `sigaction`.
pub unsafe fn set_action(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    let Some(hook) = hook_of(signal) else {
        // SAFETY: the caller's promise.
        return unsafe { real_sigaction(signal, new, old) };
    };
    let _blocked = Blocked::all();
    let first = &hook.handlers.all[0];
    let before = first.get();
    // SAFETY: both are actions, or null.
    if let Some(new) = unsafe { new.as_ref() } {
        first.set(new);
        hook.handlers.count.store(1, Release);
    }
    if !old.is_null() {
        // SAFETY: as above.
        unsafe { old.write(before) };
    }
    0
}

/// Removes the program's handlers of a signal that is ours, in a child that is to begin without
/// handlers.
pub fn clear_action(signal: c_int) {
    let first = hook_of(signal).map(|hook| &hook.handlers.all[0]);
    if first.is_some_and(|first| first.get().sa_sigaction != libc::SIG_IGN) {
        let default = action(libc::SIG_DFL, 0, 0);
        // SAFETY: a valid action; a null pointer for the old one.
        unsafe { set_action(signal, &default, std::ptr::null_mut()) };
    }
}

#[cfg(target_env = "gnu")]
unsafe extern "C" {
    /// The C library's `signal` and `sysv_signal`, by names that no library overrides.
    fn ssignal(signal: c_int, handler: usize) -> usize;
    fn sysv_signal(signal: c_int, handler: usize) -> usize;
}

/// The `signal` of a program whose SIGBUS is ours, as [`set_action`] is its `sigaction`.
///
/// # Safety
/// As of `signal`.
#[cfg(target_env = "gnu")]
pub unsafe fn set_handler(signal: c_int, function: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let ours = swap_handler(signal, function, libc::SA_RESTART);
        ours.unwrap_or_else(|| ssignal(signal, function))
    }
}

/// As [`set_handler`], for System V's `signal`.
///
/// # Safety
/// As of `signal`.
#[cfg(target_env = "gnu")]
pub unsafe fn set_handler_once(signal: c_int, function: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe {
        let ours = swap_handler(signal, function, libc::SA_RESETHAND | libc::SA_NODEFER);
        ours.unwrap_or_else(|| sysv_signal(signal, function))
    }
}

/// Sets a handler with these flags, and returns the previous one. `None` if the signal is not ours.
///
/// # Safety
/// As of `signal`.
#[cfg(target_env = "gnu")]
unsafe fn swap_handler(signal: c_int, function: usize, flags: c_int) -> Option<usize> {
    hook_of(signal)?;
    let new = action(function, flags, 0);
    let mut old = action(libc::SIG_DFL, 0, 0);
    // SAFETY: the caller's promise.
    let done = unsafe { set_action(signal, &new, &mut old) };
    Some(if done == 0 { old.sa_sigaction } else { libc::SIG_ERR })
}

/// Calls `serve` for each SIGBUS from now on. Called once in a process.
pub fn on_bus(serve: Serve) -> io::Result<()> {
    if STACKS.get().is_none() {
        // If another thread has just done the same, we use its stacks.
        let _ = STACKS.set(Stacks::new()?);
    }
    hook(libc::SIGBUS, &BUS, serve)
}

/// Runs `work` on a stack of ours, as a fault would. The caller blocks all signals.
pub fn on_own_stack(work: impl FnMut()) {
    let mut work = work;
    match STACKS.get() {
        Some(stacks) => stacks.run(work),
        None => work(),
    }
}

/// True if the caller is on a stack of ours: it serves a fault, or runs in [`on_own_stack`].
pub fn is_on_own_stack() -> bool {
    STACKS.get().is_some_and(Stacks::is_here)
}

/// Called in a fork, in which only the calling thread continues.
pub fn forked() {
    PROCESS.store(std::process::id(), Relaxed);
    STACKS.get().into_iter().for_each(Stacks::give_all);
}

/// Calls `serve` for each SIGSEGV from now on. Called once in a process.
pub fn on_segv(serve: Serve) -> io::Result<()> {
    hook(libc::SIGSEGV, &SEGV, serve)
}

/// Calls `stay` for each SIGBUS that a process has sent. `stay` may change where the thread
/// continues, and returns true if it has handled the signal. Called once in a process, after
/// [`on_bus`].
pub fn on_sent(stay: fn(&mut Stopped) -> bool) {
    // Only the first call has an effect.
    let _ = SENT.set(stay);
}

/// Calls `resume` for each SIGILL, with the address of the instruction. `resume` returns the
/// address at which the thread continues. Called once in a process.
pub fn on_illegal(resume: fn(usize) -> Option<usize>) -> io::Result<()> {
    // Only the first call has an effect.
    let _ = ILLEGAL.set(resume);
    hook(libc::SIGILL, &ILL, |_| false)
}

/// Makes `deliver` begin the program's handlers of signals that are not ours. Otherwise our handler
/// calls them. Called once in a process.
pub fn deliver_by(deliver: Deliver) {
    // Only the first call has an effect.
    let _ = DELIVER.set(deliver);
}

/// Makes `complete` run before a signal of ours ends the process because the program has no handler
/// for it. Called once in a process.
pub fn before_default(complete: fn()) {
    // Only the first call has an effect.
    let _ = BEFORE_DEFAULT.set(complete);
}

/// True in a child that shares the memory of the process whose handlers these are (`vfork`).
pub fn is_other_process() -> bool {
    PROCESS.load(Relaxed) != std::process::id()
}

/// True if the calling thread blocks SIGBUS: a fault then kills the process.
pub fn is_blocked() -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: without a new set, the kernel writes the current one to `set`, which has that type.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), set.as_mut_ptr());
        libc::sigismember(set.as_ptr(), libc::SIGBUS) == 1
    }
}

/// Blocks all signals that can be blocked, in the calling thread, until the value is dropped.
#[derive(Debug)]
pub struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    /// See the type.
    pub fn all() -> Self {
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut every = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: both are signal sets; the second is filled before its use. SIGBUS, SIGSEGV and
        // SIGILL stay unblocked: a fault or a replaced instruction would kill the process.
        unsafe {
            libc::sigfillset(every.as_mut_ptr());
            for fault in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL] {
                libc::sigdelset(every.as_mut_ptr(), fault);
            }
            add_cancellation(every.assume_init_mut());
            let (set, old, bytes) = (every.as_ptr(), before.as_mut_ptr(), size_of::<u64>());
            // The C library's function would leave the cancellation signal out.
            libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, set, old, bytes);
            Self { before: before.assume_init() }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(&self.before);
    }
}

/// The function for [`set_masks_by`].
static SET_MASK: OnceLock<fn(u64)> = OnceLock::new();

/// Sets the function that sets masks, which gets the kernel's set. A process calls this once. The C
/// library's function never blocks two signals of its own. Threads of the C library that wait for a
/// timer (`SIGEV_THREAD`) have to block one of them.
pub fn set_masks_by(set: fn(u64)) {
    // Only the first call has an effect.
    let _ = SET_MASK.set(set);
}

fn set_mask(mask: &libc::sigset_t) {
    match SET_MASK.get() {
        // SAFETY: the C library's set begins with the kernel's.
        Some(set) => set(unsafe { std::ptr::from_ref(mask).cast::<u64>().read() }),
        // SAFETY: the set is the one that the kernel gave us.
        None => unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut());
        },
    }
}

fn hook(signal: c_int, hook: &'static Hook, serve: Serve) -> io::Result<()> {
    if hook.serve.get().is_some() {
        // A handler that was set since the first call was set past us.
        return if signal == libc::SIGBUS { take_back() } else { Ok(()) };
    }
    let before = of_kernel(signal)?;
    // This comes before the handler can run.
    if hook.serve.set(serve).is_err() {
        return Ok(()); // Another thread does the same.
    }
    {
        let _blocked = Blocked::all();
        hook.handlers.all[0].set(&before);
    }
    PROCESS.store(std::process::id(), Relaxed);
    install(signal)
}

extern "C" fn handle(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes both for a handler with SA_SIGINFO; errno is the thread's own.
    let (errno, address) = unsafe { (*libc::__errno_location(), (*info).si_addr() as usize) };
    // SAFETY: as above.
    let (cause, is_sent) = unsafe { (processor::cause(context), (*info).si_code <= 0) };
    let Cause { is_write, instruction, .. } = cause;
    let hook = match signal {
        libc::SIGBUS => &BUS,
        libc::SIGILL => &ILL,
        _ => &SEGV,
    };
    let Some(serve) = hook.serve.get() else { std::process::abort() };
    // SAFETY: as above.
    let is_done = unsafe { go_on_elsewhere(signal, is_sent, info, context) };
    let (mut is_ours, mut before) = (is_done, None);
    let mut serve = || match cause.is_fetch {
        // Our memory is not code.
        true => (is_ours, before) = fetch::serve(signal, address),
        false => is_ours = serve(Fault { address, is_write, instruction }),
    };
    match STACKS.get() {
        // A sent signal has no address. A protection key that denies an access is the program's.
        _ if is_sent || is_done || cause.is_by_key => {}
        Some(stacks) => stacks.run(serve),
        None => serve(),
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if let (Some(deliver), Some(before)) = (DELIVER.get(), before) {
        let run = action(before as usize, libc::SA_SIGINFO, 0);
        // SAFETY: these are the handler's own arguments.
        unsafe { deliver(&run, signal, info, context) };
    }
    if !is_ours {
        // SAFETY: these are the handler's own arguments.
        unsafe {
            pass_on(hook, signal, info, context);
            *libc::__errno_location() = errno;
        }
    }
}

/// Handles signals that are not faults: sent signals, and illegal instructions.
///
/// # Safety
/// The arguments are those of a handler.
unsafe fn go_on_elsewhere(
    signal: c_int,
    is_sent: bool,
    info: *const libc::siginfo_t,
    context: *mut libc::c_void,
) -> bool {
    // SAFETY: the second argument of a handler has the signal's data.
    let value = unsafe {
        ((*info).si_code == libc::SI_QUEUE).then(|| (*info).si_value().sival_ptr as usize)
    };
    // SAFETY: as above; without a sender both are zero.
    let has_lost_value = unsafe { ((*info).si_code, (*info).si_pid()) == (libc::SI_USER, 0) };
    // SAFETY: the third argument of a handler is its context, which the handler may change.
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    // SAFETY: a set begins with the kernel's, of eight bytes.
    let blocked = unsafe { *(&raw const context.uc_sigmask).cast::<u64>() };
    let registers = processor::registers(context);
    let Registers { instruction, stack, result, behind, number, arguments } = registers;
    let mut stopped = Stopped {
        instruction,
        stack,
        result,
        behind,
        number,
        arguments,
        blocked,
        signal_stack: context.uc_stack,
        value,
        has_lost_value,
    };
    let is_ours = match signal {
        libc::SIGBUS if is_sent => SENT.get().is_some_and(|stay| stay(&mut stopped)),
        libc::SIGILL if !is_sent => {
            let to = ILLEGAL.get().and_then(|resume| resume(stopped.instruction));
            stopped.instruction = to.unwrap_or(stopped.instruction);
            to.is_some()
        }
        _ => false,
    };
    processor::set_registers(context, stopped.instruction, stopped.result);
    context.uc_stack = stopped.signal_stack;
    is_ours
}

/// Acts as the kernel would have without us.
///
/// # Safety
/// The arguments are those of a handler of `signal`.
unsafe fn pass_on(
    hook: &Hook,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    let handlers = &hook.handlers;
    // SAFETY: the call takes nothing and returns a number.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) } as u64;
    let place = handlers.next(thread);
    let before = handlers.all[place].get();
    // SAFETY: the arguments are the caller's.
    unsafe {
        match before.sa_sigaction {
            // A process that ignores the signal ignores a signal that was sent.
            libc::SIG_IGN if (*info).si_code <= 0 => {}
            libc::SIG_DFL | libc::SIG_IGN => {
                // A fault cannot be ignored: the thread repeats the access, which kills the
                // process. We raise a sent signal anew. This runs on a stack of ours, so that hooks
                // of system calls recognise the call as ours.
                BEFORE_DEFAULT.get().inspect(|complete| complete());
                let default = action(libc::SIG_DFL, before.sa_flags, 0);
                on_own_stack(|| {
                    // An error would mean that there is no such signal.
                    real_sigaction(signal, &default, std::ptr::null_mut());
                });
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
            _ => {
                if before.sa_flags & libc::SA_RESETHAND != 0 {
                    handlers.all[place].set(&action(libc::SIG_DFL, 0, 0));
                }
                if let Some(deliver) = DELIVER.get().filter(|_| handlers.last() == 0) {
                    deliver(&before, signal, info, context);
                }
                let was = handlers.passing.swap(thread << 8 | (place as u64 + 1), AcqRel);
                call(&before, signal, info, context);
                handlers.passing.store(if was >> 8 == thread { was } else { 0 }, Release);
            }
        }
    }
}

/// Calls a handler of the program's as the kernel would have, on the stack of our handler.
///
/// # Safety
/// The handler is the program's, and the other arguments are those of a handler of `signal`.
unsafe fn call(
    handler: &Action,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the mask is set as the kernel would have set it, and the handler is called in the
    // form of its flags.
    unsafe {
        let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        for other in 1..libc::SIGRTMAX() {
            let is_asked = libc::sigismember(&handler.sa_mask, other) == 1;
            if is_asked || other == signal && handler.sa_flags & libc::SA_NODEFER == 0 {
                libc::sigaddset(&mut mask, other);
            }
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
        if handler.sa_flags & libc::SA_SIGINFO != 0 {
            type Long = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);
            std::mem::transmute::<usize, Long>(handler.sa_sigaction)(signal, info, context);
        } else {
            std::mem::transmute::<usize, extern "C" fn(c_int)>(handler.sa_sigaction)(signal);
        }
    }
}
