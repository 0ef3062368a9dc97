//! `uzswap attach`: brings running programs below a limit (squeeze.rs) and restores their former
//! limits at the end.
//!
//! The limit comes down step by step. The limit rises while the processes wait for memory half of
//! the time (pressure.rs). Before the first step the keeper writes a group's former limit down. If
//! this process is killed, the keeper restores that limit.

use crate::cli::{AttachArguments, DetachArguments, TargetArguments};
use crate::commands::status;
use crate::device::group_change::GroupChange;
use crate::device::membership::{KEEPER_GONE, Membership, pages_lost};
use crate::device::signals::{Event, Events};
use crate::device::wire::{RunInfo, Tell};
use crate::device::{group, ledger, options, processes, requirements, systemd};
use crate::error::Failure;
use crate::policy::pressure::Processes;
use crate::policy::squeeze::{self, PressureWatch, Squeeze, SqueezeGroup, SqueezeProcess};
use crate::show::live::Live;
use crate::show::stats::Stats;
use crate::size;
use crate::stdio::say;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use uzswap_sys::cgroup::{Group, Hierarchy, Version};
use uzswap_sys::{cpu, process};

const TICK: Duration = Duration::from_millis(200);

/// The time for which `detach` waits until the attaching process has restored everything.
const PATIENCE: Duration = Duration::from_secs(30);

/// The processes to limit, and their name for people.
struct Target {
    processes: Processes,
    /// The group of these processes. If it has other processes too, those to limit are paged out
    /// one by one.
    group: Group,
    name: String,
}

impl Target {
    /// The setting that `attach` is about to change, with its former value.
    fn place(&self) -> GroupChange {
        match self.processes {
            Processes::Of(_) => GroupChange {
                folder: self.group.path().to_owned(),
                is_v2: self.group.version() == Version::V2,
                borrowed: Some(squeeze::attributes(&self.group)),
                ..GroupChange::default()
            },
            Processes::From(pid) => GroupChange {
                folder: format!("/proc/{pid}").into(),
                borrowed: Some(Vec::new()),
                ..GroupChange::default()
            },
        }
    }

    /// Refuses a target that `attach` cannot make smaller.
    fn check(&self, memory: u64) -> Result<(), Failure> {
        let name = &self.name;
        if let Some((0, file)) = self.group.swap_limit() {
            let file = file.display();
            let why = format!("{name} may not swap ({file} is 0); raise that limit first");
            return Err(Failure::new(why));
        }
        let limit = self.group.memory_limit().filter(|(most, _)| *most <= memory);
        if let (Processes::Of(_), Some((most, file))) = (&self.processes, limit) {
            let (most, file) = (size::show(most), file.display());
            let why = format!("{name} is limited to {most} already ({file}); give less");
            return Err(Failure::new(why));
        }
        Ok(())
    }

    fn squeeze(&self, memory: u64, place: &GroupChange) -> Result<Box<dyn Squeeze>, Failure> {
        Ok(match self.processes {
            Processes::Of(_) => {
                let before = place.borrowed.as_deref().unwrap_or_default();
                Box::new(SqueezeGroup::new(&self.group, memory, before)?)
            }
            Processes::From(pid) => Box::new(SqueezeProcess::new(pid, memory)),
        })
    }
}

/// Attaches to the target until a signal or `detach`.
pub fn attach(arguments: &AttachArguments) -> Result<ExitCode, Failure> {
    status::require_root()?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    options::check_memory(arguments.memory, machine)?;
    let target = find(&arguments.target)?;
    let name = &target.name;
    target.check(arguments.memory)?;
    requirements::require()?;
    let bytes = arguments.size.unwrap_or_else(|| options::default_size(arguments.memory, machine));
    let options = options::daemon_options(&arguments.cache, arguments.memory, bytes, machine)?;
    let pid = std::process::id() as i32;
    let info = RunInfo { pid, command: name.clone(), memory: arguments.memory };
    let events = Events::new()?;
    let mut part = Membership::join(&info, &options)?;
    part.say_joined(&arguments.cache, arguments.quiet);
    part.watch(&events)?;
    let place = target.place();
    let ended = part.place(&place, &events).and_then(|()| {
        let mut squeeze = target.squeeze(arguments.memory, &place)?;
        let live = Live::new(arguments.quiet);
        let ended = hold(squeeze.as_mut(), &target, &mut part, &live, &events);
        live.finish();
        place.end().map_err(|error| Failure::new(format!("{name}: {error}")))?;
        ended
    });
    for trouble in part.leave(&events) {
        say!("uzswap: cleaning up: {trouble}");
    }
    ended?;
    if !arguments.quiet {
        say!("uzswap: {name} is detached");
    }
    Ok(ExitCode::SUCCESS)
}

