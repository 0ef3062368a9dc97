//! The C library's allocator, by the names it keeps for those who replace `malloc`, and the
//! functions that the linker puts in the place of `malloc` for everything in this library
//! (build.rs).

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

unsafe extern "C" {
    pub fn __libc_malloc(bytes: usize) -> *mut c_void;
    pub fn __libc_calloc(count: usize, each: usize) -> *mut c_void;
    pub fn __libc_realloc(block: *mut c_void, bytes: usize) -> *mut c_void;
    pub fn __libc_free(block: *mut c_void);
    pub fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
}

/// The C library's `malloc_usable_size`, which has no other name.
///
/// # Safety
///
/// `block` came from the functions above.
pub unsafe fn usable_size(block: *mut c_void) -> usize {
    type UsableSize = unsafe extern "C" fn(*mut c_void) -> usize;
    static FOUND: OnceLock<Option<UsableSize>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // SAFETY: the name ends with a zero byte.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc_usable_size".as_ptr()) };
        // SAFETY: the next function of this name is the C library's, of this type; null is `None`.
        unsafe { transmute::<*mut c_void, Option<UsableSize>>(found) }
    });
    // SAFETY: the caller vouches for the block.
    found.map_or(0, |usable_size| unsafe { usable_size(block) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_malloc(bytes: usize) -> *mut c_void {
    // SAFETY: takes any size.
    unsafe { __libc_malloc(bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_calloc(count: usize, each: usize) -> *mut c_void {
    // SAFETY: takes any sizes.
    unsafe { __libc_calloc(count, each) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: what is in this library has its blocks from these functions only.
    unsafe { __libc_realloc(block, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_free(block: *mut c_void) {
    // SAFETY: what is in this library has its blocks from these functions, or from the C library.
    unsafe { __libc_free(block) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_posix_memalign(
    to: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    // SAFETY: the callers are Rust's allocator and C code that keep to posix_memalign's rules.
    unsafe {
        let block = __libc_memalign(align, bytes);
        if block.is_null() {
            return libc::ENOMEM;
        }
        *to = block;
    }
    0
}
