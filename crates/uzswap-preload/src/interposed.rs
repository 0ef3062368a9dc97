//! Functions that override the C library's by name: the allocator, to count a program's memory,
//! forks, and signals. After the takeover the agent sees all other calls, from any caller.
//!
//! SIGBUS and SIGILL are never blocked, nor is SIGSEGV where faults of pages raise it. The
//! program's handlers get those of these signals that are not ours.

use crate::loading::{self, hooks};
use crate::masks::{self, set_mask};
use crate::system_call::{answer, raw};
use crate::{asked, front, reserved, symbols};
use libc::{c_char, c_int, c_long, c_ulong, sigaction as Action, sigset_t, stat};
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::*};
use uzswap_tree::front::{FILTERED, Fork};
use uzswap_tree::{devices, left};

/// Keeps SIGSEGV, by which faults come, from being blocked.
pub fn protect() {
    masks::add_ours(libc::SIGSEGV);
}

unsafe extern "C" {
    // Functions of the C library, by names that no library overrides.
    fn __sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int;
    fn ssignal(signal: c_int, handler: usize) -> usize;
    fn sysv_signal(signal: c_int, handler: usize) -> usize;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(signal: c_int, new: *const Action, old: *mut Action) -> c_int {
    // SAFETY: the arguments are the caller's responsibility.
    unsafe {
        let mut action = new.as_ref().copied();
        if let Some(action) = &mut action {
            let ours = masks::ours();
            for signal in (1..=64).filter(|signal| ours & masks::bit(*signal) != 0) {
                libc::sigdelset(&mut action.sa_mask, signal);
            }
        }
        let new = action.as_ref().map_or(ptr::null(), ptr::from_ref);
        match hooks() {
            Some(hooks) => (hooks.sigaction)(signal, new, old),
            None => __sigaction(signal, new, old),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { hooks().map_or(ssignal as _, |hooks| hooks.signal)(signal, handler) }
}

/// System V's `signal`.
#[unsafe(no_mangle)]
unsafe extern "C" fn __sysv_signal(signal: c_int, handler: usize) -> usize {
    // SAFETY: as above.
    unsafe { hooks().map_or(sysv_signal as _, |hooks| hooks.sysv_signal)(signal, handler) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_sigmask(
    how: c_int,
    set: *const sigset_t,
    old: *mut sigset_t,
) -> c_int {
    // SAFETY: the arguments are the caller's; errno is the thread's own, and this function must not
    // change it.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        let error = if set_mask(how, set, old) == 0 { 0 } else { *errno };
        *errno = before;
        error
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: the arguments are the caller's.
    unsafe { set_mask(how, set, old) as c_int }
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, each: usize) -> *mut c_void;
    fn __libc_realloc(block: *mut c_void, bytes: usize) -> *mut c_void;
    fn __fork() -> libc::pid_t;
    // The linker's symbols: the start and the end of this library.
    static __ehdr_start: u8;
    static _end: u8;
}

/// The function that the program would use without us. It may be the program's own (jemalloc's, or
/// a sanitizer's): a block must be freed by the allocator that made it. 0 before it is looked up.
struct Next {
    name: &'static CStr,
    function: AtomicUsize,
}

static MALLOC: Next = Next::new(c"malloc");
static CALLOC: Next = Next::new(c"calloc");
static REALLOC: Next = Next::new(c"realloc");
static POSIX_MEMALIGN: Next = Next::new(c"posix_memalign");
static ALIGNED_ALLOC: Next = Next::new(c"aligned_alloc");
static MEMALIGN: Next = Next::new(c"memalign");
static FORK: Next = Next::new(c"fork");

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, function: AtomicUsize::new(0) }
    }

    /// The function's address, or `of_libc` if there is no other.
    fn get(&self, of_libc: usize) -> usize {
        match self.function.load(Relaxed) {
            0 => self.look_up(of_libc),
            known => known,
        }
    }

    #[cold]
    fn look_up(&self, of_libc: usize) -> usize {
        let found = symbols::next(self.name);
        let found = if found == 0 { of_libc } else { found };
        self.function.store(found, Relaxed);
        found
    }
}

/// The answer of an allocator without memory.
fn refuse() -> *mut c_void {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = libc::ENOMEM };
    ptr::null_mut()
}

