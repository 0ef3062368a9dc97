//! System calls without the C library's functions, which this library replaces.

use libc::{c_int, c_long};
use std::arch::asm;

/// The answer of a call as the C library gives it.
pub fn answer(result: c_long) -> c_long {
    if !(-4095..0).contains(&result) {
        return result;
    }
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = -result as c_int };
    -1
}

/// Makes a system call. (`libc::syscall` would call our own function here.) The instruction before
/// the `syscall` does the same at any address, and has room for a jump, so the agent can replace
/// both by one jump. Otherwise the code around it might leave room for a trap only, and a handler
/// may make a call where a trap must not occur.
///
/// # Safety
/// As of the call.
pub unsafe fn raw(number: c_long, arguments: [u64; 6]) -> c_long {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let mut result = number;
    // SAFETY: the caller's promise; the kernel changes two registers beside the answer's.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "mov ecx, 0",
            "syscall",
            inout("rax") result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            in("r9") sixth,
            out("rcx") _,
            out("r11") _,
        );
    }
    // SAFETY: the caller's promise; the kernel changes only the answer's register.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc #0",
            in("x8") result,
            inout("x0") first => result,
            in("x1") second,
            in("x2") third,
            in("x3") fourth,
            in("x4") fifth,
            in("x5") sixth,
        );
    }
    result
}
