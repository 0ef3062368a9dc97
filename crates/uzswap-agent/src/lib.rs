//! Any program's memory in a budget, without root, and without the program knowing. A library that
//! is preloaded (`uzswap-preload`) loads this one when a program has much memory.
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

mod adoption;
mod alone;
mod calls;
mod devices;
mod first_look;
mod forking;
mod handlers;
mod hooks;
mod interrupted;
mod layout;
mod locals;
mod looker;
mod masks;
mod memory;
mod processes;
mod seccomp;
mod seen;
mod stacks;
mod stage;
mod takeover;
mod thread;
mod whole;

use looker::Question;
use rustix::thread::futex;
use stage::Stage;
use std::io::{self, IoSlice};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_region::{Mode, Pager};
use uzswap_sys::bus::Blocked;
use uzswap_sys::{own_threads, process};
use uzswap_tree::front::{BARE, FILTERED, Front, STACK};
use uzswap_tree::{Allowance, Figures, RemoteSums, SILENT_MAX, Table, Tree, clock};

/// A process with less than this is not taken over: there is little to win.
const LEAST: u64 = 16 << 20;
/// Memory that the take-over itself needs: a pager, threads, the list of mappings.
const COST: u64 = 7 << 20;
/// Memory that the preloaded library lets a program ask for before it has the agent look.
const BETWEEN: u64 = 4 << 20;
/// The least budget of a pager.
const BUDGET_LEAST: u64 = 8 << 20;
/// The most by which memory grows in a second, with a margin: the kernel clears pages no faster.
const GROWTH: u64 = 4 << 30;
/// So many times in a row no process must be able to give memory back before the message that none
/// is left. Others may have died, or begun to wait, just now.
const HOPELESS: u32 = 100;
const WAIT_MIN: Duration = Duration::from_millis(2);
const WAIT_MAX: Duration = Duration::from_millis(100);
/// How often the shared memory is measured, if that takes less than a 20th of the time; and the
/// least share for which it is measured again.
const SHARED_WAIT: Duration = Duration::from_millis(32);
const SHARED_LEAST: u64 = 1 << 20;

/// The state of a program that was taken over.
pub struct Agent {
    /// Where its pages are.
    pub pager: Pager,
}

impl Agent {
    fn new(pager: Pager) -> Self {
        Self { pager }
    }
}

/// Set once, as the program is taken over ([`stage::is_taken_over`]).
static AGENT: OnceLock<Agent> = OnceLock::new();
/// The library that has loaded this one.
static FRONT: OnceLock<&'static Front> = OnceLock::new();

/// The library that has loaded this one, once it has.
fn front() -> Option<&'static Front> {
    FRONT.get().copied()
}

/// The tree that this process and others share.
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

/// The program has an allocator of its own, whose locks the caller may have.
fn has_own_allocator() -> bool {
    front().is_some_and(|front| front.has_own_allocator)
}

fn is_inside() -> bool {
    thread::with(|thread| thread.is_inside.get())
}

/// While this is held, the thread's calls are not looked at, and no handler of a signal runs in it.
struct Inside {
    was: bool,
    blocked: Option<Blocked>,
}

fn inside() -> Inside {
    let was = thread::with(|thread| thread.is_inside.replace(true));
    Inside { was, blocked: Some(Blocked::all()) }
}

impl Drop for Inside {
    fn drop(&mut self) {
        drop(self.blocked.take());
        thread::with(|thread| thread.is_inside.set(self.was));
    }
}

/// Runs once, in whichever thread loads this library.
fn begin(front: &'static Front) {
    IS_RECORDED.store(std::env::var_os("UZSWAP_ACCESSES").is_some(), Relaxed);
    let _ = FRONT.set(front);
}

/// The program's accesses are recorded (`uzswap record --accesses`): then its pages have as much
/// memory at any time, whatever other processes have.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

/// Reports this process's memory to the tree, and asks for the memory that it may have.
fn ask(tree: &Tree, used: u64, is_starved: bool) -> Allowance {
    let given = tree.allowance(used, is_starved);
    match IS_RECORDED.load(Relaxed) {
        true => Allowance { bytes: tree.table().total.load(Relaxed), ..given },
        false => given,
    }
}

