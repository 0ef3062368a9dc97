//! Units: up to sixteen cold pages compressed as one, and which pages are still in them.
//!
//! A unit is longer than the pool's objects, so it is cut into up to four *pieces*. Each piece is
//! an entry like any other, under a key of an area of its own: it owns its object, is on an LRU
//! list, is moved and written back. The pages in a unit hold only the key of its first piece and
//! their position. A unit goes when the last of them does.
//!
//! Only recompression makes units, one at a time; anybody may leave one.

use crate::compress::UNIT_PAGES;
use crate::ids::{Area, SwapEntry};
use crate::index::{Index, Member, TRUNK_ENTRIES};
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};
use crate::table::Table;
use std::io;

/// Pieces of a unit, at most.
pub(crate) const PIECES: usize = 4;

/// Units whose pieces' entries are in one trunk.
const TRUNK_UNITS: usize = TRUNK_ENTRIES / PIECES;

const _: () = assert!(UNIT_PAGES <= 16, "who is in a unit is sixteen bits");

struct Unused {
    /// Units that may be made.
    units: Vec<u32>,
    /// Units below this number have entries.
    made: usize,
}

/// See the module.
pub(crate) struct Units {
    area: Area,
    /// Of each unit, in the low half a bit for each page in it, in the high half how many pages it
    /// was made of (0: of no interest to [`Self::sparse`]).
    members: Table<AtomicU32, TRUNK_UNITS>,
    unused: Mutex<Unused>,
    /// Units that have lost at least a quarter of their pages.
    sparse: AtomicUsize,
}

impl Units {
    /// Units for an index of `pages_max` pages, in an area taken from it.
    pub(crate) fn new(index: &Index, pages_max: u32) -> Option<Self> {
        let area = index.add_pieces(Self::keys_for(pages_max))?;
        Some(Self {
            area,
            members: Table::new(area.pages as usize / PIECES),
            unused: Mutex::new(Unused { units: Vec::new(), made: 0 }),
            sparse: AtomicUsize::new(0),
        })
    }

    /// Keys that [`Self::new`] takes from an index of `pages_max` pages: for as many pieces as if
    /// every page were in a full unit, in whole trunks.
    pub(crate) fn keys_for(pages_max: u32) -> u32 {
        let pieces = pages_max as usize / UNIT_PAGES * PIECES;
        (pieces / TRUNK_ENTRIES + 1) as u32 * TRUNK_ENTRIES as u32
    }

    /// Whether a key is a piece's.
    pub(crate) fn contains(&self, key: SwapEntry) -> bool {
        self.area.contains(key)
    }

    /// The first piece of the unit that a piece is of.
    pub(crate) fn first_of(&self, piece: SwapEntry) -> SwapEntry {
        SwapEntry(piece.0 - (piece.0 - self.area.first) % PIECES as u32)
    }

    /// The keys of a unit's pieces, by its first.
    pub(crate) fn pieces(first: SwapEntry) -> impl Iterator<Item = SwapEntry> {
        (first.0..).take(PIECES).map(SwapEntry)
    }

    fn number(&self, first: SwapEntry) -> usize {
        (first.0 - self.area.first) as usize / PIECES
    }

    fn members(&self, number: usize) -> &AtomicU32 {
        self.members.get(number).expect("a unit in use was made")
    }

    /// An unused unit, by the key of its first piece, with the first `pages` positions taken. Makes
    /// another trunk of them when there is none: allocates.
    pub(crate) fn take(&self, index: &Index, pages: usize) -> Option<SwapEntry> {
        let unused = || lock(&self.unused).units.pop();
        let number = unused().or_else(|| {
            self.provision(index)?;
            unused()
        })?;
        let members = (pages as u32) << 16 | ((1 << pages) - 1);
        self.members(number as usize).store(members, Ordering::Relaxed);
        self.area.entry(number * PIECES as u32)
    }

    fn provision(&self, index: &Index) -> Option<()> {
        let made = lock(&self.unused).made;
        let first = self.area.entry((made * PIECES) as u32)?;
        index.provision().ok()?;
        index.view().ensure(first).ok()?;
        self.members.make(made / TRUNK_UNITS, || AtomicU32::new(0)).ok()?;
        let (old, made) = (made as u32, made + TRUNK_UNITS);
        // Room for every unit there is, so that giving back never allocates; and got before the
        // lock, which stores wait for.
        let mut units = Vec::new();
        units.try_reserve_exact(made).ok()?;
        let mut unused = lock(&self.unused);
        unused.made = made;
        units.append(&mut unused.units);
        units.extend((old..made as u32).rev());
        std::mem::swap(&mut units, &mut unused.units);
        Some(())
    }

