//! The memory that all processes have together if each page that forks share is copied.
//!
//! A write copies such a page at the speed of memory, and uzswap sees no fault. Beyond a
//! container's limit the kernel kills. So uzswap makes room for the copies before they exist: each
//! process counts its shared pages in full, and all processes together stay below the *ceiling*.

use crate::Tree;
use crate::name::Name;
use crate::share::level;
use std::sync::atomic::Ordering::Relaxed;

/// A fork may exceed the ceiling by this part, because no budget is kept to the byte.
const SLACK: u64 = 32;

impl Tree {
    /// True if the processes are below a ceiling.
    pub fn has_ceiling(&self) -> bool {
        self.table.ceiling.load(Relaxed) > 0
    }

    /// Reports this process's memory, in which shared pages count in full, and the memory of a
    /// child that the process is about to make. Returns the bytes that this process may have under
    /// the ceiling, without that child.
    pub fn whole_allowance(&self, whole: u64, child: u64) -> u64 {
        let Some(ceiling) = Some(self.table.ceiling.load(Relaxed)).filter(|bytes| *bytes > 0)
        else {
            return u64::MAX;
        };
        let own = self.own();
        own.inspect(|slot| slot.whole.store(whole + child, Relaxed));
        let least = own.map_or(0, |slot| slot.least.load(Relaxed));
        let mut others = self.whole_of_others();
        others.extend((child > 0).then_some((child, least)));
        beneath(ceiling, least, &others)
    }

    /// True if there is room under the ceiling for a child with as much memory as this process. The
    /// others leave that room from now on.
    pub fn has_room_for_child(&self, whole: u64) -> bool {
        self.own().inspect(|slot| slot.whole.store(2 * whole, Relaxed));
        let others: u64 = self.whole_of_others().iter().map(|(bytes, _)| bytes).sum();
        let ceiling = self.table.ceiling.load(Relaxed);
        ceiling == 0 || others + 2 * whole <= ceiling + ceiling / SLACK
    }

    /// The memory of each other process, shared pages in full, and the part that it never gives
    /// back.
    fn whole_of_others(&self) -> Vec<(u64, u64)> {
        let own = self.own().map(std::ptr::from_ref);
        let slots = self.table.used_slots().iter().filter(|slot| Some(&raw const **slot) != own);
        let others = slots.filter_map(|slot| {
            let name = slot.name();
            let bytes = slot.whole.load(Relaxed).max(slot.used.load(Relaxed));
            let counts = bytes > 0 && name != Name::NONE && name.may_live(self.space.load(Relaxed));
            counts.then(|| (bytes, slot.least.load(Relaxed).min(bytes)))
        });
        others.collect()
    }
}

/// A process's share of a ceiling, beside others with their memory and their least.
fn beneath(ceiling: u64, least: u64, others: &[(u64, u64)]) -> u64 {
    let left = ceiling.saturating_sub(others.iter().map(|(bytes, _)| bytes).sum());
    left.max(level(ceiling, others)).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_rest_of_the_ceiling_or_an_equal_part() {
        assert_eq!(beneath(90, 10, &[]), 90);
        assert_eq!(beneath(90, 10, &[(20, 10)]), 70);
        assert_eq!(beneath(90, 10, &[(60, 10)]), 45);
        assert_eq!(beneath(90, 10, &[(60, 10), (60, 10)]), 30);
        assert_eq!(beneath(90, 16, &[(40, 16); 8]), 16, "its least");
    }

    /// A process that is about to fork makes room for a child of its own size, and others leave it.
    #[test]
    fn parent_and_child_are_below_the_ceiling_before_the_fork() {
        let mut whole = 80;
        for _ in 0..20 {
            whole = whole.min(beneath(90, 10, &[(whole, 10)]));
        }
        assert_eq!(whole, 45);
        assert_eq!(beneath(90, 10, &[(whole, 10), (whole, 10)]), 30, "a third process");
    }
}
