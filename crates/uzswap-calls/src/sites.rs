//! Finds the instructions of this process that make system calls.
//!
//! In code that the program writes as it runs they are found, but not replaced ([`makes_call`]). We
//! cannot know where its instructions begin, and the program may write, copy or read it again.

#[cfg(target_arch = "aarch64")]
#[path = "sites/aarch64.rs"]
mod processor;
#[cfg(target_arch = "x86_64")]
#[path = "sites/x86_64.rs"]
mod processor;
mod unlisted;

pub(crate) use processor::SYSCALL;
#[cfg(target_arch = "x86_64")]
pub(crate) use processor::{INSTRUCTION_BYTES, JMP_NEAR_BYTES, MOV_BYTES, MOV_EAX};
pub use processor::{Number, OVERLAP, make_tables, makes_call};
pub use unlisted::{mapped_code, unlisted};

use gimli::{BaseAddresses, EhFrame, EhFrameHdr, NativeEndian, UnwindSection};
use object::LittleEndian;
use object::elf::{FileHeader64, PF_X, PT_GNU_EH_FRAME, PT_LOAD, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use processor::sites_in;
use rustix::mm::{self, MapFlags, ProtFlags};
use std::ffi::{CStr, c_int, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use uzswap_sys::map::{self, PAGE_BYTES};

/// An instruction that makes a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Its address.
    pub address: usize,
    /// How the call gets its number.
    pub number: Number,
}

impl Site {
    /// True if the instruction is there, in code that is mapped.
    pub fn is_there(&self) -> bool {
        // SAFETY: mapped code, which may be read where it was searched.
        unsafe { (self.address as *const [u8; SYSCALL.len()]).read_unaligned() == SYSCALL }
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

/// The system calls of a part of a file that has just been mapped as code, from an offset
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

    /// Its system calls. In functions without an entry in the unwind tables they are found only
    /// behind an instruction that sets a number, or before a check of the answer.
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
}
