//! The part of a thread's stack that the C library takes for the thread's variables (`__thread`).
//!
//! The C library takes them from a stack of any size, and refuses only a stack into which they do
//! not fit. A program may have so many variables that they just fit. Then nothing of the stack
//! would be left for the thread.

#![expect(
    unsafe_code,
    reason = "the dynamic linker's list of objects: its lock is held while the list is read"
)]

use libc::{c_int, c_void, dl_phdr_info};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes to add to the size of a stack. We measure the program and its libraries once, because a
/// library that is loaded later has its variables elsewhere. So a thread that may not wait for the
/// dynamic linker's lock calls this after another thread has.
pub fn variables_bytes() -> usize {
    static BYTES: AtomicUsize = AtomicUsize::new(0);
    match BYTES.load(Relaxed) {
        0 => {
            let mut bytes = OTHERS;
            // SAFETY: the function has this form, and gets the address of the sum.
            unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut bytes).cast()) };
            BYTES.store(bytes, Relaxed);
            bytes
        }
        bytes => bytes,
    }
}

/// Bytes for the C library's own data of the thread, and for its reserve for libraries that are
/// loaded late. They need some 5 KiB (glibc 2.36).
const OTHERS: usize = 16 << 10;

unsafe extern "C" fn add(object: *mut dl_phdr_info, _: usize, sum: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker's description of an object, with that many headers; and the sum.
    let (headers, sum) = unsafe {
        let object = &*object;
        let headers = std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into());
        (headers, &mut *sum.cast::<usize>())
    };
    for header in headers.iter().filter(|header| header.p_type == libc::PT_TLS) {
        *sum = sum.saturating_add((header.p_memsz + header.p_align) as usize);
    }
    0
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::cell::Cell;

    const LARGE: usize = 300 << 10;
    thread_local! {
        static VARIABLE: Cell<[u8; LARGE]> = const { Cell::new([0; LARGE]) };
    }

    #[test]
    fn a_large_variable_of_each_thread_is_counted() {
        assert_eq!(VARIABLE.get()[LARGE - 1], 0);
        let bytes = variables_bytes();
        assert!((LARGE..2 * LARGE).contains(&bytes), "{bytes}");
    }
}
