//! The activity of the processes of a tree at a store in another machine's memory.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The number of buckets of read times, by powers of two. The engine has the same number.
pub const TIMES: usize = 27;
const COUNTS: usize = 3 + TIMES;

/// The activity of a process at the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Remote {
    /// Bytes of segments that were written to the store.
    pub written: u64,
    /// Requests that failed or were not answered in time.
    pub errors: u64,
    /// Segments that the store no longer had, or had only a part of.
    pub lost: u64,
    /// Reads that the store answered, by the powers of two of their times.
    pub times: [u64; TIMES],
}

impl Remote {
    fn counts(&self) -> [u64; COUNTS] {
        let others = [self.written, self.errors, self.lost];
        std::array::from_fn(|at| others.get(at).copied().unwrap_or_else(|| self.times[at - 3]))
    }

    fn of(counts: [u64; COUNTS]) -> Self {
        let [written, errors, lost, ..] = counts;
        Self { written, errors, lost, times: std::array::from_fn(|at| counts[3 + at]) }
    }
}

/// Sums of [`Remote`], which any thread may add to.
#[derive(Debug)]
#[repr(transparent)]
pub struct RemoteSums([AtomicU64; COUNTS]);

impl RemoteSums {
    /// All zero.
    #[allow(clippy::new_without_default, reason = "it is for a static")]
    pub const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; COUNTS])
    }

    /// Adds activity.
    pub fn add(&self, since: &Remote) {
        let all = self.0.iter().zip(since.counts()).filter(|(_, count)| *count > 0);
        all.for_each(|(sum, count)| _ = sum.fetch_add(count, Relaxed));
    }

    /// Replaces the counts by `now`, which never falls. Returns their growth.
    pub fn advance(&self, now: &Remote) -> Remote {
        let mut counts = now.counts();
        for (sum, count) in self.0.iter().zip(&mut counts) {
            *count = count.saturating_sub(sum.swap(*count, Relaxed));
        }
        Remote::of(counts)
    }

    /// The sums.
    pub fn get(&self) -> Remote {
        Remote::of(std::array::from_fn(|at| self.0[at].load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_growth_of_several_processes_counts_is_added() {
        let mut first = Remote { written: 5, errors: 1, lost: 2, times: [0; TIMES] };
        (first.times[0], first.times[TIMES - 1]) = (4, 3);
        let (sums, told) = (RemoteSums::new(), RemoteSums::new());
        sums.add(&told.advance(&first));
        assert_eq!(sums.get(), first);
        let second = Remote { written: 9, ..first };
        assert_eq!(told.advance(&second), Remote { written: 4, ..Remote::default() });
        sums.add(&first);
        let mut twice = Remote { written: 10, errors: 2, lost: 4, times: [0; TIMES] };
        (twice.times[0], twice.times[TIMES - 1]) = (8, 6);
        assert_eq!(sums.get(), twice);
    }
}
