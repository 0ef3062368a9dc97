//! `uzswap attach`: a group of processes that runs already is brought below a limit, and as it was
//! before at the end.
//!
//! The limit comes down step by step, and goes up again while the group's processes wait for memory
//! more than they work: half of the time, as the kernel tells it (PSI). On version 2 of the cgroup
//! interface it is `memory.high`, above which nobody is killed; on version 1 there is one limit,
//! which is raised where it cannot be held (relief.rs). What the group had is written down by the
//! keeper first, which puts it back when this process is killed.

use crate::cli::{AttachArguments, DetachArguments, TargetArguments};
use crate::error::Failure;
use crate::live::Live;
use crate::relief::{Limited, Relief};
use crate::signals::{Event, Events};
use crate::stats::Stats;
use crate::taking_part::TakingPart;
use crate::wire::{Place, RunInfo, Tell};
use crate::{changes, doctor, group, options, size, status, systemd};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::{Group, Version};
use uzswap_sys::{cpu, process};

const TICK: Duration = Duration::from_millis(200);

/// By how much the limit moves at a time: as a share of the goal, and at least, bytes.
const STEP_DIVISOR: u64 = 16;
const STEP_BYTES_MIN: u64 = 4 << 20;

/// The share of ten seconds, percent, that processes may wait for memory.
const WAITING_MAX: f64 = 50.0;

/// How long the limit stays up after that.
const REST: Duration = Duration::from_secs(10);

/// How long another one may take to put everything back.
const PATIENCE: Duration = Duration::from_secs(30);

/// Attaches to it until it is told to end.
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode, Failure> {
    status::require_root()?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    options::check_memory(arguments.memory, machine)?;
    let (group, name) = find(&arguments.target)?;
    if let Some((0, file)) = group.swap_limit() {
        let file = file.display();
        return Err(Failure::new(format!("{name} may not swap ({file} is 0); change that first")));
    }
    if attached(&group).is_some() {
        return Err(Failure::new(format!("{name} is attached already; detach it first")));
    }
    doctor::require()?;
    let bytes = arguments.size.unwrap_or_else(|| options::default_size(arguments.memory, machine));
    let options = options::daemon_options(&arguments.cache, arguments.memory, bytes, machine)?;
    let pid = std::process::id() as i32;
    let info = RunInfo { pid, command: name.clone(), memory: arguments.memory };
    let events = Events::new()?;
    let mut part = TakingPart::join(&info, &options)?;
    part.watch(&events)?;
    let place = Place {
        folder: group.path().to_owned(),
        is_v2: group.version() == Version::V2,
        borrowed: Some(attributes(&group)),
        ..Place::default()
    };
    let ended = part.place(&place, &events).and_then(|()| {
        let live = Live::new(arguments.quiet);
        let ended = Squeeze::new(&group, &name, arguments.memory).hold(&mut part, &live, &events);
        live.finish();
        place.end().map_err(|error| Failure::new(format!("{name}: {error}")))?;
        ended
    });
    let swapped = group.usage().swapped;
    for trouble in part.leave(&events) {
        eprintln!("uzswap: cleaning up: {trouble}");
    }
    ended?;
    if !arguments.quiet {
        eprintln!("uzswap: {name} has its limits of before; {} was out", size::show(swapped));
    }
    Ok(ExitCode::SUCCESS)
}

/// Has whoever attached to it end, and waits for that.
pub fn detach(arguments: &DetachArguments) -> Result<(), Failure> {
    status::require_root()?;
    let (group, name) = find(&arguments.target)?;
    let pid = attached(&group).ok_or_else(|| {
        Failure::new(format!("{name} is not attached; `uzswap status` shows what is"))
    })?;
    // In another namespace its number would be somebody else's.
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if !command.split(|byte| *byte == 0).any(|word| word == b"attach") {
        return Err(Failure::new(format!("{name} was attached from a container; detach it there")));
    }
    process::kill(pid, libc::SIGTERM)
        .map_err(|error| Failure::new(format!("cannot end process {pid}: {error}")))?;
    match changes::wait_for(PATIENCE, || attached(&group).is_none()) {
        true => Ok(()),
        false => Err(Failure::new(format!("process {pid} has not let go of {name} yet"))),
    }
}

/// The process that has attached to a group.
fn attached(group: &Group) -> Option<i32> {
    let state = changes::State::read().ok()?;
    let is_it = |place: &Place| place.borrowed.is_some() && place.folder == group.path();
    state.runs.iter().find(|run| run.place.as_ref().is_some_and(is_it)).map(|run| run.run.pid)
}

/// The group that is meant, and what people call it.
fn find(target: &TargetArguments) -> Result<(Group, String), Failure> {
    let hierarchy = group::hierarchy()?;
    let (group, name) = match target {
        TargetArguments { unit: Some(unit), .. } => {
            let folder = systemd::group_of(unit)?;
            (Group::at(hierarchy.version, hierarchy.top().path().join(folder)), unit.clone())
        }
        TargetArguments { pid: Some(pid), .. } => {
            let gone = || Failure::new(format!("there is no process {pid}"));
            let group = hierarchy.of_process(*pid).ok_or_else(gone)?;
            refuse_shared(&group, *pid)?;
            (group, format!("process {pid}"))
        }
        TargetArguments { cgroup, .. } => {
            let path = cgroup.clone().unwrap_or_default();
            let top = hierarchy.top().path().to_owned();
            let below = path.strip_prefix(&top).or(path.strip_prefix("/")).unwrap_or(&path);
            let path = top.join(below);
            (Group::at(hierarchy.version, path.clone()), path.display().to_string())
        }
    };
    if group.path() == hierarchy.top().path() {
        return Err(Failure::new(format!(
            "{name} is in the group of the whole machine; use serve"
        )));
    }
    if !group.path().join(limit_file(group.version())).exists() {
        let path = group.path().display();
        return Err(Failure::new(format!("{path} is no group with a memory controller")));
    }
    Ok((group, name))
}

