//! aarch64: each `svc #0` becomes a branch to its stub. Both have four bytes, so a thread executes
//! either of them. The number of a call is in a register.

use crate::entry;
use crate::sites::{SYSCALL, Site};
use std::arch::asm;

/// Bytes of a stub: nine instructions and an address, rounded up.
pub const STUB: usize = 64;
/// The offset of the bare `svc` in a stub.
pub const BARE: usize = 20;
/// No site traps. The offset of the start.
pub const RESUME: usize = 0;
/// The reach of a branch, less the memory for stubs.
pub const REACH: usize = (128 << 20) - (1 << 20);

/// `stp x16, x17, [sp, #-16]!` and `ldp x16, x17, [sp], #16`.
const PUSH: u32 = 0xa9bf_47f0;
const POP: u32 = 0xa8c1_47f0;
/// `ldr x17` of the word 36 bytes further on.
const LOAD_ENTRY: u32 = 0x5800_0131;
/// `adr x16` of the instruction eight bytes further on.
const AGAIN: u32 = 0x1000_0050;
/// `br x17`, and a branch without its distance.
const JUMP: u32 = 0xd61f_0220;
const BRANCH: u32 = 0x1400_0000;

/// The code of a site's stub ([`crate::entry`]).
pub fn stub_code(site: &Site, stub: usize) -> [u8; STUB] {
    const ENTRY: usize = 40;
    let back = |at: usize| branch(stub + at, site.address + SYSCALL.len());
    let svc = u32::from_le_bytes(SYSCALL);
    let all = [PUSH, LOAD_ENTRY, AGAIN, JUMP, POP, svc, back(24), POP, back(32)];
    let mut code = [0; STUB];
    for (to, instruction) in code.chunks_exact_mut(4).zip(all) {
        to.copy_from_slice(&instruction.to_le_bytes());
    }
    let entry: unsafe extern "C" fn() = entry::entry;
    code[ENTRY..ENTRY + 8].copy_from_slice(&(entry as usize as u64).to_le_bytes());
    code
}

/// A branch from one address to another, within reach.
fn branch(from: usize, to: usize) -> u32 {
    BRANCH | (to.wrapping_sub(from) >> 2) as u32 & 0x03ff_ffff
}

/// Replaces a site.
///
/// # Safety
/// The code at the site is writable, and no other thread changes it.
pub unsafe fn replace(site: &Site, stub: usize) {
    // SAFETY: the caller's promise; instructions begin at multiples of four.
    unsafe { (site.address as *mut u32).write_volatile(branch(site.address, stub)) };
    forget_instructions(site.address, SYSCALL.len());
}

/// No site traps.
///
/// # Safety
/// None is needed here.
pub unsafe fn is_trap(_at: usize) -> bool {
    false
}

/// There is no trap.
///
/// # Safety
/// As of [`is_trap`].
pub unsafe fn end_trap(_at: usize) {}

/// The address that [`replace`] changes.
pub fn changed(site: &Site) -> [usize; 1] {
    [site.address]
}

/// Makes the processors fetch changed instructions again.
pub fn forget_instructions(start: usize, bytes: usize) {
    /// The processors' lines are no shorter.
    const LINE: usize = 16;
    let lines = || (start / LINE * LINE..start + bytes).step_by(LINE);
    // SAFETY: programs may do this at any mapped address. First the data of all lines become
    // visible, then their old instructions are dropped.
    unsafe {
        lines().for_each(|line| asm!("dc cvau, {}", in(reg) line, options(nostack)));
        asm!("dsb ish", options(nostack));
        lines().for_each(|line| asm!("ic ivau, {}", in(reg) line, options(nostack)));
        asm!("dsb ish", "isb", options(nostack));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_goes_both_ways() {
        assert_eq!(branch(0x1000, 0x1010), 0x1400_0004);
        assert_eq!(branch(0x1010, 0x1000), 0x17ff_fffc);
    }
}
