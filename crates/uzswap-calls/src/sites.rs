//! Finds the `syscall` instructions of this process.
//!
//! The two bytes `0f 05` may be part of another instruction. So each pair is decoded from the
//! beginning of its function, which the unwind tables give. The pair is a site only if an
//! instruction begins there, and that instruction is `syscall`.

mod unlisted;
mod written;

pub use unlisted::{mapped_code, unlisted};
pub use written::{BEFORE, makes_call};

use gimli::{BaseAddresses, EhFrame, EhFrameHdr, NativeEndian, UnwindSection};
use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};
use object::LittleEndian;
use object::elf::{FileHeader64, PF_X, PT_GNU_EH_FRAME, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use uzswap_sys::map::{self, PAGE_BYTES};

/// `syscall`.
pub(crate) const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov eax, imm32`, without the number.
pub(crate) const MOV_EAX: u8 = 0xb8;
/// Bytes of `mov eax, imm32`, and of the `jmp rel32` that replaces it.
pub(crate) const MOV_BYTES: usize = 5;
/// Bytes of `jmp rel8`.
pub(crate) const JMP_NEAR_BYTES: usize = 2;
/// `xor eax, eax`, for `read`, number 0.
pub(crate) const XOR_EAX: [u8; 2] = [0x31, 0xc0];

/// `mov rax, 15`: the return from a signal's handler. It restores registers that belong to no call,
/// and must not trap. So it is no site.
const SIGRETURN: [u8; 7] = [0x48, 0xc7, 0xc0, 15, 0, 0, 0];

/// A `syscall` instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Its address.
    pub address: usize,
    /// How the call's number gets into `eax`.
    pub number: Number,
}

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
        /// The instruction's length, at most five, the length of a `mov`.
        bytes: usize,
        /// The address of space for a long jump, if the instruction is shorter than a long jump.
        room: Option<usize>,
    },
    /// Something else.
    Unknown,
}

impl Site {
    /// True if a `syscall` is there, in code that is mapped.
    pub fn is_there(&self) -> bool {
        // SAFETY: mapped code, which may be read where it was searched.
        unsafe { (self.address as *const [u8; SYSCALL.len()]).read_unaligned() == SYSCALL }
    }
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

/// A mapped file with code.
#[derive(Debug)]
pub struct Module {
    /// Its name for the dynamic linker; empty for the program itself.
    pub name: String,
    /// Its addresses, from the first to the last.
    pub range: Range<usize>,
    /// The maximum number of bytes that its variables take in each thread, if it was loaded with
    /// the program.
    pub thread_bytes: usize,
    /// True if the Go compiler made it: Go makes calls on stacks of 2 KiB.
    pub is_go: bool,
    /// Its constants that hold addresses (RELRO), without those that the dynamic linker reads. They
    /// do not change after the start.
    pub constants: Vec<Range<usize>>,
    code: Vec<Range<usize>>,
    /// The memory from the table of functions to the end of its segment.
    tables: Option<Range<usize>>,
}

/// All files that the dynamic linker lists, and the kernel's own code (vDSO), which makes a system
/// call where it cannot answer itself.
pub fn modules() -> Vec<Module> {
    unsafe extern "C" fn add(
        info: *mut libc::dl_phdr_info,
        _: usize,
        modules: *mut c_void,
    ) -> c_int {
        // SAFETY: the linker passes a description that is valid during the call, and the pointer
        // that `modules` passes below.
        unsafe { (*modules.cast::<Vec<Module>>()).push(Module::of(&*info)) };
        0
    }
    let mut found: Vec<Module> = Vec::new();
    // SAFETY: the function takes the pointer that is passed here.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut found).cast()) };
    found
}

/// Makes the decoder's tables ahead of the decoder's first use. A child that is forked while a
/// thread makes the tables would wait for them for ever.
pub fn make_tables() {
    let _ = Decoder::new(64, &[], DecoderOptions::NONE);
}

/// The `syscall` instructions of a part of a file that has just been mapped as code, from an offset
/// in the file on. No thread runs it yet.
///
/// A mapping may be longer than its file: the dynamic linker maps the addresses of all segments at
/// first. Memory behind the file's end cannot be read.
///
/// # Errors
/// The file's length is not known.
pub fn of_segment(
    mapped: &Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<Vec<Site>> {
    let length = rustix::fs::fstat(file)?.st_size as u64;
    let end = mapped.start.saturating_add(length.saturating_sub(offset) as usize);
    let tables = Tables::of_file(mapped.start, file, offset, length);
    let functions = tables.as_ref().and_then(|tables| Functions::new(tables.start, tables.bytes()));
    Ok(sites_in(&(mapped.start..mapped.end.min(end)), functions.as_ref()))
}

/// The unwind tables of a file. They are mapped only while we read them.
struct Tables {
    /// The address that their first byte has, or will have, beside the code.
    start: usize,
    /// The mapping of the tables, from the start of their page.
    map: Range<usize>,
    /// Bytes before the tables in their first page.
    before: usize,
}

impl Tables {
    /// The tables of a file whose code at `offset` is mapped at an address. `None` if the dynamic
    /// linker does not load such a file, or if the file lacks a part of its tables.
    fn of_file(address: usize, file: BorrowedFd<'_>, offset: u64, file_bytes: u64) -> Option<Self> {
        const PAGE: u64 = 4096;
        let mut head = [0; 4096];
        let read = rustix::io::pread(file, &mut head, 0).ok()?;
        let head = &head[..read];
        let headers = FileHeader64::<LittleEndian>::parse(head).ok()?;
        let headers = headers.program_headers(LittleEndian, head).ok()?;
        let value = |header: &ProgramHeader64<LittleEndian>| {
            let [at, place, bytes] = [header.p_vaddr, header.p_offset, header.p_filesz];
            [at, place, bytes].map(|number| number.get(LittleEndian))
        };
        let of_kind = |kind| headers.iter().filter(move |one| one.p_type(LittleEndian) == kind);
        let is_this = |one: &&ProgramHeader64<LittleEndian>| {
            let [_, place, bytes] = value(one);
            let pages = place / PAGE * PAGE..place.saturating_add(bytes);
            one.p_flags(LittleEndian) & PF_X != 0 && pages.contains(&offset)
        };
        let [at, place, _] = value(of_kind(PT_LOAD).find(is_this)?);
        let base = (address as u64).wrapping_sub(at.wrapping_sub(place).wrapping_add(offset));
        let [index_at, ..] = value(of_kind(PT_GNU_EH_FRAME).next()?);
        // The frames lie behind their index, in the same segment.
        let is_whole = |place: u64, bytes| place.checked_add(bytes) <= Some(file_bytes);
        let mut segments = of_kind(PT_LOAD).map(value);
        let [at, place, bytes] = segments.find(|[at, place, bytes]| {
            (*at..at.saturating_add(*bytes)).contains(&index_at) && is_whole(*place, *bytes)
        })?;
        let place = place + (index_at - at);
        let before = (place % PAGE) as usize;
        let length = before + (at + bytes - index_at) as usize;
        let (any, flags) = (std::ptr::null_mut(), MapFlags::PRIVATE);
        // SAFETY: a new mapping, of a loaded file, which nobody is expected to truncate.
        let start =
            unsafe { mm::mmap(any, length, ProtFlags::READ, flags, file, place - before as u64) };
        let start = start.ok()? as usize;
        let index_at = base.wrapping_add(index_at) as usize;
        Some(Self { start: index_at, map: start..start + length, before })
    }

    fn bytes(&self) -> &[u8] {
        let start = self.map.start + self.before;
        // SAFETY: the range is mapped while this value exists.
        unsafe { std::slice::from_raw_parts(start as *const u8, self.map.end - start) }
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        // SAFETY: `of_file` mapped the range. Slices of it from `bytes` borrow `self`, so none is
        // left. An error would leave it mapped.
        let _ = unsafe { mm::munmap(self.map.start as *mut c_void, self.map.len()) };
    }
}

impl Module {
    /// # Safety
    /// The description is the dynamic linker's.
    unsafe fn of(info: &libc::dl_phdr_info) -> Self {
        let base = info.dlpi_addr as usize;
        // SAFETY: the linker's promise; both live as long as the file is mapped.
        let (name, headers) = unsafe {
            let name = if info.dlpi_name.is_null() { c"" } else { CStr::from_ptr(info.dlpi_name) };
            (name, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()))
        };
        let range = |header: &libc::Elf64_Phdr| {
            let start = base + header.p_vaddr as usize;
            start..start + header.p_memsz as usize
        };
        let of_kind = |kind| headers.iter().filter(move |header| header.p_type == kind).map(range);
        let of_threads = headers.iter().filter(|header| header.p_type == libc::PT_TLS);
        let thread_bytes = of_threads.map(|header| header.p_memsz + header.p_align).sum::<u64>();
        let is_code = |header: &&libc::Elf64_Phdr| {
            header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_X != 0
        };
        let tables = of_kind(libc::PT_GNU_EH_FRAME).next().and_then(|tables| {
            // The frames lie behind their index, in the same segment.
            let mut of_file = of_kind(libc::PT_LOAD);
            let segment = of_file.find(|segment| segment.contains(&tables.start))?;
            Some(tables.start..segment.end)
        });
        let whole = of_kind(libc::PT_LOAD)
            .reduce(|whole, part| whole.start.min(part.start)..whole.end.max(part.end));
        let code = headers.iter().filter(is_code).map(range).collect();
        let linkers = of_kind(libc::PT_DYNAMIC).chain(of_kind(libc::PT_TLS)).collect::<Vec<_>>();
        let constants = of_kind(libc::PT_GNU_RELRO).flat_map(|part| map::cut(part, &linkers));
        Self {
            name: name.to_string_lossy().into_owned(),
            range: whole.unwrap_or_default(),
            thread_bytes: thread_bytes as usize,
            is_go: headers.iter().any(|header| {
                // SAFETY: notes are in a segment of the file, which is mapped.
                header.p_type == libc::PT_NOTE && unsafe { has_note_of_go(&range(header)) }
            }),
            constants: constants.collect(),
            code,
            tables,
        }
    }

    /// True if it is the kernel's own (vDSO), which may forbid changes to its code.
    pub fn is_kernels(&self) -> bool {
        self.name.contains("linux-vdso")
    }

    /// True if it has code at an address, or before it in the same page.
    pub fn contains(&self, address: usize) -> bool {
        let from_page = |code: &Range<usize>| code.start / PAGE_BYTES * PAGE_BYTES..code.end;
        self.code.iter().any(|code| from_page(code).contains(&address))
    }

    /// True if all of its code lies in these mappings.
    pub fn is_mapped(&self, code: &[Range<usize>]) -> bool {
        let is_there = |at: usize| code.iter().any(|mapped| mapped.contains(&at));
        self.code.iter().all(|code| is_there(code.start) && is_there(code.end - 1))
    }

    /// Its `syscall` instructions. In functions without an entry in the unwind tables they are
    /// found only behind a `mov eax` of a small number, or before a check of the answer.
    pub fn sites(&self) -> Vec<Site> {
        let tables = self.tables.clone().map(|tables| {
            // SAFETY: a segment of a mapped file.
            let bytes =
                unsafe { std::slice::from_raw_parts(tables.start as *const u8, tables.len()) };
            (tables.start, bytes)
        });
        let functions = tables.and_then(|(start, bytes)| Functions::new(start, bytes));
        self.code.iter().flat_map(|range| sites_in(range, functions.as_ref())).collect()
    }
}

/// True if a segment of notes has a note of Go's. A note has the length of its name, the length of
/// its content, a kind, the name and the content. The last two begin at multiples of four.
///
/// # Safety
/// The range is mapped.
unsafe fn has_note_of_go(notes: &Range<usize>) -> bool {
    const HEAD: usize = 12;
    // SAFETY: as the caller says.
    let bytes = unsafe { std::slice::from_raw_parts(notes.start as *const u8, notes.len()) };
    let mut rest = bytes;
    while let Some((head, behind)) = rest.split_first_chunk::<HEAD>() {
        let length = |at: usize| {
            let length = [head[at], head[at + 1], head[at + 2], head[at + 3]];
            u32::from_ne_bytes(length).next_multiple_of(4) as usize
        };
        if behind.starts_with(b"Go\0\0") {
            return true;
        }
        rest = behind.get(length(0).saturating_add(length(4))..).unwrap_or_default();
    }
    false
}

/// The `syscall` instructions of a segment of code.
fn sites_in(range: &Range<usize>, functions: Option<&Functions<'_>>) -> Vec<Site> {
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
            let function = functions.and_then(|all| all.before(address));
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
        && (JMP_NEAR_BYTES..=MOV_BYTES).contains(&instruction.len())
        && instruction.flow_control() == FlowControl::Next
        && !instruction.is_ip_rel_memory_operand()
        && instruction.stack_pointer_increment() == 0
}

/// The unwind tables of a file.
struct Functions<'a> {
    index: &'a [u8],
    frames: &'a [u8],
    bases: BaseAddresses,
}

impl<'a> Functions<'a> {
    /// The tables at an address, which begin with their index and end with their segment.
    fn new(start: usize, tables: &'a [u8]) -> Option<Self> {
        let bases = BaseAddresses::default().set_eh_frame_hdr(start as u64);
        let parsed = EhFrameHdr::new(tables, NativeEndian).parse(&bases, 8).ok()?;
        let gimli::Pointer::Direct(frames) = parsed.eh_frame_ptr() else { return None };
        let bytes = tables.get((frames as usize).checked_sub(start)?..)?;
        Some(Self { index: tables, frames: bytes, bases: bases.set_eh_frame(frames) })
    }

    /// The function around an address.
    fn around(&self, address: usize) -> Option<Range<usize>> {
        let index = EhFrameHdr::new(self.index, NativeEndian).parse(&self.bases, 8).ok()?;
        let frames = EhFrame::new(self.frames, NativeEndian);
        let found = index.table()?.fde_for_address(
            &frames,
            &self.bases,
            address as u64,
            EhFrame::cie_from_offset,
        );
        let found = found.ok()?;
        let start = found.initial_address() as usize;
        Some(start..start + found.len() as usize)
    }

    /// The function around an address, or close before it.
    fn before(&self, address: usize) -> Option<Range<usize>> {
        (0..=GAP_MAX).find_map(|back| self.around(address - back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libc_module() -> Module {
        modules().into_iter().find(|module| module.name.contains("libc.so")).unwrap()
    }

    #[test]
    fn the_c_library_has_hundreds_most_with_their_number() {
        let sites = libc_module().sites();
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
}
