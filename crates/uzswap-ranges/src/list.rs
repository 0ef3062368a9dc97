//! The skiplist: finding leaves, inserting, removing, and the levels above the lowest.
//!
//! **The list.** Every leaf is on the lowest level, sorted by `low`, and the spans of these leaves
//! fill the space. A leaf is first linked there, then on its higher levels one by one, from the
//! lowest up. The leaf is unlinked from its levels one by one, from the highest down. So each level
//! is a part of the level below it. The first leaf is on all levels and is never removed.
//!
//! **Locks.** A link changes under the lock of its leaf, and only while that leaf is not dead.
//! Locks are taken from left to right, two at most. A thread locks two neighbours to move the
//! boundary between them, or two leaves to link one behind the other.
//!
//! **Removal** has two phases. The thread that takes the last item out of a leaf marks the leaf
//! dead under its lock. From then on no thread locks the leaf or changes its links. The thread then
//! unlinks the leaf level by level; the last step gives its span to its left neighbour. Another
//! thread that needs the span or the links of a dead leaf unlinks it too, without waiting for the
//! first thread. The first thread retires the leaf.

#![expect(
    unsafe_code,
    reason = "links that other threads may follow: a leaf is freed two epochs after the last link to it went"
)]

use crate::leaf::link::{Head, LeafRef};
use crate::leaf::{LEVELS, Leaf, LockedLeaf, SLOTS};
use crate::preload::Preload;
use crate::{Insert, Item};
use crossbeam_epoch::Guard;
use uzswap_sync::atomic::Ordering::*;
use uzswap_sync::{self as sync, Backoff};

/// The concurrent range index. See [`crate::RangeIndex`] for its operations.
pub struct SkipList {
    head: Head,
}

impl Default for SkipList {
    fn default() -> Self {
        Self { head: Head::new(Box::new(Leaf::new(LEVELS as u32))) }
    }
}

/// The obstacle to making a leaf's span longer.
pub(crate) enum Blocked<'g> {
    /// The first item of the next leaf.
    By(Item),
    /// The next leaf is dead, and still linked.
    Dead(LeafRef<'g>),
}

impl SkipList {
    /// An index of an empty space.
    pub fn new() -> Self {
        Self::default()
    }

    pub(crate) fn head<'g>(&'g self, pinned: &'g Guard) -> LeafRef<'g> {
        self.head.get(pinned)
    }

    /// Walks to the leaf whose span contains `point`, without a lock. The leaf may have changed
    /// meanwhile. The caller checks this and, if so, calls with `again`. The first walk relies on
    /// the copies of `low` beside the links and touches fewer leaves. A copy may be too low, so a
    /// walk with `again` reads each leaf itself.
    pub(crate) fn find<'g>(&'g self, point: u64, again: bool, pinned: &'g Guard) -> LeafRef<'g> {
        let mut leaf = self.find_on(1, point, again, pinned);
        while leaf.high() <= point {
            // No next leaf: the span of the last leaf has just grown.
            let Some(next) = leaf.next.get(pinned) else { break };
            leaf = next;
        }
        leaf
    }

