//! What to do when the memory of a group runs out.
//!
//! *Too early*: on version 1 of the cgroup interface, reclaim of a busy group now and then finds
//! nothing for a moment, although nearly all of it could be swapped: every page was just used, or
//! is being written. The kernel then ends a process at once. Seen in one of some two hundred runs
//! of eight processes with three times their limit, the machine being busy besides. So the killer
//! is held and the limit raised a little until it is over; where that does not help, it gets its
//! way.
//!
//! *Too late*: when pool and backing are full, each write to the device fails, and the kernel tries
//! again for as long as it likes: a process was seen in one page fault for ten minutes. So a group
//! that gets nowhere loses its largest process, as it would to the killer.

use crate::stats::Stats;
use std::fs;
use std::io;
use uzswap_sys::cgroup::Group;
use uzswap_sys::process;

/// Times in a row that the limit is raised, each time by one more step.
const STEPS_MAX: u32 = 5;

/// A step, as a share of the limit and at least, bytes.
const STEP_DIVISOR: u64 = 64;
const STEP_BYTES_MIN: u64 = 1 << 20;

/// Looks without trouble after which all is as at the start.
const CALM_LOOKS: u32 = 10;

/// Looks in a row without progress after which a process is ended.
const STUCK_LOOKS: u32 = 10;

/// No progress is at least so many refused pages between two looks, and so many for one page that
/// went in or out.
const REFUSED_MIN: u64 = 200;
const REFUSED_RATIO: u64 = 50;

/// What has to be done to a group; a trait so that it can be tested without one.
pub trait Limited {
    /// Whether its processes sleep for want of memory.
    fn waits(&self) -> bool;
    /// Holds the killer, or lets it go.
    fn hold(&self, hold: bool) -> io::Result<()>;
    /// Sets the limit, bytes.
    fn limit(&self, bytes: u64) -> io::Result<()>;
    /// Ends the process with most memory; which it was. None while one is on its way out: in the
    /// middle of a fault that may take seconds.
    fn end_largest(&self) -> Option<String>;
}

impl Limited for &Group {
    fn waits(&self) -> bool {
        self.waits_for_memory()
    }

    fn hold(&self, hold: bool) -> io::Result<()> {
        self.hold_oom_killer(hold)
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        self.set_limit(bytes)
    }

    fn end_largest(&self) -> Option<String> {
        let read = |pid: i32, file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        let status = |pid| Some((pid, read(pid, "status").ok()?));
        let all: Vec<_> = self.processes().into_iter().filter_map(status).collect();
        if all.iter().any(|(_, status)| is_killed(status)) {
            return None;
        }
        let (largest, _) = all.iter().max_by_key(|(_, status)| bytes(status))?;
        let name = read(*largest, "comm").unwrap_or_default();
        process::kill(*largest, libc::SIGKILL).ok()?;
        Some(format!("{} ({largest})", name.trim_end()))
    }
}

/// The values of some fields of a process's status.
fn fields<'a>(status: &'a str, names: &[&str]) -> impl Iterator<Item = &'a str> {
    let value = |line: &'a str| {
        let (name, value) = line.split_once(':')?;
        names.contains(&name).then_some(value.trim())
    };
    status.lines().filter_map(value)
}

/// Bytes in memory and swapped out, by a process's status.
fn bytes(status: &str) -> u64 {
    let kib = |value: &str| value.trim_end_matches(" kB").parse::<u64>().ok();
    1024 * fields(status, &["VmRSS", "VmSwap"]).filter_map(kib).sum::<u64>()
}

/// Whether a process has been sent SIGKILL and still goes on, by its status.
fn is_killed(status: &str) -> bool {
    let is_pending = |mask: &str| {
        u64::from_str_radix(mask, 16).is_ok_and(|mask| mask >> (libc::SIGKILL - 1) & 1 == 1)
    };
    fields(status, &["SigPnd", "ShdPnd"]).any(is_pending)
}

/// How far the pages got.
#[derive(Debug, Default, Clone, Copy)]
pub struct Progress {
    /// Pages that were taken or given back.
    pub moved: u64,
    /// Pages that were not taken.
    pub refused: u64,
}

impl From<&Stats> for Progress {
    fn from(stats: &Stats) -> Self {
        // The kernel repeats a request of which a part was refused: the rest of it is no progress.
        let stored = stats.get("stores").saturating_sub(stats.get("stores_unchanged"));
        let moved = stats.get("pages_swapped_in") + stored;
        Self { moved, refused: stats.get("request_errors") }
    }
}

/// Watches over one group.
pub struct Relief<G> {
    group: G,
    limit: u64,
    /// Steps that the limit is raised by; more than [`STEPS_MAX`]: the killer was let go.
    steps: u32,
    calm: u32,
    last: Progress,
    stuck: u32,
    /// Processes ended.
    ended: u64,
}

impl<G: Limited> Relief<G> {
    /// Holds the killer of a group limited to `limit` bytes. Where that fails, it acts as ever.
    pub fn new(group: G, limit: u64) -> Self {
        let _ = group.hold(true);
        Self { group, limit, steps: 0, calm: 0, last: Progress::default(), stuck: 0, ended: 0 }
    }

    /// Processes that it ended.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// Changes the limit. While it is raised, from the next time that all is calm.
    pub fn set_limit(&mut self, bytes: u64) {
        self.limit = bytes;
        if self.steps == 0 {
            // An error: so much cannot be swapped out just now; it is asked for again.
            let _ = self.group.limit(bytes);
        }
    }

