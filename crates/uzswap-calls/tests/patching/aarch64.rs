//! aarch64.

use std::arch::asm;
use uzswap_calls::Patched;

/// Changes every vector register that a function may change.
pub fn change_registers() {
    // SAFETY: every aarch64 has these registers; only the declared clobbers change.
    unsafe {
        asm!(
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27",
            "movi v\\number\\().16b, #255",
            ".endr",
            "cmp xzr, xzr",
            clobber_abi("C"),
            options(nostack, nomem),
        );
    }
}

/// The next instruction of a thread that runs a handler.
///
/// # Safety
/// `context` is the third argument of the handler.
pub unsafe fn instruction<'a>(context: *mut libc::c_void) -> &'a mut u64 {
    // SAFETY: the caller's promise.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc }
}

pub fn is_expected(patched: Patched) -> bool {
    patched.jumps > 300 && patched.traps == 0 && patched.left == 0
}

/// Checks that vector registers, and all others but the answer's, are the same after a function of
/// the C library.
pub fn check_registers(function: unsafe extern "C" fn() -> libc::pid_t) {
    let before: [u8; 32 * 16] = std::array::from_fn(|at| (at * 7 + 3) as u8);
    let mut after = [0u8; 32 * 16];
    let (flags, others): (u64, u64);
    // SAFETY: loads and stores within the arrays. The function changes registers as any may, and
    // makes only a system call.
    unsafe {
        asm!(
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, \
             21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
            "ldr q\\number, [x20, #16 * \\number]",
            ".endr",
            ".irp number, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15",
            "mov x\\number, #\\number",
            ".endr",
            "cmp xzr, x1",
            "blr x22",
            "mrs x23, nzcv",
            "mov x24, #0",
            ".irp number, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15",
            "add x24, x24, x\\number",
            ".endr",
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, \
             21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
            "str q\\number, [x21, #16 * \\number]",
            ".endr",
            in("x20") before.as_ptr(),
            in("x21") after.as_mut_ptr(),
            in("x22") function,
            out("x23") flags,
            out("x24") others,
            clobber_abi("C"),
        );
    }
    assert!(before == after, "a vector register has changed");
    assert_eq!(others, (1..=7).sum::<u64>() + (9..=15).sum::<u64>(), "a register has changed");
    // Negative, and no carry.
    assert_eq!(flags >> 28, 0b1000, "the flags have changed");
}
