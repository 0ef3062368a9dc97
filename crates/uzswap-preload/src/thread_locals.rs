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

/// Words of each thread that this library itself uses.
enum ThreadWord {
    Asked = 0,
    Searching = 8,
}

fn read<const WORD: usize>() -> usize {
    let value;
    let at = distance!("uzswap_asked");
    // SAFETY: reads a variable of the thread's.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov {value}, fs:[{at} + {word}]", at = in(reg) at, value = lateout(reg) value,
            word = const WORD, options(nostack, readonly, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {value}, tpidr_el0", "add {value}, {value}, {at}", "ldr {value}, [{value}, {word}]",
            at = in(reg) at, value = out(reg) value, word = const WORD,
            options(nostack, readonly, preserves_flags));
    }
    value
}

fn write<const WORD: usize>(value: usize) {
    let at = distance!("uzswap_asked");
    // SAFETY: writes a variable of the thread's, which is used here only.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("mov fs:[{at} + {word}], {value}", at = in(reg) at, value = in(reg) value,
            word = const WORD, options(nostack, preserves_flags));
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("mrs {to}, tpidr_el0", "add {to}, {to}, {at}", "str {value}, [{to}, {word}]",
            to = out(reg) _, at = in(reg) at, value = in(reg) value, word = const WORD,
            options(nostack, preserves_flags));
    }
}

/// Bytes that this thread has asked for since the last check.
pub fn asked() -> usize {
    read::<{ ThreadWord::Asked as usize }>()
}

/// Sets these bytes. Allocations of a signal handler since [`asked`] are not counted.
pub fn set_asked(asked: usize) {
    write::<{ ThreadWord::Asked as usize }>(asked);
}

/// True while this thread searches for a function.
pub fn is_searching() -> bool {
    read::<{ ThreadWord::Searching as usize }>() != 0
}

pub fn set_searching(is_searching: bool) {
    write::<{ ThreadWord::Searching as usize }>(is_searching.into());
}
