//! The stage of this program's take-over: **the one place** where it changes.
//!
//! Threads that ask for memory, replaced calls, forks and the thread that watches ask here. A step
//! that is not in the table is our mistake and ends the program, in every build, because a page
//! could be lost. The stage is one atomic, and no step allocates or takes a lock: the stage changes
//! in forked children, and while other threads stand still.

use crate::{die, front};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};
use uzswap_tree::front::{BARE, FILTERED, TAKING};

/// The stages, in the order in which [`is_taken_over`] and [`is_complete`] compare them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// This library is loaded, and no thread watches.
    Loaded,
    /// A thread watches the program's memory.
    Watched,
    /// Memory is short. A thread that asks for memory waits until the program is taken over.
    TakingOver,
    /// The program cannot be taken over. Its memory is only counted.
    Refused,
    /// Its calls are replaced, and its memory is being adopted.
    Adopting,
    /// Its memory may leave.
    Managed,
    /// The program is a child of a managed program, and has no threads of ours yet.
    Bare,
    /// The program was taken over, and has all of its memory back.
    LeftAlone,
}

use Stage::{Adopting, Bare, LeftAlone, Loaded, Managed, Refused, TakingOver, Watched};

const ALL: [Stage; 8] = [Loaded, Watched, TakingOver, Refused, Adopting, Managed, Bare, LeftAlone];

const _: () = {
    let mut at = 0;
    while at < ALL.len() {
        assert!(ALL[at] as usize == at);
        at += 1;
    }
};

/// From, to, and when. docs/design/in-process.md has the same table.
const TRANSITIONS: &[(Stage, Stage, &str)] = &[
    (Loaded, Watched, "it has much memory, or may write much without a further request"),
    (Loaded, Loaded, "in a child"),
    (Watched, TakingOver, "its memory is short, or will be by a request or a fork"),
    (
        Watched,
        Refused,
        "no thread can be started, few calls are permitted (seccomp), there is no /proc or another \
         PID namespace's, or an emulator runs it",
    ),
    (Watched, Loaded, "in a child"),
    (TakingOver, Adopting, "its calls are replaced, while its threads stand still"),
    (TakingOver, Refused, "it cannot be taken over, or permits itself few calls"),
    (TakingOver, Loaded, "in a child"),
    (Refused, Loaded, "in a child"),
    (Adopting, Managed, "its memory is adopted"),
    (Managed, Bare, "in a child"),
    (
        Managed,
        LeftAlone,
        "it is about to forbid itself a call that brings pages in (seccomp), has itself traced, or \
         makes a thread with the variables of another one",
    ),
    (Managed, LeftAlone, "in a child, whose pages cannot be watched"),
    (Bare, Managed, "threads of ours are started"),
    (Bare, Bare, "in a child"),
    (Bare, LeftAlone, "like a managed one"),
];

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Loaded => "Loaded",
            Watched => "Watched",
            TakingOver => "TakingOver",
            Refused => "Refused",
            Adopting => "Adopting",
            Managed => "Managed",
            Bare => "Bare",
            LeftAlone => "LeftAlone",
        }
    }

    fn may_become(self, next: Self) -> bool {
        TRANSITIONS.iter().any(|(from, to, _)| (*from, *to) == (self, next))
    }

    /// The bits by which the preloaded library sees the stage.
    fn waits(self, has_own_allocator: bool) -> u32 {
        match self {
            TakingOver => TAKING,
            // The program's own allocator may hold its locks when it asks for memory.
            Bare if !has_own_allocator => BARE,
            LeftAlone => FILTERED,
            _ => 0,
        }
    }
}

struct Current(AtomicU8);

static CURRENT: Current = Current(AtomicU8::new(Loaded as u8));

impl Current {
    /// The stage at present. A release store publishes a stage with everything that was prepared
    /// for it.
    fn get(&self) -> Stage {
        ALL[usize::from(self.0.load(Acquire)) % ALL.len()]
    }

    fn change(&self, from: Stage, next: Stage) -> bool {
        if !from.may_become(next) {
            die(&["a program that is ", from.name(), " does not become ", next.name()]);
        }
        let is_changed = self.0.compare_exchange(from as u8, next as u8, SeqCst, Relaxed).is_ok();
        if is_changed {
            self.show();
        }
        is_changed
    }

    /// Shows the stage to the preloaded library. If several threads show it at the same time, the
    /// last thread shows the present stage.
    fn show(&self) {
        let Some(front) = front() else { return };
        loop {
            let stage = self.get();
            // `FILTERED` is set by the preloaded library, too.
            front.waits.fetch_and(!(TAKING | BARE), SeqCst);
            front.waits.fetch_or(stage.waits(front.has_own_allocator), SeqCst);
            if self.get() == stage {
                return;
            }
        }
    }
}

