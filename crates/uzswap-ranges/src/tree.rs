//! Balanced trees behind one lock, with the interface of the skiplist: the reference for tests, and
//! the peers in benches.

use crate::{Hole, Insert, Item, RangeIndex, Totals};
use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeLink, intrusive_adapter};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A red-black tree behind a lock.
pub type LockedTree = Locked<RedBlack>;
/// The standard library's B-tree behind a lock.
pub type LockedMap = Locked<BTreeMap<u64, (u64, u64)>>;

/// An ordered map of items, for one thread.
pub trait Ordered: Default + Send {
    /// Memory for one insertion, if the map can allocate it ahead.
    type Ready: Default + Send;

    /// Allocates the memory.
    fn ready(ready: &mut Self::Ready);
    /// Adds an item that overlaps no other.
    fn add(&mut self, item: Item, ready: &mut Self::Ready);
    /// Removes the item that begins at `key`.
    fn remove(&mut self, key: u64) -> Option<Item>;
    /// The last item that begins at or before `point`.
    fn at_or_before(&self, point: u64) -> Option<Item>;
    /// The items that begin at or after `point`.
    fn from(&self, point: u64) -> impl Iterator<Item = Item>;
    /// The number of items.
    fn count(&self) -> usize;
    /// Bytes of memory for each item.
    const ITEM_BYTES: usize;
}

/// A map behind one lock.
#[derive(Default)]
pub struct Locked<M> {
    map: Mutex<M>,
}

impl<M: Ordered> Locked<M> {
    /// An index of an empty space.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, M> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn containing(map: &impl Ordered, point: u64) -> Option<Item> {
    map.at_or_before(point).filter(|item| item.end() > point)
}

/// The first free range in a part of the space.
fn fit(map: &impl Ordered, hole: &Hole, part: Range<u64>) -> Option<u64> {
    let key_max = part.end.checked_sub(hole.size)?;
    let start = containing(map, part.start).map_or(part.start, |item| item.end());
    let mut key = hole.start_in(start).filter(|key| *key <= key_max)?;
    for item in map.from(start) {
        if key + hole.size <= item.key {
            break;
        }
        key = hole.start_in(item.end()).filter(|key| *key <= key_max)?;
    }
    Some(key)
}

impl<M: Ordered> RangeIndex for Locked<M> {
    type Preload = M::Ready;

    fn preload(&self, preload: &mut M::Ready) {
        M::ready(preload);
    }

    fn insert(&self, item: Item, preload: &mut M::Ready) -> Insert {
        item.assert_valid();
        M::ready(preload);
        let mut map = self.lock();
        match map.at_or_before(item.end() - 1).filter(|before| before.end() > item.key) {
            Some(last) => {
                // The first overlapping item, as in the skiplist.
                let first = containing(&*map, item.key).or_else(|| map.from(item.key).next());
                Insert::Overlaps(first.unwrap_or(last))
            }
            None => {
                map.add(item, preload);
                Insert::Inserted
            }
        }
    }

    fn insert_hole(&self, hole: &Hole, preload: &mut M::Ready) -> Option<u64> {
        hole.assert_valid();
        M::ready(preload);
        let mut map = self.lock();
        let key = hole.passes().into_iter().find_map(|part| fit(&*map, hole, part))?;
        map.add(hole.item(key), preload);
        Some(key)
    }

    fn remove(&self, key: u64) -> Option<Item> {
        self.lock().remove(key)
    }

    fn lookup(&self, point: u64) -> Option<Item> {
        containing(&*self.lock(), point)
    }

    fn lookup_locked<R>(&self, point: u64, then: impl FnOnce(Option<Item>) -> R) -> R {
        let map = self.lock();
        then(containing(&*map, point))
    }

    fn last(&self) -> Option<Item> {
        self.lock().at_or_before(u64::MAX)
    }

