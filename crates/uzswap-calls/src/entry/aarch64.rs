//! aarch64: a call changes only `x0`. The kernel may change the parts of vector registers beyond
//! 128 bits, and the predicates (SVE), in each call, so these are not kept. Nothing below the stack
//! pointer belongs to the program.
//!
//! ```text
//! libc, ld.so, …   svc #0      becomes      b stub
//! stub             push x16, x17 ; x16 = `again` ; jump entry
//! again            pop x16, x17 ; svc #0 ; b back           the bare call
//! done             pop x16, x17 ; b back
//! ```

use super::{Call, Outcome, look_again, look_first};
use std::arch::{asm, naked_asm};

/// A call, with the program's registers at that moment, as `entry` keeps them on its stack.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CallFrame {
    /// The call.
    pub call: Call,
    general: [u64; 31],
    flags: u64,
    /// The address of the bare call.
    bare: u64,
    gap: u64,
}

/// The registers of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallRegisters {
    /// `x0` to `x30`.
    pub general: [u64; 31],
    /// The stack pointer.
    pub stack: u64,
    /// The next instruction.
    pub instruction: u64,
    /// The flags.
    pub flags: u64,
}

impl CallRegisters {
    /// The stack pointer.
    pub fn stack(&self) -> u64 {
        self.stack
    }
}

/// Bytes of `x16` and `x17`, which the stub pushes.
const PUSHED: u64 = 16;

impl CallFrame {
    /// The program's registers as if it had made the call itself: at its `svc`, or behind it with
    /// this answer if the call was made.
    ///
    /// # Safety
    /// The thread is in this call.
    pub unsafe fn registers(&self, answer: Option<i64>) -> CallRegisters {
        // SAFETY: the address of a bare call in a stub of ours, which stays.
        let behind = unsafe { behind_site(self.bare as usize) } as u64;
        let mut general = self.general;
        if let Some(answer) = answer {
            general[0] = answer as u64;
        }
        CallRegisters {
            general,
            stack: std::ptr::from_ref(self) as u64 + size_of::<Self>() as u64 + PUSHED,
            instruction: if answer.is_some() { behind } else { behind - 4 },
            flags: self.flags,
        }
    }
}

/// The address behind a replaced `svc`. The argument is the address of its stub's bare call, which
/// a branch there follows.
///
/// # Safety
/// `bare` is the address of a bare call in a stub.
pub(crate) unsafe fn behind_site(bare: usize) -> usize {
    let branch = bare + 4;
    // SAFETY: an instruction of the stub, which begins at a multiple of four.
    let instruction = unsafe { (branch as *const u32).read() };
    // The lower 26 bits are the distance in instructions.
    let distance = (instruction << 6) as i32 >> 4;
    branch.wrapping_add_signed(distance as isize)
}

/// Makes a system call without the C library.
///
/// # Safety
/// As of the call, which must return once, on this stack.
pub unsafe fn raw(number: u64, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the caller's promise; the kernel changes only this register.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") a => result,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    result
}

/// The reason why [`entry`] does not work on this processor: none.
pub(crate) fn why_unsupported() -> Option<&'static str> {
    None
}

/// Bytes of the vector registers and of the state of floating point.
const VECTOR_BYTES: usize = 32 * 16 + 16;

