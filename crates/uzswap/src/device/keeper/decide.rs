//! The decisions of the keeper, apart from its acts: the next step for a phase and a look at the
//! machine. The simulator calls the same functions (device/simulator/).

use super::phase::Phase;
use std::time::Duration;

/// The periodic work of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Make the wanted areas.
    Serve,
    /// Begin to have everything read back.
    BeginEmptying,
    /// Continue to empty an area; see [`Emptying`].
    Empty,
    /// Undo everything.
    End,
    /// Enter another phase.
    Become(Phase),
    Wait,
}

/// The work to do now. `is_wanted`: a process needs the cache, or may need it later. `is_early`: it
/// is too early to ask the kernel again.
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

/// The state of the process that switches areas off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwitchOff {
    /// There is no such process.
    Idle,
    /// The process waits for the kernel.
    UnderWay,
    /// The process has ended, and reports that the areas are off.
    Done,
    /// The process has failed.
    Failed,
}

/// A look at the machine while areas are read back.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// A process makes an area.
    pub has_maker: bool,
    /// True if the kernel lists an area of ours; `None` if its list cannot be read.
    pub is_listed: Option<bool>,
    /// The process that switches areas off.
    pub off: SwitchOff,
    /// True if a run takes part.
    pub has_runs: bool,
}

/// The next step of emptying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emptying {
    /// Wait, since a step is under way.
    Wait,
    /// Start a process that switches the areas off.
    SwitchOff,
    /// Report that the kernel could not read everything back.
    Refuse,
    /// End: no page of ours is left anywhere.
    End,
}

impl Seen {
    /// The kernel's list alone decides that nothing is left. A process that was to switch areas off
    /// may be mistaken, or another such process may have interfered.
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

/// The phase after a refusal. `is_told_again`: the order to end will be repeated.
pub fn refused(phase: Phase, is_told_again: bool) -> Phase {
    match phase {
        Phase::Lost => Phase::Lost,
        _ if is_told_again => Phase::Serving,
        _ => Phase::Refused,
    }
}

/// A daemon that lives for less than this was ended by the memory that it took over.
const LIFE_MIN: Duration = Duration::from_millis(20);

/// After this many consecutive short lives, the swapped pages count as lost.
const SHORT_LIVES_MAX: u32 = 8;

/// The pause after the first failure. Each pause is twice as long as the last, 10 s in all. The
/// resource that daemons lack, memory most likely, comes back with time.
const PAUSE: Duration = Duration::from_millis(20);

/// Counts daemons in a row that died soon after their start.
#[derive(Debug, Default)]
pub struct ShortLives(u32);

impl ShortLives {
    /// A daemon has died after this time.
    pub fn died_after(&mut self, life: Duration) {
        self.0 = if life < LIFE_MIN { self.0 + 1 } else { 0 };
    }

    /// A daemon could not start.
    pub fn failed(&mut self) {
        self.0 += 1;
    }

    /// The pause before the next start; `None` after too many failures.
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
