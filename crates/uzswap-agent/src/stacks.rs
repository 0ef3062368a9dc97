//! Stacks for signal handlers.
//!
//! A thread may have its stack in memory that leaves: coroutines have theirs from `malloc`. If the
//! stack is absent, the kernel cannot begin a handler on it, and ends the process. So the kernel
//! begins each handler on a signal stack of ours, with a guard. A thread gets that stack at its
//! first call. Our fault handlers run there. The program's handlers move from there to the stack
//! where they would have run ([`crate::handlers`]). The kernel never learns of the signal stack
//! that the program sets: this file notes it, and that stack's pages may leave.

use crate::pins::{Pins, peek, poke, refuse};
use crate::{Agent, inside, signals, stage, thread};
use rustix::mm::{MprotectFlags, mprotect};
use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::fault_signals::on_own_stack;
use uzswap_sys::map::PAGE_BYTES;
use uzswap_sys::processor::on_stack;

/// Bytes of a signal stack of ours, without its guard.
const BYTES: usize = 64 << 10;

/// No stack for signals.
pub const NONE: libc::stack_t =
    libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };

/// A first thread's signal stack at the start. It is too small to be set, but the kernel accepts a
/// thread's present stack, whatever it is.
const UNSET: libc::stack_t = libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: 0, ss_size: 0 };

fn is_unset(stack: &libc::stack_t) -> bool {
    (stack.ss_sp, stack.ss_flags, stack.ss_size) == (UNSET.ss_sp, UNSET.ss_flags, UNSET.ss_size)
}

/// A flag of a signal stack: the kernel forgets the stack while a handler runs on that stack.
const AUTODISARM: i32 = 1 << 31;

/// Bytes of a stack for calls: a call that takes pages out has units of the pool on it.
const CALLS_BYTES: usize = 256 << 10;

/// A stack of ours, in this library's own memory. The agent might adopt any other mapping as the
/// program's. The page below is its guard.
struct Stack {
    start: *mut u8,
    layout: Layout,
}

impl Stack {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(PAGE_BYTES + bytes, PAGE_BYTES).ok()?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc::alloc(layout) };
        let stack = (!start.is_null()).then_some(Self { start, layout })?;
        // Without a guard the stack still works.
        let _ = stack.guard(MprotectFlags::empty());
        Some(stack)
    }

    fn guard(&self, access: MprotectFlags) -> rustix::io::Result<()> {
        // SAFETY: the first page of a block that is ours alone, and starts with a page.
        unsafe { mprotect(self.start.cast(), PAGE_BYTES, access) }
    }

    fn range(&self) -> Range<usize> {
        let start = self.start as usize;
        start + PAGE_BYTES..start + self.layout.size()
    }
}

impl Drop for Stack {
    /// Runs when the stack's thread ends.
    fn drop(&mut self) {
        // If the guard cannot be taken off, both stay.
        if self.guard(MprotectFlags::READ | MprotectFlags::WRITE).is_ok() {
            // SAFETY: taken by `new`; nothing runs on it while its thread ends.
            unsafe { alloc::dealloc(self.start, self.layout) };
        }
    }
}

thread_local! {
    /// The signal stack that the program has set for this thread.
    static PROGRAMS: Cell<libc::stack_t> = const { Cell::new(NONE) };
    /// True if the kernel accepted [`UNSET`] as the present stack: so this is a program's first
    /// thread, which has set none.
    static IS_UNSET: Cell<bool> = const { Cell::new(false) };
    static OURS: RefCell<Option<Kernels>> = const { RefCell::new(None) };
    /// The addresses of our signal stack.
    static RANGE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    /// Our stack for calls on the slow path: see [`for_call`].
    static CALLS: RefCell<Option<ForCalls>> = const { RefCell::new(None) };
    static CALLS_RANGE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    static ARE_CALLS_ON_IT: AtomicBool = const { AtomicBool::new(false) };
    static BELOW_CALLS: Cell<usize> = const { Cell::new(0) };
    /// Our replacement for a signal stack of the program's that is too small.
    static INSTEAD: RefCell<Option<Stack>> = const { RefCell::new(None) };
}

/// The signal stack that is registered with the kernel.
struct Kernels(Stack);

impl Drop for Kernels {
    /// Runs when the stack's thread ends.
    fn drop(&mut self) {
        RANGE.set((0, 0));
        set_in_kernel(NONE);
    }
}

