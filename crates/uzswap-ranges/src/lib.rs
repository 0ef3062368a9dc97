//! The range index: which ranges of a large space are taken, and where a free one is.
//!
//! An item is the range from `key` to `key + size`, with a `u64` that the caller chooses. Items
//! never overlap. [`SkipList`] is the index: several slots to a leaf, a lock per leaf, readers
//! without locks. `tree` (feature `testing`) has balanced trees behind one lock with the same
//! interface, as the reference for tests and the peer in benches.
//!
//! docs/design/ranges.md has the structure with an example, and measurements.

// In the order in which to read them.
mod leaf;
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

/// A taken range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Its start.
    pub key: u64,
    /// Its length: at least 1; `key + size` fits in a `u64`.
    pub size: u64,
    /// Any number of the caller's choice.
    pub value: u64,
}

impl Item {
    /// The first point after the range.
    pub fn end(&self) -> u64 {
        self.key + self.size
    }

    /// Panics on a range that is empty or ends beyond the space: a bug of the caller, which would
    /// make ranges overlap.
    pub(crate) fn assert_valid(&self) {
        assert!(self.size > 0, "an empty range");
        assert!(self.key.checked_add(self.size).is_some(), "a range beyond the space");
    }
}

/// The result of an insertion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Insert {
    /// The range is taken.
    Inserted,
    /// Nothing was changed: this item overlaps the range. A thread may have removed it by now.
    Overlaps(Item),
}

/// The free range that [`RangeIndex::insert_hole`] is to find, and the item to put there.
#[derive(Debug, Clone)]
pub struct Hole {
    /// The start of the search; if it is outside of `within`, the start of `within`.
    pub hint: u64,
    /// Length of the range, at least 1.
    pub size: u64,
    /// The range begins at a multiple of this: a power of two.
    pub align: u64,
    /// The part of the space in which the range must lie.
    pub within: Range<u64>,
    /// As [`Item::value`].
    pub value: u64,
}

impl Hole {
    /// Panics on an impossible range: a bug of the caller.
    pub(crate) fn assert_valid(&self) {
        assert!(self.size > 0, "an empty range");
        assert!(self.align.is_power_of_two(), "an alignment that is not a power of two");
    }

    /// The parts of the space to search, in this order: from the hint to the end, and from the
    /// beginning up to the last range that begins before the hint.
    pub(crate) fn passes(&self) -> [Range<u64>; 2] {
        let Range { start, end } = self.within;
        let hint = if self.within.contains(&self.hint) { self.hint } else { start };
        [hint..end, start..end.min(hint.saturating_add(self.size - 1))]
    }

    /// The first aligned start at or after `from`; `None` beyond the space.
    pub(crate) fn start_in(&self, from: u64) -> Option<u64> {
        Some(from.checked_add(self.align - 1)? & !(self.align - 1))
    }

    /// The item for the range from `key` on.
    pub(crate) fn item(&self, key: u64) -> Item {
        Item { key, size: self.size, value: self.value }
    }
}

/// The counts of [`RangeIndex::check`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Ranges taken.
    pub items: usize,
    /// The sum of their sizes.
    pub taken: u64,
    /// The sum of the gaps between and around the ranges. With `taken` it is the whole space.
    pub free: u64,
    /// Leaves with items; 0 for an index without leaves.
    pub leaves: usize,
}

/// A range index: the interface of [`SkipList`] and the locked trees.
///
/// Any number of threads may call operations at the same time. An item is inserted whole and
/// removed whole: a part cannot be removed, because extents are freed as they were allocated.
pub trait RangeIndex: Send + Sync {
    /// Memory that an insertion may need, made where allocating is harmless. Each thread has its
    /// own.
    type Preload: Default + Send;

    /// Allocates the memory for one insertion, unless that was done. Insertions do this too, before
    /// they take a lock. After an explicit call the next insertion allocates nothing.
    fn preload(&self, preload: &mut Self::Preload);

    /// Inserts a range, unless it overlaps an item.
    ///
    /// # Panics
    /// If the range is empty or ends beyond the space.
    fn insert(&self, item: Item, preload: &mut Self::Preload) -> Insert;

    /// Finds a free range, takes it, and returns its start. `None` if the search found none.
    ///
    /// Takes the first range at or after the hint, or else the first in `within`. The search may or
    /// may not see ranges that other threads take or free meanwhile. The returned range belongs to
    /// the caller alone.
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

    /// The item whose range contains `point`. Another thread may have removed it when this returns.
    /// A caller that needs the item to stay uses [`RangeIndex::lookup_locked`], or checks again.
    fn lookup(&self, point: u64) -> Option<Item>;

    /// Looks a point up, and keeps the item in the index by a lock while `then` runs. `then` must
    /// be short, and must not call the index.
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

    /// Iterates by leaf, beginning with a `from` of 0. Replaces `items` with those items of the
    /// leaf that owns `from` that begin at or after `from`, as they were at one moment. Returns the
    /// start of the next leaf; `None` after the last.
    fn leaf(&self, from: u64, items: &mut Vec<Item>) -> Option<u64>;

    /// Bytes of memory in use, without removed leaves that a reader may still use.
    fn bytes(&self) -> usize;

    /// Recounts everything and checks every invariant. No other call may run at the same time.
    ///
    /// # Panics
    /// If an invariant does not hold.
    fn check(&self) -> Totals;
}
