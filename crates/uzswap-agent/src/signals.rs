//! The signals that are ours, and actions of signals in the kernel's form.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_calls::raw;
use uzswap_region::Mode;

/// Signals with an action of ours: faults, and a replaced instruction.
pub const OURS: u64 = 1 << (libc::SIGBUS - 1) | 1 << (libc::SIGILL - 1) | SEGV;
pub const SEGV: u64 = 1 << (libc::SIGSEGV - 1);

/// True if a fault of ours may raise SIGSEGV where faults of pages raise SIGBUS.
pub static MAY_RAISE_SEGV: AtomicBool = AtomicBool::new(false);

/// Signals that no thread may block, because they must reach us. A program that blocks SIGSEGV, and
/// waits for one that a process sends, sees no difference while no fault of ours raises it.
pub fn never_blocked() -> u64 {
    match crate::mode() == Mode::Protection || MAY_RAISE_SEGV.load(Relaxed) {
        true => OURS,
        false => OURS & !SEGV,
    }
}

/// Sets the calling thread's mask, without the signals that must reach us.
pub fn set_mask(mask: u64) {
    exchange_mask(mask & !never_blocked());
}

/// Blocks all signals but ours in the calling thread, and returns its former mask.
pub fn block() -> u64 {
    exchange_mask(!OURS)
}

/// The same, but for the signal by which the C library changes the user of all threads. A thread
/// waits for all others to take it, perhaps with a lock that this thread needs to start threads.
pub fn block_for_work() -> u64 {
    const SIGSETXID: u64 = 33;
    exchange_mask(!(OURS | 1 << (SIGSETXID - 1)))
}

fn exchange_mask(mask: u64) -> u64 {
    let mut before = 0u64;
    let [set, old] = [&raw const mask as u64, &raw mut before as u64];
    let arguments = [libc::SIG_SETMASK as u64, set, old, size_of::<u64>() as u64, 0, 0];
    // SAFETY: the kernel reads one set, and writes the other.
    unsafe { raw(libc::SYS_rt_sigprocmask as u64, arguments) };
    before
}

/// An action as the kernel has it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct KernelAction {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

impl KernelAction {
    /// Converts from the C library's form.
    pub fn of(action: &libc::sigaction) -> Self {
        // SAFETY: a set begins with the kernel's, of eight bytes.
        let mask = unsafe { *(&raw const action.sa_mask).cast::<u64>() };
        let (handler, flags) = (action.sa_sigaction as u64, action.sa_flags as u32 as u64);
        Self { handler, flags, restorer: 0, mask }
    }

    /// Returns the C library's form.
    pub fn to_libc(self) -> libc::sigaction {
        // SAFETY: all-zero bytes are a valid action.
        let mut action = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        action.sa_sigaction = self.handler as usize;
        action.sa_flags = self.flags as i32;
        // SAFETY: as above.
        unsafe { (&raw mut action.sa_mask).cast::<u64>().write(self.mask) };
        action
    }
}
