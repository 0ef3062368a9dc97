//! The work of the server's threads: pages each way, and the times of serving reads.

use crossbeam_utils::CachePadded;
use histogram::{AtomicHistogram, Histogram};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use uzswap_engine::PAGE_BYTES;

/// Resolution of the times: 2^5 buckets to a power of two, so 3 %; up to 2^36 ns, a minute.
const GROUPING: u8 = 5;
const MAX_POWER: u8 = 36;

/// Powers of two that bound the times which are told one by one: 1 µs to a minute.
const TIMES: std::ops::RangeInclusive<u8> = 10..=MAX_POWER;

/// Counts of all threads; each has its own, so that no two write the same cache line.
pub struct Traffic {
    threads: Box<[CachePadded<Counts>]>,
}

/// Counts of one thread.
pub(crate) struct Counts {
    times: AtomicHistogram,
    pages_read: AtomicU64,
    pages_written: AtomicU64,
    pages_discarded: AtomicU64,
    errors: AtomicU64,
}

fn pages(bytes: u64) -> u64 {
    bytes / PAGE_BYTES as u64
}

impl Counts {
    fn new() -> Self {
        Self {
            times: AtomicHistogram::new(GROUPING, MAX_POWER).expect("constants in range"),
            pages_read: AtomicU64::new(0),
            pages_written: AtomicU64::new(0),
            pages_discarded: AtomicU64::new(0),
            errors: AtomicU64::new(0),
        }
    }

    pub(crate) fn read(&self, bytes: usize, time: Duration) {
        self.pages_read.fetch_add(pages(bytes as u64), Relaxed);
        let ns = (time.as_nanos() as u64).min((1 << MAX_POWER) - 1);
        // In range by the line above.
        let _ = self.times.increment(ns);
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
        Self { threads: (0..threads).map(|_| CachePadded::new(Counts::new())).collect() }
    }

    pub(crate) fn thread(&self, number: usize) -> &Counts {
        &self.threads[number]
    }

    fn sum(&self, count: impl Fn(&Counts) -> &AtomicU64) -> u64 {
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

    /// The time that `share` (0 to 1) of the reads did not exceed, from taking the request to
    /// having answered it, ns; `None` before the first.
    pub fn read_ns(&self, share: f64) -> Option<u64> {
        Some(self.times()?.quantile_bucket(share).ok()??.end())
    }

    /// For each power of two, the number of reads that took at most so many ns, and more than the
    /// power before. The time of all of them follows, to 2 %: no sum is kept on their way.
    pub fn read_times(&self) -> (Vec<(u64, u64)>, u64) {
        let mut counts: Vec<_> = TIMES.map(|power| (1 << power, 0)).collect();
        let mut sum = 0;
        for bucket in self.times().iter().flatten() {
            sum += bucket.count() * (bucket.start() + (bucket.end() - bucket.start()) / 2);
            let within = counts.iter_mut().find(|(ns, _)| bucket.end() <= *ns);
            // Within the last: no time is longer.
            within.into_iter().for_each(|(_, count)| *count += bucket.count());
        }
        (counts, sum)
    }

    fn times(&self) -> Option<Histogram> {
        let empty = Histogram::new(GROUPING, MAX_POWER).ok()?;
        self.threads.iter().try_fold(empty, |sum, one| sum.checked_add(&one.times.load())).ok()
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
        assert!(traffic.read_ns(1.0).unwrap() >= (1 << MAX_POWER) - 1);
    }
}
