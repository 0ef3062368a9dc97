//! From a replaced `syscall` to the function that handles it, and back.
//!
//! A system call changes only `rax`, `rcx` and `r11`, so everything else that the C library may
//! rely on is kept. That is the other registers, the flags, the processor's extended state, and the
//! 128 bytes below the stack pointer (the red zone).
//!
//! Saving the whole extended state takes longer than the rest of the work for most calls. So a
//! first function gets each call, whose code changes only the lower halves of vector registers, as
//! any code for baseline x86-64 may.

use std::arch::{asm, naked_asm};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A system call as the program makes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Call {
    /// Its number.
    pub number: u64,
    /// Its arguments, in the order of the kernel's interface.
    pub arguments: [u64; 6],
    /// Its result, for [`Outcome::Done`].
    pub result: i64,
}

/// The outcome of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Outcome {
    /// It was made: the program gets [`Call::result`].
    Done = 0,
    /// It is made as it stands, with the program's own registers and stack: for calls that return
    /// twice, on another stack or never.
    Bare = 1,
    /// From the first function: nothing was done, and the second one gets the call.
    Undecided = 2,
}

/// Handles a call.
type Look = fn(&mut Call) -> Outcome;

/// The functions that handle calls.
#[derive(Debug, Clone, Copy)]
pub struct Looks {
    /// The first one. It may change no more of the extended state than the registers `xmm0` to
    /// `xmm15`. So it calls nothing of the C library, whose copies use all registers of the
    /// processor.
    pub first: Look,
    /// The second one, for calls that the first leaves undecided; it decides.
    pub second: Look,
}

static FIRST: AtomicUsize = AtomicUsize::new(0);
static SECOND: AtomicUsize = AtomicUsize::new(0);

/// Sets the functions that handle calls from now on.
pub(crate) fn set(looks: Looks) {
    FIRST.store(looks.first as usize, Relaxed);
    SECOND.store(looks.second as usize, Relaxed);
}

extern "C" fn look_first(call: &mut Call) -> Outcome {
    // Compiled for a processor with AVX, any code may change the upper halves.
    if cfg!(target_feature = "avx") {
        return Outcome::Undecided;
    }
    // SAFETY: set before the first site is replaced, to a function of this type.
    let look = unsafe { std::mem::transmute::<usize, Look>(FIRST.load(Relaxed)) };
    look(call)
}

extern "C" fn look_again(call: &mut Call) -> Outcome {
    // SAFETY: as above.
    let look = unsafe { std::mem::transmute::<usize, Look>(SECOND.load(Relaxed)) };
    look(call)
}

/// Makes a system call without the C library.
///
/// # Safety
/// That of the call; and it returns once, on this stack.
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
/// not, because we do not change them, nor tiles, which no code of ours uses.
const STATES: u32 = 0b1110_0111;
/// Their largest size in the standard form, with the header: AVX-512's last part ends at 2688.
const STATES_BYTES: usize = 2688;

/// True if the processor and the kernel save these states in the way of [`entry`].
pub(crate) fn is_supported() -> bool {
    // SAFETY: CPUID is there on every x86-64.
    #[allow(unused_unsafe)]
    let (features, sizes) =
        unsafe { (std::arch::x86_64::__cpuid(1), std::arch::x86_64::__cpuid_count(0xd, 2)) };
    const OSXSAVE: u32 = 1 << 27;
    // The AVX part is at its place in the standard form: then so are the others.
    features.ecx & OSXSAVE != 0 && (sizes.ebx == 576 || sizes.ebx == 0)
}

/// The target of stubs: the number is in `eax`, the address of the bare call in `rcx`.
///
/// # Safety
/// Jumped to from a stub, with the registers of a system call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn entry() {
    naked_asm!(
        // Below the red zone.
        "lea rsp, [rsp - 128]",
        "push rbp",
        "mov rbp, rsp",
        "pushfq",
        "cld",
        "push rcx",
        "push rbx",
        "push rdx",
        "push rsi",
        "push rdi",
        // struct Call, from its end: result, arguments, number.
        "push 0",
        "push r9",
        "push r8",
        "push r10",
        "push rdx",
        "push rsi",
        "push rdi",
        "mov eax, eax",
        "push rax",
        "mov rbx, rsp",
        // Fourteen pushes of eight bytes, including the flags.
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
        // The outcome is in r11: 0 is done, and the result is the call's.
        "mov rax, [rsp]",
        "test r11, r11",
        "jnz 2f",
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
        "popfq",
        "pop rbp",
        "lea rsp, [rsp + 128]",
        "jmp rcx",
        states = const STATES,
        states_bytes = const STATES_BYTES,
        undecided = const Outcome::Undecided as u32,
        look_first = sym look_first,
        look_again = sym look_again,
    )
}

const _: () = assert!(size_of::<Call>() == 64 && STATES_BYTES.is_multiple_of(64));
