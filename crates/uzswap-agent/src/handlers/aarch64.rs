//! aarch64: `rt_sigframe` of the kernel, and how a handler begins and ends.
//!
//! ```text
//! info │ context, with records of the extended state │ more records, if they do not fit
//! ```
//! All of it is contiguous. A record with the address of further records is the last before them.

use super::{After, Plan, end, end_in_place};
use std::arch::naked_asm;
use std::mem::offset_of;
use std::ptr;
use uzswap_calls::CallRegisters;

/// Nothing below its stack pointer belongs to a function.
pub const RED_ZONE: usize = 0;

/// Bytes of the kernel's records within a context.
const RECORDS: usize = 4096;

/// The kernel's description of an interrupted thread.
#[repr(C)]
pub struct UserContext {
    flags: u64,
    /// The kernel does not use it. In a copy it has the address of [`After`].
    link: *mut After,
    pub stack: libc::stack_t,
    pub mask: u64,
    reserved: [u64; 15],
    gap: u64,
    fault: u64,
    /// `x0` to `x30`.
    registers: [u64; 31],
    stack_pointer: u64,
    instruction: u64,
    state: u64,
    gap_of_records: u64,
    records: [u8; RECORDS],
}

const _: () = assert!(
    offset_of!(UserContext, fault) == 176
        && offset_of!(UserContext, records) == 464
        && size_of::<UserContext>() == size_of::<libc::ucontext_t>()
        && size_of::<libc::siginfo_t>() == INFO
);

/// Bytes of the signal's description, which lies before the context.
const INFO: usize = 128;
/// The flags of the processor's state.
const FLAGS: u64 = 0xf000_0000;

/// The head of a record.
#[repr(C)]
struct Record {
    kind: u32,
    bytes: u32,
}

/// A record with the address of further records, and their bytes.
#[repr(C)]
struct Further {
    head: Record,
    start: u64,
    bytes: u32,
    reserved: [u32; 3],
}

impl UserContext {
    pub fn show(&mut self, registers: &CallRegisters) {
        self.registers = registers.general;
        self.stack_pointer = registers.stack;
        self.instruction = registers.instruction;
        self.state = self.state & !FLAGS | registers.flags & FLAGS;
    }

    pub fn registers(&self) -> CallRegisters {
        CallRegisters {
            general: self.registers,
            stack: self.stack_pointer,
            instruction: self.instruction,
            flags: self.state & FLAGS,
        }
    }

    pub fn stack_pointer(&self) -> u64 {
        self.stack_pointer
    }

    pub fn instruction(&self) -> u64 {
        self.instruction
    }

    /// The result of a system call.
    pub fn result(&self) -> i64 {
        self.registers[0] as i64
    }

    /// The record that tells where further records are, if there are any.
    ///
    /// # Safety
    /// The context is the kernel's, or a whole copy.
    unsafe fn further(&self) -> Option<*mut Further> {
        const KIND: u32 = 0x4558_5401;
        let mut at = 0;
        while at + size_of::<Further>() <= RECORDS {
            let record = self.records[at..].as_ptr().cast::<Record>();
            // SAFETY: within the records, which begin at a multiple of 16, as each of them does.
            let Record { kind, bytes } = unsafe { record.read() };
            match kind {
                KIND => return Some(record.cast_mut().cast()),
                0 => return None,
                _ if bytes < 16 || !bytes.is_multiple_of(16) => return None,
                _ => at += bytes as usize,
            }
        }
        None
    }

    /// The end of the context with its further records.
    ///
    /// # Safety
    /// As of [`Self::further`].
    unsafe fn end(&self) -> usize {
        let own = ptr::from_ref(self) as usize + size_of::<Self>();
        // SAFETY: the caller's promise; the record is the kernel's.
        let further = unsafe { self.further().map(|further| further.read()) };
        further.map_or(own, |further| own.max(further.start as usize + further.bytes as usize))
    }
}

/// The frame of a context: the handler's stack pointer.
pub fn frame_of(context: *mut UserContext) -> usize {
    context as usize - INFO
}

/// The description of the signal beside a context.
///
/// # Safety
/// The context is in a frame.
pub unsafe fn info_of(context: *mut UserContext) -> *mut libc::siginfo_t {
    context.wrapping_byte_sub(INFO).cast()
}

/// The data beside a context.
///
/// # Safety
/// The context is of [`copy`] or [`copy_again`].
pub unsafe fn after(context: *mut UserContext) -> *const After {
    // SAFETY: the caller's promise.
    unsafe { (*context).link }
}

