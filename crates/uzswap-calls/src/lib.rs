//! Handles this process's system calls before the kernel gets them.
//!
//! ```text
//! x86-64   libc, ld.so, …   mov eax, NUMBER ; syscall      becomes      jmp stub ; ud2
//!          stub             mov eax, NUMBER ; lea rcx, [bare] ; jmp entry
//!          bare             syscall ; jmp back
//! aarch64  libc, ld.so, …   svc #0                         becomes      b stub
//!          stub             push x16, x17 ; adr x16, again ; jump entry
//!          again            pop x16, x17 ; svc #0 ; b back
//! entry    keeps most registers → first(&mut Call) → Done(result) | Bare | Undecided
//!          keeps all            → second(&mut Call) → Done(result) | Bare
//! ```
//! Ordinary programs make their system calls through the C library. This crate finds the
//! instructions that make calls ([`sites`]), and replaces them while the other threads are stopped
//! ([`stop`]). Before [`PreparedPatch::apply`] nothing is replaced, and calls are as fast as
//! without uzswap. Afterwards only calls with the wanted numbers take the way above; on aarch64 all
//! calls, since their number is in a register.
//!
//! On x86-64 the number may not be in the instruction before the `syscall`. Such a `syscall`
//! becomes `ud2`, and the handler of SIGILL sends the thread to its stub: 1 to 2 µs more. The same
//! `ud2` replaces the `syscall` behind a replaced `mov`, for threads that jump there.
//!
//! [`table`] has all calls of the kernel and the memory that each uses. [`filter`] tells which of
//! them a filter of seccomp allows.

#![expect(
    unsafe_code,
    reason = "code that is read, written and jumped to: sites are decoded from the start of their functions; no other thread runs while they are replaced; a stub keeps the registers that a system call keeps"
)]

pub mod filter;
pub mod older;
pub mod table;
mod treatment;

pub mod sites;

mod entry;
mod patch;
pub mod stop;

pub use entry::{Call, CallFrame, CallRegisters, Looks, Outcome, raw};
pub use patch::{Patched, Patcher, PreparedPatch, writable_code};
