//! The part of a pager's memory that compressed pages may have, where there is a backing.
//!
//! Compressed pages that the program no longer touches take memory from the pages that it uses. On
//! the backing they would take none. But a page on the backing takes longer to come back. So the
//! pool becomes smaller while the reads of the backing take little time beside the faults that the
//! pool serves, and larger while they take much. The pager measures the reads: a slow disk takes a
//! hundred times as long as a fast one. A program without faults changes nothing.

use crate::costs::POOL;

/// Steps are 64ths of the memory. With the most steps, a quarter of the memory is left to the pool.
const STEP_PART: u64 = 64;
const STEPS_MAX: u32 = 40;

/// The part of the memory that the pool never has.
const FOR_PAGES_PART: u64 = 8;

/// Faults after which the part is set again, at first.
const EVERY: u64 = 1024;
const EVERY_MAX: u64 = EVERY << 12;

/// The pool becomes smaller while the reads take less than this part of the other faults' time.
const CHEAP: f64 = 0.125;
/// The pool becomes larger while the reads take more than this part.
const DEAR: f64 = 0.25;

/// Counts since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Loaded {
    /// Faults that the pool served. One fault may bring in many pages of a stream, in a tenth of
    /// the time that a fault for each page would take.
    pub pool: u64,
    /// Reads of the backing.
    pub reads: u64,
    /// The time of these reads, ns.
    pub read_nanos: u64,
}

/// See the module.
#[derive(Debug, Clone, Copy)]
pub struct PoolShare {
    steps: u32,
    every: u64,
    seen: Loaded,
}

impl Default for PoolShare {
    fn default() -> Self {
        Self { steps: 0, every: EVERY, seen: Loaded::default() }
    }
}

impl PoolShare {
    /// Decides by the faults since the last decision. `steps` is the decision in force. `steps` is
    /// 0 if the backing took no page, so that the pool needed all of its memory. After that, twice
    /// as many faults pass before the next step.
    pub fn tend(&mut self, steps: u32, seen: Loaded) -> u32 {
        if steps < self.steps {
            self.every = (self.every * 2).min(EVERY_MAX);
            (self.steps, self.seen) = (steps, seen);
        }
        let pool = seen.pool.saturating_sub(self.seen.pool);
        let reads = seen.reads.saturating_sub(self.seen.reads);
        if pool + reads < self.every {
            return self.steps;
        }
        let from_pool = pool as f64 * POOL;
        let from_backing = seen.read_nanos.saturating_sub(self.seen.read_nanos) as f64 / 1e3;
        self.seen = seen;
        if from_backing < from_pool * CHEAP {
            self.steps = (self.steps + 1).min(STEPS_MAX);
        } else if from_backing > from_pool * DEAR {
            self.steps = self.steps.saturating_sub(1);
        }
        self.steps
    }
}

/// Bytes of a memory of `bytes` that the pool may have after so many steps.
pub fn bytes_for_pool(bytes: u64, steps: u32) -> u64 {
    bytes - bytes / FOR_PAGES_PART - bytes / STEP_PART * u64::from(steps.min(STEPS_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The steps after `times` decisions, with so many loads, and reads of 100 µs, before each.
    fn after(share: &mut PoolShare, times: u64, (pool, reads): (u64, u64)) -> u32 {
        let mut seen = share.seen;
        for _ in 0..times {
            let read_nanos = seen.read_nanos + reads * 100_000;
            seen = Loaded { pool: seen.pool + pool, reads: seen.reads + reads, read_nanos };
            share.tend(share.steps, seen);
        }
        share.steps
    }

    #[test]
    fn the_pool_becomes_smaller_until_the_backing_is_read() {
        let mut share = PoolShare::default();
        assert_eq!(after(&mut share, 10, (2000, 0)), 10);
        assert_eq!(after(&mut share, 10, (2000, 50)), 10, "between cheap and dear");
        assert_eq!(after(&mut share, 4, (2000, 100)), 6, "10 000 beside 26 000 µs");
        assert_eq!(after(&mut share, 100, (2000, 0)), STEPS_MAX);
        assert_eq!(bytes_for_pool(6400, STEPS_MAX), 1600);
        assert_eq!(bytes_for_pool(6400, 0), 5600);
    }

    #[test]
    fn a_program_without_faults_changes_nothing() {
        let mut share = PoolShare::default();
        assert_eq!(after(&mut share, 3, (300, 0)), 0);
        assert_eq!(share.tend(0, Loaded { pool: 1000, ..Loaded::default() }), 0);
        assert_eq!(share.tend(0, Loaded { pool: 1024, ..Loaded::default() }), 1);
    }

    #[test]
    fn a_backing_that_took_no_page_is_tried_again_later() {
        let mut share = PoolShare::default();
        assert_eq!(after(&mut share, 3, (1024, 0)), 3);
        assert_eq!(share.tend(0, share.seen), 0);
        assert_eq!(after(&mut share, 1, (1024, 0)), 0);
        assert_eq!(after(&mut share, 1, (1024, 0)), 0, "counted from the last decision");
        let seen = Loaded { pool: share.seen.pool + 2048, ..share.seen };
        assert_eq!(share.tend(0, seen), 1);
    }

    #[test]
    fn a_slow_backing_is_read_seldom() {
        let mut share = PoolShare::default();
        assert_eq!(after(&mut share, 10, (2000, 0)), 10);
        let seen = share.seen;
        let read =
            |read_nanos| Loaded { pool: seen.pool + 2000, reads: seen.reads + 5, read_nanos };
        assert_eq!(
            share.tend(10, read(seen.read_nanos + 5 * 10_000_000)),
            9,
            "5 of 2000, 10 ms each"
        );
        let (mut fast, mut seen) = (PoolShare::default(), Loaded::default());
        for _ in 0..10 {
            seen = Loaded { pool: seen.pool + 2000, reads: seen.reads + 300, ..seen };
            seen.read_nanos += 300 * 10_000;
            fast.tend(fast.steps, seen);
        }
        assert_eq!(fast.steps, 10, "300 of 2000, 10 µs each");
    }
}
