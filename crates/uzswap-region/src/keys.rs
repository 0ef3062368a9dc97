//! Keys of memory that is scattered over all addresses.
//!
//! The cache's data for a page lie in tables for 16 MiB of keys. A program has its memory in pieces
//! at addresses far apart; with a key for each address, a piece of 256 KiB would cost half of
//! itself. So windows take keys in blocks, for 64 neighbouring pages, as these are adopted, and
//! give them back as they go.

use crate::space::Space;
use crate::word::Kind;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_engine::{Area, Cache};

/// Pages of a block: those that are brought in at once, at most.
pub(crate) const BLOCK: u32 = 64;

/// See the module.
pub(crate) struct Keys {
    /// All of them; `None` where there are no windows.
    area: Option<Area>,
    given: Mutex<Given>,
}

#[derive(Default)]
struct Given {
    /// Blocks below were given.
    next: u32,
    /// And these were given back.
    back: Vec<u32>,
}

impl Keys {
    /// Those that the cache has, if there will be windows.
    pub(crate) fn new(cache: &Cache, has_windows: bool) -> Self {
        let pages = cache.pages_max() / BLOCK * BLOCK;
        let area = if has_windows { cache.add_area(pages) } else { None };
        Self { area, given: Mutex::default() }
    }

    /// The area that they are in.
    pub(crate) fn area(&self) -> Option<Area> {
        self.area
    }

    fn given(&self) -> MutexGuard<'_, Given> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives keys to pages of a window that have none. `false`: there are no more.
    pub(crate) fn give(&self, space: &Space, pages: Range<u32>) -> bool {
        let mut given = self.given();
        let blocks = self.area.map_or(0, |area| area.pages() / BLOCK);
        space.blocks_of(pages).all(|at| {
            if space.block(at).is_none() {
                let unused = given.next;
                let block = given.back.pop().or((unused < blocks).then_some(unused));
                let Some(block) = block else { return false };
                given.next += u32::from(block == unused);
                space.set_block(at, Some(block));
            }
            true
        })
    }

    /// Takes those back of which no page is adopted any more. Nobody adopts any meanwhile.
    pub(crate) fn take(&self, space: &Space, pages: Range<u32>) {
        let mut given = self.given();
        for at in space.blocks_of(pages) {
            let Some(block) = space.block(at) else { continue };
            let mut pages = at * BLOCK..((at + 1) * BLOCK).min(space.pages());
            if pages.all(|page| space.load(page).kind() == Kind::Untouched) {
                space.set_block(at, None);
                given.back.push(block);
            }
        }
    }
}
