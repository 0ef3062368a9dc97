//! Histories of our processes by seeds, over a modelled kernel: keeper, daemon, runs and the
//! processes that switch areas on and off. They are killed and stopped at any step, and some are
//! slow. Phases and decisions are those of the real processes. The same seed gives the same
//! history.
//!
//! ```text
//! UZSWAP_SIMULATE_SECONDS=3600    how long; 2 without
//! UZSWAP_SIMULATE_SEED=12         that history alone, with its story
//! ```
//! Rules: no page is lost unless keeper and daemon are killed together. Two daemons never use the
//! memory at the same time. A process that needs a page gets it, even while a run is stopped. When
//! all runs have left, everything is undone, and every process ends.

#![allow(clippy::print_stdout, reason = "tests")]

mod daemon;
mod keeper;
mod kernel;
mod others;

use crate::device::phase::Phased;
use daemon::DaemonProcess;
use keeper::KeeperProcess;
use kernel::{Faults, Life, Pid, Role, Steps, WireId, World};
use others::{ForeignOn, Run, SwitchOff, SwitchOn};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The number of first steps, in which processes are killed and stopped.
const WILD_STEPS: u64 = 1500;

/// Steps within which a needed page must come, once no more processes are killed and no start
/// fails.
const ANSWER_STEPS: u32 = 4000;

/// Steps before stopped runs continue.
const CALM_STEPS: u32 = 300;

/// Steps within which everything must be undone.
const END_STEPS: u32 = 60_000;

/// Daemons that are killed or fail to start: fewer than the keeper's attempts.
const TROUBLES_MAX: u32 = 7;

fn program(role: &Role, wire: Option<WireId>) -> Box<dyn Steps> {
    match (role, wire) {
        (Role::Keeper, wire) => Box::new(KeeperProcess::new(wire)),
        (Role::Daemon, Some(wire)) => Box::new(DaemonProcess::new(wire)),
        (Role::SwitchOn, Some(wire)) => Box::new(SwitchOn::new(wire)),
        (Role::Run, _) => Box::new(Run::new()),
        (Role::ForeignOn, _) => Box::new(ForeignOn),
        (role, _) => Box::new(SwitchOff::new(role)),
    }
}

struct History {
    world: World,
    /// The number of consecutive steps in which no daemon answered.
    unanswered: u32,
    troubles: u32,
    /// The time at which systemd kills the keeper that it has told to end.
    stop_at: Option<Duration>,
    is_keeper_killed: bool,
}

impl History {
    fn new(seed: u64, faults: Faults, has_story: bool) -> Self {
        let mut world = World::new(seed, faults, program);
        world.story = has_story.then(Vec::new);
        world.ledger.is_serving = world.below(2) == 0;
        world.detach_waits = world.below(2) == 0;
        world.may_lose = world.below(16) == 0;
        world.spawn(Role::Keeper, None);
        world.spawn(Role::Run, None);
        Self { world, unanswered: 0, troubles: 0, stop_at: None, is_keeper_killed: false }
    }

    /// Runs the history. The error is the rule that the history breaks.
    fn run(&mut self) -> Result<(), String> {
        for _ in 0..100 + self.world.below(WILD_STEPS) {
            if self.world.below(24) == 0 {
                self.disturb();
            }
            self.step()?;
        }
        // Stopped runs stay stopped: they must not keep a page from any process.
        for step in 0..=ANSWER_STEPS {
            self.step()?;
            if step > CALM_STEPS && self.unanswered == 0 {
                break;
            }
        }
        self.world.has_had_run = true;
        self.world.processes.iter_mut().for_each(|one| one.is_stopped = false);
        for step in 0..END_STEPS {
            if step % 512 == 0 {
                self.world.processes.iter_mut().for_each(|one| one.is_told_to_end = true);
            }
            self.step()?;
            if self.world.processes.iter().all(|one| one.life == Life::Gone) {
                return self.check_end();
            }
        }
        Err("it does not come to its end".into())
    }

