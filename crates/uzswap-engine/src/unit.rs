//! Units: up to sixteen cold pages compressed as one, and the pages still in them.
//!
//! A unit is longer than the pool's objects, so it is cut into up to four *pieces*. Each piece is
//! an entry like any other, under a key of an area of its own. It owns its object, is on an LRU
//! list, is moved and written back. The pages of a unit have only the key of its first piece and
//! their position. The last page to leave frees the unit.
//!
//! Only recompression makes units, one at a time; any thread may remove a page from one.

use crate::compress::UNIT_PAGES;
use crate::ids::{Area, SwapEntry};
use crate::index::{Index, TRUNK_ENTRIES, UnitMember};
use crate::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use crate::sync::{Mutex, lock};
use crate::table::ChunkedTable;
use std::io;

/// Pieces of a unit, at most.
pub(crate) const PIECES: usize = 4;

/// Units whose pieces' entries are in one trunk.
const TRUNK_UNITS: usize = TRUNK_ENTRIES / PIECES;

const _: () = assert!(UNIT_PAGES <= 16, "the pages of a unit are sixteen bits");

struct FreeUnits {
    /// Free units.
    units: Vec<u32>,
    /// Units below this number have entries.
    made: usize,
}

/// See the module.
pub(crate) struct Units {
    area: Area,
    /// A word for each unit. Its low half has a bit for each page in the unit. Its high half is the
    /// number of pages of which the unit was made, or 0 if [`Self::sparse`] skips the unit.
    members: ChunkedTable<AtomicU32, TRUNK_UNITS>,
    unused: Mutex<FreeUnits>,
    /// Units that have lost at least a quarter of their pages.
    sparse: AtomicUsize,
}

impl Units {
    /// Units for an index of `pages_max` pages, in an area taken from it.
    pub(crate) fn new(index: &Index, pages_max: u32) -> Option<Self> {
        let area = index.add_pieces(Self::keys_for(pages_max))?;
        Some(Self {
            area,
            members: ChunkedTable::new(area.pages as usize / PIECES),
            unused: Mutex::new(FreeUnits { units: Vec::new(), made: 0 }),
            sparse: AtomicUsize::new(0),
        })
    }

    /// Keys that [`Self::new`] takes from an index of `pages_max` pages: pieces for every page in a
    /// full unit, in whole trunks.
    pub(crate) fn keys_for(pages_max: u32) -> u32 {
        let pieces = pages_max as usize / UNIT_PAGES * PIECES;
        (pieces / TRUNK_ENTRIES + 1) as u32 * TRUNK_ENTRIES as u32
    }

    /// True if a key is a piece's.
    pub(crate) fn contains(&self, key: SwapEntry) -> bool {
        self.area.contains(key)
    }

    /// The first piece of a piece's unit.
    pub(crate) fn first_of(&self, piece: SwapEntry) -> SwapEntry {
        SwapEntry(piece.0 - (piece.0 - self.area.first) % PIECES as u32)
    }

