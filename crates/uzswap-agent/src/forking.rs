//! Forks. The fork itself gives the child a copy of everything, also of pool and index.
//!
//! Our threads stand still only during the system call, which is a replaced instruction. Before and
//! after the call the C library and the program's handlers (`pthread_atfork`) use memory, take
//! locks and wait for other threads. All of these may need us. So we lock nothing and block no
//! signal there. A fork that is made past the C library's `fork` is like any other.
//!
//! Before the take-over no instruction is replaced. The child then gets a new allocator, because
//! another thread of the parent may have held the old one's lock ([`in_child`]). `fork` waits while
//! our thread does work that a child must not find half done. Our thread begins such work when no
//! fork is under way ([`busy`]). The long search for system calls is not such work.
//!
//! A child has none of our threads. We start them where the C library can be used: in a handler of
//! `pthread_atfork`. If no handler ran, we start them when the child asks for memory.

use crate::stage::{self, Stage};
use crate::{Agent, Inside, allocator, front, guests, inside, layout, thread, withheld};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;
use uzswap_region::BeforeFork;
use uzswap_tree::front::Front;

/// While this value exists, no thread moves pages or changes state of this library.
pub struct Still<L, M> {
    inside: Inside,
    quiet: MutexGuard<'static, ()>,
    layout: L,
    pages: BeforeFork,
    memory: ManuallyDrop<M>,
}

/// Set by a fork, since memory is shared then, and cleared by the watching thread's next look.
static IS_NOTED: AtomicBool = AtomicBool::new(false);

/// Notes a fork, in both processes.
pub fn note() {
    IS_NOTED.store(true, Relaxed);
}

/// True if a fork was noted since the last time.
pub fn take_note() -> bool {
    IS_NOTED.swap(false, Relaxed)
}

/// Waits until nothing of this library moves. Fails if there is no room for a child's needs.
pub fn before(agent: &Agent) -> io::Result<Still<impl Sized, impl Sized>> {
    let inside = inside();
    let (layout, quiet) = loop {
        // The layout's holder may wait for room, which only the thread that watches gives to a
        // suspended process. So this thread holds the watching thread up only while it has the
        // layout's lock itself.
        let layout = layout::lock();
        match try_to_be_at_work() {
            Some(quiet) => break (layout, quiet),
            None => {
                drop(layout);
                drop(at_work());
            }
        }
    };
    let layout = (layout, withheld::lock());
    let pages = agent.pager.before_fork()?;
    // The allocator's lock is taken last: this code allocates and frees nothing after that.
    Ok(Still { inside, quiet, layout, pages, memory: ManuallyDrop::new(allocator::lock()) })
}

