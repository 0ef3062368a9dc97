//! Starts threads of ours, on stacks of ours.
//!
//! The C library maps a stack in the highest hole, where the program may be about to map memory
//! again ([`place`](crate::map::place)). So our threads' stacks are mappings of our own, with a
//! guard page below. They are never unmapped: a new thread gets the stack of a thread that has
//! ended.
//!
//! A child has the stacks of its parent's threads. The C library lists those threads, in their
//! blocks at the end of the stacks. In a child made by its `fork` the C library no longer lists
//! them, so the child's threads get these stacks. In a child made past `fork` it still lists them,
//! so we do not use these stacks again.

use super::{of_own_process, of_process};
use crate::map::{Mapping, PAGE_BYTES};
use crate::process;
use libc::{c_int, c_void, pthread_attr_t, pthread_t};
use std::ffi::CStr;
use std::io;
use std::mem::{self, MaybeUninit};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::*};

/// The most stacks of ours. Further threads at the same time have stacks of the C library's.
const MAX: usize = super::MAX;

/// The number of times that we may double a stack's size: the C library refuses a stack without
/// space for the variables of all libraries.
const DOUBLINGS: u32 = 6;

/// A stack, and the thread that uses it.
#[derive(Debug)]
struct PooledStack {
    /// The process that uses the stack, in the form of [`of_process`], or [`FREE`].
    user: AtomicU64,
    /// The stack's start, above its guard page.
    start: AtomicUsize,
    /// 0 before a stack is mapped.
    bytes: AtomicUsize,
    /// The thread, if no other thread joins it; 0 if another thread does, or if it is being
    /// started.
    left: AtomicUsize,
}

const FREE: u64 = 0;

static STACKS: [PooledStack; MAX] = [const {
    PooledStack {
        user: AtomicU64::new(FREE),
        start: AtomicUsize::new(0),
        bytes: AtomicUsize::new(0),
        left: AtomicUsize::new(0),
    }
}; MAX];

/// A thread that was started.
#[derive(Debug)]
#[must_use = "join it or leave it: otherwise nobody gets its stack"]
pub struct Started {
    /// A `pthread_t`, which is a pointer in musl.
    thread: usize,
    /// `None` for a stack of the C library's.
    stack: Option<&'static PooledStack>,
}

struct ThreadWork {
    name: &'static CStr,
    run: Box<dyn FnOnce() + Send>,
}

/// Starts a thread of that name (at most 15 bytes), with a stack of at least `bytes` bytes. Fails
/// without memory, or if the kernel permits no more threads.
pub fn start(
    name: &'static CStr,
    bytes: usize,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<Started> {
    watch_forks()?;
    let work = Box::into_raw(Box::new(ThreadWork { name, run: Box::new(run) }));
    let started = (0..DOUBLINGS).find_map(|larger| match start_on(bytes << larger, work) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => None,
        outcome => Some(outcome),
    });
    let started = started.unwrap_or_else(|| Err(io::ErrorKind::InvalidInput.into()));
    if started.is_err() {
        // SAFETY: made above; no thread has it.
        drop(unsafe { Box::from_raw(work) });
    }
    started
}

fn start_on(bytes: usize, work: *mut ThreadWork) -> io::Result<Started> {
    let stack = take(bytes)?;
    let thread = create(stack, bytes, work);
    if thread.is_err() {
        stack.into_iter().for_each(PooledStack::free);
    }
    thread.map(|thread| Started { thread: thread as usize, stack })
}

fn create(
    stack: Option<&PooledStack>,
    bytes: usize,
    work: *mut ThreadWork,
) -> io::Result<pthread_t> {
    let mut attributes = MaybeUninit::<pthread_attr_t>::zeroed();
    let mut thread = MaybeUninit::<pthread_t>::zeroed();
    let attributes = attributes.as_mut_ptr();
    let check = |error: c_int| match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    };
    // SAFETY: both structures are written before they are used. The stack is of whole pages, mapped
    // for good, and this thread's alone. `begin` has the required form, and takes the work over.
    unsafe {
        check(libc::pthread_attr_init(attributes))?;
        let set = check(match stack {
            Some(stack) => {
                let start = ptr::with_exposed_provenance_mut(stack.start.load(SeqCst));
                libc::pthread_attr_setstack(attributes, start, stack.bytes.load(SeqCst))
            }
            None => libc::pthread_attr_setstacksize(attributes, bytes),
        });
        let created = set.and_then(|()| {
            check(libc::pthread_create(thread.as_mut_ptr(), attributes, begin, work.cast()))
        });
        libc::pthread_attr_destroy(attributes);
        created.map(|()| thread.assume_init())
    }
}

extern "C" fn begin(work: *mut c_void) -> *mut c_void {
    // SAFETY: `start` gives it to this thread alone.
    let ThreadWork { name, run } = *unsafe { Box::from_raw(work.cast::<ThreadWork>()) };
    // SAFETY: a name of this thread, which ends with a zero. One that is too long is refused.
    unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
    // A panic was reported, and ends no more than this thread.
    let _ = catch_unwind(AssertUnwindSafe(run));
    ptr::null_mut()
}

