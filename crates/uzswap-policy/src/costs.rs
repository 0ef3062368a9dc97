//! The time that a program loses to faults, reckoned from their number; and the memory that a pager
//! takes for itself.
//!
//! The times were measured in-process with lz4, and include storing the page that makes room
//! (docs/design/policy.md). Only the read of the backing is assumed: that of a solid-state disk.

use crate::replay::{PAGE_BYTES, ReplayCounts};

/// A touch of a page in the pool, µs.
pub const POOL: f64 = 13.0;
/// A touch of a page on its way out, µs.
pub const STAGED: f64 = 5.0;
/// A touch of a page on the backing, µs.
pub const BACKING: f64 = 100.0;

/// The time lost, µs. First touches are not counted: they cost as much in any memory.
pub fn lost_micros(counts: &ReplayCounts) -> f64 {
    let from_pool = counts.faults() - counts.from_backing;
    from_pool as f64 * POOL + counts.from_backing as f64 * BACKING + counts.staged as f64 * STAGED
}

/// Bytes of a pager's tables, of its reserve, and of the slack of its pool. A pager of 26 to 38 MiB
/// has 2.2 to 4 million.
const OWN: u64 = 7 << 19;

/// Bytes that a pager with this much memory has for pages and their compressed copies, on average.
/// Reclaim keeps one to two 64ths free, and at least 128 to 256 pages.
pub fn for_pages(memory: u64) -> u64 {
    let margin = (memory / 64).max(128 * PAGE_BYTES);
    memory.saturating_sub(OWN + margin + margin / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_touch_has_its_price() {
        let counts = ReplayCounts {
            touches: 100,
            misses: 30,
            first: 10,
            from_backing: 2,
            staged: 4,
            ..ReplayCounts::default()
        };
        assert_eq!(lost_micros(&counts), 18.0 * POOL + 2.0 * BACKING + 4.0 * STAGED);
    }

    #[test]
    fn a_pager_takes_a_part_for_itself_and_keeps_a_part_free() {
        const MIB: u64 = 1 << 20;
        assert_eq!(for_pages(32 * MIB), 32 * MIB - OWN - 192 * PAGE_BYTES);
        assert_eq!(for_pages(6400 * MIB), 6400 * MIB - OWN - 150 * MIB);
        assert_eq!(for_pages(MIB), 0);
    }
}
