//! `uzswap run --in-process`: a preloaded library keeps the memory of the command's processes in
//! the budget, from inside. In-process needs no root, no swap and no cgroup.

mod at_store;
mod beyond;
mod container;
pub mod executable;
mod left_alone;
pub mod libraries;
mod numbers;
pub mod tree_file;

use crate::cli::{RunArguments, Transport};
use crate::commands::supervise::{self, Interrupts};
use crate::device::options::{self, Backing};
use crate::device::signals::{Event, Events};
use crate::error::Failure;
use crate::policy::load::{InTree, LoadControl, Suspensions};
use crate::show::live::Live;
use crate::size;
use crate::stdio::say;
use at_store::AtStore;
use beyond::Beyond;
use container::Container;
use left_alone::{Alone, LeftAlone};
use numbers::Numbers;
use rustix::fs::{StatVfsMountFlags, statvfs};
use serde::Serialize;
use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Instant;
use tree_file::TreeFile;
use uzswap_engine::PAGE_BYTES;
use uzswap_policy::favour::{self, Favour};
use uzswap_region::{Means, Mode, Pager};
use uzswap_remote::{Address, Connected};
use uzswap_sys::{cpu, process};
use uzswap_tree::{Setting, Table, clock, share};

/// A favour has the same unit in the policy and in the shares, which know nothing of each other.
const _: () = assert!(favour::WHOLE == share::FAVOUR);
/// The favour follows the faults between two looks.
const _: () = assert!(favour::EVERY.as_millis() == supervise::TICK.as_millis());

/// The variable that names the means to begin with, for tests and measurements.
const MEANS: &str = "UZSWAP_MEANS";

/// The means by which pages leave on this machine. The error has the reason, and the fate of the
/// command.
pub fn check() -> Result<Means, String> {
    let first = env::var(MEANS).ok().and_then(|name| name.parse().ok()).unwrap_or(Means::Moves);
    Means::available(first).map_err(|error| {
        let error = error.to_string();
        let denied = Mode::InThread.check().err().map(|denied| denied.to_string());
        // On a kernel with pages of another size, both errors are the same.
        match denied.filter(|denied| *denied != error) {
            Some(denied) => format!("{denied}; {error}"),
            None => error,
        }
    })
}

/// The report's words for means that are not the fastest.
fn slower(means: Means) -> Option<&'static str> {
    match means {
        Means::Moves => None,
        Means::Copies => Some("by userfaultfd without moves, slower: they need Linux 6.8"),
        Means::Guards => Some("by guard pages, slower, since userfaultfd is denied: uzswap doctor"),
        Means::Protection => {
            Some("by protection, slower yet, since userfaultfd is denied: uzswap doctor")
        }
    }
}

/// The file that the command's processes share. The error has the reason why they run without such
/// a file, and the remedy.
fn prepare(arguments: &RunArguments, program: &Path, library: &Path) -> Result<TreeFile, String> {
    let unmanaged = executable::why_unmanaged(program);
    if let Some(one) = unmanaged {
        let reason = format!("{}, so its own memory is not kept small", one.reason);
        if one.refuses_library {
            return Err(reason);
        }
        say!("uzswap: in-process: {reason}");
    }
    let means = check()?;
    if statvfs(library).is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
        let place = library.display();
        return Err(format!(
            "{place} is on a file system that is mounted noexec; put it elsewhere"
        ));
    }
    TreeFile::create(arguments.memory, means)
}

