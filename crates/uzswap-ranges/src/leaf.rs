//! A leaf: a span of the space, and the items in it, sorted.
//!
//! A leaf owns the points from `low` up to `high`, where the next leaf's span begins, and every
//! range lies in one span. So a single leaf shows whether a range is free.
//!
//! Fields change only under the leaf's lock. Readers take no lock: they read the word, then the
//! fields, then the word again, and repeat if the word changed. A reader thus discards its result
//! from a half-changed leaf. All fields are atomics, because readers race with the writer. The
//! word's bits: locked, dead, and above them a count of unlocks.

pub(crate) mod link;

use crate::Item;
use link::{LeafRef, Link};
use uzswap_sync::Backoff;
use uzswap_sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};

/// The maximum number of items in a leaf. Tests use few, so that a few operations split and empty
/// leaves.
pub(crate) const SLOTS: usize = if cfg!(any(test, feature = "shuttle")) { 4 } else { 64 };

/// Levels of the list. A leaf of one level is on the next with a chance of one half. A walk
/// therefore gets longer only with more than 2^16 leaves, which are some three million items.
pub(crate) const LEVELS: usize = if cfg!(any(test, feature = "shuttle")) { 4 } else { 17 };

const LOCKED: u64 = 1;
const DEAD: u64 = 2;
const UNLOCKED_ONCE: u64 = 4;

/// A link above the lowest level, with a copy of the `low` of the leaf that it leads to. `low` only
/// rises, so the copy is never too high. If it is beyond a walk's goal, the walk need not touch the
/// leaf.
pub(crate) struct Upper {
    pub(crate) low: AtomicU64,
    pub(crate) next: Link,
}

/// See the module.
#[repr(C, align(64))]
pub(crate) struct Leaf {
    word: AtomicU64,
    low: AtomicU64,
    high: AtomicU64,
    /// No free run within the span is longer than this.
    room: AtomicU64,
    len: AtomicU32,
    /// Levels that the leaf is on, or soon will be.
    height: u32,
    /// The next leaf.
    pub(crate) next: Link,
    pub(crate) upper: [Upper; LEVELS - 1],
    /// Key of the first item, and end of the last. In an empty leaf `last` is `low`.
    first: AtomicU64,
    last: AtomicU64,
    keys: [AtomicU64; SLOTS],
    ends: [AtomicU64; SLOTS],
    values: [AtomicU64; SLOTS],
    /// True if the leaf's memory would be freed by now.
    #[cfg(feature = "shuttle")]
    pub(crate) freed: std::sync::atomic::AtomicBool,
}

/// One line of 64 bytes for the fields that a walk reads, four of links, eight each of keys, ends
/// and values.
#[cfg(not(any(test, feature = "shuttle")))]
const _: () = assert!(size_of::<Leaf>() == 64 * (1 + 4 + 8 + 8 + 8));

impl Leaf {
    /// An empty leaf whose span is the whole space.
    pub(crate) fn new(height: u32) -> Self {
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        Self {
            word: AtomicU64::new(0),
            low: AtomicU64::new(0),
            high: AtomicU64::new(u64::MAX),
            first: AtomicU64::new(u64::MAX),
            last: AtomicU64::new(0),
            room: AtomicU64::new(u64::MAX),
            next: Link::none(),
            len: AtomicU32::new(0),
            height,
            upper: std::array::from_fn(|_| Upper {
                low: AtomicU64::new(u64::MAX),
                next: Link::none(),
            }),
            keys: zeros(),
            ends: zeros(),
            values: zeros(),
            #[cfg(feature = "shuttle")]
            freed: false.into(),
        }
    }

    pub(crate) fn height(&self) -> usize {
        self.height as usize
    }

    pub(crate) fn low(&self) -> u64 {
        self.low.load(Acquire)
    }

    pub(crate) fn high(&self) -> u64 {
        self.high.load(Acquire)
    }

    pub(crate) fn first(&self) -> u64 {
        self.first.load(Acquire)
    }

    pub(crate) fn last(&self) -> u64 {
        self.last.load(Acquire)
    }