impl Started {
    /// Waits for the thread's end.
    pub fn join(self) {
        // SAFETY: joined here only. It is not a parent's thread, since a child forgets those.
        unsafe { libc::pthread_join(self.thread as pthread_t, ptr::null_mut()) };
        self.stack.into_iter().for_each(PooledStack::free);
    }

    /// Lets the thread end by itself. A thread that is started later gets its stack.
    pub fn leave(self) {
        match self.stack {
            Some(stack) => stack.left.store(self.thread, SeqCst),
            // SAFETY: as above.
            None => _ = unsafe { libc::pthread_detach(self.thread as pthread_t) },
        }
    }
}

/// Takes a stack: the smallest that is large enough, or a new one. `None` if there are too many.
fn take(bytes: usize) -> io::Result<Option<&'static PooledStack>> {
    STACKS.iter().for_each(PooledStack::free_if_ended);
    let room = |stack: &&PooledStack| stack.bytes.load(SeqCst);
    let is_free = |stack: &&PooledStack| stack.user.load(SeqCst) == FREE;
    let fitting = STACKS.iter().filter(is_free).filter(|stack| room(stack) >= bytes);
    if let Some(stack) = fitting.min_by_key(room).filter(|stack| stack.use_as_it_is()) {
        return Ok(Some(stack));
    }
    let Some(new) = STACKS.iter().find(|stack| stack.use_anew()) else { return Ok(None) };
    let mapped = new.map(bytes);
    if mapped.is_err() {
        new.free();
    }
    mapped.map(|()| Some(new))
}

impl PooledStack {
    fn free(&self) {
        self.user.store(FREE, SeqCst);
    }

    /// Joins its thread if the thread has ended and no other thread joins it.
    fn free_if_ended(&self) {
        if of_own_process(self.user.load(SeqCst)).is_none() {
            return;
        }
        let thread = self.left.swap(0, SeqCst);
        if thread == 0 {
            return;
        }
        // SAFETY: a thread of this process, which is not joined yet, by the exchange.
        match unsafe { libc::pthread_tryjoin_np(thread as pthread_t, ptr::null_mut()) } {
            0 => self.free(),
            _ => self.left.store(thread, SeqCst),
        }
    }

    fn use_as_it_is(&self) -> bool {
        self.user.compare_exchange(FREE, of_process(), SeqCst, SeqCst).is_ok()
    }

    /// Takes the slot if it has no stack yet, or if a thread of the parent used that stack.
    fn use_anew(&self) -> bool {
        let is_anew = |user| match user {
            FREE => self.bytes.load(SeqCst) == 0,
            user => of_own_process(user).is_none(),
        };
        let take = |user| is_anew(user).then_some(of_process());
        let is_taken = self.user.fetch_update(SeqCst, SeqCst, take).is_ok();
        if is_taken {
            self.left.store(0, SeqCst);
            self.bytes.store(0, SeqCst);
        }
        is_taken
    }

    /// Maps the stack for good.
    fn map(&self, bytes: usize) -> io::Result<()> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let mapping = Mapping::reserved(PAGE_BYTES + bytes)?;
        mapping.forbid(0, PAGE_BYTES)?;
        self.start.store(mapping.as_ptr().expose_provenance() + PAGE_BYTES, SeqCst);
        self.bytes.store(bytes, SeqCst);
        mem::forget(mapping);
        Ok(())
    }
}

/// Makes children reuse their parent's stacks. Called once.
fn watch_forks() -> io::Result<()> {
    static ARE_WATCHED: AtomicBool = AtomicBool::new(false);
    /// The C library lists no thread but the calling one.
    extern "C" fn in_child() {
        for stack in &STACKS {
            stack.left.store(0, SeqCst);
            stack.free();
        }
    }
    match ARE_WATCHED.swap(true, SeqCst) {
        true => Ok(()),
        false => process::at_fork(None, None, Some(in_child)),
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Starts a thread that reports its stack's address, and the stack's place in the table.
    fn place(bytes: usize) -> (Started, usize) {
        let (tell, told) = mpsc::channel();
        let here = move || {
            let here = 0u8;
            let _ = tell.send((&raw const here).addr());
        };
        let started = start(c"uzswap-test", bytes, here).unwrap();
        (started, told.recv().unwrap())
    }

    fn range(stack: &PooledStack) -> std::ops::Range<usize> {
        let start = stack.start.load(SeqCst);
        start..start + stack.bytes.load(SeqCst)
    }

    #[test]
    fn a_thread_runs_on_a_stack_of_ours_which_the_next_one_gets() {
        // No other test has threads with so large stacks.
        const BYTES: usize = 3 << 20;
        let (first, at) = place(BYTES);
        let stack = first.stack.unwrap();
        assert!(range(stack).contains(&at) && range(stack).len() >= BYTES);
        let (second, other) = place(BYTES);
        assert!(!range(stack).contains(&other));
        second.join();
        first.leave();
        // Some time passes until the first thread has ended.
        let is_free = || {
            stack.free_if_ended();
            stack.user.load(SeqCst) == FREE
        };
        while !is_free() {
            std::thread::yield_now();
        }
        let (third, again) = place(BYTES);
        assert!([at, other].contains(&again), "{at:x} {other:x} {again:x}");
        third.join();
    }
}
