//! This library's own memory. Pages of the program's heap leave, so the code that serves its faults
//! may not use that heap. Rust's allocations, and those of the C code that is linked in (build.rs),
//! come from our own mappings, taken directly from the kernel.
//!
//! A thread that forks a program that was taken over holds the lock, so that the child's allocator
//! is consistent. A child of another program begins with an empty allocator ([`renew`]).

use dlmalloc::{Allocator, Dlmalloc};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_sys::map::{PAGE_BYTES, place};

/// The alignment that C code may rely on.
const ALIGNMENT: usize = 16;
/// Bytes before a block of C code's, in which its length is.
const HEADER: usize = 16;
/// Addresses that an arena reserves; untouched pages take no memory. A program may have a limit of
/// addresses (`ulimit -v`), so there are several arenas instead of one large arena.
const ARENA: usize = 16 << 20;
const ARENA_LEAST: usize = 1 << 20;
/// The most arenas; later ones are larger.
const ARENAS_MAX: usize = 512;
/// The n-th arena is at least an eighth of all before it.
const PART: usize = 8;

/// Memory from arenas. So its address shows that the memory is ours.
pub struct Pages;

struct Arena {
    at: AtomicUsize,
    bytes: AtomicUsize,
}

static ARENAS: [Arena; ARENAS_MAX] =
    [const { Arena { at: AtomicUsize::new(0), bytes: AtomicUsize::new(0) } }; ARENAS_MAX];
static ARENAS_USED: AtomicUsize = AtomicUsize::new(0);
/// Bytes of the last arena that are given out.
static LAST_USED: AtomicUsize = AtomicUsize::new(0);

/// This allocator's addresses.
pub fn own() -> impl Iterator<Item = Range<usize>> {
    ARENAS[..ARENAS_USED.load(Acquire)].iter().map(|arena| {
        let at = arena.at.load(Relaxed);
        at..at + arena.bytes.load(Relaxed)
    })
}

/// Maps another arena that has room for a block; `false` if there are no addresses.
fn add_arena(block: usize) -> bool {
    let count = ARENAS_USED.load(Relaxed);
    let Some(arena) = ARENAS.get(count) else { return false };
    let all: usize = own().map(|arena| arena.len()).sum();
    let mut bytes = block.max(ARENA).max((all / PART).next_multiple_of(ARENA_LEAST));
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let flags = flags | MapFlags::NORESERVE;
    loop {
        // SAFETY: a new mapping, where nothing is.
        let mapped = unsafe { mm::mmap_anonymous(place::next(bytes), bytes, access, flags) };
        let Ok(start) = mapped else {
            if bytes / 2 < block.max(ARENA_LEAST) {
                return false;
            }
            bytes = (bytes / 2).next_multiple_of(PAGE_BYTES);
            continue;
        };
        // The kernel would give the first block a huge page of 2 MiB. A kernel without huge pages
        // refuses the advice.
        // SAFETY: the mapping is new; it stays as it is.
        let _ = unsafe { mm::madvise(start, bytes, Advice::LinuxNoHugepage) };
        arena.at.store(start as usize, Relaxed);
        arena.bytes.store(bytes, Relaxed);
        LAST_USED.store(0, Relaxed);
        ARENAS_USED.store(count + 1, Release);
        return true;
    }
}

// SAFETY: gives out each part of an arena once; arenas stay mapped.
unsafe impl Allocator for Pages {
    fn alloc(&self, bytes: usize) -> (*mut u8, usize, u32) {
        // The caller holds the allocator's lock.
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let last = || own().last().unwrap_or_default();
        if LAST_USED.load(Relaxed) + bytes > last().len() && !add_arena(bytes) {
            return (ptr::null_mut(), 0, 0);
        }
        let used = LAST_USED.fetch_add(bytes, Relaxed);
        ((last().start + used) as *mut u8, bytes, 0)
    }

    fn remap(&self, _: *mut u8, _: usize, _: usize, _: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, _: *mut u8, _: usize, _: usize) -> bool {
        false
    }

    fn free(&self, _: *mut u8, _: usize) -> bool {
        false
    }

