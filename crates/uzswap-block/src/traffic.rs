//! The work of the server's threads: pages each way, and the times of serving reads.

use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::times::{Counted, Times};

/// Counts of all threads. Each thread has its own counts, so that no two threads write the same
/// cache line.
pub struct Traffic {
    threads: Box<[CachePadded<ThreadTraffic>]>,
}

/// Counts of one thread.
#[derive(Default)]
pub(crate) struct ThreadTraffic {
    times: Times,
    pages_read: AtomicU64,
    pages_written: AtomicU64,
    pages_discarded: AtomicU64,
    errors: AtomicU64,
}

fn pages(bytes: u64) -> u64 {
    bytes / PAGE_BYTES as u64
}

impl ThreadTraffic {
    pub(crate) fn read(&self, bytes: usize, time: Duration) {
        self.pages_read.fetch_add(pages(bytes as u64), Relaxed);
        self.times.count(time);
    }

    pub(crate) fn written(&self, bytes: usize) {
        self.pages_written.fetch_add(pages(bytes as u64), Relaxed);
    }

    pub(crate) fn discarded(&self, bytes: u64) {
        self.pages_discarded.fetch_add(pages(bytes), Relaxed);
    }

    pub(crate) fn failed(&self) {
        self.errors.fetch_add(1, Relaxed);
    }
}

impl Traffic {
    /// For `threads` threads.
    pub fn new(threads: usize) -> Self {
        Self { threads: (0..threads).map(|_| CachePadded::new(ThreadTraffic::default())).collect() }
    }

    pub(crate) fn thread(&self, number: usize) -> &ThreadTraffic {
        &self.threads[number]
    }

    fn sum(&self, count: impl Fn(&ThreadTraffic) -> &AtomicU64) -> u64 {
        self.threads.iter().map(|thread| count(thread).load(Relaxed)).sum()
    }

    /// Pages that the kernel read: swapped in.
    pub fn pages_read(&self) -> u64 {
        self.sum(|counts| &counts.pages_read)
    }

    /// Pages that the kernel wrote: swapped out.
    pub fn pages_written(&self) -> u64 {
        self.sum(|counts| &counts.pages_written)
    }

    /// Pages that the kernel discarded.
    pub fn pages_discarded(&self) -> u64 {
        self.sum(|counts| &counts.pages_discarded)
    }

    /// Requests answered with an error.
    pub fn errors(&self) -> u64 {
        self.sum(|counts| &counts.errors)
    }

    /// The time that `share` (0 to 1) of the reads did not exceed, from taking the request to its
    /// answer, ns; `None` before the first read.
    pub fn read_ns(&self, share: f64) -> Option<u64> {
        self.read_times()?.quantile_ns(share)
    }

    /// The times of all reads; `None` if there are no threads.
    pub fn read_times(&self) -> Option<Counted> {
        Counted::sum(self.threads.iter().map(|thread| thread.times.counted()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_all_threads_are_counted_together() {
        let traffic = Traffic::new(2);
        assert_eq!(traffic.read_ns(0.5), None);
        for i in 1..=100 {
            traffic.thread((i % 2) as usize).read(2 * PAGE_BYTES, Duration::from_micros(i));
        }
        assert_eq!(traffic.pages_read(), 200);
        let near = |share: f64, us: u64| {
            let got = traffic.read_ns(share).unwrap();
            assert!(got >= us * 1000 && got < us * 1040, "{share}: {got} ns, not {us} us");
        };
        near(0.5, 50);
        near(0.99, 99);
        traffic.thread(0).read(PAGE_BYTES, Duration::from_secs(1000));
        assert!(traffic.read_ns(1.0).unwrap() >= (1 << 36) - 1);
    }
}
