//! The allocator's functions as a program calls them. A block of the pager begins at a page; one of
//! the C library nearly never does, so that most are told apart by their address alone.

use crate::blocks::{self, ALIGNMENT, PAGE};
use crate::original::{
    __libc_calloc, __libc_free, __libc_malloc, __libc_memalign, __libc_realloc, usable_size,
};
use std::ffi::{c_int, c_void};
use std::ptr;

fn set_errno(number: c_int) {
    // SAFETY: the address of the thread's own errno.
    unsafe { *libc::__errno_location() = number };
}

fn out_of_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    ptr::null_mut()
}

/// A large block, or none where the program is to have an ordinary one.
fn large(bytes: usize) -> Option<*mut c_void> {
    if bytes < blocks::LEAST_BYTES { None } else { blocks::take(bytes) }
}

/// Length of a block of the pager; `None` for all others.
fn held(block: *mut c_void) -> Option<usize> {
    if block.is_null() || !block.addr().is_multiple_of(PAGE) { None } else { blocks::length(block) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    // SAFETY: takes any size.
    large(bytes).unwrap_or_else(|| unsafe { __libc_malloc(bytes) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(count: usize, each: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(each) else { return out_of_memory() };
    // Pages of a new region are zeros.
    // SAFETY: takes any sizes.
    large(bytes).unwrap_or_else(|| unsafe { __libc_calloc(count, each) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(block: *mut c_void) {
    match held(block) {
        Some(_) => blocks::give_back(block),
        // SAFETY: not the pager's, so the C library's.
        None => unsafe { __libc_free(block) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    let (length, ours) = match held(block) {
        Some(length) => (length, true),
        None if bytes < blocks::LEAST_BYTES || block.is_null() => {
            // SAFETY: a block of the C library, or none.
            return large(bytes).unwrap_or_else(|| unsafe { __libc_realloc(block, bytes) });
        }
        // SAFETY: not the pager's, so the C library's.
        None => (unsafe { usable_size(block) }, false),
    };
    if ours && bytes == 0 {
        blocks::give_back(block);
        return ptr::null_mut();
    }
    if ours && (length / 2..=length).contains(&bytes) {
        blocks::drop_behind(block, bytes, length);
        return block;
    }
    let new = match (large(bytes), ours) {
        (Some(new), _) => new,
        // SAFETY: a block of the C library.
        (None, false) => return unsafe { __libc_realloc(block, bytes) },
        // SAFETY: takes any size.
        (None, true) => unsafe { __libc_malloc(bytes) },
    };
    if !new.is_null() {
        // SAFETY: both blocks are at least this long, and they are apart.
        unsafe { ptr::copy_nonoverlapping(block.cast::<u8>(), new.cast(), length.min(bytes)) };
        // SAFETY: the program gave this block up with the call.
        unsafe { free(block) };
    }
    new
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let large = if align <= ALIGNMENT { large(bytes) } else { None };
    // SAFETY: takes any numbers.
    large.unwrap_or_else(|| unsafe { __libc_memalign(align, bytes) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    // SAFETY: takes any numbers.
    unsafe { memalign(align, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: takes any numbers.
    unsafe { memalign(PAGE, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match bytes.checked_next_multiple_of(PAGE) {
        // SAFETY: takes any numbers.
        Some(bytes) => unsafe { memalign(PAGE, bytes) },
        None => out_of_memory(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, align: usize, bytes: usize) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    // SAFETY: takes any numbers.
    let block = unsafe { memalign(align, bytes) };
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: posix_memalign is given a place for the answer.
    unsafe { *to = block };
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> usize {
    match held(block) {
        Some(length) => length,
        None if block.is_null() => 0,
        // SAFETY: not the pager's, so the C library's.
        None => unsafe { usable_size(block) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn madvise(at: *mut c_void, bytes: usize, advice: c_int) -> c_int {
    match blocks::advise(at, bytes, advice) {
        Some(0) => 0,
        Some(error) => {
            set_errno(error);
            -1
        }
        // SAFETY: the arguments are the caller's, who answers for what they do.
        None => unsafe { libc::syscall(libc::SYS_madvise, at, bytes, advice) as c_int },
    }
}