/// Runs the command. Returns its exit status. Where in-process cannot work, the command runs
/// unmanaged; with a log for its accesses, this is an error.
pub fn run(arguments: &RunArguments, accesses: Option<&Path>) -> Result<ExitCode, Failure> {
    refuse_others(arguments)?;
    let machine = cpu::memory_info().map_err(|e| Failure::new(format!("/proc/meminfo: {e}")))?;
    options::check_memory(arguments.memory, machine)?;
    let program = supervise::find_command(&arguments.command[0])?;
    let library = libraries::preloaded().map_err(Failure::new)?;
    // Before this process has threads: with threads, the kernel waits some 10 ms, for an RCU grace
    // period, before the first high number gets into the table of descriptors.
    let backing = backing(arguments)?;
    let store = store(arguments, backing.is_some())?;
    let prepared = prepare(arguments, &program, &library);
    let events = Events::new()?;
    let mut command = Command::new(&arguments.command[0]);
    events.callers.give_to(command.args(&arguments.command[1..]));
    let file = match prepared {
        Ok(file) => {
            keep_settings(arguments, backing, store.as_ref(), accesses, &file)?;
            preload(&file, library, &mut command);
            Some(file)
        }
        Err(missing) if accesses.is_some() => {
            return Err(Failure::new(format!(
                "the command's accesses cannot be recorded: {missing}"
            )));
        }
        Err(missing) => {
            say!("uzswap: in-process: {missing}; the command runs without uzswap");
            None
        }
    };
    let container = watch_container(file.as_ref())?;
    let began = Instant::now();
    let child = command.spawn();
    let child =
        child.map_err(|error| Failure::new(format!("cannot start the command: {error}")))?;
    let pid = child.id() as i32;
    events.watch_command(child);
    let mut watch = CommandWatch {
        load: start_load_control(arguments, file.as_ref())?,
        suspensions: None,
        peak: Peak { remote: store.as_ref().map(|_| 0), ..Peak::default() },
        left_alone: LeftAlone::default(),
        numbers: Numbers::default(),
        live: Live::new(arguments.quiet),
    };
    let table = file.as_ref().map(|file| file.tree.table());
    let status = watch.wait(pid, &events, table);
    watch.end_load_control();
    watch.live.finish();
    let margin_learnt = container.map_or(0, Container::end);
    let exit_code = supervise::exit_code(status?);
    if let Some(file) = file {
        let seconds = began.elapsed().as_secs_f64();
        tell(arguments, &file, watch, (seconds, exit_code, margin_learnt))?;
    }
    Ok(exit_code.into())
}

/// Prints and writes the report. The run's seconds, exit status and learnt margin are given.
fn tell(
    arguments: &RunArguments,
    file: &TreeFile,
    watch: CommandWatch,
    (seconds, exit_code, margin_learnt): (f64, u8, u64),
) -> Result<(), Failure> {
    let table = file.tree.table();
    let peak = table.peak.load(Relaxed);
    let left_alone = watch.left_alone.all(table, &watch.numbers);
    let explained = left_alone.iter().map(|one| one.bytes).sum();
    let report = InProcessReport {
        seconds,
        exit_code,
        memory_limit: arguments.memory,
        memory_peak: peak,
        margin_learnt,
        faults_by: file.means.name(),
        slower: slower(file.means),
        programs: table.managed.load(Relaxed),
        programs_left_alone: table.unmanaged.load(Relaxed) + watch.left_alone.strangers(),
        left_alone,
        faults: table.faults.load(Relaxed),
        stores: table.stored.load(Relaxed),
        pool_peak: watch.peak.pool,
        ratio: watch.peak.ratio,
        backing_peak: watch.peak.backing,
        beyond: watch.peak.beyond.of(peak, arguments.memory, explained),
        remote: watch.peak.remote.map(|peak| AtStore::new(&table.remote.get(), peak)),
        load_control: watch.suspensions,
    };
    if !arguments.quiet {
        say!("{}", report.text().trim_end());
    }
    if let Some(path) = &arguments.report {
        supervise::write_report(path, &report)?;
    }
    Ok(())
}

/// The report of a run.
#[derive(Debug, Serialize)]
struct InProcessReport {
    /// Wall-clock time of the command, seconds.
    seconds: f64,
    exit_code: u8,
    /// Memory that all processes of the run may use, bytes.
    memory_limit: u64,
    /// Peak of the memory that all processes used together, bytes.
    memory_peak: u64,
    /// Bytes by which the limit was lower for some time, because the container needed more beside
    /// it.
    margin_learnt: u64,
    /// `userfaultfd`; `userfaultfd-copies` before Linux 6.8; where userfaultfd is denied, `guards`
    /// or `protection`.
    faults_by: &'static str,
    #[serde(skip)]
    slower: Option<&'static str>,
    /// Programs whose memory was kept small, and programs whose memory could not be.
    programs: u64,
    programs_left_alone: u64,
    /// The programs left alone that were seen, and parts of other programs' memory, with the
    /// reasons.
    left_alone: Vec<Alone>,
    /// Faults that were served, and pages that were compressed. The figures lack some 50 ms at the
    /// end of each process.
    faults: u64,
    stores: u64,
    /// Peak of the bytes of all pools, sampled five times a second.
    pool_peak: u64,
    /// Bytes of pages for one byte of pool, at that peak.
    ratio: f64,
    /// The peak of the compressed pages on the backing, in bytes.
    backing_peak: u64,
    /// The reason for a peak above the limit that `left_alone` does not explain.
    beyond: Option<Beyond>,
    /// The store in another machine's memory, if there is one.
    remote: Option<AtStore>,
    /// The acts of load control, unless it was refused.
    load_control: Option<Suspensions>,
}

