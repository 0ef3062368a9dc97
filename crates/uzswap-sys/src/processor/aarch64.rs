//! aarch64.

use super::{Cause, Registers};
use std::arch::{asm, is_aarch64_feature_detected, naked_asm};
use std::ffi::c_void;
use std::io;

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
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "str x29, [x3]",
        "mov sp, x2",
        "blr x1",
        "mov sp, x29",
        ".cfi_def_cfa_register sp",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa_offset 0",
        ".cfi_restore x29",
        ".cfi_restore x30",
        "ret",
        ".cfi_endproc",
    )
}

/// `madvise`, by the C library: on this processor uzswap replaces no calls. Returns 0 or a negative
/// error number.
///
/// # Safety
/// As of the advice.
pub(crate) unsafe fn advise(start: usize, bytes: usize, advice: usize) -> isize {
    // SAFETY: the caller's promise.
    match unsafe { libc::syscall(libc::SYS_madvise, start, bytes, advice) } {
        0 => 0,
        _ => -(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO) as isize),
    }
}

/// Bytes of the kernel's records (`struct _aarch64_ctx`), at the end of a context.
const RECORDS_BYTES: usize = 4096;
const RECORDS_AT: usize = size_of::<libc::mcontext_t>() - RECORDS_BYTES;
/// Before them are the address of the fault, x0 to x30, sp, pc and pstate; they begin at a multiple
/// of 16.
const _: () = assert!(RECORDS_AT == (8usize * (1 + 31 + 3)).next_multiple_of(16));

/// The record with the syndrome of a fault (`struct esr_context`).
const SYNDROME_MAGIC: u32 = 0x4553_5201;

/// The syndrome (`ESR_EL1`) of the fault that a handler is called for, if the kernel gives it.
///
/// # Safety
/// `context` is the third argument of the handler.
unsafe fn syndrome(context: *const libc::ucontext_t) -> Option<u64> {
    // SAFETY: in the context, by the constants above.
    let records = unsafe { (&raw const (*context).uc_mcontext).cast::<u8>().add(RECORDS_AT) };
    let mut at = 0;
    while at + 16 <= RECORDS_BYTES {
        // SAFETY: within the records, which are aligned to 16, as the size of each is.
        let (magic, bytes) = unsafe {
            let head = records.add(at).cast::<u32>();
            (head.read(), head.add(1).read() as usize)
        };
        if magic == SYNDROME_MAGIC {
            // SAFETY: as above, behind the head.
            return Some(unsafe { records.add(at + 8).cast::<u64>().read() });
        }
        if magic == 0 || bytes == 0 || !bytes.is_multiple_of(16) {
            return None;
        }
        at += bytes;
    }
    None
}

/// The kind of the access that a handler is called for.
///
/// # Safety
/// It is the third argument of the handler.
pub(crate) unsafe fn cause(context: *mut c_void) -> Cause {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the caller's promise.
    let (syndrome, instruction) =
        unsafe { (syndrome(context).unwrap_or(0), (*context).uc_mcontext.pc as usize) };
    Cause { instruction, ..kind_of(syndrome) }
}

/// The kind of an access by its syndrome.
fn kind_of(syndrome: u64) -> Cause {
    const DATA: u64 = 0x24;
    const FETCH: u64 = 0x20;
    const WRITE: u64 = 1 << 6;
    /// Cache maintenance is reported as a write, although it writes nothing.
    const MAINTENANCE: u64 = 1 << 8;
    let class = syndrome >> 26 & 0x3f;
    Cause {
        is_write: class == DATA && syndrome & (WRITE | MAINTENANCE) == WRITE,
        is_fetch: class == FETCH,
        is_by_key: false,
        instruction: 0,
    }
}

/// The registers of a thread that runs a handler with this context.
pub(crate) fn registers(context: &libc::ucontext_t) -> Registers {
    let registers = &context.uc_mcontext;
    Registers {
        instruction: registers.pc as usize,
        stack: registers.sp as usize,
        result: registers.regs[0] as i64,
        behind: 0,
        number: Some(registers.regs[8] as i64),
        arguments: std::array::from_fn(|at| registers.regs[at]),
    }
}

/// Sets the instruction at which the thread continues after the handler, and the result.
pub(crate) fn set_registers(context: &mut libc::ucontext_t, instruction: usize, result: i64) {
    context.uc_mcontext.pc = instruction as u64;
    context.uc_mcontext.regs[0] = result as u64;
}

/// The address by which the calling thread finds its variables.
#[inline(always)]
pub fn thread_pointer() -> usize {
    let pointer;
    // SAFETY: reads a register.
    unsafe {
        asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, nomem, preserves_flags))
    };
    pointer
}

/// Brings a cache line near. A hint: any address is allowed.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: it accesses nothing that could fail.
    unsafe {
        asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
    }
}

/// True if AES-GCM has instructions of its own.
pub fn has_aes() -> bool {
    is_aarch64_feature_detected!("aes") && is_aarch64_feature_detected!("pmull")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_syndrome_tells_the_kind_of_an_access() {
        let kind = |class: u64, rest: u64| {
            let cause = kind_of(class << 26 | rest);
            (cause.is_write, cause.is_fetch)
        };
        assert_eq!(kind(0x24, 0x07), (false, false), "a read");
        assert_eq!(kind(0x24, 0x47), (true, false), "a write");
        assert_eq!(kind(0x24, 0x147), (false, false), "maintenance of a cache");
        assert_eq!(kind(0x20, 0x07), (false, true), "an instruction");
        assert_eq!(kind(0x00, 0x47), (false, false), "no fault of memory");
    }
}
