//! The operations of [`RangeIndex`] on the skiplist, and reading it without a lock.

use crate::leaf::Leaf;
use crate::list::{SkipList, next_on};
use crate::preload::Preload;
use crate::{Hole, Insert, Item, RangeIndex, Totals};
use uzswap_sync::{self as sync, Backoff};

impl SkipList {
    /// Reads the leaf whose span contains `point`, as it was at one moment of the call.
    ///
    /// A dead leaf is good enough. The leaf was on the list at some moment of the call, because a
    /// leaf that links to it was, and such leaves are removed before a dead one. The dead leaf
    /// owned its span then. If it was not dead and empty at that moment, it became so later in the
    /// call.
    fn read_owner<R>(&self, point: u64, mut read: impl FnMut(&Leaf) -> R) -> R {
        let pinned = &sync::pin();
        // No range contains the last point of the space, and no span does.
        let point = point.min(u64::MAX - 1);
        let mut backoff = Backoff::new();
        let mut again = false;
        loop {
            let leaf = self.find(point, again, pinned);
            if let Some(value) = leaf.read(|leaf| leaf.owns(point).then(|| read(leaf))) {
                return value;
            }
            again = true;
            backoff.wait();
        }
    }
}

impl RangeIndex for SkipList {
    type Preload = Preload;

    fn preload(&self, preload: &mut Preload) {
        preload.ready();
    }

    fn insert(&self, item: Item, preload: &mut Preload) -> Insert {
        self.insert_item(item, preload)
    }

    fn insert_hole(&self, hole: &Hole, preload: &mut Preload) -> Option<u64> {
        self.take_hole(hole, preload)
    }

    fn remove(&self, key: u64) -> Option<Item> {
        self.remove_item(key)
    }

    fn lookup(&self, point: u64) -> Option<Item> {
        self.read_owner(point, |leaf| leaf.containing(point))
    }

    fn lookup_locked<R>(&self, point: u64, then: impl FnOnce(Option<Item>) -> R) -> R {
        let pinned = &sync::pin();
        let locked = self.lock_owner(point, pinned);
        then(locked.containing(point))
    }

    fn last(&self) -> Option<Item> {
        let mut point = u64::MAX;
        loop {
            let last = |leaf: &Leaf| leaf.len().checked_sub(1).map(|slot| leaf.item(slot));
            match self.read_owner(point, |leaf| (last(leaf), leaf.low())) {
                (None, low) if low > 0 => point = low - 1,
                (item, _) => return item,
            }
        }
    }

    fn leaf(&self, from: u64, items: &mut Vec<Item>) -> Option<u64> {
        let high = self.read_owner(from, |leaf| {
            let first = from.checked_sub(1).map_or(0, |before| leaf.rank(before));
            items.clear();
            items.extend((first..leaf.len()).map(|slot| leaf.item(slot)));
            leaf.high()
        });
        (high < u64::MAX).then_some(high)
    }

    fn bytes(&self) -> usize {
        let pinned = &sync::pin();
        let head = Some(self.head(pinned));
        let leaves = std::iter::successors(head, |leaf| next_on(leaf, 0, pinned)).count();
        size_of::<Self>() + leaves * size_of::<Leaf>()
    }

    fn check(&self) -> Totals {
        self.recount()
    }
}