/// The stack for calls.
struct ForCalls(Stack);

impl Drop for ForCalls {
    /// Runs when the stack's thread ends. The thread may still make calls afterwards.
    fn drop(&mut self) {
        CALLS_RANGE.set((0, 0));
    }
}

fn of_kernel() -> libc::stack_t {
    let mut now = NONE;
    // SAFETY: without a new stack, the kernel writes a description of the present one.
    unsafe { raw(libc::SYS_sigaltstack as u64, [0, &raw mut now as u64, 0, 0, 0, 0]) };
    now
}

/// Sets the signal stack in the kernel.
pub fn set_in_kernel(stack: libc::stack_t) -> i64 {
    // SAFETY: as said.
    unsafe { raw(libc::SYS_sigaltstack as u64, [&raw const stack as u64, 0, 0, 0, 0, 0]) }
}

/// Sets the program's signal stack in the kernel again, for the calling thread.
pub fn give_back() {
    if ours().is_some_and(|ours| of_kernel().ss_sp == ours.ss_sp) {
        set_in_kernel(programs());
    }
}

/// Called before `exec`. The kernel gives the new program no signal stack, but the flags of the
/// present one, so this sets the program's flags. Returns our stack, in case `exec` fails. If a
/// handler runs before `exec`, it sets our stack again, and `exec` passes our flag on.
pub fn disclaim() -> Option<libc::stack_t> {
    let ours = ours().filter(|ours| of_kernel().ss_sp == ours.ss_sp)?;
    let ss_flags = programs().ss_flags & AUTODISARM;
    set_in_kernel(libc::stack_t { ss_flags, ..ours });
    Some(ours)
}

/// The calling thread's signal stack of ours, as the kernel must know it. The kernel must forget
/// the stack while it is in use. Faults are served on other stacks, so otherwise a signal that
/// arrives during a fault would begin at the top of this stack, over the frames in use.
pub fn ours() -> Option<libc::stack_t> {
    let (start, end) = RANGE.get();
    (start != 0).then_some(libc::stack_t {
        ss_sp: start as *mut _,
        ss_flags: AUTODISARM,
        ss_size: end - start,
    })
}

/// True if an address is on the calling thread's stack of ours.
pub fn is_on_ours(address: usize) -> bool {
    let (start, end) = RANGE.get();
    (start..end).contains(&address)
}

/// The stack that the program has set for the calling thread.
pub fn programs() -> libc::stack_t {
    PROGRAMS.get()
}

pub fn set_programs(stack: libc::stack_t) {
    PROGRAMS.set(stack);
}

/// The stack of handlers that ask for a signal stack, if the program has set one. Our stack
/// replaces a stack that is too small.
pub fn of_handlers() -> Option<Range<usize>> {
    let stack = PROGRAMS.get();
    if stack.ss_flags & libc::SS_DISABLE != 0 {
        return None;
    }
    let start = stack.ss_sp as usize;
    let instead = || {
        let instead = INSTEAD.try_with(|stack| stack.borrow().as_ref().map(Stack::range));
        instead.unwrap_or(None)
    };
    let instead = if stack.ss_size < LEAST { instead() } else { None };
    Some(instead.unwrap_or(start..start.saturating_add(stack.ss_size)))
}

/// Gives the calling thread a signal stack of ours if it has none. If there is no memory for a
/// stack, the thread gets none. While the thread runs on a signal stack that the program has set
/// past us, the kernel keeps that stack.
pub fn arm() {
    if thread::with(|thread| thread.is_armed.replace(true)) {
        return;
    }
    let before = of_kernel();
    // This changes nothing: the kernel refuses this stack unless it is the present one.
    IS_UNSET.set(set_in_kernel(UNSET) == 0);
    if let Some(ours) = give() {
        note(before);
        let is_set = set_in_kernel(ours) == 0;
        thread::with(|thread| thread.is_armed.set(is_set));
    }
}

/// The signal stacks that the threads had when the program was taken over. The kernel may begin a
/// thread's handlers there until the thread has our stack.
pub static FROM_BEFORE: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());

/// Takes memory for the stack of a thread that is about to stand still in a handler of ours, and
/// notes its present stack.
pub fn prepare(kernels: &libc::stack_t) {
    let start = kernels.ss_sp as usize;
    let range = start..start.saturating_add(kernels.ss_size);
    with_room(|| {
        let _inside = inside();
        make();
        let mut before = FROM_BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        if is_enabled(kernels) && !before.contains(&range) {
            before.push(range.clone());
        }
    });
}

