//! What is linked into this library, the codecs' C code and Rust's own allocator included, calls
//! the C library's malloc and not ours: a page fault must not need memory that is itself paged.

fn main() {
    for name in ["malloc", "calloc", "realloc", "free", "posix_memalign"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libuzswap_malloc.so");
    println!("cargo:rerun-if-changed=build.rs");
}
