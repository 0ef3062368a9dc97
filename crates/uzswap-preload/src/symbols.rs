//! Functions of the libraries behind this one, by name.
//!
//! `dlsym` finds the same functions. But it also forgets the error that the program's `dlerror` is
//! to report, and `dlerror` itself may allocate. Before glibc 2.34 it asks `calloc` for a buffer. A
//! name that is absent ends the process in the function beneath it (`_dl_sym`). This search changes
//! nothing, asks for no memory and calls no function. `dl_iterate_phdr` may be a library's own,
//! which does not work yet at the program's first allocation (ThreadSanitizer).
//!
//! The search takes no lock. It ends at the C library, and objects up to there are never unloaded.

use libc::{c_char, c_int};
use std::ffi::CStr;
use std::ptr;

unsafe extern "C" {
    // The linker's symbol: the start of this library.
    static __ehdr_start: u8;
    // The dynamic linker's description of the process for debuggers.
    static _r_debug: Description;
}

/// The beginning of `r_debug`.
#[repr(C)]
struct Description {
    version: c_int,
    first: *const LoadedObject,
}

/// The beginning of `link_map`, an entry of the dynamic linker's list.
#[repr(C)]
struct LoadedObject {
    base: u64,
    name: *const c_char,
    dynamic: *const DynamicEntry,
    next: *const LoadedObject,
}

/// The address of the first function of this name in the libraries behind this one; 0 if there is
/// none. The search goes up to the C library, in the order of the dynamic linker's list. Like
/// `dlsym` it finds the default version of a function.
pub fn next(name: &CStr) -> usize {
    const OF_LIBC: &CStr = c"__libc_malloc";
    let (wanted, last) = (Wanted::new(name), Wanted::new(OF_LIBC));
    // SAFETY: the dynamic linker has made the list before any code of libraries runs. Its entries
    // up to the C library stay, and so do their tables.
    unsafe {
        let mut at = ptr::addr_of!(_r_debug.first).read_volatile();
        let own = &raw const __ehdr_start as u64;
        let mut is_behind = false;
        while !at.is_null() {
            let (base, dynamic) = ((*at).base, (*at).dynamic);
            let symbols = if is_behind { Symbols::of(base, dynamic) } else { None };
            let found = symbols.as_ref().map_or(0, |symbols| symbols.function(&wanted));
            if found != 0 || symbols.is_some_and(|symbols| symbols.function(&last) != 0) {
                return found;
            }
            is_behind |= base == own;
            at = (*at).next;
        }
    }
    0
}

/// A name that is searched.
struct Wanted<'a> {
    name: &'a CStr,
    /// The name's value in tables of GNU's form.
    hash: u32,
}

impl<'a> Wanted<'a> {
    fn new(name: &'a CStr) -> Self {
        let add = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
        Self { name, hash: name.to_bytes().iter().fold(5381, add) }
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
    /// They are an object's, which stays.
    unsafe fn of(base: u64, dynamic: *const DynamicEntry) -> Option<Self> {
        const END: i64 = 0;
        const HASH: i64 = 4;
        const NAMES: i64 = 5;
        const SYMBOLS: i64 = 6;
        const GNU_HASH: i64 = 0x6fff_fef5;
        const VERSIONS: i64 = 0x6fff_fff0;
        let mut tables = Self {
            base,
            symbols: ptr::null(),
            names: ptr::null(),
            hashes: ptr::null(),
            old_hashes: ptr::null(),
            versions: ptr::null(),
        };
        // SAFETY: the section ends with such an entry.
        unsafe {
            let mut at = dynamic;
            while let Some(entry) = at.as_ref().filter(|entry| entry.kind != END) {
                // The dynamic linker has added the base, but not in a section that is read-only.
                let value = entry.value;
                let place = if value < base { address(base, value) } else { value as usize };
                match entry.kind {
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
    unsafe fn function(&self, wanted: &Wanted<'_>) -> usize {
        // SAFETY: the tables have these forms (System V's and GNU's).
        unsafe {
            match (self.hashes.is_null(), self.old_hashes.is_null()) {
                (false, _) => self.by_hash(wanted),
                (true, false) => {
                    let count = *self.old_hashes.add(1) as usize;
                    (1..count).map(|at| self.at(at, wanted.name)).find(|found| *found != 0)
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
    unsafe fn by_hash(&self, wanted: &Wanted<'_>) -> Option<usize> {
        // SAFETY: the table has this form, and the numbers are within it.
        unsafe {
            let [buckets, first, filter] = [0, 1, 2].map(|at| *self.hashes.add(at));
            let table = self.hashes.add(4 + 2 * filter as usize);
            let mut at = *table.add(wanted.hash.checked_rem(buckets)? as usize);
            if at < first {
                return None;
            }
            loop {
                let hash = *table.add(buckets as usize + at.wrapping_sub(first) as usize);
                if hash | 1 == wanted.hash | 1 {
                    let found = self.at(at as usize, wanted.name);
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
