//! The phases of a process, and the acts that each permits: two tables, asserted in every build.
//!
//! A step that is not in the tables is a mistake of ours, and ends the process: the keeper starts
//! another daemon, or the daemon another keeper. Without the tables, a process that has pages could
//! end.

use std::fmt::Debug;

/// A phase of the keeper or of the daemon.
pub trait Phased: Copy + Debug + PartialEq + 'static {
    /// The acts that only some phases permit.
    type Act: Copy + Debug + PartialEq + 'static;

    /// The name of the process.
    const OWNER: &'static str;

    /// From, to, and the cause.
    const TRANSITIONS: &'static [(Self, Self, &'static str)];

    /// The acts that each phase permits.
    const PERMITTED: &'static [(Self, &'static [Self::Act])];

    /// True if the process may go from this phase to `next` in one step.
    fn may_become(self, next: Self) -> bool {
        Self::TRANSITIONS.iter().any(|(from, to, _)| (*from, *to) == (self, next))
    }

    /// Goes to another phase.
    fn become_next(&mut self, next: Self) {
        assert!(
            self.may_become(next),
            "a {} that is {self:?} does not become {next:?}",
            Self::OWNER
        );
        *self = next;
    }

    /// True if an act is permitted.
    fn may(self, act: Self::Act) -> bool {
        Self::PERMITTED.iter().any(|(phase, acts)| *phase == self && acts.contains(&act))
    }

    /// Asserts that an act is permitted, before it is done.
    fn require(self, act: Self::Act) {
        assert!(self.may(act), "a {} that is {self:?} may not {act:?}", Self::OWNER);
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The phases that can follow `from`, with `from` itself.
    pub fn reached<P: Phased>(from: P) -> Vec<P> {
        let (mut all, mut next) = (vec![from], 0);
        while let Some(phase) = all.get(next).copied() {
            for (_, to, _) in P::TRANSITIONS.iter().filter(|(from, ..)| *from == phase) {
                if !all.contains(to) {
                    all.push(*to);
                }
            }
            next += 1;
        }
        all
    }

    /// All phases of the second table.
    pub fn all<P: Phased>() -> impl Iterator<Item = P> {
        P::PERMITTED.iter().map(|(phase, _)| *phase)
    }

    /// Checks that docs/design/recovery.md has both tables, row by row, that every phase is
    /// reached, and that every phase leads to the last.
    pub fn check_tables<P: Phased>(first: P, last: P) {
        assert!(all().all(|phase| reached(first).contains(&phase)));
        assert!(all().all(|phase| reached::<P>(phase).contains(&last)));
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/design/recovery.md");
        let document = std::fs::read_to_string(path).unwrap();
        let (_, document) = document.split_once(&format!("### The {}\n", P::OWNER)).unwrap();
        let rows = |heading: &str| {
            let (_, rest) = document.split_once(heading).unwrap();
            let table = rest.lines().skip_while(|line| !line.starts_with('|'));
            let rows = table.take_while(|line| line.starts_with('|')).skip(2);
            rows.map(str::to_owned).collect::<Vec<_>>()
        };
        let transitions = P::TRANSITIONS.iter();
        let transitions =
            transitions.map(|(from, to, when)| format!("| {from:?} | {to:?} | {when} |"));
        assert_eq!(rows("goes from one phase to another:"), transitions.collect::<Vec<_>>());
        let permitted = P::PERMITTED.iter().map(|(phase, acts)| {
            let acts: Vec<_> = acts.iter().map(|act| format!("{act:?}")).collect();
            let acts = if acts.is_empty() { "nothing".into() } else { acts.join(", ") };
            format!("| {phase:?} | {acts} |")
        });
        assert_eq!(rows("each phase permits:"), permitted.collect::<Vec<_>>());
    }
}