impl<L, M> Still<L, M> {
    /// Releases everything in the parent, whether or not there is a child.
    pub fn in_parent(self) {
        let Self { inside, quiet, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        pages.in_parent();
        drop((layout, quiet));
        drop(inside);
    }

    /// Makes the state the child's own, before the program's code runs in the child.
    pub fn in_child(self) {
        let Self { inside, quiet, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        thread::forget_reserved();
        let Ok(refused) = pages.in_child() else {
            crate::die(&["a page of a forked process cannot be brought in"]);
        };
        guests::forget();
        thread::pin_again();
        drop((layout, quiet));
        match refused {
            // A thread of the parent had given the program up.
            _ if stage::is_left() => {}
            Some(error) => leave(&error),
            None => stage::enter(Stage::Bare),
        }
        drop(inside);
    }
}

/// Leaves a child alone that cannot have a pager of its own, and whose memory is all present.
fn leave(error: &io::Error) {
    front().into_iter().for_each(Front::forked);
    withheld::give_all_back();
    stage::enter(Stage::LeftAlone);
    crate::leave_alone(&format!("it was forked where its pages cannot be watched: {error}"));
}

/// A thread of ours holds this lock while a child would find its work half done. Used after the
/// take-over, and by the thread that takes over.
static QUIET: Mutex<()> = Mutex::new(());

/// The lock that the watching thread holds while it works. A fork waits for this lock.
pub fn at_work() -> MutexGuard<'static, ()> {
    QUIET.lock().unwrap_or_else(PoisonError::into_inner)
}

fn try_to_be_at_work() -> Option<MutexGuard<'static, ()>> {
    match QUIET.try_lock() {
        Ok(quiet) => Some(quiet),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Calls of `fork` that are under way in a program that was not taken over, and two flags.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// Flag: the watching thread waits for these forks, and new forks wait for the watching thread.
const WANTED: u32 = 1 << 30;
/// Flag: the watching thread does work that a child must not find half done.
const BUSY: u32 = 1 << 31;

/// The time for which our thread waits for forks. Then our thread lets waiting forks proceed for a
/// moment, because a fork under way may need a lock that a waiting thread holds.
const TURN: Duration = Duration::from_millis(100);
/// Our thread waits for forks for this many turns, and a fork waits for our thread for the time
/// below. Either may hold a lock that the other needs. uzswap leaves a child alone that is made
/// during the work.
const TURNS: u32 = 50;
const FORKS_PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);

/// The thread that watches has begun work that a child must not find half done.
pub struct Busy;

/// Makes new forks wait, and waits for the forks that are under way. The caller's work begins then.
pub fn busy() -> Busy {
    for _ in 0..TURNS {
        FORKS.fetch_or(WANTED, SeqCst);
        let begin = || FORKS.compare_exchange(WANTED, BUSY, SeqCst, SeqCst).is_ok();
        if await_that(TURN, begin) {
            return Busy;
        }
        FORKS.fetch_and(!WANTED, SeqCst);
        std::thread::sleep(2 * PAUSE);
    }
    // Forks that are still under way are not counted from now on.
    FORKS.store(BUSY, SeqCst);
    Busy
}

impl Drop for Busy {
    fn drop(&mut self) {
        FORKS.fetch_and(!BUSY, SeqCst);
    }
}

fn await_that(patience: Duration, is_so: impl Fn() -> bool) -> bool {
    for _ in 0..patience.as_millis() / PAUSE.as_millis() {
        if is_so() {
            return true;
        }
        std::thread::sleep(PAUSE);
    }
    is_so()
}

/// Counts a fork, unless our thread is or wants to be at work.
fn begin_fork() -> bool {
    let add = |now| (now & (WANTED | BUSY) == 0).then_some(now + 1);
    FORKS.fetch_update(SeqCst, SeqCst, add).is_ok()
}

fn end_fork() {
    let less = |now: u32| (now & !(WANTED | BUSY) > 0).then(|| now - 1);
    // The fork may be no longer counted.
    let _ = FORKS.fetch_update(SeqCst, SeqCst, less);
}

/// Makes a fork. The C library's and the program's functions around it may take memory, wait for
/// other threads, or be interrupted by signals. So we hold no lock.
pub fn fork(fork: impl FnOnce() -> libc::pid_t) -> libc::pid_t {
    if stage::is_taken_over() {
        // Everything stands still around the system call.
        return fork();
    }
    if !await_that(FORKS_PATIENCE, begin_fork) {
        FORKS.fetch_add(1, SeqCst);
    }
    let child = fork();
    if child != 0 {
        end_fork();
    }
    child
}

/// Adds a child of a process that has not been taken over to the tree. No thread watches the child
/// yet. `false` if the parent was being taken over: then uzswap leaves the child alone.
pub extern "C" fn in_child() -> bool {
    if stage::is_taken_over() {
        return true;
    }
    let was_busy = FORKS.swap(0, SeqCst) & BUSY != 0;
    // Another thread of the parent's may have had the allocator.
    allocator::renew();
    front().into_iter().for_each(Front::forked);
    stage::enter(Stage::Loaded);
    !was_busy
}
