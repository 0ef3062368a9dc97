//! Counts of requests, and the times of reads.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_engine::backing::RemoteFigures;
use uzswap_engine::times::Times;

/// The counts and times of a store.
#[derive(Default)]
pub(crate) struct StoreFigures {
    /// The times of reads.
    pub(crate) times: Times,
    reads: AtomicU64,
    bytes_read: AtomicU64,
    writes: AtomicU64,
    bytes_written: AtomicU64,
    errors: AtomicU64,
    lost: AtomicU64,
    full: AtomicU64,
}

impl StoreFigures {
    pub(crate) fn read(&self, bytes: usize, time: Duration) {
        self.reads.fetch_add(1, Relaxed);
        self.bytes_read.fetch_add(bytes as u64, Relaxed);
        self.times.count(time);
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

    /// The figures of this store. The other fields have their defaults.
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
            ..RemoteFigures::default()
        }
    }
}
