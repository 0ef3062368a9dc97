//! Makes room for the copies of a fork ([`crate::copies`]) before the fork.
//!
//! A program that is not taken over gives no memory back. So it is taken over first.

use crate::stage::{self, Stage};
use crate::{AGENT, copies, decide, front, inside, is_inside, is_recorded};
use crate::{request, ring, watch_from_now};
use std::thread;
use std::time::Duration;
use uzswap_sys::process;
use uzswap_tree::front::Front;
use uzswap_tree::{MANAGED_MIN, Tree, clock};

/// The time, in milliseconds, for which a fork waits for room although this process's memory falls
/// no further.
const PATIENCE: u64 = 2000;
/// Less than this part of the memory is no fall.
const FALL: u64 = 64;
const PAUSE: Duration = Duration::from_millis(1);

/// Waits, before a fork, until the child has room. True if the child, with as much memory as its
/// parent, is large enough to be watched from its start.
pub fn make() -> bool {
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
        copies::note(used);
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
        copies::expect_child();
        // The pager's figure is newer, but lacks the memory besides the pager's.
        let whole = copies::whole().max(agent.pager.used_bytes());
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
