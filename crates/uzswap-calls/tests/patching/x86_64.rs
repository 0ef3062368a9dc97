//! x86-64.

use uzswap_calls::Patched;

/// Changes every register that a first function may change.
pub fn change_registers() {
    // SAFETY: every x86-64 has these registers; only the declared clobbers change.
    unsafe {
        std::arch::asm!(
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15",
            "pcmpeqd xmm\\number, xmm\\number",
            ".endr",
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack, nomem),
        );
    }
}

/// The next instruction of a thread that runs a handler.
///
/// # Safety
/// `context` is the third argument of the handler.
pub unsafe fn instruction<'a>(context: *mut libc::c_void) -> &'a mut i64 {
    // SAFETY: the caller's promise.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] }
}

pub fn is_expected(patched: Patched) -> bool {
    patched.jumps > 250 && patched.traps > 10 && patched.left > 0
}

/// Checks that vector registers are the same after a call that the first function decides, and
/// after a call that it leaves to the second. Both are functions with only a system call.
pub fn check_registers() {
    for function in [libc::getppid, libc::getpgrp] {
        if std::arch::is_x86_feature_detected!("avx512f") {
            // SAFETY: the processor has them.
            unsafe { check_wide(function) };
        } else if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the processor has them.
            unsafe { check_half(function) };
        }
    }
}

/// One test, for registers by name, width, and number.
macro_rules! check_kept {
    ($name:ident, $feature:literal, $register:literal, $move:literal, $bytes:literal,
     $numbers:literal) => {
        #[target_feature(enable = $feature)]
        unsafe fn $name(function: unsafe extern "C" fn() -> libc::pid_t) {
            let before: [u8; 32 * $bytes] = std::array::from_fn(|at| (at * 7 + 3) as u8);
            let mut after = [0u8; 32 * $bytes];
            // SAFETY: loads and stores within the arrays; the C library's function gets the stack
            // alignment that it needs.
            unsafe {
                std::arch::asm!(
                    "mov r13, rsp",
                    "and rsp, -64",
                    concat!(".irp number, ", $numbers),
                    concat!($move, " ", $register, "\\number, [r14 + ", $bytes, " * \\number]"),
                    ".endr",
                    "call r12",
                    concat!(".irp number, ", $numbers),
                    concat!($move, " [r15 + ", $bytes, " * \\number], ", $register, "\\number"),
                    ".endr",
                    "mov rsp, r13",
                    in("r12") function,
                    in("r14") before.as_ptr(),
                    in("r15") after.as_mut_ptr(),
                    out("r13") _,
                    clobber_abi("C"),
                );
            }
            let count = $numbers.split(',').count();
            assert!(before[..count * $bytes] == after[..count * $bytes], "{}", stringify!($name));
        }
    };
}

check_kept!(check_half, "avx", "ymm", "vmovdqu", 32, "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15");
check_kept!(
    check_wide,
    "avx512f",
    "zmm",
    "vmovdqu64",
    64,
    "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31"
);
