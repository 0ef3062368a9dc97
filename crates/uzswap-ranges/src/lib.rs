//! The range index: which ranges of a large space are taken, and where a free one is.
//!
//! Keyed by (key, size): an item is the range from `key` to `key + size` with a `u64` of the
//! caller's. Items never overlap. [`SkipList`] is the index: several slots to a leaf, a lock per
//! leaf, readers without locks. `tree` (feature `testing`) has balanced trees behind one lock with
//! the same interface, as the reference for tests and the peer in benches.
//!
//! docs/design/ranges.md has the structure with an example, and what was measured.

#![deny(unsafe_code)]

// In the order in which to read them.
mod leaf;
mod link;
mod list;

mod hole;
mod preload;
mod read;

mod check;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
#[cfg(feature = "testing")]
pub mod tree;

pub use list::SkipList;
pub use preload::Preload;

use std::ops::Range;

/// A range that is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Where it begins.
    pub key: u64,
    /// How long it is: at least 1; `key + size` fits in a `u64`.
    pub size: u64,
    /// The caller's.
    pub value: u64,
}

impl Item {
    /// The first point after the range.
    pub fn end(&self) -> u64 {
        self.key + self.size
    }

    /// Panics on a range that is empty or reaches beyond the space: a bug of the caller, which
    /// would make ranges overlap.
    pub(crate) fn assert_valid(&self) {
        assert!(self.size > 0, "an empty range");
        assert!(self.key.checked_add(self.size).is_some(), "a range beyond the space");
    }
}

/// What became of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Insert {
    /// The range is taken now.
    Inserted,
    /// Nothing was done: this item is in the way. It may be gone by now.
    Overlaps(Item),
}

/// What kind of range [`RangeIndex::insert_hole`] is to find, and what to put there.
#[derive(Debug, Clone)]
pub struct Hole {
    /// Where to begin to look. Outside of `within`, its start.
    pub hint: u64,
    /// Length of the range, at least 1.
    pub size: u64,
    /// The range begins at a multiple of this: a power of two.
    pub align: u64,
    /// The range lies in here.
    pub within: Range<u64>,
    /// The caller's, as in [`Item::value`].
    pub value: u64,
}

impl Hole {
    /// Panics on what no range can be: a bug of the caller.
    pub(crate) fn assert_valid(&self) {
        assert!(self.size > 0, "an empty range");
        assert!(self.align.is_power_of_two(), "an alignment that is not a power of two");
    }

    /// The parts of the space in which to look, in this order: from the hint to the end, and from
    /// the beginning up to the last range that begins before the hint.
    pub(crate) fn passes(&self) -> [Range<u64>; 2] {
        let Range { start, end } = self.within;
        let hint = if self.within.contains(&self.hint) { self.hint } else { start };
        [hint..end, start..end.min(hint.saturating_add(self.size - 1))]
    }

    /// Where the range would begin in the free run from `from` on; `None` beyond the space.
    pub(crate) fn start_in(&self, from: u64) -> Option<u64> {
        Some(from.checked_add(self.align - 1)? & !(self.align - 1))
    }

    /// The item that takes the range from `key` on.
    pub(crate) fn item(&self, key: u64) -> Item {
        Item { key, size: self.size, value: self.value }
    }
}

/// What [`RangeIndex::check`] counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Ranges taken.
    pub items: usize,
    /// The sum of their sizes.
    pub taken: u64,
    /// The sum of what lies between, before and after them: with `taken`, the whole space.
    pub free: u64,
    /// Leaves that hold them; 0 where there is no such thing.
    pub leaves: usize,
}

/// A range index: what [`SkipList`] and the locked trees have in common.
///
/// All operations may be called by any number of threads at once. An item is inserted whole and
/// removed whole: a part of one cannot be removed, because extents are freed as they were
/// allocated.
pub trait RangeIndex: Send + Sync {
    /// Memory that an insertion may need, made ready where allocating is no trouble. One for each
    /// thread.
    type Preload: Default + Send;

    /// Makes the memory for one insertion ready, if it is not. Insertions do this too, before they
    /// take a lock; called first, the insertion that follows allocates nothing.
    fn preload(&self, preload: &mut Self::Preload);

    /// Inserts a range, unless it overlaps one that is there.
    ///
    /// # Panics
    /// If the range is empty or ends beyond the space.
    fn insert(&self, item: Item, preload: &mut Self::Preload) -> Insert;

    /// Finds a free range and takes it; where it begins. `None` if no place had room when it was
    /// looked at.
    ///
    /// Takes the first range at or after the hint, or else the first in `within`. What others take
    /// or free while it looks, it may or may not see; what it returns is the caller's alone.
    ///
    /// # Panics
    /// If the size is 0 or the alignment is not a power of two.
    fn insert_hole(&self, hole: &Hole, preload: &mut Self::Preload) -> Option<u64>;

    /// Removes the item that begins at `key`.
    fn remove(&self, key: u64) -> Option<Item>;

    /// The item that begins at `key`.
    fn get(&self, key: u64) -> Option<Item> {
        self.lookup(key).filter(|item| item.key == key)
    }

    /// The item whose range contains `point`. It may be gone when this returns: who needs it to
    /// stay uses [`RangeIndex::lookup_locked`], or checks again.
    fn lookup(&self, point: u64) -> Option<Item>;

    /// The same, and the item stays while `then` runs: it holds the lock on its neighbourhood.
    /// `then` must be short, and must not call the index.
    fn lookup_locked<R>(&self, point: u64, then: impl FnOnce(Option<Item>) -> R) -> R;

    /// The first item.
    fn first(&self) -> Option<Item> {
        let (mut items, mut from) = (Vec::new(), 0);
        loop {
            let next = self.leaf(from, &mut items);
            if !items.is_empty() {
                return items.first().copied();
            }
            from = next?;
        }
    }

    /// The last item.
    fn last(&self) -> Option<Item>;

    /// Iterates by leaf: replaces `items` by those that begin at or after `from` in the leaf that
    /// holds `from`, as they were together at one moment. Returns where the next leaf begins;
    /// `None` after the last. Begin with 0.
    fn leaf(&self, from: u64, items: &mut Vec<Item>) -> Option<u64>;

    /// Bytes of memory in use, without what waits for readers to leave it.
    fn bytes(&self) -> usize;

    /// Counts everything again and checks every invariant. Nothing else may run meanwhile.
    ///
    /// # Panics
    /// If an invariant does not hold.
    fn check(&self) -> Totals;
}