/// Gives a thread in a handler of ours a signal stack, from the handler's return on. A system call
/// could not set that stack while the handler is on the program's signal stack.
pub fn arm_in_handler(kernels: &mut libc::stack_t) {
    let here = ptr::from_ref(kernels) as usize;
    let start = kernels.ss_sp as usize;
    if (start..start.saturating_add(kernels.ss_size)).contains(&here)
        || thread::with(|thread| thread.is_armed.replace(true))
    {
        return;
    }
    IS_UNSET.set(is_unset(kernels));
    if let Some(ours) = give() {
        note(*kernels);
        *kernels = ours;
    }
}

/// The kernel reports zeros for a thread that never had one.
fn is_enabled(kernels: &libc::stack_t) -> bool {
    kernels.ss_flags & libc::SS_DISABLE == 0 && kernels.ss_size != 0
}

/// Notes a signal stack that the program has set before the take-over, or past our calls.
fn note(kernels: libc::stack_t) {
    if is_enabled(&kernels) && kernels.ss_sp as usize != RANGE.get().0 {
        let ss_flags = kernels.ss_flags & AUTODISARM;
        PROGRAMS.set(libc::stack_t { ss_flags, ..kernels });
        if kernels.ss_size < LEAST {
            with_room(prepare_instead);
        }
    }
}

/// Does `work` on a stack for faults. A thread's stack of 16 KiB may have room for the kernel's
/// frame and ours, but not for a third one in a call of the C library's.
fn with_room(work: impl FnMut()) {
    const BYTES: u64 = 8;
    const SEGV: u64 = 1 << (libc::SIGSEGV - 1);
    let all = !(signals::OURS | SEGV);
    let mut before = 0u64;
    let arguments = [libc::SIG_BLOCK as u64, &raw const all as u64, &raw mut before as u64];
    let [how, new, old] = arguments;
    // SAFETY: both are sets of the kernel's; faults and replaced instructions may still come.
    unsafe { raw(libc::SYS_rt_sigprocmask as u64, [how, new, old, BYTES, 0, 0]) };
    on_own_stack(work);
    // Restores the old mask: in our handler it blocks the same signal, and another frame of the
    // kernel's might find no room on the thread's stack.
    let [how, set] = [libc::SIG_SETMASK as u64, &raw const before as u64];
    // SAFETY: the set is the one that the kernel gave us.
    unsafe { raw(libc::SYS_rt_sigprocmask as u64, [how, set, 0, BYTES, 0, 0]) };
}

/// Makes a stack of ours for the calling thread, if there is memory. A thread that is ending cannot
/// have one.
fn give() -> Option<libc::stack_t> {
    if RANGE.get().0 == 0 || CALLS_RANGE.get().0 == 0 {
        with_room(make);
    }
    ours()
}

fn make() {
    let _inside = inside();
    thread::prepare();
    let given = OURS.try_with(|ours| {
        let mut ours = ours.borrow_mut();
        if ours.is_none() {
            *ours = Stack::new(BYTES).map(Kernels);
        }
        ours.as_ref().map(|Kernels(stack)| stack.range())
    });
    let Some(range) = given.ok().flatten() else { return };
    RANGE.set((range.start, range.end));
    // This fails only while the thread ends.
    let _ = CALLS.try_with(|calls| {
        let mut calls = calls.borrow_mut();
        if calls.is_none() {
            *calls = Stack::new(CALLS_BYTES).map(ForCalls);
        }
        let range = calls.as_ref().map_or(0..0, |ForCalls(stack)| stack.range());
        CALLS_RANGE.set((range.start, range.end));
    });
}

/// Treats a call on a stack of ours: threads may have stacks of 16 KiB, and a call may bring pages
/// in. A call that has interrupted another call, or follows a call that was left by a jump, is
/// treated on the thread's own stack.
pub fn for_call(work: impl FnMut()) {
    let mut work = work;
    let (_, top) = CALLS_RANGE.get();
    if top == 0 || ARE_CALLS_ON_IT.with(|is_used| is_used.swap(true, Relaxed)) {
        return work();
    }
    let below = BELOW_CALLS.with(Cell::as_ptr);
    // SAFETY: the stack is the thread's own, and nothing is on it.
    unsafe { run_on(&mut work, top - ARGUMENTS, below) };
    ARE_CALLS_ON_IT.with(|is_used| is_used.store(false, Relaxed));
}

