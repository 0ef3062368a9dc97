//! From a replaced `syscall` to the function that looks at it, and back.
//!
//! A system call changes `rax`, `rcx` and `r11` only; so all that the C library may rely on is
//! kept: the other registers, the flags, the processor's extended state, and the 128 bytes below
//! the stack pointer that a function may use without saying so.
//!
//! To keep the whole extended state takes longer than all else that is done for most calls. So a
//! first look is given to each by code that changes nothing of it but the lower halves of vector
//! registers, as any code for x86-64 may that asks for no more.

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
    /// What it answers, for [`Outcome::Done`].
    pub result: i64,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Outcome {
    /// It has been made: the program gets [`Call::result`].
    Done = 0,
    /// It is made as it stands, with the program's own registers and stack; for calls that return
    /// twice, on another stack or not at all.
    Bare = 1,
    /// Of the first look: nothing was done, and the call is looked at again.
    Undecided = 2,
}

/// Looks at a call.
type Look = fn(&mut Call) -> Outcome;

/// Who looks at calls.
#[derive(Debug, Clone, Copy)]
pub struct Looks {
    /// At first. It may change no more of the extended state than registers `xmm0` to `xmm15`: so
    /// it calls nothing of the C library, whose copies use all that the processor has.
    pub first: Look,
    /// At what that leaves undecided; this one decides.
    pub second: Look,
}

static FIRST: AtomicUsize = AtomicUsize::new(0);
static SECOND: AtomicUsize = AtomicUsize::new(0);

/// Who looks at calls from now on.
pub(crate) fn set(looks: Looks) {
    FIRST.store(looks.first as usize, Relaxed);
    SECOND.store(looks.second as usize, Relaxed);
}

extern "C" fn look_first(call: &mut Call) -> Outcome {
    // Compiled for such a processor, any code may change the upper halves.
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

/// Makes a system call, past the C library.
///
/// # Safety
/// As of the call; and it returns once, on this stack.
pub unsafe fn raw(number: u64, arguments: [u64; 6]) -> i64 {
    let [a, b, c, d, e, f] = arguments;
    let result;
    // SAFETY: the caller's promise; the kernel changes these three registers alone.
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

/// States that are kept beside the general registers: x87, SSE, AVX, AVX-512. Not protection keys,
/// which we do not change, nor tiles, which no code of ours uses.
const STATES: u32 = 0b1110_0111;
/// What they take at most, in the standard form, with the header: AVX-512's last part ends at 2688.
const STATES_BYTES: usize = 2688;

/// Whether the processor and the kernel keep these states the way [`entry`] asks for.
pub(crate) fn is_supported() -> bool {
    // SAFETY: CPUID is there on every x86-64.
    #[allow(unused_unsafe)]
    let (features, sizes) =
        unsafe { (std::arch::x86_64::__cpuid(1), std::arch::x86_64::__cpuid_count(0xd, 2)) };
    const OSXSAVE: u32 = 1 << 27;
    // The AVX part stands where the standard form has it: as the others do then.
    features.ecx & OSXSAVE != 0 && (sizes.ebx == 576 || sizes.ebx == 0)
}

/// Where stubs jump to: the number in `eax`, the address of the bare call in `rcx`.
///
/// # Safety
/// Jumped to from a stub, with the registers of a system call.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn entry() {
    naked_asm!(
        // Below what the function may have there without saying so.
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
        // Fourteen of eight bytes are pushed, the flags among them.
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
        // The header must be zeros beyond what the processor writes of it.
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
        // In the rcx that was pushed: behind the bare `syscall`, where the way back begins.
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