/// Squeezes the target until a signal or `detach` comes, or no process is left.
fn hold(
    squeeze: &mut dyn Squeeze,
    target: &Target,
    part: &mut Membership,
    live: &Live,
    events: &Events,
) -> Result<(), Failure> {
    let lost = |why: &str| Failure::new(pages_lost(why));
    let mut watch = PressureWatch::over(target.processes.clone(), &target.name);
    loop {
        match events.receiver.recv_timeout(TICK) {
            Ok(Event::Signal { .. } | Event::Told(Tell::Detach)) => return Ok(()),
            Ok(Event::Told(Tell::Lost(why))) => {
                part.gone();
                return Err(lost(&why));
            }
            Ok(Event::Gone) => {
                part.gone();
                return Err(lost(KEEPER_GONE));
            }
            Ok(Event::Told(Tell::Full(true))) => {
                say!("uzswap: pool and backing are full, so nothing more is swapped out");
            }
            Ok(Event::CameBack(wire)) => part.came_back(wire),
            Ok(_) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(lost(KEEPER_GONE)),
            Err(RecvTimeoutError::Timeout) if !squeeze.is_there() => {
                say!("uzswap: {} has ended", target.name);
                return Ok(());
            }
            Err(RecvTimeoutError::Timeout) => {
                squeeze.tick(watch.look());
                live.show(&Stats::read(&part.joined.mount), squeeze.current(), 0);
            }
        }
    }
}

/// Ends the process that attached to the target, and waits until it has restored the limit.
pub fn detach(arguments: &DetachArguments) -> Result<(), Failure> {
    status::require_root()?;
    let target = find(&arguments.target)?;
    let (folder, name) = (target.place().folder, target.name);
    let pid = attached(&folder).ok_or_else(|| {
        Failure::new(format!("{name} is not attached; `uzswap status` lists the attached groups"))
    })?;
    // The number is from the PID namespace of `attach`. In our namespace, another process may have
    // this number.
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if !command.split(|byte| *byte == 0).any(|word| word == b"attach") {
        return Err(Failure::new(format!("{name} was attached from a container; detach it there")));
    }
    process::kill(pid, libc::SIGTERM)
        .map_err(|error| Failure::new(format!("cannot end process {pid}: {error}")))?;
    match processes::wait_for(PATIENCE, || attached(&folder).is_none()) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "process {pid} has not restored the limits of {name} yet; `uzswap status` lists it until then"
        ))),
    }
}

/// The process that has attached to the target.
fn attached(folder: &Path) -> Option<i32> {
    let state = ledger::LedgerState::read().ok()?;
    let run = state.run_in(folder)?;
    run.place.as_ref()?.borrowed.as_ref().map(|_| run.run.pid)
}

fn find(target: &TargetArguments) -> Result<Target, Failure> {
    let hierarchy = group::hierarchy()?;
    match target {
        TargetArguments { unit: Some(unit), .. } => {
            let folder = hierarchy.top().path().join(systemd::group_of(unit)?);
            whole_group(&hierarchy, folder, unit.clone())
        }
        TargetArguments { pid: Some(pid), .. } => {
            let name = format!("process {pid}");
            let group = hierarchy.of_process(*pid);
            let group = group
                .ok_or_else(|| Failure::new(format!("there is no {name}; check the number")))?;
            let tree = process::tree(*pid);
            match group.processes().iter().all(|other| tree.contains(other)) {
                true => whole_group(&hierarchy, group.path().to_owned(), name),
                // A limit would apply to all processes of the group.
                false => Ok(Target { processes: Processes::From(*pid), group, name }),
            }
        }
        TargetArguments { cgroup, .. } => {
            let path = cgroup.clone().unwrap_or_default();
            let top = hierarchy.top().path().to_owned();
            let below = path.strip_prefix(&top).or(path.strip_prefix("/")).unwrap_or(&path);
            let path = top.join(below);
            let name = path.display().to_string();
            whole_group(&hierarchy, path, name)
        }
    }
}

fn whole_group(hierarchy: &Hierarchy, path: PathBuf, name: String) -> Result<Target, Failure> {
    let group = Group::at(hierarchy.version, path);
    if group.path() == hierarchy.top().path() {
        return Err(Failure::new(format!(
            "{name} is in the group of the whole machine; use `uzswap serve`"
        )));
    }
    if hierarchy.own().path().starts_with(group.path()) {
        let why = format!("{name} is this command's own group; attach from another group");
        return Err(Failure::new(why));
    }
    if !squeeze::limit_file(&group).exists() {
        let path = group.path().display();
        return Err(Failure::new(format!(
            "{path} is no group with a memory controller; check its name"
        )));
    }
    Ok(Target { processes: Processes::Of(group.clone()), group, name })
}
