//! The sizes and numbers of the backing's space: slots, segments and clusters.

use crate::ids::Place;

/// Bytes of a segment: large enough that a disk spends its time writing rather than seeking.
pub const SEGMENT_BYTES: usize = 256 << 10;

/// Bytes of a segment that records may take. In a remote store that uses jemalloc, a value with 256
/// bytes more would need the next size class: 327 736 bytes instead of 262 200.
pub const SEGMENT_PAYLOAD_BYTES: usize = SEGMENT_BYTES - 256;

/// Bytes of a slot: a page.
pub(crate) const SLOT_BYTES: usize = 4096;
/// Segments in a cluster, 2 MiB.
pub(crate) const CLUSTER_SEGMENTS: usize = 8;
pub(crate) const CLUSTER_BYTES: usize = CLUSTER_SEGMENTS * SEGMENT_BYTES;
/// Slots that a CPU's cache takes or gives together: a word of a cluster's bits, or a segment.
pub(super) const BATCH: usize = u64::BITS as usize;

pub(crate) const CLUSTER_SLOTS: usize = CLUSTER_SEGMENTS * BATCH;

const _: () = assert!(BATCH * SLOT_BYTES == SEGMENT_BYTES);

/// A segment's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Segment(pub(crate) u32);

impl Segment {
    /// The segment of a place.
    pub(crate) fn of(place: Place) -> Self {
        Self((place.byte() / SEGMENT_BYTES as u64) as u32)
    }

    /// Its offset on the backing in bytes.
    pub(crate) fn start(self) -> u64 {
        u64::from(self.0) * SEGMENT_BYTES as u64
    }
}

/// A slot's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    /// Its offset on the backing in bytes.
    pub(crate) fn start(self) -> u64 {
        u64::from(self.0) * SLOT_BYTES as u64
    }

    /// The slot at an offset.
    pub(crate) fn at(byte: u64) -> Self {
        Self((byte / SLOT_BYTES as u64) as u32)
    }

    pub(super) fn segment(self) -> Segment {
        Segment(self.0 / BATCH as u32)
    }

    pub(super) fn bit(self) -> u64 {
        1 << (self.0 % BATCH as u32)
    }
}
