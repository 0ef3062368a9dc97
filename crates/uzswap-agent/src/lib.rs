//! `LD_PRELOAD=libuzswap_agent.so PROGRAM`: any program's memory in a budget, without root, and
//! without the program knowing. `uzswap run --in-process` starts programs so.
//!
//! ```text
//! start     a thread that sleeps, and looks how much memory there is left           (this file)
//! short     the system calls are replaced, all memory that may be is adopted        (takeover)
//! then      calls that change what is mapped, move data, fork …                     (calls,
//! layout,
//!                                                                      processes, forking)
//!           how much this process may have of what all may                        (tree)
//! ```
//! Until memory is short nothing is changed, and nothing costs anything. Pages are compressed,
//! staged and brought in by the pager that regions have (`uzswap-region`), in the process itself.

mod calls;
mod forking;
mod interposed;
mod interrupted;
mod layout;
mod locals;
mod masks;
mod memory;
mod processes;
mod stacks;
mod takeover;

use std::cell::Cell;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use uzswap_region::Pager;
use uzswap_region::tree::Tree;
use uzswap_sys::bus::Blocked;
use uzswap_sys::process;

/// A process with less than this is not taken over: there is little to win.
const LEAST: u64 = 24 << 20;
/// A process with less than this is not watched.
const WATCHED: u64 = 12 << 20;
/// What memory grows by at most in a second, with a margin: the kernel clears pages no faster.
const GROWTH: u64 = 4 << 30;
/// So many times in a row there must be nobody who could give memory back before it is said that
/// none is left: others may have died, or begun to wait, just now.
const HOPELESS: u32 = 100;
/// Bytes of the watching thread's stack.
const STACK: usize = 256 << 10;
const WAIT_MIN: Duration = Duration::from_millis(2);
const WAIT_MAX: Duration = Duration::from_millis(100);

/// What has taken a program over.
pub struct Agent {
    /// Where its pages are.
    pub pager: Pager,
}

impl Agent {
    fn new(pager: Pager) -> Self {
        Self { pager }
    }
}

static AGENT: OnceLock<Agent> = OnceLock::new();
/// Somebody looks how much memory this process has.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);
static TREE: OnceLock<Tree> = OnceLock::new();
/// The block of the thread that the program began with.
static FIRST_THREAD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The calling thread does something of ours: its system calls are not looked at.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this library has been set up.
fn has_begun() -> bool {
    FIRST_THREAD.load(Relaxed) != 0
}

fn is_inside() -> bool {
    IS_INSIDE.get()
}

/// While this is held, the thread's calls are not looked at, and no handler of a signal runs in it.
struct Inside {
    was: bool,
    blocked: Option<Blocked>,
}

fn inside() -> Inside {
    let was = IS_INSIDE.replace(true);
    Inside { was, blocked: Some(Blocked::all()) }
}

impl Drop for Inside {
    fn drop(&mut self) {
        drop(self.blocked.take());
        IS_INSIDE.set(self.was);
    }
}

/// Runs when the program is loaded, before anything of its own.
extern "C" fn begin() {
    // SAFETY: takes nothing.
    FIRST_THREAD.store(unsafe { libc::pthread_self() } as usize, Relaxed);
    if !locals::prepare() {
        return; // All keys are taken, before the program has begun.
    }
    let Some(path) = std::env::var_os("UZSWAP_TREE").map(PathBuf::from) else { return };
    let joined = Tree::join(&path).and_then(|tree| {
        // Set once: this runs once.
        let _ = TREE.set(tree);
        forking::watch_before()
    });
    if let Err(error) = joined {
        return say(&format!("this program runs without: {}: {error}", path.display()));
    }
    if interposed::brings_allocator() {
        watch_from_now();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Starts the thread that watches, if the process has much memory, with what it is about to get.
fn watch_if_large(more: usize) {
    if IS_WATCHED.load(Relaxed) || is_inside() {
        return;
    }
    let _inside = inside();
    if anonymous_bytes() + (more as u64) < WATCHED {
        return;
    }
    watch_from_now();
}

/// Starts the thread that watches, unless there is one.
fn watch_from_now() {
    if TREE.get().is_some() && !IS_WATCHED.swap(true, Relaxed) && start(Begin::New).is_err() {
        say("this program runs without: no thread can be started");
    }
}

/// Whether the process has been taken over already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    New,
    Again,
}

/// Starts the thread that watches.
fn start(begin: Begin) -> io::Result<()> {
    let _inside = inside();
    if begin == Begin::Again {
        TREE.get().into_iter().for_each(Tree::rejoin);
    }
    let thread = std::thread::Builder::new().name("uzswap-agent".into()).stack_size(STACK);
    thread.spawn(watch).map(drop)
}

/// In a fork of a process that was not taken over: nobody watches it yet.
fn unwatch() {
    TREE.get().into_iter().for_each(Tree::rejoin);
    IS_WATCHED.store(false, Relaxed);
}

fn watch() {
    IS_INSIDE.set(true);
    let mut has_failed = false;
    let mut hopeless = 0;
    loop {
        let at_work = forking::at_work();
        let used = anonymous_bytes();
        let Some(tree) = TREE.get() else { return };
        let is_starved = AGENT.get().is_some_and(|agent| agent.pager.is_starved());
        let given = tree.allowance(used, is_starved);
        let allowance = given.bytes;
        let room = match AGENT.get() {
            Some(agent) => {
                hopeless = if is_starved && !given.may_hope { hopeless + 1 } else { 0 };
                agent.pager.set_patient(hopeless < HOPELESS);
                keep(agent, used, allowance)
            }
            None => allowance.saturating_sub(used),
        };
        if AGENT.get().is_none() && !has_failed && room < allowance / 4 && used >= LEAST {
            let compressor = std::env::var("UZSWAP_COMPRESSOR").unwrap_or("lz4".into());
            let taken = takeover::take_over(allowance, &compressor);
            if let Err(error) = &taken {
                say(&format!("this program runs without: {error}"));
            }
            has_failed = taken.is_err();
            let table = tree.table();
            let count = if has_failed { &table.unmanaged } else { &table.managed };
            count.fetch_add(1, Relaxed);
            continue;
        }
        drop(at_work);
        let wait = Duration::from_secs_f64(room as f64 / GROWTH as f64);
        std::thread::sleep(wait.clamp(WAIT_MIN, WAIT_MAX));
    }
}

/// Keeps the pager's budget at the allowance, less other memory; returns the room that is left.
fn keep(agent: &Agent, used: u64, allowance: u64) -> u64 {
    let pager = &agent.pager;
    // All that the pager takes is anonymous memory, too.
    let besides = used.saturating_sub(pager.used_bytes());
    let wanted = allowance.saturating_sub(besides).max(8 << 20);
    if wanted.abs_diff(pager.memory()) > pager.memory() / 64 {
        // A budget that is refused stays what it was.
        let _ = pager.set_memory(wanted);
    }
    // Pages are charged as they come: nothing grows unseen but what is besides.
    (allowance / 4).max(1 << 20)
}

/// Anonymous memory of this process, bytes.
fn anonymous_bytes() -> u64 {
    process::own_anonymous_bytes().unwrap_or(0)
}

fn say(text: &str) {
    // Where standard error is closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "uzswap: {text}");
}

/// Ends the process: going on would mean wrong bytes.
fn die(text: &str) -> ! {
    say(text);
    std::process::abort()
}
