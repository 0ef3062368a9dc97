//! Stacks for signals' handlers.
//!
//! A thread may have its stack in memory that leaves: coroutines have theirs from `malloc`. When
//! that is absent the kernel can begin no handler on it, and ends the process. So each thread that
//! has no alternate stack of the program's gets one of ours, with its first call; the program sees
//! none. A stack that the program sets itself stays in memory, and serves as well if it is large
//! enough.

use crate::{Agent, inside, layout};
use std::alloc::{self, Layout};
use std::cell::{Cell, RefCell};
use std::ptr;
use uzswap_calls::raw;
use uzswap_sys::map::PAGE_BYTES;

/// Handlers of the program's that ask for an alternate stack run there too.
const LAYOUT: Layout = match Layout::from_size_align(64 << 10, PAGE_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("the alignment is a power of two"),
};

const NONE: libc::stack_t =
    libc::stack_t { ss_sp: ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };

/// One of ours, in this library's own memory: another mapping might be taken for the program's and
/// be evicted.
struct Stack(*mut u8);

impl Stack {
    fn new() -> Option<Self> {
        // SAFETY: the size is not zero.
        let start = unsafe { alloc::alloc(LAYOUT) };
        (!start.is_null()).then_some(Self(start))
    }

    fn description(&self) -> libc::stack_t {
        libc::stack_t { ss_sp: self.0.cast(), ss_flags: 0, ss_size: LAYOUT.size() }
    }
}

impl Drop for Stack {
    /// When its thread ends.
    fn drop(&mut self) {
        // It stays where the kernel still has it.
        if of_kernel().ss_sp != self.0.cast() || set_in_kernel(&NONE) == 0 {
            // SAFETY: taken by `new`; no handler runs on it while its thread ends.
            unsafe { alloc::dealloc(self.0, LAYOUT) };
        }
    }
}

thread_local! {
    /// True if this thread has been prepared.
    static IS_ARMED: Cell<bool> = const { Cell::new(false) };
    /// The program's setting for it.
    static PROGRAMS: Cell<libc::stack_t> = const { Cell::new(NONE) };
    static OURS: RefCell<Option<Stack>> = const { RefCell::new(None) };
}

fn of_kernel() -> libc::stack_t {
    let mut now = NONE;
    // SAFETY: with no new one, the present one is written.
    unsafe { raw(libc::SYS_sigaltstack as u64, [0, &raw mut now as u64, 0, 0, 0, 0]) };
    now
}

fn set_in_kernel(stack: &libc::stack_t) -> i64 {
    // SAFETY: a stack of ours or of the program's, or none.
    unsafe { raw(libc::SYS_sigaltstack as u64, [ptr::from_ref(stack) as u64, 0, 0, 0, 0, 0]) }
}

/// Has the kernel forget the stack while a handler is on it. Faults are served on other stacks: a
/// signal that comes meanwhile would begin at its top again, over the handler's frame.
fn disarmed(stack: libc::stack_t) -> libc::stack_t {
    const AUTODISARM: i32 = 1 << 31;
    libc::stack_t { ss_flags: stack.ss_flags & libc::SS_DISABLE | AUTODISARM, ..stack }
}

/// True if the calling thread has been prepared ([`arm`]).
pub fn is_armed() -> bool {
    IS_ARMED.get()
}

/// Gives the calling thread a stack of ours if it has none. Where there is no memory it stays
/// without.
pub fn arm() {
    if IS_ARMED.replace(true) || of_kernel().ss_flags & libc::SS_DISABLE == 0 {
        return;
    }
    if give_ours() {
        set_ours();
    }
}

/// True if the calling thread has a stack of ours. A thread that is ending cannot have one, nor one
/// that forks, during which the allocator is stopped.
fn give_ours() -> bool {
    if crate::is_inside() {
        return OURS.try_with(|ours| ours.borrow().is_some()).unwrap_or(false);
    }
    let _inside = inside();
    let given = OURS.try_with(|ours| {
        let mut ours = ours.borrow_mut();
        if ours.is_none() {
            *ours = Stack::new();
        }
        ours.is_some()
    });
    given.unwrap_or(false)
}

/// `sigaltstack`: ours is not seen, and is back when the program has none any more. Before the
/// program is taken over there is no agent.
///
/// # Safety
/// As of the call.
pub unsafe fn set(
    agent: Option<&Agent>,
    new: *const libc::stack_t,
    old: *mut libc::stack_t,
) -> i64 {
    let mut before = PROGRAMS.get();
    let here = (&raw const before as usize).wrapping_sub(before.ss_sp as usize);
    let is_on_it = here < before.ss_size;
    // SAFETY: the program passes a description, or null; a fault in reading it is served.
    if let Some(asked) = unsafe { new.as_ref() }.copied() {
        if is_on_it {
            return -i64::from(libc::EPERM);
        }
        let result = match asked.ss_flags & libc::SS_DISABLE {
            0 => set_programs(agent, asked),
            _ => set_ours(),
        };
        if result < 0 {
            return result;
        }
        PROGRAMS.set(if asked.ss_flags & libc::SS_DISABLE == 0 { asked } else { NONE });
    }
    if is_on_it {
        before.ss_flags |= libc::SS_ONSTACK;
    }
    // SAFETY: the program passes a place for it, or null; a fault in writing it is served.
    if let Some(old) = unsafe { old.as_mut() } {
        *old = before;
    }
    0
}

/// A smaller one has no room for a handler of the program's with a call that meets an absent page:
/// ours stands in for it.
const LEAST: usize = 32 << 10;

fn set_programs(agent: Option<&Agent>, asked: libc::stack_t) -> i64 {
    let is_small = (libc::MINSIGSTKSZ..LEAST).contains(&asked.ss_size);
    if is_small && asked.ss_flags == 0 && give_ours() {
        return set_ours();
    }
    if let Some(agent) = agent {
        layout::give_back(agent, asked.ss_sp as u64, asked.ss_size as u64);
    }
    set_in_kernel(&disarmed(asked))
}

fn set_ours() -> i64 {
    let _inside = inside();
    let ours = OURS.try_with(|ours| ours.borrow().as_ref().map(Stack::description));
    let ours = ours.unwrap_or(None);
    // If there is none yet, the thread gets one with its next call.
    IS_ARMED.set(ours.is_some());
    set_in_kernel(&ours.map_or(NONE, disarmed))
}
