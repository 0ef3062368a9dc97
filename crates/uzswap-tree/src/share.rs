//! How much a process of a tree may have: arithmetic on the figures of all.

/// Another process of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Its memory, bytes.
    pub used: u64,
    /// Bytes that it is about to need besides.
    pub reserved: u64,
    /// Bytes that it needs to go on at all: it gives no more back.
    pub least: u64,
    /// Its pages fit neither in its share nor on its backing.
    pub is_starved: bool,
    /// Its pages cannot leave.
    pub is_left_alone: bool,
    /// Its slot is behind this process's.
    pub is_behind: bool,
}

/// A process that asks for its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// Bytes that it needs to go on at all.
    pub least: u64,
    /// As of [`Other`].
    pub is_starved: bool,
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
/// so it goes beyond the budget rather than to wait for them, or to end. No process has less than
/// it needs to go on: where all need more than there is, they are beyond the budget.
pub fn share(total: u64, own: Own, others: &[Other]) -> Allowance {
    let given = share_beside(total, own, others);
    let (left_alone, kept_small): (Vec<_>, Vec<_>) =
        others.iter().copied().partition(|other| other.is_left_alone);
    match own.is_starved && !given.may_hope && !left_alone.is_empty() {
        true => share_beside(total, own, &kept_small),
        false => given,
    }
}

fn share_beside(total: u64, own: Own, others: &[Other]) -> Allowance {
    let theirs: Vec<_> = others
        .iter()
        .map(|other| (other.used + other.reserved, other.least.min(other.used)))
        .collect();
    let equal = level(total, &theirs);
    let less = equal - equal / 4;
    let are_starved = others.iter().any(|other| other.is_starved);
    let part = if are_starved && !own.is_starved { less } else { equal };
    let gives = |other: &Other| match other.is_starved {
        // It may end, if it is the last one.
        true => other.is_behind,
        false => other.used > less.max(other.least) && !other.is_left_alone,
    };
    let may_hope = others.iter().any(gives);
    let left = total.saturating_sub(theirs.iter().map(|(used, _)| used).sum());
    Allowance { bytes: left.max(part).max(own.least), may_hope }
}

/// The most that one more process may have, so that none must have less than another. With it, and
/// the others cut to as much, the budget is used up; none is cut below its least. The others are
/// given by use and least.
fn level(total: u64, others: &[(u64, u64)]) -> u64 {
    let (mut left, mut others) = (total, others.to_vec());
    loop {
        let mut used: Vec<_> = others.iter().map(|(used, _)| *used).collect();
        let share = level_without_least(left, &mut used);
        let kept = others.len();
        others.retain(|(_, least)| {
            left = left.saturating_sub(if *least > share { *least } else { 0 });
            *least <= share
        });
        if others.len() == kept {
            return share;
        }
    }
}

fn level_without_least(total: u64, others: &mut [u64]) -> u64 {
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

    const OTHER: Other = Other {
        used: 70,
        reserved: 0,
        least: 0,
        is_starved: false,
        is_left_alone: false,
        is_behind: true,
    };

    fn own(is_starved: bool) -> Own {
        Own { least: 0, is_starved }
    }

    #[test]
    fn what_all_may_have_is_what_there_is() {
        let level = |total, others: &[u64]| {
            let others: Vec<_> = others.iter().map(|used| (*used, 0)).collect();
            level(total, &others)
        };
        assert_eq!(level(100, &[]), 100);
        assert_eq!(level(100, &[10]), 90);
        assert_eq!(level(100, &[90, 10, 80]), 30);
        assert_eq!(level(100, &[50; 9]), 10);
        assert_eq!(level(100, &[200, 0]), 50);
    }

    #[test]
    fn others_are_cut_to_what_they_need_to_go_on_and_no_further() {
        assert_eq!(level(100, &[(90, 20), (80, 60)]), 20, "20, 20 and 60");
        assert_eq!(level(100, &[(90, 30), (80, 60)]), 10, "30 and 60 stay");
        assert_eq!(level(100, &[(90, 70), (80, 60)]), 0);
        assert_eq!(level(100, &[(40, 40), (90, 0)]), 30);
    }

    #[test]
    fn no_process_has_less_than_it_needs_to_go_on() {
        let others = [Other { used: 20, least: 11, ..OTHER }; 3];
        let given = |least, is_starved| share(32, Own { least, is_starved }, &others);
        assert_eq!(given(0, false).bytes, 0, "the others' least is more than there is");
        assert_eq!(given(11, false), Allowance { bytes: 11, may_hope: true });
        assert_eq!(given(11, true), Allowance { bytes: 11, may_hope: true });
        // In equal parts they would have 8 each.
        let small = [Other { used: 11, least: 11, ..OTHER }; 3];
        let alone = Own { least: 11, is_starved: true };
        assert_eq!(share(32, alone, &small), Allowance { bytes: 11, may_hope: false });
        assert_eq!(share(64, alone, &small).bytes, 31);
    }

    #[test]
    fn memory_that_another_process_is_about_to_need_is_left_to_it() {
        let other = Other { reserved: 5, ..OTHER };
        assert_eq!(share(100, own(false), &[other]), Allowance { bytes: 50, may_hope: true });
        let little = Other { used: 30, ..other };
        assert_eq!(share(100, own(false), &[little]), Allowance { bytes: 65, may_hope: false });
    }

    #[test]
    fn the_memory_of_processes_that_are_left_alone_is_no_hope_and_does_not_end_others() {
        let share = |is_starved, others: &[Other]| share(100, own(is_starved), others);
        let other = Other { is_left_alone: true, ..OTHER };
        let little = Other { used: 10, ..OTHER };
        assert_eq!(share(false, &[other]), Allowance { bytes: 50, may_hope: false });
        assert_eq!(share(true, &[other]), Allowance { bytes: 100, may_hope: false });
        assert_eq!(share(true, &[other, little]), Allowance { bytes: 90, may_hope: false });
        let large = Other { used: 80, ..little };
        assert_eq!(share(true, &[other, large]), Allowance { bytes: 33, may_hope: true });
    }
}
