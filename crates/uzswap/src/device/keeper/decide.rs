//! The decisions of the keeper, apart from its acts: from a phase and a look at the machine to the
//! next step. The simulator of the processes asks the same functions (device/simulator/).

use super::phase::Phase;
use std::time::Duration;

/// The periodic work of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// To have as many areas as are wanted.
    Serve,
    /// To begin to have everything read back.
    BeginEmptying,
    /// To go on with that; see [`Emptying`].
    Empty,
    /// To undo everything.
    End,
    /// To be of another phase.
    Become(Phase),
    /// Nothing.
    Wait,
}

/// The work now. `is_wanted`: somebody needs the cache, or may. `is_early`: the kernel is not to be
/// asked again yet.
pub fn task(phase: Phase, is_wanted: bool, is_early: bool) -> Task {
    match phase {
        Phase::Starting | Phase::Serving if is_wanted => Task::Serve,
        Phase::Starting | Phase::Serving => Task::BeginEmptying,
        Phase::Refused if is_wanted => Task::Become(Phase::Serving),
        Phase::Refused if is_early => Task::Wait,
        Phase::Refused => Task::Become(Phase::Emptying),
        Phase::Emptying | Phase::Lost => Task::Empty,
        Phase::Ending => Task::End,
        Phase::Over => Task::Wait,
    }
}

/// The process that switches areas off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchOff {
    /// There is none.
    Idle,
    /// It waits for the kernel.
    UnderWay,
    /// It has ended: as far as it knows the areas are off.
    Done,
    /// It has ended without that.
    Failed,
}

/// The state in which areas are read back.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// A process makes an area.
    pub has_maker: bool,
    /// The kernel lists an area of ours; `None`: it does not say.
    pub is_listed: Option<bool>,
    /// See there.
    pub off: SwitchOff,
    /// A run takes part.
    pub has_runs: bool,
}

/// The next step then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emptying {
    /// Something is under way.
    Wait,
    /// A process is to switch the areas off.
    SwitchOff,
    /// The kernel could not.
    Refuse,
    /// No page of ours is left anywhere.
    End,
}

impl Seen {
    /// The list of the kernel alone decides that nothing is left: a process that was to switch
    /// areas off may be mistaken, or have met another one.
    pub fn next(self) -> Emptying {
        match (self.is_listed, self.off) {
            _ if self.has_maker => Emptying::Wait,
            (None, _) => Emptying::Refuse,
            (_, SwitchOff::UnderWay) => Emptying::Wait,
            (Some(true), SwitchOff::Failed) => Emptying::Refuse,
            (Some(true), SwitchOff::Idle | SwitchOff::Done) => Emptying::SwitchOff,
            (Some(false), _) if self.has_runs => Emptying::Wait,
            (Some(false), _) => Emptying::End,
        }
    }
}

/// The phase after a refusal. `is_told_again`: the sender of the order to end repeats it.
pub fn refused(phase: Phase, is_told_again: bool) -> Phase {
    match phase {
        Phase::Lost => Phase::Lost,
        _ if is_told_again => Phase::Serving,
        _ => Phase::Refused,
    }
}

/// A daemon that lives less long than this was ended by the memory with which it is to go on.
const LIFE_MIN: Duration = Duration::from_millis(20);

/// After so many in a row the swapped pages are taken to be lost.
const SHORT_LIVES_MAX: u32 = 8;

/// Before another is tried; twice as long before the next, 10 s for all. The resource that they
/// lack, memory most likely, comes back with time.
const PAUSE: Duration = Duration::from_millis(20);

/// Daemons in a row that lived for no time.
#[derive(Debug, Default)]
pub struct ShortLives(u32);

impl ShortLives {
    /// One has died after so long.
    pub fn died_after(&mut self, life: Duration) {
        self.0 = if life < LIFE_MIN { self.0 + 1 } else { 0 };
    }

    /// One could not begin.
    pub fn failed(&mut self) {
        self.0 += 1;
    }

    /// How long to wait before the next; `None`: there were too many.
    pub fn pause(&self) -> Option<Duration> {
        (self.0 <= SHORT_LIVES_MAX).then(|| PAUSE * ((1 << self.0) - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_s_list_says_that_no_page_is_left() {
        let all = [SwitchOff::Idle, SwitchOff::UnderWay, SwitchOff::Done, SwitchOff::Failed];
        for off in all {
            for (is_listed, has_runs) in [(Some(true), false), (None, false), (Some(false), true)] {
                let seen = Seen { has_maker: false, is_listed, off, has_runs };
                assert_ne!(seen.next(), Emptying::End, "{seen:?}");
            }
            let seen = Seen { has_maker: false, is_listed: Some(false), off, has_runs: false };
            assert_eq!(seen.next() == Emptying::End, off != SwitchOff::UnderWay, "{off:?}");
            assert_eq!(Seen { has_maker: true, ..seen }.next(), Emptying::Wait);
        }
    }

    #[test]
    fn nine_daemons_that_cannot_begin_are_waited_for_ten_seconds() {
        let (mut lives, mut pauses) = (ShortLives::default(), Vec::new());
        lives.died_after(LIFE_MIN);
        while let Some(pause) = lives.pause() {
            pauses.push(pause);
            lives.failed();
        }
        assert_eq!((pauses.len(), pauses[0]), (9, Duration::ZERO));
        assert_eq!(pauses.iter().sum::<Duration>(), Duration::from_millis(10_040));
    }
}