    /// The keys of a unit's pieces, by the key of the first.
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
    /// another trunk of units when there is none: allocates.
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
        // Space for every unit, so that giving back never allocates. The space is allocated before
        // the lock is taken, because stores wait for the lock.
        let mut units = Vec::new();
        units.try_reserve_exact(made).ok()?;
        let mut unused = lock(&self.unused);
        unused.made = made;
        units.append(&mut unused.units);
        units.extend((old..made as u32).rev());
        std::mem::swap(&mut units, &mut unused.units);
        Some(())
    }

    /// Removes a page from a unit; true if it was the last page: then the caller frees the pieces.
    pub(crate) fn leave(&self, member: UnitMember) -> bool {
        let number = self.number(member.unit);
        let bit = 1 << member.position;
        // AcqRel: the thread that frees the pieces has seen all changes of other threads to them.
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

    /// Gives a unit back. Its pieces are absent.
    pub(crate) fn give(&self, first: SwapEntry) {
        let number = self.number(first) as u32;
        lock(&self.unused).units.push(number);
    }

    /// The taken positions, as bits.
    pub(crate) fn taken(&self, first: SwapEntry) -> u16 {
        self.members(self.number(first)).load(Ordering::Acquire) as u16
    }

    /// The next unit, at or after number `from`, that has lost at least a quarter of its pages, and
    /// its number.
    pub(crate) fn sparse(&self, from: usize) -> Option<(usize, SwapEntry)> {
        if self.sparse.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let made = lock(&self.unused).made;
        (from..made)
            .find(|number| is_sparse(self.members(*number).load(Ordering::Relaxed)))
            .and_then(|number| Some((number, self.area.entry((number * PIECES) as u32)?)))
    }

    /// Pages left in units that have lost a quarter, counted until there are `enough`.
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

    /// Makes [`Self::sparse`] skip a unit from now on.
    pub(crate) fn keep_sparse(&self, first: SwapEntry) {
        let before = self.members(self.number(first)).fetch_and(0xffff, Ordering::Relaxed);
        if is_sparse(before) {
            self.sparse.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// True if the unit of the piece with this key is made.
    pub(crate) fn has_made(&self, key: SwapEntry) -> bool {
        self.contains(key) && self.number(key) < lock(&self.unused).made
    }

    /// Takes over the units that another process has left: those with entries, without pages yet.
    pub(crate) fn adopt(&self, index: &Index) -> io::Result<()> {
        let made = index.adopted_trunks(self.area);
        for chunk in 0..made {
            self.members.make(chunk, || AtomicU32::new(0))?;
        }
        lock(&self.unused).made = made * TRUNK_UNITS;
        Ok(())
    }

    /// Notes that a page is in a unit that was taken over; `false` if there is no such unit, or
    /// another page has its position.
    pub(crate) fn retake(&self, member: UnitMember) -> bool {
        let is_first = self.contains(member.unit)
            && (member.unit.0 - self.area.first).is_multiple_of(PIECES as u32);
        let members = is_first.then(|| self.members.get(self.number(member.unit))).flatten();
        let Some(members) = members else { return false };
        let bit = 1 << member.position;
        let before = members.fetch_or(bit, Ordering::Relaxed);
        // The unit counts as made of the pages that are in it now.
        members.fetch_add(1 << 16, Ordering::Relaxed);
        before & bit == 0
    }

    /// Makes the units without pages unused.
    pub(crate) fn recover(&self) -> io::Result<()> {
        let made = lock(&self.unused).made as u32;
        let mut units = Vec::new();
        units.try_reserve_exact(made as usize)?;
        let is_unused =
            |number: &u32| self.members(*number as usize).load(Ordering::Relaxed) as u16 == 0;
        units.extend((0..made).rev().filter(is_unused));
        lock(&self.unused).units = units;
        Ok(())
    }

    /// Every unit with pages, with the taken positions. It is for checks of a cache at rest.
    pub(crate) fn all(&self) -> impl Iterator<Item = (SwapEntry, u16)> {
        let made = lock(&self.unused).made;
        (0..made).filter_map(|number| {
            let first = self.area.entry((number * PIECES) as u32)?;
            Some((first, self.taken(first)))
        })
    }

    /// Units that have lost at least a quarter of their pages: counted, and as `sparse` has it.
    pub(crate) fn sparse_counts(&self) -> (usize, usize) {
        let made = lock(&self.unused).made;
        let is_sparse = |number: &usize| is_sparse(self.members(*number).load(Ordering::Relaxed));
        ((0..made).filter(is_sparse).count(), self.sparse.load(Ordering::Relaxed))
    }

    /// Bytes of the members and of the list of unused units (not of the pieces' entries).
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.unused).made * size_of::<u32>() + self.members.bytes()
    }
}

/// True if a unit with pages has lost at least a quarter of the pages that it was made of.
fn is_sparse(members: u32) -> bool {
    let live = (members as u16).count_ones();
    live > 0 && live * 4 <= (members >> 16) * 3
}