/// Measures the process's memory, with the block that it is about to get, and has it watched if
/// that is much. If it is too much, it is taken over before it gets it: the thread that watches
/// might look when it is there. A holder of locks of the program's allocator may not wait: the
/// threads that serve faults are started meanwhile, which takes memory. Before that it waits for
/// its turn.
extern "C" fn look(more: usize, may_wait: bool) {
    if stage::is_taken_over() || is_inside() {
        return;
    }
    let Some(front) = front() else { return };
    let [used, usable] = {
        let _inside = inside();
        process::own_used_and_usable_bytes().unwrap_or_default()
    };
    front.queue(used);
    if may_wait {
        wait_for_turn();
    }
    let is_late = usable.saturating_add(more as u64) >= front.late_least();
    let is_small = used + (more as u64) < SILENT_MAX;
    if is_small && !is_late || stage::now() == Stage::Refused {
        return;
    }
    let is_much = {
        let _inside = inside();
        watch_from_now();
        if !is_small {
            front.tree.reserve(COST);
        }
        let allowance = ask(&front.tree, used, false).bytes;
        used + more as u64 > allowance - reserve(allowance)
    };
    if is_much && want_take_over() {
        ring();
        if may_wait {
            wait_while_taking();
        }
    }
}

/// The part of an allowance that must be left when a program is taken over: for the take-over, and
/// for memory that it asks for between two looks.
fn reserve(allowance: u64) -> u64 {
    (allowance / 4).max((COST + BETWEEN).min(allowance / 2))
}

/// Starts the thread that watches, unless there is one.
extern "C" fn watch_from_now() {
    if stage::change(Stage::Loaded, Stage::Watched) && start().is_err() {
        refuse("no thread can be started");
    }
}

/// Watches in the calling thread, unless another one does.
extern "C" fn watch_from_here() {
    if stage::change(Stage::Loaded, Stage::Watched) {
        watch();
    }
}

/// Rung when the thread that watches is to look at once.
static BELL: AtomicU32 = AtomicU32::new(0);
/// Has the thread that watches look at once.
fn ring() {
    BELL.fetch_add(1, Relaxed);
    // There is no error that a valid address could meet.
    let _ = futex::wake(&BELL, futex::Flags::PRIVATE, 1);
}

/// The time until which a thread that asks for memory waits for the program to be taken over,
/// milliseconds of the system's clock. It counts in the stage `TakingOver` only.
static TAKING_UNTIL: AtomicU64 = AtomicU64::new(0);
/// The longest wait: a thread that waits may have a lock that we need.
const PATIENCE: Duration = Duration::from_secs(1);

/// Has the program taken over. `false`: it is too late for that.
fn want_take_over() -> bool {
    TAKING_UNTIL.store(clock() + PATIENCE.as_millis() as u64, Relaxed);
    stage::change(Stage::Watched, Stage::TakingOver) || stage::now() == Stage::TakingOver
}

/// Has a thread that asks for memory wait if it is to.
extern "C" fn wait_before_more() {
    if front().is_some_and(|front| front.waits.load(Relaxed) & BARE != 0) && !is_inside() {
        forking::attend();
    }
    wait_while_taking();
    wait_for_turn();
}

/// Waits until it is this program's turn.
fn wait_for_turn() {
    if let Some(front) = front().filter(|_| !is_inside()) {
        front.wait_for_turn(stage::is_taken_over);
    }
}

/// Waits until this program is taken over: memory that it takes meanwhile is not kept small.
fn wait_while_taking() {
    let is_under_way = || stage::now() == Stage::TakingOver && !is_inside();
    while is_under_way() && clock() < TAKING_UNTIL.load(Relaxed) {
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let arguments = [&raw const pause as u64, 0, 0, 0, 0, 0];
        // SAFETY: sleeps; the signal that stops threads ends it early.
        unsafe { uzswap_calls::raw(libc::SYS_nanosleep as u64, arguments) };
    }
}

/// Starts the thread that watches.
fn start() -> io::Result<()> {
    let _inside = inside();
    let thread = std::thread::Builder::new().name("uzswap-agent".into()).stack_size(STACK);
    thread.spawn(watch).map(drop)
}

/// Set by a fork, and cleared by the next look: memory is shared. The stage stays the same.
static IS_SHARED: AtomicBool = AtomicBool::new(false);

