//! Gives the shared library the name by which loaders look for it.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libuzswap.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
