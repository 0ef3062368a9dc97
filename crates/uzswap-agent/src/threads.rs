//! The threads of this library, by their numbers.

use crate::thread_count::{self, ThreadCount};
use crate::{looker, signals};
use std::ffi::c_void;
use std::fs;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use uzswap_calls::{raw, stop};
use uzswap_sys::own_threads;
use uzswap_tree::front::Front;

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

/// True for a thread of this library. Opens no file.
pub fn is_ours(thread: i32) -> bool {
    own_threads::all().chain(watcher()).any(|ours| ours == thread)
}

/// The number of these threads.
pub fn count() -> usize {
    let is_new = |watcher: &i32| own_threads::all().all(|ours| ours != *watcher);
    let watcher = watcher().filter(|watcher| is_new(watcher) && lives(*watcher));
    own_threads::all().count() + usize::from(watcher.is_some())
}

/// Waits until our threads that are beginning are known, at most 20 ms. They begin after a fork.
pub fn await_all() {
    const LOOKS: u32 = 100;
    let is_known = || !own_threads::are_coming() && watcher().is_some();
    (0..LOOKS).take_while(|_| !is_known()).for_each(|_| pause());
}

/// True if a thread of this process has not ended. Opens no file.
pub fn lives(thread: i32) -> bool {
    // SAFETY: asks only.
    unsafe {
        let process = raw(libc::SYS_getpid as u64, [0; 6]) as u64;
        raw(libc::SYS_tgkill as u64, [process, thread as u64, 0, 0, 0, 0]) == 0
    }
}

/// Waits a moment.
pub fn pause() {
    let pause = libc::timespec { tv_sec: 0, tv_nsec: 200_000 };
    // SAFETY: sleeps; a signal ends it early.
    unsafe { raw(libc::SYS_nanosleep as u64, [&raw const pause as u64, 0, 0, 0, 0, 0]) };
}

/// The number of this process, once we have seen that its first thread ended before other threads
/// of the program's.
static HAS_ENDED_FIRST: AtomicU32 = AtomicU32::new(0);

/// How the program ends with its last thread.
#[derive(Clone, Copy)]
pub enum ProgramEnd {
    /// By the C library's `exit`, with the program's functions and streams.
    Orderly,
    /// Immediately, with the status of the last thread: some thread has ended by a system call, so
    /// the C library waits for that thread for ever. Also in a child that was forked past the
    /// library: its first thread usually ends by a system call, as in `clone`.
    Raw(i32),
}

/// The way in which a program must end, all of whose threads have ended. The kernel lists the first
/// thread until the last thread ends, and the last is one of ours. `None` if the program still has
/// a thread, or if the answer is not known yet.
pub fn end() -> Option<ProgramEnd> {
    if has_memory(std::process::id()) {
        return None;
    }
    looker::apart(|| {
        let ours = ours();
        let others = |thread: &i32| !ours.contains(thread);
        let all = stop::threads().ok()?;
        let left: Vec<i32> = all.into_iter().filter(others).collect();
        let process = std::process::id();
        let first = left.iter().copied().find(|first| *first as u32 == process)?;
        let status = status_of_ended(first)?;
        if left.len() > 1 {
            HAS_ENDED_FIRST.store(process, SeqCst);
            return None;
        }
        // The C library counts a thread of ours that is being started, but our list lacks it.
        let counted = (!own_threads::are_coming()).then(thread_count::get)?;
        let last = last_status(first, status);
        let is_raw = match counted {
            ThreadCount::Threads(count) => count > ours.len(),
            ThreadCount::Parents => true,
            // The library ends threads with status 0.
            ThreadCount::Unknown => last != 0 || status != 0,
        };
        match is_raw {
            true => Some(ProgramEnd::Raw(last)),
            false => Some(ProgramEnd::Orderly),
        }
    })
}

/// The status of the program's last thread, where the first thread ended with `first_status`.
fn last_status(first: i32, first_status: i32) -> i32 {
    let noted = crate::front().and_then(Front::ended);
    match noted.filter(|(thread, _)| *thread != first) {
        Some((_, status)) => status,
        None if HAS_ENDED_FIRST.load(SeqCst) == std::process::id() => 0,
        None => first_status,
    }
}

/// True if our memory can be read under the process's number: then its first thread has not ended.
fn has_memory(process: u32) -> bool {
    let (from, mut to) = (0u8, 0u8);
    let from = libc::iovec { iov_base: (&raw const from).cast_mut().cast(), iov_len: 1 };
    let into = libc::iovec { iov_base: (&raw mut to).cast(), iov_len: 1 };
    let [from, into] = [&raw const from as u64, &raw const into as u64];
    let arguments = [process.into(), into, 1, from, 1, 0];
    // SAFETY: a byte of ours is copied to another byte of ours.
    unsafe { raw(libc::SYS_process_vm_readv as u64, arguments) == 1 }
}

/// The status with which a thread ended. `None` if the kernel does not report that the thread has
/// ended.
fn status_of_ended(thread: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).ok()?;
    let rest = stat.rsplit(") ").next()?;
    let code: i32 = rest.split_whitespace().last()?.parse().ok()?;
    rest.starts_with('Z').then_some(code >> 8)
}

/// Ends the program as the kernel or the C library does after the last thread. The library itself
/// does nothing, since it also counts our threads. Its `exit` runs in a new thread, which is not
/// one of ours.
pub fn end_program(end: ProgramEnd) {
    extern "C" fn exit(_: *mut c_void) -> *mut c_void {
        // SAFETY: the call takes a number, and the program has no other thread.
        unsafe { libc::exit(0) }
    }
    if let ProgramEnd::Raw(status) = end {
        // SAFETY: the call takes a number.
        unsafe { raw(libc::SYS_exit_group as u64, [status as u64, 0, 0, 0, 0, 0]) };
    }
    let mut thread = MaybeUninit::uninit();
    // SAFETY: the function has this form, and no thread joins this one. Where it cannot be started,
    // the caller tries again.
    unsafe { libc::pthread_create(thread.as_mut_ptr(), ptr::null(), exit, ptr::null_mut()) };
}

/// The signals that a thread blocks; `None` if it has ended.
pub fn blocked(thread: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).ok()?;
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
    u64::from_str_radix(blocked.trim(), 16).ok()
}

/// True if a thread of the program blocks SIGSEGV, or might.
pub fn blocks_segv() -> bool {
    const BUS: u64 = 1 << (libc::SIGBUS - 1);
    // No thread of the program blocks SIGBUS, so a thread that does is in our handler. The kernel
    // then does not tell which signals it will block.
    let is_in_handler = |mask: &u64| mask & BUS != 0;
    for _ in 0..250 {
        let masks = looker::apart(|| {
            let threads = stop::threads().ok()?;
            Some(threads.into_iter().filter_map(blocked).collect::<Vec<_>>())
        });
        let Some(masks) = masks else { continue };
        if masks.iter().any(|mask| mask & signals::SEGV != 0 && !is_in_handler(mask)) {
            return true;
        }
        if !masks.iter().any(is_in_handler) {
            return false;
        }
        pause();
    }
    true
}