    pub(crate) fn room(&self) -> u64 {
        self.room.load(Acquire)
    }

    pub(crate) fn len(&self) -> usize {
        self.len.load(Relaxed) as usize
    }

    pub(crate) fn owns(&self, point: u64) -> bool {
        self.low() <= point && point < self.high()
    }

    pub(crate) fn key(&self, slot: usize) -> u64 {
        self.keys[slot].load(Relaxed)
    }

    pub(crate) fn end(&self, slot: usize) -> u64 {
        self.ends[slot].load(Relaxed)
    }

    pub(crate) fn item(&self, slot: usize) -> Item {
        let key = self.key(slot);
        let size = self.end(slot).wrapping_sub(key);
        Item { key, size, value: self.values[slot].load(Relaxed) }
    }

    /// The number of items that begin at or before `point`.
    ///
    /// Counts cache lines first, then keys in one line, without a branch on a key.
    pub(crate) fn rank(&self, point: u64) -> usize {
        const LINE: usize = if SLOTS < 8 { SLOTS } else { 8 };
        let len = self.len();
        let counts = |slot: usize| usize::from(slot < len && self.key(slot) <= point);
        let lines: usize = (1..SLOTS / LINE).map(|line| counts(line * LINE)).sum();
        let line = lines * LINE;
        line + (line..line + LINE).map(counts).sum::<usize>()
    }

    pub(crate) fn containing(&self, point: u64) -> Option<Item> {
        let slot = self.rank(point).checked_sub(1)?;
        (self.end(slot) > point).then(|| self.item(slot))
    }

    /// The free run between the items `slot - 1` and `slot`, within the span.
    pub(crate) fn run_before(&self, slot: usize) -> (u64, u64) {
        let start = if slot == 0 { self.low() } else { self.end(slot - 1) };
        let end = if slot == self.len() { self.high() } else { self.key(slot) };
        (start, end)
    }

    /// True if the leaf was emptied and is no longer used. Its links then never change.
    pub(crate) fn is_dead(&self) -> bool {
        self.word.load(Acquire) & DEAD != 0
    }

    /// Reads without a lock: repeats `read` until the leaf has not changed during it.
    pub(crate) fn read<R>(&self, mut read: impl FnMut(&Self) -> R) -> R {
        let mut backoff = Backoff::new();
        loop {
            let before = self.word.load(Acquire);
            if before & LOCKED == 0 {
                let value = read(self);
                fence(Acquire);
                if self.word.load(Relaxed) == before {
                    return value;
                }
            }
            backoff.wait();
        }
    }

    /// For the check: panics if the leaf is locked or dead.
    pub(crate) fn assert_idle(&self) {
        assert_eq!(self.word.load(Acquire) & (LOCKED | DEAD), 0, "a leaf left locked or dead");
    }
}

/// The lock on a leaf that is not dead; unlocks when dropped. Locks are taken from left to right.
pub(crate) struct LockedLeaf<'g> {
    leaf: LeafRef<'g>,
    word: u64,
}

impl<'g> LockedLeaf<'g> {
    /// Waits for the lock; `None` if the leaf is dead.
    pub(crate) fn new(leaf: LeafRef<'g>) -> Option<Self> {
        let mut backoff = Backoff::new();
        loop {
            let word = leaf.word.load(Acquire);
            if word & DEAD != 0 {
                return None;
            }
            let locked = |word| leaf.word.compare_exchange(word, word | LOCKED, Acquire, Relaxed);
            if word & LOCKED == 0 && locked(word).is_ok() {
                // No reader may see a change before it sees the locked word.
                fence(Release);
                return Some(Self { leaf, word });
            }
            backoff.wait();
        }
    }

