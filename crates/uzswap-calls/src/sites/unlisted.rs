//! Code of files that the dynamic linker does not list. It lists only the files of its caller's
//! namespace. Libraries that are loaded by `dlmopen` and `LD_AUDIT` have another namespace, with a
//! C library of their own, and some programs load files themselves.

use super::Module;
use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::elf::FileHeader;
use std::fs;
use std::io;
use std::ops::Range;
use uzswap_sys::map::{Mapped, PAGE_BYTES};

/// The files with mapped code, without the listed files and without code that may not be read.
pub fn unlisted(listed: &[Module]) -> io::Result<Vec<Module>> {
    let maps = fs::read_to_string("/proc/thread-self/maps")?;
    let maps: Vec<_> = maps.lines().filter_map(Mapped::parse).collect();
    let mut found: Vec<Module> = Vec::new();
    for (at, one) in maps.iter().enumerate() {
        let is_known = |module: &Module| module.contains(one.range.start);
        if !is_code_of_file(one) || listed.iter().chain(&found).any(is_known) {
            continue;
        }
        let is_start = |part: &&Mapped<'_>| part.name == one.name && starts_file(part);
        let start = maps[..=at].iter().rev().find(is_start);
        let module = start.and_then(|start| of_file(start));
        let module = module.filter(is_known).unwrap_or_else(|| Module {
            name: one.name.into(),
            range: one.range.clone(),
            thread_bytes: 0,
            is_go: false,
            constants: Vec::new(),
            code: vec![one.range.clone()],
            tables: None,
        });
        found.push(module);
    }
    Ok(found)
}

/// The addresses of all code.
///
/// # Errors
/// The kernel does not tell the mappings.
pub fn mapped_code() -> io::Result<Vec<Range<usize>>> {
    let maps = fs::read_to_string("/proc/thread-self/maps")?;
    let code = maps.lines().filter_map(Mapped::parse).filter(|one| one.access[2] == b'x');
    Ok(code.map(|one| one.range).collect())
}

fn is_code_of_file(one: &Mapped<'_>) -> bool {
    let is_code = one.access[0] == b'r' && one.access[2] == b'x' && one.access[3] == b'p';
    is_code && one.has_file && one.name.starts_with('/')
}

/// The head of a file that is mapped from its start on.
fn head(mapped: &Range<usize>) -> &[u8] {
    // SAFETY: mapped for reading, a page at least; nobody is expected to cut a file short while it
    // is loaded.
    unsafe { std::slice::from_raw_parts(mapped.start as *const u8, PAGE_BYTES) }
}

fn starts_file(part: &Mapped<'_>) -> bool {
    part.access[0] == b'r' && head(&part.range).starts_with(b"\x7fELF")
}

/// A file that is mapped as its headers say, from the mapping of its start on.
fn of_file(start: &Mapped<'_>) -> Option<Module> {
    let head = head(&start.range);
    let header = FileHeader64::<LittleEndian>::parse(head).ok()?;
    let count = header.program_headers(LittleEndian, head).ok()?.len();
    let headers = header.e_phoff.get(LittleEndian) as usize;
    let name = std::ffi::CString::new(start.name).ok()?;
    // SAFETY: a description of numbers and pointers; zeros are one.
    let mut info: libc::dl_phdr_info = unsafe { std::mem::zeroed() };
    info.dlpi_phdr = (start.range.start + headers) as *const libc::Elf64_Phdr;
    info.dlpi_phnum = count as u16;
    // SAFETY: as many headers as there are, within the page.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, count) };
    let first = headers.iter().find(|one| one.p_type == libc::PT_LOAD && one.p_offset == 0)?;
    info.dlpi_addr = (start.range.start as u64).checked_sub(first.p_vaddr)?;
    info.dlpi_name = name.as_ptr();
    // SAFETY: a description like the dynamic linker's, of a file that is mapped.
    Some(unsafe { Module::of(&info) })
}
