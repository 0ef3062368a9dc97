//! An encoder of the LZ4 block format for memory pages.
//!
//! What repeats in a heap are aligned words, and objects of one size next to each other. So
//! matches are looked for at multiples of four bytes only: first as far back as the last two
//! different matches, then where a table last saw the same five bytes. Most of what a large table
//! would find is at one of those two distances, and known without waiting for a table.
//!
//! A block is a chain of sequences: a token, with the number of literals in its upper four bits
//! and the length of the match, less 4, in its lower ones; the literals; the distance, in two
//! bytes. A field of 15 goes on in bytes that are added to it, after the token and the distance,
//! until one is not 255. The last sequence ends after its literals.

use crate::page::{PAGE_BYTES as PAGE, Page};
use std::ops::Range;

/// Twice the slots would make objects 0.2 % smaller, but the table is cleared for every page.
const SLOT_BITS: u32 = 10;
const SLOTS: usize = 1 << SLOT_BITS;

/// By the format, a match begins at least 12 bytes before the end, and ends at least 5.
const LAST: usize = PAGE - 12;
const END: usize = PAGE - 5;

const WORD: usize = 4;

/// The shortest match, which the format counts as none.
const SHORTEST: usize = 4;

/// What a field of the token holds before it goes on in bytes of its own.
const FIELD: usize = 15;

/// The encoder with the memory it works in.
pub(super) struct Words {
    /// Where in the page the bytes that hash to a slot were last seen.
    table: [u16; SLOTS],
}

/// A match.
#[derive(Clone, Copy)]
struct Found {
    at: usize,
    dist: usize,
    /// The exclusive or of the first eight bytes.
    differ: u64,
}

impl Words {
    pub(super) fn new() -> Self {
        Self { table: [0; SLOTS] }
    }

    /// Writes the object of `page` to the front of `out` and tells its length, or `None` when it
    /// does not fit. The same page always makes the same object.
    pub(super) fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // A cleared slot names position 0, which lies before every position looked up.
        self.table.fill(0);
        let mut writer = Writer { out, len: 0 };
        let mut from = 0;
        let mut at = WORD;
        let mut dists = [WORD; 2];
        while let Some(found) = self.seek(page, at, dists) {
            let len = equal_after(page, found);
            let back = equal_before(page, found, from);
            writer.sequence(page, from..found.at - back, len + back, found.dist)?;
            from = found.at + len;
            at = from.next_multiple_of(WORD);
            if found.dist != dists[0] {
                dists = [found.dist, dists[0]];
            }
        }
        writer.last(&page[from..])?;
        Some(writer.len)
    }

    /// Finds the first match at or after `at`, in strides that grow with the words passed so that
    /// a page without matches is soon done with.
    #[inline(always)]
    fn seek(&mut self, page: &Page, mut at: usize, dists: [usize; 2]) -> Option<Found> {
        let mut passed = 0;
        while at <= LAST {
            let bytes = load(page, at);
            // Branches rather than the longest of the three: the processor goes on with a guess
            // instead of waiting for the table, which pays for the smaller objects lost.
            for dist in dists {
                let differ = load(page, at - dist) ^ bytes;
                if differ << 32 == 0 {
                    return Some(Found { at, dist, differ });
                }
            }
            let entry = &mut self.table[slot(bytes)];
            let dist = at - usize::from(*entry);
            *entry = at as u16;
            let differ = load(page, at - dist) ^ bytes;
            if differ << 24 == 0 {
                return Some(Found { at, dist, differ });
            }
            at += WORD * (1 + passed / 64);
            passed += 1;
        }
        None
    }
}

/// Loads eight bytes. Zero stands in for the panic beyond the page, where no caller looks.
#[inline(always)]
fn load(page: &Page, at: usize) -> u64 {
    page.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Hashes the first five bytes: matches of four are worth next to nothing.
#[inline(always)]
fn slot(bytes: u64) -> usize {
    ((bytes << 24).wrapping_mul(0x9E37_79B1_85EB_CA87) >> (64 - SLOT_BITS)) as usize
}

/// The length of a match from `found.at` on.
#[inline(always)]
fn equal_after(page: &Page, found: Found) -> usize {
    let Found { at, dist, differ } = found;
    if differ != 0 {
        return differ.trailing_zeros() as usize / 8;
    }
    let mut len = 8;
    while at + len + 8 <= END {
        let differ = load(page, at + len) ^ load(page, at + len - dist);
        if differ != 0 {
            return len + differ.trailing_zeros() as usize / 8;
        }
        len += 8;
    }
    let start = (at + len).min(END);
    let tail = page[start..END].iter().zip(&page[start - dist..]);
    start - at + tail.take_while(|(new, old)| new == old).count()
}

/// How far a match can be extended before `found.at`, by up to a word and to the start of the
/// literals at `from`.
#[inline(always)]
fn equal_before(page: &Page, found: Found, from: usize) -> usize {
    let Found { at, dist, .. } = found;
    // All places are multiples of a word: there is a whole one before, or nothing.
    let room = (at - from).min(at - dist).min(WORD);
    let differ = load(page, at - WORD) ^ load(page, (at - dist).saturating_sub(WORD));
    ((differ << 32).leading_zeros() as usize / 8).min(room)
}

/// An object being written to the front of `out`.
struct Writer<'a> {
    out: &'a mut [u8],
    len: usize,
}

impl Writer<'_> {
    /// Appends bytes of the page as literals, and a match.
    #[inline(always)]
    fn sequence(
        &mut self,
        page: &Page,
        literals: Range<usize>,
        len: usize,
        dist: usize,
    ) -> Option<()> {
        let (count, rest) = (literals.len(), len - SHORTEST);
        if count < FIELD
            && rest < FIELD + 255
            && let Some(literals) = page.get(literals.start..)?.first_chunk::<16>()
            && let Some(out) = self.out.get_mut(self.len..)?.first_chunk_mut::<24>()
        {
            // Everything is written at its widest and then counts for what it is worth.
            out[0] = (count << 4 | rest.min(FIELD)) as u8;
            out[1..17].copy_from_slice(literals);
            let tail = (dist | rest.wrapping_sub(FIELD) << 16) as u32;
            out[1 + count..][..4].copy_from_slice(&tail.to_le_bytes());
            self.len += 3 + count + usize::from(rest >= FIELD);
            return Some(());
        }
        self.long(page.get(literals)?, rest, dist)
    }

    #[inline(never)]
    fn long(&mut self, literals: &[u8], rest: usize, dist: usize) -> Option<()> {
        self.literals(literals, rest)?;
        self.put(&(dist as u16).to_le_bytes())?;
        self.beyond(rest)
    }

    /// Appends the last sequence.
    #[inline(never)]
    fn last(&mut self, literals: &[u8]) -> Option<()> {
        self.literals(literals, 0)
    }

    fn literals(&mut self, literals: &[u8], rest: usize) -> Option<()> {
        self.put(&[(literals.len().min(FIELD) << 4 | rest.min(FIELD)) as u8])?;
        self.beyond(literals.len())?;
        self.put(literals)
    }

    /// Appends what follows a full field.
    fn beyond(&mut self, number: usize) -> Option<()> {
        let Some(mut beyond) = number.checked_sub(FIELD) else { return Some(()) };
        while beyond >= 255 {
            self.put(&[255])?;
            beyond -= 255;
        }
        self.put(&[beyond as u8])
    }

    fn put(&mut self, bytes: &[u8]) -> Option<()> {
        self.out.get_mut(self.len..)?.get_mut(..bytes.len())?.copy_from_slice(bytes);
        self.len += bytes.len();
        Some(())
    }
}