    /// A leaf stands for 32 items here.
    fn leaf(&self, from: u64, items: &mut Vec<Item>) -> Option<u64> {
        let map = self.lock();
        items.clear();
        items.extend(map.from(from).take(32));
        let next = items.last()?.end();
        map.from(next).next().map(|_| next)
    }

    fn bytes(&self) -> usize {
        size_of::<Self>() + self.lock().count() * M::ITEM_BYTES
    }

    fn check(&self) -> Totals {
        let map = self.lock();
        let mut totals = Totals::default();
        let mut end = 0;
        for item in map.from(0) {
            assert!(end <= item.key && item.size > 0, "ranges overlap");
            totals.free += item.key - end;
            totals.taken += item.size;
            totals.items += 1;
            end = item.end();
        }
        totals.free += u64::MAX - end;
        assert_eq!(totals.items, map.count());
        totals
    }
}

impl Ordered for BTreeMap<u64, (u64, u64)> {
    type Ready = ();

    fn ready((): &mut ()) {}

    fn add(&mut self, item: Item, (): &mut ()) {
        self.insert(item.key, (item.size, item.value));
    }

    fn remove(&mut self, key: u64) -> Option<Item> {
        let (size, value) = BTreeMap::remove(self, &key)?;
        Some(Item { key, size, value })
    }

    fn at_or_before(&self, point: u64) -> Option<Item> {
        let (&key, &(size, value)) = self.range(..=point).next_back()?;
        Some(Item { key, size, value })
    }

    fn from(&self, point: u64) -> impl Iterator<Item = Item> {
        self.range(point..).map(|(&key, &(size, value))| Item { key, size, value })
    }

    fn count(&self) -> usize {
        BTreeMap::len(self)
    }

    /// Three words, in nodes of eleven that are two thirds full.
    const ITEM_BYTES: usize = 3 * 8 * 3 / 2;
}

/// A node of the red-black tree. Its item is in a cell, because the tree lends nodes shared only.
pub struct Node {
    link: RBTreeLink,
    item: Cell<Item>,
}

impl Default for Node {
    fn default() -> Self {
        let item = Item { key: 0, size: 1, value: 0 };
        Self { link: RBTreeLink::new(), item: Cell::new(item) }
    }
}

intrusive_adapter!(NodeAdapter = Box<Node>: Node { link => RBTreeLink });

impl<'a> KeyAdapter<'a> for NodeAdapter {
    type Key = u64;

    fn get_key(&self, node: &'a Node) -> u64 {
        node.item.get().key
    }
}

/// A red-black tree of items.
pub struct RedBlack {
    tree: RBTree<NodeAdapter>,
    len: usize,
}

impl Default for RedBlack {
    fn default() -> Self {
        Self { tree: RBTree::new(NodeAdapter::NEW), len: 0 }
    }
}

impl Ordered for RedBlack {
    type Ready = Option<Box<Node>>;

    fn ready(ready: &mut Self::Ready) {
        ready.get_or_insert_default();
    }

    fn add(&mut self, item: Item, ready: &mut Self::Ready) {
        let node = ready.take().unwrap_or_default();
        node.item.set(item);
        self.tree.insert(node);
        self.len += 1;
    }

    fn remove(&mut self, key: u64) -> Option<Item> {
        let node = self.tree.find_mut(&key).remove()?;
        self.len -= 1;
        Some(node.item.get())
    }

    fn at_or_before(&self, point: u64) -> Option<Item> {
        self.tree.upper_bound(Bound::Included(&point)).get().map(|node| node.item.get())
    }

    fn from(&self, point: u64) -> impl Iterator<Item = Item> {
        let mut at = self.tree.lower_bound(Bound::Included(&point));
        std::iter::from_fn(move || {
            let item = at.get()?.item.get();
            at.move_next();
            Some(item)
        })
    }

    fn count(&self) -> usize {
        self.len
    }

    const ITEM_BYTES: usize = size_of::<Node>();
}
