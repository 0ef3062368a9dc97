//! What this library stands before from the start, by name: signals, forks, and the allocator, to
//! see who takes much memory. All else it sees once it has taken over, whoever calls.
//!
//! SIGBUS and SIGILL are never blocked, and a program's handlers of them get what is not ours.

use crate::processes::ours;
use crate::{AGENT, forking, inside, layout, stacks, takeover};
use libc::{c_int, sigset_t};
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use uzswap_calls::raw;
use uzswap_region::signals;

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: the arguments are the caller's, who answers for them.
    unsafe {
        let Some(mut action) = new.as_ref().copied() else {
            return signals::set_action(signal, new, old);
        };
        for signal in (1..=64).filter(|signal| ours() & 1 << (signal - 1) != 0) {
            libc::sigdelset(&mut action.sa_mask, signal);
        }
        signals::set_action(signal, &action, old)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler(signal, handler) }
}

/// What `signal` is in programs that ask for System V.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { signals::set_handler_once(signal, handler) }
}

/// An error number, or 0.
unsafe fn set_mask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // The C library's own two signals are none that a program may block.
    const INTERNAL: u64 = 0b11 << 31;
    let kept = if how == libc::SIG_UNBLOCK { 0 } else { ours() | INTERNAL };
    // Signals from 1 on: the C library's set begins with the kernel's.
    // SAFETY: the caller passes a set, or null.
    let set = unsafe { set.cast::<u64>().as_ref() }.map(|set| *set & !kept);
    let set = set.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let arguments = [how as u64, set as u64, old as u64, 8, 0, 0];
    // SAFETY: as above.
    let result = unsafe { raw(libc::SYS_rt_sigprocmask as u64, arguments) };
    -result as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_sigmask(
    how: c_int,
    set: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: the arguments are the caller's.
    unsafe { set_mask(how, set, old) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: the arguments are the caller's; errno is the thread's own.
    unsafe {
        match set_mask(how, set, old) {
            0 => 0,
            error => {
                *libc::__errno_location() = error;
                -1
            }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaltstack(new: *const libc::stack_t, old: *mut libc::stack_t) -> c_int {
    // SAFETY: the caller passes a description, or null.
    if let Some(stack) = unsafe { new.as_ref() } {
        let _inside = inside();
        let start = stack.ss_sp as usize;
        let stacks = &takeover::SIGNAL_STACKS;
        let mut stacks = stacks.lock().unwrap_or_else(PoisonError::into_inner);
        stacks.push(start..start + stack.ss_size);
    }
    // SAFETY: the arguments are the caller's; errno is the thread's own.
    unsafe {
        match stacks::set(AGENT.get(), new, old) {
            0 => 0,
            error => {
                *libc::__errno_location() = -error as c_int;
                -1
            }
        }
    }
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, each: usize) -> *mut c_void;
    fn __libc_realloc(block: *mut c_void, bytes: usize) -> *mut c_void;
}

/// A function of the allocator that the program would have had without us, which may be one that
/// it brings itself (jemalloc, a sanitizer's): what is taken from one is given back to it. 0: not
/// looked up yet.
struct Next {
    name: &'static CStr,
    function: AtomicUsize,
}

static MALLOC: Next = Next { name: c"malloc", function: AtomicUsize::new(0) };
static CALLOC: Next = Next { name: c"calloc", function: AtomicUsize::new(0) };
static REALLOC: Next = Next { name: c"realloc", function: AtomicUsize::new(0) };

impl Next {
    /// Its address; the C library's where there is no other.
    fn get(&self, of_libc: usize) -> usize {
        match self.function.load(Relaxed) {
            0 => self.look_up(of_libc),
            known => known,
        }
    }

    #[cold]
    fn look_up(&self, of_libc: usize) -> usize {
        // SAFETY: a name; what is found stays as long as the program.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize;
        let found = if found == 0 { of_libc } else { found };
        self.function.store(found, Relaxed);
        found
    }
}

/// The program brings an allocator of its own, which the C library uses too. It may call `mmap`
/// with its locks held, where no thread can be started: that takes memory of it.
static HAS_OWN: AtomicBool = AtomicBool::new(false);

/// See [`HAS_OWN`].
pub fn has_own_allocator() -> bool {
    HAS_OWN.load(Relaxed)
}

/// Finds out. Once, before the program begins.
pub fn look_for_allocator() {
    let of_libc = __libc_malloc as unsafe extern "C" fn(usize) -> *mut c_void as usize;
    // SAFETY: a name; nothing is called.
    let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, MALLOC.name.as_ptr()) };
    let is_ours = file_of(first) == file_of((&raw const MALLOC).cast());
    HAS_OWN.store(!is_ours || MALLOC.get(of_libc) != of_libc, Relaxed);
}

/// Where the file begins that an address lies in. By that, since a function's name may stand for
/// another one where this library is linked (build.rs).
fn file_of(address: *const c_void) -> usize {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: writes what it finds to where it is told; zeros are no file.
    unsafe {
        libc::dladdr(address, found.as_mut_ptr());
        found.assume_init().dli_fbase as usize
    }
}

/// What a thread asks for before it is looked how much the process has.
const OFTEN: usize = 4 << 20;

thread_local! {
    /// What this thread has asked for since.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

/// Counts what is asked for: a program that takes much memory is watched from then on, and no
/// other, since the thread that watches would change what programs may do that have one thread
/// (`setuid`, `unshare`). A program with an allocator of its own is watched from the start.
fn asked(bytes: usize, may_wait: bool) {
    // While libraries are still being loaded there may be no thread-local variables.
    if !crate::has_begun() {
        return;
    }
    if may_wait {
        crate::wait_before_more();
    }
    let sum = ASKED.get().saturating_add(bytes);
    ASKED.set(if sum < OFTEN { sum } else { 0 });
    if sum >= OFTEN {
        crate::look(bytes, may_wait);
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    asked(bytes, true);
    type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
    let next = MALLOC.get(__libc_malloc as Malloc as usize);
    // SAFETY: a function of this form, by its name; it takes any size.
    unsafe { std::mem::transmute::<usize, Malloc>(next)(bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(count: usize, each: usize) -> *mut c_void {
    asked(count.saturating_mul(each), true);
    type Calloc = unsafe extern "C" fn(usize, usize) -> *mut c_void;
    let next = CALLOC.get(__libc_calloc as Calloc as usize);
    // SAFETY: a function of this form, by its name; it takes any sizes.
    unsafe { std::mem::transmute::<usize, Calloc>(next)(count, each) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(block: *mut c_void, bytes: usize) -> *mut c_void {
    asked(bytes, true);
    type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
    let next = REALLOC.get(__libc_realloc as Realloc as usize);
    // SAFETY: a function of this form, by its name; the arguments are the caller's.
    unsafe { std::mem::transmute::<usize, Realloc>(next)(block, bytes) }
}

static FORK: Next = Next { name: c"fork", function: AtomicUsize::new(0) };

unsafe extern "C" {
    fn __fork() -> libc::pid_t;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fork() -> libc::pid_t {
    type Fork = unsafe extern "C" fn() -> libc::pid_t;
    let next = FORK.get(__fork as Fork as usize);
    // SAFETY: a function of this form, by its name.
    forking::fork_quietly(|| unsafe { std::mem::transmute::<usize, Fork>(next)() })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let is_plain = layout::is_plain(flags) && crate::is_counted();
    // All at once it might be more than there may be.
    let flags = if is_plain { flags & !libc::MAP_POPULATE } else { flags };
    // What is only reserved is made usable later, part by part.
    if is_plain && protection & libc::PROT_WRITE != 0 && flags & libc::MAP_NORESERVE == 0 {
        // Who calls this may be an allocator with its locks held, and it is called often: a build
        // of compilers that waited here took 1.7 times as long.
        asked(bytes, false);
    }
    // SAFETY: the arguments are the caller's.
    unsafe {
        libc::syscall(libc::SYS_mmap, at, bytes, protection, flags, file, offset) as *mut c_void
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap64(
    at: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    // SAFETY: the same, by its name for large files.
    unsafe { mmap(at, bytes, protection, flags, file, offset) }
}
