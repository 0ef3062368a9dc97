//! What is in each segment of the backing.
//!
//! A segment is written once, whole, and then only loses records; or it is given out slot by slot,
//! to pages written through. The count of its live bytes tells when it is free again, and, while it
//! is not, which segment is cheapest to clean: its live records are copied into another. So a log,
//! cleaned greedily; with a fifth of the space free, three quarters of a segment are
//! copied for each segment won, and less where neighbours die together, as the records of one
//! program do.
//!
//! A segment is one word: its use and its live bytes change together, so exactly one thread sees
//! the last record of a written segment die, and gives the segment back.

use crate::backing::slots::SLOT_BYTES;
use crate::durable::{Durable, Values};
use crate::ids::Place;
use crate::stops::Kept;
use crate::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::Arc;

/// Bytes of a segment: large enough that a disk spends its time writing rather than seeking.
pub(crate) const SEGMENT_BYTES: usize = 256 << 10;

/// What a segment is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Use {
    /// Holds nothing.
    Free = 0,
    /// Taken; being filled or written. Never handed out or cleaned.
    Open = 1,
    /// Written. Free as soon as nothing in it is live.
    Written = 2,
    /// Given out slot by slot. Free as soon as all of them are back.
    Singles = 3,
    /// Its live records are being copied elsewhere.
    Cleaning = 4,
}

impl Use {
    fn of(word: u32) -> Self {
        match word >> Self::SHIFT {
            0 => Self::Free,
            1 => Self::Open,
            2 => Self::Written,
            3 => Self::Singles,
            4 => Self::Cleaning,
            other => unreachable!("no use of a segment has number {other}"),
        }
    }

    fn word(self, live: u32) -> u32 {
        (self as u32) << Self::SHIFT | live
    }

    const SHIFT: u32 = 29;
    const LIVE: u32 = (1 << Self::SHIFT) - 1;
}

const _: () = assert!(SEGMENT_BYTES <= Use::LIVE as usize);

/// A segment's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Segment(pub(crate) u32);

impl Segment {
    /// The segment that a place is in.
    pub(crate) fn of(place: Place) -> Self {
        Self((place.byte() / SEGMENT_BYTES as u64) as u32)
    }

    /// Where it begins on the backing, bytes.
    pub(crate) fn start(self) -> u64 {
        u64::from(self.0) * SEGMENT_BYTES as u64
    }
}

/// See the module.
pub(crate) struct Segments {
    words: Values<Kept<AtomicU32>>,
}

impl Segments {
    /// All free.
    pub(super) fn new(count: usize) -> Self {
        let words = (0..count).map(|_| Kept::new(Use::Free.word(0)));
        Self { words: Values::Own(words.collect()) }
    }

    /// In memory that outlives the process: free, or as another one has left them.
    #[cfg(not(feature = "shuttle"))]
    pub(super) fn durable(durable: &Arc<Durable>) -> Self {
        Self { words: durable.segments() }
    }

    #[cfg(feature = "shuttle")]
    pub(super) fn durable(_durable: &Arc<Durable>) -> Self {
        unreachable!("the model checker has no memory that outlives it")
    }

    /// Takes the segments over, of which nothing is known to be live yet. One that was being
    /// written stays so: a write may still be under way.
    pub(super) fn adopt(&self) {
        for word in self.words.iter() {
            let was = Use::of(word.load(Acquire));
            let now = if was == Use::Cleaning { Use::Written } else { was };
            word.store(now.word(0), Release);
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Segment> + use<> {
        (0..self.words.len() as u32).map(Segment)
    }

    fn word(&self, segment: Segment) -> &Kept<AtomicU32> {
        &self.words[segment.0 as usize]
    }

    pub(crate) fn state(&self, segment: Segment) -> Use {
        Use::of(self.word(segment).load(Acquire))
    }

    /// Bytes of live records in it.
    pub(crate) fn live(&self, segment: Segment) -> usize {
        (self.word(segment).load(Acquire) & Use::LIVE) as usize
    }

    /// Puts a segment to another use. `false` if it is not what it was thought to be.
    pub(crate) fn turn(&self, segment: Segment, from: Use, to: Use) -> bool {
        let turn = |word| (Use::of(word) == from).then(|| to.word(word & Use::LIVE));
        self.word(segment).fetch_update(AcqRel, Acquire, turn).is_ok()
    }

    /// The segment is written, or left as it is by cleaning; `true` if nothing in it is live, so
    /// that the caller gives it back.
    pub(crate) fn written(&self, segment: Segment) -> bool {
        let turned = self.turn(segment, Use::Open, Use::Written)
            || self.turn(segment, Use::Cleaning, Use::Written);
        debug_assert!(turned, "{segment:?} was {:?}", self.state(segment));
        self.claim_dead(segment)
    }

    /// Whether the caller is the one to give a written segment without live records back.
    fn claim_dead(&self, segment: Segment) -> bool {
        let (dead, claimed) = (Use::Written.word(0), Use::Open.word(0));
        self.word(segment).compare_exchange(dead, claimed, AcqRel, Acquire).is_ok()
    }

    /// `bytes` at a place became live.
    pub(crate) fn add(&self, segment: Segment, bytes: usize) {
        self.word(segment).fetch_add(bytes as u32, AcqRel);
    }

    /// They are no longer referred to; `true` if that was the last of a written segment, which the
    /// caller gives back.
    pub(crate) fn remove(&self, segment: Segment, bytes: usize) -> bool {
        let before = self.word(segment).fetch_sub(bytes as u32, AcqRel);
        debug_assert!(
            before & Use::LIVE >= bytes as u32,
            "more dies in a segment than lived there"
        );
        before & Use::LIVE == bytes as u32 && self.claim_dead(segment)
    }

    /// The written segment with the fewest live bytes.
    pub(crate) fn cheapest(&self) -> Option<Segment> {
        self.all()
            .filter(|segment| self.state(*segment) == Use::Written)
            .min_by_key(|segment| self.live(*segment))
    }

    /// Segments given out slot by slot: each with its live slots.
    pub(crate) fn singles(&self) -> impl Iterator<Item = (Segment, usize)> {
        self.all()
            .filter(|segment| self.state(*segment) == Use::Singles)
            .map(|segment| (segment, self.live(segment) / SLOT_BYTES))
    }

    /// Bytes of live records in all.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.all().map(|segment| self.live(segment) as u64).sum()
    }

    /// Bytes of the table.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * size_of::<AtomicU32>()
    }
}
