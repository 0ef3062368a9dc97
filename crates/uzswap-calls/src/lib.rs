//! System calls of the own process, seen before the kernel sees them.
//!
//! ```text
//! libc, ld.so, …   mov eax, NUMBER ; syscall      becomes      jmp stub ; ud2
//! stub             mov eax, NUMBER ; lea rcx, [bare] ; jmp entry
//! entry            keeps most registers → first(&mut Call) → Done(result) | Bare | Undecided
//!                  keeps all            → second(&mut Call) → Done(result) | Bare
//! bare             syscall ; jmp back
//! ```
//! Ordinary programs make their system calls through the C library, whose `syscall` instructions
//! are found ([`sites`]) and replaced while the other threads stand still ([`stop`]). Nothing is
//! replaced, and nothing costs anything, before [`Work::apply`]; afterwards only those calls take
//! the way above whose number the caller asked for. x86-64 alone.
//!
//! A `syscall` whose number is not in the instruction before it becomes `ud2`, and the handler of
//! SIGILL sends the thread to its stub: 1 to 2 µs more. The same `ud2` stands where the `syscall`
//! behind a replaced `mov` was, for whoever jumps there.
//!
//! [`table`] has all calls of the kernel: which memory each is given. [`filter`] tells which of them
//! a filter of seccomp allows.

// In the order in which to read them.
pub mod filter;
pub mod table;

#[cfg(target_arch = "x86_64")]
pub mod sites;

#[cfg(target_arch = "x86_64")]
mod entry;
#[cfg(target_arch = "x86_64")]
mod patch;
#[cfg(target_arch = "x86_64")]
pub mod stop;

#[cfg(target_arch = "x86_64")]
pub use entry::{Call, Looks, Outcome, raw};
#[cfg(target_arch = "x86_64")]
pub use patch::{Patched, Patcher, Work};
