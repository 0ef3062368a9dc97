//! Where the keeper is between its beginning and its end: **the one place** where that changes.
//!
//! The phase alone decides which processes may be started, ended, killed or removed. A step that
//! the tables do not have is a mistake of ours, and ends the keeper, in every build: its daemon
//! goes on and starts another one. To go on instead could end a process that holds pages.

use std::fmt;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first daemon and the first area are being made.
    Starting,
    /// Somebody needs the cache.
    Serving,
    /// Nobody does: a process of ours has the kernel read everything back.
    Emptying,
    /// The kernel could not, most likely for want of memory. It is asked again after a while.
    Refused,
    /// No daemon can go on. Requests for swapped pages are answered with errors.
    Lost,
    /// The kernel lists no area of ours any more.
    Ending,
    /// Everything is undone.
    Over,
}

use Phase::{Emptying, Ending, Lost, Over, Refused, Serving, Starting};

/// The acts that are not always permitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// A run takes part.
    TakeRun,
    /// A further area is made.
    MakeArea,
    /// A daemon is started.
    StartDaemon,
    /// A daemon that does not serve is killed, for another to go on.
    KillDaemon,
    /// The daemon is told to end, and killed if it does not.
    EndDaemon,
    /// Devices, mounts, groups and the folder are removed.
    Remove,
}

use Act::{EndDaemon, KillDaemon, MakeArea, Remove, StartDaemon, TakeRun};

/// From, to, and when.
pub const TRANSITIONS: &[(Phase, Phase, &str)] = &[
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

/// The acts that a phase permits.
pub const PERMITTED: &[(Phase, &[Act])] = &[
    (Starting, &[MakeArea, StartDaemon, KillDaemon]),
    (Serving, &[TakeRun, MakeArea, StartDaemon, KillDaemon]),
    (Emptying, &[StartDaemon, KillDaemon]),
    (Refused, &[TakeRun, StartDaemon, KillDaemon]),
    (Lost, &[]),
    (Ending, &[EndDaemon, Remove]),
    (Over, &[]),
];

impl Phase {
    /// True if it may become another in one step.
    pub fn may_become(self, next: Self) -> bool {
        TRANSITIONS.iter().any(|(from, to, _)| (*from, *to) == (self, next))
    }

    /// Becomes another.
    pub fn become_next(&mut self, next: Self) {
        assert!(self.may_become(next), "a keeper that is {self} does not become {next}");
        *self = next;
    }

    /// True if an act is permitted.
    pub fn may(self, act: Act) -> bool {
        PERMITTED.iter().any(|(phase, acts)| *phase == self && acts.contains(&act))
    }

    /// Said before it is done.
    pub fn require(self, act: Act) {
        assert!(self.may(act), "a keeper that is {self} may not {act:?}");
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Phase; 7] = [Starting, Serving, Emptying, Refused, Lost, Ending, Over];

    #[test]
    fn only_where_no_area_is_listed_anything_is_ended_or_removed() {
        for phase in ALL {
            let ends = phase.may(EndDaemon) || phase.may(Remove);
            assert_eq!(ends, phase == Ending, "{phase}");
            // A daemon is replaced wherever there may be pages.
            let has_pages = !matches!(phase, Lost | Ending | Over);
            assert_eq!(phase.may(StartDaemon), has_pages, "{phase}");
        }
        let into_ending = TRANSITIONS.iter().filter(|(_, to, _)| *to == Ending);
        assert!(into_ending.clone().all(|(.., when)| when.starts_with("the kernel lists no area")));
        assert!(into_ending.count() > 0);
    }

    #[test]
    fn every_phase_is_reached_and_every_one_comes_to_an_end() {
        let reached = |from: Phase| {
            let mut all = vec![from];
            let mut next = 0;
            while let Some(phase) = all.get(next).copied() {
                let more = TRANSITIONS.iter().filter(|(from, ..)| *from == phase);
                more.for_each(|(_, to, _)| {
                    if !all.contains(to) {
                        all.push(*to)
                    }
                });
                next += 1;
            }
            all
        };
        assert!(ALL.iter().all(|phase| reached(Starting).contains(phase)));
        assert!(ALL.iter().all(|phase| reached(*phase).contains(&Over)));
    }

    #[test]
    #[should_panic(expected = "does not become")]
    fn a_serving_keeper_does_not_end_at_once() {
        let mut phase = Serving;
        phase.become_next(Ending);
    }

    /// docs/design/recovery.md has both tables, row by row.
    #[test]
    fn the_document_has_the_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/design/recovery.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (_, document) = document.split_once("### The keeper").unwrap();
        let rows = |heading: &str| {
            let (_, rest) = document.split_once(heading).unwrap();
            let table = rest.lines().skip_while(|line| !line.starts_with('|'));
            let rows = table.take_while(|line| line.starts_with('|')).skip(2);
            rows.map(str::to_owned).collect::<Vec<_>>()
        };
        let transitions =
            TRANSITIONS.iter().map(|(from, to, when)| format!("| {from} | {to} | {when} |"));
        assert_eq!(rows("goes from one phase to another:"), transitions.collect::<Vec<_>>());
        let permitted = PERMITTED.iter().map(|(phase, acts)| {
            let acts: Vec<_> = acts.iter().map(|act| format!("{act:?}")).collect();
            let acts = if acts.is_empty() { "nothing".into() } else { acts.join(", ") };
            format!("| {phase} | {acts} |")
        });
        assert_eq!(rows("each phase permits:"), permitted.collect::<Vec<_>>());
    }
}
