//! aarch64: all instructions have four bytes, and begin at multiples of four. So a `svc #0` is a
//! site unless it may be a constant. Linkers put constants into the segment of the code, before or
//! behind all functions. A replaced constant would be wrong data.

use super::{Functions, Site};
use gimli::{EhFrame, EhFrameHdr, NativeEndian, UnwindSection};
use std::ops::Range;

/// `svc #0`.
pub const SYSCALL: [u8; 4] = [0x01, 0x00, 0x00, 0xd4];
const SVC: u32 = u32::from_le_bytes(SYSCALL);
const INSTRUCTION: usize = SYSCALL.len();

/// `mov x8, #139`: the return from a signal's handler. It restores registers that belong to no
/// call, and unwinders know it by its bytes. So it is no site.
const SIGRETURN: u32 = 0xd280_1168;

/// `cmn x0, #4095` and `cmn x0, #1, lsl #12`: programs check by them if a call has failed.
const CHECKS: [u32; 2] = [0xb13f_fc1f, 0xb140_041f];

/// How a call gets its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// In `x8`, which the kernel leaves as it is. So a site is replaced without its number.
    Register,
}

impl Number {
    /// The number, if it is known.
    pub fn known(self) -> Option<u32> {
        None
    }

    /// True if the site becomes a trap.
    pub(crate) fn is_trap(self) -> bool {
        false
    }
}

/// Nothing is decoded by tables.
pub fn make_tables() {}

/// The system calls of a segment of code.
pub(super) fn sites_in(range: &Range<usize>, functions: Option<&Functions<'_>>) -> Vec<Site> {
    let start = range.start.next_multiple_of(INSTRUCTION);
    // SAFETY: a segment of code of a mapped file, which may be read; a file that is unmapped
    // meanwhile is the caller's to exclude.
    let code = unsafe {
        let count = range.end.saturating_sub(start) / INSTRUCTION;
        std::slice::from_raw_parts(start as *const u32, count)
    };
    let is_function = |address| functions.is_some_and(|all| all.around(address).is_some());
    let all_functions = functions.and_then(span).unwrap_or(range.clone());
    let is_site = |at: usize| {
        let is_return = at > 0 && code[at - 1] == SIGRETURN;
        let address = start + at * INSTRUCTION;
        let is_call = || number_before(&code[..at]).is_some() || is_checked(&code[at + 1..]);
        !is_return && (is_function(address) || all_functions.contains(&address) && is_call())
    };
    let calls = memchr::memmem::find_iter(bytes_of(code), &SYSCALL);
    let calls = calls.filter(|at| at.is_multiple_of(INSTRUCTION)).map(|at| at / INSTRUCTION);
    let calls = calls.filter(|at| is_site(*at));
    calls.map(|at| Site { address: start + at * INSTRUCTION, number: Number::Register }).collect()
}

/// The addresses from the first function of the tables to the end of the last.
fn span(functions: &Functions<'_>) -> Option<Range<usize>> {
    let bases = &functions.bases;
    let index = EhFrameHdr::new(functions.index, NativeEndian).parse(bases, 8).ok()?;
    let table = index.table()?;
    let (first, _) = table.iter(bases).next().ok()??;
    let last = table.lookup(u64::MAX, bases).and_then(|last| table.pointer_to_offset(last)).ok()?;
    let frames = EhFrame::new(functions.frames, NativeEndian);
    let last = frames.fde_from_offset(bases, last, EhFrame::cie_from_offset).ok()?;
    let end = last.initial_address().checked_add(last.len())?;
    Some(first.direct().ok()? as usize..end as usize)
}

fn bytes_of(code: &[u32]) -> &[u8] {
    // SAFETY: the same memory; any bytes are valid.
    unsafe { std::slice::from_raw_parts(code.as_ptr().cast(), size_of_val(code)) }
}

/// True if code soon checks if a call has failed. Go has no unwind tables, and makes calls of all
/// numbers by one function.
fn is_checked(code: &[u32]) -> bool {
    const INSTRUCTIONS: usize = 3;
    code.iter().take(INSTRUCTIONS).any(|one| CHECKS.contains(one))
}

/// The most instructions between the one that sets a call's number and the `svc`. Six arguments may
/// be set in between.
const BEFORE: usize = 16;

/// Bytes that two parts of code share if the parts are searched one after the other.
pub const OVERLAP: usize = (BEFORE + 1) * INSTRUCTION;

