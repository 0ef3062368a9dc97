//! `uzswap run`: one command and its children, in limited memory.

use crate::cli::{EnterArguments, RunArguments};
use crate::commands::supervise::{Interrupts, TICK, exit_code, find_command, write_report};
use crate::commands::user;
use crate::device::group_change::GroupChange;
use crate::device::ledger;
use crate::device::membership::{KEEPER_GONE, Membership, pages_lost};
use crate::device::processes::OWN_PROGRAM;
use crate::device::signals::{Event, Events};
use crate::device::wire::{RunInfo, Tell};
use crate::device::{group, options, requirements};
use crate::error::Failure;
use crate::policy::load::{InGroup, LoadControl, Suspensions};
use crate::policy::relief::{self, Relief};
use crate::show::exporter::Exporter;
use crate::show::live::Live;
use crate::show::report::{Peak, Report};
use crate::show::stats::Stats;
use crate::size;
use crate::stdio::say;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant, SystemTime};
use uzswap_sys::callers_signals::CallersSignals;
use uzswap_sys::cgroup::Group;
use uzswap_sys::{cpu, process};

/// With --include-pool, the least share of the command in --memory.
const COMMAND_SHARE_DIVISOR: u64 = 4;

/// The time in which processes that the command left behind may end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// Runs the command. Returns its exit status.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    if arguments.in_process || !arguments.device && !can_be_device() {
        return crate::commands::in_process::run(arguments, None);
    }
    if let Some(policy) = arguments.policy {
        return Err(Failure::new(format!(
            "--policy={policy} works in-process alone: the kernel chooses the pages of the device; \
             leave the option out, or add --in-process"
        )));
    }
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    options::check_memory(arguments.memory, machine)?;
    find_command(&arguments.command[0])?;
    arguments.user.as_deref().map_or(Ok(()), user::check)?;
    requirements::require()?;
    group::hierarchy()?;
    if arguments.load_control {
        let missing = |why| Failure::new(format!("--load-control: {why}, or leave the option out"));
        requirements::freezer().map_err(missing)?;
    }
    let size = arguments.size.unwrap_or_else(|| options::default_size(arguments.memory, machine));
    let mut cache = arguments.cache.clone();
    if arguments.include_pool {
        cache.pool.get_or_insert(options::included_pool(arguments.memory));
    }
    let options = options::daemon_options(&cache, arguments.memory, size, machine)?;
    let began = SystemTime::now();
    let info = RunInfo {
        pid: std::process::id() as i32,
        command: arguments.command[0].to_string_lossy().into_owned(),
        memory: arguments.memory,
    };
    let events = Events::new()?;
    let mut exporter = arguments.cache.metrics.as_ref().map(Exporter::start).transpose()?;
    let mut part = Membership::join(&info, &options)?;
    exporter.iter().for_each(Exporter::announce);
    part.say_joined(&arguments.cache, arguments.quiet);
    part.watch(&events)?;
    let outcome = supervise(arguments, &mut part, &events, exporter.as_mut());
    drop(exporter);
    for trouble in part.leave(&events) {
        say!("uzswap: cleaning up: {trouble}");
    }
    let report = outcome?;
    if !arguments.quiet {
        say!("{}", report.text().trim_end());
    }
    if arguments.user.is_none()
        && let Some(name) = user::sudo_user_with_root_files(began)
    {
        say!(
            "uzswap: files that the command made here belong to root; --user {name} runs it as you"
        );
    }
    if let Some(path) = &arguments.report {
        write_report(path, &report)?;
    }
    Ok(report.exit_code.into())
}

/// True if the device works, or if in-process does not work either, so that the device's error is
/// shown.
fn can_be_device() -> bool {
    let is_there = requirements::require().is_ok() && group::hierarchy().is_ok();
    is_there || crate::commands::in_process::check().is_err()
}

/// Runs the command in a group of its own, and removes the group at the end.
fn supervise(
    arguments: &RunArguments,
    part: &mut Membership,
    events: &Events,
    exporter: Option<&mut Exporter>,
) -> Result<Report, Failure> {
    let waiting = GatedCommand::start(arguments, events.callers)?;
    let place = group::for_command(std::process::id(), waiting.child.id() as i32)?;
    let outcome = GroupWatch::new(arguments, part, &place, events, exporter)
        .and_then(|watch| watch.command(waiting, events));
    let removed = place.remove();
    if let Err(error) = removed {
        say!("uzswap: cleaning up: {error}");
    }
    outcome
}

/// A process that waits for a word through its gate, and then executes the command.
struct GatedCommand {
    child: Child,
    gate: File,
}

