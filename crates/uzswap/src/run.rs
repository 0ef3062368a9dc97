//! `uzswap run`: one command and its children, in limited memory.

use crate::cli::{EnterArguments, RunArguments};
use crate::error::Failure;
use crate::leftovers;
use crate::live::Live;
use crate::load::{Held, LoadControl};
use crate::options::{self, DaemonOptions};
use crate::relief::{Progress, Relief};
use crate::report::{Peak, Report};
use crate::session::{ProcessId, Session};
use crate::signals::{Event, Events};
use crate::stats::Stats;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::{Group, Hierarchy};
use uzswap_sys::{cpu, process};

/// How often the figures are looked at, and the group's troubles.
const TICK: Duration = Duration::from_millis(200);

/// What a command has at least of a memory that the pool is a part of, as a share of it.
const COMMAND_SHARE_DIVISOR: u64 = 4;

/// How long processes that the command left behind get to end by themselves.
const GRACE: Duration = Duration::from_secs(2);

/// Runs it; the command's exit status.
pub fn run(arguments: &RunArguments) -> Result<ExitCode, Failure> {
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    options::check_memory(arguments.memory, machine)?;
    find_command(&arguments.command[0])?;
    crate::doctor::require()?;
    if arguments.load_control {
        let missing = |why| Failure::new(format!("--load-control: {why}, or do without"));
        crate::doctor::freezer().map_err(missing)?;
    }
    let hierarchy = Hierarchy::find().ok_or_else(|| {
        Failure::new("no memory cgroup is mounted, so nothing can be limited; see `uzswap doctor`")
    })?;
    leftovers::clean_up_first();
    let size = arguments.size.unwrap_or_else(|| options::default_size(arguments.memory, machine));
    let mut cache = arguments.cache.clone();
    if arguments.include_pool {
        cache.pool.get_or_insert(options::included_pool(arguments.memory));
    }
    let mut session = Session::create()?;
    let options =
        options::daemon_options(&cache, &session.mount(), arguments.memory, size, machine);
    let outcome =
        options.and_then(|options| supervise(arguments, &mut session, &hierarchy, &options));
    let troubles = session.end();
    for trouble in &troubles {
        eprintln!("uzswap: cleaning up: {trouble}");
    }
    let report = outcome?;
    if !arguments.quiet {
        eprint!("{}", report.text());
    }
    if let Some(path) = &arguments.report {
        write_report(path, &report)?;
    }
    Ok(report.exit_code.into())
}

fn write_report(path: &Path, report: &Report) -> Result<(), Failure> {
    let json = serde_json::to_vec_pretty(report).map_err(|e| Failure::new(e.to_string()))?;
    fs::write(path, json)
        .map_err(|error| Failure::new(format!("cannot write {}: {error}", path.display())))
}

/// Sets everything up, runs the command, and takes the device away; the session is ended by the
/// caller.
fn supervise(
    arguments: &RunArguments,
    session: &mut Session,
    hierarchy: &Hierarchy,
    options: &DaemonOptions,
) -> Result<Report, Failure> {
    let events = Events::new()?;
    session.start_daemon(options)?;
    if session.switch_zswap_off()? && !arguments.quiet {
        eprintln!("uzswap: the kernel's zswap is switched off until this run ends");
    }
    session.attach(options.pages)?;
    let name = format!("uzswap-{}", std::process::id());
    session.note_cgroup(&name)?;
    let group = make_group(hierarchy, &name, arguments.memory)?;
    let notes = session.daemon().map(|daemon| daemon.notes.clone()).unwrap_or_default();
    let daemon = session.daemon().and_then(|daemon| ProcessId::of(daemon.child.id()));
    if let Some(daemon) = daemon {
        events.watch_daemon(daemon);
    }
    let began = Instant::now();
    let live = Live::new(arguments.quiet);
    let relief = Relief::new(&group, arguments.memory);
    let (mount, peak) = (session.mount(), Peak::default());
    let included = daemon.filter(|_| arguments.include_pool);
    let load = arguments.load_control.then(|| start_load_control(&group)).transpose()?;
    let held = None;
    let mut watch = Watch { mount, group: &group, relief, live, peak, included, load, held };
    let ended = watch.command(arguments, &events);
    watch.end_load_control();
    watch.live.finish();
    let status = ended?;
    let time = began.elapsed();
    let stats = Stats::read(&session.mount());
    watch.peak.update(&stats);
    let mut usage = group.usage();
    usage.oom_kills += watch.relief.ended();
    let report =
        Report::new(time, exit_code(status), arguments.memory, usage, watch.peak, stats, notes);
    end_stragglers(&group);
    Ok(Report { load_control: watch.held, ..report })
}

fn start_load_control(group: &Group) -> Result<LoadControl, Failure> {
    LoadControl::start(group.clone(), cpu::allowed()).map_err(|error| {
        Failure::new(format!(
            "--load-control: cannot make a freezer: {error}; it needs root, or do without"
        ))
    })
}

