//! Operations and a model of an index: for tests, fuzzers and benches.

use crate::{Hole, Insert, Item, RangeIndex};
use std::collections::BTreeMap;

/// One operation.
#[derive(Debug, Clone)]
pub enum Op {
    /// [`RangeIndex::insert`].
    Insert(Item),
    /// [`RangeIndex::insert_hole`].
    InsertHole(Hole),
    /// [`RangeIndex::remove`] of the item that contains the point, or of an absent one.
    Remove(u64),
    /// [`RangeIndex::get`] and [`RangeIndex::lookup`], with and without the lock.
    Lookup(u64),
    /// [`RangeIndex::leaf`] from here to the end, [`RangeIndex::first`] and [`RangeIndex::last`].
    Iterate(u64),
}

/// Decodes operations on the points below `space` from any bytes. Half of the first `dense`
/// operations insert, and three eighths of the later ones.
pub fn decode_ops(bytes: &[u8], space: u64, dense: usize) -> impl Iterator<Item = Op> {
    bytes.chunks_exact(8).enumerate().map(move |(number, bytes)| {
        let two = |at: usize| u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
        let (point, other, size) = (two(2) % space, two(4), u64::from(bytes[6] % 12) + 1);
        let value = number as u64;
        let hole = |hint| {
            let start = if other & 3 == 0 { other % space } else { 0 };
            let length = if other & 12 == 0 { other >> 8 } else { space };
            let within = start..(start + length).min(space);
            Hole { hint, size, align: 1 << (bytes[7] % 4), within, value }
        };
        match bytes[0] % 16 {
            0..4 => Op::Insert(Item { key: point, size, value }),
            4..6 => Op::InsertHole(hole(point)),
            6..8 if number < dense => Op::InsertHole(hole(0)),
            6..13 => Op::Remove(point),
            13..15 => Op::Lookup(point),
            _ => Op::Iterate(point),
        }
    })
}

/// An index, and a map with its expected content.
pub struct Harness<I: RangeIndex> {
    /// The index.
    pub index: I,
    preload: I::Preload,
    map: BTreeMap<u64, Item>,
}

impl<I: RangeIndex> Harness<I> {
    /// Both are empty. The caller passes `preload`, so that a test can choose its random numbers.
    pub fn new(index: I, preload: I::Preload) -> Self {
        Self { index, preload, map: BTreeMap::new() }
    }

    fn containing(&self, point: u64) -> Option<Item> {
        let (_, item) = self.map.range(..=point).next_back()?;
        (item.end() > point).then_some(*item)
    }

    fn in_the_way(&self, key: u64, size: u64) -> Option<Item> {
        let after = || self.map.range(key..key + size).next().map(|(_, item)| *item);
        self.containing(key).or_else(after)
    }

    /// The place of a hole, by trying every possible start.
    fn hole(&self, hole: &Hole) -> Option<u64> {
        let mut starts = vec![hole.within.start];
        if hole.within.contains(&hole.hint) {
            starts.push(hole.hint);
        }
        starts.extend(self.map.values().map(Item::end));
        let fits = |key: &u64| {
            hole.within.start <= *key
                && key + hole.size <= hole.within.end
                && self.in_the_way(*key, hole.size).is_none()
        };
        let keys = starts.iter().map(|start| start.next_multiple_of(hole.align)).filter(fits);
        let outside = !hole.within.contains(&hole.hint);
        keys.min_by_key(|key| (!outside && *key < hole.hint, *key))
    }

    /// Applies an operation to both, and compares the results.
    ///
    /// # Panics
    /// If they differ.
    pub fn apply(&mut self, op: Op) {
        match op {
            Op::Insert(item) => {
                let got = self.index.insert(item, &mut self.preload);
                match self.in_the_way(item.key, item.size) {
                    Some(other) => assert_eq!(got, Insert::Overlaps(other), "{item:?}"),
                    None => {
                        assert_eq!(got, Insert::Inserted, "{item:?}");
                        self.map.insert(item.key, item);
                    }
                }
            }
            Op::InsertHole(hole) => {
                let key = self.hole(&hole);
                let got = self.index.insert_hole(&hole, &mut self.preload);
                assert_eq!(got, key, "{hole:?}");
                self.map.extend(key.map(|key| (key, hole.item(key))));
            }
            Op::Remove(point) => {
                let key = self.containing(point).map_or(point, |item| item.key);
                assert_eq!(self.index.remove(key), self.map.remove(&key), "{key}");
            }
            Op::Lookup(point) => {
                let item = self.containing(point);
                assert_eq!(self.index.lookup(point), item, "{point}");
                assert_eq!(self.index.lookup_locked(point, |item| item), item, "{point}");
                assert_eq!(self.index.get(point), self.map.get(&point).copied(), "{point}");
            }
            Op::Iterate(from) => {
                assert_eq!(
                    items(&self.index, from),
                    self.map.range(from..).map(|(_, i)| *i).collect::<Vec<_>>()
                );
                assert_eq!(self.index.first(), self.map.values().next().copied());
                assert_eq!(self.index.last(), self.map.values().next_back().copied());
            }
        }
    }

    /// Recounts the index and compares the totals.
    ///
    /// # Panics
    /// If they differ.
    pub fn check(&self) {
        let totals = self.index.check();
        assert_eq!(totals.items, self.map.len());
        assert_eq!(totals.taken, self.map.values().map(|item| item.size).sum::<u64>());
        assert_eq!(totals.taken + totals.free, u64::MAX);
    }
}

/// The items that begin at or after `from`, leaf by leaf.
pub fn items(index: &impl RangeIndex, from: u64) -> Vec<Item> {
    let (mut all, mut leaf, mut from) = (Vec::new(), Vec::new(), Some(from));
    while let Some(start) = from {
        from = index.leaf(start, &mut leaf);
        all.append(&mut leaf);
    }
    all
}
