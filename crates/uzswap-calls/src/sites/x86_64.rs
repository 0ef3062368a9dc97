//! x86-64: the two bytes of a `syscall` may be part of another instruction. So each pair is decoded
//! from the beginning of its function, which the unwind tables give. The pair is a site only if an
//! instruction begins there, and that instruction is `syscall`.

use super::{Functions, Site};
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};
use std::ops::Range;

/// `syscall`.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov eax, imm32`, without the number.
pub(crate) const MOV_EAX: u8 = 0xb8;
/// Bytes of `mov eax, imm32`, and of the `jmp rel32` that replaces it.
pub(crate) const MOV_BYTES: usize = 5;
/// Bytes of the longest instruction.
pub(crate) const INSTRUCTION_BYTES: usize = 15;
/// Bytes of `jmp rel8`.
pub(crate) const JMP_NEAR_BYTES: usize = 2;
/// `xor eax, eax`, for `read`, number 0.
const XOR_EAX: [u8; 2] = [0x31, 0xc0];

/// `mov rax, 15`: the return from a signal's handler. It restores registers that belong to no call,
/// and must not trap. So it is no site.
const SIGRETURN: [u8; 7] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0];

/// The instruction before a `syscall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Number {
    /// `mov eax, NUMBER`.
    Moved(u32),
    /// `xor eax, eax`, which is too short for a long jump. But nearby, between two functions, there
    /// is space for a long jump.
    Cleared {
        /// The address of that space.
        room: usize,
    },
    /// `eax` has the number already, or gets it from another register. The instruction before the
    /// `syscall` has the same effect at any address.
    Before {
        /// The instruction's length.
        bytes: usize,
        /// The address of space for a long jump, if the instruction is shorter than a long jump.
        room: Option<usize>,
    },
    /// Something else.
    Unknown,
}

impl Number {
    /// The number, if it is known.
    pub fn known(self) -> Option<u32> {
        match self {
            Self::Moved(number) => Some(number),
            Self::Cleared { .. } => Some(0),
            Self::Before { .. } | Self::Unknown => None,
        }
    }

    /// True if the site becomes a trap.
    pub(crate) fn is_trap(self) -> bool {
        self == Self::Unknown
    }

    /// Bytes of the instruction before the `syscall` that is replaced.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Moved(_) => MOV_BYTES,
            Self::Before { bytes, .. } => bytes,
            Self::Cleared { .. } => XOR_EAX.len(),
            Self::Unknown => 0,
        }
    }
}

/// Makes the decoder's tables ahead of the decoder's first use. A child that is forked while a
/// thread makes the tables would wait for them for ever.
pub fn make_tables() {
    let _ = Decoder::new(64, &[], DecoderOptions::NONE);
}

/// The `syscall` instructions of a segment of code.
pub(super) fn sites_in(range: &Range<usize>, functions: Option<&Functions<'_>>) -> Vec<Site> {
    // SAFETY: a segment of code of a mapped file, which may be read; a file that is unmapped
    // meanwhile is the caller's to exclude.
    let bytes = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) };
    let function_at = |address| {
        let function = functions.and_then(|all| all.around(address))?;
        range.contains(&function.start).then_some(function.start)
    };
    let mut sites = Vec::new();
    let mut rooms = Vec::new();
    for at in memchr::memmem::find_iter(bytes, &SYSCALL) {
        if bytes[..at].ends_with(&SIGRETURN) {
            continue;
        }
        let number = number_before(bytes, at);
        let address = range.start + at;
        let (is_site, before) = match function_at(address) {
            Some(start) => {
                let before = before_call(&bytes[start - range.start..], start, address);
                (before.is_some(), before.flatten())
            }
            None => (number.is_some() || is_checked(&bytes[at + SYSCALL.len()..]), None),
        };
        if !is_site {
            continue;
        }
        let is_cleared = bytes[..at].ends_with(&XOR_EAX);
        let movable = before.filter(|before| does_anywhere(before, address));
        // True behind the end of a function, or of a part of a function. Elsewhere padding is no
        // space: code without an entry in the tables may run into it, as Bun's does.
        let is_behind_end = |at: usize| {
            let address = range.start + at;
            let function = functions.and_then(|all| function_before(all, address));
            function.filter(|one| range.contains(&one.start)).is_some_and(|function| {
                let (start, end) = (function.start, function.end.min(address));
                is_padding(&bytes[end - range.start..at], end)
                    && ends_at(&bytes[start - range.start..], &function, end)
            })
        };
        let is_short = is_cleared || movable.is_some_and(|one| one.len() < MOV_BYTES);
        let needs_room = number.is_none() && is_short;
        let room = needs_room.then(|| room_near(bytes, at, &rooms, is_behind_end)).flatten();
        rooms.extend(room);
        let room = room.map(|room| range.start + room);
        let cleared = room.filter(|_| is_cleared).map(|room| Number::Cleared { room });
        let before = movable
            .map(|one| Number::Before { bytes: one.len(), room })
            .filter(|_| room.is_some() || !is_short);
        let number = number.map(Number::Moved).or(cleared).or(before);
        sites.push(Site { address, number: number.unwrap_or(Number::Unknown) });
    }
    sites
}

