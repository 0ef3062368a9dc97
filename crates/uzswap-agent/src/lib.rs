//! Keeps any program's memory in a budget, without root and unknown to the program. The preloaded
//! library (`uzswap-preload`) loads this library when a program has much memory.
//!
//! ```text
//! start     a thread looks how much memory there is, and decides               (watcher, decide)
//!           a thread that asks for memory may have it look, and wait           (request)
//! short     the system calls are replaced, all memory that may be is adopted   (takeover)
//! then      calls that change what is mapped, move data, fork …                (calls, layout,
//!                                                                              processes, forking)
//! always    how far that is                                                    (stage)
//!           how much this process may have of what all may                     (tree)
//! ```
//! Until memory is short nothing is changed, and nothing costs anything. The pager of regions
//! (`uzswap-region`) compresses, stages and brings in the pages, in the process itself.

#![expect(
    unsafe_code,
    reason = "hooks, system calls, an allocator: the program answers for its arguments; code and data that serve faults are never paged out"
)]

mod adoption;
mod advice;
mod allocator;
mod alone;
mod buffers;
mod calls;
mod children;
mod code;
mod copies;
mod decide;
mod descriptors;
mod devices;
mod execute;
mod fast_path;
mod fork_room;
mod forking;
mod guests;
mod handlers;
mod hooks;
mod kernel;
mod layout;
mod limits;
mod looker;
mod masks;
mod own_descriptors;
mod own_files;
mod parts;
mod pins;
mod processes;
mod relocated;
mod request;
mod restart;
mod robust;
mod seccomp;
mod seen;
mod sharing;
mod signals;
mod splice;
mod stacks;
mod stage;
mod takeover;
mod thread;
mod thread_count;
mod thread_locals;
mod threads;
mod transfer;
mod unlisted;
mod visits;
mod watcher;
mod whole;
mod withheld;
mod written;

use decide::{Action, decide};
use stage::Stage;
use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_region::{Mode, Pager};
use uzswap_sys::fault_signals;
use uzswap_sys::{map, own_threads, pid_namespace};
use uzswap_tree::front::{FILTERED, Front, PLACE, STACK};
use uzswap_tree::share::Allowance;
use uzswap_tree::variables::variables_bytes;
use uzswap_tree::{Setting, Tree};
use watcher::Watcher;

// The front's stacks are behind the mappings of this library.
const _: () = assert!(PLACE >= map::place::END);

/// The state of a managed program.
pub struct Agent {
    /// The pager that has its pages.
    pub pager: Pager,
}

impl Agent {
    fn new(pager: Pager) -> Self {
        Self { pager }
    }
}

/// Set once, as the program is taken over ([`stage::is_taken_over`]).
static AGENT: OnceLock<Agent> = OnceLock::new();
/// The preloaded library, which has loaded this library.
static FRONT: OnceLock<&'static Front> = OnceLock::new();

fn front() -> Option<&'static Front> {
    FRONT.get().copied()
}

fn tree() -> Option<&'static Tree> {
    front().map(|front| &front.tree)
}

/// How pages leave.
fn mode() -> Mode {
    match front().is_some_and(|front| front.protects) {
        true => Mode::Protection,
        false => Mode::InThread,
    }
}

/// True if the program has an allocator of its own, whose locks the caller may hold.
fn has_own_allocator() -> bool {
    front().is_some_and(|front| front.has_own_allocator)
}

fn is_inside() -> bool {
    thread::with(|thread| thread.is_inside.get())
}

/// While a thread has this value, the agent does not look at the thread's calls, and no signal
/// handler runs in it.
///
/// A handler that has waited begins as soon as its signal is no longer blocked, may fork, and may
/// never return. So the thread is inside only while signals are blocked. Both changes of its mask
/// are calls that no replaced instruction makes.
struct Inside {
    was: bool,
    mask: u64,
}

fn inside() -> Inside {
    let mask = signals::block_for_work();
    let was = thread::with(|thread| thread.is_inside.replace(true));
    Inside { was, mask }
}

impl Drop for Inside {
    fn drop(&mut self) {
        thread::with(|thread| thread.is_inside.set(self.was));
        signals::set_mask(self.mask);
    }
}

