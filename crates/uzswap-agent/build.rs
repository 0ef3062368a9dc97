//! All code of this library, the codecs' C code included, takes its memory from an allocator of
//! ours (src/allocator.rs). The C library's heap is evicted, and a fork holds its locks. The code
//! does not find its thread-local variables through a table in that heap (src/thread_locals.rs).
//! For files and times it calls no function that a library of the program's may replace
//! (src/kernel.rs).
//!
//! Each program of a tree loads this library. So it needs only libraries that every program loads
//! anyway.

use std::env;
use std::fs;
use std::path::PathBuf;

/// Functions of the C library in whose place the linker puts ours, `__wrap_NAME`.
const NAMES: &str = "
    malloc calloc realloc free posix_memalign __tls_get_addr __cxa_thread_atexit_impl
    clock_gettime clock_nanosleep close connect dup3 fcntl fstat64 fsync ftruncate64 getenv
    getpid getrandom getrlimit getsockopt gettid ioctl lseek64 lstat64 madvise mincore mmap
    mmap64 mprotect munmap open open64 pause poll prctl pread64 process_vm_writev pwrite64
    read readlink readv sched_yield setsockopt sigaltstack socket socketpair stat64 statx
    syscall unlink write writev __xpg_strerror_r
";

fn main() {
    for name in NAMES.split_whitespace() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    // A program may have functions by these names as well.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libuzswap_agent.so");
    if env::var_os("CARGO_CFG_TARGET_ARCH").is_some_and(|name| name == "aarch64") {
        // src/thread_locals/aarch64.rs writes where the dynamic linker has written.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,norelro");
    }
    link_unwinder();
    println!("cargo:rerun-if-changed=build.rs");
}

/// Links the compiler's unwinder statically. Rust would ask for a shared library that programs in C
/// do not load, which takes a tenth of a millisecond in each.
fn link_unwinder() {
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    // The file that the linker finds in place of the library.
    let script = fs::write(folder.join("libgcc_s.so"), "GROUP(-lgcc_eh -lgcc)\n");
    if script.is_ok() {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