/// True if code soon compares `rax` with -4095 or -4096, by which a program checks if a call has
/// failed. Go needs this: it has no unwind tables, and makes calls of all numbers by one function.
/// Bun first copies the answer to another register.
fn is_checked(code: &[u8]) -> bool {
    const INSTRUCTIONS: usize = 3;
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    let next = || decoder.can_decode().then(|| decoder.decode());
    let is_check = |one: Instruction| {
        one.code() == Code::Cmp_RAX_imm32 && [-4095, -4096].contains(&(one.immediate32to64()))
    };
    std::iter::from_fn(next).take(INSTRUCTIONS).any(is_check)
}

/// The number that the instruction before has put into `eax`. No call's number is 512 or more: a
/// larger number shows that these bytes are another instruction.
fn number_before(bytes: &[u8], at: usize) -> Option<u32> {
    let mov = bytes[at.checked_sub(MOV_BYTES)?..at].first_chunk::<MOV_BYTES>()?;
    let number = u32::from_le_bytes([mov[1], mov[2], mov[3], mov[4]]);
    (mov[0] == MOV_EAX && number < 512).then_some(number)
}

/// The maximum bytes between two functions.
const GAP_MAX: usize = 32;

/// The function around an address, or close before it.
fn function_before(functions: &Functions<'_>, address: usize) -> Option<Range<usize>> {
    (0..=GAP_MAX).find_map(|back| functions.around(address - back))
}