impl GatedCommand {
    fn start(arguments: &RunArguments, callers: CallersSignals) -> Result<Self, Failure> {
        let cannot = |error: io::Error| Failure::new(format!("cannot start a process: {error}"));
        let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|error| cannot(error.into()))?;
        process::let_inherit(theirs.as_fd()).map_err(cannot)?;
        let mut command = Command::new(OWN_PROGRAM);
        command
            .arg("enter")
            .arg(format!("--owner={}", std::process::id()))
            .arg(format!("--gate={}", theirs.as_raw_fd()));
        command.args(arguments.user.iter().map(|name| format!("--user={name}")));
        callers.give_to(&mut command);
        let child = command.arg("--").args(&arguments.command).spawn().map_err(cannot)?;
        Ok(Self { child, gate: ours.into() })
    }

    /// Tells the process to become the command.
    fn go(mut self) -> io::Result<Child> {
        self.gate.write_all(b"go")?;
        Ok(self.child)
    }
}

struct GroupWatch<'a> {
    arguments: &'a RunArguments,
    part: &'a mut Membership,
    group: Group,
    relief: Relief<Group>,
    live: Live,
    peak: Peak,
    /// The figures at the command's start: other runs may have used the cache already.
    before: Stats,
    /// Load control, until the command is asked to end.
    load: Option<LoadControl>,
    /// A record of the acts of load control, after its end.
    suspensions: Option<Suspensions>,
    exporter: Option<&'a mut Exporter>,
    notes: Vec<String>,
}

impl<'a> GroupWatch<'a> {
    fn new(
        arguments: &'a RunArguments,
        part: &'a mut Membership,
        place: &GroupChange,
        events: &Events,
        exporter: Option<&'a mut Exporter>,
    ) -> Result<Self, Failure> {
        let group = place.group();
        limit(&group, arguments.memory)?;
        part.place(place, events)?;
        let load = arguments.load_control.then(|| start_load_control(&group)).transpose()?;
        let mut notes = part.joined.notes.clone();
        if ledger::zswap_is_on() && !group.refuse_zswap() {
            notes.push("the kernel's zswap may take the command's pages first".into());
        }
        Ok(Self {
            relief: Relief::new(group.clone(), arguments.memory),
            live: Live::new(arguments.quiet),
            peak: Peak::of(part.runs as u64),
            before: Stats::read(&part.joined.mount),
            suspensions: None,
            arguments,
            part,
            group,
            load,
            exporter,
            notes,
        })
    }

    fn end_load_control(&mut self) {
        if let Some(load) = self.load.take() {
            self.suspensions = Some(load.end());
        }
    }

    /// Starts the command and waits for its end.
    fn command(mut self, waiting: GatedCommand, events: &Events) -> Result<Report, Failure> {
        let began = Instant::now();
        let child = waiting.go();
        let child =
            child.map_err(|error| Failure::new(format!("cannot start the command: {error}")))?;
        let pid = child.id() as i32;
        events.watch_command(child);
        let ended = self.wait(pid, events);
        self.end_load_control();
        self.live.finish();
        let status = ended?;
        let (time, stats) = (began.elapsed(), Stats::read(&self.part.joined.mount));
        let usage = self.group.usage();
        end_stragglers(&self.group);
        let peak = self.peak;
        // After a replacement, the counts are the new daemon's, which began at zero.
        let stats = if peak.daemons_replaced > 0 { stats } else { stats.since(&self.before) };
        let report = Report {
            seconds: time.as_secs_f64(),
            exit_code: exit_code(status),
            memory_limit: self.arguments.memory,
            memory_peak: usage.peak.max(peak.memory),
            swap_peak: peak.swapped,
            major_faults: usage.major_faults,
            oom_kills: usage.oom_kills,
            pool_peak: peak.pool,
            ratio: peak.ratio,
            dead_share: peak.dead_share(),
            is_shared: peak.runs > 1 || !self.part.joined.is_first,
            daemons_replaced: peak.daemons_replaced,
            transport: self.part.joined.transport.clone(),
            load_control: self.suspensions,
            stats,
            notes: self.notes,
        };
        Ok(report)
    }

