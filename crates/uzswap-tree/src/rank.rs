//! The order in which the processes of a tree are favoured: working ones, then idle ones, both by
//! age.

use crate::table::ProcessSlot;
use crate::{Table, Tree, clock, milliseconds};
use std::sync::atomic::Ordering::Relaxed;

/// The place of a process in that order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// True if the process works much less than others do.
    pub is_idle: bool,
    /// The time at which it began, or at which [`Table::put_last`] moved it, milliseconds.
    pub began: u64,
    pub slot: usize,
}

/// A process becomes idle when the busiest process works more than this many times as much. It
/// stays idle while the busiest process works more than half this many times as much.
const IDLE: u64 = 16;

/// True if a process is idle. `worked` is its recent work, `most` that of the busiest process. Both
/// are thousandths of a CPU's time.
pub fn is_idle(was_idle: bool, worked: u64, most: u64) -> bool {
    worked * if was_idle { IDLE / 2 } else { IDLE } < most.min(1000)
}

/// Milliseconds between two measurements of a process's work. After [`WORK_FORGOTTEN`] without a
/// measurement, measuring begins anew.
const WORK_EVERY: u64 = 100;
const WORK_FORGOTTEN: u64 = 2000;

impl Tree {
    /// CPUs of all processes; 1, if that is not known yet.
    pub fn cpus(&self) -> u64 {
        self.table().cpus.load(Relaxed).max(1)
    }

    fn is_idle(&self, slot: &ProcessSlot) -> bool {
        let worked = |slot: &ProcessSlot| slot.worked.load(Relaxed);
        let most = self.table.used_slots().iter().filter(|slot| slot.used.load(Relaxed) > 0);
        let most = most.map(worked).max().unwrap_or(0);
        is_idle(slot.idle.load(Relaxed) != 0, worked(slot), most)
    }

    /// Measures the work of this process, at most ten times a second.
    pub(crate) fn measure_work(&self) {
        let now = clock();
        let passed = now.saturating_sub(self.worked_at.load(Relaxed));
        let Some(slot) = self.own() else { return };
        if passed < WORK_EVERY {
            return;
        }
        let worked = milliseconds(libc::CLOCK_PROCESS_CPUTIME_ID);
        let before = self.worked.swap(worked, Relaxed);
        self.worked_at.store(now, Relaxed);
        if passed < WORK_FORGOTTEN {
            slot.work(worked.saturating_sub(before) * 1000 / passed);
            slot.idle.store(self.is_idle(slot).into(), Relaxed);
        }
    }
}

impl Table {
    /// Sets how far the first processes are favoured, in parts of [`crate::share::FAVOUR`], and the
    /// number of CPUs of all processes.
    pub fn favour(&self, parts: u64, cpus: u64) {
        self.cpus.store(cpus, Relaxed);
        self.favour.store(parts, Relaxed);
    }

    /// The name of the process that ranks first; `None` if there are fewer than two.
    pub fn first(&self) -> Option<u64> {
        let slots = self.used_slots().iter().enumerate();
        let mut large: Vec<_> = slots
            .filter(|(_, slot)| slot.used.load(Relaxed) > 0 && slot.name().may_live(0))
            .map(|(at, slot)| (slot.rank(at), slot.name().0))
            .collect();
        large.sort_unstable();
        large.first().filter(|_| large.len() > 1).map(|(_, name)| *name)
    }

    /// Makes the process with this name the last.
    pub fn put_last(&self, name: u64, now: u64) {
        let slot = self.used_slots().iter().find(|slot| slot.name().0 == name);
        slot.inspect(|slot| slot.began.store(now, Relaxed));
    }
}

impl ProcessSlot {
    /// Adds a measurement of its work, in thousandths of a CPU's time. The last half second counts
    /// most.
    pub(crate) fn work(&self, now: u64) {
        let before = self.worked.load(Relaxed);
        let worked = if before == 0 { now } else { (before * 3 + now) / 4 };
        self.worked.store(worked, Relaxed);
    }

    pub(crate) fn rank(&self, slot: usize) -> Rank {
        let (is_idle, began) = (self.idle.load(Relaxed) != 0, self.began.load(Relaxed));
        Rank { is_idle, began, slot }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_much_less_than_another_is_idle_until_it_works_twice_as_much() {
        assert!(is_idle(false, 62, 1000) && !is_idle(false, 63, 1000));
        assert!(is_idle(true, 124, 1000) && !is_idle(true, 125, 1000));
        // 24 compilers on two CPUs, beside a process that has just had a CPU for itself.
        assert!(!is_idle(false, 83, 4000), "it may have several threads");
        assert!(!is_idle(false, 0, 0));
    }

    #[test]
    fn processes_that_work_come_first_and_the_older_before_the_younger() {
        let rank = |is_idle, began, slot| Rank { is_idle, began, slot };
        assert!(rank(false, 9, 9) < rank(true, 1, 1));
        assert!(rank(false, 1, 9) < rank(false, 9, 1));
        assert!(rank(false, 1, 1) < rank(false, 1, 9));
    }
}
