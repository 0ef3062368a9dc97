//! Decides, by figures alone, the next step of the watching thread and of a thread that asks for
//! memory. No function here reads or changes anything else, so tests can cover every case.

use std::time::Duration;
use uzswap_tree::MANAGED_MIN;

/// Memory that the take-over itself needs: a pager, threads, the list of mappings.
pub const COST: u64 = 7 << 20;
/// Memory that a program may ask for before the preloaded library makes the agent measure it.
const BETWEEN: u64 = 4 << 20;
/// The least budget of a pager.
pub const BUDGET_LEAST: u64 = 8 << 20;
/// The most by which memory grows in a second, with a margin: the kernel clears pages no faster.
const GROWTH: u64 = 4 << 30;
/// Looks in a row at which no process can give memory back, before the message that none is left.
/// Other processes may have just died, or begun to wait.
pub const HOPELESS: u32 = 100;
/// The time between two looks.
pub const WAIT_MIN: Duration = Duration::from_millis(2);
pub const WAIT_MAX: Duration = Duration::from_millis(100);
/// The time between two reports to the tree.
pub const TELL: Duration = Duration::from_millis(50);
/// The interval at which shared memory is measured, in at most a 20th of the time. Less than
/// [`SHARED_LEAST`] counts as none.
const SHARED_WAIT: Duration = Duration::from_millis(32);
const SHARED_PART: u32 = 20;
const SHARED_LEAST: u64 = 1 << 20;
/// When memory besides the pager's has grown by this, mappings that were left open are searched for
/// used pages.
const LOOK_STEP: u64 = 256 << 10;
/// A pager keeps its budget if the new budget differs by less than this part.
const BUDGET_STEP: u64 = 64;
/// The same as [`BUDGET_STEP`], for a step towards a new budget while other processes take steps,
/// too.
const GROWTH_STEP: u64 = 512;
/// The longest time for which a thread that asks for memory waits for the take-over. The thread may
/// have a lock that the take-over needs.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// Why a program with a filter is left alone.
pub const FILTERS: &str = "it filters its own system calls (seccomp)";

/// The figures of one look of the watching thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Observation {
    /// The thread is to end, for a call that needs a single thread. Nothing else was looked at.
    EndWanted,
    /// The program permits itself few calls (seccomp). Nothing else was measured, because measuring
    /// takes system calls.
    Filtered,
    /// The program has not been taken over, and its memory cannot be read.
    Unmeasured,
    /// The program has not been taken over.
    Unmanaged(Unmanaged),
    /// The program has been taken over.
    Managed(Managed),
}

/// Figures of a program that has not been taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmanaged {
    /// A thread that asks for memory waits for the take-over.
    pub is_wanted: bool,
    /// True if the program cannot be taken over.
    pub is_refused: bool,
    /// True if the program's accesses are recorded. The program's allowance is then constant, and
    /// for pages alone.
    pub is_recorded: bool,
    /// The program's memory, and the memory that it may have, bytes.
    pub used: u64,
    pub allowance: u64,
}

/// Figures of a program that has been taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Managed {
    /// A thread waits for a larger budget.
    pub is_starved: bool,
    /// Another process may give memory back.
    pub may_hope: bool,
    /// Consecutive earlier looks that found a starved thread and no donor.
    pub hopeless: u32,
    pub is_suspended: bool,
    /// True while the program's faults are not served, so that it runs more slowly.
    pub is_slowed: bool,
    /// True while another process reads all of the program's memory, which must stay.
    pub is_read: bool,
    /// As in [`Unmanaged`].
    pub is_recorded: bool,
    /// In bytes: the memory that the program may have, the part that it keeps while it is idle, and
    /// the shared memory that other processes count as well.
    pub allowance: u64,
    pub kept_idle: u64,
    pub shared: u64,
    /// The part of [`Self::allowance`] until the next look, bytes.
    pub soon: u64,
    /// The memory that the program may have, if shared memory counts in full, bytes.
    pub whole_most: u64,
    /// Memory besides the pager's, bytes.
    pub besides: u64,
    /// The pager's budget, and the least with which it works, bytes.
    pub budget: u64,
    pub least: u64,
}

/// The next step of the thread that watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It ends. Another thread watches after the call.
    End,
    /// The thread gives the program up, for this reason, and ends.
    Refuse(&'static str),
    /// It takes the program over, with this budget, and looks again.
    TakeOver { budget: u64 },
    /// It looks for system calls, and waits.
    LookAhead { wait: Duration },
    /// It waits.
    Wait { wait: Duration },
    /// It keeps the pager at its budget, and waits.
    Keep(Keep),
}

