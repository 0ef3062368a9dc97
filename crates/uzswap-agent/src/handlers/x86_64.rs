//! x86-64: `rt_sigframe` of the kernel, and how a handler begins and ends.

use super::{After, Plan, end, end_in_place};
use std::arch::naked_asm;
use std::mem::offset_of;
use std::ptr;
use uzswap_calls::CallRegisters;

/// Bytes below its stack pointer that a function may use.
pub const RED_ZONE: usize = 128;

/// The kernel's description of an interrupted thread.
#[repr(C)]
pub struct UserContext {
    flags: u64,
    link: *mut UserContext,
    pub stack: libc::stack_t,
    /// `r8` to `r15`, `rdi`, `rsi`, `rbp`, `rbx`, `rdx`, `rax`, `rcx`, `rsp`, `rip`, the flags.
    registers: [u64; 18],
    segments: [u64; 5],
    extended: *mut u8,
    reserved: [u64; 8],
    pub mask: u64,
}

const RSP: usize = 15;
const RIP: usize = 16;
const RAX: usize = 13;
const FLAGS: usize = 17;

/// The place in [`CallRegisters::general`] of each of [`UserContext::registers`].
const ORDER: [usize; 16] = [8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 3, 2, 0, 1, 4];

impl UserContext {
    pub fn show(&mut self, registers: &CallRegisters) {
        for (to, from) in self.registers.iter_mut().zip(ORDER) {
            *to = registers.general[from];
        }
        self.registers[RIP] = registers.instruction;
        self.registers[FLAGS] = registers.flags;
    }

    pub fn registers(&self) -> CallRegisters {
        let mut registers = CallRegisters {
            instruction: self.registers[RIP],
            flags: self.registers[FLAGS],
            ..CallRegisters::default()
        };
        for (from, to) in self.registers.iter().zip(ORDER) {
            registers.general[to] = *from;
        }
        registers
    }

    pub fn stack_pointer(&self) -> u64 {
        self.registers[RSP]
    }

    pub fn instruction(&self) -> u64 {
        self.registers[RIP]
    }

    /// The result of a system call.
    pub fn result(&self) -> i64 {
        self.registers[RAX] as i64
    }

    /// Bytes of the processor's extended state, which the kernel has written within that state.
    fn extended_bytes(&self) -> usize {
        const LEGACY: usize = 512;
        const MAGIC: u32 = 0x4650_5853;
        if self.extended.is_null() {
            return 0;
        }
        // SAFETY: the kernel has written at least these bytes, and its own words behind them.
        let [magic, bytes] = unsafe { self.extended.add(464).cast::<[u32; 2]>().read() };
        if magic == MAGIC { bytes as usize } else { LEGACY }
    }
}

/// A handler's frame on its stack, from its return address on.
#[repr(C)]
struct OnStack {
    leave: u64,
    context: UserContext,
    info: libc::siginfo_t,
    after: After,
}

const _: () = assert!(
    size_of::<UserContext>() == 304
        && size_of::<libc::siginfo_t>() == 128
        && offset_of!(OnStack, context) == 8
        && offset_of!(OnStack, info) == 312
);

/// The frame of a context: the handler's stack pointer.
pub fn frame_of(context: *mut UserContext) -> usize {
    context as usize - offset_of!(OnStack, context)
}

fn on_stack(context: *mut UserContext) -> *mut OnStack {
    context.wrapping_byte_sub(offset_of!(OnStack, context)).cast()
}

/// The description of the signal beside a context.
///
/// # Safety
/// The context is of [`copy`] or [`copy_again`].
pub unsafe fn info_of(context: *mut UserContext) -> *mut libc::siginfo_t {
    // SAFETY: the caller's promise.
    unsafe { &raw mut (*on_stack(context)).info }
}

/// The data beside a context.
///
/// # Safety
/// The context is of [`copy`] or [`copy_again`].
pub unsafe fn after(context: *mut UserContext) -> *const After {
    // SAFETY: the caller's promise.
    unsafe { &raw const (*on_stack(context)).after }
}

/// Copies a frame of the kernel's to a place below an address.
///
/// # Safety
/// `from` is the kernel's, and nothing below the address is used.
pub unsafe fn copy(
    from: &UserContext,
    info: *const libc::siginfo_t,
    below: usize,
    after: After,
) -> *mut UserContext {
    let bytes = from.extended_bytes();
    let extended = (below - bytes) & !63;
    // SAFETY: the kernel has written as many bytes; for the others, the caller's promise.
    unsafe {
        ptr::copy_nonoverlapping(from.extended, extended as *mut u8, bytes);
        let to = put(from, info, extended, after);
        (*to).extended = if bytes == 0 { ptr::null_mut() } else { extended as *mut u8 };
        to
    }
}

/// Copies a copy of [`copy`] to the place below it. Both use the same extended state.
///
/// # Safety
/// As of [`copy`].
pub unsafe fn copy_again(
    from: &UserContext,
    info: *const libc::siginfo_t,
    after: After,
) -> *mut UserContext {
    // SAFETY: the caller's promise.
    unsafe { put(from, info, frame_of(ptr::from_ref(from).cast_mut()), after) }
}