/// Runs once, in whichever thread loads this library.
fn begin(front: &'static Front) {
    // This comes before any allocation.
    map::place::set_apart();
    // This comes before the program's threads are stopped.
    variables_bytes();
    thread_count::find();
    IS_RECORDED.store(front.tree.table().setting(Setting::Accesses).is_some(), Relaxed);
    let _ = FRONT.set(front);
    fault_signals::set_masks_by(signals::set_mask);
}

/// True if the program's accesses are recorded (`uzswap record --accesses`), in any stage. Its
/// pages then always have the same memory, whatever other processes have.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

fn is_recorded() -> bool {
    IS_RECORDED.load(Relaxed)
}

/// Reports this process's memory to the tree, and asks for the memory that it may have.
fn ask(tree: &Tree, used: u64, is_starved: bool) -> Allowance {
    let given = tree.allowance(used, is_starved);
    match is_recorded() {
        true => Allowance { bytes: tree.table().total.load(Relaxed), ..given },
        false => given,
    }
}

/// As [`ask`], for a program that has not been taken over. The result is also below the ceiling,
/// since such a program gives no page back after forks have copied its pages.
fn ask_unmanaged(tree: &Tree, used: u64) -> u64 {
    let given = ask(tree, used, false).bytes;
    if is_recorded() { given } else { given.min(tree.whole_allowance(used, 0)) }
}

/// Starts the thread that watches, unless there is one.
extern "C" fn watch_from_now() {
    if stage::change(Stage::Loaded, Stage::Watched) && start().is_err() {
        refuse("no thread can be started");
    }
}

/// Watches in the calling thread, unless another thread watches.
extern "C" fn watch_from_here() {
    if stage::change(Stage::Loaded, Stage::Watched) {
        watch(own_threads::announce());
    }
}

static WANTED: AtomicU32 = AtomicU32::new(0);
/// Makes the watching thread look immediately.
fn ring() {
    WANTED.fetch_add(1, SeqCst);
    tree().into_iter().for_each(Tree::ring);
}

/// The state of the bell, and of all reasons to ring it except guests.
struct Rung {
    bell: u32,
    wanted: u32,
    is_suspended: bool,
}

impl Rung {
    /// Reads the present values.
    fn now(tree: &Tree) -> Self {
        let bell = tree.rung();
        Self { bell, wanted: WANTED.load(SeqCst), is_suspended: tree.is_suspended() }
    }
}

/// Waits for a reason to look, `wait` at most, and serves the guests.
fn await_bell(tree: &Tree, before: &Rung, wait: Duration) {
    let end = Instant::now() + wait;
    let mut bell = before.bell;
    loop {
        let waits = AGENT.get().filter(|_| stage::is_taken_over()).is_some_and(|agent| {
            let _at_work = forking::at_work();
            guests::attend(agent, tree)
        });
        let left = end.saturating_duration_since(Instant::now());
        let now = Rung::now(tree);
        if left.is_zero() || (now.wanted, now.is_suspended) != (before.wanted, before.is_suspended)
        {
            return;
        }
        tree.await_bell(bell, if waits { left.min(guests::SOON) } else { left });
        bell = tree.rung();
    }
}

fn start() -> io::Result<()> {
    let _inside = inside();
    let coming = own_threads::announce();
    let bytes = STACK + variables_bytes();
    let started = own_threads::start(c"uzswap-agent", bytes, || watch(coming));
    started.map(own_threads::Started::leave)
}

/// Looks, decides and acts, until it must end.
fn watch(coming: own_threads::Coming) {
    thread::with(|thread| thread.is_inside.set(true));
    let Some(front) = front() else { return };
    front.set_watcher();
    drop(coming);
    let mut watcher = Watcher::new(front);
    looker::apart(pid_namespace::own).into_iter().for_each(|space| front.tree.settle(space));
    if !stage::is_taken_over() {
        if looker::apart(is_emulated) {
            return stop_watching(
                "an emulator makes its system calls (qemu-user, valgrind, proot)",
            );
        }
        if looker::apart(pid_namespace::has_foreign_proc) {
            return stop_watching("its /proc is of another PID namespace");
        }
    }
    loop {
        let rung = Rung::now(&front.tree);
        let at_work = stage::is_taken_over().then(forking::at_work);
        let wait = match decide(&watcher.look()) {
            Action::End => {
                // No thread would resume the program until another thread watches.
                AGENT.get().into_iter().for_each(|agent| agent.pager.set_suspended(false));
                return looker::end();
            }
            Action::Refuse(reason) => return stop_watching(reason),
            Action::TakeOver { budget } => {
                take_over(budget, &front.tree);
                continue;
            }
            Action::LookAhead { wait } => {
                code::look_ahead();
                wait
            }
            Action::Wait { wait } => wait,
            Action::Keep(keep) => {
                AGENT.get().into_iter().for_each(|agent| watcher.keep(agent, &keep));
                keep.wait
            }
        };
        drop(at_work);
        threads::end().into_iter().for_each(threads::end_program);
        await_bell(&front.tree, &rung, wait);
    }
}

