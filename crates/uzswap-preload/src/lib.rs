//! `LD_PRELOAD=libuzswap_preload.so PROGRAM`: counts the program's allocations, and loads the agent
//! when they are large. `uzswap run --in-process` starts programs in this way.
//!
//! ```text
//! start        the process joins its tree                                      (this file)
//! malloc …     counted; every 4 MiB the process's memory is checked            (interposed,
//!                                                                              counted)
//! 12 MiB       a thread loads the agent, and watches from then on              (loading)
//! then         the agent is asked
//! ```
//! A program with an allocator of its own loads the agent at the start, after a child process has
//! tried that (trial).
//!
//! Most programs of a build stay below 12 MiB, and there are thousands of them. So this library is
//! small. Its cost at a program's start is the pages that the dynamic linker writes, the mappings,
//! and the pages of code. It uses only inlined parts of the standard library: no panic, no
//! formatting, no allocation. Until 12 MiB the process has no thread of ours: some calls (`setuid`,
//! `unshare`) need a process with one thread.

#![expect(
    unsafe_code,
    reason = "the C library's functions by name, variables of a thread: the program answers for its arguments; the agent is never unloaded"
)]

mod c_library;
mod counted;
mod interposed;
mod kernel;
mod loading;
mod masks;
mod symbols;
mod system_call;
mod thread;
mod thread_locals;
mod trial;

use counted::MemoryUse;
use libc::c_void;
use rustix::io;
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use uzswap_tree::front::{BARE, FILTERED, FORM, Front, QUEUED, TAKING};
use uzswap_tree::{SILENT_MAX, Tree};

/// The target of [`FRONT`].
struct FrontCell(UnsafeCell<MaybeUninit<Front>>);

// SAFETY: written once, before the pointer to it is set; then it is only read.
unsafe impl Sync for FrontCell {}

static PLACE: FrontCell = FrontCell(UnsafeCell::new(MaybeUninit::uninit()));
/// Null until this library is initialized, and in a program without a tree.
static FRONT: AtomicPtr<Front> = AtomicPtr::new(ptr::null_mut());

fn front() -> Option<&'static Front> {
    // SAFETY: null, or a front that stays.
    unsafe { FRONT.load(Acquire).as_ref() }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Runs when the program is loaded, before any code of its own.
extern "C" fn begin() {
    let Some(path) = variable(c"UZSWAP_TREE") else { return };
    let tree = match Tree::join(path) {
        Ok(tree) => tree,
        Err(error) => {
            // SAFETY: the call takes a number; the result is valid until the next call.
            let reason = unsafe { CStr::from_ptr(libc::strerror(error)) };
            return say(&[path.to_bytes(), b": ", reason.to_bytes()]);
        }
    };
    if !c_library::is_whole() {
        const REASON: &[u8] = b"it brings a C library older than glibc 2.34";
        tree.leave_alone(&[name(), b": ", REASON]);
        return say(&[REASON]);
    }
    let mut key = 0;
    // SAFETY: the key is written; the functions have the required form.
    let is_set_up = unsafe {
        // The first keys have their values in each thread's block.
        __pthread_key_create(&mut key, Some(end)) == 0
            && __register_atfork(None, None, Some(in_child), ptr::null_mut()) == 0
    };
    if !is_set_up {
        return say(&[b"the C library has no room for its handlers"]);
    }
    let protects = tree.table().protects.load(Relaxed) != 0;
    if protects {
        interposed::protect();
    }
    let front = Front {
        form: FORM,
        tree,
        // SAFETY: takes nothing.
        first_thread: unsafe { libc::pthread_self() } as usize,
        room: thread_locals::distance(),
        room_bytes: thread_locals::BYTES,
        key,
        protects,
        has_own_allocator: interposed::has_own_allocator(),
        process: AtomicU32::new(uzswap_tree::own_number()),
        waits: AtomicU32::new(0),
        looking: AtomicU32::new(0),
        watcher: AtomicU64::new(0),
        ended: AtomicU64::new(0),
        is_past_library: AtomicBool::new(false),
    };
    // The trial runs before the front is set, so that the child reports nothing to the tree.
    let tried = front.has_own_allocator.then(trial::load);
    let place = PLACE.0.get().cast::<Front>();
    // SAFETY: there is one thread, and no other code has the pointer.
    unsafe { place.write(front) };
    counted::begin();
    FRONT.store(place, Release);
    match tried {
        Some(Ok(())) => {
            loading::load_now().into_iter().for_each(|hooks| (hooks.start_watching)());
        }
        Some(Err(reason)) => loading::give_up(&[reason]),
        None => {}
    }
}

unsafe extern "C" {
    /// `pthread_key_create`, by a name to which the standard library has no reference of its own:
    /// that reference would not be weak.
    fn __pthread_key_create(
        key: *mut libc::pthread_key_t,
        end: Option<unsafe extern "C" fn(*mut c_void)>,
    ) -> libc::c_int;

    /// `pthread_atfork` of a program that never unloads this.
    fn __register_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
        library: *mut c_void,
    ) -> libc::c_int;
}

