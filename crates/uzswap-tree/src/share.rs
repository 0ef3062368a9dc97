//! The memory that a process of a tree may have: arithmetic on the figures of all.

/// Another process of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Other {
    /// Its memory, bytes.
    pub used: u64,
    /// Bytes that the process is about to need besides.
    pub reserved: u64,
    /// Bytes that it needs to run at all: it never gives these back.
    pub least: u64,
    /// True if the process's pages fit neither in its share nor on its backing.
    pub is_starved: bool,
    /// Its pages cannot leave.
    pub is_left_alone: bool,
    /// Its slot is behind this process's.
    pub is_behind: bool,
    /// It ranks before this process.
    pub is_before: bool,
    /// It works much less than others do.
    pub is_idle: bool,
}

/// A process that asks for its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// Its memory, bytes.
    pub used: u64,
    /// Bytes that it needs to make progress.
    pub least: u64,
    /// As of [`Other`].
    pub is_starved: bool,
    /// The favour of the processes before it, in parts of [`FAVOUR`].
    pub favour: u64,
    /// As of [`Other`].
    pub is_idle: bool,
    /// CPUs that all processes together may use. If no more processes than this work, those that
    /// work have equal parts.
    pub cpus: u64,
}

/// Full favour; 0 favours no process.
pub const FAVOUR: u64 = 64;

/// The allowance of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Bytes.
    pub bytes: u64,
    /// The part of these bytes that it may have until its next report.
    pub soon: u64,
    /// True if another process may still give memory back.
    pub may_hope: bool,
    /// Processes that work and rank before this one. Counted only at full favour, if this process
    /// may have hardly more than its least.
    pub ahead: u64,
}

/// A process's share of `total` bytes, beside these others. If the process is stuck, and no process
/// can give memory back, the memory of processes that are left alone does not count. They may be
/// waiting for this process, so this process exceeds the budget instead of waiting for them, or
/// ending. No process has less than it needs to run: if all together need more than `total`, they
/// exceed it.
///
/// The shares are equal if no process is favoured. Otherwise each process keeps a part of an equal
/// share, which is smaller the greater the favour. The first process gets as much of the rest as it
/// uses, then the next process, and so on. If no more processes work than there are CPUs, the
/// working ones share equally the memory that the idle ones leave. In that case a CPU would be idle
/// if we slowed a working process down.
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
        // The starved process in the last slot may end, so a starved process behind this process
        // gives hope.
        true => other.is_behind,
        false => other.used > less.max(other.least) && !other.is_left_alone,
    };
    let may_hope = others.iter().any(gives);
    let left = total.saturating_sub(theirs.iter().map(|(used, _)| used).sum());
    let part = match are_starved || own.is_starved {
        true => part,
        false => favoured(total, equal, own, others),
    };
    let bytes = left.max(part).max(own.least);
    let is_last = own.favour == FAVOUR && bytes <= own.least + own.least / 4;
    let is_ahead = |other: &&Other| is_last && other.is_before && !other.is_idle;
    let ahead = others.iter().filter(is_ahead).count() as u64;
    let grows = |other: &&Other| {
        let is_first = own.favour == 0 || other.is_before;
        is_first && !other.is_idle && !other.is_left_alone
    };
    let growing = 1 + others.iter().filter(grows).count() as u64;
    let soon = soon(total, own.used, left, growing).max(own.least).min(bytes);
    Allowance { bytes, soon, may_hope, ahead }
}

/// The memory that a process with `used` bytes may have until its next report, if `growing`
/// processes may grow meanwhile. The others use all of `total` but `left`. Each growing process may
/// take an equal part of the free memory. Otherwise, when one of 24 processes ended, each of the
/// others would take the 21 MiB that the ended one had. An equal part of `total` is always allowed.
fn soon(total: u64, used: u64, left: u64, growing: u64) -> u64 {
    (used + left.saturating_sub(used) / growing).max(total / growing)
}

/// The part of a process if the first ones are favoured; `equal` is its part otherwise.
fn favoured(total: u64, equal: u64, own: Own, others: &[Other]) -> u64 {
    let least = equal * FAVOUR.saturating_sub(own.favour) / FAVOUR;
    // The part of another process's memory that counts, if that process may be cut.
    let kept = |other: &Other| {
        let kept = if other.is_left_alone { equal } else { least };
        (other.used + other.reserved).min(kept.max(other.least))
    };
    let working = 1 + others.iter().filter(|other| !other.is_idle).count() as u64;
    if working <= own.cpus && !own.is_idle {
        let counted = others.iter().map(|other| {
            let used = if other.is_idle { kept(other) } else { other.used + other.reserved };
            (used, other.least.min(other.used))
        });
        return level(total, &counted.collect::<Vec<_>>());
    }
    let claimed = others.iter().map(|other| match other.is_before {
        true => other.used + other.reserved,
        false => kept(other),
    });
    least.max(total.saturating_sub(claimed.sum()))
}