/// # Safety
/// As of [`copy`].
unsafe fn put(
    from: &UserContext,
    info: *const libc::siginfo_t,
    below: usize,
    after: After,
) -> *mut UserContext {
    let at = ((below - size_of::<OnStack>() + 8) & !15) - 8;
    let to = at as *mut OnStack;
    // SAFETY: the caller's promise.
    unsafe {
        ptr::copy_nonoverlapping(from, &raw mut (*to).context, 1);
        ptr::copy_nonoverlapping(info, &raw mut (*to).info, 1);
        (&raw mut (*to).after).write(after);
        &raw mut (*to).context
    }
}

/// True if the instruction before an address is `syscall`.
///
/// # Safety
/// The address and the two bytes before it are code.
pub unsafe fn is_behind_call(at: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { ((at - 2) as *const [u8; 2]).read() == [0x0f, 0x05] }
}

/// Begins a handler.
///
/// # Safety
/// The plan's frame is where the handler returns to; nothing of this stack but the plan is used.
#[unsafe(naked)]
pub unsafe extern "C" fn go(plan: *const Plan) -> ! {
    naked_asm!(
        "mov rbx, rdi",
        "mov rsp, [rbx]",
        "mov rax, [rbx + 56]",
        "mov [rsp], rax",
        "mov r12, [rbx + 8]",
        "mov r13, [rbx + 16]",
        "mov r14, [rbx + 24]",
        "mov r15, [rbx + 32]",
        // From here on a handler may begin on the stack that we were on, but none does before the
        // mask has been read.
        "mov rdi, [rbx + 40]",
        "test rdi, rdi",
        "jz 2f",
        "xor esi, esi",
        "mov eax, {sigaltstack}",
        "syscall",
        "2:",
        "lea rsi, [rbx + 48]",
        "mov edi, {set}",
        "xor edx, edx",
        "mov r10d, 8",
        "mov eax, {sigprocmask}",
        "syscall",
        "mov rdi, r12",
        "mov rsi, r13",
        "mov rdx, r14",
        "xor eax, eax",
        "jmp r15",
        sigaltstack = const libc::SYS_sigaltstack,
        sigprocmask = const libc::SYS_rt_sigprocmask,
        set = const libc::SIG_SETMASK,
    )
}

/// Continues an interrupted thread from the kernel's frame, or from a copy of that frame.
///
/// # Safety
/// `context` is such a frame, or a copy.
#[unsafe(naked)]
pub unsafe extern "C" fn go_back(context: *mut UserContext) -> ! {
    naked_asm!(
        "mov rsp, rdi",
        "mov eax, {sigreturn}",
        "syscall",
        sigreturn = const libc::SYS_rt_sigreturn,
    )
}

/// Bytes of a `nop`.
pub const NOP: usize = 1;

/// A handler returns here, with the stack at its [`UserContext`]. Unwinders find the interrupted
/// frame from here, as they do from the C library's own.
macro_rules! leave {
    ($name:ident, $end:ident) => {
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                ".cfi_startproc",
                ".cfi_signal_frame",
                // The frame's address, and each register, by the kernel's description at rsp.
                ".cfi_escape 0x0f, 4, 0x77, 0xa0, 0x01, 0x06",
                ".cfi_escape 0x10, 8, 2, 0x77, 40",
                ".cfi_escape 0x10, 9, 2, 0x77, 48",
                ".cfi_escape 0x10, 10, 2, 0x77, 56",
                ".cfi_escape 0x10, 11, 3, 0x77, 0xc0, 0x00",
                ".cfi_escape 0x10, 12, 3, 0x77, 0xc8, 0x00",
                ".cfi_escape 0x10, 13, 3, 0x77, 0xd0, 0x00",
                ".cfi_escape 0x10, 14, 3, 0x77, 0xd8, 0x00",
                ".cfi_escape 0x10, 15, 3, 0x77, 0xe0, 0x00",
                ".cfi_escape 0x10, 5, 3, 0x77, 0xe8, 0x00",
                ".cfi_escape 0x10, 4, 3, 0x77, 0xf0, 0x00",
                ".cfi_escape 0x10, 6, 3, 0x77, 0xf8, 0x00",
                ".cfi_escape 0x10, 3, 3, 0x77, 0x80, 0x01",
                ".cfi_escape 0x10, 1, 3, 0x77, 0x88, 0x01",
                ".cfi_escape 0x10, 0, 3, 0x77, 0x90, 0x01",
                ".cfi_escape 0x10, 2, 3, 0x77, 0x98, 0x01",
                ".cfi_escape 0x10, 7, 3, 0x77, 0xa0, 0x01",
                ".cfi_escape 0x10, 16, 3, 0x77, 0xa8, 0x01",
                // Unwinders look up the byte before the return address.
                "nop",
                "mov rdi, rsp",
                "call {end}",
                "mov rsp, rax",
                "mov eax, {sigreturn}",
                "syscall",
                ".cfi_endproc",
                end = sym $end,
                sigreturn = const libc::SYS_rt_sigreturn,
            )
        }
    };
}

leave!(leave_copy, end);
leave!(leave_kernels, end_in_place);
