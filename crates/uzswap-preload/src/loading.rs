//! Loads the agent.
//!
//! The thread that asks for memory does not load the agent: it may be inside the dynamic linker,
//! which does not load one library in the middle of another. A thread of ours loads it instead, and
//! waits for the linker's lock. The thread that waits for our thread may have that lock, so its
//! wait is short.

use crate::{front, masks, say, thread};
use libc::{c_char, c_int, c_void};
use rustix::time::Timespec;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};
use uzswap_tree::front::{BEGIN, Begin, Fork, Front, Hooks};

/// The agent, from the folder of this library. The `unified` build lies in a folder below.
const AGENT: &CStr = if cfg!(unified) { c"../libuzswap_agent.so" } else { c"libuzswap_agent.so" };

/// The longest time that loading takes if the dynamic linker is not busy, in milliseconds.
pub const LOAD_TIME: u32 = 20;
/// Milliseconds after which we assume that the loading thread waits for the caller.
const PATIENCE: u32 = 100;

/// Not tried yet.
const NOT_LOADED: u32 = 0;
/// A thread loads the agent.
const LOADING: u32 = 1;
/// Loading has succeeded or failed, and is not tried again.
const ENDED: u32 = 2;

static STATE: AtomicU32 = AtomicU32::new(NOT_LOADED);
/// The number of threads that are forking. If a child were forked during loading, its dynamic
/// linker would never finish.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The agent's hooks; null where it is not loaded.
static HOOKS: AtomicPtr<Hooks> = AtomicPtr::new(ptr::null_mut());

/// The agent's hooks, if it is loaded.
pub fn hooks() -> Option<&'static Hooks> {
    // SAFETY: null, or the agent's, which is never unloaded.
    unsafe { HOOKS.load(Acquire).as_ref() }
}

/// Loads the agent in the calling thread, which must not be inside the dynamic linker.
pub fn load_now() -> Option<&'static Hooks> {
    match STATE.compare_exchange(NOT_LOADED, LOADING, SeqCst, SeqCst) {
        Ok(_) => load(open),
        Err(_) => await_loaded(PATIENCE),
    }
}

/// Waits while a thread loads the agent, at most `patience` milliseconds.
pub fn await_loaded(patience: u32) -> Option<&'static Hooks> {
    (0..patience).take_while(|_| STATE.load(SeqCst) == LOADING).for_each(|_| pause());
    hooks()
}

/// The agent's hooks. If another thread loads the agent, waits for that.
pub fn await_hooks() -> Option<&'static Hooks> {
    await_loaded(PATIENCE)
}

pub fn pause() {
    let millisecond = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    // A signal may end the sleep early.
    let _ = rustix::thread::nanosleep(&millisecond);
}

/// Starts a thread that loads the agent and then watches. `false` if loading had begun already.
pub fn load_in_thread() -> bool {
    if STATE.compare_exchange(NOT_LOADED, LOADING, SeqCst, SeqCst).is_err() {
        return false;
    }
    // SAFETY: the written structures were made for it, and the function has the required form. The
    // new thread blocks the program's signals, so that the program's threads take them; the signals
    // of faults are our own.
    let is_started = unsafe {
        let mut every = MaybeUninit::<libc::sigset_t>::zeroed();
        let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
        libc::sigfillset(every.as_mut_ptr());
        for fault in [libc::SIGBUS, libc::SIGSEGV, libc::SIGILL] {
            libc::sigdelset(every.as_mut_ptr(), fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, every.as_ptr(), before.as_mut_ptr());
        let started = thread::start_for_good(load_and_watch);
        masks::set_whole_mask(before.as_ptr());
        started
    };
    if !is_started {
        STATE.store(ENDED, SeqCst);
        say(&[b"no thread can be started"]);
    }
    true
}

extern "C" fn load_and_watch(_: *mut c_void) -> *mut c_void {
    // SAFETY: a name of less than 16 bytes.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), c"uzswap-agent".as_ptr()) };
    front().into_iter().for_each(Front::set_watcher);
    if let Some(hooks) = load(open_apart) {
        (hooks.watch)();
    }
    ptr::null_mut()
}

/// Called by the thread that has set the state.
fn load(open: fn() -> *const Hooks) -> Option<&'static Hooks> {
    (0..PATIENCE).take_while(|_| FORKS.load(SeqCst) != 0).for_each(|_| pause());
    let hooks = open();
    HOOKS.store(hooks.cast_mut(), Release);
    STATE.store(ENDED, SeqCst);
    self::hooks()
}

