//! The processor: **the one place** with its instructions, and with its registers as a signal
//! stores them. There is a file for each kind of processor, with the same functions.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{advise, cause, registers, set_registers};
#[cfg(target_arch = "aarch64")]
pub use aarch64::{has_aes, on_stack, prefetch, thread_pointer};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{advise, cause, registers, set_registers};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{has_aes, on_stack, prefetch, thread_pointer};

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("uzswap knows no registers of this processor; build it for x86-64 or aarch64");

/// The kind of an access that was a fault.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cause {
    pub(crate) is_write: bool,
    /// True if the access fetched an instruction.
    pub(crate) is_fetch: bool,
    /// True if a protection key denied the access (`pkey_mprotect`).
    pub(crate) is_by_key: bool,
    /// The address of the instruction that made the access.
    pub(crate) instruction: usize,
}

/// The registers that show where a stopped thread is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registers {
    /// The next instruction.
    pub(crate) instruction: usize,
    pub(crate) stack: usize,
    /// The result of a system call.
    pub(crate) result: i64,
    /// The address behind the last system call, where the processor keeps it; otherwise 0.
    pub(crate) behind: usize,
    /// The number of the last system call, where the processor keeps it.
    pub(crate) number: Option<i64>,
    /// The arguments of a system call.
    pub(crate) arguments: [u64; 6],
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::map::{Mapping, PAGE_BYTES};
    use crate::proc_mem::{Access, set_access};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    static SEEN: Mutex<Vec<Cause>> = Mutex::new(Vec::new());
    static PAGE: AtomicUsize = AtomicUsize::new(0);

    extern "C" fn note(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
        // SAFETY: the third argument of a handler.
        SEEN.lock().unwrap().push(unsafe { cause(context) });
        let at = PAGE.load(SeqCst);
        // SAFETY: the page of the test below; the access is repeated.
        unsafe { set_access(at..at + PAGE_BYTES, Access::All) }.unwrap();
    }

    #[test]
    fn a_fault_tells_a_write_from_a_read_and_where_it_was() {
        let page = Mapping::reserved(PAGE_BYTES).unwrap();
        let (at, byte) = (page.as_ptr() as usize, page.as_ptr());
        PAGE.store(at, SeqCst);
        // SAFETY: the handler has the form of SA_SIGINFO, and the former handler is restored. We
        // mapped the page, and no other code accesses it.
        unsafe {
            let mut ours: libc::sigaction = std::mem::zeroed();
            ours.sa_sigaction = note as *const () as usize;
            ours.sa_flags = libc::SA_SIGINFO;
            let mut before = ours;
            assert_eq!(libc::sigaction(libc::SIGSEGV, &ours, &mut before), 0);
            for is_write in [false, true] {
                set_access(at..at + PAGE_BYTES, Access::None).unwrap();
                match is_write {
                    true => byte.write_volatile(1),
                    false => assert_eq!(byte.read_volatile(), 0),
                }
            }
            libc::sigaction(libc::SIGSEGV, &before, std::ptr::null_mut());
        }
        let seen = std::mem::take(&mut *SEEN.lock().unwrap());
        assert_eq!(seen.iter().map(|cause| cause.is_write).collect::<Vec<_>>(), [false, true]);
        assert!(seen.iter().all(|cause| !cause.is_fetch && cause.instruction != 0));
    }
}
