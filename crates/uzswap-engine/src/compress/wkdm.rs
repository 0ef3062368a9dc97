//! WKdm, a compressor made for memory rather than files. It is our own code, after the description
//! in Wilson, Kaplan and Smaragdakis, "The Case for Compressed Caching in Virtual Memory Systems"
//! (USENIX 1999).
//!
//! A page is 1024 little-endian words of 32 bits. A dictionary of 16 words, zeros at first, keeps
//! the last nonzero word of each *slot*, which is a hash of a word's upper 22 bits. A word is
//! *zero*; or *exact*, the same as the word in its slot; or *partial*, the same but for the lower
//! 10 bits; or a *literal*.
//!
//! An object is four sections, one after the other without padding between them:
//!
//! | section  | for each       | bits | content                                                  |
//! |----------|----------|-----:|----------------------------------------------------------------|
//! | tags     | 16 words | 2×16 | two masks, bit i for word i: 1 in the first where the word is  |
//! |          |          |      | exact or partial, 1 in the second where it is exact or literal |
//! | literals | literal  |   32 | the word                                                       |
//! | slots    | exact, partial |  4 | its slot                                                   |
//! | lows     | partial  |   10 | its lower bits                                                 |
//!
//! All numbers are little-endian; the first of several in a byte is in its lowest bits. The last
//! byte of the slots and of the lows is padded with zeros. The tags give all lengths.
//!
//! The code that splits a page into sections and joins it again has two forms: a scalar one, and
//! [`Vector`] on x86-64, which takes 16 words at a time. Both share the packing of sections.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(not(target_arch = "x86_64"))]
mod scalar_only;

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};
#[cfg(target_arch = "x86_64")]
use avx512::Vector;
#[cfg(not(target_arch = "x86_64"))]
use scalar_only::Vector;
use std::hint::select_unpredictable as select;

const WORDS: usize = PAGE_BYTES / 4;

/// Words that share two masks of tags.
const GROUP: usize = 16;
const TAGS: usize = WORDS / GROUP * 4;

/// Entries of the dictionary; the scalar form has one more, where zeros go.
const SLOTS: usize = 16;

/// The lower bits that a partial word has in the object.
const LOW_BITS: u32 = 10;
const LOW: u32 = (1 << LOW_BITS) - 1;

/// Reads and writes may pass the end of a section by one group.
const SLACK: usize = 4 * GROUP;

/// A multiplier of MurmurHash3, which separates most words of heap pages. Among good multipliers
/// the size of objects differs by a few percent, by chance.
const MULTIPLIER: u32 = 0xC2B2_AE35;

fn slot(word: u32) -> usize {
    ((word >> LOW_BITS).wrapping_mul(MULTIPLIER) >> 28) as usize
}

/// The sections before they are packed. Bytes beyond the counts are garbage.
struct Parts {
    tags: [u8; TAGS],
    /// Words.
    literals: [u8; 4 * WORDS + SLACK],
    /// Numbers below [`SLOTS`].
    slots: [u8; WORDS + SLACK],
    /// Numbers of 16 bits, up to [`LOW`].
    lows: [u8; 2 * WORDS + SLACK],
}

/// The number of each kind in an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    literals: usize,
    slots: usize,
    lows: usize,
}

impl Counts {
    #[inline(always)]
    fn of(tags: &[u8; TAGS]) -> Self {
        let mut counts = Self::default();
        for group in tags.as_chunks::<4>().0 {
            let Masks { old, whole } = Masks::from_bytes(*group);
            counts.literals += (whole & !old).count_ones() as usize;
            counts.slots += old.count_ones() as usize;
            counts.lows += (old & !whole).count_ones() as usize;
        }
        counts
    }

    /// The ends of the sections of literals, slots and lows.
    fn ends(self) -> [usize; 3] {
        let literals = TAGS + 4 * self.literals;
        let slots = literals + self.slots.div_ceil(2);
        [literals, slots, slots + (LOW_BITS as usize * self.lows).div_ceil(8)]
    }
}

/// The tags of a group.
#[derive(Clone, Copy)]
struct Masks {
    /// Words that the dictionary has, or has the upper bits of.
    old: u16,
    /// Words whose lower bits are not in the lows.
    whole: u16,
}

