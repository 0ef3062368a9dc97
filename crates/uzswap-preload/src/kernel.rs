//! Functions of the C library that only make a system call, for the code of this library.
//!
//! A library of the program's may have functions by these names (fakechroot, libfaketime). Such a
//! function could open another file than ours, return another time, or ask for memory while we
//! count memory. So the linker replaces them by the functions of this file (build.rs).

use crate::system_call::{answer, raw};

/// Functions with the kernel's own arguments, up to five. The kernel reads no argument beyond those
/// of the call.
macro_rules! calls {
    ($($function:ident = $number:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(a: u64, b: u64, c: u64, d: u64, e: u64) -> i64 {
            // SAFETY: the arguments are the caller's.
            answer(unsafe { raw(libc::$number, [a, b, c, d, e, 0]) })
        }
    )*};
}

calls! {
    __wrap_clock_gettime = SYS_clock_gettime;
    __wrap_close = SYS_close;
    __wrap_fstat = SYS_fstat;
    __wrap_fstatfs = SYS_fstatfs;
    __wrap_pread = SYS_pread64;
}

/// By `openat`, as the C library opens files: a filter (seccomp) may permit that call alone.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_open(path: u64, flags: u64, mode: u64) -> i64 {
    let folder = libc::AT_FDCWD as u64;
    // SAFETY: as above.
    answer(unsafe { raw(libc::SYS_openat, [folder, path, flags, mode, 0, 0]) })
}
