//! The phases of the keeper from its beginning to its end. **This is the only place** that changes
//! them.
//!
//! The phase alone decides which processes may be started, ended, killed or removed.

use crate::device::phase::Phased;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first daemon and the first area are being made.
    Starting,
    /// A process needs the cache.
    Serving,
    /// No process needs the cache. A process of ours has the kernel read everything back.
    Emptying,
    /// The kernel could not read everything back, most likely for want of memory. The kernel will
    /// be asked again.
    Refused,
    /// No daemon can continue. Requests for swapped pages get errors.
    Lost,
    /// The kernel lists no area of ours any more.
    Ending,
    /// Everything is undone.
    Over,
}

use Phase::{Emptying, Ending, Lost, Over, Refused, Serving, Starting};

/// The acts that only some phases permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Let a run take part.
    TakeRun,
    /// Make a further area.
    MakeArea,
    /// Start a daemon.
    StartDaemon,
    /// Kill a daemon that does not serve, so that another can continue.
    KillDaemon,
    /// Tell the daemon to end, and kill it if it does not.
    EndDaemon,
    /// Remove devices, mounts, groups and the folder.
    Remove,
}

use Act::{EndDaemon, KillDaemon, MakeArea, Remove, StartDaemon, TakeRun};

impl Phased for Phase {
    type Act = Act;

    const OWNER: &'static str = "keeper";

    const TRANSITIONS: &'static [(Self, Self, &'static str)] = &[
        (Starting, Serving, "the kernel swaps to the first area"),
        (Starting, Emptying, "it could not be made"),
        (Starting, Lost, "no daemon can go on"),
        (Serving, Emptying, "the last run has left, or `serve` was told to end"),
        (Serving, Lost, "no daemon can go on"),
        (Emptying, Serving, "refused to `serve`, which serves on until it is told again"),
        (Emptying, Refused, "refused to others"),
        (Emptying, Lost, "no daemon can go on"),
        (Emptying, Ending, "the kernel lists no area of ours, and no run takes part"),
        (Refused, Serving, "a run takes part again"),
        (Refused, Emptying, "some seconds have passed"),
        (Refused, Lost, "no daemon can go on"),
        (Lost, Ending, "the kernel lists no area of ours, and no run takes part"),
        (Ending, Emptying, "somebody has switched an area on again before it was detached"),
        (Ending, Over, "everything is undone"),
    ];

    const PERMITTED: &'static [(Self, &'static [Act])] = &[
        (Starting, &[MakeArea, StartDaemon, KillDaemon]),
        (Serving, &[TakeRun, MakeArea, StartDaemon, KillDaemon]),
        (Emptying, &[StartDaemon, KillDaemon]),
        (Refused, &[TakeRun, StartDaemon, KillDaemon]),
        (Lost, &[]),
        (Ending, &[EndDaemon, Remove]),
        (Over, &[]),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::phase::tests::{all, check_tables};

    #[test]
    fn nothing_is_ended_or_removed_while_an_area_is_listed() {
        for phase in all::<Phase>() {
            let ends = phase.may(EndDaemon) || phase.may(Remove);
            assert_eq!(ends, phase == Ending, "{phase:?}");
            // A daemon is replaced wherever there may be pages.
            let has_pages = !matches!(phase, Lost | Ending | Over);
            assert_eq!(phase.may(StartDaemon), has_pages, "{phase:?}");
        }
        let into_ending = Phase::TRANSITIONS.iter().filter(|(_, to, _)| *to == Ending);
        assert!(into_ending.clone().all(|(.., when)| when.starts_with("the kernel lists no area")));
        assert!(into_ending.count() > 0);
    }

    #[test]
    fn every_phase_is_reached_comes_to_an_end_and_is_documented() {
        check_tables(Starting, Over);
    }

    #[test]
    #[should_panic(expected = "a keeper that is Serving does not become Ending")]
    fn a_serving_keeper_does_not_end_at_once() {
        Phase::Serving.become_next(Ending);
    }
}