pub fn now() -> Stage {
    CURRENT.get()
}

/// Goes from one stage to another. `false` if the program is in another stage, which it keeps.
pub fn change(from: Stage, next: Stage) -> bool {
    CURRENT.change(from, next)
}

/// Goes from any stage to `next`.
pub fn enter(next: Stage) {
    while !change(now(), next) {}
}

/// Gives up a program that has not been taken over. `false` if the program was given up or taken
/// over before.
pub fn refuse() -> bool {
    change(Watched, Refused) || change(TakingOver, Refused)
}

/// True once there is a pager, and the program's calls are replaced.
#[inline(always)]
pub fn is_taken_over() -> bool {
    CURRENT.0.load(Acquire) >= Adopting as u8
}

/// True once all memory that may be adopted is.
#[inline(always)]
pub fn is_complete() -> bool {
    CURRENT.0.load(Acquire) >= Managed as u8
}

/// True in a program that was taken over and is left alone now.
#[inline(always)]
pub fn is_left() -> bool {
    CURRENT.0.load(Acquire) == LeftAlone as u8
}

/// True once the program was left alone because of its filter.
static IS_CONFINED: AtomicBool = AtomicBool::new(false);

/// Leaves the program alone because of its filter. From then on the agent makes no call that the
/// program has not made.
pub fn confine() {
    IS_CONFINED.store(true, Release);
    if !is_left() {
        enter(LeftAlone);
    }
}

/// True after [`confine`].
#[inline(always)]
pub fn is_confined() -> bool {
    IS_CONFINED.load(Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    fn current(stage: Stage) -> Current {
        Current(AtomicU8::new(stage as u8))
    }

    #[test]
    fn every_stage_is_reached_and_pages_are_out_only_behind_an_adoption() {
        let reached = |without: Option<Stage>| {
            let mut all = vec![Loaded];
            let mut next = 0;
            while let Some(stage) = all.get(next).copied() {
                let to = TRANSITIONS.iter().filter(|(from, ..)| *from == stage);
                for (_, to, _) in to {
                    if Some(*to) != without && !all.contains(to) {
                        all.push(*to);
                    }
                }
                next += 1;
            }
            all
        };
        assert!(ALL.iter().all(|stage| reached(None).contains(stage)));
        let unmanaged = [Loaded, Watched, TakingOver, Refused];
        assert!(reached(Some(Adopting)).iter().all(|stage| unmanaged.contains(stage)));
        let back = |(from, to, _): &&(Stage, Stage, &str)| {
            !unmanaged.contains(from) && unmanaged.contains(to)
        };
        assert!(!TRANSITIONS.iter().any(|row| back(&row)), "a pager is never forgotten");
        assert!(!TRANSITIONS.iter().any(|(from, ..)| *from == LeftAlone));
    }

    #[test]
    fn of_several_threads_that_make_a_step_one_is_told_that_it_did() {
        let current = current(Loaded);
        let won = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| won.fetch_add(current.change(Loaded, Watched).into(), Relaxed));
            }
        });
        assert_eq!((won.into_inner(), current.get()), (1, Watched));
    }

    #[test]
    #[should_panic(expected = "a program that is TakingOver does not become Managed")]
    fn nothing_is_managed_before_it_is_adopted() {
        current(TakingOver).change(TakingOver, Managed);
    }

    #[test]
    #[should_panic(expected = "a program that is LeftAlone does not become Bare")]
    fn a_program_that_is_left_alone_stays_so() {
        current(LeftAlone).change(LeftAlone, Bare);
    }

    #[test]
    fn the_comparisons_are_of_the_stages_that_they_name() {
        let taken_over = ALL.map(|stage| stage as u8 >= Adopting as u8);
        assert_eq!(
            ALL.map(|stage| matches!(stage, Adopting | Managed | Bare | LeftAlone)),
            taken_over
        );
        let complete = ALL.map(|stage| stage as u8 >= Managed as u8);
        assert_eq!(ALL.map(|stage| matches!(stage, Managed | Bare | LeftAlone)), complete);
    }

    #[test]
    fn the_document_has_the_table() {
        let rows = TRANSITIONS
            .iter()
            .map(|(from, to, when)| format!("| {} | {} | {when} |\n", from.name(), to.name()));
        let table = format!("| from | to | when |\n|---|---|---|\n{}\n", rows.collect::<String>());
        let document = include_str!("../../../docs/design/in-process.md");
        assert!(document.contains(&table), "docs/design/in-process.md is to have this:\n{table}");
    }
}