impl Masks {
    fn from_bytes([a, b, c, d]: [u8; 4]) -> Self {
        Self { old: u16::from_le_bytes([a, b]), whole: u16::from_le_bytes([c, d]) }
    }

    fn to_bytes(self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.old.to_le_bytes(), self.whole.to_le_bytes());
        [a, b, c, d]
    }
}

/// A codec with its working memory, so that no call allocates.
pub(super) struct Wkdm {
    parts: Box<Parts>,
    vector: Option<Vector>,
}

impl Wkdm {
    pub(super) fn new() -> Self {
        Self { vector: Vector::detect(), ..Self::scalar() }
    }

    /// The form for every machine. Objects are the same.
    fn scalar() -> Self {
        let parts = Parts {
            tags: [0; TAGS],
            literals: [0; 4 * WORDS + SLACK],
            slots: [0; WORDS + SLACK],
            lows: [0; 2 * WORDS + SLACK],
        };
        Self { parts: Box::new(parts), vector: None }
    }
}

impl Compressor for Wkdm {
    /// Writes the object of `page` to the front of `out` and returns its length, or `None` when it
    /// does not fit. The same page always gives the same object, on every machine.
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        if let Some(vector) = self.vector {
            return vector.compress(&mut self.parts, page, out);
        }
        let counts = split(page, &mut self.parts);
        self.parts.pack(counts, out)
    }

    /// Restores `page` from `object`. After an error the page is unchanged.
    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        if let Some(vector) = self.vector {
            return vector.decompress(&mut self.parts, object, page).ok_or(Undecodable);
        }
        self.parts.unpack(object).ok_or(Undecodable)?;
        join(&self.parts, page);
        Ok(())
    }
}

impl Parts {
    /// Writes the object with `counts` of each kind.
    ///
    /// This and [`Parts::unpack`] are compiled into either form, with that form's instructions.
    #[inline(always)]
    fn pack(&mut self, counts: Counts, out: &mut [u8]) -> Option<usize> {
        let [literals, slots, end] = counts.ends();
        let out = out.get_mut(..end)?;
        out[..TAGS].copy_from_slice(&self.tags);
        out[TAGS..literals].copy_from_slice(&self.literals[..4 * counts.literals]);
        self.slots[counts.slots] = 0;
        for (pair, out) in self.slots.as_chunks::<2>().0.iter().zip(&mut out[literals..slots]) {
            *out = pair[0] | pair[1] << 4;
        }
        self.lows[2 * counts.lows..][..6].fill(0);
        let (whole, rest) = out[slots..].as_chunks_mut::<5>();
        let (fours, _) = self.lows.as_chunks::<8>();
        for (four, five) in fours.iter().zip(&mut *whole) {
            *five = narrow(*four);
        }
        rest.copy_from_slice(&narrow(fours[whole.len()])[..rest.len()]);
        Some(end)
    }

    /// Fills the sections from an object.
    #[inline(always)]
    fn unpack(&mut self, object: &[u8]) -> Option<()> {
        self.tags = *object.first_chunk()?;
        let counts = Counts::of(&self.tags);
        let [literals, slots, end] = counts.ends();
        if object.len() != end {
            return None;
        }
        self.literals[..4 * counts.literals].copy_from_slice(&object[TAGS..literals]);
        for (byte, pair) in object[literals..slots].iter().zip(self.slots.as_chunks_mut::<2>().0) {
            *pair = [byte & 15, byte >> 4];
        }
        let (whole, rest) = object[slots..].as_chunks::<5>();
        let (fours, _) = self.lows.as_chunks_mut::<8>();
        for (five, four) in whole.iter().zip(&mut *fours) {
            *four = wide(*five);
        }
        let mut last = [0; 5];
        last[..rest.len()].copy_from_slice(rest);
        fours[whole.len()] = wide(last);
        // The padding of the last bytes: a slot, and bits that would belong to one more number.
        let slot_is_zero = counts.slots.is_multiple_of(2) || self.slots[counts.slots] == 0;
        let mut fill = self.lows[2 * counts.lows..8 * whole.len() + 8].iter();
        (slot_is_zero && fill.all(|byte| *byte == 0)).then_some(())
    }
}