/// This process's memory that others have too, since a fork. All count it that were taken over, and
/// their children are so from the start.
struct Shared {
    bytes: u64,
    /// How much less it was than the time before: so much less it may be again before it is known.
    fell: u64,
    next: Instant,
    pause: Duration,
}

impl Shared {
    /// It is found out after a fork, and as long as there is any: soon, since a child may become
    /// another program, and then less often.
    fn bytes(&mut self) -> u64 {
        let is_new = IS_SHARED.swap(false, Relaxed);
        if is_new || self.bytes > 0 && Instant::now() >= self.next {
            let start = Instant::now();
            let bytes = looker::ask(Question::Shared);
            let bytes = if bytes < SHARED_LEAST { 0 } else { bytes };
            self.fell = if is_new { 0 } else { self.bytes.saturating_sub(bytes) };
            self.bytes = bytes;
            let pause = if is_new { WAIT_MIN } else { (self.pause * 2).min(SHARED_WAIT) };
            self.pause = pause.max(start.elapsed() * 20);
            self.next = Instant::now() + self.pause;
        }
        self.bytes.saturating_sub(self.fell)
    }
}

/// The last report of this process: faults, pages stored, the activity at a store. A fork goes on
/// from there.
static TOLD: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
static TOLD_REMOTE: RemoteSums = RemoteSums::new();

/// Reports the activity since the last time to the tree. Returns the time of the next report.
fn tell(agent: &Agent, tree: &Tree) -> Instant {
    let now = agent.pager.figures();
    let since = |told: &AtomicU64, now| now - told.swap(now, Relaxed);
    let (faults, stored) = (since(&TOLD[0], now.faults), since(&TOLD[1], now.stored));
    tree.note(Figures { faults, stored, ..now });
    if let Some(remote) = agent.pager.remote() {
        tree.table().remote.add(&TOLD_REMOTE.advance(&remote));
    }
    Instant::now() + WAIT_MAX / 2
}
/// The thread that watches, by its process and its number; 0 before there is one.
static WATCHER: AtomicU64 = AtomicU64::new(0);

fn watch() {
    let _entered = own_threads::enter();
    WATCHER.store(own_threads::own_number(), SeqCst);
    thread::with(|thread| thread.is_inside.set(true));
    // Its parent's memory, if this is a fork.
    IS_SHARED.store(true, Relaxed);
    looker::start();
    let mut shared = Shared { bytes: 0, fell: 0, next: Instant::now(), pause: WAIT_MIN };
    let mut hopeless = 0;
    let mut next_tell = Instant::now();
    loop {
        let rung = BELL.load(Relaxed);
        if alone::is_wanted() {
            looker::end();
            return;
        }
        if front().is_some_and(is_filtered) {
            return refuse("it forbids itself system calls (seccomp)");
        }
        let at_work = stage::is_taken_over().then(forking::at_work);
        let whole = looker::ask(Question::Anonymous);
        let shared = if stage::is_taken_over() { shared.bytes() } else { 0 };
        let used = whole.saturating_sub(shared);
        let Some(tree) = tree() else { return };
        let is_starved = AGENT.get().is_some_and(|agent| agent.pager.is_starved());
        let given = ask(tree, used, is_starved);
        let allowance = given.bytes;
        let room = match AGENT.get() {
            Some(agent) => {
                hopeless = if is_starved && !given.may_hope { hopeless + 1 } else { 0 };
                agent.pager.set_patient(hopeless < HOPELESS);
                let is_held = tree.is_held();
                agent.pager.set_held(is_held);
                let most = if is_held { 0 } else { allowance + shared };
                keep(agent, whole, if seen::attend(agent, tree) { u64::MAX } else { most })
            }
            None => allowance.saturating_sub(used),
        };
        if matches!(stage::now(), Stage::Watched | Stage::TakingOver) {
            let is_short = room < reserve(allowance) && used >= LEAST;
            if is_short || stage::now() == Stage::TakingOver {
                want_take_over();
                let _busy = forking::busy();
                take_over(allowance, tree.table());
                continue;
            }
            if used > allowance / 2 {
                let _busy = forking::busy();
                takeover::look_ahead();
            }
        }
        if let Some(agent) = AGENT.get().filter(|_| Instant::now() >= next_tell) {
            next_tell = tell(agent, tree);
        }
        drop(at_work);
        if stage::is_taken_over() && tree.is_held() {
            tree.wait_while_held(WAIT_MAX);
            continue;
        }
        let wait = Duration::from_secs_f64(room as f64 / GROWTH as f64);
        let wait = wait.clamp(WAIT_MIN, WAIT_MAX).try_into().ok();
        // Rung or not, it looks again.
        let _ = futex::wait(&BELL, futex::Flags::PRIVATE, rung, wait.as_ref());
    }
}

