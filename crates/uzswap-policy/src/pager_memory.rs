//! The memory that a pager has for pages and for their compressed copies.

use crate::costs::BACKING;
use crate::pool_share::bytes_for_pool;

/// Bytes of a present page.
pub const PAGE_BYTES: u64 = 4096;

/// Bytes of a pager's tables, of its reserve, and of the slack of its pool. A pager of 26 to 38 MiB
/// takes 2.2 to 4 million bytes for these.
const OWN: u64 = 7 << 19;

/// Bytes of the buffers from which a pager on two processors writes to its backing: three for the
/// maintaining thread, and one for each processor, of 256 KiB.
const BUFFERS: u64 = 5 << 18;

/// Bytes of a pager with a backing besides its pool, without free memory that is kept ahead.
const BESIDE_POOL: u64 = BUFFERS + (1 << 20);

/// Memory that the pool keeps ahead: a part of the pager's memory, from 256 KiB to 1 MiB for each
/// of two processors.
const AHEAD_PART: u64 = 64;
const AHEAD: (u64, u64) = (256 << 10, 2 << 20);

/// Bytes of a section, by which the pool grows.
const SECTION: u64 = 2 << 20;

/// Bytes of a pool that is not made smaller, as in the pager.
const POOL_LEAST: u64 = 2 * SECTION;

/// Writeback begins above this part of the pool's limit, percent.
const ACCEPTED: u64 = 90;

/// The memory of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagerMemory {
    /// Bytes for present pages and the pool.
    bytes: u64,
    backing: Option<Beside>,
}

/// A pager with a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Beside {
    /// All memory of the pager, bytes.
    memory: u64,
    /// The time of a read, ns.
    read_nanos: u64,
}

impl PagerMemory {
    /// Bytes for present pages and a pool whose limit does not move.
    pub fn of_bytes(bytes: u64) -> Self {
        Self { bytes, backing: None }
    }

    /// The room of a pager with this memory. `read_nanos` is the time of a read of its backing, if
    /// it has one.
    ///
    /// Reclaim keeps one to two 64ths free, and at least 128 to 256 pages.
    pub fn of_pager(memory: u64, read_nanos: Option<u64>) -> Self {
        let margin = (memory / 64).max(128 * PAGE_BYTES);
        let buffers = if read_nanos.is_some() { BUFFERS } else { 0 };
        let bytes = memory.saturating_sub(OWN + buffers + margin + margin / 2);
        Self { bytes, backing: read_nanos.map(|read_nanos| Beside { memory, read_nanos }) }
    }

    /// Bytes for present pages and the pool.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The same without some bytes.
    pub(crate) fn less(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.saturating_sub(bytes), ..self }
    }

    /// True if the pool's limit moves.
    pub(crate) fn has_backing(self) -> bool {
        self.backing.is_some()
    }

    /// The time of a read of the backing, ns. Without a backing, the time of a usual backing.
    pub(crate) fn read_nanos(self) -> u64 {
        self.backing.map_or((BACKING * 1e3) as u64, |backing| backing.read_nanos)
    }

    /// Bytes of the pool beyond which its oldest pages leave it, after `steps` steps of
    /// [`crate::pool_share`].
    pub(crate) fn pool_bytes_max(self, steps: u32) -> u64 {
        let Some(Beside { memory, .. }) = self.backing else {
            return bytes_for_pool(self.bytes, 0);
        };
        let ahead = (memory / AHEAD_PART).clamp(AHEAD.0, AHEAD.1);
        let limit_after = |steps| {
            let bytes = bytes_for_pool(memory, steps).saturating_sub(BESIDE_POOL);
            (bytes / SECTION * SECTION).saturating_sub(ahead)
        };
        let least = limit_after(0).min(POOL_LEAST);
        limit_after(steps).max(least) * ACCEPTED / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_pager_takes_a_part_for_itself_and_keeps_a_part_free() {
        let room = |memory| PagerMemory::of_pager(memory, None).bytes();
        assert_eq!(room(32 * MIB), 32 * MIB - OWN - 192 * PAGE_BYTES);
        assert_eq!(room(6400 * MIB), 6400 * MIB - OWN - 150 * MIB);
        assert_eq!(room(MIB), 0);
        assert_eq!(PagerMemory::of_pager(32 * MIB, Some(1)).bytes(), room(32 * MIB) - BUFFERS);
    }

    #[test]
    fn the_pool_of_a_pager_with_a_backing_becomes_smaller_by_sections() {
        assert_eq!(
            PagerMemory::of_bytes(64 * MIB).pool_bytes_max(9),
            56 * MIB,
            "without a backing"
        );
        let room = PagerMemory::of_pager(64 * MIB, Some(100_000));
        // 56 MiB less 2.25 are 53.75, or 26 sections. One MiB of these is kept ahead, and writeback
        // begins at 90 % of the others.
        assert_eq!(room.pool_bytes_max(0), 51 * MIB * 9 / 10);
        assert_eq!(room.pool_bytes_max(1), 51 * MIB * 9 / 10);
        assert_eq!(room.pool_bytes_max(2), 49 * MIB * 9 / 10);
        assert_eq!(PagerMemory::of_pager(16 * MIB, Some(1)).pool_bytes_max(40), 4 * MIB * 9 / 10);
    }
}
