//! The backing's space, in segments.
//!
//! A segment is written once, whole, and then only loses records. The count of its live bytes tells
//! when it is free again, and, while it is not, which segment is cheapest to clean: its live
//! records are copied into another and it is free. So a log, cleaned greedily; with a fifth of the
//! space free it takes some three quarters of a segment copied for each one won, less where
//! neighbours die together, as the records of one program do.

use crate::backing::record::{RECORD_BYTES_MAX, record_bytes};
use crate::ids::Place;
use crate::index::Extent;
use crate::sync::atomic::{AtomicU8, AtomicU32, Ordering};

/// Bytes of a segment: large enough that a disk spends its time writing rather than seeking.
pub(crate) const SEGMENT_BYTES: usize = 256 << 10;

/// Segments that only cleaning may take, so that it can always make progress.
pub(crate) const RESERVED: usize = 2;

/// What a segment is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Use {
    /// Holds nothing.
    Free = 0,
    /// Taken; being filled or written. Never handed out or cleaned.
    Open = 1,
    /// Written. Free as soon as nothing in it is live.
    Written = 2,
    /// The same, and its records begin at multiples of a single page's step, with anything between.
    WrittenSingly = 3,
    /// Its live records are being copied elsewhere.
    Cleaning = 4,
}

/// A segment's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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
    state: Box<[AtomicU8]>,
    live: Box<[AtomicU32]>,
}

impl Segments {
    /// As many whole segments as fit in `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        let count = (bytes / SEGMENT_BYTES as u64) as usize;
        Self {
            state: (0..count).map(|_| AtomicU8::new(Use::Free as u8)).collect(),
            live: (0..count).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.state.len()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = Segment> + use<> {
        (0..self.state.len() as u32).map(Segment)
    }

    pub(crate) fn state(&self, segment: Segment) -> Use {
        match self.state[segment.0 as usize].load(Ordering::Acquire) {
            0 => Use::Free,
            1 => Use::Open,
            2 => Use::Written,
            3 => Use::WrittenSingly,
            _ => Use::Cleaning,
        }
    }

    pub(crate) fn set_state(&self, segment: Segment, state: Use) {
        self.state[segment.0 as usize].store(state as u8, Ordering::Release);
    }

    /// Bytes of live records in it.
    pub(crate) fn live(&self, segment: Segment) -> usize {
        self.live[segment.0 as usize].load(Ordering::Acquire) as usize
    }

    /// A record became live.
    pub(crate) fn add(&self, extent: Extent) {
        let bytes = record_bytes(extent.form) as u32;
        self.live[Segment::of(extent.place).0 as usize].fetch_add(bytes, Ordering::AcqRel);
    }

    /// A record is no longer referred to.
    pub(crate) fn remove(&self, extent: Extent) {
        let bytes = record_bytes(extent.form) as u32;
        let live = &self.live[Segment::of(extent.place).0 as usize];
        let before = live.fetch_sub(bytes, Ordering::AcqRel);
        debug_assert!(before >= bytes, "more bytes die in a segment than lived there");
    }

    /// Whether it can be filled: nothing in it is live and nobody is at it.
    pub(crate) fn is_free(&self, segment: Segment) -> bool {
        match self.state(segment) {
            Use::Free => true,
            Use::Written | Use::WrittenSingly => self.live(segment) == 0,
            Use::Open | Use::Cleaning => false,
        }
    }

    /// Whether no more than the reserved segments are free.
    pub(crate) fn is_short(&self) -> bool {
        self.all().filter(|segment| self.is_free(*segment)).take(RESERVED + 1).count() <= RESERVED
    }

    /// Whether `live` bytes of records, packed as tightly as records pack, would leave more than
    /// the reserved segments free.
    pub(crate) fn cleaning_can_win(&self, live: u64) -> bool {
        // One for the segment that pages written through are in, one to be won.
        let usable = self.count().saturating_sub(RESERVED + 2) as u64;
        live <= usable * (SEGMENT_BYTES - RECORD_BYTES_MAX) as u64
    }

    /// The written segment with the fewest live bytes.
    pub(crate) fn cheapest(&self) -> Option<Segment> {
        self.all()
            .filter(|s| matches!(self.state(*s), Use::Written | Use::WrittenSingly))
            .min_by_key(|segment| self.live(*segment))
    }

    /// Bytes of live records in all.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.all().map(|segment| self.live(segment) as u64).sum()
    }

    /// Bytes of the table.
    pub(crate) fn bytes(&self) -> usize {
        self.count() * (size_of::<AtomicU8>() + size_of::<AtomicU32>())
    }
}
