//! Counts of requests, and the times of reads.

use histogram::AtomicHistogram;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_engine::backing::RemoteFigures;

/// Resolution of the times: 2^5 buckets to a power of two, so 3 %; up to 2^36 ns, a minute.
const GROUPING: u8 = 5;
const MAX_POWER: u8 = 36;

/// See the module.
pub(crate) struct Figures {
    times: AtomicHistogram,
    reads: AtomicU64,
    bytes_read: AtomicU64,
    writes: AtomicU64,
    bytes_written: AtomicU64,
    errors: AtomicU64,
    lost: AtomicU64,
    full: AtomicU64,
}

impl Figures {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            times: AtomicHistogram::new(GROUPING, MAX_POWER).expect("constants in range"),
            reads: zero(),
            bytes_read: zero(),
            writes: zero(),
            bytes_written: zero(),
            errors: zero(),
            lost: zero(),
            full: zero(),
        }
    }

    pub(crate) fn read(&self, bytes: usize, time: Duration) {
        self.reads.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(bytes as u64, Relaxed);
        let ns = (time.as_nanos() as u64).min((1 << MAX_POWER) - 1);
        // In range by the line above.
        let _ = self.times.increment(ns);
    }

    pub(crate) fn written(&self, bytes: usize) {
        self.writes.fetch_add(1, Relaxed);
        self.bytes_written.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    pub(crate) fn lost(&self) {
        self.lost.fetch_add(1, Relaxed);
    }

    pub(crate) fn full(&self) {
        self.full.fetch_add(1, Relaxed);
    }

    /// All of them; the rest of the figures stays as by default.
    pub(crate) fn all(&self) -> RemoteFigures {
        let get = |count: &AtomicU64| count.load(Relaxed);
        RemoteFigures {
            reads: get(&self.reads),
            bytes_read: get(&self.bytes_read),
            writes: get(&self.writes),
            bytes_written: get(&self.bytes_written),
            errors: get(&self.errors),
            lost: get(&self.lost),
            full: get(&self.full),
            read_ns: self.percentiles(),
            ..RemoteFigures::default()
        }
    }

    fn percentiles(&self) -> [u64; 2] {
        let times = self.times.load();
        [0.5, 0.99].map(|share| {
            let found = times.quantile_bucket(share).ok().flatten();
            found.map_or(0, |bucket| bucket.end())
        })
    }
}