    /// Walks to a leaf of a level above the lowest: the last whose `low` is not above `point`.
    fn find_on<'g>(
        &'g self,
        level: usize,
        point: u64,
        again: bool,
        pinned: &'g Guard,
    ) -> LeafRef<'g> {
        let mut leaf = self.head(pinned);
        for level in (level - 1..LEVELS - 1).rev() {
            while leaf.upper[level].low.load(Acquire) <= point {
                match leaf.upper[level].next.get(pinned) {
                    Some(next) if !again || next.low() <= point => leaf = next,
                    _ => break,
                }
            }
        }
        leaf
    }

    /// Locks the leaf whose span contains `point`.
    pub(crate) fn lock_owner<'g>(&'g self, point: u64, pinned: &'g Guard) -> LockedLeaf<'g> {
        // No range contains the last point of the space, and no span does.
        let point = point.min(u64::MAX - 1);
        let (mut again, mut backoff) = (false, Backoff::new());
        loop {
            let leaf = self.find(point, again, pinned);
            match LockedLeaf::new(leaf) {
                Some(locked) if locked.owns(point) => return locked,
                Some(_) => {}
                None => self.unlink(leaf, pinned),
            }
            again = true;
            backoff.wait();
        }
    }

    pub(crate) fn insert_item(&self, item: Item, preload: &mut Preload) -> Insert {
        item.assert_valid();
        preload.ready();
        let pinned = &sync::pin();
        loop {
            let locked = self.lock_owner(item.key, pinned);
            let slot = locked.rank(item.key);
            if slot > 0 && locked.end(slot - 1) > item.key {
                return Insert::Overlaps(locked.item(slot - 1));
            }
            if slot < locked.len() && locked.key(slot) < item.end() {
                return Insert::Overlaps(locked.item(slot));
            }
            match extend(&locked, item.end(), pinned) {
                Ok(()) => {
                    self.put(locked, slot, item, preload, pinned);
                    return Insert::Inserted;
                }
                Err(Blocked::By(other)) => return Insert::Overlaps(other),
                Err(Blocked::Dead(next)) => {
                    drop(locked);
                    self.unlink(next, pinned);
                }
            }
        }
    }

    /// Puts a fitting item into a slot, and unlocks.
    pub(crate) fn put<'g>(
        &'g self,
        locked: LockedLeaf<'g>,
        slot: usize,
        item: Item,
        preload: &mut Preload,
        pinned: &'g Guard,
    ) {
        if locked.len() < SLOTS {
            locked.insert_at(slot, item);
            return;
        }
        let new = LeafRef::publish(preload.take(), pinned);
        locked.insert_splitting(slot, item, new);
        drop(locked);
        self.link(new, pinned);
    }

    pub(crate) fn remove_item(&self, key: u64) -> Option<Item> {
        let pinned = &sync::pin();
        let locked = self.lock_owner(key, pinned);
        let slot = locked.rank(key).checked_sub(1)?;
        if locked.key(slot) != key {
            return None;
        }
        let item = locked.remove_at(slot);
        let leaf = locked.leaf();
        if locked.len() == 0 && leaf != self.head(pinned) {
            locked.kill();
            self.unlink(leaf, pinned);
            // SAFETY: `unlink` returned, so no level links to the leaf. It is dead, so it is never
            // linked again. This thread marked it dead, which one thread does for each leaf.
            unsafe { leaf.retire(pinned) };
        }
        Some(item)
    }

    /// Links a leaf of the lowest level on its higher levels. Stops if a thread marks it dead.
    fn link<'g>(&'g self, leaf: LeafRef<'g>, pinned: &'g Guard) {
        for level in 1..leaf.height() {
            loop {
                match self.link_on(leaf, level, pinned) {
                    Ok(true) => break,
                    Ok(false) => {}
                    Err(dead) if dead == leaf => return,
                    Err(dead) => self.unlink(dead, pinned),
                }
            }
        }
    }

    /// `Ok(false)` if another thread's change came between: try again. `Err` has a dead leaf to
    /// unlink first, or `leaf` itself if that is dead.
    fn link_on<'g>(
        &'g self,
        leaf: LeafRef<'g>,
        level: usize,
        pinned: &'g Guard,
    ) -> Result<bool, LeafRef<'g>> {
        let low = leaf.low();
        let before = self.lock_before(low, level, pinned)?;
        let locked = LockedLeaf::new(leaf).ok_or(leaf)?;
        let (from, to) = (&before.upper[level - 1], &locked.upper[level - 1]);
        // `low` does not change while the leaf is locked. If it has reached the `low` of the next
        // leaf on this level, that leaf belongs before `leaf`.
        let next = from.next.get(pinned);
        let next_low = next.map_or(u64::MAX, |next| next.low());
        if next_low <= locked.low() {
            return Ok(false);
        }
        to.next.set(next);
        to.low.store(next_low, Release);
        from.next.set(Some(leaf));
        from.low.store(locked.low(), Release);
        Ok(true)
    }

    /// Unlinks a dead leaf from every level that it is still on, and dead leaves in the way.
    pub(crate) fn unlink<'g>(&'g self, leaf: LeafRef<'g>, pinned: &'g Guard) {
        let mut dead = leaf;
        loop {
            match self.try_unlink(dead, pinned) {
                Ok(()) if dead == leaf => return,
                Ok(()) => dead = leaf,
                Err(other) => dead = other,
            }
        }
    }

    /// `Err` has another dead leaf, which links to `leaf` and must be unlinked first.
    fn try_unlink<'g>(&'g self, leaf: LeafRef<'g>, pinned: &'g Guard) -> Result<(), LeafRef<'g>> {
        for level in (0..leaf.height()).rev() {
            let before = self.lock_before(leaf.low(), level, pinned)?;
            // If another leaf follows, some thread has unlinked `leaf` from this level, for good.
            if next_on(&before, level, pinned) == Some(leaf) {
                unlink_from(&before, leaf, level);
            }
        }
        Ok(())
    }

    /// Locks the last leaf on a level whose span begins before `low`, so that the next leaf begins
    /// at `low` or behind it. `Err` has the leaf in that place if it is dead.
    ///
    /// The locked leaf came from a link on this level or above, so it was on this level. It is not
    /// dead, so it is still on this level.
    fn lock_before<'g>(
        &'g self,
        low: u64,
        level: usize,
        pinned: &'g Guard,
    ) -> Result<LockedLeaf<'g>, LeafRef<'g>> {
        let (mut again, mut backoff) = (false, Backoff::new());
        loop {
            let before = match level {
                0 => self.find(low - 1, again, pinned),
                _ => self.find_on(level, low - 1, again, pinned),
            };
            match LockedLeaf::new(before) {
                None if again => return Err(before),
                Some(locked) if locked.low() < low => {
                    let next = next_on(&locked, level, pinned);
                    if next.is_none_or(|next| next.low() >= low) {
                        return Ok(locked);
                    }
                }
                _ => {}
            }
            again = true;
            backoff.wait();
        }
    }
}