fn make_group(hierarchy: &Hierarchy, name: &str, limit: u64) -> Result<Group, Failure> {
    let cannot = |error: io::Error| {
        let root = hierarchy.root.display();
        Failure::new(format!("cannot make a memory cgroup under {root}: {error}; it needs root"))
    };
    let group = hierarchy.create(name).map_err(cannot)?;
    group.set_limit(limit).map_err(cannot)?;
    Ok(group)
}

struct Watch<'a> {
    mount: PathBuf,
    group: &'a Group,
    relief: Relief<&'a Group>,
    live: Live,
    peak: Peak,
    /// The daemon, when its memory is a part of the command's.
    included: Option<ProcessId>,
    /// Until the command is told to end, if at all.
    load: Option<LoadControl>,
    /// What it did.
    held: Option<Held>,
}

impl Watch<'_> {
    fn end_load_control(&mut self) {
        if let Some(load) = self.load.take() {
            self.held = Some(load.end());
        }
    }

    /// Starts the command and waits for it, passing signals on.
    fn command(
        &mut self,
        arguments: &RunArguments,
        events: &Events,
    ) -> Result<ExitStatus, Failure> {
        let program = std::env::current_exe();
        let program = program.map_err(|error| Failure::new(format!("/proc/self/exe: {error}")))?;
        let child = Command::new(program)
            .arg("enter")
            .arg(format!("--owner={}", std::process::id()))
            .arg(self.group.entrance())
            .arg("--")
            .args(&arguments.command)
            .spawn()
            .map_err(|error| Failure::new(format!("cannot start a process: {error}")))?;
        let pid = child.id() as i32;
        events.watch_command(child);
        let mut interrupts = 0;
        loop {
            match events.receiver.recv_timeout(TICK) {
                Ok(Event::CommandEnded(status)) => return Ok(status),
                Ok(Event::Signal { signal, from_terminal }) => {
                    // Who is held would not hear of it.
                    self.end_load_control();
                    if signal == libc::SIGINT || signal == libc::SIGTERM {
                        interrupts += 1;
                    }
                    if interrupts > 1 {
                        eprintln!("uzswap: interrupted again: ending the command at once");
                        self.group.signal(libc::SIGKILL);
                    } else if !from_terminal {
                        // An error: it has just ended.
                        let _ = process::kill(pid, signal);
                    }
                }
                Ok(Event::DaemonEnded) => {
                    eprintln!(
                        "uzswap: the daemon died; what was swapped to it is lost, so the command is \
                         ended"
                    );
                    self.group.signal(libc::SIGKILL);
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(daemon) = self.included {
                        let taken = process::resident_bytes(daemon.pid).unwrap_or(0);
                        let least = arguments.memory / COMMAND_SHARE_DIVISOR;
                        self.relief.set_limit(arguments.memory.saturating_sub(taken).max(least));
                    }
                    let stats = Stats::read(&self.mount);
                    if let Some(process) = self.relief.tick(Progress::from(&stats)) {
                        eprintln!(
                            "uzswap: pool and backing are full, so {process}, the largest process, \
                             is ended; give more --pool or --backing"
                        );
                    }
                    self.peak.update(&stats);
                    let held = self.load.as_ref().map_or(0, LoadControl::now);
                    self.live.show(&stats, self.group.usage().current, held);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the command's end was missed"));
                }
            }
        }
    }
}

/// Ends what the command left running: its swapped pages would otherwise have to fit in the limit.
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

/// As a shell says it: 128 and the signal for a process that one ended.
fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => crate::EXIT_FAILURE,
    }
}

/// Checks, before anything is set up, that there is such a command and that it can be run.
fn find_command(name: &OsStr) -> Result<(), Failure> {
    let shown = name.display();
    let paths: Vec<PathBuf> = if name.as_encoded_bytes().contains(&b'/') {
        vec![PathBuf::from(name)]
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_else(|| OsString::from("/usr/bin:/bin"));
        std::env::split_paths(&folders).map(|folder| folder.join(name)).collect()
    };
    let files = paths.iter().filter_map(|path| path.metadata().ok());
    let modes: Vec<_> = files.map(|file| (file.is_file(), file.permissions().mode())).collect();
    if modes.iter().any(|(is_file, mode)| *is_file && mode & 0o111 != 0) {
        return Ok(());
    }
    Err(match modes.is_empty() {
        true => Failure::command(format!("{shown}: no such command; check its name and PATH"), 127),
        false => Failure::command(
            format!("{shown}: cannot be run; it is a folder or not executable (chmod +x)"),
            126,
        ),
    })
}

/// `uzswap enter`: moves this process into the cgroup and becomes the command. The command dies
/// with its run: while the killer is held, nobody else would end it when memory runs out.
pub fn enter(arguments: &EnterArguments) -> Failure {
    if let Err(error) = process::die_with_parent(arguments.owner) {
        return Failure::new(format!("the run ended before its command started: {error}"));
    }
    if let Err(error) = fs::write(&arguments.entrance, "0") {
        return Failure::new(format!("cannot enter {}: {error}", arguments.entrance.display()));
    }
    let name = &arguments.command[0];
    let error = Command::new(name).args(&arguments.command[1..]).exec();
    let code = if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 };
    Failure::command(format!("cannot run {}: {error}", name.display()), code)
}
