//! x86-64: a call changes only `rax`, `rcx` and `r11`. Besides the other registers, [`entry`] keeps
//! the 128 bytes below the stack pointer (the red zone).
//!
//! The first function is compiled for baseline x86-64, and so changes only the lower halves of
//! vector registers.

use super::{Call, Outcome, look_again, look_first};
use std::arch::{asm, naked_asm};

/// A call, with the program's registers at that moment, as `entry` keeps them on its stack.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct CallFrame {
    /// The call.
    pub call: Call,
    rdi: u64,
    rsi: u64,
    rdx: u64,
    rbx: u64,
    /// The address of the bare call.
    bare: u64,
    r15: u64,
    r14: u64,
    r13: u64,
    r12: u64,
    flags: u64,
    rbp: u64,
}

/// The registers of a thread.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallRegisters {
    /// In the order of the processor's numbers: `rax`, `rcx`, `rdx`, `rbx`, `rsp`, `rbp`, `rsi`,
    /// `rdi`, `r8` to `r15`.
    pub general: [u64; 16],
    /// The next instruction.
    pub instruction: u64,
    /// The flags.
    pub flags: u64,
}

impl CallRegisters {
    /// The stack pointer.
    pub fn stack(&self) -> u64 {
        self.general[4]
    }
}

impl CallFrame {
    /// The program's registers as if it had made the call itself: at its `syscall`, or behind it
    /// with this answer if the call was made.
    ///
    /// # Safety
    /// The thread is in this call.
    pub unsafe fn registers(&self, answer: Option<i64>) -> CallRegisters {
        const ABOVE: u64 = 128;
        let [_, _, _, r10, r8, r9] = self.call.arguments;
        // SAFETY: the address of a bare call in a stub of ours, which stays.
        let behind = unsafe { behind_site(self.bare as usize) } as u64;
        let top = std::ptr::from_ref(self) as u64 + size_of::<Self>() as u64 + ABOVE;
        let rax = answer.unwrap_or(self.call.number as i64) as u64;
        let (r11, rcx) = (self.flags, behind);
        let [rdx, rbx, rsi, rdi, rbp] = [self.rdx, self.rbx, self.rsi, self.rdi, self.rbp];
        let [r12, r13, r14, r15] = [self.r12, self.r13, self.r14, self.r15];
        CallRegisters {
            general: [rax, rcx, rdx, rbx, top, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15],
            instruction: if answer.is_some() { behind } else { behind - 2 },
            flags: self.flags,
        }
    }
}

/// The address behind a replaced `syscall`. The argument is the address of its stub's bare call,
/// which ends with a jump there.
///
/// # Safety
/// `bare` is the address of a bare call in a stub.
pub(crate) unsafe fn behind_site(bare: usize) -> usize {
    const JUMP_END: usize = 7;
    // SAFETY: two bytes of `syscall` and one of the jump precede the four bytes of the jump's
    // distance.
    let distance = unsafe { ((bare + 3) as *const i32).read_unaligned() };
    (bare + JUMP_END).wrapping_add(distance as usize)
}

/// Makes a system call without the C library.
///
/// # Safety
/// As of the call, which must return once, on this stack.
pub unsafe fn raw(number: u64, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the caller's promise; the kernel changes only these three registers.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as i64 => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    result
}

/// States that are saved besides the general registers: x87, SSE, AVX, AVX-512. Protection keys are
/// not saved, because we do not change them. Neither are tiles, because no code of ours uses them.
const STATES: u32 = 0b1110_0111;
/// The largest size of these states in the standard form, with the header: AVX-512's last part ends
/// at 2688.
const STATES_BYTES: usize = 2688;

/// The reason why the processor or the kernel does not save these states in the way of [`entry`].
pub(crate) fn why_unsupported() -> Option<&'static str> {
    // SAFETY: every x86-64 has CPUID.
    #[allow(unused_unsafe)]
    let (features, sizes) =
        unsafe { (std::arch::x86_64::__cpuid(1), std::arch::x86_64::__cpuid_count(0xd, 2)) };
    const OSXSAVE: u32 = 1 << 27;
    // If the AVX part is at its place in the standard form, so are the others.
    let is_supported = features.ecx & OSXSAVE != 0 && (sizes.ebx == 576 || sizes.ebx == 0);
    (!is_supported).then_some("a processor without XSAVE")
}