/// The number that the last instructions have put into `x8`, without a branch in between.
fn number_before(code: &[u32]) -> Option<u32> {
    /// All calls have lower numbers.
    const NUMBERS: u32 = 512;
    /// `mov x8` or `mov w8`, without the number.
    const MOVES: [u32; 2] = [0xd280_0008, 0x5280_0008];
    for instruction in code.iter().rev().take(BEFORE) {
        let number = instruction >> 5 & 0xffff;
        if MOVES.contains(&(instruction & !(0xffff << 5))) {
            return (number < NUMBERS).then_some(number);
        }
        if is_branch(*instruction) {
            return None;
        }
    }
    None
}

/// True for branches, exceptions, and codes that are no instruction.
fn is_branch(instruction: u32) -> bool {
    let group = instruction >> 25 & 0xf;
    // The group of branches and exceptions also has the registers of the system, and hints.
    let is_system = instruction >> 22 == 0b11_0101_0100;
    group & 0b1110 == 0b1010 && !is_system || group & 0b1110 == 0
}

/// True if code makes a wanted call: a run of instructions sets the call's number, and contains a
/// `svc`.
pub fn makes_call(code: &[u8], wants: impl Fn(u32) -> bool) -> bool {
    let word = |bytes: &[u8; INSTRUCTION]| u32::from_le_bytes(*bytes);
    let code: Vec<u32> = code.as_chunks().0.iter().map(word).collect();
    let calls = code.iter().enumerate().filter(|(_, one)| **one == SVC);
    calls.filter_map(|(at, _)| number_before(&code[..at])).any(wants)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sites::modules;

    const READ: u32 = 0xd280_07e8;
    const BRANCH: u32 = 0x1400_0004;
    const CBZ: u32 = 0xb400_0040;
    const NOP: u32 = 0xd503_201f;
    const BTI: u32 = 0xd503_245f;
    const MOV: u32 = 0xaa01_03e0;

    #[test]
    fn the_c_library_has_hundreds() {
        let modules = modules();
        let libc = modules.iter().find(|module| module.name.contains("libc.so")).unwrap();
        let sites = libc.sites();
        assert!(sites.len() > 300, "{}", sites.len());
        assert!(sites.iter().all(Site::is_there));
    }

    #[test]
    fn a_number_is_set_in_the_same_run_of_instructions() {
        assert_eq!(number_before(&[READ]), Some(63));
        assert_eq!(number_before(&[READ, MOV, NOP, BTI]), Some(63));
        assert_eq!(number_before(&[READ, BRANCH, MOV]), None);
        assert_eq!(number_before(&[READ, CBZ]), None);
        assert_eq!(number_before(&[READ, 0]), None);
        assert_eq!(number_before(&[&[READ][..], &[MOV; BEFORE]].concat()), None);
        // A number that no call has.
        assert_eq!(number_before(&[0xd29f_ffe8]), None);
    }

    /// A linker may put it into the segment of the code.
    static CONSTANT: [u32; 4] = [BRANCH, READ, SVC, CHECKS[0]];

    #[test]
    fn a_constant_behind_all_functions_is_no_site() {
        let modules = modules();
        let program = modules.iter().find(|module| module.name.is_empty()).unwrap();
        let constant = CONSTANT.as_ptr() as usize..CONSTANT.as_ptr_range().end as usize;
        assert_eq!(std::hint::black_box(&CONSTANT)[2], SVC);
        assert!(!program.sites().iter().any(|site| constant.contains(&site.address)));
        assert!(!program.sites().is_empty());
    }

    #[test]
    fn a_call_is_found_by_its_number() {
        let code = [NOP, READ, MOV, SVC, NOP];
        assert!(makes_call(bytes_of(&code), |number| number == 63));
        assert!(!makes_call(bytes_of(&code), |number| number == 64));
        assert!(!makes_call(bytes_of(&code[2..]), |_| true));
    }

    #[test]
    fn code_of_no_file_is_searched_and_constants_are_no_sites() {
        let code =
            [SVC, 0, READ, MOV, SVC, NOP, CHECKS[0], BRANCH, SVC, CHECKS[0], SVC, SIGRETURN, SVC];
        let start = code.as_ptr() as usize;
        let sites = sites_in(&(start..start + size_of_val(&code)), None);
        let found: Vec<usize> = sites.iter().map(|site| (site.address - start) / 4).collect();
        assert_eq!(found, [4, 8]);
    }
}