/// Four numbers of ten bits, each in sixteen.
#[inline(always)]
fn narrow(four: [u8; 8]) -> [u8; 5] {
    let wide = u64::from_le_bytes(four);
    let number = |i: u32| (wide >> (16 * i) & u64::from(LOW)) << (LOW_BITS * i);
    let [a, b, c, d, e, ..] = (number(0) | number(1) | number(2) | number(3)).to_le_bytes();
    [a, b, c, d, e]
}

/// The opposite of [`narrow`].
#[inline(always)]
fn wide([a, b, c, d, e]: [u8; 5]) -> [u8; 8] {
    let narrow = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]);
    let number = |i: u32| (narrow >> (LOW_BITS * i) & u64::from(LOW)) << (16 * i);
    (number(0) | number(1) | number(2) | number(3)).to_le_bytes()
}

/// Appends to a section. An item that is not kept is written, too, but not counted. The kind of a
/// word is nearly random, so branches on it would be slow.
fn append<const N: usize>(section: &mut [u8], count: &mut usize, item: [u8; N], is_kept: bool) {
    let at = N * *count;
    section[at..at + N].copy_from_slice(&item);
    *count += usize::from(is_kept);
}

/// The next item of a section, which stays there unless it is used.
fn next<const N: usize>(section: &[u8], count: &mut usize, is_used: bool) -> [u8; N] {
    let at = N * *count;
    *count += usize::from(is_used);
    section[at..].first_chunk().copied().unwrap_or([0; N])
}

/// Splits a page into its sections.
fn split(page: &Page, parts: &mut Parts) -> Counts {
    let mut counts = Counts::default();
    let mut dictionary = [0; SLOTS + 1];
    let (groups, _) = page.as_chunks::<{ 4 * GROUP }>();
    for (group, tags) in groups.iter().zip(parts.tags.as_chunks_mut::<4>().0) {
        let mut masks = Masks { old: 0, whole: 0 };
        for (i, word) in group.as_chunks::<4>().0.iter().enumerate() {
            let word = u32::from_le_bytes(*word);
            let is_zero = word == 0;
            let slot = select(is_zero, SLOTS, slot(word));
            let differ = dictionary[slot] ^ word;
            dictionary[slot] = word;
            let is_old = !is_zero & (differ <= LOW);
            let is_whole = !is_zero & ((differ == 0) | (differ > LOW));
            masks.old |= u16::from(is_old) << i;
            masks.whole |= u16::from(is_whole) << i;
            let literal = word.to_le_bytes();
            append(&mut parts.literals, &mut counts.literals, literal, is_whole & !is_old);
            append(&mut parts.slots, &mut counts.slots, [slot as u8], is_old);
            let low = ((word & LOW) as u16).to_le_bytes();
            append(&mut parts.lows, &mut counts.lows, low, is_old & !is_whole);
        }
        *tags = masks.to_bytes();
    }
    counts
}

/// Makes a page from its sections.
fn join(parts: &Parts, page: &mut Page) {
    let mut counts = Counts::default();
    let mut dictionary = [0; SLOTS + 1];
    let (groups, _) = page.as_chunks_mut::<{ 4 * GROUP }>();
    for (group, tags) in groups.iter_mut().zip(parts.tags.as_chunks::<4>().0) {
        let masks = Masks::from_bytes(*tags);
        for (i, out) in group.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let (is_old, is_whole) = (masks.old >> i & 1 == 1, masks.whole >> i & 1 == 1);
            let is_literal = is_whole & !is_old;
            let is_partial = is_old & !is_whole;
            let literal = next(&parts.literals, &mut counts.literals, is_literal);
            let [old_slot] = next(&parts.slots, &mut counts.slots, is_old);
            let low = next(&parts.lows, &mut counts.lows, is_partial);
            let literal = u32::from_le_bytes(literal);
            let low = u32::from(u16::from_le_bytes(low));
            let new = select(is_literal, slot(literal), SLOTS);
            let at = select(is_old, usize::from(old_slot), new);
            let old = dictionary[at];
            let word = select(is_partial, old & !LOW | low, select(is_literal, literal, old));
            dictionary[at] = word;
            *out = word.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests;
