//! Functions of the libraries behind this one, by name.
//!
//! `dlsym` finds the same functions. But it also forgets the error that the program's `dlerror` is
//! to report, and `dlerror` itself may allocate. Before glibc 2.34 it asks `calloc` for a buffer. A
//! name that is absent ends the process in the function beneath it (`_dl_sym`). This search changes
//! nothing, and asks for no memory.

use libc::{c_char, c_int, c_void, dl_phdr_info};
use std::ffi::CStr;
use std::ptr;

unsafe extern "C" {
    // The linker's symbol: the start of this library.
    static __ehdr_start: u8;
}

/// The address of the first function of this name in the libraries behind this one, in the order
/// of the dynamic linker's list; 0 if there is none. A symbol without a version means the default
/// one, as `dlsym`.
pub fn next(name: &CStr) -> usize {
    let bytes = name.to_bytes();
    let hash = bytes
        .iter()
        .fold(5381, |hash: u32, byte| hash.wrapping_mul(33).wrapping_add(u32::from(*byte)));
    let mut search = Search { name, hash, is_behind: false, found: 0 };
    // SAFETY: the function has this form, and gets the address of the search.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.found
}

struct Search<'a> {
    name: &'a CStr,
    /// The name's value in tables of GNU's form.
    hash: u32,
    /// True if this library was visited.
    is_behind: bool,
    found: usize,
}

/// Searches an object. The search ends with a value other than 0.
unsafe extern "C" fn visit(object: *mut dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker's description of an object, whose tables stay while this runs;
    // and the search.
    unsafe {
        let (object, search) = (&*object, &mut *search.cast::<Search<'_>>());
        if !search.is_behind {
            search.is_behind = object.dlpi_addr == &raw const __ehdr_start as u64;
            return 0;
        }
        search.found = Symbols::of(object).map_or(0, |symbols| symbols.function(search));
        c_int::from(search.found != 0)
    }
}

/// The tables of an object's symbols.
struct Symbols {
    base: u64,
    symbols: *const libc::Elf64_Sym,
    names: *const c_char,
    /// A table in GNU's form, or in the old one; null where the object has none.
    hashes: *const u32,
    old_hashes: *const u32,
    /// The version of each symbol; null in an object without versions.
    versions: *const u16,
}

/// An entry of an object's dynamic section.
#[repr(C)]
struct DynamicEntry {
    kind: i64,
    value: u64,
}

impl Symbols {
    /// # Safety
    /// The object is mapped.
    unsafe fn of(object: &dl_phdr_info) -> Option<Self> {
        const END: i64 = 0;
        const HASH: i64 = 4;
        const NAMES: i64 = 5;
        const SYMBOLS: i64 = 6;
        const GNU_HASH: i64 = 0x6fff_fef5;
        const VERSIONS: i64 = 0x6fff_fff0;
        let base = object.dlpi_addr;
        let mut tables = Self {
            base,
            symbols: ptr::null(),
            names: ptr::null(),
            hashes: ptr::null(),
            old_hashes: ptr::null(),
            versions: ptr::null(),
        };
        // SAFETY: the object has that many headers, and its section ends with such an entry.
        unsafe {
            let headers = (0..usize::from(object.dlpi_phnum)).map(|at| &*object.dlpi_phdr.add(at));
            let header = headers.into_iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
            let mut at = address(base, header.p_vaddr) as *const DynamicEntry;
            while (*at).kind != END {
                // The dynamic linker has added the base, but not in a section that is read-only.
                let value = (*at).value;
                let place = if value < base { address(base, value) } else { value as usize };
                match (*at).kind {
                    HASH => tables.old_hashes = place as *const u32,
                    NAMES => tables.names = place as *const c_char,
                    SYMBOLS => tables.symbols = place as *const libc::Elf64_Sym,
                    GNU_HASH => tables.hashes = place as *const u32,
                    VERSIONS => tables.versions = place as *const u16,
                    _ => {}
                }
                at = at.add(1);
            }
        }
        (!tables.symbols.is_null() && !tables.names.is_null()).then_some(tables)
    }

    /// The function's address; 0 if the object has none of this name.
    ///
    /// # Safety
    /// As of `of`.
    unsafe fn function(&self, search: &Search<'_>) -> usize {
        // SAFETY: the tables have these forms (System V's and GNU's).
        unsafe {
            match (self.hashes.is_null(), self.old_hashes.is_null()) {
                (false, _) => self.by_hash(search),
                (true, false) => {
                    let count = *self.old_hashes.add(1) as usize;
                    (1..count).map(|at| self.at(at, search.name)).find(|found| *found != 0)
                }
                (true, true) => None,
            }
            .unwrap_or(0)
        }
    }

    /// Looks in GNU's table: four numbers, a filter, the first symbol of each bucket, and the hash
    /// of each symbol, which is odd for the last of a bucket.
    ///
    /// # Safety
    /// As of `function`.
    unsafe fn by_hash(&self, search: &Search<'_>) -> Option<usize> {
        // SAFETY: the table has this form, and the numbers are within it.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|at| *self.hashes.add(at));
            let table = self.hashes.add(4 + 2 * filter as usize);
            let mut at = *table.add(search.hash.checked_rem(buckets)? as usize);
            if at < first {
                return None;
            }
            loop {
                let hash = *table.add(buckets as usize + at.wrapping_sub(first) as usize);
                if hash | 1 == search.hash | 1 {
                    let found = self.at(at as usize, search.name);
                    if found != 0 {
                        return Some(found);
                    }
                }
                if hash & 1 != 0 {
                    return None;
                }
                at = at.wrapping_add(1);
            }
        }
    }

    /// The address of a symbol with this name; 0 if the symbol has another one, is undefined, is no
    /// function, or is an old version for old programs.
    ///
    /// # Safety
    /// As of `function`.
    unsafe fn at(&self, index: usize, name: &CStr) -> usize {
        const HIDDEN: u16 = 1 << 15;
        const FUNCTION: u8 = 2;
        const CHOSEN: u8 = 10;
        // SAFETY: the symbol is within the tables. The resolver of a chosen function takes the
        // processor's features on aarch64, and nothing on x86-64.
        unsafe {
            let symbol = &*self.symbols.add(index);
            let is_hidden = !self.versions.is_null() && *self.versions.add(index) & HIDDEN != 0;
            let kind = symbol.st_info & 15;
            if symbol.st_shndx == 0
                || is_hidden
                || !matches!(kind, FUNCTION | CHOSEN)
                || !is_same(self.names.add(symbol.st_name as usize), name)
            {
                return 0;
            }
            let found = address(self.base, symbol.st_value);
            if kind == FUNCTION {
                return found;
            }
            let resolve = std::mem::transmute::<usize, extern "C" fn(u64) -> usize>(found);
            resolve(libc::getauxval(libc::AT_HWCAP))
        }
    }
}

fn address(base: u64, value: u64) -> usize {
    base.wrapping_add(value) as usize
}

/// Compares without the C library, whose `strlen` and `strcmp` a library may replace.
///
/// # Safety
/// The text ends with a zero.
unsafe fn is_same(text: *const c_char, name: &CStr) -> bool {
    let bytes = name.to_bytes_with_nul().iter().enumerate();
    // SAFETY: nothing is read behind the first difference, nor behind the end.
    bytes.into_iter().all(|(at, byte)| unsafe { *text.add(at) as u8 == *byte })
}