/// A limit would be everybody's in the group.
fn refuse_shared(group: &Group, pid: i32) -> Result<(), Failure> {
    let others = group.processes().into_iter().filter(|other| !descends_from(*other, pid)).count();
    if others == 0 {
        return Ok(());
    }
    let path = group.path().display();
    Err(Failure::new(format!(
        "process {pid} shares {path} with {others} others; --cgroup {path} limits them all"
    )))
}

/// Whether a process is another, or started by it.
fn descends_from(pid: i32, ancestor: i32) -> bool {
    let parent = |pid: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    };
    std::iter::successors(Some(pid), |pid| parent(*pid)).any(|pid| pid == ancestor)
}

fn limit_file(version: Version) -> &'static str {
    match version {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.high",
    }
}

/// What is about to be changed, and how it is put back.
fn attributes(group: &Group) -> Vec<(PathBuf, String)> {
    let other = match group.version() {
        Version::V1 => "memory.oom_control",
        Version::V2 => "memory.zswap.max",
    };
    let file = |name| group.path().join(name);
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        // Of the killer's switch, which is one of several lines: its value.
        let value = text.lines().next()?.trim_start_matches("oom_kill_disable ").trim();
        Some((path, value.to_owned()))
    };
    [limit_file(group.version()), other].map(file).into_iter().filter_map(read).collect()
}

/// A group that is not ours: one limit alone is changed.
struct Borrowed(Group);

impl Limited for Borrowed {
    fn waits(&self) -> bool {
        self.0.waits_for_memory()
    }

    fn hold(&self, hold: bool) -> io::Result<()> {
        self.0.hold_oom_killer(hold)
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        fs::write(self.0.path().join(limit_file(self.0.version())), bytes.to_string())
    }
}

/// Brings a group down to a goal, and lets go where it suffers.
struct Squeeze<'a> {
    group: &'a Group,
    name: &'a str,
    relief: Relief<Borrowed>,
    goal: u64,
    /// What is asked for now.
    limit: u64,
    /// The limit is up until then.
    rests_until: Option<Instant>,
}

impl<'a> Squeeze<'a> {
    fn new(group: &'a Group, name: &'a str, goal: u64) -> Self {
        if changes::zswap_is_on() {
            // Without such a switch the keeper has switched it off.
            group.refuse_zswap();
        }
        let limit = group.usage().current.max(goal);
        let relief = Relief::new(Borrowed(group.clone()), limit);
        Self { group, name, relief, goal, limit, rests_until: None }
    }

    /// Until it is told to end, or the group is gone.
    fn hold(mut self, part: &mut TakingPart, live: &Live, events: &Events) -> Result<(), Failure> {
        let lost = "the daemon died; what was swapped to it is lost";
        loop {
            match events.receiver.recv_timeout(TICK) {
                Ok(Event::Signal { .. } | Event::Told(Tell::Detach)) => return Ok(()),
                Ok(Event::Told(Tell::Lost) | Event::Gone) => {
                    part.gone();
                    return Err(Failure::new(lost));
                }
                Ok(Event::Told(Tell::Full(true))) => {
                    eprintln!("uzswap: pool and backing are full, so nothing more is swapped out");
                }
                Ok(Event::CameBack(wire)) => part.came_back(wire),
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(Failure::new(lost)),
                Err(RecvTimeoutError::Timeout) if !self.group.path().exists() => {
                    eprintln!("uzswap: {} has ended", self.name);
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.tick(waiting(self.group));
                    let stats = Stats::read(&part.joined.mount);
                    live.show(&stats, self.group.usage().current, 0);
                }
            }
        }
    }

    /// Looks once, and acts; `waiting`: the share of the time that processes wait, percent.
    fn tick(&mut self, waiting: f64) {
        let step = (self.goal / STEP_DIVISOR).max(STEP_BYTES_MIN);
        let rests = self.rests_until.is_some_and(|until| Instant::now() < until);
        if waiting > WAITING_MAX {
            if self.rests_until.is_none() {
                eprintln!(
                    "uzswap: {} waits for memory {waiting:.0} % of the time; it gets more for now",
                    self.name
                );
            }
            self.rests_until = Some(Instant::now() + REST);
            self.limit += step;
        } else if !rests {
            self.rests_until = None;
            let now = self.group.usage().current;
            // No further than a step below what is there: it takes time to swap out.
            self.limit = self.limit.min(now).saturating_sub(step).max(self.goal);
        }
        self.relief.set_limit(self.limit);
        self.relief.tick();
    }
}

/// How much of the last ten seconds processes waited for memory, percent: the group's, or where
/// those are not told apart, all of the machine at once; 0 where the kernel does not tell.
fn waiting(group: &Group) -> f64 {
    let (file, line) = match group.version() {
        Version::V1 => (PathBuf::from("/proc/pressure/memory"), "full"),
        Version::V2 => (group.path().join("memory.pressure"), "some"),
    };
    let text = fs::read_to_string(file).unwrap_or_default();
    let line = text.lines().find_map(|text| text.strip_prefix(line));
    let average = line.and_then(|line| line.split_whitespace().next()?.strip_prefix("avg10="));
    average.and_then(|text| text.parse().ok()).unwrap_or(0.0)
}
