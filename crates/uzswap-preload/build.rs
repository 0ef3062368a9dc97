//! Each program of a tree loads this library, so it is laid out to cost a program's start little:
//! 15 microseconds, where one that a linker lays out as usual costs 34, and each more that it asks
//! for as much again.

use std::env;
use std::fs;
use std::path::PathBuf;

fn main() {
    const ARGUMENTS: [&str; 8] = [
        // Others keep what nobody calls, because an unwinder might.
        "-fuse-ld=bfd",
        "-Wl,-soname,libuzswap_preload.so",
        // One mapping for code and constants, one for variables: each more takes the kernel two
        // microseconds, and a fork another one.
        "-Wl,-z,noseparate-code",
        // What would be made read-only is a page of its own, and another call.
        "-Wl,-z,norelro",
        "-Wl,-z,defs",
        "-Wl,--build-id=none",
        "-Wl,--hash-style=gnu",
        // Nothing of what those do is used here.
        "-nostartfiles",
    ];
    for argument in ARGUMENTS {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    leave_out_unwinder();
    println!("cargo:rerun-if-changed=build.rs");
}

/// Has the compiler's unwinder linked in as far as it is called, which is nowhere. Rust asks for it
/// as a library that programs in C do not load.
fn leave_out_unwinder() {
    let Some(folder) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    // What the linker finds in place of the library.
    let script = fs::write(folder.join("libgcc_s.so"), "GROUP(-lgcc_eh -lgcc)\n");
    if script.is_ok() {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
