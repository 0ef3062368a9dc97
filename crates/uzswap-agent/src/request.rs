//! The work of a program's thread that asks for memory: it has the program watched or taken over,
//! and waits for the take-over.

use crate::stage::{self, Stage};
use crate::watch_from_now;
use crate::{ask_unmanaged, children, decide, front, inside, is_inside, refuse, ring};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_sys::process;
use uzswap_tree::front::BARE;
use uzswap_tree::{SILENT_MAX, Tree, clock};

/// Why a fork is left alone whose allocator may hold its locks whenever we see the fork.
const PAST_LIBRARY: &str =
    "it was forked past the C library, and its own allocator may start no thread of ours";

/// The time until which threads wait for the take-over, milliseconds of the system's clock. Used in
/// the stage `TakingOver` only.
static TAKING_UNTIL: AtomicU64 = AtomicU64::new(0);

/// The bytes that the program will have when it uses all memory that it has asked for. The figure
/// holds until the time below, in milliseconds of the system's clock. The watching thread measures
/// the memory before that time.
static COMING: AtomicU64 = AtomicU64::new(0);
static COMING_UNTIL: AtomicU64 = AtomicU64::new(0);

fn coming() -> u64 {
    if clock() < COMING_UNTIL.load(Relaxed) { COMING.load(Relaxed) } else { 0 }
}

/// Makes the other processes leave room for the take-over, and for memory that this process has
/// asked for but not used yet. Otherwise several processes that ask at the same time would each
/// find the budget free.
pub fn reserve(tree: &Tree, used: u64) {
    let whole = coming().max(used);
    tree.reserve(if whole < SILENT_MAX { 0 } else { decide::COST + whole - used });
}

/// Measures the process's memory, and waits for the process's turn. If the memory is much, with the
/// block that the process is about to get, starts watching the process. If it is too much, the
/// process is taken over before it gets the block: the watching thread might look too late. A
/// thread that holds locks of the program's allocator may not wait, because the take-over starts
/// threads, which allocate.
pub extern "C" fn look(more: usize, may_wait: bool) {
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
    let wanted = used.saturating_add(more as u64);
    let is_late = usable.saturating_add(more as u64) >= front.late_least();
    let is_small = wanted < SILENT_MAX;
    if is_small && !is_late || stage::now() == Stage::Refused {
        return;
    }
    let is_bare = front.has_own_allocator && front.is_past_library.load(Relaxed);
    if is_bare && stage::change(Stage::Loaded, Stage::Watched) {
        // After other forks a thread watches before the program allocates.
        return refuse(PAST_LIBRARY);
    }
    let is_much = {
        let _inside = inside();
        watch_from_now();
        COMING.store(wanted.max(coming()), Relaxed);
        COMING_UNTIL.store(clock() + decide::WAIT_MAX.as_millis() as u64, Relaxed);
        reserve(&front.tree, used);
        decide::is_too_much(wanted, ask_unmanaged(&front.tree, used))
    };
    if is_much && want_take_over() {
        // A pager keeps all new memory within its budget.
        COMING.store(0, Relaxed);
        reserve(&front.tree, used);
        ring();
        if may_wait {
            wait_while_taking();
        }
    }
}

/// Asks the watching thread to take the program over. `false` unless the program is `Watched`, or
/// `TakingOver` already.
pub fn want_take_over() -> bool {
    TAKING_UNTIL.store(clock() + decide::PATIENCE.as_millis() as u64, Relaxed);
    stage::change(Stage::Watched, Stage::TakingOver) || stage::now() == Stage::TakingOver
}

/// Makes a thread that asks for memory wait if it must.
pub extern "C" fn wait() {
    if front().is_some_and(|front| front.waits.load(Relaxed) & BARE != 0) && !is_inside() {
        children::attend();
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

/// Takes the program over before it forks, since the copies of its memory would need more memory
/// than there is. Waits for the take-over, a few seconds at most.
pub fn take_over_for_fork() {
    for _ in 0..FORK_WAITS {
        if !want_take_over() {
            return;
        }
        ring();
        wait_while_taking();
    }
}

/// How often a thread that forks waits for [`decide::PATIENCE`]. Another thread that asks for
/// memory waits once.
const FORK_WAITS: usize = 5;

/// Waits until this program is taken over. Memory that the program takes before that is not kept
/// within the budget.
fn wait_while_taking() {
    let is_under_way = || stage::now() == Stage::TakingOver && !is_inside();
    while is_under_way() && clock() < TAKING_UNTIL.load(Relaxed) {
        let pause = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let arguments = [&raw const pause as u64, 0, 0, 0, 0, 0];
        // SAFETY: sleeps; the signal that stops threads ends it early.
        unsafe { uzswap_calls::raw(libc::SYS_nanosleep as u64, arguments) };
    }
}
