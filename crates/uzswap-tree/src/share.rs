//! How much a process of a tree may have: arithmetic on the figures of all.

/// Another process of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Its memory, bytes.
    pub used: u64,
    /// Bytes that it is about to need besides.
    pub reserved: u64,
    /// Its pages fit neither in its share nor on its backing.
    pub is_starved: bool,
    /// Its pages cannot leave.
    pub is_left_alone: bool,
    /// Its slot is behind this process's.
    pub is_behind: bool,
}

/// The allowance of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes.
    pub bytes: u64,
    /// True if another process may still give memory back.
    pub may_hope: bool,
}

/// The share of a process of `total` bytes, beside these others. Where a process is stuck and only
/// those that are left alone have memory, theirs does not count. They may be waiting for this one,
/// so it goes beyond the budget rather than to wait for them, or to end.
pub fn share(total: u64, is_starved: bool, others: &[Other]) -> Allowance {
    let given = share_beside(total, is_starved, others);
    let (left_alone, kept_small): (Vec<_>, Vec<_>) =
        others.iter().copied().partition(|other| other.is_left_alone);
    match is_starved && !given.may_hope && !left_alone.is_empty() {
        true => share_beside(total, is_starved, &kept_small),
        false => given,
    }
}

fn share_beside(total: u64, is_starved: bool, others: &[Other]) -> Allowance {
    let mut theirs: Vec<_> = others.iter().map(|other| other.used + other.reserved).collect();
    let equal = level(total, &mut theirs);
    let less = equal - equal / 4;
    let are_starved = others.iter().any(|other| other.is_starved);
    let part = if are_starved && !is_starved { less } else { equal };
    let gives = |other: &Other| match other.is_starved {
        // It may end, if it is the last one.
        true => other.is_behind,
        false => other.used > less && !other.is_left_alone,
    };
    let may_hope = others.iter().any(gives);
    Allowance { bytes: total.saturating_sub(theirs.iter().sum()).max(part), may_hope }
}

/// The most that one more process may have, so that none must have less than another: with it, and
/// the others cut to as much, the budget is used up.
fn level(total: u64, others: &mut [u64]) -> u64 {
    others.sort_unstable();
    let mut left = total;
    for (at, used) in others.iter().enumerate() {
        let share = left / (others.len() - at + 1) as u64;
        if *used > share {
            return share;
        }
        left -= used;
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_may_have_is_what_there_is() {
        assert_eq!(level(100, &mut []), 100);
        assert_eq!(level(100, &mut [10]), 90);
        assert_eq!(level(100, &mut [90, 10, 80]), 30);
        assert_eq!(level(100, &mut [50; 9]), 10);
        assert_eq!(level(100, &mut [200, 0]), 50);
    }

    #[test]
    fn memory_that_another_process_is_about_to_need_is_left_to_it() {
        let (is_starved, is_left_alone, is_behind) = (false, false, true);
        let other = Other { used: 70, reserved: 5, is_starved, is_left_alone, is_behind };
        assert_eq!(share(100, false, &[other]), Allowance { bytes: 50, may_hope: true });
        let little = Other { used: 30, ..other };
        assert_eq!(share(100, false, &[little]), Allowance { bytes: 65, may_hope: false });
    }

    #[test]
    fn the_memory_of_processes_that_are_left_alone_is_no_hope_and_does_not_end_others() {
        let (is_starved, is_left_alone, is_behind) = (false, true, true);
        let other = Other { used: 70, reserved: 0, is_starved, is_left_alone, is_behind };
        let little = Other { used: 10, is_left_alone: false, ..other };
        assert_eq!(share(100, false, &[other]), Allowance { bytes: 50, may_hope: false });
        assert_eq!(share(100, true, &[other]), Allowance { bytes: 100, may_hope: false });
        assert_eq!(share(100, true, &[other, little]), Allowance { bytes: 90, may_hope: false });
        let large = Other { used: 80, ..little };
        assert_eq!(share(100, true, &[other, large]), Allowance { bytes: 33, may_hope: true });
    }
}
