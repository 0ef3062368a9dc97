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

/// Checks that all registers but the answer's are the same after a call that is left, and after a
/// call that both functions look at.
pub fn check_registers() {
    // Negative, and no carry.
    assert_eq!(check(libc::getppid as *const () as usize), 0b1000, "the flags have changed");
    // This function checks the answer, and so changes the flags.
    check(libc::mprotect as *const () as usize);
}

/// Calls a function of the C library that only makes a system call, with zeros as arguments.
/// Returns the flags.
fn check(function: usize) -> u64 {
    let before: [u8; 32 * 16] = std::array::from_fn(|at| (at * 7 + 3) as u8);
    let mut after = [0u8; 32 * 16];
    let (answer, flags, others): (u64, u64, u64);
    // SAFETY: loads and stores within the arrays. The functions use no memory.
    unsafe {
        asm!(
            ".irp number, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, \
             21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31",
            "ldr q\\number, [x20, #16 * \\number]",
            ".endr",
            ".irp number, 0, 1, 2, 3, 4, 5",
            "mov x\\number, #0",
            ".endr",
            ".irp number, 6, 7, 9, 10, 11, 12, 13, 14, 15",
            "mov x\\number, #\\number",
            ".endr",
            "cmp xzr, x6",
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
            lateout("x0") answer,
            out("v8") _, out("v9") _, out("v10") _, out("v11") _,
            out("v12") _, out("v13") _, out("v14") _, out("v15") _,
            clobber_abi("C"),
        );
    }
    assert!((answer as i64) >= 0, "the call fails");
    let changed = before.chunks(16).zip(after.chunks(16)).position(|(one, other)| one != other);
    assert_eq!(changed, None, "a vector register has changed");
    assert_eq!(others, 6 + 7 + (9..=15).sum::<u64>(), "a register has changed");
    flags >> 28
}
