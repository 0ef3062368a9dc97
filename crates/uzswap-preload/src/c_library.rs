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

use libc::c_void;
#[cfg(unified)]
use std::arch::{asm, global_asm};
use std::ffi::CStr;

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
    ".weak _dl_sym",
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

/// The function of this name that the program would use without this library; null if there is
/// none. Without `dlsym` only functions that all versions of glibc have (`is_old`) are found.
#[cfg_attr(not(unified), expect(unused_variables, reason = "this build always has `dlsym`"))]
pub fn next(name: &CStr, is_old: bool) -> *mut c_void {
    #[cfg(unified)]
    if address!("dlsym") == 0 {
        return next_without_dlsym(name, is_old);
    }
    // SAFETY: a name; the result stays as long as the program.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Calls the function that `dlsym` is made of. Before 2.34 the C library has it, for libdl. It ends
/// the process if it does not find a name.
#[cfg(unified)]
fn next_without_dlsym(name: &CStr, is_old: bool) -> *mut c_void {
    type Find = unsafe extern "C" fn(*mut c_void, *const libc::c_char, *const u8) -> *mut c_void;
    static CALLER: u8 = 0;
    match address!("_dl_sym") {
        find if find == 0 || !is_old => std::ptr::null_mut(),
        // SAFETY: a function of this form in all these versions, by its name. The search begins
        // behind the library with the caller's address.
        find => unsafe {
            std::mem::transmute::<usize, Find>(find)(
                libc::RTLD_NEXT,
                name.as_ptr(),
                &raw const CALLER,
            )
        },
    }
}
