//! Decides how much the oldest processes of a tree are favoured.
//!
//! Processes have equal shares while these suffice. If the shares are too small, all processes do
//! little but fault. Then the oldest processes get all the memory that they use, in order of age,
//! and the youngest get only their least. The oldest run at full speed, end, and leave their memory
//! to the next. `share.rs` in `uzswap-tree` computes the shares.
//!
//! The favour follows the fault rate of all processes. The favour grows fast and falls slowly, so
//! that it outlasts the thrashing that it has ended.

use std::time::Duration;

/// Time between two counts of faults.
pub const EVERY: Duration = Duration::from_millis(200);

/// Parts of the whole favour.
pub const WHOLE: u64 = 64;

/// The favour grows at this many faults a second for each CPU, and falls below the second number.
/// `MANY` faults take a fifth of a CPU's time, and more of the processes' time.
const MANY: u64 = 10_000;
const FEW: u64 = 2500;

/// Parts by which the favour grows and falls at a count: it is whole after 0.8 seconds, and gone
/// after 13.
const GROWS: u64 = 16;
const FALLS: u64 = 1;

/// Counts for which a process is the first: 20 seconds. Then that process becomes the last.
const TURN: u32 = 100;

/// See the module. The default is no favour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Favour {
    parts: u64,
    /// The process that is the first, and the counts since it became so.
    first: Option<u64>,
    counts: u32,
}

impl Favour {
    /// The favour after a count: all processes had `faults` on `cpus` CPUs. `first` is the process
    /// whose turn it is, if there are several processes.
    #[must_use]
    pub fn after(self, faults: u64, cpus: u64, first: Option<u64>) -> Self {
        let in_a_second = faults * 1000 / EVERY.as_millis() as u64;
        let parts = match in_a_second / cpus.max(1) {
            MANY.. => (self.parts + GROWS).min(WHOLE),
            FEW.. => self.parts,
            _ => self.parts.saturating_sub(FALLS),
        };
        let counts = if first == self.first && parts > 0 { self.counts + 1 } else { 0 };
        Self { parts, first, counts }
    }

    /// Parts of [`WHOLE`].
    pub fn parts(&self) -> u64 {
        self.parts
    }

    /// The process whose turn is over, if there is one. From now on it ranks last.
    pub fn is_over(&self) -> Option<u64> {
        self.first.filter(|_| self.counts >= TURN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Faults of a count on two CPUs, of which each has `in_a_second`.
    fn count(in_a_second: u64) -> u64 {
        in_a_second * 2 / 5
    }

    #[test]
    fn favour_is_whole_soon_after_thrashing_began_and_gone_long_after_its_end() {
        let mut favour = Favour::default();
        let mut after = |counts, faults| {
            for _ in 0..counts {
                favour = favour.after(count(faults), 2, None);
            }
            favour.parts()
        };
        assert_eq!([after(9, MANY - 1), after(1, MANY), after(3, MANY)], [0, GROWS, WHOLE]);
        assert_eq!([after(9, MANY), after(99, FEW)], [WHOLE; 2]);
        assert_eq!([after(1, FEW - 5), after(62, 0), after(2, 0)], [63, 1, 0]);
    }

    #[test]
    fn each_process_is_the_first_for_twenty_seconds() {
        let mut favour = Favour::default();
        for turn in 0..3 {
            for at in 0..=TURN {
                assert!(favour.is_over() != Some(turn), "{turn} {at}");
                favour = favour.after(count(MANY), 2, Some(turn));
            }
            assert_eq!(favour.is_over(), Some(turn));
        }
        assert_eq!(EVERY * TURN, Duration::from_secs(20));
    }

    #[test]
    fn no_turn_ends_where_no_process_is_favoured() {
        let mut favour = Favour::default();
        for _ in 0..2 * TURN {
            favour = favour.after(0, 2, Some(1));
            assert_eq!((favour.parts(), favour.is_over()), (0, None));
        }
    }
}