/// Copies a frame of the kernel's, or a copy of one, to a place below an address.
///
/// # Safety
/// `from` is whole, and nothing below the address is used.
pub unsafe fn copy(
    from: &UserContext,
    info: *const libc::siginfo_t,
    below: usize,
    after: After,
) -> *mut UserContext {
    // SAFETY: the caller's promise.
    unsafe {
        let start = ptr::from_ref(from) as usize;
        let bytes = from.end() - start;
        let link = (below - size_of::<After>()) & !15;
        let at = (link - bytes) & !15;
        (link as *mut After).write(after);
        ptr::copy_nonoverlapping(start as *const u8, at as *mut u8, bytes);
        ptr::copy_nonoverlapping(info, (at - INFO) as *mut libc::siginfo_t, 1);
        let to = at as *mut UserContext;
        (*to).link = link as *mut After;
        if let Some(further) = (*to).further() {
            (*further).start = (*further).start - start as u64 + at as u64;
        }
        to
    }
}

/// Copies a copy of [`copy`] to the place below it.
///
/// # Safety
/// As of [`copy`].
pub unsafe fn copy_again(
    from: &UserContext,
    info: *const libc::siginfo_t,
    after: After,
) -> *mut UserContext {
    // SAFETY: the caller's promise.
    unsafe { copy(from, info, frame_of(ptr::from_ref(from).cast_mut()), after) }
}

/// True if the instruction before an address is `svc #0`.
///
/// # Safety
/// The address and the instruction before it are code.
pub unsafe fn is_behind_call(at: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { ((at - 4) as *const u32).read() == 0xd400_0001 }
}

/// Begins a handler.
///
/// # Safety
/// The plan's frame is where the handler returns to; nothing of this stack but the plan is used.
#[unsafe(naked)]
pub unsafe extern "C" fn go(plan: *const Plan) -> ! {
    naked_asm!(
        "mov x19, x0",
        "ldp x9, x20, [x19]",
        "mov sp, x9",
        "ldp x21, x22, [x19, #16]",
        "ldp x23, x0, [x19, #32]",
        "ldr x30, [x19, #56]",
        // The frame pointer of the interrupted code.
        "ldr x29, [x22, {frame_pointer}]",
        // From here on a handler may begin on the stack that we were on, but none does before the
        // mask has been read.
        "cbz x0, 2f",
        "mov x1, #0",
        "mov x8, {sigaltstack}",
        "svc #0",
        "2:",
        "mov x0, {set}",
        "add x1, x19, #48",
        "mov x2, #0",
        "mov x3, #8",
        "mov x8, {sigprocmask}",
        "svc #0",
        "mov x0, x20",
        "mov x1, x21",
        "mov x2, x22",
        // A function may be reached by a branch through this register alone (BTI).
        "mov x16, x23",
        "br x16",
        frame_pointer = const offset_of!(UserContext, registers) + 29 * 8,
        sigaltstack = const libc::SYS_sigaltstack,
        sigprocmask = const libc::SYS_rt_sigprocmask,
        set = const libc::SIG_SETMASK,
    )
}

/// Continues an interrupted thread from the kernel's frame, or from a copy of that frame.
///
/// # Safety
/// `context` is of such a frame, or of a copy.
#[unsafe(naked)]
pub unsafe extern "C" fn go_back(context: *mut UserContext) -> ! {
    naked_asm!(
        "sub sp, x0, {info}",
        "mov x8, {sigreturn}",
        "svc #0",
        info = const INFO,
        sigreturn = const libc::SYS_rt_sigreturn,
    )
}

/// Bytes of a `nop`.
pub const NOP: usize = 4;

/// A handler returns here, with the stack at its frame. Unwinders find the interrupted frame from
/// here: 96 is the number of its instruction for the compiler's unwinder.
macro_rules! leave {
    ($name:ident, $end:ident) => {
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                ".cfi_startproc",
                ".cfi_signal_frame",
                ".cfi_return_column 96",
                // The frame's address, by the kernel's description at sp: the word at 560.
                ".cfi_escape 0x0f, 4, 0x8f, 0xb0, 0x04, 0x06",
                // Each register is a word from 312 on.
                ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19",
                ".cfi_escape 0x10, \\number, 3, 0x8f, ((312 + 8 * \\number) & 0x7f) | 0x80, \
                 (312 + 8 * \\number) >> 7",
                ".endr",
                ".irp number, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30",
                ".cfi_escape 0x10, \\number, 3, 0x8f, ((312 + 8 * \\number) & 0x7f) | 0x80, \
                 (312 + 8 * \\number) >> 7",
                ".endr",
                ".cfi_escape 0x10, 96, 3, 0x8f, 0xb8, 0x04",
                // Unwinders look up the instruction before the return address.
                "nop",
                "add x0, sp, {info}",
                "bl {end}",
                "sub sp, x0, {info}",
                "mov x8, {sigreturn}",
                "svc #0",
                ".cfi_endproc",
                info = const INFO,
                end = sym $end,
                sigreturn = const libc::SYS_rt_sigreturn,
            )
        }
    };
}

leave!(leave_copy, end);
leave!(leave_kernels, end_in_place);
