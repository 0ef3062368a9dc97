//! Functions of the C library that glibc had in libraries of their own before version 2.34
//! (libpthread and libdl).
//!
//! ```text
//! library             where              needs                     a program with an older glibc
//! the usual one       any glibc          all three libraries       is kept small
//! the `unified` one   glibc from 2.34    the C library alone       is left alone, if it lacks one
//! ```
//! Since 2.34 the two libraries are empty, but the dynamic linker maps them at each start of a
//! program that needs them. The second build of this library (build.rs) needs neither, and refers
//! to their functions weakly, by names without versions. `uzswap run` chooses it where its own C
//! library is new. A program there may still bring an older one, which lacks the functions unless
//! the program needs both libraries itself.

#[cfg(unified)]
use std::arch::{asm, global_asm};

#[cfg(unified)]
global_asm!(
    ".weak dladdr",
    ".weak dladdr1",
    ".weak dlerror",
    ".weak dlopen",
    ".weak dlsym",
    ".weak __pthread_key_create",
    ".weak pthread_attr_setstack",
    ".weak pthread_attr_setstacksize",
    ".weak pthread_create",
    ".weak pthread_join",
    ".weak pthread_setname_np",
);

/// The address of a function; 0 if the process has none of this name. (For the compiler, the
/// address of a function in Rust is never 0.)
#[cfg(unified)]
macro_rules! address {
    ($name:literal) => {{
        let address: usize;
        // SAFETY: reads the address that the dynamic linker has written for this name.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            asm!(concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"), out(reg) address,
                options(nostack, pure, readonly, preserves_flags));
        }
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        unsafe {
            asm!(concat!("adrp {0}, :got:", $name), concat!("ldr {0}, [{0}, :got_lo12:", $name, "]"),
                out(reg) address, options(nostack, pure, readonly, preserves_flags));
        }
        address
    }};
}

/// True if the process has the functions of both libraries.
#[cfg(unified)]
pub fn is_whole() -> bool {
    address!("dlopen") != 0 && address!("pthread_create") != 0
}

#[cfg(not(unified))]
pub const fn is_whole() -> bool {
    true
}
