//! Relief for a group whose memory runs out too early.
//!
//! Reclaim in a busy group sometimes finds nothing for a moment, although nearly all memory could
//! be swapped: every page was just used, or is being written. The kernel then kills a process. That
//! happened in one of some two hundred runs of eight processes with three times their limit, on a
//! busy machine.
//!
//! On version 1 of the cgroup interface, relief disables the OOM killer, and raises the limit a
//! little until the group runs again. If that does not help, relief enables the killer. On version
//! 2 the killer cannot be disabled. Processes wait at a limit (`memory.high`) instead. The limit at
//! which the kernel kills a process is higher, by as much as version 1 would raise its limit.

use std::io;
use uzswap_sys::cgroup::Group;

/// The number of consecutive steps by which the limit may be raised.
const STEPS_MAX: u32 = 5;

/// A step, as a share of the limit and at least, bytes.
const STEP_DIVISOR: u64 = 64;
const STEP_BYTES_MIN: u64 = 1 << 20;

/// Looks without waiting processes, after which the limit is restored.
const CALM_LOOKS: u32 = 10;

/// Acts on a group; a trait, so that tests need no group.
pub trait Limited {
    /// True if the group's processes wait for memory.
    fn waits(&self) -> bool;
    /// Disables the kernel's OOM killer for the group, or enables it.
    fn suspend_oom_killer(&self, suspend: bool) -> io::Result<()>;
    /// Sets the limit, bytes.
    fn limit(&self, bytes: u64) -> io::Result<()>;
}

impl Limited for Group {
    fn waits(&self) -> bool {
        self.waits_for_memory()
    }

    fn suspend_oom_killer(&self, suspend: bool) -> io::Result<()> {
        self.suspend_oom_killer(suspend)
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        self.set_limit(bytes, slack(bytes))
    }
}

/// Bytes by which a group of version 2 may exceed its limit before the kernel kills one of its
/// processes.
pub fn slack(limit: u64) -> u64 {
    step(limit) * u64::from(STEPS_MAX)
}

fn step(limit: u64) -> u64 {
    (limit / STEP_DIVISOR).max(STEP_BYTES_MIN)
}

pub struct Relief<G> {
    group: G,
    limit: u64,
    /// Steps by which the limit is raised. More than [`STEPS_MAX`]: the killer is enabled.
    steps: u32,
    calm: u32,
}

impl<G: Limited> Relief<G> {
    /// Disables the killer of a group limited to `limit` bytes. If that fails, the killer stays
    /// enabled.
    pub fn new(group: G, limit: u64) -> Self {
        let _ = group.suspend_oom_killer(true);
        Self { group, limit, steps: 0, calm: 0 }
    }

    /// Changes the limit. A raised limit is changed when it is restored.
    pub fn set_limit(&mut self, bytes: u64) {
        self.limit = bytes;
        if self.steps == 0 {
            // An error means that the kernel cannot swap out so much now. A later call tries again.
            let _ = self.group.limit(bytes);
        }
    }

    /// Looks and acts; called a few times a second.
    pub fn tick(&mut self) {
        if self.steps <= STEPS_MAX && self.group.waits() {
            self.steps += 1;
            self.calm = 0;
            let raised = self.limit + step(self.limit) * u64::from(self.steps);
            if self.steps > STEPS_MAX || self.group.limit(raised).is_err() {
                let _ = self.group.suspend_oom_killer(false);
            }
        } else if self.steps > 0 {
            self.calm += 1;
            // An error means that the group is above the limit. The next look tries again.
            if self.calm >= CALM_LOOKS && self.group.limit(self.limit).is_ok() {
                let _ = self.group.suspend_oom_killer(true);
                self.steps = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// A group that waits while its limit is below its need.
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

        fn suspend_oom_killer(&self, suspend: bool) -> io::Result<()> {
            *self.held.borrow_mut() = suspend;
            Ok(())
        }

        fn limit(&self, bytes: u64) -> io::Result<()> {
            self.limits.borrow_mut().push(bytes);
            Ok(())
        }
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_short_want_is_relieved_and_the_limit_put_back() {
        let group = Fake { need: 66 * MIB, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        (0..2).for_each(|_| relief.tick());
        assert_eq!(*group.limits.borrow(), [65 * MIB, 66 * MIB]);
        (0..CALM_LOOKS).for_each(|_| relief.tick());
        assert_eq!(group.limits.borrow().last(), Some(&(64 * MIB)));
        assert!(*group.held.borrow());
    }

    #[test]
    fn a_limit_that_changes_holds_at_once_unless_it_is_raised() {
        let group = Fake { need: 65 * MIB, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        relief.tick();
        relief.set_limit(60 * MIB);
        assert_eq!(*group.limits.borrow(), [65 * MIB], "it is raised");
        (0..CALM_LOOKS).for_each(|_| relief.tick());
        assert_eq!(*group.limits.borrow(), [65 * MIB, 60 * MIB]);
        relief.set_limit(66 * MIB);
        assert_eq!(group.limits.borrow().last(), Some(&(66 * MIB)));
    }

    #[test]
    fn a_lasting_want_is_left_to_the_killer() {
        let group = Fake { need: u64::MAX, ..Fake::default() };
        let mut relief = Relief::new(&group, 64 * MIB);
        (0..6).for_each(|_| relief.tick());
        assert!(!*group.held.borrow(), "the killer acts");
        assert_eq!(group.limits.borrow().len(), STEPS_MAX as usize);
        (0..CALM_LOOKS).for_each(|_| relief.tick());
        assert!(*group.held.borrow(), "once it did, it is held again");
        assert_eq!(group.limits.borrow().last(), Some(&(64 * MIB)));
    }
}
