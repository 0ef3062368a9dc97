//! `LD_PRELOAD=libuzswap_preload.so PROGRAM`: counts what a program asks for, and when that is much
//! loads the agent, which can keep it small. `uzswap run --in-process` starts programs so.
//!
//! ```text
//! start        the process joins its tree                                      (this file)
//! malloc …     counted; every 4 MiB it is looked how much the process has      (interposed,
//!                                                                              counted)
//! 12 MiB       a thread loads the agent, and watches from then on              (loading)
//! then         the agent is asked
//! ```
//! Most programs of a build stay below that, and there are thousands of them. So this library is
//! small: what each start of a program costs is pages that the dynamic linker writes to, mappings,
//! and pages of code. It uses no more of the standard library than what is compiled in place: no
//! panic, no formatting, no memory. Until 12 MiB the process has no thread of ours, with which it
//! could not do what only a process with one thread may (`setuid`, `unshare`).

mod counted;
mod interposed;
mod loading;
mod room;

use libc::c_void;
use rustix::io;
use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};
use uzswap_tree::front::{FORM, Front, QUEUED, TAKING};
use uzswap_tree::{SILENT_MAX, Tree};

/// Where [`FRONT`] points to.
struct Place(UnsafeCell<MaybeUninit<Front>>);

// SAFETY: written once, before the pointer to it is; then it is only read.
unsafe impl Sync for Place {}

static PLACE: Place = Place(UnsafeCell::new(MaybeUninit::uninit()));
/// Null until this library has been set up, and in a program that is of no tree.
static FRONT: AtomicPtr<Front> = AtomicPtr::new(ptr::null_mut());

fn front() -> Option<&'static Front> {
    // SAFETY: null, or a front that stays.
    unsafe { FRONT.load(Acquire).as_ref() }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Runs when the program is loaded, before anything of its own.
extern "C" fn begin() {
    let Some(path) = variable(c"UZSWAP_TREE") else { return };
    let tree = match Tree::join(path) {
        Ok(tree) => tree,
        Err(error) => {
            // SAFETY: takes a number; what it returns is good until it is called again.
            let reason = unsafe { CStr::from_ptr(libc::strerror(error)) };
            return say(&[path.to_bytes(), b": ", reason.to_bytes()]);
        }
    };
    let mut key = 0;
    // SAFETY: the key is written; the functions are of the form that is asked for.
    let is_set_up = unsafe {
        // As one of the first the key has its place in each thread's block.
        libc::pthread_key_create(&mut key, Some(end)) == 0
            && __register_atfork(None, None, Some(in_child), ptr::null_mut()) == 0
    };
    if !is_set_up {
        return say(&[b"the C library has no room for its handlers"]);
    }
    let front = Front {
        form: FORM,
        tree,
        // SAFETY: takes nothing.
        first_thread: unsafe { libc::pthread_self() } as usize,
        room: room::distance(),
        room_bytes: room::BYTES,
        key,
        protects: interposed::protects(),
        has_own_allocator: interposed::has_own_allocator(),
        waits: AtomicU32::new(0),
    };
    let has_own = front.has_own_allocator;
    let place = PLACE.0.get().cast::<Front>();
    // SAFETY: there is one thread, and nobody has the pointer.
    unsafe { place.write(front) };
    counted::begin();
    FRONT.store(place, Release);
    if has_own && let Some(hooks) = loading::load_now() {
        (hooks.start_watching)();
    }
    interposed::look_at_signal_stack();
}

unsafe extern "C" {
    /// `pthread_atfork` of a program that never unloads this.
    fn __register_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
        library: *mut c_void,
    ) -> libc::c_int;
}

unsafe extern "C" fn in_child() {
    match loading::hooks() {
        Some(hooks) => (hooks.in_child)(),
        None => {
            loading::forked();
            front().into_iter().for_each(Front::forked);
        }
    }
}

/// Runs in a thread that ends.
unsafe extern "C" fn end(value: *mut c_void) {
    if let Some(hooks) = loading::hooks() {
        (hooks.end)(value);
    }
}

/// A variable of the environment.
fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: a name; what is found stays where it is while there is no other thread, and the
    // program has not begun.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}

unsafe extern "C" {
    /// The program's name, which the C library keeps.
    static program_invocation_short_name: *const libc::c_char;
}

/// Says why the program runs without, and has `run` know it if it can.
fn say(reason: &[&[u8]]) {
    if let Some(front) = front() {
        // SAFETY: a text that ends with a zero, or null, from before the program begins.
        let name = unsafe {
            let name = program_invocation_short_name;
            if name.is_null() { c"" } else { CStr::from_ptr(name) }
        };
        let mut parts: [&[u8]; 6] = [b""; 6];
        let all = [name.to_bytes(), b": "].into_iter().chain(reason.iter().copied());
        parts.iter_mut().zip(all).for_each(|(part, bytes)| *part = bytes);
        front.tree.table().leave_alone(&parts);
    }
    let mut parts = [IoSlice::new(b""); 6];
    let all = [&b"uzswap: this program runs without: "[..]].into_iter();
    for (part, bytes) in parts.iter_mut().zip(all.chain(reason.iter().copied()).chain([&b"\n"[..]]))
    {
        *part = IoSlice::new(bytes);
    }
    // Where standard error is closed there is nobody to tell.
    let _ = io::writev(rustix::stdio::stderr(), &parts);
}

/// Has a thread that asks for memory wait if it is to.
#[cold]
fn wait(front: &Front) {
    match loading::hooks() {
        Some(hooks) => (hooks.wait)(),
        None => front.wait_for_turn(|| loading::hooks().is_some()),
    }
}

/// Looks how much memory the process has, with what it is about to get, and has it watched if that
/// is much. Before that it waits for its turn, if it may.
#[cold]
fn look(front: &Front, more: usize, may_wait: bool) {
    if let Some(hooks) = loading::hooks() {
        return (hooks.look)(more, may_wait);
    }
    if counted::is_small(front) {
        return;
    }
    let used = counted::anonymous_bytes();
    front.queue(used);
    if may_wait {
        front.wait_for_turn(|| loading::hooks().is_some());
    }
    if used + (more as u64) < SILENT_MAX {
        return;
    }
    // Who asks again, while the dynamic linker is busy, does not wait again.
    let is_new = loading::load_in_thread();
    if is_new
        && may_wait
        && let Some(hooks) = loading::await_loaded(loading::LOAD_TIME)
    {
        (hooks.look)(more, true);
    }
}

/// What a thread asks for before it is looked how much the process has.
const OFTEN: usize = 4 << 20;

/// Counts what is asked for: a program that takes much memory is watched from then on, and no
/// other. One with an allocator of its own is watched from the start. Who has locks of the
/// program's allocator may not wait, since starting threads takes memory.
fn asked(bytes: usize, may_wait: bool) {
    let Some(front) = front() else { return };
    if may_wait && front.waits.load(Relaxed) & (TAKING | QUEUED) != 0 {
        wait(front);
    }
    if bytes >= counted::LARGE {
        counted::add_large(bytes);
    }
    let sum = room::asked().saturating_add(bytes);
    room::set_asked(if sum < OFTEN { sum } else { 0 });
    if sum >= OFTEN {
        look(front, bytes, may_wait);
    }
}
