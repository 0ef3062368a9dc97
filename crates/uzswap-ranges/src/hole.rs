//! Finding a free range and taking it.
//!
//! The walk goes from leaf to leaf without a lock and skips leaves without space. It locks a leaf
//! that may have space, checks again, and takes the run that it then finds. A free run may reach
//! over the end of a span, but only into the next span, because only the first leaf may be empty.

use crate::Hole;
use crate::leaf::link::LeafRef;
use crate::leaf::{Leaf, LockedLeaf};
use crate::list::{Blocked, SkipList, extend};
use crate::preload::Preload;
use crossbeam_epoch::Guard;
use std::ops::Range;
use uzswap_sync::{self as sync, Backoff};

impl SkipList {
    pub(crate) fn take_hole(&self, hole: &Hole, preload: &mut Preload) -> Option<u64> {
        hole.assert_valid();
        preload.ready();
        let pinned = &sync::pin();
        hole.passes().into_iter().find_map(|part| self.take_first(hole, part, preload, pinned))
    }

    /// Takes the first free range in a part of the space.
    fn take_first(
        &self,
        hole: &Hole,
        part: Range<u64>,
        preload: &mut Preload,
        pinned: &Guard,
    ) -> Option<u64> {
        let key_max = part.end.checked_sub(hole.size)?;
        // No fitting range begins before this.
        let mut from = part.start;
        while let Some(leaf) = self.find_room(&mut from, key_max, hole.size, pinned) {
            let Some(locked) = LockedLeaf::new(leaf) else {
                self.unlink(leaf, pinned);
                continue;
            };
            if !locked.owns(from) {
                continue;
            }
            if let Some((slot, key)) = fit(&locked, hole, from, key_max) {
                match extend(&locked, key + hole.size, pinned) {
                    Ok(()) => {
                        self.put(locked, slot, hole.item(key), preload, pinned);
                        return Some(key);
                    }
                    Err(Blocked::Dead(next)) => {
                        drop(locked);
                        self.unlink(next, pinned);
                        continue;
                    }
                    Err(Blocked::By(_)) => {}
                }
            }
            locked.count_room();
            from = locked.high();
        }
        None
    }

    /// Skips leaves without space and moves `from` past them. Returns the first leaf with space.
    fn find_room<'g>(
        &'g self,
        from: &mut u64,
        key_max: u64,
        size: u64,
        pinned: &'g Guard,
    ) -> Option<LeafRef<'g>> {
        let (mut known, mut again, mut backoff) = (None, false, Backoff::new());
        while *from <= key_max {
            let leaf = known.take().unwrap_or_else(|| self.find(*from, again, pinned));
            let look = |leaf: &Leaf| {
                let run = (leaf.last(), leaf.next.get(pinned));
                leaf.owns(*from).then(|| (leaf.room(), run, leaf.high()))
            };
            let Some((room, (last, next), high)) = leaf.read(look) else {
                again = true;
                backoff.wait();
                continue;
            };
            let reaches = |next: &LeafRef| next.is_dead() || next.first() - last >= size;
            if room >= size || next.as_ref().is_some_and(reaches) {
                return Some(leaf);
            }
            *from = high;
            known = next;
        }
        None
    }
}

/// The first free range in a leaf at or after `from`: its slot, and its start. A range in the last
/// run may reach over the end of the span.
fn fit(leaf: &Leaf, hole: &Hole, from: u64, key_max: u64) -> Option<(usize, u64)> {
    for slot in leaf.rank(from)..=leaf.len() {
        let (start, end) = leaf.run_before(slot);
        let key = hole.start_in(start.max(from)).filter(|key| *key <= key_max)?;
        let fits = if slot == leaf.len() { key < end } else { key + hole.size <= end };
        if fits {
            return Some((slot, key));
        }
    }
    None
}
