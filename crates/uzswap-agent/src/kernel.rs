//! Functions of the C library that only make a system call, for the code of this library.
//!
//! A library of the program's may have functions by these names (eatmydata, fakechroot,
//! libfaketime). The code of that library would run in our threads, and use memory that has left. A
//! thread of ours without the descriptor that brings pages in would end the program. The library
//! may also open another file than ours, or return another time. So the linker replaces these
//! functions by those of this file (build.rs), for the standard library too. These make the same
//! system calls as the C library, since a filter (seccomp) may permit only those.

use libc::{c_int, c_long, timespec};
use nix::errno::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::ffi::{CStr, c_char};
use std::ptr;
use uzswap_calls::raw;

/// Makes a call, and answers like the C library: -1 with the error in `errno`.
///
/// # Safety
/// As of the call.
unsafe fn make(number: c_long, arguments: [u64; 6]) -> i64 {
    // SAFETY: the caller's promise; no call here returns twice, or on another stack.
    let result = unsafe { raw(number as u64, arguments) };
    if !(-4095..0).contains(&result) {
        return result;
    }
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = -result as c_int };
    -1
}

/// Functions with the kernel's own arguments, up to six. The kernel reads no argument beyond those
/// of the call.
macro_rules! calls {
    ($($function:ident = $number:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(a: u64, b: u64, c: u64, d: u64, e: u64, f: u64) -> i64 {
            // SAFETY: the arguments are the caller's.
            unsafe { make(libc::$number, [a, b, c, d, e, f]) }
        }
    )*};
}

/// Functions that the C library implements by a call with a folder, here the current one.
macro_rules! calls_at {
    ($($function:ident($flags:expr) = $number:ident;)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $function(path: u64, b: u64, c: u64) -> i64 {
            let folder = libc::AT_FDCWD as u64;
            // SAFETY: as above.
            unsafe { make(libc::$number, [folder, path, b, $flags.unwrap_or(c), 0, 0]) }
        }
    )*};
}

calls! {
    __wrap_close = SYS_close;
    __wrap_connect = SYS_connect;
    __wrap_dup3 = SYS_dup3;
    __wrap_fcntl = SYS_fcntl;
    __wrap_fsync = SYS_fsync;
    __wrap_ftruncate64 = SYS_ftruncate;
    __wrap_getpid = SYS_getpid;
    __wrap_getrandom = SYS_getrandom;
    __wrap_getrlimit = SYS_getrlimit;
    __wrap_getsockopt = SYS_getsockopt;
    __wrap_gettid = SYS_gettid;
    __wrap_ioctl = SYS_ioctl;
    __wrap_lseek64 = SYS_lseek;
    __wrap_madvise = SYS_madvise;
    __wrap_mincore = SYS_mincore;
    __wrap_mmap = SYS_mmap;
    __wrap_mmap64 = SYS_mmap;
    __wrap_mprotect = SYS_mprotect;
    __wrap_munmap = SYS_munmap;
    __wrap_prctl = SYS_prctl;
    __wrap_pread64 = SYS_pread64;
    __wrap_process_vm_writev = SYS_process_vm_writev;
    __wrap_pwrite64 = SYS_pwrite64;
    __wrap_read = SYS_read;
    __wrap_readv = SYS_readv;
    __wrap_sched_yield = SYS_sched_yield;
    __wrap_setsockopt = SYS_setsockopt;
    __wrap_sigaltstack = SYS_sigaltstack;
    __wrap_socket = SYS_socket;
    __wrap_socketpair = SYS_socketpair;
    __wrap_statx = SYS_statx;
    __wrap_write = SYS_write;
    __wrap_writev = SYS_writev;
}

calls_at! {
    __wrap_lstat64(Some(libc::AT_SYMLINK_NOFOLLOW as u64)) = SYS_newfstatat;
    __wrap_open(None) = SYS_openat;
    __wrap_open64(None) = SYS_openat;
    __wrap_stat64(Some(0)) = SYS_newfstatat;
}

