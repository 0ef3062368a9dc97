//! Room for the pages that a fork copies by its writes.
//!
//! The kernel copies a page that parent and child share at the first write, and we see no fault. In
//! a container the copies of a large program are beyond the limit sooner than a thread could look.
//! So each process counts shared pages in full, below the tree's ceiling, and a fork waits until a
//! child of its own size has room there. A program that is not taken over gives nothing back, and
//! is taken over first.

use crate::stage::{self, Stage};
use crate::{AGENT, decide, front, inside, is_inside, is_recorded, request, ring, watch_from_now};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;
use uzswap_sys::process;
use uzswap_tree::front::Front;
use uzswap_tree::{MANAGED_MIN, Tree, clock};

/// The time until which a child counts that does not count itself yet, milliseconds of the system's
/// clock. 0: there is none.
static CHILD_UNTIL: AtomicU64 = AtomicU64::new(0);
/// This process's memory at the last look, bytes.
static WHOLE: AtomicU64 = AtomicU64::new(0);

/// How long a fork waits for room while this process's memory falls no further, and how long a new
/// child may take until it reports its memory, milliseconds.
const PATIENCE: u64 = 2000;
const BEGINNING: u64 = 300;
/// Less than this part of the memory is no fall.
const FALL: u64 = 64;
const PAUSE: Duration = Duration::from_millis(1);

/// In a new child, before it returns to the program: it counts itself from now on.
pub fn begin_child() {
    CHILD_UNTIL.store(0, Relaxed);
    if let Some(front) = front().filter(|front| front.tree.has_ceiling()) {
        let _inside = inside();
        front.tree.whole_allowance(WHOLE.load(Relaxed), 0);
    }
}

/// The memory that a process which was taken over may have, shared pages in full.
pub fn allowance(tree: &Tree, whole: u64) -> u64 {
    WHOLE.store(whole, Relaxed);
    let has_child = clock() < CHILD_UNTIL.load(Relaxed);
    tree.whole_allowance(whole, if has_child { whole } else { 0 })
}

/// Before a fork: waits until its child has room. True if the child, whose memory is its parent's,
/// has enough of it to be watched from its start.
pub fn make_room() -> bool {
    // The memory of a recorded program is always the same.
    let may_wait = |front: &&Front| front.tree.has_ceiling() && !is_inside() && !is_recorded();
    let Some(front) = front().filter(may_wait) else { return false };
    let mut is_large = false;
    if !stage::is_taken_over() && stage::now() != Stage::Refused {
        let (used, allowance) = {
            let _inside = inside();
            let [used, _] = process::own_used_and_usable_bytes().unwrap_or_default();
            (used, front.tree.whole_allowance(used, 0))
        };
        WHOLE.store(used, Relaxed);
        is_large = used >= MANAGED_MIN;
        if decide::is_too_much_to_copy(used, allowance) {
            watch_from_now();
            request::take_over_for_fork();
        }
    }
    if stage::now() == Stage::Managed {
        wait_for_room(&front.tree);
    }
    is_large
}

fn wait_for_room(tree: &Tree) {
    let Some(agent) = AGENT.get() else { return };
    let (mut end, mut most) = (clock() + PATIENCE, u64::MAX);
    loop {
        CHILD_UNTIL.store(clock() + BEGINNING, Relaxed);
        // Memory besides the pager's is in the figure of the last look.
        let whole = WHOLE.load(Relaxed).max(agent.pager.used_bytes());
        if whole < most - most / FALL {
            (end, most) = (clock() + PATIENCE, whole);
        }
        let has_least = agent.pager.memory() <= decide::least_budget(agent.pager.least_memory());
        let has_room = {
            let _inside = inside();
            tree.has_room_for_child(whole)
        };
        if has_room || has_least || clock() >= end {
            return;
        }
        ring();
        thread::sleep(PAUSE);
    }
}
