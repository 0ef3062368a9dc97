//! Each program of a tree loads this library, so its layout makes a program's start cheap: 15
//! microseconds instead of 34 with the usual layout. Each library that this library needed would
//! cost as much again.

use std::env;
use std::fs;
use std::path::PathBuf;

fn main() {
    const ARGUMENTS: [&str; 8] = [
        // Other linkers keep unused functions, because an unwinder might need them.
        "-fuse-ld=bfd",
        "-Wl,-soname,libuzswap_preload.so",
        // One mapping for code and constants, one for variables: each further mapping takes the
        // kernel two microseconds, and a fork one more.
        "-Wl,-z,noseparate-code",
        // A read-only part would take one more page and one more system call.
        "-Wl,-z,norelro",
        "-Wl,-z,defs",
        "-Wl,--build-id=none",
        "-Wl,--hash-style=gnu",
        // Nothing here needs the usual start files.
        "-nostartfiles",
    ];
    for argument in ARGUMENTS {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    // Functions in whose place the linker puts ours (src/kernel.rs).
    for name in ["open", "close", "fstat", "fstatfs", "pread", "clock_gettime"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    leave_out_unwinder();
    println!("cargo:rerun-if-changed=build.rs");
}

/// Links the compiler's unwinder statically. Nothing calls it, so the linker takes no code of it.
/// Rust would ask for a shared library, which programs in C do not load.
fn leave_out_unwinder() {
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    // The linker finds this script in place of the library.
    let script = fs::write(folder.join("libgcc_s.so"), "GROUP(-lgcc_eh -lgcc)\n");
    if script.is_ok() {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