#[cfg(target_arch = "x86_64")]
calls! {
    __wrap_pause = SYS_pause;
    __wrap_poll = SYS_poll;
    __wrap_readlink = SYS_readlink;
    __wrap_unlink = SYS_unlink;
}

/// Functions that the C library implements by newer calls, where the processor has no others.
#[cfg(target_arch = "aarch64")]
mod newer {
    use super::make;
    use libc::{c_int, timespec};

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_unlink(path: u64) -> i64 {
        // SAFETY: as above.
        unsafe { make(libc::SYS_unlinkat, [libc::AT_FDCWD as u64, path, 0, 0, 0, 0]) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_readlink(path: u64, to: u64, bytes: u64) -> i64 {
        // SAFETY: as above.
        unsafe { make(libc::SYS_readlinkat, [libc::AT_FDCWD as u64, path, to, bytes, 0, 0]) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_pause() -> i64 {
        // SAFETY: it waits for a signal, and uses no memory.
        unsafe { make(libc::SYS_ppoll, [0; 6]) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __wrap_poll(files: u64, count: u64, millis: c_int) -> i64 {
        let millis = i64::from(millis);
        let time = timespec { tv_sec: millis / 1000, tv_nsec: millis % 1000 * 1_000_000 };
        let time = if millis < 0 { 0 } else { &raw const time as u64 };
        // SAFETY: as above; the time outlives the call.
        unsafe { make(libc::SYS_ppoll, [files, count, time, 0, 0, 0]) }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_fstat64(file: u64, status: u64) -> i64 {
    // SAFETY: as above.
    unsafe { make(libc::SYS_fstat, [file, status, 0, 0, 0, 0]) }
}

/// Any call by its number.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_syscall(
    number: c_long,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    e: u64,
    f: u64,
) -> i64 {
    // SAFETY: as above.
    unsafe { make(number, [a, b, c, d, e, f]) }
}

/// Reads the clock without a system call where the kernel has code for that (vDSO).
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_clock_gettime(clock: c_int, time: *mut timespec) -> c_int {
    let now = match clock {
        libc::CLOCK_MONOTONIC => clock_gettime(ClockId::Monotonic),
        libc::CLOCK_REALTIME => clock_gettime(ClockId::Realtime),
        // SAFETY: as above.
        _ => unsafe {
            let arguments = [clock as u64, time as u64, 0, 0, 0, 0];
            return make(libc::SYS_clock_gettime, arguments) as c_int;
        },
    };
    // SAFETY: the caller has room for the time.
    unsafe { time.write(timespec { tv_sec: now.tv_sec, tv_nsec: now.tv_nsec }) };
    0
}

/// The answer is the error's number.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_clock_nanosleep(a: u64, b: u64, c: u64, d: u64) -> c_int {
    // SAFETY: as above.
    unsafe { -raw(libc::SYS_clock_nanosleep as u64, [a, b, c, d, 0, 0]) as c_int }
}

/// The text of an error number. In newer C libraries this function allocates. But in a forked child
/// that reports why it is left alone, the locks of the C library's allocator may be taken.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap___xpg_strerror_r(
    number: c_int,
    to: *mut c_char,
    bytes: usize,
) -> c_int {
    let text = Errno::from_raw(number).desc().as_bytes();
    let Some(most) = bytes.checked_sub(1) else { return libc::ERANGE };
    let fits = text.len().min(most);
    // SAFETY: the caller has room for that many bytes and the zero.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, fits);
        to.add(fits).write(0);
    }
    if fits < text.len() { libc::ERANGE } else { 0 }
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

/// A shell may have a function of its own by this name, which searches the shell's variables.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap_getenv(name: *const c_char) -> *const c_char {
    // SAFETY: the caller has a name; the list ends with a null, and each variable with a zero.
    unsafe {
        let name = CStr::from_ptr(name).to_bytes();
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            let text = CStr::from_ptr(*at).to_bytes();
            if text.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&b'=')) {
                return (*at).add(name.len() + 1);
            }
            at = at.add(1);
        }
        ptr::null()
    }
}
