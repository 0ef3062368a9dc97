//! The way from a replaced system call to the function that handles the call, and back.
//!
//! A system call changes only a few registers. The C library may rely on everything else, so the
//! entry of each processor keeps the other registers, the flags and the processor's extended state.
//!
//! Saving the whole extended state may take longer than the rest of the work for most calls. So a
//! first function gets each call, and a second one only those that the first leaves undecided.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use crate::table;
#[cfg(target_arch = "aarch64")]
pub use aarch64::{CallFrame, CallRegisters, raw};
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{behind_site, entry, why_unsupported};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{CallFrame, CallRegisters, raw};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{behind_site, entry, why_unsupported};

/// A system call as the program makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Call {
    /// Its number.
    pub number: u64,
    /// Its arguments, in the order of the kernel's interface.
    pub arguments: [u64; 6],
    /// Its result, for [`Outcome::Done`].
    pub result: i64,
}

impl Call {
    /// [`Call::result`] of a call that was not made yet. No call returns this value.
    pub const NOT_MADE: i64 = -(1 << 30);
}

impl CallFrame {
    /// The frame of a call that a look function handles.
    pub fn of(call: &Call) -> *const CallFrame {
        std::ptr::from_ref(call).cast()
    }
}

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Outcome {
    /// The call was made: the program gets [`Call::result`].
    Done = 0,
    /// The stub makes the call, with the program's own registers and stack. For calls that return
    /// twice, on another stack, or never.
    Bare = 1,
    /// From the first function: it has done nothing, and the second function gets the call.
    Undecided = 2,
    /// The call was made, and the program continues on the stack that is its second argument.
    OnStack = 3,
}

/// Handles a call.
type Look = fn(&mut Call) -> Outcome;

/// The functions that handle calls.
#[derive(Debug, Clone, Copy)]
pub struct Looks {
    /// The first function. On x86-64 it may change only the registers `xmm0` to `xmm15` of the
    /// extended state. So it calls nothing of the C library, whose `memcpy` uses all registers of
    /// the processor.
    pub first: Look,
    /// The second function, which decides the calls that the first leaves undecided.
    pub second: Look,
}

static FIRST: AtomicUsize = AtomicUsize::new(0);
static SECOND: AtomicUsize = AtomicUsize::new(0);

/// Sets the functions that handle calls from now on.
pub(crate) fn set(looks: Looks) {
    FIRST.store(looks.first as usize, Relaxed);
    SECOND.store(looks.second as usize, Relaxed);
}

extern "C" fn look_first(call: &mut Call) -> Outcome {
    // Only on x86-64 does a site tell its number, so that calls that are left are not replaced.
    if cfg!(target_arch = "aarch64") && !table::is_looked_at(call.number as u32) {
        return Outcome::Bare;
    }
    // If we are compiled for processors with AVX, our code may change the upper halves.
    if cfg!(target_feature = "avx") {
        return Outcome::Undecided;
    }
    // SAFETY: set before the first site is replaced, to a function of this type.
    let look = unsafe { std::mem::transmute::<usize, Look>(FIRST.load(Relaxed)) };
    look(call)
}

extern "C" fn look_again(call: &mut Call) -> Outcome {
    // SAFETY: as above.
    let look = unsafe { std::mem::transmute::<usize, Look>(SECOND.load(Relaxed)) };
    look(call)
}
