//! Swap entry → [`Entry`].
//!
//! Two levels: a directory, and trunks of 64 MiB of address space each, made when the first page in
//! them is stored. A lookup is two loads and no lock. Trunks are taken from a few spare ones that
//! [`Index::provision`] made beforehand, because the thread that stores may be the one that the
//! kernel needs in order to find memory.
//!
//! A trunk, once made, stays until the cache is dropped; a removed area leaves its trunks, empty,
//! to the next area that gets its keys.

mod entry;
mod word;

pub(crate) use entry::{Entry, Locked};
pub(crate) use word::{Extent, Form, Object, State, Word};

use crate::ids::{Area, SwapEntry};
use crate::sync::{Mutex, lock};
use std::sync::OnceLock;

/// Entries in a trunk: 64 MiB of address space.
#[cfg(not(feature = "shuttle"))]
pub(crate) const TRUNK_ENTRIES: usize = 16384;
/// Small under the model checker, whose atomics are large.
#[cfg(feature = "shuttle")]
pub(crate) const TRUNK_ENTRIES: usize = 8;

/// Bytes of a trunk.
pub(crate) const TRUNK_BYTES: usize = TRUNK_ENTRIES * size_of::<Entry>();

/// Entries of one trunk.
pub(crate) struct Trunk {
    pub(crate) entries: Box<[Entry]>,
}

impl Trunk {
    fn new() -> Self {
        Self { entries: (0..TRUNK_ENTRIES).map(|_| Entry::new()).collect() }
    }
}

/// The directory, the spare trunks and the key space.
pub(crate) struct Index {
    trunks: Box<[OnceLock<Trunk>]>,
    spare: Mutex<Vec<Trunk>>,
    /// Areas in use, by first key.
    areas: Mutex<Vec<Area>>,
}

/// There was no spare trunk: [`Index::provision`] is behind, or memory is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoTrunk;

impl Index {
    /// Trunks kept ready. The kernel hands out swap slots mostly in order, so one 64 MiB step at a
    /// time; four are 256 MiB of stores ahead of whoever provisions.
    const SPARE: usize = 4;

    /// An index for at most `pages_max` pages over all areas.
    pub(crate) fn new(pages_max: u32) -> Self {
        let trunks = (pages_max as usize).div_ceil(TRUNK_ENTRIES);
        Self {
            trunks: (0..trunks).map(|_| OnceLock::new()).collect(),
            spare: Mutex::new(Vec::with_capacity(Self::SPARE)),
            areas: Mutex::new(Vec::new()),
        }
    }

    /// The entry of a key, or `None` where nothing was ever stored near it.
    pub(crate) fn get(&self, key: SwapEntry) -> Option<&Entry> {
        let key = key.0 as usize;
        Some(&self.trunks.get(key / TRUNK_ENTRIES)?.get()?.entries[key % TRUNK_ENTRIES])
    }

    /// The entry of a key that something refers to, which therefore exists.
    pub(crate) fn existing(&self, key: SwapEntry) -> &Entry {
        self.get(key).expect("a key found in an object, a list or a record has been stored")
    }

    /// The entry of a key, made from a spare trunk where there is none yet.
    pub(crate) fn ensure(&self, key: SwapEntry) -> Result<&Entry, NoTrunk> {
        if let Some(entry) = self.get(key) {
            return Ok(entry);
        }
        let slot = &self.trunks[key.0 as usize / TRUNK_ENTRIES];
        let trunk = lock(&self.spare).pop().ok_or(NoTrunk)?;
        if let Err(unused) = slot.set(trunk) {
            lock(&self.spare).push(unused);
        }
        Ok(self.existing(key))
    }

    /// Makes spare trunks up to the number kept ready. Allocates: never called to serve a request.
    pub(crate) fn provision(&self) {
        while lock(&self.spare).len() < Self::SPARE {
            let trunk = Trunk::new();
            lock(&self.spare).push(trunk);
        }
    }

    /// Takes a free range of `pages` keys, whole trunks, the lowest there is.
    pub(crate) fn add_area(&self, pages: u32) -> Option<Area> {
        let mut areas = lock(&self.areas);
        let trunks = |area: &Area| (area.pages as usize).div_ceil(TRUNK_ENTRIES);
        let mut first = 0;
        let mut at = 0;
        for area in areas.iter() {
            let begin = area.first as usize / TRUNK_ENTRIES;
            if begin - first >= (pages as usize).div_ceil(TRUNK_ENTRIES) {
                break;
            }
            first = begin + trunks(area);
            at += 1;
        }
        if pages == 0 || first + (pages as usize).div_ceil(TRUNK_ENTRIES) > self.trunks.len() {
            return None;
        }
        let area = Area { first: (first * TRUNK_ENTRIES) as u32, pages };
        areas.insert(at, area);
        Some(area)
    }

    /// Gives an area's keys back; its entries must be absent by now.
    pub(crate) fn remove_area(&self, area: Area) {
        lock(&self.areas).retain(|other| *other != area);
    }

    /// Every trunk there is, with the key of its first entry.
    pub(crate) fn trunks(&self) -> impl Iterator<Item = (SwapEntry, &Trunk)> {
        self.trunks.iter().enumerate().filter_map(|(number, slot)| {
            Some((SwapEntry((number * TRUNK_ENTRIES) as u32), slot.get()?))
        })
    }

    /// Bytes that the index takes: trunks, spare ones included, and the directory.
    pub(crate) fn bytes(&self) -> usize {
        (self.trunks().count() + lock(&self.spare).len()) * TRUNK_BYTES
            + self.trunks.len() * size_of::<OnceLock<Trunk>>()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const TRUNK: u32 = TRUNK_ENTRIES as u32;

    #[test]
    fn areas_take_the_lowest_gap_that_fits() {
        let index = Index::new(10 * TRUNK);
        let a = index.add_area(TRUNK).unwrap();
        let b = index.add_area(2 * TRUNK + 1).unwrap();
        let c = index.add_area(1).unwrap();
        assert_eq!((a.first, b.first, c.first), (0, TRUNK, 4 * TRUNK));
        index.remove_area(b);
        let d = index.add_area(4 * TRUNK).unwrap();
        assert_eq!(d.first, 5 * TRUNK, "the gap of three is too small");
        let e = index.add_area(3 * TRUNK).unwrap();
        assert_eq!(e.first, TRUNK);
        assert_eq!(index.add_area(2 * TRUNK), None, "one trunk is left");
        assert_eq!(index.add_area(0), None);
    }

    #[test]
    fn a_trunk_is_made_only_from_the_spare_ones() {
        let index = Index::new(10 * TRUNK);
        assert!(index.get(SwapEntry(5)).is_none());
        assert!(matches!(index.ensure(SwapEntry(5)), Err(NoTrunk)));
        index.provision();
        assert!(index.ensure(SwapEntry(5)).is_ok());
        assert!(index.get(SwapEntry(TRUNK - 1)).is_some());
        assert!(index.get(SwapEntry(TRUNK)).is_none());
    }

    #[test]
    fn a_locked_entry_cannot_be_taken_until_it_is_dropped() {
        let entry = Entry::new();
        let mut locked = entry.lock();
        assert!(entry.try_lock().is_none());
        let word = Word::new(State::Shared(SwapEntry(3)));
        locked.set(word);
        assert_eq!(entry.peek(), Word::ABSENT, "published by the drop");
        drop(locked);
        assert_eq!(entry.peek(), word);
        assert!(entry.try_lock().is_some());
    }
}