/// The orders to a pager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Looks in a row with a starved thread and no hope.
    pub hopeless: u32,
    /// True if starved threads wait; otherwise the program ends with a message.
    pub is_patient: bool,
    /// True if threads that need an evicted page wait.
    pub is_suspended: bool,
    /// The new budget, if it changes.
    pub budget: Option<u64>,
    pub wait: Duration,
}

/// The next step after a look.
pub fn decide(seen: &Observation) -> Action {
    match seen {
        Observation::EndWanted => Action::End,
        Observation::Filtered => Action::Refuse(FILTERS),
        Observation::Unmeasured => {
            Action::Refuse("it has no /proc, where uzswap would read its mappings")
        }
        Observation::Unmanaged(seen) => before_take_over(seen),
        Observation::Managed(seen) => Action::Keep(keep(seen)),
    }
}

fn before_take_over(seen: &Unmanaged) -> Action {
    let Unmanaged { is_wanted, is_refused, is_recorded, used, allowance } = *seen;
    let room = allowance.saturating_sub(used);
    let wait = wait(room);
    if is_refused {
        return Action::Wait { wait };
    }
    if is_wanted || room < reserve(allowance) && used >= MANAGED_MIN {
        // If accesses are recorded, memory besides the pager's pages does not count.
        let cost = if is_recorded { 0 } else { COST };
        return Action::TakeOver { budget: allowance.saturating_sub(cost).max(BUDGET_LEAST) };
    }
    match used > allowance / 2 {
        true => Action::LookAhead { wait },
        false => Action::Wait { wait },
    }
}

/// Keeps the pager's budget at the allowance, less other memory. Shared memory counts in both.
fn keep(seen: &Managed) -> Keep {
    let least = least_budget(seen.least);
    let is_slowed = seen.is_slowed && !seen.is_starved && !seen.is_read;
    // A process whose budget is below its least, or below its share, starves only for that reason.
    // It gets more now.
    let is_cut = least > seen.budget || seen.kept_idle < seen.allowance;
    let is_hopeless = seen.is_starved && !seen.may_hope && !is_cut;
    let hopeless = if is_hopeless { seen.hopeless + 1 } else { 0 };
    let most = match (seen.is_read, seen.is_suspended) {
        (true, _) => u64::MAX,
        (false, true) => 0,
        (false, false) if seen.is_starved => seen.allowance.saturating_add(seen.shared),
        (false, false) => {
            let most = seen.allowance.min(seen.kept_idle).saturating_add(seen.shared);
            most.min(seen.whole_most)
        }
    };
    let budget_of = |most: u64| most.saturating_sub(seen.besides).max(least);
    let is_near = |budget: u64, step| budget.abs_diff(seen.budget) <= seen.budget / step;
    // Other processes wait for a process that starves or is read, so such a process gets all of its
    // budget in one step.
    let soon = match seen.is_read || seen.is_starved {
        true => u64::MAX,
        false => seen.soon.saturating_add(seen.shared),
    };
    let (budget, wanted) = (budget_of(most.min(soon)), budget_of(most));
    let stays = is_near(wanted, BUDGET_STEP) || is_near(budget, GROWTH_STEP);
    let stays = stays && seen.budget >= least;
    // The pager charges its pages as they come in. Only memory besides the pager's grows unseen.
    let room = if seen.is_recorded { u64::MAX } else { (most / 4).max(1 << 20) };
    Keep {
        hopeless,
        is_patient: hopeless < HOPELESS,
        is_suspended: seen.is_suspended || is_slowed,
        budget: (!stays && !seen.is_recorded).then_some(budget),
        wait: match (seen.is_suspended, is_slowed) {
            (true, _) => WAIT_MAX,
            (false, true) => SLICE / 4,
            (false, false) => wait(room),
        },
    }
}

/// A slowed process's faults are served in one of [`SLICES`] slices of time.
const SLICE: Duration = Duration::from_millis(50);
const SLICES: u64 = 4;

/// True if the faults of a process are not served now, because many processes before it work and
/// need the CPUs. Its faults are served a quarter of the time, by the clock's milliseconds.
pub fn is_slowed(ahead: u64, cpus: u64, now: u64, process: u64) -> bool {
    ahead >= 2 * cpus && !(now / SLICE.as_millis() as u64 + process).is_multiple_of(SLICES)
}

/// The least budget of a pager that needs `least` bytes.
pub fn least_budget(least: u64) -> u64 {
    least.max(BUDGET_LEAST)
}

/// Bytes that a process needs before it is taken over: it gives no memory back while it is small.
pub fn least_unmanaged(used: u64) -> u64 {
    used.min(MANAGED_MIN)
}