    /// One page less in a unit; whether it was the last, and its pieces are the caller's to free.
    pub(crate) fn leave(&self, member: Member) -> bool {
        let number = self.number(member.unit);
        let bit = 1 << member.position;
        // AcqRel: whoever frees the pieces has seen all that others did to them.
        let before = self.members(number).fetch_and(!bit, Ordering::AcqRel);
        debug_assert!(before & bit != 0, "{member:?} has left already");
        let now = before & !bit;
        match (is_sparse(before), is_sparse(now)) {
            (false, true) => drop(self.sparse.fetch_add(1, Ordering::Relaxed)),
            (true, false) => drop(self.sparse.fetch_sub(1, Ordering::Relaxed)),
            _ => {}
        }
        now as u16 == 0
    }

    /// Gives a unit back, its pieces absent by now.
    pub(crate) fn give(&self, first: SwapEntry) {
        let number = self.number(first) as u32;
        lock(&self.unused).units.push(number);
    }

    /// The positions that are taken, as bits.
    pub(crate) fn taken(&self, first: SwapEntry) -> u16 {
        self.members(self.number(first)).load(Ordering::Acquire) as u16
    }

    /// The next unit from number `from` on that has lost at least a quarter of its pages, and its
    /// number.
    pub(crate) fn sparse(&self, from: usize) -> Option<(usize, SwapEntry)> {
        if self.sparse.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let made = lock(&self.unused).made;
        (from..made)
            .find(|number| is_sparse(self.members(*number).load(Ordering::Relaxed)))
            .and_then(|number| Some((number, self.area.entry((number * PIECES) as u32)?)))
    }

    /// Pages that are left in such units, counted until they are `enough`.
    pub(crate) fn left(&self, enough: usize) -> usize {
        let (mut left, mut from) = (0, 0);
        while left < enough
            && let Some((number, unit)) = self.sparse(from)
        {
            left += self.taken(unit).count_ones() as usize;
            from = number + 1;
        }
        left
    }

    /// Has [`Self::sparse`] pass a unit over from now on.
    pub(crate) fn keep_sparse(&self, first: SwapEntry) {
        let before = self.members(self.number(first)).fetch_and(0xffff, Ordering::Relaxed);
        if is_sparse(before) {
            self.sparse.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether a key is that of a piece of a unit that was made.
    pub(crate) fn has_made(&self, key: SwapEntry) -> bool {
        self.contains(key) && self.number(key) < lock(&self.unused).made
    }

    /// Takes over the units that another process has left: those that have entries, nobody in them
    /// yet, and none unused.
    pub(crate) fn adopt(&self, index: &Index) -> io::Result<()> {
        let made = index.adopted_trunks(self.area);
        for chunk in 0..made {
            self.members.make(chunk, || AtomicU32::new(0))?;
        }
        lock(&self.unused).made = made * TRUNK_UNITS;
        Ok(())
    }

    /// A page is in a unit that was taken over; `false` if there is no such unit, or another page
    /// has its position.
    pub(crate) fn retake(&self, member: Member) -> bool {
        let is_first = self.contains(member.unit)
            && (member.unit.0 - self.area.first).is_multiple_of(PIECES as u32);
        let members = is_first.then(|| self.members.get(self.number(member.unit))).flatten();
        let Some(members) = members else { return false };
        let bit = 1 << member.position;
        let before = members.fetch_or(bit, Ordering::Relaxed);
        // It counts as made of those that are in it now.
        members.fetch_add(1 << 16, Ordering::Relaxed);
        before & bit == 0
    }

    /// Makes the units that nobody is in the unused ones.
    pub(crate) fn settle(&self) -> io::Result<()> {
        let made = lock(&self.unused).made as u32;
        let mut units = Vec::new();
        units.try_reserve_exact(made as usize)?;
        let is_unused =
            |number: &u32| self.members(*number as usize).load(Ordering::Relaxed) as u16 == 0;
        units.extend((0..made).rev().filter(is_unused));
        lock(&self.unused).units = units;
        Ok(())
    }

    /// Every unit that pages are in, with the positions taken. For checks of a cache at rest.
    pub(crate) fn all(&self) -> impl Iterator<Item = (SwapEntry, u16)> {
        let made = lock(&self.unused).made;
        (0..made).filter_map(|number| {
            let first = self.area.entry((number * PIECES) as u32)?;
            Some((first, self.taken(first)))
        })
    }

    /// Units that have lost at least a quarter of their pages, counted and as believed.
    pub(crate) fn sparse_counts(&self) -> (usize, usize) {
        let made = lock(&self.unused).made;
        let is_sparse = |number: &usize| is_sparse(self.members(*number).load(Ordering::Relaxed));
        ((0..made).filter(is_sparse).count(), self.sparse.load(Ordering::Relaxed))
    }

    /// Bytes of who is where and of the list of unused units (not of the pieces' entries).
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.unused).made * size_of::<u32>() + self.members.bytes()
    }
}

/// Whether a unit that somebody is in has lost at least a quarter of the pages that it was made of.
fn is_sparse(members: u32) -> bool {
    let live = (members as u16).count_ones();
    live > 0 && live * 4 <= (members >> 16) * 3
}