/// The target of stubs: `x8` is the number, `x16` the address of `again`, and the stack has the
/// program's `x16` and `x17`.
///
/// A debugger goes from here to the function that made the call. The caller's instruction is that
/// of [`behind_site`]. The escape computes it, in DWARF, from the word 32 bytes below the program's
/// stack pointer. A debugger does not learn the program's `x30`.
///
/// # Safety
/// Jumped to from a stub, with the registers of a system call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn entry() {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_def_cfa sp, 16",
        ".cfi_undefined x30",
        "sub sp, sp, {frame_bytes}",
        ".cfi_def_cfa_offset {frame_bytes} + 16",
        "stp x0, x1, [sp, #64]",
        "stp x2, x3, [sp, #80]",
        "stp x4, x5, [sp, #96]",
        "stp x6, x7, [sp, #112]",
        "stp x8, x9, [sp, #128]",
        "stp x10, x11, [sp, #144]",
        "stp x12, x13, [sp, #160]",
        "stp x14, x15, [sp, #176]",
        "stp x18, x19, [sp, #208]",
        "stp x20, x21, [sp, #224]",
        "stp x22, x23, [sp, #240]",
        "stp x24, x25, [sp, #256]",
        "stp x26, x27, [sp, #272]",
        "stp x28, x29, [sp, #288]",
        // `struct Call`.
        "str x8, [sp]",
        "stp x0, x1, [sp, #8]",
        "stp x2, x3, [sp, #24]",
        "stp x4, x5, [sp, #40]",
        "mov x9, {not_made}",
        "str x9, [sp, #56]",
        // The program's x16 and x17.
        "ldp x9, x10, [sp, {frame_bytes}]",
        "stp x9, x10, [sp, #192]",
        "mrs x9, nzcv",
        "stp x30, x9, [sp, #304]",
        // The bare call is behind the instruction that restores these two.
        "add x16, x16, #4",
        "str x16, [sp, #320]",
        ".cfi_escape 0x16, 30, 16, 0x08, 32, 0x1c, 0x06, 0x23, 4, 0x12, 0x94, 4, 0x08, 38, 0x24, \
         0x08, 36, 0x26, 0x22",
        ".cfi_offset x29, -56",
        ".cfi_offset x19, -136",
        ".cfi_offset x20, -128",
        "mov x19, sp",
        ".cfi_def_cfa x19, {frame_bytes} + 16",
        "sub sp, sp, {vector_bytes}",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "str q\\number, [sp, #16 + 16 * \\number]",
        ".endr",
        ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
        "str q\\number, [sp, #16 + 16 * \\number]",
        ".endr",
        "mrs x9, fpsr",
        "mrs x10, fpcr",
        "stp x9, x10, [sp]",
        "mov x0, x19",
        "bl {look_first}",
        "cmp w0, {undecided}",
        "b.ne 3f",
        "mov x0, x19",
        "bl {look_again}",
        "3:",
        "ldp x9, x10, [sp]",
        "msr fpsr, x9",
        "msr fpcr, x10",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "ldr q\\number, [sp, #16 + 16 * \\number]",
        ".endr",
        ".irp number, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
        "ldr q\\number, [sp, #16 + 16 * \\number]",
        ".endr",
        "mov sp, x19",
        ".cfi_def_cfa sp, {frame_bytes} + 16",
        // Where the stub finds x16 and x17, and where it continues: at `again`, or at `done`.
        "add x17, sp, {frame_bytes}",
        "ldr x16, [sp, #320]",
        "sub x16, x16, #4",
        "cmp w0, {bare}",
        "b.eq 2f",
        "add x16, x16, #12",
        "ldr x9, [sp, #56]",
        "str x9, [sp, #64]",
        "b.lo 2f",
        // On the stack for which the call asks.
        "ldp x9, x10, [sp, #192]",
        "ldr x17, [sp, #16]",
        "stp x9, x10, [x17, #-16]!",
        "2:",
        "ldp x30, x9, [sp, #304]",
        "msr nzcv, x9",
        "ldp x0, x1, [sp, #64]",
        "ldp x2, x3, [sp, #80]",
        "ldp x4, x5, [sp, #96]",
        "ldp x6, x7, [sp, #112]",
        "ldp x8, x9, [sp, #128]",
        "ldp x10, x11, [sp, #144]",
        "ldp x12, x13, [sp, #160]",
        "ldp x14, x15, [sp, #176]",
        "ldp x18, x19, [sp, #208]",
        // Code of ours keeps x20 to x28.
        "ldr x29, [sp, #296]",
        "mov sp, x17",
        ".cfi_def_cfa sp, 16",
        "br x16",
        ".cfi_endproc",
        frame_bytes = const size_of::<CallFrame>(),
        vector_bytes = const VECTOR_BYTES,
        bare = const Outcome::Bare as u32,
        not_made = const Call::NOT_MADE,
        undecided = const Outcome::Undecided as u32,
        look_first = sym look_first,
        look_again = sym look_again,
    )
}

const _: () = assert!(size_of::<Call>() == 64 && size_of::<CallFrame>() == 336);
const _: () = assert!(std::mem::offset_of!(CallFrame, flags) == 312);
const _: () = assert!(std::mem::offset_of!(CallFrame, bare) == 320);
