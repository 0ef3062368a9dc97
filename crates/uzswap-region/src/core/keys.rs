//! Keys of memory that is scattered over all addresses.
//!
//! The cache's data for a page lie in tables for 16 MiB of keys. A program has its memory in pieces
//! at addresses far apart. With a key for each address, the tables of a piece of 256 KiB would take
//! half as much memory as the piece. So a page of a window gets its key when it is first stored,
//! together with 15 neighbours, or with 63 if many of these are in use. Neighbours have consecutive
//! keys, so that they can be loaded together. The keys are taken back when the pages are gone.

use super::space::Space;
use crate::page::word::Kind;
use crate::page::words::{BLOCK, UNIT, UNITS};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_engine::{Area, Cache, SwapEntry};

/// A block with this many pages in use gets all of its keys.
const MANY: usize = UNIT as usize;

pub(crate) struct Keys {
    /// All keys; `None` if there are no windows.
    area: Option<Area>,
    given: Mutex<UnitAllocator>,
}

/// Counted in units of 16.
#[derive(Default)]
struct UnitAllocator {
    /// Units below this number were given out.
    next: u32,
    /// Returned units: the first numbers of blocks of four consecutive units, and single units.
    blocks: Vec<u32>,
    units: Vec<u32>,
}

impl UnitAllocator {
    /// Takes four units with consecutive numbers.
    fn block(&mut self, end: u32) -> Option<u32> {
        let unused = self.next;
        let fresh = || (unused + UNITS as u32 <= end).then_some(unused);
        let block = self.blocks.pop().or_else(fresh)?;
        self.next += if block == unused { UNITS as u32 } else { 0 };
        Some(block)
    }

    fn unit(&mut self, end: u32) -> Option<u32> {
        if let Some(unit) = self.units.pop() {
            return Some(unit);
        }
        let block = self.block(end)?;
        self.units.extend((block + 1..block + UNITS as u32).rev());
        Some(block)
    }
}

impl Keys {
    /// All keys of the cache, if there will be windows.
    pub(crate) fn new(cache: &Cache, has_windows: bool) -> Self {
        let pages = cache.pages_max() / BLOCK * BLOCK;
        let area = if has_windows { cache.add_area(pages) } else { None };
        Self { area, given: Mutex::default() }
    }

    /// The area of all keys.
    pub(crate) fn area(&self) -> Option<Area> {
        self.area
    }

    fn given(&self) -> MutexGuard<'_, UnitAllocator> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The key of a page that the caller has made `Busy`. In a window the page gets a key if it has
    /// none. `None` if there are no more keys.
    pub(crate) fn give(&self, space: &Space, page: u32) -> Option<SwapEntry> {
        if let Some(key) = space.key_if_any(page) {
            return Some(key);
        }
        let mut given = self.given();
        let end = self.area.map_or(0, |area| area.pages() / UNIT);
        let first = page / BLOCK * BLOCK;
        let units = space.units(page)?;
        let in_use = || (first..first + BLOCK).filter(|page| is_used(space, *page)).count();
        if units == [None; UNITS]
            && in_use() >= MANY
            && let Some(block) = given.block(end)
        {
            let pages = (first..).step_by(UNIT as usize);
            pages
                .zip(block..block + UNITS as u32)
                .for_each(|(page, unit)| space.set_unit(page, Some(unit)));
        } else if space.key_if_any(page).is_none() {
            space.set_unit(page, Some(given.unit(end)?));
        }
        space.key_if_any(page)
    }

    /// Takes back the keys of blocks in which no page is adopted any more. No thread adopts pages
    /// during this call.
    pub(crate) fn take(&self, space: &Space, pages: Range<u32>) {
        let mut given = self.given();
        let mut at = pages.start / BLOCK * BLOCK;
        while at < pages.end {
            let found = space.words.find(at);
            if found.is_shared() {
                at = found.end();
                continue;
            }
            let end = at + BLOCK;
            let is_gone = |page: u32| space.load(page).kind() == Kind::Untouched;
            if let Some(units) = space.units(at)
                && units != [None; UNITS]
                && (at..end).all(is_gone)
            {
                match units[0] {
                    Some(first) if space.keys_in_order(at) == BLOCK as usize => {
                        given.blocks.push(first);
                    }
                    _ => given.units.extend(units.into_iter().flatten()),
                }
                (at..end).step_by(UNIT as usize).for_each(|page| space.set_unit(page, None));
            }
            at = end;
        }
    }
}

/// True if a page has been used since it was adopted.
fn is_used(space: &Space, page: u32) -> bool {
    !matches!(space.load(page).kind(), Kind::Untouched | Kind::Empty)
}
