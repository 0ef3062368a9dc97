//! x86-64.
//!
//! ```text
//! mov eax, N ; syscall      b8 NN NN NN NN 0f 05
//! jmp stub ; ud2            e9 DD DD DD DD 0f 0b
//! xor eax, eax ; syscall    31 c0 0f 05
//! jmp near ; ud2            eb DD 0f 0b             near, between two functions: jmp stub
//! another one ; syscall     the stub has it, too
//! jmp stub ; ud2            or, if it is shorter, jmp near ; ud2
//! syscall                   0f 05
//! ud2                       0f 0b
//! ```
//! A thread may stand between `mov` and `syscall`, have its call restarted, or jump there. Such a
//! thread executes `ud2` (SIGILL), and continues in the stub behind the `mov`. A thread that waits
//! in the kernel returns behind the `syscall`, where the code is unchanged.

use crate::entry;
use crate::sites::{INSTRUCTION_BYTES, JMP_NEAR_BYTES, MOV_BYTES, MOV_EAX, Number, SYSCALL, Site};

/// Bytes of a stub: 15 for the instruction before the `syscall`, 7 and 14 to continue, 2 and 5 for
/// the bare call; rounded up.
pub const STUB: usize = 64;
/// The offset of the bare `syscall` in a stub.
pub const BARE: usize = RESUME + 7 + 14;
/// The offset at which a thread continues that executed the `ud2` of a site. An instruction before
/// it that is shorter stands behind no-operations.
pub const RESUME: usize = INSTRUCTION_BYTES;
/// The offset of `mov eax` in a stub.
const MOV: usize = RESUME - MOV_BYTES;
const _: () = assert!(BARE + SYSCALL.len() + MOV_BYTES <= STUB);
/// The reach of a jump, less the size of a module and its stubs.
pub const REACH: usize = (2 << 30) - (64 << 20);

/// The number in a stub whose call's number is not in the code.
const UNKNOWN: u32 = u32::MAX;
/// All calls have lower numbers.
const NUMBERS: u32 = 512;

/// `nop`, `jmp rel32`, `jmp rel8`, the second byte of `ud2`.
const NOP: u8 = 0x90;
const JMP: u8 = 0xe9;
const JMP_NEAR: u8 = 0xeb;
const UD2: u8 = 0x0b;

/// The number of the call whose stub this is, if it is known.
///
/// # Safety
/// A stub is there.
pub unsafe fn number_in(stub: usize) -> Option<u32> {
    // SAFETY: the caller's promise: these are the first bytes.
    let before = unsafe { *(stub as *const [u8; RESUME]) };
    let [.., first, a, b, c, d] = before;
    let number = u32::from_le_bytes([a, b, c, d]);
    let is_mov = first == MOV_EAX && before[..MOV].iter().all(|byte| *byte == NOP);
    (is_mov && number < NUMBERS).then_some(number)
}

/// The code of a site's stub.
pub fn stub_code(site: &Site, stub: usize) -> [u8; STUB] {
    let mut code = [0xcc; STUB];
    code[..RESUME].fill(NOP);
    match site.number {
        Number::Before { bytes, .. } => {
            // SAFETY: code of a mapped file, right before the `syscall`.
            let before =
                unsafe { std::slice::from_raw_parts((site.address - bytes) as *const u8, bytes) };
            code[RESUME - bytes..RESUME].copy_from_slice(before);
        }
        number => {
            code[MOV] = MOV_EAX;
            let number = number.known().unwrap_or(UNKNOWN);
            code[MOV + 1..RESUME].copy_from_slice(&number.to_le_bytes());
        }
    }
    let (lea, jump) = code[RESUME..BARE].split_at_mut(7);
    // lea rcx, [rip + distance], counted from its end
    lea[..3].copy_from_slice(&[0x48, 0x8d, 0x0d]);
    lea[3..].copy_from_slice(&(jump.len() as u32).to_le_bytes());
    // jmp [rip]
    jump[..6].copy_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
    let entry: unsafe extern "C" fn() = entry::entry;
    jump[6..].copy_from_slice(&(entry as usize as u64).to_le_bytes());
    code[BARE..BARE + 2].copy_from_slice(&SYSCALL);
    code[BARE + 2] = JMP;
    let back = distance(stub + BARE + 7, site.address + SYSCALL.len());
    code[BARE + 3..BARE + 7].copy_from_slice(&back);
    code
}

/// Replaces a site.
///
/// # Safety
/// The code at the site is writable, and no other thread runs it.
pub unsafe fn replace(site: &Site, stub: usize) {
    let bytes = site.number.bytes();
    let first = site.address - bytes;
    let stub = match site.number {
        Number::Before { .. } => stub + RESUME - bytes,
        _ => stub + MOV,
    };
    match site.number {
        Number::Moved(_) | Number::Before { room: None, .. } => {
            put(first, &[JMP]);
            put(first + 1, &distance(first + MOV_BYTES, stub));
        }
        Number::Cleared { room } | Number::Before { room: Some(room), .. } => {
            put(room, &[JMP]);
            put(room + 1, &distance(room + MOV_BYTES, stub));
            put(first, &[JMP_NEAR]);
            put(first + 1, &distance(first + JMP_NEAR_BYTES, room)[..1]);
        }
        Number::Unknown => {}
    }
    put(site.address + 1, &[UD2]);
}

/// True if the instruction is a trap.
///
/// # Safety
/// Code of two bytes is there.
pub unsafe fn is_trap(at: usize) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (at as *const [u8; 2]).read_unaligned() == [SYSCALL[0], UD2] }
}

/// Makes a trap a `syscall` again. One byte changes, so threads may run the code meanwhile.
///
/// # Safety
/// A trap of ours is there, and may be written.
pub unsafe fn end_trap(at: usize) {
    put(at + 1, &SYSCALL[1..]);
}

/// Addresses in all pages that [`replace`] changes.
pub fn changed(site: &Site) -> [usize; 4] {
    let room = match site.number {
        Number::Cleared { room } | Number::Before { room: Some(room), .. } => room,
        _ => site.address,
    };
    [site.address - site.number.bytes(), site.address + 1, room, room + MOV_BYTES - 1]
}

/// The processor keeps its instructions like its data.
pub fn forget_instructions(_start: usize, _bytes: usize) {}

fn distance(from: usize, to: usize) -> [u8; 4] {
    (to.wrapping_sub(from) as i64 as i32).to_le_bytes()
}

fn put(at: usize, bytes: &[u8]) {
    for (at, value) in (at..).zip(bytes) {
        // SAFETY: by `replace`: writable code, which no other thread writes or runs.
        unsafe { (at as *mut u8).write_volatile(*value) };
    }
}
