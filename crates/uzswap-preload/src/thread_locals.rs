//! Thread-local variables of this library and of the agent.
//!
//! The agent is loaded when the program has run for long. Its variables would use up the space that
//! the C library reserves for late libraries, which the program's own late libraries may need. So
//! this library, which is loaded with the program, contains the space for the agent's variables: at
//! the same distance from each thread's block.

use std::arch::{asm, global_asm};

/// The agent's bytes in each thread, which the C library fills with zeros as a thread begins. The
/// standard library needs more when it is built to be debugged.
pub const BYTES: usize = if cfg!(debug_assertions) { 4096 - 64 } else { 1024 - 64 };

global_asm!(
    ".pushsection .tbss.uzswap, \"awT\", @nobits",
    ".balign 64",
    ".globl uzswap_asked",
    ".hidden uzswap_asked",
    ".type uzswap_asked, @tls_object",
    "uzswap_asked: .zero 64",
    ".globl uzswap_room",
    ".hidden uzswap_room",
    ".type uzswap_room, @tls_object",
    "uzswap_room: .zero {bytes}",
    ".popsection",
    bytes = const BYTES,
);

/// The distance from the thread pointer to a variable above, which the dynamic linker has written.
macro_rules! distance {
    ($name:literal) => {{
        let distance: isize;
        // SAFETY: reads that value.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!(concat!("mov {}, qword ptr [rip + ", $name, "@GOTTPOFF]"), out(reg) distance,
                options(nostack, pure, readonly, preserves_flags));
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(concat!("adrp {0}, :gottprel:", $name),
                concat!("ldr {0}, [{0}, :gottprel_lo12:", $name, "]"),
                out(reg) distance, options(nostack, pure, readonly, preserves_flags));
        }
        distance
    }};
}

/// The distance from the thread pointer to the agent's space.
pub fn distance() -> isize {
    distance!("uzswap_room")
}

/// Bytes that this thread has asked for since the last check.
pub fn asked() -> usize {
    let asked;
    let at = distance!("uzswap_asked");
    // SAFETY: reads a variable of the thread's.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov {asked}, fs:[{at}]", at = in(reg) at, asked = lateout(reg) asked,
            options(nostack, readonly, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {asked}, tpidr_el0", "ldr {asked}, [{asked}, {at}]",
            at = in(reg) at, asked = out(reg) asked, options(nostack, readonly, preserves_flags));
    }
    asked
}

/// Sets these bytes. Allocations of a signal handler since [`asked`] are not counted.
pub fn set_asked(asked: usize) {
    let at = distance!("uzswap_asked");
    // SAFETY: writes a variable of the thread's, which is used here only.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov fs:[{at}], {asked}", at = in(reg) at, asked = in(reg) asked,
            options(nostack, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {to}, tpidr_el0", "str {asked}, [{to}, {at}]",
            to = out(reg) _, at = in(reg) at, asked = in(reg) asked,
            options(nostack, preserves_flags));
    }
}
