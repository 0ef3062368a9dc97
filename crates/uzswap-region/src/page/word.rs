//! The state of one page of a region: 32 bits.
//!
//! ```text
//!  31           10 9  8 7 6 5 4 3 2   0
//! |    payload    |level|G|S|K|R|W| kind |
//! ```
//! - `W`: a thread waits (only in a `Busy` word).
//! - `R`: a fault on this page brought it in. Otherwise it came in beside another page, and leaves
//!   when the hand passes.
//! - `K`: the cache still has a copy.
//! - `S`: that copy is out of date.
//! - `G`: the page is guarded. No thread can write to it without a fault, so it equals its copy.
//!
//! - level: the number of times in a row that the page came back soon after it had left (see
//!   `uzswap_policy::order`).
//!
//! The payload of a resident page is the count of the hand's passes (4 bits) and the count of pins.
//! A staged page has its frame. The word of a stored page has the moment at which the page left, or
//! 0 if that is unknown.
//!
//! The payload of a `Busy` page is its former kind. Only the thread that made a page `Busy` changes
//! it to another state, by a row of [`super::transition`]. Until then no other thread touches the
//! page, its frame or its copy.

use uzswap_policy::order::{LEVELS, PASSES_MAX};

/// The location of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nowhere: it was never written, or dropped. Reads as zeros.
    Untouched = 0,
    /// Some thread is changing it.
    Busy = 1,
    /// In the region.
    Resident = 2,
    /// In a frame of the staging area, uncompressed.
    Staged = 3,
    /// In the cache.
    Stored = 4,
    /// Nowhere, but adopted: reads as zeros. Only in windows, whose `Untouched` pages are not
    /// adopted.
    Empty = 5,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u32);

const KIND_BITS: u32 = 3;
const KIND_MASK: u32 = (1 << KIND_BITS) - 1;
const LEVEL_SHIFT: u32 = 8;
const LEVEL_MASK: u32 = (LEVELS as u32 - 1) << LEVEL_SHIFT;
const PAYLOAD_SHIFT: u32 = 10;
const PASSES_MASK: u32 = (PASSES_MAX as u32) << PAYLOAD_SHIFT;
const PINS_SHIFT: u32 = 14;

const _: () = assert!(LEVEL_MASK == 0b11 << LEVEL_SHIFT && PASSES_MASK >> PAYLOAD_SHIFT == 0b1111);

/// The number of moments that a stored page's word can distinguish.
pub(crate) const MOMENTS: u64 = 1 << (32 - PAYLOAD_SHIFT);

impl Word {
    pub(crate) const UNTOUCHED: Self = Self(0);
    const BUSY: u32 = 1;
    pub(crate) const RESIDENT: Self = Self(2);
    const STAGED: u32 = 3;
    pub(crate) const STORED: Self = Self(4);
    pub(crate) const EMPTY: Self = Self(5);
    pub(crate) const WAITED: u32 = 1 << 3;
    pub(crate) const USED: u32 = 1 << 4;
    pub(crate) const KEPT: u32 = 1 << 5;
    pub(crate) const STALE: u32 = 1 << 6;
    pub(crate) const GUARDED: u32 = 1 << 7;
    /// The kind of a word that has no pages itself: see [`Word::divided`].
    const DIVIDED: u32 = 6;
    /// Frames that a payload can name.
    pub(crate) const FRAMES_MAX: usize = 1 << (32 - PAYLOAD_SHIFT);

    /// The word that several pages share when their own words are in a group of
    /// [`crate::page::words`].
    pub(crate) fn divided(group: u32) -> Self {
        debug_assert!(group < 1 << (32 - KIND_BITS));
        Self(group << KIND_BITS | Self::DIVIDED)
    }

    /// The group to which a divided word refers. Such a word has no [`Kind`].
    pub(crate) fn group(self) -> Option<u32> {
        (self.0 & KIND_MASK == Self::DIVIDED).then_some(self.0 >> KIND_BITS)
    }

    #[inline]
    pub(crate) fn kind(self) -> Kind {
        kind(self.0 & KIND_MASK)
    }

    /// A page that a thread has made `Busy`, and that was of this kind.
    pub(crate) fn busy(before: Kind) -> Self {
        Self((before as u32) << PAYLOAD_SHIFT | Self::BUSY)
    }

    /// The kind of a page before it was `Busy`.
    pub(crate) fn before(self) -> Kind {
        debug_assert!(self.kind() == Kind::Busy);
        kind(self.0 >> PAYLOAD_SHIFT)
    }

    /// A page in a frame; its level, its use and the state of the cache's copy are those of `was`.
    pub(crate) fn staged(frame: usize, was: Self) -> Self {
        debug_assert!(frame < Self::FRAMES_MAX);
        let kept = was.copy_bits() | was.0 & (LEVEL_MASK | Self::USED);
        Self((frame as u32) << PAYLOAD_SHIFT | Self::STAGED | kept)
    }

