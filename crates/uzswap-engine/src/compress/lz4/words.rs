//! An encoder of the LZ4 block format for memory pages.
//!
//! A heap repeats aligned words, and objects of one size next to each other. This encoder therefore
//! tries matches at multiples of four bytes only: first at the last two different distances, then
//! where a table last saw the same five bytes. A large table would find most of its matches at
//! those two distances, but only after a wait for memory.

use super::block::{LAST, Match, SLOTS, encode, equal, load, slot};
use crate::page::Page;

const WORD: usize = 4;

/// The encoder with the memory it works in.
pub(super) struct Words {
    /// The place in the page where bytes with this hash were last seen.
    table: [u16; SLOTS],
}

impl Words {
    pub(super) fn new() -> Self {
        Self { table: [0; SLOTS] }
    }

    /// Writes the object of `page` to the front of `out` and returns its length, or `None` when it
    /// does not fit. The same page always makes the same object.
    pub(super) fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A cleared slot names position 0, which lies before every position looked up.
        self.table.fill(0);
        encode(page, out, (WORD, WORD), [WORD; 2], |at, dists| self.seek(page, at, dists))
    }

    /// Finds the first match at or after `at`, in strides that grow with the words passed, so that
    /// a page without matches takes little time.
    #[inline(always)]
    fn seek(&mut self, page: &Page, mut at: usize, dists: [usize; 2]) -> Option<Match> {
        let mut passed = 0;
        while at <= LAST {
            let bytes = load(page, at);
            // Takes the first match of the three by branches, rather than the longest. The
            // processor then continues with a guess instead of waiting for the table. This is worth
            // more than smaller objects.
            for dist in dists {
                let differ = load(page, at - dist) ^ bytes;
                if differ << 32 == 0 {
                    return Some(Match { at, dist, equal: equal(differ) });
                }
            }
            let entry = &mut self.table[slot(bytes)];
            let dist = at - usize::from(*entry);
            *entry = at as u16;
            let differ = load(page, at - dist) ^ bytes;
            if differ << 24 == 0 {
                return Some(Match { at, dist, equal: equal(differ) });
            }
            at += WORD * (1 + passed / 64);
            passed += 1;
        }
        None
    }
}
