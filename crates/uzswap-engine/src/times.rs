//! The times of reads: counted without a lock or an allocation, reported as quantiles and by powers
//! of two.

use histogram::{AtomicHistogram, Histogram};
use std::time::Duration;

/// Resolution: 2^5 buckets to a power of two, so 3 %; up to 2^36 ns, a minute.
const GROUPING: u8 = 5;
const MAX_POWER: u8 = 36;
/// The first power of two that bounds times: 1 µs.
const MIN_POWER: u8 = 10;

/// Powers of two that bound times, from 1 µs to a minute.
pub const POWERS: usize = (MAX_POWER - MIN_POWER + 1) as usize;

/// Counts of times. Any thread may count a time.
pub struct Times(AtomicHistogram);

/// The times that were counted until a moment.
pub struct Counted(Histogram);

/// Numbers of times by powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByPower {
    /// The number of times up to [`bound_ns`] of this place, and above that of the previous place.
    pub counts: [u64; POWERS],
    /// All times together, ns, to 2 %: the sum follows from the counts.
    pub sum_ns: u64,
}

/// The upper bound of a place of [`ByPower`], ns.
pub fn bound_ns(place: usize) -> u64 {
    1 << (usize::from(MIN_POWER) + place)
}

impl Default for Times {
    fn default() -> Self {
        Self(AtomicHistogram::new(GROUPING, MAX_POWER).expect("constants in range"))
    }
}

impl Times {
    /// Counts a time. A time above the last bound counts as that bound.
    pub fn count(&self, time: Duration) {
        let ns = (time.as_nanos() as u64).min((1 << MAX_POWER) - 1);
        // This cannot fail: the line above brings the time into the range.
        let _ = self.0.increment(ns);
    }

    /// The times that were counted.
    pub fn counted(&self) -> Counted {
        Counted(self.0.load())
    }
}

impl Counted {
    /// The sum of all times; `None` if there are none.
    pub fn sum(all: impl Iterator<Item = Self>) -> Option<Self> {
        all.reduce(|sum, one| Self(sum.0.checked_add(&one.0).expect("of one resolution")))
    }

    /// The time that `share` (0 to 1) of the reads did not exceed, in ns; `None` without reads.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        Some(self.0.quantile_bucket(share).ok()??.end())
    }

    /// Counts by powers of two.
    pub fn by_power(&self) -> ByPower {
        let mut by_power = ByPower::default();
        for bucket in &self.0 {
            by_power.sum_ns +=
                bucket.count() * (bucket.start() + (bucket.end() - bucket.start()) / 2);
            let mut places = (0..POWERS).filter(|place| bucket.end() <= bound_ns(*place));
            // Within the last place: no time is longer.
            places.next().into_iter().for_each(|place| by_power.counts[place] += bucket.count());
        }
        by_power
    }
}

impl ByPower {
    /// The times that were counted since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let counts = std::array::from_fn(|at| self.counts[at].saturating_sub(before.counts[at]));
        Self { counts, sum_ns: self.sum_ns.saturating_sub(before.sum_ns) }
    }

    /// The time that `share` (0 to 1) of the reads did not exceed, in ns, if the times of one place
    /// are spread evenly over it; `None` without reads.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let all: u64 = self.counts.iter().sum();
        let mut left = share * all as f64;
        for (place, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            if left <= *count as f64 {
                let first = if place == 0 { 0 } else { bound_ns(place - 1) };
                let part = left.max(0.0) / *count as f64;
                return Some(first + ((bound_ns(place) - first) as f64 * part) as u64);
            }
            left -= *count as f64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_by_quantiles_and_by_powers() {
        let times = Times::default();
        assert_eq!(times.counted().quantile_ns(0.5), None);
        assert_eq!(times.counted().by_power().quantile_ns(0.5), None);
        for us in 1..=100 {
            times.count(Duration::from_micros(us));
        }
        for (share, us) in [(0.5, 50), (0.99, 99)] {
            let exact = times.counted().quantile_ns(share).unwrap();
            assert!((us * 1000..us * 1040).contains(&exact), "{share}: {exact} ns, not {us} us");
            let near = times.counted().by_power().quantile_ns(share).unwrap();
            assert!((us * 800..us * 1350).contains(&near), "{share}: {near} ns, not {us} us");
        }
        let by_power = times.counted().by_power();
        assert_eq!(by_power.counts[..8], [1, 1, 2, 4, 8, 16, 33, 35], "{by_power:?}");
        assert!(by_power.sum_ns.abs_diff(5_050_000) < 100_000, "{by_power:?}");
        times.count(Duration::from_secs(1000));
        let since = times.counted().by_power().since(&by_power);
        assert_eq!((since.counts.iter().sum::<u64>(), since.counts[POWERS - 1]), (1, 1));
        let twice = Counted::sum([times.counted(), times.counted()].into_iter()).unwrap();
        assert_eq!(twice.by_power().counts.iter().sum::<u64>(), 202);
    }
}