/// The target of stubs: the number is in `eax`, the address of the bare call in `rcx`.
///
/// A debugger goes from here to the function that made the call: the caller's instruction is that
/// of [`behind_site`], which the escapes compute, in DWARF. In C: `bare + *(int *)(bare + 3) + 7`.
///
/// # Safety
/// Jumped to from a stub, with the registers of a system call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn entry() {
    naked_asm!(
        ".cfi_startproc",
        ".cfi_def_cfa rsp, 0",
        // The instruction (16) is computed (0x16), in 16 bytes: from rcx (0x72),
        ".cfi_escape 0x16, 16, 16, 0x72, 0",
        // or further down in 18, from the word 184 bytes below the program's stack pointer.
        ".macro behind_site",
        ".cfi_escape 0x12, 0x23, 3, 0x94, 4, 0x08, 32, 0x24, 0x08, 32, 0x26, 0x22, 0x23, 7",
        ".endm",
        "behind_site",
        // Below the red zone.
        "lea rsp, [rsp - 128]",
        ".cfi_def_cfa_offset 128",
        "push rbp",
        ".cfi_def_cfa_offset 136",
        ".cfi_offset rbp, -136",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "pushfq",
        "cld",
        // Pushes struct CallFrame, the last field first. From it a handler is shown the program's
        // registers.
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rcx",
        ".cfi_escape 0x16, 16, 18, 0x08, 184, 0x1c, 0x06",
        "behind_site",
        "push rbx",
        ".cfi_offset rbx, -192",
        "push rdx",
        "push rsi",
        "push rdi",
        // Pushes struct Call, the last field first: result, arguments, number.
        "mov eax, eax",
        "push {not_made}",
        "push r9",
        "push r8",
        "push r10",
        "push rdx",
        "push rsi",
        "push rdi",
        "push rax",
        "mov rbx, rsp",
        "sub rsp, 256",
        "and rsp, -64",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "movaps [rsp + 16 * \\number], xmm\\number",
        ".endr",
        "mov rdi, rbx",
        "call {look_first}",
        ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
        "movaps xmm\\number, [rsp + 16 * \\number]",
        ".endr",
        "mov r11, rax",
        "cmp eax, {undecided}",
        "jne 3f",
        "lea rsp, [rbx - {states_bytes}]",
        "and rsp, -64",
        // The header must be zeros where the processor does not write it.
        "xor eax, eax",
        "lea rdi, [rsp + 512]",
        "mov ecx, 8",
        "rep stosq",
        "mov eax, {states}",
        "xor edx, edx",
        "xsave64 [rsp]",
        "mov rdi, rbx",
        "call {look_again}",
        "mov r11, rax",
        "mov eax, {states}",
        "xor edx, edx",
        "xrstor64 [rsp]",
        "3:",
        "mov rsp, rbx",
        // During the next few instructions a debugger cannot find the caller.
        ".cfi_undefined rip",
        // The outcome is in r11: 0 is done, and the result is the call's.
        "mov rax, [rsp]",
        "cmp r11, {bare}",
        // The program's stack, or the stack for which the call asks.
        "lea r11, [rsp + {frame_bytes} + 128]",
        "je 2f",
        "jb 4f",
        "mov r11, [rsp + 16]",
        "4:",
        "mov rax, [rsp + 56]",
        // The saved rcx: behind the bare `syscall`, where the way back begins.
        "add qword ptr [rsp + 96], 2",
        "2:",
        "mov r10, [rsp + 32]",
        "mov r8, [rsp + 40]",
        "mov r9, [rsp + 48]",
        "lea rsp, [rsp + 64]",
        "pop rdi",
        "pop rsi",
        "pop rdx",
        "pop rbx",
        "pop rcx",
        // Code of ours keeps r12 to r15.
        "lea rsp, [rsp + 32]",
        "popfq",
        "pop rbp",
        ".cfi_def_cfa rsp, 128",
        "mov rsp, r11",
        "jmp rcx",
        ".cfi_endproc",
        ".purgem behind_site",
        frame_bytes = const size_of::<CallFrame>(),
        bare = const Outcome::Bare as u32,
        not_made = const Call::NOT_MADE,
        states = const STATES,
        states_bytes = const STATES_BYTES,
        undecided = const Outcome::Undecided as u32,
        look_first = sym look_first,
        look_again = sym look_again,
    )
}

const _: () = assert!(size_of::<Call>() == 64 && STATES_BYTES.is_multiple_of(64));
const _: () = assert!(size_of::<CallFrame>() == 152 && std::mem::offset_of!(CallFrame, bare) == 96);
