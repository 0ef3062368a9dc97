//! Sets the shared library's soname, by which loaders look for it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libuzswap.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