    /// Waits for the command and passes signals on.
    fn wait(&mut self, pid: i32, events: &Events) -> Result<ExitStatus, Failure> {
        let mut interrupts = Interrupts::default();
        loop {
            match events.receiver.recv_timeout(TICK) {
                Ok(Event::CommandEnded(status)) => return Ok(status),
                Ok(Event::Signal { signal, from_terminal }) => {
                    // A suspended process would not handle the signal.
                    self.end_load_control();
                    if interrupts.pass_on(pid, signal, from_terminal) {
                        self.group.kill();
                    }
                }
                Ok(Event::Told(tell)) => self.told(&tell),
                Ok(Event::CameBack(wire)) => self.part.came_back(wire),
                Ok(Event::Gone) => {
                    self.part.gone();
                    self.lost(KEEPER_GONE);
                }
                Err(RecvTimeoutError::Timeout) => self.tick(),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the command's end was missed"));
                }
            }
        }
    }

    fn lost(&self, why: &str) {
        say!("uzswap: {}, so the command is ended", pages_lost(why));
        self.group.kill();
    }

    fn told(&mut self, tell: &Tell) {
        match tell {
            Tell::Lost(why) => self.lost(why),
            Tell::Replaced(daemon) if *daemon != self.part.joined.daemon => {
                self.part.joined.daemon = *daemon;
                self.peak.daemons_replaced += 1;
            }
            Tell::Full(true) => say!(
                "uzswap: pool and backing are full, so nothing more is swapped out; give more --pool \
                 or --backing"
            ),
            Tell::Runs(runs) => self.peak.runs = self.peak.runs.max(*runs as u64),
            _ => {}
        }
    }

    fn tick(&mut self) {
        self.exporter.iter_mut().for_each(|exporter| exporter.tend());
        let stats = Stats::read(&self.part.joined.mount);
        let usage = self.group.usage();
        if self.arguments.include_pool {
            // The run's share of a cache that others use too.
            let taken = process::resident_bytes(self.part.joined.daemon).unwrap_or(0);
            let all = stats.get("swap_used_size").max(usage.swapped).max(1);
            let taken = (taken as f64 * usage.swapped as f64 / all as f64) as u64;
            let least = self.arguments.memory / COMMAND_SHARE_DIVISOR;
            self.relief.set_limit(self.arguments.memory.saturating_sub(taken).max(least));
        }
        self.relief.tick();
        self.peak.update(&stats, usage);
        let suspended = self.load.as_ref().map_or(0, LoadControl::now);
        self.live.show(&stats, usage.current, suspended);
    }
}

/// Limits a group in which there is only the waiting process.
fn limit(group: &Group, memory: u64) -> Result<(), Failure> {
    if let Some((most, file)) = group.memory_limit().filter(|(most, _)| *most < memory) {
        return Err(Failure::new(format!(
            "--memory {} is more than {} allows ({}); give less",
            size::show(memory),
            file.display(),
            size::show(most)
        )));
    }
    if let Some((most, file)) = group.swap_limit().filter(|(most, _)| *most < memory) {
        return Err(Failure::new(format!(
            "{} allows {} of swap, so the command could swap nothing or little; raise it",
            file.display(),
            size::show(most)
        )));
    }
    group.set_limit(memory, relief::slack(memory)).map_err(|error| {
        Failure::new(format!("cannot limit {}: {error}; it needs root", group.path().display()))
    })
}

fn start_load_control(group: &Group) -> Result<LoadControl, Failure> {
    let processes = InGroup::new(group.clone());
    processes.and_then(|all| LoadControl::start(all, cpu::allowed())).map_err(|error| {
        Failure::new(format!(
            "--load-control: cannot make a freezer: {error}; become root, or leave the option out"
        ))
    })
}

/// Ends the processes that the command left running: their swapped pages would otherwise have to
/// fit in the limit.
fn end_stragglers(group: &Group) {
    let began = Instant::now();
    let mut told = false;
    while !group.processes().is_empty() {
        let signal = match began.elapsed() {
            waited if waited > GRACE => libc::SIGKILL,
            _ if !told => libc::SIGTERM,
            _ => 0,
        };
        told = true;
        if signal != 0 {
            group.signal(signal);
        }
        std::thread::sleep(Duration::from_millis(20));
        if began.elapsed() > 5 * GRACE {
            break;
        }
    }
}

/// `uzswap enter`: waits until the run has moved it to its group, and becomes the command. When its
/// run dies, the kernel kills the command. The kernel spares a set-uid program, which the keeper
/// ends.
pub fn enter(arguments: &EnterArguments) -> Failure {
    if let Err(error) = process::die_with_parent(arguments.owner) {
        return Failure::new(format!("the run ended before its command started: {error}"));
    }
    let gate = process::inherited(arguments.gate).map(File::from);
    let mut word = [0; 2];
    if gate.and_then(|mut gate| gate.read_exact(&mut word)).is_err() {
        // The run has reported the reason.
        return Failure::silent();
    }
    let name = &arguments.command[0];
    let mut command = Command::new(name);
    command.args(&arguments.command[1..]);
    if let Some(user) = &arguments.user
        && let Err(failure) = user::become_user(user, &mut command)
    {
        return failure;
    }
    CallersSignals::read().give_to(&mut command);
    let error = command.exec();
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    Failure::command(format!("cannot run {}: {error}", name.display()), code)
}