    fn can_release_part(&self, _: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

struct Own(UnsafeCell<Mutex<Dlmalloc<Pages>>>);

// SAFETY: the lock makes each use exclusive, except that of `renew`, which documents when it may be
// called.
unsafe impl Sync for Own {}

#[global_allocator]
static OWN: Own = Own(UnsafeCell::new(Mutex::new(Dlmalloc::new_with_allocator(Pages))));

/// The number of arenas, from the first, whose allocator [`renew`] has replaced. Their blocks stay
/// allocated.
static OF_BEFORE: AtomicUsize = AtomicUsize::new(0);

/// Makes a new allocator in a forked child, because another thread of the parent may have had the
/// old one's lock. Older blocks stay where they are, and are never given back.
pub fn renew() {
    OF_BEFORE.store(ARENAS_USED.load(Acquire), Relaxed);
    // Nothing more of the last arena is given out.
    LAST_USED.store(usize::MAX / 2, Relaxed);
    // SAFETY: there is one thread, which is not within the allocator: it has forked.
    unsafe { OWN.0.get().write(Mutex::new(Dlmalloc::new_with_allocator(Pages))) };
}

fn is_of_before(block: *mut u8) -> bool {
    let count = OF_BEFORE.load(Relaxed);
    count > 0 && own().take(count).any(|arena| arena.contains(&(block as usize)))
}

// SAFETY: the lock makes each call exclusive; the allocator follows the rules of the trait.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { lock().malloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if is_of_before(block) {
            return;
        }
        // SAFETY: the caller's promise.
        unsafe { lock().free(block, layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { lock().calloc(layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if is_of_before(block) {
            // SAFETY: the caller's promise; both blocks have as many bytes, and do not overlap.
            return unsafe {
                let new = lock().malloc(bytes, layout.align());
                if !new.is_null() {
                    ptr::copy_nonoverlapping(block, new, layout.size().min(bytes));
                }
                new
            };
        }
        // SAFETY: the caller's promise.
        unsafe { lock().realloc(block, layout.size(), layout.align(), bytes) }
    }
}

/// No thread allocates while the caller holds this lock.
pub fn lock() -> MutexGuard<'static, Dlmalloc<Pages>> {
    // SAFETY: shared use of the lock; `renew` writes it only in a process with one thread.
    unsafe { &*OWN.0.get() }.lock().unwrap_or_else(PoisonError::into_inner)
}

fn layout(bytes: usize, alignment: usize) -> Option<Layout> {
    let alignment = alignment.max(ALIGNMENT);
    Layout::from_size_align(bytes.checked_add(alignment.max(HEADER))?, alignment).ok()
}

/// Takes a block, and writes its length before it, since C code gives no length with a block that
/// it frees.
fn take(bytes: usize, alignment: usize, is_zero: bool) -> *mut c_void {
    let Some(layout) = layout(bytes, alignment) else { return ptr::null_mut() };
    // SAFETY: the layout has at least the header's size; the header is within the block, and
    // aligned as its length is.
    unsafe {
        let block = if is_zero { OWN.alloc_zeroed(layout) } else { OWN.alloc(layout) };
        if block.is_null() {
            return ptr::null_mut();
        }
        let given = block.add(layout.align().max(HEADER));
        let header = given.sub(HEADER).cast::<usize>();
        header.write(bytes);
        header.add(1).write(layout.align());
        given.cast()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_malloc(bytes: usize) -> *mut c_void {
    take(bytes, ALIGNMENT, false)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_calloc(count: usize, each: usize) -> *mut c_void {
    count.checked_mul(each).map_or(ptr::null_mut(), |bytes| take(bytes, ALIGNMENT, true))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_free(block: *mut c_void) {
    // `free` ignores a null pointer.
    if block.is_null() || !own().any(|arena| arena.contains(&(block as usize))) {
        return;
    }
    // SAFETY: the code of this library has its blocks from `take`, which wrote the header.
    unsafe {
        let header = block.cast::<u8>().sub(HEADER).cast::<usize>();
        let (bytes, alignment) = (header.read(), header.add(1).read());
        if let Some(layout) = layout(bytes, alignment) {
            OWN.dealloc(block.cast::<u8>().sub(layout.align().max(HEADER)), layout);
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    let new = take(bytes, ALIGNMENT, false);
    if block.is_null() || new.is_null() {
        return new;
    }
    // SAFETY: as above; both blocks are at least this long, and apart.
    unsafe {
        let length = block.cast::<u8>().sub(HEADER).cast::<usize>().read();
        ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), length.min(bytes));
        __wrap_free(block);
    }
    new
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_posix_memalign(
    to: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    let block = take(bytes, align, false);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: posix_memalign is given a place for the answer.
    unsafe { *to = block };
    0
}