impl InProcessReport {
    fn text(&self) -> String {
        let left_alone = match self.programs_left_alone {
            0 => String::new(),
            some => format!(", of {some} it could not be"),
        };
        let mut text = format!(
            "uzswap: {:.1} s in {} of {} memory, in-process: memory of {} processes was kept \
             small{left_alone}\n  swapped   {} pages out, {} faults\n",
            self.seconds,
            size::show(self.memory_peak),
            size::show(self.memory_limit),
            self.programs,
            self.stores,
            self.faults,
        );
        if self.pool_peak > 0 {
            let pool = size::show(self.pool_peak);
            text += &format!("  pool      {pool} at its peak, ratio {:.2} : 1\n", self.ratio);
        }
        if self.backing_peak > 0 {
            text += &format!("  backing   {} at its peak\n", size::show(self.backing_peak));
        }
        if self.margin_learnt > 0 {
            let margin = size::show(self.margin_learnt);
            text += &format!(
                "  margin    learnt: {margin}, which the container needs beside this run\n"
            );
        }
        if let Some(beyond) = &self.beyond {
            text += &format!("uzswap: beyond the limit: {beyond}\n");
        }
        if let Some(remote) = &self.remote {
            text += &format!("  remote    {remote}\n");
        }
        if let Some(done) = self.load_control.filter(|done| done.suspensions > 0) {
            text += &format!("uzswap: {done}\n");
        }
        for Alone { process, program, is_part, bytes } in &self.left_alone {
            let memory = match (is_part, bytes) {
                (true, 0) => "a call of it".into(),
                (true, bytes) => size::show(*bytes) + " of it",
                (false, 0) => "small whenever measured".into(),
                (false, bytes) => size::show(*bytes) + " at its peak",
            };
            text += &format!("uzswap: left {program} (process {process}, {memory})\n");
        }
        if let Some(slower) = self.slower {
            text += &format!("uzswap: faults are served {slower}\n");
        }
        text
    }
}

/// The peaks of figures that rise and fall.
#[derive(Default)]
struct Peak {
    pool: u64,
    ratio: f64,
    backing: u64,
    beyond: Beyond,
    /// Bytes at the store, if there is one.
    remote: Option<u64>,
    /// The favour of the oldest processes, and the count of all faults at the last look.
    favour: Favour,
    faults: u64,
}

impl Peak {
    /// Reads the figures of all processes.
    fn update(&mut self, table: &Table, seconds: f64, live: &Live) {
        table.count_silent(|pid| process::anonymous_bytes(pid as i32).unwrap_or(0));
        let members: Vec<_> = table.members().collect();
        self.beyond.look(&members, table.total.load(Relaxed));
        let (mut used, mut out, mut pool) = (0, 0, 0);
        let (mut backing, mut remote) = (0, 0);
        for member in members {
            used += member.used;
            out += member.figures.out * PAGE_BYTES as u64;
            pool += member.figures.pool;
            backing += member.figures.backing;
            remote += member.figures.remote;
        }
        let ratio = out as f64 / pool.max(1) as f64;
        if pool > self.pool {
            (self.pool, self.ratio) = (pool, ratio);
        }
        self.backing = self.backing.max(backing);
        self.remote = self.remote.map(|peak| peak.max(remote));
        let faults = table.faults.load(Relaxed);
        self.favour_oldest(table, faults);
        live.say(format!(
            "{} in memory, {} compressed to {} ({ratio:.1} : 1); {faults} faults, {:.0} a second",
            size::show(used),
            size::show(out),
            size::show(pool),
            faults as f64 / seconds.max(0.1),
        ));
    }
}