    /// One step of a random process, and of a program that uses memory. Some processes are slow.
    fn step(&mut self) -> Result<(), String> {
        let world = &mut self.world;
        let passed = Duration::from_millis(world.below(20));
        world.now += passed;
        if self.stop_at.is_some_and(|at| world.now >= at) {
            self.stop_at = None;
            self.kill(&Role::Keeper);
        }
        let world = &mut self.world;
        let all = world.processes.iter().enumerate();
        let there = all.filter(|(_, one)| one.life != Life::Gone);
        let there: Vec<_> = there.map(|(pid, one)| (pid, one.slowness)).collect();
        let failing = world.failing_starts;
        if let Some((pid, slowness)) = there.get(world.random_of(there.len())).copied()
            && world.below(slowness) == 0
        {
            world.step(pid);
        }
        let has_failed = world.failing_starts < failing;
        let is_failing = has_failed || world.may_lose && world.failing_starts > 0;
        self.unanswered = if world.touch() || is_failing { 0 } else { self.unanswered + 1 };
        if self.unanswered > ANSWER_STEPS {
            world.broke("nobody answers a program that needs a page");
        }
        world.check();
        world.broken.take().map_or(Ok(()), Err)
    }

    fn disturb(&mut self) {
        let number = self.world.below(11);
        self.unanswered = 0;
        match number {
            0 | 1 => self.kill(&Role::Daemon),
            2 => self.kill(&Role::Keeper),
            3 => self.kill(&Role::SwitchOn),
            4 => self.kill(&Role::Foreign),
            5 => drop(self.world.spawn(Role::Foreign, None)),
            6 => {
                if let Some(pid) = self.any(|role| *role == Role::Run) {
                    let is_stopped = &mut self.world.processes[pid].is_stopped;
                    *is_stopped = !*is_stopped;
                    self.world.tell(|| format!("{pid} is stopped, or goes on"));
                }
            }
            7 => drop(self.world.spawn(Role::Run, None)),
            8 => self.tell_to_end(),
            9 => drop(self.world.spawn(Role::ForeignOn, None)),
            _ if self.world.may_lose => self.world.failing_starts = 20,
            _ if self.troubles < TROUBLES_MAX => {
                self.troubles += 1;
                self.world.failing_starts += 1;
            }
            _ => {}
        }
    }

    /// Tells a run or `serve` to end. systemd kills the keeper of `serve` some time later.
    fn tell_to_end(&mut self) {
        let is_serving = self.world.ledger.is_serving;
        let is_told = |role: &Role| *role == Role::Run || is_serving && *role == Role::Keeper;
        let Some(pid) = self.any(is_told) else { return };
        self.world.processes[pid].is_told_to_end = true;
        self.world.tell(|| format!("{pid} is told to end"));
        if self.world.processes[pid].role == Role::Keeper {
            let patience = Duration::from_millis(self.world.below(4000));
            self.stop_at = Some(self.world.now + patience);
        }
    }

    /// Kills a process of a role, unless that is the only owner of the memory that outlives a
    /// daemon.
    fn kill(&mut self, role: &Role) {
        let Some(pid) = self.any(|other| match (role, other) {
            (Role::Foreign, other) => {
                matches!(other, Role::Foreign | Role::SwitchOff(_) | Role::Run)
            }
            (role, other) => role == other,
        }) else {
            return;
        };
        let has_memory = self.world.processes[pid].has_memory;
        if has_memory && self.world.owners().all(|owner| owner == pid) {
            return;
        }
        if *role == Role::Keeper && self.world.is_lost {
            return;
        }
        if *role == Role::Daemon {
            if self.troubles >= TROUBLES_MAX {
                return;
            }
            self.troubles += 1;
        }
        self.is_keeper_killed |= *role == Role::Keeper;
        self.world.kill(pid);
    }

    fn any(&mut self, is_meant: impl Fn(&Role) -> bool) -> Option<Pid> {
        let all = self.world.processes.iter().enumerate();
        let meant = all.filter(|(_, one)| !one.is_killed && is_meant(&one.role));
        let meant: Vec<_> = meant.map(|(pid, _)| pid).collect();
        meant.get(self.world.random_of(meant.len())).copied()
    }

    /// A keeper that is killed during the undoing, after its daemon has ended, leaves the folder to
    /// the next run.
    fn check_end(&self) -> Result<(), String> {
        let world = &self.world;
        let is_left = world.ledger.is_there || world.is_mounted;
        match (world.areas.is_empty() && world.devices.is_empty(), is_left) {
            (false, _) => Err("an area or a device is left".into()),
            (true, true) if !self.is_keeper_killed => Err("the folder or a mount is left".into()),
            _ => Ok(()),
        }
    }
}