/// True if an emulator answers this program's calls. The kernel gives each program some random
/// bytes, and lists their address. An emulator gives its program other bytes.
fn is_emulated() -> bool {
    // SAFETY: the call takes a number.
    let given = unsafe { libc::getauxval(libc::AT_RANDOM) };
    // Emulators fake the folder `self`.
    let listed = std::fs::read("/proc/thread-self/auxv").unwrap_or_default();
    let mut words = listed.chunks_exact(8).map_while(|word| word.try_into().ok());
    let mut listed = std::iter::from_fn(|| {
        let [name, value] = [words.next()?, words.next()?].map(u64::from_ne_bytes);
        Some((name, value))
    });
    let random = listed.find(|(name, _)| *name == libc::AT_RANDOM);
    random.is_some_and(|(_, address)| given != 0 && address != given)
}

/// Takes the program over, or gives it up.
fn take_over(budget: u64, tree: &Tree) {
    request::want_take_over();
    // The search comes before forks must wait, because it takes long.
    code::look_ahead();
    let _busy = forking::busy();
    // The agent sees forks from the moment that the calls are replaced.
    let _at_work = forking::at_work();
    if stage::now() != Stage::TakingOver {
        return;
    }
    let taken = takeover::take_over(budget);
    tree.reserve(0);
    match taken {
        Ok(()) => {
            tree.table().managed.fetch_add(1, Relaxed);
            adoption::report_left(tree, &name());
        }
        Err(reason) => refuse(&reason),
    }
}

/// Gives up a program that has not been taken over, unless it was given up before.
fn refuse(reason: &str) {
    if stage::refuse() {
        leave_alone(reason);
    }
}

/// Gives the program up, and ends the looker's thread, because a program ends with its last thread.
fn stop_watching(reason: &str) {
    refuse(reason);
    looker::end();
}

/// Counts this program as left alone, and says why.
fn leave_alone(reason: &str) {
    say(&["this program runs without: ", reason]);
    if let Some(tree) = tree() {
        tree.leave_alone(&[name().as_bytes(), b": ", reason.as_bytes()]);
    }
}

/// The program's name, or the name by which it was called if it cannot read `/proc`, or if a filter
/// of its own may forbid that.
fn name() -> String {
    let is_filtered = || front().is_some_and(|front| front.waits.load(Relaxed) & FILTERED != 0);
    let comm = || std::fs::read_to_string("/proc/self/comm").ok();
    let name = (!is_filtered()).then(comm).flatten().unwrap_or_else(called_name);
    name.trim_end().to_owned()
}

/// The name by which the program was called. Needs no descriptor.
fn called_name() -> String {
    let first = std::env::args_os().next().unwrap_or_default();
    // Chromium writes all of its arguments there.
    let path = first.as_encoded_bytes().split(|byte| *byte == b' ').next().unwrap_or_default();
    let name = Path::new(OsStr::from_bytes(path)).file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Prints a line of up to six parts. Allocates nothing.
fn say(parts: &[&str]) {
    let mut line = [IoSlice::new(b""); 8];
    let all = ["uzswap: "].into_iter().chain(parts.iter().copied().take(6)).chain(["\n"]);
    line.iter_mut().zip(all).for_each(|(to, part)| *to = IoSlice::new(part.as_bytes()));
    // One write, without the standard library's lock, which another thread may hold at a fork. If
    // standard error is closed, the message has no reader.
    let _ = rustix::io::writev(rustix::stdio::stderr(), &line);
}

/// Ends the process, which would otherwise see wrong bytes. Allocates nothing.
fn die(parts: &[&str]) -> ! {
    say(parts);
    std::process::abort()
}