fn take_over(allowance: u64, table: &Table) {
    // Forks are looked at from the moment that the calls are replaced.
    let _at_work = forking::at_work();
    let compressor = std::env::var("UZSWAP_COMPRESSOR").unwrap_or("lz4".into());
    // The watching thread finds out later how much is beside the pager's pages.
    let cost = if IS_RECORDED.load(Relaxed) { 0 } else { COST };
    let memory = allowance.saturating_sub(cost).max(BUDGET_LEAST);
    let taken = takeover::take_over(memory, &compressor);
    tree().into_iter().for_each(|tree| tree.reserve(0));
    match taken {
        Ok(()) => {
            table.managed.fetch_add(1, Relaxed);
            adoption::report_left(table, &name());
        }
        Err(reason) => refuse(&reason),
    }
}

/// True if a program that was not taken over permits itself few calls. Then it is not taken over,
/// because others would serve its faults.
fn is_filtered(front: &Front) -> bool {
    !stage::is_taken_over() && front.waits.load(Relaxed) & FILTERED != 0
}

/// Gives up a program that has not been taken over, unless that was done.
fn refuse(reason: &str) {
    if stage::refuse() {
        leave_alone(reason);
    }
}

/// Counts this program as one that runs as without us, and says why.
fn leave_alone(reason: &str) {
    say(&["this program runs without: ", reason]);
    if let Some(tree) = tree() {
        tree.table().leave_alone(&[name().as_bytes(), b": ", reason.as_bytes()]);
    }
}

/// The program's name.
fn name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end().to_owned()
}

/// Memory besides the pager's, bytes, when mappings that stay open were last looked through.
static BESIDES: AtomicU64 = AtomicU64::new(0);
/// They are looked through again when that has grown by so much.
const LOOK_STEP: u64 = 256 << 10;

/// Keeps the pager's budget at the allowance, less other memory; returns the room that is left.
/// Shared memory is in both.
fn keep(agent: &Agent, used: u64, allowance: u64) -> u64 {
    let pager = &agent.pager;
    if IS_RECORDED.load(Relaxed) {
        // The budget is for pages alone, and stays.
        return u64::MAX;
    }
    // All that the pager takes is anonymous memory, too.
    let besides = || used.saturating_sub(pager.used_bytes());
    if besides() > BESIDES.load(Relaxed) + LOOK_STEP {
        pager.find_used();
        BESIDES.store(besides(), Relaxed);
    }
    let besides = besides();
    BESIDES.fetch_min(besides, Relaxed);
    let wanted = allowance.saturating_sub(besides).max(BUDGET_LEAST);
    if wanted.abs_diff(pager.memory()) > pager.memory() / 64 {
        // A budget that is refused stays as it was.
        let _ = pager.set_memory(wanted);
    }
    // Pages are charged as they come: only memory besides them grows unseen.
    (allowance / 4).max(1 << 20)
}

/// Prints a line of up to six parts. Allocates nothing.
fn say(parts: &[&str]) {
    let mut line = [IoSlice::new(b""); 8];
    let all = ["uzswap: "].into_iter().chain(parts.iter().copied().take(6)).chain(["\n"]);
    line.iter_mut().zip(all).for_each(|(to, part)| *to = IoSlice::new(part.as_bytes()));
    // In one piece, and without the lock of the standard library, which a fork may find taken.
    // Where standard error is closed there is nobody to tell.
    let _ = rustix::io::writev(rustix::stdio::stderr(), &line);
}

/// Ends the process: going on would mean wrong bytes. Allocates nothing.
fn die(parts: &[&str]) -> ! {
    say(parts);
    std::process::abort()
}
