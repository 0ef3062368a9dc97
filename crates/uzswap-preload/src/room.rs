//! Thread-local variables of this library's and of the agent's.
//!
//! The agent is loaded when the program has run for long: its variables would take of what the C
//! library has left for such libraries, and the program may load others that need it. So there is
//! room for them here: a library that is loaded with the program has its variables at the same
//! distance from each thread's block.

use std::arch::{asm, global_asm};

/// Bytes that the agent has of each thread, which the C library fills with zeros as a thread
/// begins. The standard library keeps more when it is built to be debugged.
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

/// From a thread's block to the agent's room.
pub fn distance() -> isize {
    let distance;
    // SAFETY: reads what the dynamic linker has written for this variable.
    unsafe {
        asm!("mov {}, qword ptr [rip + uzswap_room@GOTTPOFF]", out(reg) distance,
            options(nostack, pure, readonly, preserves_flags));
    }
    distance
}

/// What this thread has asked for since it was last looked.
pub fn asked() -> usize {
    let asked;
    // SAFETY: reads a variable of the thread's.
    unsafe {
        asm!("mov {at}, qword ptr [rip + uzswap_asked@GOTTPOFF]", "mov {asked}, fs:[{at}]",
            at = out(reg) _, asked = lateout(reg) asked,
            options(nostack, readonly, preserves_flags));
    }
    asked
}

/// Sets it. What a signal's handler asks for in between is not counted.
pub fn set_asked(asked: usize) {
    // SAFETY: writes a variable of the thread's, which is used here only.
    unsafe {
        asm!("mov {at}, qword ptr [rip + uzswap_asked@GOTTPOFF]", "mov fs:[{at}], {asked}",
            at = out(reg) _, asked = in(reg) asked,
            options(nostack, preserves_flags));
    }
}
