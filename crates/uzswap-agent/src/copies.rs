//! The pages that a fork copies by its writes.
//!
//! The kernel copies a page that parent and child share at the first write, and we see no fault. In
//! a container the copies of a large program exceed the limit before a thread could look. So each
//! process counts shared pages in full, below the tree's ceiling, and a fork waits until a child of
//! its own size has room there (`fork_room`).

use crate::{front, inside};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_tree::{Tree, clock};

/// The time until which this process also counts a new child, which does not count itself yet, in
/// milliseconds of the system's clock. 0 if there is no such child.
static CHILD_UNTIL: AtomicU64 = AtomicU64::new(0);
/// This process's memory at the last look, bytes.
static WHOLE: AtomicU64 = AtomicU64::new(0);

/// The time that a new child may take until it reports its memory, milliseconds.
const BEGINNING: u64 = 300;

/// Makes a new child count itself from now on. Called in the child, before it returns to the
/// program.
pub fn begin_child() {
    CHILD_UNTIL.store(0, Relaxed);
    if let Some(front) = front().filter(|front| front.tree.has_ceiling()) {
        let _inside = inside();
        front.tree.whole_allowance(WHOLE.load(Relaxed), 0);
    }
}

/// Counts a child of this process's size from now on, until it counts itself.
pub fn expect_child() {
    CHILD_UNTIL.store(clock() + BEGINNING, Relaxed);
}

/// This process's memory at the last look, bytes.
pub fn whole() -> u64 {
    WHOLE.load(Relaxed)
}

/// Notes this process's memory. A child begins to count itself with this value.
pub fn note(whole: u64) {
    WHOLE.store(whole, Relaxed);
}

/// The memory that a process may have after its take-over, with shared pages in full.
pub fn allowance(tree: &Tree, whole: u64) -> u64 {
    note(whole);
    let has_child = clock() < CHILD_UNTIL.load(Relaxed);
    tree.whole_allowance(whole, if has_child { whole } else { 0 })
}
