//! Forks: the fork itself gives the child a copy of everything, pool and index too.
//!
//! Everything of ours stands still only around the system call, which is a replaced instruction.
//! Before and after that call the C library and the program's handlers (`pthread_atfork`) use
//! memory, take locks and wait for other threads, and all of these may need us. So nothing is
//! locked there, and no signal is blocked. A fork that is made past the C library's `fork` is like
//! any other.
//!
//! Before the take-over no instruction is replaced. The child then has a new allocator, because
//! another thread of the parent may have held the old one ([`in_child`]). `fork` waits while our
//! thread does work that a child must not find half done, and that work begins when no fork is
//! under way ([`busy`]). The search for system calls takes long, and is no such work.
//!
//! A child has none of our threads. They are started where the C library is whole: in a handler of
//! `pthread_atfork`, or, if none was run, once the child asks for memory.

use crate::stage::{self, Stage};
use crate::{Agent, Inside, allocator, front, guests, inside, layout, thread};
use std::io;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use uzswap_region::BeforeFork;
use uzswap_tree::front::Front;

/// While this exists, nothing of this library moves.
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

/// Waits until nothing of this library moves. Errors: there is no room for a child's needs.
pub fn before(agent: &Agent) -> io::Result<Still<impl Sized, impl Sized>> {
    let inside = inside();
    let quiet = at_work();
    let layout = layout::lock();
    let pages = agent.pager.before_fork()?;
    // Last: nothing is allocated or freed from here on.
    Ok(Still { inside, quiet, layout, pages, memory: ManuallyDrop::new(allocator::lock()) })
}

impl<L, M> Still<L, M> {
    /// In the parent, or where there is no child: all goes on.
    pub fn in_parent(self) {
        let Self { inside, quiet, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        pages.in_parent();
        drop((layout, quiet));
        drop(inside);
    }

    /// In the child, before anything of the program runs there.
    pub fn in_child(self) {
        let Self { inside, quiet, layout, pages, memory } = self;
        drop(ManuallyDrop::into_inner(memory));
        thread::forget_reserved();
        let Ok(refused) = pages.in_child() else {
            crate::die(&["a page of a forked process cannot be brought in"]);
        };
        guests::forget();
        drop((layout, quiet));
        match refused {
            // Meanwhile a thread of the parent gave the program up.
            _ if stage::is_left() => {}
            Some(error) => leave(&error),
            None => stage::enter(Stage::Bare),
        }
        drop(inside);
    }
}

/// In a child that cannot have a pager of its own, and whose memory is all in its place.
fn leave(error: &io::Error) {
    front().into_iter().for_each(Front::forked);
    stage::enter(Stage::LeftAlone);
    crate::leave_alone(&format!("it was forked where its pages cannot be watched: {error}"));
}

/// Held by a thread of ours while a child would find its work half done. Used after the take-over,
/// and by the thread that takes over.
static QUIET: Mutex<()> = Mutex::new(());

/// Held while the thread that watches is at work; a fork waits for it.
pub fn at_work() -> MutexGuard<'static, ()> {
    QUIET.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forks by `fork` that are under way in a program that was not taken over, with two flags.
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The watching thread waits for these forks, and new forks wait for it.
const WANTED: u32 = 1 << 30;
/// The watching thread is at work: a child would find more half done than it can begin anew.
const BUSY: u32 = 1 << 31;

/// How long our thread waits for forks at a time. Then waiting forks may go on, because a fork
/// under way may need a lock that a waiting thread has.
const TURN: Duration = Duration::from_millis(100);
/// After so many turns our thread no longer waits for forks; and a fork waits no longer than the
/// time below for our thread. Each may have a lock that the other needs. A child that is made
/// during the work is left alone.
const TURNS: u32 = 50;
const FORKS_PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(1);

/// The thread that watches has begun work that a child must not find half done.
pub struct Busy;

/// Makes new forks wait, and waits for those that are under way. The work begins after this.
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
    // Forks that are under way are no longer counted.
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

/// Makes a fork. The C library's functions around it, and the program's, may take memory, wait for
/// other threads, or be interrupted by signals: nothing of ours is held meanwhile.
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
    } else if crate::has_own_allocator() {
        crate::watch_from_now();
    }
    child
}

/// In a child of a process that has not been taken over: the child is a process of its own, which
/// no thread watches yet. `false`: its parent was being taken over, and the child is left alone.
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
