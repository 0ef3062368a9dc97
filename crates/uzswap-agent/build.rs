//! What is linked into this library, the codecs' C code included, takes its memory from an
//! allocator of ours (src/memory.rs), not from the C library's, whose memory is what leaves; nor
//! does it find its thread-local variables by a table that lies there (src/locals.rs).

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
    println!("cargo:rerun-if-changed=build.rs");
}