/// Bytes that a process needs after the take-over: its memory outside of the pager, and the pager's
/// least.
pub fn least_managed(besides: u64, least: u64) -> u64 {
    besides.saturating_add(least_budget(least))
}

/// The time in which the program could use `room` bytes up.
fn wait(room: u64) -> Duration {
    Duration::from_secs_f64(room as f64 / GROWTH as f64).clamp(WAIT_MIN, WAIT_MAX)
}

/// The part of an allowance that must be free when a program is taken over: for the take-over, and
/// for memory that the program asks for between two looks.
fn reserve(allowance: u64) -> u64 {
    (allowance / 4).max((COST + BETWEEN).min(allowance / 2))
}

/// True if a program with `bytes` of memory must be taken over.
pub fn is_too_much(bytes: u64, allowance: u64) -> bool {
    bytes > allowance - reserve(allowance)
}

/// The number of forks that may copy all of a program's memory before the program is taken over.
const COPIES: u64 = 3;

/// True if a program must be taken over before it forks: if [`COPIES`] children each copied all of
/// its memory, that would be too much. A small program gives nothing back.
pub fn is_too_much_to_copy(used: u64, allowance: u64) -> bool {
    used >= MANAGED_MIN && is_too_much(used.saturating_mul(1 + COPIES), allowance)
}

/// True if mappings that were left open must be searched for used pages.
pub fn has_grown(besides: u64, at_last_look: u64) -> bool {
    besides > at_last_look + LOOK_STEP
}

/// Shared memory in bytes; less than [`SHARED_LEAST`] counts as none.
pub fn counted_shared(bytes: u64) -> u64 {
    if bytes < SHARED_LEAST { 0 } else { bytes }
}