/// True if the program, or one of its libraries, has an allocator of its own.
pub fn has_own_allocator() -> bool {
    let is_ours =
        |at: &usize| (&raw const __ehdr_start as usize..&raw const _end as usize).contains(at);
    // SAFETY: a name; nothing is called.
    let first = |next: &Next| unsafe { libc::dlsym(libc::RTLD_DEFAULT, next.name.as_ptr()) };
    let all = [&MALLOC, &CALLOC, &REALLOC].into_iter().map(|next| first(next) as usize);
    let found = all.into_iter().find(|at| is_ours(at) || !is_jump(*at));
    let of_libc = __libc_malloc as unsafe extern "C" fn(usize) -> *mut c_void as usize;
    !found.is_some_and(|at| is_ours(&at)) || MALLOC.get(of_libc) != of_libc
}

/// True if this is a program's jump to a library's function. If a program that is linked for fixed
/// addresses uses the function's address, that is the jump's: its symbol is undefined, and has a
/// value nevertheless. So in Debian's Python `malloc` seems to be the program's own.
fn is_jump(at: usize) -> bool {
    const WANTS_SYMBOL: c_int = 1;
    let (mut found, mut symbol) = (MaybeUninit::<libc::Dl_info>::uninit(), ptr::null_mut());
    // SAFETY: both are written. The symbol, if there is one, stays as long as its file.
    unsafe {
        let address = ptr::with_exposed_provenance(at);
        libc::dladdr1(address, found.as_mut_ptr(), &raw mut symbol, WANTS_SYMBOL) != 0
            && symbol.cast::<libc::Elf64_Sym>().as_ref().is_some_and(|symbol| symbol.st_shndx == 0)
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

type Align = unsafe extern "C" fn(usize, usize) -> *mut c_void;

/// ImageMagick allocates all of its pixels by this function.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(
    block: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> c_int {
    asked(bytes, true);
    type PosixMemalign = unsafe extern "C" fn(*mut *mut c_void, usize, usize) -> c_int;
    match POSIX_MEMALIGN.get(0) {
        0 => libc::ENOMEM,
        // SAFETY: a function of this form, by its name; the arguments are the caller's.
        next => unsafe {
            std::mem::transmute::<usize, PosixMemalign>(next)(block, alignment, bytes)
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: as above.
    unsafe { align(&ALIGNED_ALLOC, alignment, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memalign(alignment: usize, bytes: usize) -> *mut c_void {
    // SAFETY: as above.
    unsafe { align(&MEMALIGN, alignment, bytes) }
}

/// # Safety
/// As of `next`.
unsafe fn align(next: &Next, alignment: usize, bytes: usize) -> *mut c_void {
    asked(bytes, true);
    match next.get(0) {
        0 => refuse(),
        // SAFETY: a function of this form, by its name; the arguments are the caller's.
        next => unsafe { std::mem::transmute::<usize, Align>(next)(alignment, bytes) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fork() -> libc::pid_t {
    let next = FORK.get(__fork as Fork as usize);
    // SAFETY: a function of this form, by its name.
    unsafe { loading::fork(std::mem::transmute::<usize, Fork>(next)) }
}

/// The kernel permits some flags only to a process with one thread, and counts the agent's threads.
#[unsafe(no_mangle)]
unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: given a number.
    unsafe { alone(libc::SYS_unshare, flags as u32 as u64, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setns(descriptor: c_int, kind: c_int) -> c_int {
    // SAFETY: given numbers.
    unsafe { alone(libc::SYS_setns, descriptor as u32 as u64, kind as u32 as u64) }
}

unsafe fn alone(number: c_long, first: u64, second: u64) -> c_int {
    let hooks = if crate::is_filtered() { None } else { loading::await_hooks() };
    let result = match hooks {
        // SAFETY: the caller's arguments.
        None => unsafe { raw(number, [first, second, 0, 0, 0, 0]) },
        Some(hooks) => (hooks.alone)(number, first, second),
    };
    answer(result) as c_int
}

type StatAt = unsafe extern "C" fn(c_int, *const c_char, *mut stat, c_int) -> c_int;
type VersionedStatAt = unsafe extern "C" fn(c_int, c_int, *const c_char, *mut stat, c_int) -> c_int;
static FSTATAT: Next = Next::new(c"fstatat");
static FXSTATAT: Next = Next::new(c"__fxstatat64");

/// A program that may fork only while it has one thread (Chromium) counts its threads by the links
/// of the folder that lists them.
///
/// # Safety
/// As of the call.
unsafe fn stat_at(folder: c_int, path: *const c_char, status: *mut stat, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments; the functions have these forms, by their names.
    unsafe {
        let result = match FSTATAT.get(0) {
            // glibc has no `fstatat` before 2.33.
            0 => {
                let arguments = [folder as u64, path as u64, status as u64, flags as u64, 0, 0];
                answer(raw(libc::SYS_newfstatat, arguments)) as c_int
            }
            next => std::mem::transmute::<usize, StatAt>(next)(folder, path, status, flags),
        };
        without_our_threads(result, folder, path, status)
    }
}

macro_rules! stat_at {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(a: c_int, b: *const c_char, c: *mut stat, d: c_int) -> c_int {
            // SAFETY: as above.
            unsafe { stat_at(a, b, c, d) }
        }
    )*};
}

// The second name is that for large files.
stat_at! { fstatat fstatat64 }

macro_rules! versioned_stat_at {
    ($($name:ident)*) => {$(
        /// The functions of programs that were built for glibc before 2.33.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            version: c_int,
            folder: c_int,
            path: *const c_char,
            status: *mut stat,
            flags: c_int,
        ) -> c_int {
            // SAFETY: as above.
            unsafe {
                match FXSTATAT.get(0) {
                    0 => stat_at(folder, path, status, flags),
                    next => {
                        let next = std::mem::transmute::<usize, VersionedStatAt>(next);
                        let result = next(version, folder, path, status, flags);
                        without_our_threads(result, folder, path, status)
                    }
                }
            }
        }
    )*};
}

versioned_stat_at! { __fxstatat __fxstatat64 }

/// Subtracts our threads from the link count, if the path is the folder of the process's own
/// threads. Returns the result.
///
/// # Safety
/// The result is the answer for this path, with this status.
unsafe fn without_our_threads(
    result: c_int,
    folder: c_int,
    path: *const c_char,
    status: *mut stat,
) -> c_int {
    // Milliseconds to wait for a thread that loads the agent: that thread is ours, too.
    const PATIENCE: u32 = 2000;
    if result == 0 && !path.is_null() && front().is_some() {
        // SAFETY: the path was read, and the status written.
        let (text, status) = unsafe { (CStr::from_ptr(path).to_bytes(), &mut *status) };
        let text = text.strip_suffix(b"/").unwrap_or(text);
        let is_folder = status.st_mode & libc::S_IFMT == libc::S_IFDIR && status.st_size == 0;
        if is_folder
            && text.ends_with(b"self/task")
            && let Some(hooks) = loading::await_loaded(PATIENCE)
        {
            // SAFETY: the caller's folder and path.
            let links = unsafe { (hooks.threads)(folder, path) }.saturating_add(2);
            status.st_nlink = links as _;
        }
    }
    result
}

/// `PR_SET_SYSCALL_USER_DISPATCH`: our calls would become signals of the program's.
const SET_DISPATCH: c_int = 59;

/// Makes a system call by which the program may restrict its later calls (seccomp). Notes the
/// restriction before the call.
///
/// # Safety
/// As of the call.
unsafe fn make(number: c_long, arguments: [u64; 6]) -> c_long {
    let [first, second, third, ..] = arguments;
    let filters = match number {
        libc::SYS_prctl => {
            matches!(first as c_int, libc::PR_SET_SECCOMP | SET_DISPATCH) && second != 0
        }
        // Strict mode, or a filter program; without a program the call is a question.
        libc::SYS_seccomp => first == 0 && second == 0 || first == 1 && third != 0,
        _ => false,
    };
    let front = front().filter(|_| filters);
    let was_filtered = crate::is_filtered();
    let hooks = front.filter(|front| !front.is_forked()).and_then(|_| loading::await_hooks());
    let mut result = 0;
    // SAFETY: the caller's promise.
    unsafe {
        if !hooks.is_some_and(|hooks| (hooks.restrict)(number, &arguments, &mut result)) {
            front.inspect(|front| front.restrict());
            result = raw(number, arguments);
        }
    }
    if result != 0 && !was_filtered {
        front.inspect(|front| _ = front.waits.fetch_and(!FILTERED, Relaxed));
    }
    answer(result)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn prctl(operation: c_int, a: u64, b: u64, c: u64, d: u64) -> c_int {
    // SAFETY: the caller's arguments; the kernel reads none that the caller has not given.
    unsafe { make(libc::SYS_prctl, [operation as u64, a, b, c, d, 0]) as c_int }
}

/// The agent must know the memory that a device uses before it takes the program over, so such a
/// call loads the agent. After the take-over the agent sees the call itself.
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(file: c_int, number: c_ulong, argument: u64) -> c_int {
    if devices::hands_over(number as u32) && front().is_some() && !crate::is_filtered() {
        let hooks = loading::load_now();
        hooks.into_iter().for_each(|hooks| (hooks.hands_over)(number as u32, argument));
    }
    // SAFETY: the caller's arguments.
    answer(unsafe { raw(libc::SYS_ioctl, [file as u64, number, argument, 0, 0, 0]) }) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    e: u64,
    f: u64,
) -> c_long {
    if number == libc::SYS_mmap {
        // SAFETY: the caller's arguments.
        return unsafe { map([a, b, c, d, e, f]) } as c_long;
    }
    if number == libc::SYS_io_uring_setup
        && let Some(front) = front()
    {
        // Through a ring the kernel uses memory at any time, so a program with a ring is left
        // alone. Libraries that try a ring at each start (libuv: Node, uvloop) work without one.
        front.tree.refuse(&[crate::name(), b": ", left::IO_URING.as_bytes()]);
        return answer(-c_long::from(libc::ENOSYS));
    }
    if number == libc::SYS_exit {
        front().filter(|front| !front.is_forked()).inspect(|front| front.note_end(a));
    }
    if number == libc::SYS_process_vm_readv || number == libc::SYS_process_vm_writev {
        // SAFETY: as above.
        return unsafe { visit(number, [a, b, c, d, e, f]) };
    }
    // SAFETY: as above.
    unsafe { make(number, [a, b, c, d, e, f]) }
}

/// Reads or writes another process's memory. If that process is of the tree, the agent is loaded
/// and asks it for the pages. After the take-over the agent sees the call itself.
///
/// # Safety
/// As of the call.
unsafe fn visit(number: c_long, arguments: [u64; 6]) -> c_long {
    let front = front().filter(|_| !crate::is_filtered());
    let hooks = front
        .filter(|front| front.tree.host(arguments[0] as u32).is_some())
        .and_then(|_| loading::load_now());
    let mut result = 0;
    // SAFETY: the caller's arguments.
    unsafe {
        if !hooks.is_some_and(|hooks| (hooks.visit)(number, &arguments, &mut result)) {
            result = raw(number, arguments);
        }
    }
    answer(result)
}

macro_rules! visits {
    ($($name:ident $number:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(a: c_int, b: u64, c: u64, d: u64, e: u64, f: u64) -> isize {
            // SAFETY: as above.
            unsafe { visit(libc::$number, [a as u32 as u64, b, c, d, e, f]) as isize }
        }
    )*};
}

visits! { process_vm_readv SYS_process_vm_readv process_vm_writev SYS_process_vm_writev }

#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: usize,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: libc::off_t,
) -> *mut c_void {
    let [protection, flags, file] = [protection, flags, file].map(|number| number as u64);
    // SAFETY: the caller's arguments.
    unsafe { map([at as u64, bytes as u64, protection, flags, file, offset as u64]) }
}

/// `mmap`, by any of its names. A program's own function of such a name, as allocators have, calls
/// this through `syscall`.
///
/// # Safety
/// As of the call.
unsafe fn map(arguments: [u64; 6]) -> *mut c_void {
    let [_, bytes, protection, flags, ..] = arguments;
    let (bytes, protection, flags) = (bytes as usize, protection as c_int, flags as c_int);
    // Private memory of no file.
    let is_plain =
        flags & (libc::MAP_TYPE | libc::MAP_ANONYMOUS) == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let is_counted = is_plain && front().is_some();
    let is_usable = protection & libc::PROT_WRITE != 0 && flags & libc::MAP_NORESERVE == 0;
    if is_counted && is_usable {
        // The caller may be an allocator that holds its locks. It also calls this often: compilers
        // that waited here took 1.7 times as long.
        asked(bytes, false);
    } else if is_counted {
        // The program will use this memory later, part by part.
        reserved(bytes);
    }
    let mut arguments = arguments;
    if is_counted {
        // A mapping that is populated immediately might exceed the budget.
        arguments[3] &= !(libc::MAP_POPULATE as u64);
    }
    // SAFETY: the arguments are the caller's.
    answer(unsafe { raw(libc::SYS_mmap, arguments) }) as *mut c_void
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
    let [protection, flags, file] = [protection, flags, file].map(|number| number as u64);
    // SAFETY: the same, by its name for large files.
    unsafe { map([at as u64, bytes as u64, protection, flags, file, offset as u64]) }
}