/// Does the last work of an ending thread on its stack for calls, because its own stack may have no
/// room.
pub fn for_end(work: impl FnMut()) {
    let mut work = work;
    let taken = CALLS.try_with(|calls| calls.borrow_mut().take()).ok().flatten();
    let Some(ForCalls(stack)) = &taken else { return work() };
    CALLS_RANGE.set((0, 0));
    let mut below = 0;
    let here = &raw const below as usize;
    if stack.range().contains(&here) {
        return work();
    }
    // SAFETY: the stack is the thread's own. The thread is over, and so is any call on this stack.
    unsafe { run_on(&mut work, stack.range().end - ARGUMENTS, &raw mut below) }
}

/// # Safety
/// As of [`on_stack`].
unsafe fn run_on<F: FnMut()>(work: &mut F, top: usize, below: *mut usize) {
    extern "C" fn call<F: FnMut()>(work: *mut c_void) {
        // SAFETY: it is passed below; only this call uses it.
        unsafe { (*work.cast::<F>())() }
    }
    // SAFETY: the caller's promise; `work` outlives the call.
    unsafe { on_stack(ptr::from_mut(work).cast(), call::<F>, top as *mut u8, below) }
}

/// Bytes that a function may read above its return address.
const ARGUMENTS: usize = 64;

/// True if an address is on the calling thread's stack for calls.
pub fn is_on_calls(address: usize) -> bool {
    let (start, end) = CALLS_RANGE.get();
    (start..end).contains(&address)
}

/// The end of the thread's own stack, while the thread is on its stack for calls.
pub fn below_calls() -> usize {
    BELOW_CALLS.get()
}

/// A smaller stack has no room for a handler of the program's with a call that meets an absent
/// page.
const LEAST: usize = 32 << 10;

fn prepare_instead() {
    let _inside = inside();
    // This fails only while the thread ends. Without a signal stack the thread's handlers run on
    // the program's stack.
    let _ = INSTEAD.try_with(|instead| {
        let mut instead = instead.borrow_mut();
        if instead.is_none() {
            *instead = Stack::new(BYTES);
        }
    });
}

/// `sigaltstack`: the kernel keeps our stack.
pub fn set(agent: &Agent, call: &mut Call) -> Outcome {
    let [new, old, ..] = call.arguments;
    let bytes = size_of::<libc::stack_t>() as u64;
    let mut pins = Pins::new(agent);
    pins.pin(new, bytes);
    pins.pin(old, bytes);
    let mut before = PROGRAMS.get();
    let here = ptr::from_ref(call) as usize;
    let is_on_it = of_handlers().is_some_and(|stack| stack.contains(&here))
        && before.ss_flags & AUTODISARM == 0;
    if new != 0 {
        let Some(asked) = peek::<libc::stack_t>(new) else { return refuse(call, libc::EFAULT) };
        let is_same = IS_UNSET.get() && is_unset(&asked);
        match check(&asked) {
            _ if is_on_it => return refuse(call, libc::EPERM),
            _ if is_same => {}
            Err(error) => return refuse(call, error),
            Ok(stack) => {
                PROGRAMS.set(stack);
                IS_UNSET.set(false);
            }
        }
        let is_small = !is_same && asked.ss_flags & libc::SS_DISABLE == 0 && asked.ss_size < LEAST;
        if is_small && !stage::is_left() {
            prepare_instead();
        }
    }
    if is_on_it {
        before.ss_flags |= libc::SS_ONSTACK;
    }
    if old != 0 && !poke(old, &before) {
        return refuse(call, libc::EFAULT);
    }
    call.result = 0;
    Outcome::Done
}

/// The stack in the form that the kernel would accept, or the kernel's error.
fn check(asked: &libc::stack_t) -> Result<libc::stack_t, i32> {
    match asked.ss_flags & !AUTODISARM {
        libc::SS_DISABLE => {
            let ss_flags = libc::SS_DISABLE | asked.ss_flags & AUTODISARM;
            Ok(libc::stack_t { ss_flags, ..NONE })
        }
        0 | libc::SS_ONSTACK if asked.ss_size < libc::MINSIGSTKSZ => Err(libc::ENOMEM),
        0 | libc::SS_ONSTACK => {
            Ok(libc::stack_t { ss_flags: asked.ss_flags & AUTODISARM, ..*asked })
        }
        _ => Err(libc::EINVAL),
    }
}
