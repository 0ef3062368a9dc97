//! Each program of a tree loads this library, so its layout makes a program's start cheap: 15
//! microseconds instead of 34 with the usual layout. Each library that this library needed would
//! cost as much again.

use std::env;
use std::fs;
use std::path::PathBuf;

/// Makes the library for glibc 2.34 and later (src/c_library.rs). `xtask dist` sets it.
const UNIFIED: &str = "UZSWAP_UNIFIED_GLIBC";

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
    println!("cargo:rustc-check-cfg=cfg(unified)");
    println!("cargo:rerun-if-env-changed={UNIFIED}");
    let is_unified = env::var_os(UNIFIED).is_some();
    if is_unified {
        println!("cargo:rustc-cfg=unified");
    }
    leave_out_libraries(is_unified);
    println!("cargo:rerun-if-changed=build.rs");
}

/// Leaves out libraries that programs in C do not load. The linker finds these scripts in place of
/// the libraries.
fn leave_out_libraries(is_unified: bool) {
    // The compiler's unwinder is linked statically. Nothing calls it, so the linker takes no code
    // of it. Rust would ask for a shared library.
    replace("unwinder", &["libgcc_s.so"], "GROUP(-lgcc_eh -lgcc)\n");
    if is_unified {
        // Their functions stay undefined, without a version that only these libraries have.
        replace("unified", &["libpthread.so", "libdl.so"], "GROUP(-lc)\n");
    }
}

/// Writes a script for each of these libraries. Both builds of this library share a folder, so each
/// group of scripts has one of its own, `below` it.
fn replace(below: &str, libraries: &[&str], script: &str) {
    let Some(folder) = env::var_os("OUT_DIR").map(|folder| PathBuf::from(folder).join(below))
    else {
        return;
    };
    let write = |name: &&str| fs::write(folder.join(name), script).is_ok();
    if fs::create_dir_all(&folder).is_ok() && libraries.iter().all(write) {
        println!("cargo:rustc-link-search=native={}", folder.display());
    }
}
