//! The state of one page of a region: 32 bits.
//!
//! ```text
//!  31           8 7 6 5 4 3 2   0
//! |    payload   |G|S|K|R|W| kind |
//! ```
//! - `W`: somebody waits (only of `Busy`).
//! - `R`: used since the hand came by.
//! - `K`: the cache still has a copy.
//! - `S`: that copy is out of date.
//! - `G`: the page is guarded. Nobody can write it without a fault, so it equals its copy.
//!
//! The payload is the count of pins of a resident page, the frame of a staged one.
//!
//! Only the thread that made a page `Busy` changes it to another state; no other thread touches the
//! page, its frame or its copy meanwhile. Transitions are in docs/design/region.md.

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nowhere: it was never written, or dropped. Reads as zeros.
    Untouched,
    /// Some thread is changing it.
    Busy,
    /// In the region.
    Resident,
    /// In a frame of the staging area, uncompressed.
    Staged,
    /// In the cache.
    Stored,
    /// Nowhere, and ours: reads as zeros. Of memory that was the program's before (windows), whose
    /// `Untouched` pages are not ours.
    Empty,
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u32);

const KIND_MASK: u32 = 0b111;
const PAYLOAD_SHIFT: u32 = 8;

impl Word {
    pub(crate) const UNTOUCHED: Self = Self(0);
    pub(crate) const BUSY: Self = Self(1);
    pub(crate) const RESIDENT: Self = Self(2);
    const STAGED: u32 = 3;
    pub(crate) const STORED: Self = Self(4);
    pub(crate) const EMPTY: Self = Self(5);
    pub(crate) const WAITED: u32 = 1 << 3;
    pub(crate) const USED: u32 = 1 << 4;
    pub(crate) const KEPT: u32 = 1 << 5;
    pub(crate) const STALE: u32 = 1 << 6;
    pub(crate) const GUARDED: u32 = 1 << 7;
    /// Frames that a payload can name.
    pub(crate) const FRAMES_MAX: usize = 1 << (32 - PAYLOAD_SHIFT);

    pub(crate) fn kind(self) -> Kind {
        match self.0 & KIND_MASK {
            0 => Kind::Untouched,
            1 => Kind::Busy,
            2 => Kind::Resident,
            3 => Kind::Staged,
            4 => Kind::Stored,
            5 => Kind::Empty,
            other => unreachable!("no word of kind {other} is ever put"),
        }
    }

    /// A page in a frame; the state of the cache's copy is that of `was`.
    pub(crate) fn staged(frame: usize, was: Self) -> Self {
        debug_assert!(frame < Self::FRAMES_MAX);
        Self((frame as u32) << PAYLOAD_SHIFT | Self::STAGED | was.copy_bits())
    }

    /// Tells if the cache has a copy, and how old that is.
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

    /// The frame of a staged page.
    pub(crate) fn frame(self) -> usize {
        debug_assert!(self.kind() == Kind::Staged);
        (self.0 >> PAYLOAD_SHIFT) as usize
    }

    /// How often a resident page is pinned.
    pub(crate) fn pins(self) -> u32 {
        debug_assert!(self.kind() == Kind::Resident);
        self.0 >> PAYLOAD_SHIFT
    }

    /// Pinned once more; `None` after 2^24 − 1 times.
    pub(crate) fn pinned(self) -> Option<Self> {
        self.0.checked_add(1 << PAYLOAD_SHIFT).map(Self)
    }

    /// Pinned once less.
    pub(crate) fn unpinned(self) -> Self {
        assert!(self.pins() > 0, "unpinned more often than pinned");
        Self(self.0 - (1 << PAYLOAD_SHIFT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        for (word, kind) in [
            (Word::UNTOUCHED, Kind::Untouched),
            (Word::BUSY.with(Word::WAITED), Kind::Busy),
            (Word::RESIDENT.with(Word::USED | Word::KEPT), Kind::Resident),
            (Word::STORED, Kind::Stored),
            (Word::EMPTY, Kind::Empty),
        ] {
            assert_eq!(word.kind(), kind);
        }
        for frame in [0, 77, Word::FRAMES_MAX - 1] {
            let was = Word::RESIDENT.with(Word::USED | Word::KEPT);
            let word = Word::staged(frame, was);
            assert_eq!((word.kind(), word.frame()), (Kind::Staged, frame));
            assert!(word.has(Word::KEPT) && !word.has(Word::STALE) && !word.has(Word::USED));
        }
        let word = Word::RESIDENT.with(Word::USED).pinned().unwrap().pinned().unwrap();
        assert_eq!((word.pins(), word.unpinned().pins(), word.kind()), (2, 1, Kind::Resident));
        assert!(word.has(Word::USED));
    }
}