    /// Looks once, and acts; called a few times a second. The process that it ended, if it did.
    pub fn tick(&mut self, now: Progress) -> Option<String> {
        self.tick_killer();
        let moved = now.moved.saturating_sub(self.last.moved);
        let refused = now.refused.saturating_sub(self.last.refused);
        self.last = now;
        let is_stuck = refused >= REFUSED_MIN && refused >= REFUSED_RATIO * moved;
        self.stuck = if is_stuck { self.stuck + 1 } else { 0 };
        if self.stuck < STUCK_LOOKS {
            return None;
        }
        self.stuck = 0;
        let name = self.group.end_largest()?;
        self.ended += 1;
        Some(name)
    }

    fn tick_killer(&mut self) {
        if self.steps <= STEPS_MAX && self.group.waits() {
            self.steps += 1;
            self.calm = 0;
            let step = (self.limit / STEP_DIVISOR).max(STEP_BYTES_MIN);
            let raised = self.limit + step * u64::from(self.steps);
            if self.steps > STEPS_MAX || self.group.limit(raised).is_err() {
                let _ = self.group.hold(false);
            }
        } else if self.steps > 0 {
            self.calm += 1;
            // Refused while the group is above it: then it is tried again.
            if self.calm >= CALM_LOOKS && self.group.limit(self.limit).is_ok() {
                let _ = self.group.hold(true);
                self.steps = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A group that waits while its limit is below what it needs.
    #[derive(Default)]
    struct Fake {
        need: u64,
        held: RefCell<bool>,
        limits: RefCell<Vec<u64>>,
    }

    impl Limited for &Fake {
        fn waits(&self) -> bool {
            *self.held.borrow() && self.limits.borrow().last().is_none_or(|now| *now < self.need)
        }

        fn hold(&self, hold: bool) -> io::Result<()> {
            *self.held.borrow_mut() = hold;
            Ok(())
        }

        fn limit(&self, bytes: u64) -> io::Result<()> {
            self.limits.borrow_mut().push(bytes);
            Ok(())
        }

        fn end_largest(&self) -> Option<String> {
            Some("it".into())
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_status_tells_size_and_whether_it_is_being_killed() {
        let status = |pending: u64| {
            let sizes = "VmPeak:\t 9999 kB\nVmRSS:\t  300 kB\nVmSwap:\t   40 kB\n";
            format!("Name:\tsh\n{sizes}SigPnd:\t{pending:016x}\nShdPnd:\t0000000000000000\n")
        };
        assert_eq!(bytes(&status(0)), 340 << 10);
        assert!(is_killed(&status(0x100)));
        assert!(!is_killed(&status(0x4200)));
        assert!(!is_killed(""), "it is gone");
    }

    #[test]
    fn a_short_want_is_relieved_and_the_limit_put_back() {
        let group = Fake { need: 66 * MIB, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        (0..2).for_each(|_| drop(relief.tick(Progress::default())));
        assert_eq!(*group.limits.borrow(), [65 * MIB, 66 * MIB]);
        (0..CALM_LOOKS).for_each(|_| drop(relief.tick(Progress::default())));
        assert_eq!(group.limits.borrow().last(), Some(&(64 * MIB)));
        assert!(*group.held.borrow());
    }

    #[test]
    fn a_limit_that_changes_holds_at_once_unless_it_is_raised() {
        let group = Fake { need: 65 * MIB, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        assert!(relief.tick(Progress::default()).is_none());
        relief.set_limit(60 * MIB);
        assert_eq!(*group.limits.borrow(), [65 * MIB], "it is raised");
        (0..CALM_LOOKS).for_each(|_| drop(relief.tick(Progress::default())));
        assert_eq!(*group.limits.borrow(), [65 * MIB, 60 * MIB]);
        relief.set_limit(66 * MIB);
        assert_eq!(group.limits.borrow().last(), Some(&(66 * MIB)));
    }

    #[test]
    fn a_lasting_want_is_left_to_the_killer() {
        let group = Fake { need: u64::MAX, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        (0..6).for_each(|_| drop(relief.tick(Progress::default())));
        assert!(!*group.held.borrow(), "the killer acts");
        assert_eq!(group.limits.borrow().len(), STEPS_MAX as usize);
        (0..CALM_LOOKS).for_each(|_| drop(relief.tick(Progress::default())));
        assert!(*group.held.borrow(), "once it did, it is held again");
        assert_eq!(group.limits.borrow().last(), Some(&(64 * MIB)));
    }

    #[test]
    fn who_gets_nowhere_loses_a_process_and_who_gets_somewhere_does_not() {
        let group = Fake::default();
        let mut relief = Relief::new(&group, 64 * MIB);
        let mut now = Progress::default();
        let mut run = |moved: u64, refused: u64, looks: u32| {
            (0..looks).any(|_| {
                now.moved += moved;
                now.refused += refused;
                relief.tick(now).is_some()
            })
        };
        assert!(!run(0, 10_000, STUCK_LOOKS - 1));
        assert!(!run(1000, 10_000, 3 * STUCK_LOOKS), "it swaps in meanwhile");
        assert!(!run(0, REFUSED_MIN - 1, 3 * STUCK_LOOKS));
        assert!(run(0, 10_000, STUCK_LOOKS));
    }
}