/// The time until shared memory is measured again, if the last measurement `took` that long. The
/// time is short after a fork, because the child may execute another program, and then grows.
pub fn shared_wait(is_new: bool, before: Duration, took: Duration) -> Duration {
    let wait = if is_new { WAIT_MIN } else { (before * 2).min(SHARED_WAIT) };
    wait.max(took * SHARED_PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn unmanaged(used: u64, allowance: u64) -> Unmanaged {
        let (is_wanted, is_refused, is_recorded) = (false, false, false);
        Unmanaged { is_wanted, is_refused, is_recorded, used, allowance }
    }

    fn step(seen: Unmanaged) -> Action {
        decide(&Observation::Unmanaged(seen))
    }

    fn is_taken(used: u64, allowance: u64) -> bool {
        matches!(step(unmanaged(used, allowance)), Action::TakeOver { .. })
    }

    const MANAGED: Managed = Managed {
        is_starved: false,
        may_hope: true,
        hopeless: 0,
        is_suspended: false,
        is_slowed: false,
        is_read: false,
        is_recorded: false,
        allowance: 64 * MIB,
        soon: u64::MAX,
        kept_idle: u64::MAX,
        shared: 0,
        whole_most: u64::MAX,
        besides: 7 * MIB,
        budget: 57 * MIB,
        least: 5 * MIB,
    };

    fn kept(seen: Managed) -> Keep {
        match decide(&Observation::Managed(seen)) {
            Action::Keep(keep) => keep,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_thread_that_is_to_end_ends_and_a_filtered_program_is_given_up() {
        assert_eq!(decide(&Observation::EndWanted), Action::End);
        assert!(matches!(decide(&Observation::Filtered), Action::Refuse(_)));
        assert!(matches!(decide(&Observation::Unmeasured), Action::Refuse(_)));
    }

    #[test]
    fn a_program_is_taken_over_when_a_quarter_is_left_and_it_is_large() {
        assert!(!is_taken(75 * MIB, 100 * MIB), "just a quarter");
        assert!(is_taken(75 * MIB + 1, 100 * MIB));
        // A larger part of a small allowance stays for the take-over: 11 MiB, but half at most.
        assert!(!is_taken(29 * MIB, 40 * MIB));
        assert!(is_taken(29 * MIB + 1, 40 * MIB));
        assert!(!is_taken(MANAGED_MIN - 1, 16 * MIB), "small programs are left alone");
        assert!(is_taken(MANAGED_MIN, 16 * MIB));
    }

    #[test]
    fn a_program_with_a_waiting_thread_is_taken_over_however_small_it_is() {
        let seen = Unmanaged { is_wanted: true, ..unmanaged(MIB, 64 * MIB) };
        assert_eq!(step(seen), Action::TakeOver { budget: 57 * MIB });
        let little = Unmanaged { allowance: 9 * MIB, ..seen };
        assert_eq!(step(little), Action::TakeOver { budget: BUDGET_LEAST });
        // Checks that `look` and the watching thread agree: a request is too much exactly if memory
        // would be short.
        for (bytes, allowance) in [(48, 64), (49, 64), (29, 40), (30, 40), (8, 16), (9, 16)] {
            let is_short = allowance * MIB - bytes * MIB < reserve(allowance * MIB);
            assert_eq!(is_too_much(bytes * MIB, allowance * MIB), is_short);
        }
        assert!(is_too_much(u64::MAX, u64::MAX) && !is_too_much(0, 0));
    }

    #[test]
    fn a_program_that_cannot_be_taken_over_is_only_counted() {
        let seen = Unmanaged { is_wanted: true, is_refused: true, ..unmanaged(99 * MIB, 64 * MIB) };
        assert_eq!(step(seen), Action::Wait { wait: WAIT_MIN });
    }

    #[test]
    fn calls_are_looked_for_when_half_is_used() {
        let wait = |used| step(unmanaged(used, 1 << 30));
        assert!(matches!(wait(1 << 29), Action::Wait { .. }));
        assert!(matches!(wait((1 << 29) + 1), Action::LookAhead { .. }));
    }

    #[test]
    fn a_look_comes_before_the_room_can_be_used_up() {
        let wait = |room| match step(unmanaged(0, room)) {
            Action::Wait { wait } => wait,
            other => panic!("{other:?}"),
        };
        assert_eq!((wait(0), wait(8 * MIB)), (WAIT_MIN, WAIT_MIN));
        assert_eq!(wait(80 * MIB).as_micros(), 19_531);
        assert_eq!((wait(410 * MIB), wait(u64::MAX)), (WAIT_MAX, WAIT_MAX));
    }

    #[test]
    fn the_budget_follows_the_allowance_and_small_changes_do_not_count() {
        assert_eq!(kept(MANAGED).budget, None);
        let of = |allowance| kept(Managed { allowance, ..MANAGED }).budget;
        let step = 57 * MIB / BUDGET_STEP;
        assert_eq!((of(64 * MIB + step), of(64 * MIB - step)), (None, None));
        assert_eq!(of(64 * MIB + step + 1), Some(57 * MIB + step + 1));
        assert_eq!(of(64 * MIB - step - 1), Some(57 * MIB - step - 1));
        assert_eq!((of(15 * MIB), of(3 * MIB)), (Some(8 * MIB), Some(8 * MIB)), "at least that");
        let idle = kept(Managed { kept_idle: 30 * MIB, ..MANAGED }).budget;
        assert_eq!(idle, Some(30 * MIB - MANAGED.besides));
        let starved = Managed { kept_idle: 30 * MIB, is_starved: true, ..MANAGED };
        let starved = kept(Managed { budget: 30 * MIB, hopeless: 99, may_hope: false, ..starved });
        assert_eq!(starved.budget, Some(MANAGED.allowance - MANAGED.besides));
        assert_eq!(starved.hopeless, 0, "it has not had its share");
        let shared = kept(Managed { shared: 20 * MIB, ..MANAGED });
        assert_eq!(shared.budget, Some(77 * MIB), "it is in the memory besides, too");
        assert_eq!(of(u64::MAX), Some(u64::MAX - 7 * MIB));
        let copied = Managed { shared: 20 * MIB, whole_most: 50 * MIB, ..MANAGED };
        assert_eq!(kept(copied).budget, Some(43 * MIB), "each shared page may be copied");
        let starved = Managed { is_starved: true, ..copied };
        assert_eq!(kept(starved).budget, Some(77 * MIB), "rather than end");
    }

    #[test]
    fn a_budget_grows_in_steps_that_leave_room_to_others_unless_a_thread_starves() {
        let of = |soon| kept(Managed { allowance: 90 * MIB, soon, ..MANAGED }).budget;
        assert_eq!(of(66 * MIB), Some(59 * MIB));
        let little = 57 * MIB / GROWTH_STEP;
        assert_eq!((of(64 * MIB + little), of(64 * MIB + little + 1).is_some()), (None, true));
        assert_eq!(of(60 * MIB), Some(53 * MIB), "it uses less than it did");
        let near = Managed { allowance: 64 * MIB, soon: 60 * MIB, ..MANAGED };
        assert_eq!(kept(near).budget, None, "it has its share");
        let starved = Managed { is_starved: true, ..near };
        assert_eq!(kept(Managed { allowance: 90 * MIB, ..starved }).budget, Some(83 * MIB));
        let shared = Managed { soon: 66 * MIB, shared: 20 * MIB, ..MANAGED };
        assert_eq!(kept(shared).budget, Some(77 * MIB));
    }

    #[test]
    fn the_pages_of_a_recorded_program_have_the_whole_allowance_all_the_time() {
        let seen = Unmanaged { is_wanted: true, is_recorded: true, ..unmanaged(MIB, 64 * MIB) };
        assert_eq!(step(seen), Action::TakeOver { budget: 64 * MIB });
        let keep = kept(Managed { is_recorded: true, allowance: 9 * MIB, ..MANAGED });
        assert_eq!((keep.budget, keep.wait), (None, WAIT_MAX));
    }

    #[test]
    fn the_pages_of_a_suspended_process_leave_and_those_that_are_read_stay() {
        let suspended = kept(Managed { is_suspended: true, ..MANAGED });
        assert_eq!(
            (suspended.is_suspended, suspended.budget, suspended.wait),
            (true, Some(BUDGET_LEAST), WAIT_MAX)
        );
        let read = kept(Managed { is_read: true, is_suspended: true, ..MANAGED });
        assert_eq!(read.budget, Some(u64::MAX - 7 * MIB));
    }

    #[test]
    fn a_process_behind_many_that_work_is_served_a_quarter_of_the_time() {
        let served =
            |ahead, process| (0..2000).filter(|now| !is_slowed(ahead, 2, *now, process)).count();
        assert_eq!([served(3, 0), served(4, 0), served(20, 7)], [2000, 500, 500]);
        let slowed = kept(Managed { is_slowed: true, ..MANAGED });
        assert_eq!((slowed.is_suspended, slowed.budget), (true, None), "its memory stays");
        assert!(slowed.wait < SLICE);
        let starved = kept(Managed { is_slowed: true, is_starved: true, ..MANAGED });
        assert!(!starved.is_suspended);
    }

    #[test]
    fn a_starved_program_waits_as_long_as_there_is_hope_and_a_hundred_looks_more() {
        let starved = Managed { is_starved: true, ..MANAGED };
        assert_eq!(kept(Managed { hopeless: 99, ..starved }).hopeless, 0, "there is hope again");
        let last = Managed { hopeless: HOPELESS - 2, may_hope: false, ..starved };
        assert_eq!((kept(last).is_patient, kept(last).hopeless), (true, HOPELESS - 1));
        let over = Managed { hopeless: HOPELESS - 1, ..last };
        assert!(!kept(over).is_patient);
        assert_eq!(kept(Managed { is_starved: false, ..over }).hopeless, 0);
    }

    #[test]
    fn a_pager_always_has_the_memory_that_it_needs_to_go_on_and_does_not_end_for_lack_of_it() {
        let cramped = Managed { allowance: 8 * MIB, besides: 3 * MIB, budget: 8 * MIB, ..MANAGED };
        assert_eq!(kept(cramped).budget, None, "8 MiB are its least");
        let pinned = Managed { least: 12 * MIB, ..cramped };
        assert_eq!(kept(pinned).budget, Some(12 * MIB));
        let last = Managed { hopeless: HOPELESS - 1, may_hope: false, is_starved: true, ..pinned };
        assert!(kept(last).is_patient, "it gets more now");
        assert!(!kept(Managed { budget: 12 * MIB, ..last }).is_patient);
        // Even one byte more than the memory counts.
        let nearly = Managed { least: 8 * MIB + 1, ..cramped };
        assert_eq!(kept(nearly).budget, Some(8 * MIB + 1));
        let suspended = Managed { is_suspended: true, ..pinned };
        assert_eq!(kept(suspended).budget, Some(12 * MIB));
        assert_eq!(least_managed(3 * MIB, 5 * MIB), 11 * MIB);
        assert_eq!(least_managed(3 * MIB, 9 * MIB), 12 * MIB);
        assert_eq!([9 * MIB, 99 * MIB].map(least_unmanaged), [9 * MIB, MANAGED_MIN]);
    }

    #[test]
    fn shared_memory_is_measured_less_and_less_often() {
        let none = Duration::ZERO;
        assert_eq!(shared_wait(true, WAIT_MAX, none), WAIT_MIN);
        assert_eq!(shared_wait(false, WAIT_MIN, none), WAIT_MIN * 2);
        assert_eq!(shared_wait(false, WAIT_MAX, none), SHARED_WAIT);
        let long = Duration::from_millis(10);
        assert_eq!(shared_wait(true, WAIT_MIN, long), Duration::from_millis(200));
        assert_eq!([MIB - 1, MIB].map(counted_shared), [0, MIB]);
        assert!(!has_grown(LOOK_STEP, 0) && has_grown(LOOK_STEP + 1, 0));
    }
}