/// Stops using the agent in this process, and says why.
pub fn give_up(reason: &[&[u8]]) {
    HOOKS.store(ptr::null_mut(), Release);
    STATE.store(ENDED, SeqCst);
    say(reason);
}

/// Opens the agent in a thread with a table of descriptors of its own. In the program's table the
/// library's file would have the lowest free number. A program that closes all its descriptors
/// would close that file while the dynamic linker reads it. The caller's signals are blocked.
fn open_apart() -> *const Hooks {
    // SAFETY: the thread of the caller blocks the program's signals.
    let opened = unsafe { thread::run(open_in_own_table) };
    opened.map_or_else(open, |hooks| hooks.cast::<Hooks>().cast_const())
}

extern "C" fn open_in_own_table(_: *mut c_void) -> *mut c_void {
    const UNSHARE: c_int = 2;
    // SAFETY: takes numbers. The call closes all but the standard streams in a new table, which
    // only this thread uses. If the kernel refuses, the thread keeps the program's table.
    unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, UNSHARE) };
    open().cast_mut().cast()
}

/// The agent's library; null where it cannot be loaded.
fn open_library() -> *mut c_void {
    let mut path = [0; libc::PATH_MAX as usize];
    if !beside_own(&mut path) {
        return ptr::null_mut();
    }
    // SAFETY: the path ends with a zero.
    unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE) }
}

/// The agent's hooks. Null if the agent cannot be loaded; the reason was reported then.
fn open() -> *const Hooks {
    let handle = open_library();
    // SAFETY: names end with a zero, and so do the linker's texts; the function has this form, by
    // its name.
    unsafe {
        if handle.is_null() {
            let reason = libc::dlerror();
            let reason = if reason.is_null() { AGENT } else { CStr::from_ptr(reason) };
            say(&[reason.to_bytes()]);
            return ptr::null();
        }
        let begin = libc::dlsym(handle, BEGIN.as_ptr());
        let begin = std::mem::transmute::<*mut c_void, Option<Begin>>(begin);
        let hooks = begin.zip(front()).map_or(ptr::null(), |(begin, front)| begin(front));
        if hooks.is_null() {
            say(&[AGENT.to_bytes(), b" is of another version"]);
        }
        hooks
    }
}

/// Loads the agent and starts a thread. Called in a child process that then ends.
pub fn try_out() {
    open_library();
    // SAFETY: the child has no handler of signals.
    unsafe { thread::run(do_nothing) };
}

extern "C" fn do_nothing(value: *mut c_void) -> *mut c_void {
    value
}

/// Writes the path of the agent, in the folder of this library; true if it fits.
fn beside_own(path: &mut [c_char]) -> bool {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the call writes its result to the given structure; all-zero bytes mean no file. Names
    // end with a zero.
    let own = unsafe {
        libc::dladdr((&raw const STATE).cast(), found.as_mut_ptr());
        let name = found.assume_init().dli_fname;
        if name.is_null() { c"" } else { CStr::from_ptr(name) }
    };
    let own = own.to_bytes();
    let folder = own.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let name = AGENT.to_bytes_with_nul();
    let whole = own.iter().take(folder).chain(name);
    path.iter_mut().zip(whole).for_each(|(to, from)| *to = *from as c_char);
    folder.saturating_add(name.len()) <= path.len()
}

/// Forks through the agent if it is loaded. Otherwise waits while a thread loads the agent, unless
/// that thread seems to wait for the caller.
///
/// # Safety
/// As of `next`, which is `fork`.
pub unsafe fn fork(next: Fork) -> libc::pid_t {
    let mut waited = 0;
    loop {
        if let Some(hooks) = hooks() {
            // SAFETY: the caller's promise.
            return unsafe { (hooks.fork)(next) };
        }
        // From now on a thread that begins to load the agent waits for this fork.
        FORKS.fetch_add(1, SeqCst);
        let is_loading = STATE.load(SeqCst) == LOADING;
        if hooks().is_none() && (!is_loading || waited == PATIENCE) {
            // SAFETY: the caller's promise.
            let child = unsafe { next() };
            // In the child no other thread forks.
            if child != 0 {
                FORKS.fetch_sub(1, SeqCst);
            }
            return child;
        }
        FORKS.fetch_sub(1, SeqCst);
        if is_loading {
            pause();
            waited += 1;
        }
    }
}

/// In a fork the thread that loaded the agent does not exist.
pub fn forked() {
    FORKS.store(0, SeqCst);
    let _ = STATE.compare_exchange(LOADING, NOT_LOADED, SeqCst, SeqCst);
}