impl Peak {
    /// Favours the oldest processes in proportion to the thrashing of all.
    fn favour_oldest(&mut self, table: &Table, faults: u64) {
        let since = faults - std::mem::replace(&mut self.faults, faults);
        let cpus = cpu::allowed() as u64;
        self.favour = self.favour.after(since, cpus, table.first());
        table.favour(self.favour.parts(), cpus);
        self.favour.is_over().into_iter().for_each(|first| table.put_last(first, clock()));
    }
}

/// Writes the settings of a run into the file that its processes share. Fails if a setting is too
/// long.
fn keep_settings(
    arguments: &RunArguments,
    backing: Option<(PathBuf, u64)>,
    store: Option<&Address>,
    accesses: Option<&Path>,
    file: &TreeFile,
) -> Result<(), Failure> {
    let table = file.tree.table();
    table.protects.store((file.means.mode() == Mode::Protection).into(), Relaxed);
    let place = backing.map(|(folder, bytes)| {
        let mut place = folder.into_os_string();
        place.push(format!(":{bytes}"));
        place
    });
    let compressor = arguments.cache.compressor.as_ref();
    let settings = [
        (Setting::Means, Some(file.means.name().into())),
        (Setting::Compressor, compressor.map(|compressor| compressor.to_string().into())),
        (Setting::Policy, arguments.policy.map(|policy| policy.name().into())),
        (Setting::Backing, place),
        (Setting::Store, store.map(|address| address.to_string().into())),
        (Setting::Accesses, accesses.map(OsString::from)),
    ];
    for (setting, value) in settings {
        let value = value.unwrap_or_default();
        if !table.set(setting, value.as_bytes()) {
            let value = value.display();
            return Err(Failure::new(format!(
                "{value} has more than 4096 bytes; use a shorter name"
            )));
        }
    }
    Ok(())
}

/// Sets the environment so that a command loads the library, and the library finds the shared file.
fn preload(file: &TreeFile, library: PathBuf, command: &mut Command) {
    command.env("UZSWAP_TREE", &file.path);
    let others = env::var_os("LD_PRELOAD").unwrap_or_default();
    let has_musl = Path::new(executable::MUSL_LINKER).exists();
    let library = if has_musl { executable::for_glibc_alone(library) } else { library };
    let mut preload = library.into_os_string();
    if !others.is_empty() {
        preload.push(":");
        preload.push(others);
    }
    // A program built with AddressSanitizer refuses to start after a preloaded library.
    let mut sanitizer = env::var_os("ASAN_OPTIONS").unwrap_or_default();
    sanitizer.push(if sanitizer.is_empty() { "" } else { ":" });
    sanitizer.push("verify_asan_link_order=0");
    command.env("ASAN_OPTIONS", sanitizer).env("LD_PRELOAD", preload);
}

/// Refuses the options that only the swap device has.
fn refuse_others(arguments: &RunArguments) -> Result<(), Failure> {
    let cache = &arguments.cache;
    let given = [
        ("--pool", cache.pool.is_some()),
        ("--plain-backing", cache.plain_backing),
        ("--transport", cache.transport != Transport::Auto),
        ("--threads", cache.threads.is_some()),
        ("--metrics", cache.metrics.is_some()),
        ("--size", arguments.size.is_some()),
        ("--user", arguments.user.is_some()),
        ("--include-pool", arguments.include_pool),
    ];
    match given.iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => Err(Failure::new(format!(
            "{name} is for the swap device alone (--device, as root); leave it out in-process, where \
             the pool is a part of --memory"
        ))),
        None => Ok(()),
    }
}

