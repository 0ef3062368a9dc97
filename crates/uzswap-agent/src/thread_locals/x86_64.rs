//! x86-64: the compiler's code calls `__tls_get_addr` for each variable.

use super::distance_to_variables;
use uzswap_sys::processor::thread_pointer;

unsafe extern "C" {
    fn __real___tls_get_addr(index: &Index) -> isize;
}

/// The linker's data for each variable.
#[repr(C)]
struct Index {
    module: usize,
    offset: isize,
}

/// Replaces `__tls_get_addr` in this library.
#[unsafe(no_mangle)]
extern "C" fn __wrap___tls_get_addr(index: &Index) -> isize {
    let thread = thread_pointer();
    match distance_to_variables(thread) {
        // SAFETY: the index is the linker's, of a variable of this library.
        0 => unsafe { __real___tls_get_addr(index) },
        distance => thread as isize + distance + index.offset,
    }
}

/// The linker has done it.
pub fn redirect() -> bool {
    true
}