/// Space for a long jump, within reach of a two-byte jump before `at`. The space is an assembler's
/// padding, which no thread executes.
fn room_near(
    bytes: &[u8],
    at: usize,
    taken: &[usize],
    is_behind_end: impl Fn(usize) -> bool,
) -> Option<usize> {
    // No-operations of 9 to 5 bytes, by their first bytes.
    const PADDING: [&[u8]; 4] = [
        &[0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
        &[0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
        &[0x0f, 0x1f, 0x80, 0, 0, 0, 0],
        &[0x0f, 0x1f, 0x44, 0, 0],
    ];
    let reach = at.saturating_sub(120)..(at + 120).min(bytes.len());
    reach.into_iter().find(|room| {
        let is_padding = PADDING.iter().any(|padding| bytes[*room..].starts_with(padding));
        // Prefixes by which assemblers make no-operations longer.
        let before = bytes[..*room].iter().rev();
        let prefixes = before.take_while(|byte| matches!(byte, 0x66 | 0x2e)).count();
        is_padding && !taken.contains(room) && is_behind_end(room - prefixes)
    })
}

/// True if an instruction ends at an address and never continues there: a return, a jump, or at the
/// end of the function a call, which then never returns. The function is decoded from its
/// beginning.
fn ends_at(code: &[u8], function: &Range<usize>, address: usize) -> bool {
    let mut decoder = Decoder::with_ip(64, code, function.start as u64, DecoderOptions::NONE);
    let mut last = FlowControl::Next;
    while decoder.ip() < address as u64 && decoder.can_decode() {
        last = decoder.decode().flow_control();
    }
    let is_end = match last {
        FlowControl::Return | FlowControl::UnconditionalBranch => true,
        FlowControl::Call
        | FlowControl::IndirectCall
        | FlowControl::IndirectBranch
        | FlowControl::Exception => address == function.end,
        _ => false,
    };
    is_end && decoder.ip() == address as u64
}

/// True if all code from an address on is padding.
fn is_padding(code: &[u8], address: usize) -> bool {
    let mut decoder = Decoder::with_ip(64, code, address as u64, DecoderOptions::NONE);
    let mut all = std::iter::from_fn(|| decoder.can_decode().then(|| decoder.decode().mnemonic()));
    all.all(|one| matches!(one, Mnemonic::Nop | Mnemonic::Int3))
}

/// The instruction before the `syscall` at an address, by decoding the function from its beginning.
/// `None` if no `syscall` begins there; inner `None` if the `syscall` is the function's first
/// instruction.
fn before_call(code: &[u8], start: usize, address: usize) -> Option<Option<Instruction>> {
    let mut decoder = Decoder::with_ip(64, code, start as u64, DecoderOptions::NONE);
    let mut before = None;
    while decoder.ip() < address as u64 && decoder.can_decode() {
        before = Some(decoder.decode());
    }
    let is_call = decoder.ip() == address as u64 && decoder.decode().code() == Code::Syscall;
    is_call.then_some(before)
}

/// True if an instruction that ends at an address has the same effect in a stub, and leaves space
/// for a jump, near or far.
fn does_anywhere(instruction: &Instruction, address: usize) -> bool {
    instruction.next_ip() == address as u64
        && instruction.len() >= JMP_NEAR_BYTES
        && instruction.flow_control() == FlowControl::Next
        && !instruction.is_ip_rel_memory_operand()
        && instruction.stack_pointer_increment() == 0
}

/// The most bytes between the start of the instruction that sets a call's number and the `syscall`.
/// Six arguments may be set in between.
const BEFORE: usize = 64;

/// Bytes that two parts of code share if the parts are searched one after the other.
pub const OVERLAP: usize = BEFORE + SYSCALL.len();

/// `mov rax, imm32`, without the number.
const MOV_RAX: [u8; 3] = [0x48, 0xc7, 0xc0];

/// True if code makes a wanted call: a run of instructions begins by setting the call's number, and
/// contains a `syscall`.
pub fn makes_call(code: &[u8], wants: impl Fn(u32) -> bool) -> bool {
    memchr::memmem::find_iter(code, &SYSCALL).any(|at| {
        let before = &code[at.saturating_sub(BEFORE)..at + SYSCALL.len()];
        before.windows(MOV_BYTES).enumerate().any(|(from, mov)| {
            let number = u32::from_le_bytes([mov[1], mov[2], mov[3], mov[4]]);
            let is_mov = mov[0] == MOV_EAX || before[..=from].ends_with(&MOV_RAX);
            let behind = &before[from + MOV_BYTES..];
            is_mov && number < 512 && wants(number) && runs_into_call(behind)
        })
    })
}

/// True if the last instruction of these bytes is `syscall`, and no other instruction jumps.
fn runs_into_call(code: &[u8]) -> bool {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.mnemonic() == Mnemonic::Syscall {
            return !decoder.can_decode();
        }
        if instruction.is_invalid() || instruction.flow_control() != FlowControl::Next {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sites::modules;

    #[test]
    fn the_c_library_has_hundreds_most_with_their_number() {
        let modules = modules();
        let libc = modules.iter().find(|module| module.name.contains("libc.so")).unwrap();
        let sites = libc.sites();
        let numbered = sites.iter().filter(|site| site.number.known().is_some()).count();
        assert!(sites.len() > 300 && numbered * 10 > sites.len() * 7, "{numbered}/{}", sites.len());
        let has = |number: i64| sites.iter().any(|site| site.number.known() == Some(number as u32));
        assert!([libc::SYS_read, libc::SYS_mmap, libc::SYS_futex].into_iter().all(has));
        // The function `syscall` has such a site. Most other functions with such a site wait for a
        // lock.
        let moved = sites.iter().filter(|site| matches!(site.number, Number::Before { .. }));
        let moved = moved.count();
        assert!(moved > 20, "{moved}");
    }

    #[test]
    fn code_without_tables_is_known_by_the_check_of_its_answer() {
        // `cmp rax, -4095` alone, then the same behind `mov r12, rax`, then behind three other
        // instructions.
        let check = [0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff, 0x90];
        let kept = [&[0x49, 0x89, 0xc4][..], &check].concat();
        let far = [&[0x90; 3][..], &check].concat();
        assert_eq!([&check[..], &kept, &far, &[]].map(is_checked), [true, true, false, false]);
        // cmp rax, 4095
        assert!(!is_checked(&[0x48, 0x3d, 0xff, 0x0f, 0, 0, 0x90]));
    }

    #[test]
    fn padding_that_code_runs_into_is_no_room() {
        // int3; nop word [rax + rax]; a conditional move.
        assert!(is_padding(&[0xcc, 0xcc], 0x1000) && is_padding(&[], 0x1000));
        assert!(is_padding(&[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0], 0x1000));
        assert!(!is_padding(&[0x48, 0x0f, 0x42, 0xd1, 0x90], 0x1000));
    }

    #[test]
    fn code_of_no_file_is_searched_and_its_padding_stays() {
        let padding = [0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
        let call = [0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff, 0x90];
        let code: Vec<u8> = [&padding[..], &call].concat();
        let start = code.as_ptr() as usize;
        let sites = sites_in(&(start..start + code.len()), None);
        assert_eq!(sites.len(), 1);
        assert!(matches!(sites[0].number, Number::Unknown));
    }

    #[test]
    fn bytes_inside_another_instruction_are_no_site() {
        // mov eax, 0x050f ; ret: decoded, the two bytes are a number.
        let code = [0xb8, 0x0f, 0x05, 0, 0, 0xc3];
        assert!(before_call(&code, 0x1000, 0x1001).is_none());
        // mov eax, 1 ; syscall
        let code = [0xb8, 1, 0, 0, 0, 0x0f, 0x05];
        assert!(before_call(&code, 0x1000, 0x1005).is_some());
        assert_eq!(number_before(&code, 5), Some(1));
        assert_eq!(number_before(&code[1..], 4), None);
        assert!(is_checked(&[0x48, 0x3d, 1, 0xf0, 0xff, 0xff, 0x90]));
        assert!(!is_checked(&[0x48, 0x3d, 1, 0xf0, 0xff, 0x7f]) && !is_checked(&[0x48, 0x3d]));
    }

    #[test]
    fn a_call_is_found_by_its_number() {
        let is_read = |number| number == 0;
        let mov = [0xb8, 0, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05];
        let mov_long = [0x48, 0xc7, 0xc0, 0, 0, 0, 0, 0x0f, 0x05];
        assert!(makes_call(&mov, is_read) && makes_call(&mov_long, is_read));
        assert!(!makes_call(&mov, |number| number == 1) && !makes_call(&mov[5..], is_read));
        // The two bytes of `syscall` are part of another instruction, or an instruction before them
        // jumps.
        let inside = [&mov[..5], &[0x48, 0xb9, 1, 2], &SYSCALL, &[3, 4, 5, 6]].concat();
        let jump = [&mov[..5], &[0xeb, 0], &SYSCALL[..]].concat();
        assert!(!makes_call(&inside, is_read) && !makes_call(&jump, is_read));
        let far = [&mov[..5], &[0x90; BEFORE], &SYSCALL].concat();
        assert!(!makes_call(&far, is_read));
    }
}
