//! An encoder of the LZ4 block format that searches for matches at every byte.
//!
//! Each place is compared with four earlier places. Two are at the distances of the last two
//! different matches. The others are the last two places that may have had the same five bytes. The
//! longest match wins, by its first eight bytes. If not all eight are equal, a longer match at the
//! next byte wins. Objects are smaller than liblz4's, which compares one place, and faster to
//! decode, since they have fewer sequences.

use super::block::{LAST, Match, SLOTS, encode, equal, load, slot};
use crate::page::Page;

/// The encoder with the memory it works in.
pub(super) struct Bytes {
    /// The last place in the page of bytes with this hash, and in the upper half the place before
    /// that.
    table: [u32; SLOTS],
}

/// A match at a place: its equal bytes above its distance, so that the greatest is the best.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank(u64);

impl Rank {
    #[inline(always)]
    fn new(differ: u64, dist: usize) -> Self {
        Self((equal(differ) as u64) << 16 | dist as u64)
    }

    #[inline(always)]
    fn equal(self) -> usize {
        (self.0 >> 16) as usize
    }

    #[inline(always)]
    fn at(self, at: usize) -> Match {
        Match { at, dist: usize::from(self.0 as u16), equal: self.equal() }
    }
}

impl Bytes {
    pub(super) fn new() -> Self {
        Self { table: [0; SLOTS] }
    }

    /// Writes the object of `page` to the front of `out` and returns its length, or `None` when it
    /// does not fit. The same page always makes the same object.
    pub(super) fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A cleared slot names position 0, which lies before every position looked up.
        self.table.fill(0);
        encode(page, out, (8, 1), [4, 8], |at, dists| self.seek(page, at, dists))
    }

    /// Finds a match at or after `at`, in strides that grow with the bytes passed.
    #[inline(always)]
    fn seek(&mut self, page: &Page, mut at: usize, dists: [usize; 2]) -> Option<Match> {
        let mut passed = 0;
        while at <= LAST {
            if let Some(rank) = self.look(page, at, dists) {
                if rank.equal() < 8
                    && at < LAST
                    && let Some(next) = self.look(page, at + 1, dists)
                    && next.equal() > rank.equal()
                {
                    return Some(next.at(at + 1));
                }
                return Some(rank.at(at));
            }
            at += 1 + passed / 64;
            passed += 1;
        }
        None
    }

    /// The best match at a place, if there is one.
    #[inline(always)]
    fn look(&mut self, page: &Page, at: usize, dists: [usize; 2]) -> Option<Rank> {
        let bytes = load(page, at);
        let entry = &mut self.table[slot(bytes)];
        let seen = [*entry as u16, (*entry >> 16) as u16].map(|seen| at - usize::from(seen));
        *entry = *entry << 16 | at as u32;
        let candidates = [dists[0], dists[1], seen[0], seen[1]];
        let differ = candidates.map(|dist| load(page, at - dist) ^ bytes);
        // Most places have no match and end here, before matches are compared.
        if differ.iter().all(|differ| *differ as u32 != 0) {
            return None;
        }
        let [a, b, c, d] = std::array::from_fn(|way| Rank::new(differ[way], candidates[way]));
        Some(a.max(b).max(c.max(d)))
    }
}
