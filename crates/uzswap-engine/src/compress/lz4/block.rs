//! The LZ4 block format of a page, shared by our encoders.
//!
//! A block is a chain of sequences: a token, the literals, and the distance in two bytes. The token
//! has the number of literals in its upper four bits, and the length of the match less 4 in its
//! lower four. A field of 15 continues in further bytes, which are added to it, up to the first
//! byte that is not 255. Those of the first field follow the token, and those of the second follow
//! the distance. The last sequence ends after its literals.

use crate::page::{PAGE_BYTES as PAGE, Page};
use std::ops::Range;

/// By the format, a match begins at least 12 bytes before the page's end, and ends at least 5.
pub(super) const LAST: usize = PAGE - 12;
const END: usize = PAGE - 5;

/// Bits of a slot's number, in the table of the places where bytes were last seen. Twice the slots
/// would make objects 0.2 % smaller, but the table is cleared for every page.
const SLOT_BITS: u32 = 10;
pub(super) const SLOTS: usize = 1 << SLOT_BITS;

/// The shortest match, whose length the format encodes as 0.
const SHORTEST: usize = 4;

/// The value of a token's field that continues in bytes of its own.
const FIELD: usize = 15;

#[derive(Clone, Copy)]
pub(super) struct Match {
    pub at: usize,
    pub dist: usize,
    /// The number of equal bytes among the first eight; 8 may be more.
    pub equal: usize,
}

/// Loads eight bytes. Beyond the page, where no caller reads, it returns zero instead of a panic.
#[inline(always)]
pub(super) fn load(page: &Page, at: usize) -> u64 {
    page.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Hashes the first five bytes: matches of four are worth little.
#[inline(always)]
pub(super) fn slot(bytes: u64) -> usize {
    ((bytes << 24).wrapping_mul(0x9E37_79B1_85EB_CA87) >> (64 - SLOT_BITS)) as usize
}

/// The number of equal bytes before the first difference, by their exclusive or.
#[inline(always)]
pub(super) fn equal(differ: u64) -> usize {
    differ.trailing_zeros() as usize / 8
}

/// Writes the object of `page` to the front of `out` and returns its length, or `None` when it does
/// not fit. `seek` finds the next match at or after a place; it gets the last two different
/// distances. The search begins at `first`, and after each match at a multiple of `stride`.
#[inline(always)]
pub(super) fn encode(
    page: &Page,
    out: &mut [u8],
    (first, stride): (usize, usize),
    mut dists: [usize; 2],
    mut seek: impl FnMut(usize, [usize; 2]) -> Option<Match>,
) -> Option<usize> {
    let mut writer = Writer { page, out, len: 0, from: 0 };
    let mut at = first;
    while let Some(found) = seek(at, dists) {
        writer.append(found)?;
        at = writer.from.next_multiple_of(stride);
        if found.dist != dists[0] {
            dists = [found.dist, dists[0]];
        }
    }
    writer.finish()
}

/// The length of a match that begins at `found.at`.
#[inline(always)]
fn equal_after(page: &Page, found: Match) -> usize {
    let Match { at, dist, equal: known } = found;
    if known < 8 {
        return known;
    }
    let mut len = 8;
    while at + len + 8 <= END {
        let differ = load(page, at + len) ^ load(page, at + len - dist);
        if differ != 0 {
            return len + equal(differ);
        }
        len += 8;
    }
    let start = (at + len).min(END);
    let tail = page[start..END].iter().zip(&page[start - dist..]);
    start - at + tail.take_while(|(new, old)| new == old).count()
}

/// How far a match can be extended before `found.at`, by up to eight bytes and to the start of the
/// literals at `from`.
#[inline(always)]
fn equal_before(page: &Page, found: Match, from: usize) -> usize {
    let Match { at, dist, .. } = found;
    let (Some(new), Some(old)) = (at.checked_sub(8), (at - dist).checked_sub(8)) else { return 0 };
    let differ = load(page, new) ^ load(page, old);
    (differ.leading_zeros() as usize / 8).min(at - from)
}

/// An object being written to the front of `out`.
struct Writer<'a> {
    page: &'a Page,
    out: &'a mut [u8],
    len: usize,
    /// The start of the next sequence's literals.
    from: usize,
}

impl Writer<'_> {
    /// Appends the literals up to a match, and the whole match.
    #[inline(always)]
    fn append(&mut self, found: Match) -> Option<()> {
        let len = equal_after(self.page, found);
        let back = equal_before(self.page, found, self.from);
        self.sequence(self.from..found.at - back, len + back, found.dist)?;
        self.from = found.at + len;
        Some(())
    }

    /// Appends the rest as literals, and returns the length of the object.
    fn finish(mut self) -> Option<usize> {
        self.literals(self.from..PAGE, 0)?;
        Some(self.len)
    }

    #[inline(always)]
    fn sequence(&mut self, literals: Range<usize>, len: usize, dist: usize) -> Option<()> {
        let (count, rest) = (literals.len(), len - SHORTEST);
        if count < FIELD
            && rest < FIELD + 255
            && let Some(literals) = self.page.get(literals.start..)?.first_chunk::<16>()
            && let Some(out) = self.out.get_mut(self.len..)?.first_chunk_mut::<24>()
        {
            // All fields are written at their widest; only their valid bytes are counted.
            out[0] = (count << 4 | rest.min(FIELD)) as u8;
            out[1..17].copy_from_slice(literals);
            let tail = (dist | rest.wrapping_sub(FIELD) << 16) as u32;
            out[1 + count..][..4].copy_from_slice(&tail.to_le_bytes());
            self.len += 3 + count + usize::from(rest >= FIELD);
            return Some(());
        }
        self.long(literals, rest, dist)
    }

    #[inline(never)]
    fn long(&mut self, literals: Range<usize>, rest: usize, dist: usize) -> Option<()> {
        self.literals(literals, rest)?;
        self.put(&(dist as u16).to_le_bytes())?;
        self.beyond(rest)
    }

    #[inline(never)]
    fn literals(&mut self, literals: Range<usize>, rest: usize) -> Option<()> {
        let literals = self.page.get(literals)?;
        self.put(&[(literals.len().min(FIELD) << 4 | rest.min(FIELD)) as u8])?;
        self.beyond(literals.len())?;
        self.put(literals)
    }

    /// Appends the continuation of a full field.
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
