//! Memory that an idle process leaves to busy ones.
//!
//! Equal shares give a process that waits for input as much memory as a process that works. A pager
//! cannot see which pages a process uses, but it sees the faults. A process with few faults, while
//! others have many, may not need all its memory. It gives a part back in small steps. When it
//! faults again, it regains several steps at a time.
//!
//! A process that uses all its memory, and fits into it, has no faults either. The first step of
//! such a process causes faults, which show the mistake. The process then waits, each time twice as
//! long.

use std::time::Duration;

/// Time between two counts of faults.
pub const EVERY: Duration = Duration::from_millis(200);

/// If all others have fewer faults in that time, no process lacks memory.
const MANY: u64 = 100;

/// A process is idle if the others have more than 32 times its faults, and 8 times on average.
const TIMES: u64 = 32;
const TIMES_EACH: u64 = 8;

/// Steps of the memory of a process, and the most that it gives back, which takes ten seconds.
const STEPS: u64 = 64;
const STEPS_MAX: u64 = 48;

/// Steps that a process regains at one count.
const UNDONE: u64 = 16;

/// A process that faults after this many steps or fewer was not idle.
const TRIED: u64 = 4;

/// The number of counts for which a process that was not idle waits, the first time and at most.
const WAIT_MIN: u64 = 8;
const WAIT_MAX: u64 = 128;

/// See the module. The default is the state of a busy process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Idleness {
    /// Steps that the process has given back.
    steps: u64,
    /// Bytes that the process had before the first step.
    had: u64,
    /// Counts that the process waits after a mistake, and the counts that are left of a wait.
    wait: u64,
    left: u64,
}

/// Faults since the last count.
#[derive(Debug, Clone, Copy)]
pub struct FaultCounts {
    /// Of the process.
    pub own: u64,
    /// Of all others.
    pub others: u64,
    /// The number of other processes.
    pub processes: u64,
}

impl FaultCounts {
    fn is_idle(&self) -> bool {
        let times = TIMES.max(TIMES_EACH * self.processes);
        self.others >= MANY && self.own.saturating_mul(times) < self.others
    }
}

impl Idleness {
    /// The idleness after a count. The process has `used` bytes now.
    #[must_use]
    pub fn after(self, faults: FaultCounts, used: u64) -> Self {
        if !faults.is_idle() {
            let wait = match self.steps {
                0 => self.wait,
                1..=TRIED if faults.others >= MANY => (2 * self.wait).clamp(WAIT_MIN, WAIT_MAX),
                _ => 0,
            };
            return Self { steps: self.steps.saturating_sub(UNDONE), wait, left: wait, ..self };
        }
        if self.left > 0 {
            return Self { left: self.left - 1, ..self };
        }
        let had = if self.steps == 0 { used } else { self.had };
        Self { steps: (self.steps + 1).min(STEPS_MAX), had, ..self }
    }

    /// The maximum number of bytes that the process may have.
    pub fn most(&self) -> u64 {
        match self.steps {
            0 => u64::MAX,
            steps => self.had - self.had / STEPS * steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(own: u64, others: u64) -> FaultCounts {
        FaultCounts { own, others, processes: 2 }
    }

    #[test]
    fn an_idle_process_gives_three_quarters_back_in_ten_seconds() {
        let mut idle = Idleness::default();
        assert_eq!(idle.most(), u64::MAX);
        let most: Vec<_> = (0..50)
            .map(|_| {
                idle = idle.after(faults(3, 1000), 6400);
                idle.most()
            })
            .collect();
        assert_eq!((most[0], most[1], most[31]), (6300, 6200, 3200));
        assert_eq!(most[47..], [1600; 3]);
        assert_eq!(u128::from(STEPS_MAX) * EVERY.as_millis(), 9600);
    }

    #[test]
    fn a_process_that_faults_again_has_its_share_back_within_a_second() {
        let mut idle = Idleness { steps: STEPS_MAX, had: 6400, ..Idleness::default() };
        let most = [(); 3].map(|()| {
            idle = idle.after(faults(32, 1000), 1600);
            idle.most()
        });
        assert_eq!(most, [3200, 4800, u64::MAX]);
        let again = idle.after(faults(0, 1000), 2000).most();
        assert_eq!(again, 2000 - 2000 / STEPS, "from its memory now");
    }

    #[test]
    fn a_process_that_uses_all_its_memory_is_tried_less_and_less_often() {
        let (mut idle, mut tried) = (Idleness::default(), Vec::new());
        for count in 0..400 {
            // The process has no fault until it loses memory.
            let own = if idle.most() == u64::MAX { 0 } else { 400 };
            idle = idle.after(faults(own, 5000), 6400);
            if idle.most() != u64::MAX {
                tried.push(count);
            }
        }
        assert_eq!(tried, [0, 10, 28, 62, 128, 258, 388]);
    }

    #[test]
    fn no_process_gives_memory_back_where_none_lacks_memory_or_all_are_busy() {
        let idle = |faults| Idleness::default().after(faults, 6400) != Idleness::default();
        assert!(!idle(faults(0, MANY - 1)) && !idle(faults(0, 0)));
        let of = |own| FaultCounts { own, others: 99 * 200, processes: 99 };
        assert!(!idle(of(200)) && !idle(of(25)), "an eighth of the others' mean");
        assert!(idle(of(24)));
    }
}