/// All rows of both tables but the rare ones, which need a first area that cannot be made, or a
/// `swapon` by hand between two looks.
fn rows() -> BTreeSet<String> {
    fn rows<P: Phased>() -> impl Iterator<Item = String> {
        P::TRANSITIONS.iter().map(|(from, to, _)| format!("{} {from:?} {to:?}", P::OWNER))
    }
    let absent = [
        "keeper Starting Emptying",
        "keeper Ending Emptying",
        "keeper Refused Lost",
        "daemon Starting Ending",
        "daemon Unable Ending",
    ];
    let all = rows::<keeper::Phase>().chain(rows::<daemon::Phase>());
    all.filter(|row| !absent.contains(&row.as_str())).collect()
}

#[test]
fn histories_take_the_rows_of_both_tables() {
    let (mut absent, mut seed) = (rows(), 0);
    while !absent.is_empty() {
        assert!(seed < 5_000, "not taken: {absent:?}");
        let mut history = History::new(seed, Faults::default(), false);
        assert_eq!(history.run(), Ok(()), "seed {seed}");
        absent = &absent - &history.world.changes;
        seed += 1;
    }
    println!("all rows in {seed} histories");
}

/// The rule that a seed's history breaks.
fn broken(seed: u64, faults: Faults) -> Option<String> {
    History::new(seed, faults, false).run().err()
}

/// The last events of the same history.
fn story(seed: u64, faults: Faults) -> String {
    let mut history = History::new(seed, faults, true);
    let end = history.run();
    let story = history.world.story.unwrap_or_default();
    let last = story[story.len().saturating_sub(80)..].join("\n");
    format!("{last}\n{end:?}; UZSWAP_SIMULATE_SEED={seed} repeats it")
}

/// The first seed below `histories` whose history breaks a rule with these words, and the rule.
fn found(faults: Faults, words: &str, histories: u64) -> Option<(u64, String)> {
    let found = |seed| broken(seed, faults).filter(|rule| rule.contains(words));
    (0..histories).find_map(|seed| found(seed).map(|rule| (seed, rule)))
}

fn set(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

#[test]
fn no_history_loses_a_page_or_keeps_a_program_waiting() {
    if let Some(seed) = set("UZSWAP_SIMULATE_SEED") {
        println!("{}", story(seed, Faults::default()));
        return assert_eq!(broken(seed, Faults::default()), None);
    }
    let time = Duration::from_secs(set("UZSWAP_SIMULATE_SECONDS").unwrap_or(2));
    let (began, mut histories) = (Instant::now(), 0);
    while began.elapsed() < time {
        if broken(histories, Faults::default()).is_some() {
            panic!("{}", story(histories, Faults::default()));
        }
        histories += 1;
    }
    let rate = histories as f64 / began.elapsed().as_secs_f64();
    println!("{histories} histories of the processes, {rate:.0} a second");
}

const OPENS: Faults = Faults {
    daemon_opens_its_file: true,
    flush_is_sent: true,
    full_death_is_awaited: true,
    einval_means_off: false,
    sends_block: false,
    death_is_not_awaited: false,
    parts_follow_the_list: false,
};

/// Each of these faults was in an earlier version.
#[test]
fn a_fault_that_is_put_back_is_found() {
    let none = Faults::default();
    for (faults, words) in [
        (OPENS, "nobody answers"),
        (Faults { einval_means_off: true, ..none }, "pages"),
        (Faults { sends_block: true, ..none }, "nobody answers"),
        (Faults { death_is_not_awaited: true, ..none }, "two daemons"),
        (Faults { parts_follow_the_list: true, ..none }, "two areas are over"),
    ] {
        let found = found(faults, words, 20_000);
        let (seed, rule) = found.unwrap_or_else(|| panic!("not found: {words}, {faults:?}"));
        println!("history {seed}: {rule}");
    }
}

/// A daemon that was killed with its own file open kept every process waiting. Now the daemon opens
/// no such file, the kernel sends no request when a file is closed, and the keeper does not wait
/// for the closing.
#[test]
fn each_of_three_measures_alone_keeps_a_killed_daemon_from_hanging() {
    for faults in [
        Faults { daemon_opens_its_file: false, ..OPENS },
        Faults { flush_is_sent: false, ..OPENS },
        Faults { full_death_is_awaited: false, ..OPENS },
    ] {
        assert_eq!(found(faults, "", 300), None, "{faults:?}");
    }
}
