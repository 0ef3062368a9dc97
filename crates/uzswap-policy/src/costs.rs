//! The time that a program loses to faults, reckoned from their number.
//!
//! Measured in-process with lz4, with the page that leaves for the one that comes
//! (docs/design/policy.md). Only a read of the backing is assumed: that of a solid-state disk.

use crate::replay::Counts;

/// A touch of a page in the pool, µs.
pub const POOL: f64 = 13.0;
/// A touch of a page on its way out, µs.
pub const STAGED: f64 = 5.0;
/// A touch of a page on the backing, µs.
pub const BACKING: f64 = 100.0;

/// The time lost, µs. First touches are not counted: they cost as much in any memory.
pub fn lost_micros(counts: &Counts) -> f64 {
    let from_pool = counts.faults() - counts.from_backing;
    from_pool as f64 * POOL + counts.from_backing as f64 * BACKING + counts.staged as f64 * STAGED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_touch_has_its_price() {
        let counts = Counts {
            touches: 100,
            misses: 30,
            first: 10,
            from_backing: 2,
            staged: 4,
            ..Counts::default()
        };
        assert_eq!(lost_micros(&counts), 18.0 * POOL + 2.0 * BACKING + 4.0 * STAGED);
    }
}
