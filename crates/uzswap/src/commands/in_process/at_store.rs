//! The report's line of a store in another machine's memory.

use crate::size;
use serde::Serialize;
use std::fmt;
use uzswap_engine::times::ByPower;
use uzswap_tree::Remote;

/// The activity of all processes at the store.
#[derive(Debug, Serialize)]
pub struct AtStore {
    /// The peak of the bytes of all segments at the store, sampled five times a second.
    peak: u64,
    /// Bytes of segments that were written to the store.
    written: u64,
    /// Reads that the store answered.
    reads: u64,
    /// Median and 99th percentile of the reads' times, ns, by the powers of two around them.
    read_ns_p50: u64,
    read_ns_p99: u64,
    /// Requests that failed or were not answered in time.
    errors: u64,
    /// Segments that the store no longer had, or had only a part of.
    lost: u64,
}

impl AtStore {
    /// Computes the figures from the sums and the peak of a run.
    pub fn new(sums: &Remote, peak: u64) -> Self {
        let times = ByPower { counts: sums.times, sum_ns: 0 };
        let ns = |share| times.quantile_ns(share).unwrap_or(0);
        Self {
            peak,
            written: sums.written,
            reads: sums.times.iter().sum(),
            read_ns_p50: ns(0.5),
            read_ns_p99: ns(0.99),
            errors: sums.errors,
            lost: sums.lost,
        }
    }
}

impl fmt::Display for AtStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = |ns: u64| ns as f64 / 1000.0;
        write!(
            f,
            "{} at its peak, {} written; {} reads in {:.0} us (p50), {:.0} us (p99); {} errors, {} \
             segments lost",
            size::show(self.peak),
            size::show(self.written),
            self.reads,
            us(self.read_ns_p50),
            us(self.read_ns_p99),
            self.errors,
            self.lost,
        )
    }
}
