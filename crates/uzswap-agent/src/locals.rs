//! Where this library's thread-local variables are.
//!
//! The C library finds them by a table for each thread that lies in the program's heap: it may have
//! left, and a handler of a fault would meet another one. But a library that is loaded with the
//! program has its variables at the same distance from each thread's block; so that is measured
//! once.
//!
//! What is to be done with them when a thread ends the C library would note in the program's heap
//! too, and under its allocator's lock, which the thread that faults may have. So it is noted here.

use std::arch::asm;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicIsize, AtomicU32, Ordering::Relaxed};

/// Distance of this library's variables from a thread's block; 0: not measured yet.
static DISTANCE: AtomicIsize = AtomicIsize::new(0);

unsafe extern "C" {
    fn __real___tls_get_addr(index: &Index) -> isize;
}

/// What the linker has for each variable.
#[repr(C)]
struct Index {
    module: usize,
    offset: isize,
}

/// What the linker puts in the place of `__tls_get_addr` in this library.
#[unsafe(no_mangle)]
extern "C" fn __wrap___tls_get_addr(index: &Index) -> isize {
    let block: isize;
    // SAFETY: reads the address of the thread's block, which stands at its beginning.
    unsafe { asm!("mov {}, fs:0", out(reg) block, options(nostack, readonly, preserves_flags)) };
    let mut distance = DISTANCE.load(Relaxed);
    if distance == 0 {
        // SAFETY: the index is the linker's, of a variable of this library.
        distance = unsafe { __real___tls_get_addr(index) } - index.offset - block;
        DISTANCE.store(distance, Relaxed);
    }
    block + distance + index.offset
}

/// The key of each thread's list; none before [`prepare`].
static KEY: AtomicU32 = AtomicU32::new(u32::MAX);

/// What is to be done when a thread ends: the last noted first.
struct Ending {
    destructor: unsafe extern "C" fn(*mut c_void),
    object: *mut c_void,
    next: *mut Ending,
}

/// Runs in a thread that ends.
extern "C" fn end(list: *mut c_void) {
    let mut next = list.cast::<Ending>();
    while !next.is_null() {
        // SAFETY: made below from a box, and taken off the list by this.
        let ending = unsafe { Box::from_raw(next) };
        // SAFETY: as it was noted for this thread.
        unsafe { (ending.destructor)(ending.object) };
        next = ending.next;
    }
}

/// Makes the key: as one of the first it has its place in each thread's block. Once.
pub fn prepare() -> bool {
    let mut key = 0;
    // SAFETY: the key is written; the function is of the form that is asked for.
    let done = unsafe { libc::pthread_key_create(&mut key, Some(end)) };
    KEY.store(key, Relaxed);
    done == 0
}

/// What the linker puts in the place of the C library's.
#[unsafe(no_mangle)]
extern "C" fn __wrap___cxa_thread_atexit_impl(
    destructor: unsafe extern "C" fn(*mut c_void),
    object: *mut c_void,
    _: *mut c_void,
) -> c_int {
    let key = KEY.load(Relaxed);
    // SAFETY: the key is ours, and holds a list of ours or null.
    unsafe {
        let next = libc::pthread_getspecific(key).cast();
        let ending = Box::into_raw(Box::new(Ending { destructor, object, next }));
        libc::pthread_setspecific(key, ending.cast())
    }
}
