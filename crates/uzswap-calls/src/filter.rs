//! Finds the system calls that a seccomp filter allows, by running the filter as the kernel does.
//!
//! A filter is a program of classic BPF over one call: its number, the architecture, the address of
//! the instruction, six arguments (`linux/seccomp.h`, `linux/filter.h`). It has no loops.

use crate::Call;

/// An instruction, as the kernel's `sock_filter`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Instruction {
    /// The operation.
    pub code: u16,
    /// Instructions to skip if a comparison is true.
    pub if_true: u8,
    /// Instructions to skip if the comparison is false.
    pub if_false: u8,
    /// A number, or a place.
    pub k: u32,
}

/// `AUDIT_ARCH_X86_64` or `AUDIT_ARCH_AARCH64`.
const ARCHITECTURE: u32 = if cfg!(target_arch = "aarch64") { 0xc000_00b7 } else { 0xc000_003e };
/// The part of a filter's answer that is the action, and the two actions with which the kernel
/// makes the call.
const ACTION: u32 = 0xffff_0000;
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
/// Words that a filter may keep numbers in.
const WORDS: usize = 16;

/// True if a filter allows a call that is made at an address. A filter that cannot be followed
/// allows nothing.
pub fn allows(filter: &[Instruction], call: &Call, address: u64) -> bool {
    run(filter, call, address).is_some_and(|answer| matches!(answer & ACTION, ALLOW | LOG))
}

/// A word of the filter's input (`seccomp_data`), by its place in bytes.
fn load(call: &Call, address: u64, place: u32) -> Option<u32> {
    let half =
        |number: u64| if place.is_multiple_of(8) { number as u32 } else { (number >> 32) as u32 };
    match place {
        _ if !place.is_multiple_of(4) => None,
        0 => Some(call.number as u32),
        4 => Some(ARCHITECTURE),
        8 | 12 => Some(half(address)),
        _ => Some(half(*call.arguments.get((place as usize - 16) / 8)?)),
    }
}

fn run(filter: &[Instruction], call: &Call, address: u64) -> Option<u32> {
    let (mut a, mut x, mut words) = (0u32, 0u32, [0u32; WORDS]);
    let mut at = 0usize;
    loop {
        let Instruction { code, if_true, if_false, k } = *filter.get(at)?;
        at += 1;
        let jump = |holds: bool| usize::from(if holds { if_true } else { if_false });
        // One bit of the code selects the other operand: `x`, or the number.
        let other = if code & 0x08 != 0 { x } else { k };
        match code {
            0x20 => a = load(call, address, k)?,                  // ld [k]
            0x00 => a = k,                                        // ld #k
            0x01 => x = k,                                        // ldx #k
            0x60 => a = *words.get(k as usize)?,                  // ld M[k]
            0x61 => x = *words.get(k as usize)?,                  // ldx M[k]
            0x80 => a = SECCOMP_DATA_BYTES,                       // ld len
            0x81 => x = SECCOMP_DATA_BYTES,                       // ldx len
            0x02 => *words.get_mut(k as usize)? = a,              // st
            0x03 => *words.get_mut(k as usize)? = x,              // stx
            0x07 => x = a,                                        // tax
            0x87 => a = x,                                        // txa
            0x04 | 0x0c => a = a.wrapping_add(other),             // add
            0x14 | 0x1c => a = a.wrapping_sub(other),             // sub
            0x24 | 0x2c => a = a.wrapping_mul(other),             // mul
            0x34 | 0x3c => a = a.checked_div(other)?,             // div
            0x44 | 0x4c => a |= other,                            // or
            0x54 | 0x5c => a &= other,                            // and
            0x64 | 0x6c => a = a.checked_shl(other).unwrap_or(0), // lsh
            0x74 | 0x7c => a = a.checked_shr(other).unwrap_or(0), // rsh
            0xa4 | 0xac => a ^= other,                            // xor
            0x84 => a = a.wrapping_neg(),                         // neg
            0x05 => at = at.checked_add(k as usize)?,             // ja
            0x15 | 0x1d => at += jump(a == other),                // jeq
            0x25 | 0x2d => at += jump(a > other),                 // jgt
            0x35 | 0x3d => at += jump(a >= other),                // jge
            0x45 | 0x4d => at += jump(a & other != 0),            // jset
            0x06 => return Some(k),                               // ret #k
            0x16 => return Some(a),                               // ret a
            _ => return None,
        }
    }
}

/// Bytes of `seccomp_data`.
const SECCOMP_DATA_BYTES: u32 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    const fn of(code: u16, if_true: u8, if_false: u8, k: u32) -> Instruction {
        Instruction { code, if_true, if_false, k }
    }

    fn call(number: i64, arguments: [u64; 6]) -> Call {
        Call { number: number as u64, arguments, result: 0 }
    }

    #[test]
    fn a_list_of_numbers_allows_those() {
        let filter = [
            of(0x20, 0, 0, 4),
            of(0x15, 1, 0, ARCHITECTURE),
            of(0x06, 0, 0, 0),
            of(0x20, 0, 0, 0),
            of(0x15, 1, 0, libc::SYS_write as u32),
            of(0x15, 0, 1, libc::SYS_exit_group as u32),
            of(0x06, 0, 0, ALLOW),
            of(0x06, 0, 0, 0x0005_0001),
        ];
        assert!(allows(&filter, &call(libc::SYS_write, [0; 6]), 0));
        assert!(allows(&filter, &call(libc::SYS_exit_group, [0; 6]), 0));
        assert!(!allows(&filter, &call(libc::SYS_ioctl, [0; 6]), 0));
        assert!(!allows(&filter[..3], &call(libc::SYS_write, [0; 6]), 0), "it has no end");
    }

    #[test]
    fn both_halves_of_an_argument_are_seen() {
        // If the second argument is not 0x1_0000_0002, the call ends the process.
        let filter = [
            of(0x20, 0, 0, 24),
            of(0x15, 0, 3, 2),
            of(0x20, 0, 0, 28),
            of(0x15, 0, 1, 1),
            of(0x06, 0, 0, LOG),
            of(0x06, 0, 0, 0),
        ];
        assert!(allows(&filter, &call(1, [0, 0x1_0000_0002, 0, 0, 0, 0]), 0));
        assert!(!allows(&filter, &call(1, [0, 2, 0, 0, 0, 0]), 0));
        assert!(!allows(&filter, &call(1, [0, 0x1_0000_0003, 0, 0, 0, 0]), 0));
    }
}
