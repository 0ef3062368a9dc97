//! The threads of this library, by their numbers.

use crate::looker;
use std::ffi::c_void;
use std::fs;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::Ordering::SeqCst;
use uzswap_calls::{raw, stop};
use uzswap_sys::own_threads;

/// The thread that watches, if it has begun.
pub fn watcher() -> Option<i32> {
    own_threads::of_own_process(crate::front()?.watcher.load(SeqCst))
}

/// The live threads of this library.
pub fn ours() -> Vec<i32> {
    let watcher = watcher();
    let is_ours = |thread: &i32| own_threads::all().chain(watcher).any(|ours| ours == *thread);
    stop::threads().unwrap_or_default().into_iter().filter(is_ours).collect()
}

/// True if all of the program's threads have ended. The kernel lists the first thread until the
/// last thread ends, which is one of ours.
pub fn are_all_ours() -> bool {
    if has_memory(std::process::id()) {
        return false;
    }
    looker::apart(|| {
        let ours = ours();
        let others = |thread: &i32| !ours.contains(thread);
        let Ok(all) = stop::threads() else { return false };
        let left: Vec<i32> = all.into_iter().filter(others).collect();
        matches!(left[..], [first] if first as u32 == std::process::id() && has_ended(first))
    })
}

/// True if this memory can be read as that of the process: its first thread has not ended.
fn has_memory(process: u32) -> bool {
    let (from, mut to) = (0u8, 0u8);
    let from = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: 1 };
    let into = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: 1 };
    let [from, into] = [&raw const from as u64, &raw const into as u64];
    let arguments = [process.into(), into, 1, from, 1, 0];
    // SAFETY: a byte of ours is copied to another byte of ours.
    unsafe { raw(libc::SYS_process_vm_readv as u64, arguments) == 1 }
}

/// True if the kernel says that a thread has ended.
fn has_ended(thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
}

/// Ends the program as the C library does after its last thread. The library counts ours, too, so
/// it does nothing. Its functions run in a thread of the program's.
pub fn end_program() {
    extern "C" fn end(_: *mut c_void) -> *mut c_void {
        // SAFETY: the call takes a number, and the program has no other thread.
        unsafe { libc::exit(0) }
    }
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the function has this form, and no thread joins this one. Where it cannot be started,
    // the caller tries again.
    unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), end, ptr::null_mut()) };
}