    /// A page in the cache that had this level, and left at this moment.
    pub(crate) fn stored(level: u8, moment: u32) -> Self {
        debug_assert!(u64::from(moment) < MOMENTS);
        Self(moment << PAYLOAD_SHIFT | Self::STORED.0).with_level(level)
    }

    /// The bits that show if the cache has a copy, and if the copy is out of date.
    pub(crate) fn copy_bits(self) -> u32 {
        self.0 & (Self::KEPT | Self::STALE | Self::GUARDED)
    }

    pub(crate) fn has(self, bits: u32) -> bool {
        self.0 & bits == bits
    }

    pub(crate) fn with(self, bits: u32) -> Self {
        Self(self.0 | bits)
    }

    pub(crate) fn without(self, bits: u32) -> Self {
        Self(self.0 & !bits)
    }

    pub(crate) fn level(self) -> u8 {
        ((self.0 & LEVEL_MASK) >> LEVEL_SHIFT) as u8
    }

    pub(crate) fn with_level(self, level: u8) -> Self {
        Self(self.0 & !LEVEL_MASK | u32::from(level) << LEVEL_SHIFT)
    }

    /// How often the hand has passed a resident page.
    pub(crate) fn passes(self) -> u8 {
        debug_assert!(self.kind() == Kind::Resident);
        ((self.0 & PASSES_MASK) >> PAYLOAD_SHIFT) as u8
    }

    pub(crate) fn with_passes(self, passes: u8) -> Self {
        Self(self.0 & !PASSES_MASK | u32::from(passes) << PAYLOAD_SHIFT)
    }

    pub(crate) fn moment(self) -> u32 {
        debug_assert!(self.kind() == Kind::Stored);
        self.0 >> PAYLOAD_SHIFT
    }

    pub(crate) fn frame(self) -> usize {
        debug_assert!(self.kind() == Kind::Staged);
        (self.0 >> PAYLOAD_SHIFT) as usize
    }

    pub(crate) fn pins(self) -> u32 {
        debug_assert!(self.kind() == Kind::Resident);
        self.0 >> PINS_SHIFT
    }

    /// The word with one more pin; `None` after 2^18 − 1 times.
    pub(crate) fn pinned(self) -> Option<Self> {
        self.0.checked_add(1 << PINS_SHIFT).map(Self)
    }

    pub(crate) fn without_pins(self) -> Self {
        Self(self.0 & ((1 << PINS_SHIFT) - 1))
    }

    pub(crate) fn unpinned(self) -> Self {
        assert!(self.pins() > 0, "unpinned more often than pinned");
        Self(self.0 - (1 << PINS_SHIFT))
    }
}

#[inline]
fn kind(number: u32) -> Kind {
    match number {
        0 => Kind::Untouched,
        1 => Kind::Busy,
        2 => Kind::Resident,
        3 => Kind::Staged,
        4 => Kind::Stored,
        5 => Kind::Empty,
        other => unreachable!("no page has a word of kind {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for (word, kind) in [
            (Word::UNTOUCHED, Kind::Untouched),
            (Word::busy(Kind::Stored).with(Word::WAITED), Kind::Busy),
            (Word::RESIDENT.with(Word::USED | Word::KEPT), Kind::Resident),
            (Word::STORED, Kind::Stored),
            (Word::EMPTY, Kind::Empty),
        ] {
            assert_eq!(word.kind(), kind);
            assert_eq!(Word::busy(kind).with(Word::WAITED).before(), kind);
        }
        for moment in [0, 1, MOMENTS as u32 - 1] {
            let word = Word::stored(2, moment);
            assert_eq!((word.kind(), word.level(), word.moment()), (Kind::Stored, 2, moment));
        }
        for group in [0, 1, (1 << 29) - 1] {
            assert_eq!(Word::divided(group).group(), Some(group));
        }
        assert_eq!(
            (Word::UNTOUCHED.group(), Word::busy(Kind::Empty).group(), Word::EMPTY.group()),
            (None, None, None)
        );
        for frame in [0, 77, Word::FRAMES_MAX - 1] {
            let was = Word::RESIDENT.with(Word::USED | Word::KEPT).with_level(3).with_passes(9);
            let word = Word::staged(frame, was);
            assert_eq!((word.kind(), word.frame()), (Kind::Staged, frame));
            assert!(word.has(Word::KEPT | Word::USED) && !word.has(Word::STALE));
            assert_eq!(word.level(), 3);
        }
        let word = Word::RESIDENT.with(Word::USED).pinned().unwrap().pinned().unwrap();
        assert_eq!((word.pins(), word.unpinned().pins(), word.kind()), (2, 1, Kind::Resident));
        assert!(word.has(Word::USED));
        let word = word.with_level(1).with_passes(PASSES_MAX);
        assert_eq!((word.pins(), word.level(), word.passes()), (2, 1, PASSES_MAX));
        assert_eq!(word.without_pins(), word.unpinned().unpinned());
        assert_eq!(
            (word.with_level(2).with_passes(3).unpinned().pins(), word.kind()),
            (1, Kind::Resident)
        );
    }
}
