//! All code of this library, the codecs' C code included, takes its memory from an allocator of
//! ours (src/allocator.rs): the C library's memory is evicted. Nor does it find its thread-local
//! variables by a table that lies there (src/thread_locals.rs).
//!
//! Each program of a tree loads it, so it needs no library that they would not load without it.

use std::env;
use std::fs;
use std::path::PathBuf;

fn main() {
    const NAMES: [&str; 7] = [
        "malloc",
        "calloc",
        "realloc",
        "free",
        "posix_memalign",
        "__tls_get_addr",
        "__cxa_thread_atexit_impl",
    ];
    for name in NAMES {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libuzswap_agent.so");
    link_unwinder();
    println!("cargo:rerun-if-changed=build.rs");
}

/// Has the compiler's unwinder linked in. Rust asks for it as a library that programs in C do not
/// load: a tenth of a millisecond for each.
fn link_unwinder() {
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    // The file that the linker finds in place of the library.
    let script = fs::write(folder.join("libgcc_s.so"), "GROUP(-lgcc_eh -lgcc)\n");
    if script.is_ok() {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
