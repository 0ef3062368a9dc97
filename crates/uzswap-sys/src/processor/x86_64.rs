//! x86-64.

use super::{Cause, Registers};
use libc::{
    REG_ERR, REG_R8, REG_R9, REG_R10, REG_RAX, REG_RCX, REG_RDI, REG_RDX, REG_RIP, REG_RSI, REG_RSP,
};
#[cfg(not(miri))]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::arch::{asm, naked_asm};
use std::ffi::c_void;

/// Calls `call(work)` on another stack, and notes where the present one ends. The frame pointer
/// keeps the old stack pointer, also for unwinders.
///
/// # Safety
/// `top` is the end of a stack that is free, a multiple of 16; `below` may be written.
#[unsafe(naked)]
pub unsafe extern "C" fn on_stack(
    work: *mut c_void,
    call: extern "C" fn(*mut c_void),
    top: *mut u8,
    below: *mut usize,
) {
    naked_asm!(
        ".cfi_startproc",
        // A debugger mistakes a stack that lies elsewhere for a broken one, except below a frame
        // with this mark.
        ".cfi_signal_frame",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov [rcx], rsp",
        "mov rsp, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    )
}

/// `madvise` without the C library, because uzswap replaces the C library's calls in a managed
/// program, and must not see its own. Returns 0 or a negative error number.
///
/// # Safety
/// As of the advice.
pub(crate) unsafe fn advise(start: usize, bytes: usize, advice: usize) -> isize {
    let result;
    // SAFETY: the kernel changes these registers, and memory as the caller promises.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") libc::SYS_madvise as isize => result,
            in("rdi") start,
            in("rsi") bytes,
            in("rdx") advice,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// The kind of the access that a handler is called for.
///
/// # Safety
/// It is the third argument of the handler.
pub(crate) unsafe fn cause(context: *mut c_void) -> Cause {
    const WRITE: i64 = 1 << 1;
    const FETCH: i64 = 1 << 4;
    const KEY: i64 = 1 << 5;
    // SAFETY: the caller's promise.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let registers = &context.uc_mcontext.gregs;
    let error = registers[REG_ERR as usize];
    let instruction = registers[REG_RIP as usize] as usize;
    let has = |bit| error & bit != 0;
    Cause { is_write: has(WRITE), is_fetch: has(FETCH), is_by_key: has(KEY), instruction }
}

/// The registers of a thread that runs a handler with this context.
pub(crate) fn registers(context: &libc::ucontext_t) -> Registers {
    let registers = &context.uc_mcontext.gregs;
    let [instruction, stack, behind] =
        [REG_RIP, REG_RSP, REG_RCX].map(|register| registers[register as usize] as usize);
    let arguments = [REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9]
        .map(|register| registers[register as usize] as u64);
    let result = registers[REG_RAX as usize];
    Registers { instruction, stack, result, behind, number: None, arguments }
}

/// Sets the instruction at which the thread continues after the handler, and the result.
pub(crate) fn set_registers(context: &mut libc::ucontext_t, instruction: usize, result: i64) {
    let registers = &mut context.uc_mcontext.gregs;
    registers[REG_RIP as usize] = instruction as i64;
    registers[REG_RAX as usize] = result;
}

/// The address by which the calling thread finds its variables.
#[inline(always)]
pub fn thread_pointer() -> usize {
    #[cfg(miri)]
    let pointer = 0;
    #[cfg(not(miri))]
    let pointer;
    // SAFETY: reads the address of the thread's block, which stands at its beginning.
    #[cfg(not(miri))]
    unsafe {
        asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly, preserves_flags));
    }
    pointer
}

/// Brings a cache line near. A hint: any address is allowed.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: it accesses nothing that could fail.
    #[cfg(not(miri))]
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(miri)]
    let _ = at;
}

/// True if AES-GCM has instructions of its own.
pub fn has_aes() -> bool {
    is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq")
}
