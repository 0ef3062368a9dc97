//! Finds this library's thread-local variables.
//!
//! The C library finds such variables through a table for each thread, in the program's heap. If
//! that table were evicted, the handler of a fault would meet another fault. The variables of a
//! library that is loaded late are in that heap themselves. So our variables are in the room that
//! the preloaded library reserves in each thread, at the same distance from each thread's block.
//!
//! The C library would also note the variables' destructors in that heap, under its allocator's
//! lock, which the faulting thread may have. So this file notes the destructors.

#[cfg(target_arch = "aarch64")]
#[path = "thread_locals/aarch64.rs"]
mod processor;
#[cfg(target_arch = "x86_64")]
#[path = "thread_locals/x86_64.rs"]
mod processor;

use crate::stacks;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicIsize, AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use uzswap_tree::front::Front;

/// The distance from a thread's block to the room for variables; 0 before this library has begun.
static ROOM: AtomicIsize = AtomicIsize::new(0);
/// The distance from the start of the room to the variables.
static VARIABLES: AtomicIsize = AtomicIsize::new(0);
/// The address of the variables' first values, and their bytes; all others are zero.
static INITIAL: AtomicUsize = AtomicUsize::new(0);
static INITIAL_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes before the variables, with the thread's mark that the variables are initialized. Also the
/// largest alignment.
const HEADER: usize = 64;

unsafe extern "C" {
    /// The linker's: where this library begins.
    static __ehdr_start: libc::Elf64_Ehdr;
}

/// The distance from the calling thread's pointer to its variables; 0 before [`prepare`]. In a
/// thread without variables they get their first values. On aarch64 the caller has looked at the
/// thread's mark.
extern "C" fn distance_to_variables(thread: usize) -> isize {
    let distance = ROOM.load(Relaxed);
    if distance == 0 {
        return 0;
    }
    let room = thread as isize + distance;
    // SAFETY: the room is this thread's alone, and aligned to a header.
    let has_begun = unsafe { &*(room as *const AtomicU64) };
    if has_begun.load(Relaxed) == 0 {
        fill(room + VARIABLES.load(Relaxed));
        has_begun.store(1, Relaxed);
    }
    distance + VARIABLES.load(Relaxed)
}

/// Writes the initial values of variables, which are zeros until then. A signal handler may do the
/// same at any point, and then change the variables. So this keeps any value other than zero.
#[cold]
fn fill(variables: isize) {
    let initial = INITIAL.load(Relaxed) as *const u64;
    let bytes = INITIAL_BYTES.load(Relaxed);
    for word in 0..bytes.div_ceil(size_of::<u64>()) {
        // SAFETY: `prepare` has checked that both are large enough; only this thread uses the
        // variables. A read beyond the initial values stays within the mapped file.
        let (value, to) = unsafe { (initial.add(word).read(), variables as *const AtomicU64) };
        let beyond = ((word + 1) * size_of::<u64>()).saturating_sub(bytes) * 8;
        let value = value << beyond >> beyond;
        if value != 0 {
            // SAFETY: as above.
            let to = unsafe { &*to.add(word) };
            // One atomic instruction. If it fails, a handler has written the value.
            let _ = to.compare_exchange(0, value, Relaxed, Relaxed);
        }
    }
}

/// Finds the place of the variables, and notes the key. True if there is room for them. Called
/// once, before any variable is used.
pub fn prepare(front: &Front) -> bool {
    KEY.store(front.key, Relaxed);
    let Some(segment) = variables_segment() else { return true };
    let align = (segment.p_align as usize).max(1);
    let first = HEADER + segment.p_vaddr as usize % align;
    let start = &raw const __ehdr_start as usize + segment.p_vaddr as usize;
    let end = first + (segment.p_memsz as usize).next_multiple_of(size_of::<u64>());
    let is_aligned = start.is_multiple_of(size_of::<u64>()) && align <= HEADER;
    if !is_aligned || end > front.room_bytes {
        return false;
    }
    INITIAL.store(start, Relaxed);
    INITIAL_BYTES.store(segment.p_filesz as usize, Relaxed);
    VARIABLES.store(first as isize, Relaxed);
    ROOM.store(front.room, Relaxed);
    processor::redirect()
}

/// The part of this library's file that has the variables' first values.
fn variables_segment() -> Option<libc::Elf64_Phdr> {
    // SAFETY: the linker maps a library's header, and its table of segments behind it.
    let segments = unsafe {
        let header = &raw const __ehdr_start;
        let table = header.cast::<u8>().add((*header).e_phoff as usize);
        std::slice::from_raw_parts(table.cast::<libc::Elf64_Phdr>(), (*header).e_phnum.into())
    };
    segments.iter().find(|segment| segment.p_type == libc::PT_TLS).copied()
}

/// The front's key, with each thread's list of destructors; none before [`prepare`].
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);

/// A destructor to run when a thread ends: the last noted first.
struct Ending {
    destructor: unsafe extern "C" fn(*mut c_void),
    object: *mut c_void,
    next: *mut Ending,
}

pub extern "C" fn end(list: *mut c_void) {
    stacks::for_end(|| run_all(list));
}

fn run_all(list: *mut c_void) {
    let mut next = list.cast::<Ending>();
    while !next.is_null() {
        // SAFETY: made below from a box; this takes it off the list.
        let ending = unsafe { Box::from_raw(next) };
        // SAFETY: the block that was noted for this thread.
        unsafe { (ending.destructor)(ending.object) };
        next = ending.next;
    }
}

/// Replaces the C library's function in this library.
#[unsafe(no_mangle)]
extern "C" fn __wrap___cxa_thread_atexit_impl(
    destructor: unsafe extern "C" fn(*mut c_void),
    object: *mut c_void,
    _: *mut c_void,
) -> c_int {
    let key = KEY.load(Relaxed);
    // SAFETY: the key is ours, and its value is a list of ours or null.
    unsafe {
        let next = libc::pthread_getspecific(key).cast();
        let ending = Box::into_raw(Box::new(Ending { destructor, object, next }));
        libc::pthread_setspecific(key, ending.cast())
    }
}