pub(crate) fn next_on<'g>(leaf: &Leaf, level: usize, pinned: &'g Guard) -> Option<LeafRef<'g>> {
    match level {
        0 => leaf.next.get(pinned),
        _ => leaf.upper[level - 1].next.get(pinned),
    }
}

/// Unlinks a dead leaf from a level on which it directly follows `before`.
fn unlink_from<'g>(before: &LockedLeaf<'g>, dead: LeafRef<'g>, level: usize) {
    if level == 0 {
        before.absorb(dead);
        return;
    }
    let (from, to) = (&before.upper[level - 1], &dead.upper[level - 1]);
    from.next.copy(&to.next);
    from.low.store(to.low.load(Acquire), Release);
}

/// Extends a leaf's span to `end`, into the span of the next leaf, if that part has no item.
pub(crate) fn extend<'g>(
    locked: &LockedLeaf<'g>,
    end: u64,
    pinned: &'g Guard,
) -> Result<(), Blocked<'g>> {
    if end <= locked.high() {
        return Ok(());
    }
    // The last leaf's span reaches to the end of the space.
    let next = locked.next.get(pinned).expect("a span that ends before the space has a next leaf");
    let next = LockedLeaf::new(next).ok_or(Blocked::Dead(next))?;
    if next.key(0) < end {
        return Err(Blocked::By(next.item(0)));
    }
    // In this order a walk to a point that changes its leaf meets a locked leaf, and waits.
    locked.set_high(end);
    next.set_low(end);
    Ok(())
}