/// The equal share of one more process. The budget is used up if this process has the share, and
/// the others are cut to the share, or to their least if that is larger. `others` holds their use
/// and their least.
pub(crate) fn level(total: u64, others: &[(u64, u64)]) -> u64 {
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

    fn allowed(bytes: u64, may_hope: bool) -> Allowance {
        Allowance { bytes, soon: 0, may_hope, ahead: 0 }
    }

    /// The share without the part until the next report.
    fn share(total: u64, own: Own, others: &[Other]) -> Allowance {
        Allowance { soon: 0, ..super::share(total, own, others) }
    }

    const OTHER: Other = Other {
        used: 70,
        reserved: 0,
        least: 0,
        is_starved: false,
        is_left_alone: false,
        is_behind: true,
        is_before: false,
        is_idle: false,
    };

    const OWN: Own =
        Own { used: 0, least: 0, is_starved: false, favour: 0, is_idle: false, cpus: 1 };

    fn own(is_starved: bool) -> Own {
        Own { is_starved, ..OWN }
    }

    #[test]
    fn the_parts_of_all_processes_add_up_to_the_budget() {
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
    fn others_are_cut_to_their_least_and_no_further() {
        assert_eq!(level(100, &[(90, 20), (80, 60)]), 20, "20, 20 and 60");
        assert_eq!(level(100, &[(90, 30), (80, 60)]), 10, "30 and 60 stay");
        assert_eq!(level(100, &[(90, 70), (80, 60)]), 0);
        assert_eq!(level(100, &[(40, 40), (90, 0)]), 30);
    }

    #[test]
    fn no_process_has_less_than_it_needs_to_go_on() {
        let others = [Other { used: 20, least: 11, ..OTHER }; 3];
        let given = |least, is_starved| share(32, Own { least, is_starved, ..OWN }, &others);
        assert_eq!(given(0, false).bytes, 0, "the others' least is more than there is");
        assert_eq!(given(11, false), allowed(11, true));
        assert_eq!(given(11, true), allowed(11, true));
        // With equal shares the processes would have 8 each.
        let small = [Other { used: 11, least: 11, ..OTHER }; 3];
        let alone = Own { least: 11, is_starved: true, ..OWN };
        assert_eq!(share(32, alone, &small), allowed(11, false));
        assert_eq!(share(64, alone, &small).bytes, 31);
    }

    #[test]
    fn processes_that_grow_at_the_same_time_share_the_free_memory() {
        let mut all = [21; 23];
        for _ in 0..100 {
            let given = |at: usize| {
                let other = |(_, used): (usize, &u64)| Other { used: *used, ..OTHER };
                let others: Vec<_> =
                    all.iter().enumerate().filter(|(of, _)| *of != at).map(other).collect();
                super::share(512, Own { used: all[at], ..OWN }, &others)
            };
            assert!(all.iter().enumerate().all(|(at, used)| given(at).soon <= used + 29 / 23));
            all = std::array::from_fn(|at| given(at).soon);
        }
        assert_eq!(all, [22; 23], "483 of 512 were used");
    }

    #[test]
    fn one_that_grows_alone_has_all_of_its_share_in_a_few_steps() {
        let idle = Other { used: 100, is_idle: true, ..OTHER };
        let soon = |used, others: &[Other]| super::share(1000, Own { used, ..OWN }, others).soon;
        assert_eq!(soon(10, &[idle; 4]), 600, "the others are idle");
        let works = Other { is_idle: false, ..idle };
        assert_eq!(soon(10, &[works; 4]), 200, "an equal part");
        assert_eq!((soon(200, &[works; 4]), soon(280, &[works; 4])), (280, 344));
        let grown = (0..20).fold(10, |used, _| soon(used, &[works; 4]));
        assert!((590..=600).contains(&grown), "{grown}");
        assert_eq!(soon(610, &[works; 4]), 600, "it is cut immediately");
        let favoured = Own { used: 10, favour: 1, ..OWN };
        assert_eq!(super::share(1000, favoured, &[works; 4]).soon, 600, "it ranks first");
        assert_eq!(soon(10, &[Other { is_left_alone: true, ..works }; 4]), 600);
    }

    /// The parts of processes. `all` has the use and the least of each process, in rank order.
    fn parts(total: u64, favour: u64, all: &[(u64, u64)]) -> Vec<u64> {
        let other = |(at, (used, least)): (usize, &(u64, u64)), of: usize| {
            (at != of).then_some(Other { used: *used, least: *least, is_before: at < of, ..OTHER })
        };
        let part = |of: usize| {
            let others: Vec<_> = all.iter().enumerate().filter_map(|one| other(one, of)).collect();
            let own = Own { least: all[of].1, favour, ..OWN };
            share(total, own, &others).bytes
        };
        (0..all.len()).map(part).collect()
    }

    #[test]
    fn the_first_processes_have_all_that_they_use_and_the_last_their_least() {
        let all = [(60, 10); 3];
        assert_eq!(parts(120, 0, &all), [40, 40, 40]);
        // 120 - 20 - 20, 120 - 60 - 20.
        assert_eq!(parts(120, FAVOUR / 2, &all), [80, 40, 20]);
        assert_eq!(parts(120, FAVOUR, &all), [100, 50, 10]);
        // The processes have taken their parts, which stay the same.
        assert_eq!(parts(120, FAVOUR, &[(60, 10), (50, 10), (10, 10)]), [100, 50, 10]);
        // After the end of the first process, all others fit.
        assert_eq!(parts(120, FAVOUR, &[(50, 10), (10, 10)]), [110, 70]);
    }

    #[test]
    fn a_stuck_process_has_an_equal_part_whichever_process_is_favoured() {
        let own = |is_starved| Own { least: 10, is_starved, favour: FAVOUR, ..OWN };
        let other = Other { used: 90, least: 10, is_before: true, ..OTHER };
        assert_eq!(share(100, own(false), &[other]).bytes, 10);
        assert_eq!(share(100, own(true), &[other]).bytes, 50);
        let stuck = Other { used: 10, is_starved: true, is_before: false, ..other };
        assert_eq!(share(100, own(false), &[stuck]).bytes, 90, "memory that is left");
        let stuck = Other { used: 50, ..stuck };
        assert_eq!(share(100, own(false), &[stuck]).bytes, 50);
    }

    #[test]
    fn a_process_that_has_hardly_more_than_its_least_knows_how_many_work_ahead_of_it() {
        let own = |favour| Own { least: 16, favour, ..OWN };
        let ahead = Other { used: 40, is_before: true, ..OTHER };
        let idle = Other { is_idle: true, ..ahead };
        let behind = Other { is_before: false, ..ahead };
        let of = |total, favour| share(total, own(favour), &[ahead, ahead, idle, behind]);
        assert_eq!(of(120, FAVOUR), Allowance { bytes: 16, soon: 0, may_hope: true, ahead: 2 });
        assert_eq!(of(141, FAVOUR).ahead, 0, "21 are left for it");
        assert_eq!(of(120, FAVOUR - 1).ahead, 0);
    }

    #[test]
    fn where_as_few_work_as_there_are_cpus_their_parts_are_equal_and_the_idle_have_their_least() {
        let own = |is_idle| Own { least: 10, favour: FAVOUR, is_idle, cpus: 2, ..OWN };
        let works = Other { used: 60, least: 10, is_before: true, ..OTHER };
        let idle = Other { is_idle: true, is_before: false, ..works };
        // The two processes share 120 - 10.
        assert_eq!(share(120, own(false), &[works, idle]).bytes, 55);
        assert_eq!(share(120, own(true), &[works, works]).bytes, 10);
        let three = share(120, own(false), &[works, works, idle]).bytes;
        assert_eq!(three, 10, "they are more than there are CPUs");
    }

    #[test]
    fn a_process_that_is_left_alone_counts_as_if_none_were_favoured() {
        let alone = Other { used: 90, is_left_alone: true, ..OTHER };
        let own = Own { least: 10, favour: FAVOUR, ..OWN };
        assert_eq!(share(100, own, &[alone]).bytes, 50);
    }

    /// However far the first are favoured, all keep to the budget once each is cut to its part, and
    /// no process has less than it needs.
    #[test]
    fn all_processes_keep_to_the_budget_favoured_or_not() {
        let mut word = 1u64;
        let mut below = |end: u64| {
            word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (word >> 33) % end
        };
        for _ in 0..20_000 {
            let (total, favour) = (100 + below(400), below(FAVOUR + 1));
            let mut all: Vec<_> = (0..1 + below(8)).map(|_| (20 + below(200), below(20))).collect();
            for _ in 0..2 {
                let parts = parts(total, favour, &all);
                assert!(all.iter().zip(&parts).all(|((_, least), part)| part >= least));
                all.iter_mut().zip(&parts).for_each(|(one, part)| one.0 = one.0.min(*part));
            }
            let (sum, least): (u64, u64) =
                (all.iter().map(|one| one.0).sum(), all.iter().map(|one| one.1).sum());
            assert!(sum <= total.max(least) + 8, "{total} {favour} {all:?}");
        }
    }

    #[test]
    fn memory_that_another_process_is_about_to_need_is_left_to_it() {
        let other = Other { reserved: 5, ..OTHER };
        assert_eq!(share(100, own(false), &[other]), allowed(50, true));
        let little = Other { used: 30, ..other };
        assert_eq!(share(100, own(false), &[little]), allowed(65, false));
    }

    #[test]
    fn the_memory_of_processes_that_are_left_alone_is_no_hope_and_does_not_end_others() {
        let share = |is_starved, others: &[Other]| share(100, own(is_starved), others);
        let other = Other { is_left_alone: true, ..OTHER };
        let little = Other { used: 10, ..OTHER };
        assert_eq!(share(false, &[other]), allowed(50, false));
        assert_eq!(share(true, &[other]), allowed(100, false));
        assert_eq!(share(true, &[other, little]), allowed(90, false));
        let large = Other { used: 80, ..little };
        assert_eq!(share(true, &[other, large]), allowed(33, true));
    }
}
