//! The C library's count of threads (`__nptl_nthreads`). The library ends the process when the last
//! counted thread ends, and counts ours.
//!
//! Before glibc 2.34 no other library may use the variable. But debuggers need it, so it is in the
//! file's own table of symbols, which distributions keep.

use object::LittleEndian;
use object::elf::{FileHeader64, SHT_SYMTAB};
use object::read::elf::{FileHeader, Sym};
use std::ffi::CStr;
use std::fs;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::SeqCst};
use uzswap_calls::sites;
use uzswap_tree::front::Front;

const NAME: &CStr = c"__nptl_nthreads";

/// The variable, or null where it was not found.
static COUNT: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Finds the variable now, because the dynamic linker's memory may later be out.
pub fn find() {
    // SAFETY: a name.
    let exported = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
    let count = match exported.is_null() {
        true => hidden().map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut),
        false => exported.cast(),
    };
    COUNT.store(count, SeqCst);
}

/// The address of the variable by the table in the file of the library that starts threads.
fn hidden() -> Option<usize> {
    let starts = libc::pthread_create as *const () as usize;
    let module = sites::modules().into_iter().find(|module| module.contains(starts))?;
    let file = fs::read(&module.name).ok()?;
    let address = module.range.start.checked_add(value_in(&file)?)?;
    (address.is_multiple_of(align_of::<u32>()) && module.range.contains(&address))
        .then_some(address)
}

/// The distance of the variable from the start of a file's memory.
fn value_in(file: &[u8]) -> Option<usize> {
    let header = FileHeader64::<LittleEndian>::parse(file).ok()?;
    let sections = header.sections(LittleEndian, file).ok()?;
    let symbols = sections.symbols(LittleEndian, file, SHT_SYMTAB).ok()?;
    let is_it = |name: &[u8]| name == NAME.to_bytes();
    let names = symbols.strings();
    let symbol = symbols.iter().find(|one| one.name(LittleEndian, names).is_ok_and(is_it))?;
    Some(symbol.st_value(LittleEndian) as usize)
}

/// The threads that the C library waits for before it ends the process.
pub enum ThreadCount {
    /// Their number, ours included. A thread that has ended by a system call of its own is counted
    /// for ever.
    Threads(usize),
    /// The library counts the parent's threads: the process was forked past the library.
    Parents,
    Unknown,
}

/// The library's count.
pub fn get() -> ThreadCount {
    let is_past = |front: &Front| front.is_past_library.load(SeqCst);
    if crate::front().is_some_and(is_past) {
        return ThreadCount::Parents;
    }
    // SAFETY: null, or a number that the C library changes atomically.
    let count = unsafe { COUNT.load(SeqCst).as_ref() };
    count.map_or(ThreadCount::Unknown, |count| ThreadCount::Threads(count.load(SeqCst) as usize))
}