/// True if the program restricts its system calls (seccomp), and perhaps forbids ours.
fn is_filtered() -> bool {
    front().is_some_and(|front| front.waits.load(Relaxed) & FILTERED != 0)
}

/// Runs in a child, among the C library's fork handlers.
unsafe extern "C" fn in_child() {
    begin_child(false);
}

fn begin_child(is_past_library: bool) {
    if let Some(front) = front() {
        front.is_past_library.store(is_past_library, Relaxed);
    }
    if is_filtered() {
        return;
    }
    match loading::hooks() {
        Some(hooks) if (hooks.in_child)() => {}
        hooks => {
            loading::forked();
            front().into_iter().for_each(Front::forked);
            if hooks.is_some() {
                loading::give_up(&[b"it was forked while uzswap took its parent over"]);
            }
        }
    }
}

/// Runs in a thread that ends.
unsafe extern "C" fn end(value: *mut c_void) {
    if let Some(hooks) = loading::hooks() {
        (hooks.end)(value);
    }
}

fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: a name; the result stays in place while there is no other thread, and the program has
    // not begun.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

unsafe extern "C" {
    /// The program's name, which the C library keeps.
    static program_invocation_short_name: *const libc::c_char;
}

/// The program's name.
fn name() -> &'static [u8] {
    // SAFETY: a text that ends with a zero, or null, from before the program begins.
    let name = unsafe {
        let name = program_invocation_short_name;
        if name.is_null() { c"" } else { CStr::from_ptr(name) }
    };
    name.to_bytes()
}

/// Prints the reason why the program runs without the agent, and reports it to `run` if there is a
/// tree.
fn say(reason: &[&[u8]]) {
    if let Some(front) = front() {
        let mut parts: [&[u8]; 6] = [b""; 6];
        let all = [name(), b": "].into_iter().chain(reason.iter().copied());
        parts.iter_mut().zip(all).for_each(|(part, bytes)| *part = bytes);
        front.tree.leave_alone(&parts);
    }
    let mut parts = [IoSlice::new(b""); 6];
    let all = [&b"uzswap: this program runs without: "[..]].into_iter();
    for (part, bytes) in parts.iter_mut().zip(all.chain(reason.iter().copied()).chain([&b"\n"[..]]))
    {
        *part = IoSlice::new(bytes);
    }
    // Standard error may be closed.
    let _ = io::writev(rustix::stdio::stderr(), &parts);
}

/// Makes a thread that asks for memory wait if it must.
#[cold]
fn wait(front: &Front) {
    match loading::hooks() {
        Some(hooks) => (hooks.wait)(),
        None => front.wait_for_turn(|| loading::hooks().is_some()),
    }
}

/// Checks the process's memory, including the `more` bytes that it is about to get. If the memory
/// is large, starts watching the process. Waits for the process's turn first, if `may_wait`.
#[cold]
fn look(front: &Front, more: usize, may_wait: bool) {
    if front.is_forked() {
        // The process was forked past the C library, whose handlers have not run.
        begin_child(true);
    }
    let Some(_looking) = front.look() else { return };
    if let Some(hooks) = loading::hooks() {
        return (hooks.look)(more, may_wait);
    }
    if counted::is_small(front) {
        return;
    }
    let MemoryUse { used, usable } = counted::memory();
    front.queue(used);
    if may_wait {
        front.wait_for_turn(|| loading::hooks().is_some());
    }
    let more_bytes = more as u64;
    if used + more_bytes < SILENT_MAX && usable.saturating_add(more_bytes) < front.late_least() {
        return;
    }
    // If another call has begun to load the agent, this call does not wait, because the dynamic
    // linker may be busy.
    let is_new = loading::load_in_thread();
    if is_new
        && may_wait
        && let Some(hooks) = loading::await_loaded(loading::LOAD_TIME)
    {
        (hooks.look)(more, true);
    }
}

/// Starts watching a program that reserves enough addresses to grow beyond its budget without a
/// further request.
fn reserved(bytes: usize) {
    let Some(front) = front() else { return };
    if bytes as u64 >= front.late_least() && front.waits.load(Relaxed) & FILTERED == 0 {
        match loading::hooks() {
            Some(hooks) => (hooks.start_watching)(),
            None => _ = loading::load_in_thread(),
        }
    }
}

/// Bytes that a thread asks for between two checks of the process's memory.
const OFTEN: usize = 4 << 20;

/// Counts an allocation. A program with an allocator of its own is watched from the start, any
/// other program when it has much memory. `may_wait` is false in a thread that may have locks of
/// the program's allocator, since starting threads allocates.
fn asked(bytes: usize, may_wait: bool) {
    let Some(front) = front() else { return };
    let waits = front.waits.load(Relaxed);
    if waits & FILTERED != 0 {
        return;
    }
    if may_wait && waits & (TAKING | QUEUED | BARE) != 0 {
        wait(front);
    }
    if bytes >= counted::LARGE {
        counted::add_large(bytes);
    }
    let sum = thread_locals::asked().saturating_add(bytes);
    thread_locals::set_asked(if sum < OFTEN { sum } else { 0 });
    if sum >= OFTEN {
        look(front, bytes, may_wait);
    }
}