    pub(crate) fn leaf(&self) -> LeafRef<'g> {
        self.leaf
    }

    pub(crate) fn set_low(&self, low: u64) {
        self.low.store(low, Release);
    }

    pub(crate) fn set_high(&self, high: u64) {
        self.high.store(high, Release);
    }

    /// Takes over the span of the next leaf, which is dead and on no higher level. Unlinks that
    /// leaf.
    pub(crate) fn absorb(&self, dead: LeafRef<'g>) {
        self.set_high(dead.high());
        self.next.copy(&dead.next);
        self.note_room(self.high() - self.run_before(self.len()).0);
    }

    fn note_room(&self, run: u64) {
        if run > self.room() {
            self.room.store(run, Relaxed);
        }
    }

    /// Sets `room` to the longest free run.
    pub(crate) fn count_room(&self) {
        let runs = (0..=self.len()).map(|slot| self.run_before(slot));
        let room = runs.map(|(start, end)| end - start).max();
        self.room.store(room.unwrap_or(0), Relaxed);
    }

    pub(crate) fn insert_at(&self, slot: usize, item: Item) {
        self.leaf.put(slot, item);
    }

    pub(crate) fn remove_at(&self, slot: usize) -> Item {
        let (item, len) = (self.item(slot), self.len());
        let run = self.run_before(slot + 1).1 - self.run_before(slot).0;
        for to in slot..len - 1 {
            for slots in [&self.keys, &self.ends, &self.values] {
                slots[to].store(slots[to + 1].load(Relaxed), Relaxed);
            }
        }
        self.len.store(len as u32 - 1, Relaxed);
        if slot == 0 || slot == len - 1 {
            self.note_edges();
        }
        self.note_room(run);
        item
    }

    /// Puts an item into a slot of a full leaf. Moves the upper half, or nothing if the item is the
    /// last, to `new`, which no other thread has. Then adds the item and links `new`, whose span
    /// begins with its first item.
    pub(crate) fn insert_splitting(&self, slot: usize, item: Item, new: LeafRef<'g>) {
        let at = if slot == SLOTS { SLOTS } else { SLOTS / 2 };
        for from in at..SLOTS {
            new.put(from - at, self.item(from));
        }
        self.len.store(at as u32, Relaxed);
        self.note_edges();
        if slot > at || at == SLOTS {
            new.put(slot - at, item);
        } else {
            self.leaf.put(slot, item);
        }
        let low = new.key(0);
        new.low.store(low, Relaxed);
        new.high.store(self.high(), Relaxed);
        new.room.store(self.room(), Relaxed);
        new.next.copy(&self.next);
        self.next.set(Some(new));
        self.set_high(low);
    }

    /// Marks the empty leaf as dead, and unlocks it: no thread locks it again.
    pub(crate) fn kill(mut self) {
        assert_eq!(self.len(), 0, "a leaf was to be dropped with items in it");
        // The free run may be part of a longer run across neighbours: no search may skip the leaf.
        self.room.store(u64::MAX, Relaxed);
        self.word |= DEAD;
    }
}

impl Leaf {
    /// Puts an item into a slot, and moves that slot's item and all later ones up. The leaf is
    /// locked, or not linked yet.
    fn put(&self, slot: usize, item: Item) {
        let len = self.len();
        for to in (slot + 1..=len).rev() {
            for slots in [&self.keys, &self.ends, &self.values] {
                slots[to].store(slots[to - 1].load(Relaxed), Relaxed);
            }
        }
        self.keys[slot].store(item.key, Relaxed);
        self.ends[slot].store(item.end(), Relaxed);
        self.values[slot].store(item.value, Relaxed);
        self.len.store(len as u32 + 1, Relaxed);
        if slot == 0 || slot == len {
            self.note_edges();
        }
    }

    /// Updates `first` and `last`.
    fn note_edges(&self) {
        let len = self.len();
        self.first.store(self.key(0), Relaxed);
        self.last.store(self.run_before(len).0, Relaxed);
    }
}

impl std::ops::Deref for LockedLeaf<'_> {
    type Target = Leaf;

    fn deref(&self) -> &Leaf {
        &self.leaf
    }
}

impl Drop for LockedLeaf<'_> {
    fn drop(&mut self) {
        self.leaf.word.store(self.word + UNLOCKED_ONCE, Release);
    }
}