/// The folder in which each process keeps pages, and the maximum bytes of a process; `None` for no
/// backing.
fn backing(arguments: &RunArguments) -> Result<Option<(PathBuf, u64)>, Failure> {
    let (given, _) = options::places(&arguments.cache.backing);
    let given = given.as_deref();
    let (folder, bytes) = match options::backing(given, arguments.memory.saturating_mul(PARTS))? {
        Backing::None => return Ok(None),
        Backing::Unnamed(folder, bytes) => (folder, bytes),
        Backing::Path(folder, Some(bytes)) if folder.is_dir() => (folder, bytes),
        Backing::Path(path, _) => {
            let path = path.display();
            return Err(Failure::new(format!(
                "--backing {path}: each process has a file of its own; name a folder and the size \
                 of each file, as in /var/tmp:4G"
            )));
        }
    };
    match Pager::check_unnamed_backing(&folder) {
        Ok(()) => Ok(Some((folder, bytes))),
        // Nobody asked for a backing.
        Err(_) if given.is_none() => Ok(None),
        Err(error) => Err(Failure::new(format!(
            "--backing {}: {error}; name a folder on a disk that you may write",
            folder.display()
        ))),
    }
}

/// The store, if it answers now. A forked process needs room on a disk for all of its pages.
fn store(arguments: &RunArguments, has_disk: bool) -> Result<Option<Address>, Failure> {
    let Some(address) = options::store(&arguments.cache)? else { return Ok(None) };
    if !has_disk {
        return Err(Failure::new(format!(
            "backing {address}: in-process, a forked process needs room on a disk for pages that \
             only the store has; name a folder and a size, too, as in --backing /var/tmp:4G"
        )));
    }
    Connected::to(&address)?;
    Ok(Some(address))
}

/// Without `--backing`, a process has room on the disk for sixteen times the memory.
const PARTS: u64 = 32;

/// Starts load control, if it is wanted and the processes share a file.
fn start_load_control(
    arguments: &RunArguments,
    file: Option<&TreeFile>,
) -> Result<Option<LoadControl>, Failure> {
    let file = file.filter(|_| !arguments.no_load_control);
    let start = |file: &TreeFile| LoadControl::start(InTree(file.tree.table()), cpu::allowed());
    let control = file.map(start).transpose();
    control.map_err(|error| {
        Failure::new(format!("cannot start the thread of load control: {error}; raise ulimit -u, or give --no-load-control"))
    })
}

/// Has the budget follow the container's limit, if there is one and the processes share a file.
fn watch_container(file: Option<&TreeFile>) -> Result<Option<Container>, Failure> {
    let watched = file.map(|file| Container::watch(file.tree.table())).transpose();
    let watched = watched.map_err(|error| {
        Failure::new(format!(
            "cannot start the thread that watches the container's limit: {error}; raise ulimit -u"
        ))
    })?;
    Ok(watched.flatten())
}

/// The run searches once a second, at every fifth look, for processes that are left alone.
const LOOKS: u32 = 5;

/// The state of a run while the command runs.
struct CommandWatch {
    load: Option<LoadControl>,
    /// A record of the acts of load control, after its end.
    suspensions: Option<Suspensions>,
    peak: Peak,
    left_alone: LeftAlone,
    numbers: Numbers,
    live: Live,
}

impl CommandWatch {
    fn end_load_control(&mut self) {
        if let Some(load) = self.load.take() {
            self.suspensions = Some(load.end());
        }
    }

    /// Waits for the command, passes signals on, and reads the figures five times a second.
    fn wait(
        &mut self,
        pid: i32,
        events: &Events,
        table: Option<&Table>,
    ) -> Result<ExitStatus, Failure> {
        let (began, mut interrupts) = (Instant::now(), Interrupts::default());
        let mut looks = 0u32;
        loop {
            match events.receiver.recv_timeout(supervise::TICK) {
                Ok(Event::CommandEnded(status)) => return Ok(status),
                Ok(Event::Signal { signal, from_terminal }) => {
                    // A suspended process would not handle the signal.
                    self.end_load_control();
                    if interrupts.pass_on(pid, signal, from_terminal) {
                        // An error means that the process has just ended.
                        process::tree(pid).into_iter().for_each(|one| {
                            let _ = process::kill(one, libc::SIGKILL);
                        });
                    }
                }
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(table) = table {
                        self.peak.update(table, began.elapsed().as_secs_f64(), &self.live);
                        // We do this only once a second, because it inspects each process.
                        if looks.is_multiple_of(LOOKS) {
                            self.numbers.look(table);
                            table.forget(|process| process::has_ended(process as i32));
                            self.left_alone.look(pid, table, &self.numbers);
                        }
                        looks = looks.wrapping_add(1);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the command's end was missed"));
                }
            }
        }
    }
}
