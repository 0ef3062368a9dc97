//! `uzswap status`: the contents of this machine's cache, and its users. `uzswap clean`: removes
//! the remains of killed runs.

use crate::cli::StatusArguments;
use crate::commands::in_process::tree_file;
use crate::device::folder::{self, Lock};
use crate::device::keeper;
use crate::device::ledger::{self, LedgerState};
use crate::error::Failure;
use crate::show::stats::Stats;
use crate::size;
use crate::stdio::show;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::sleep;
use std::time::{Duration, Instant};
use uzswap_engine::PAGE_BYTES;
use uzswap_tree::{Member, Tree};

/// The message where no cache runs.
pub const NONE_RUNS: &str = "no cache is running; start one with `uzswap run` or `uzswap serve`";

/// The cache of this machine.
#[derive(Serialize)]
pub struct Running {
    mount: PathBuf,
    /// True if the cache's daemon lives.
    pub alive: bool,
    /// The cache's participants, and the changes to the machine.
    #[serde(flatten)]
    pub state: LedgerState,
    /// The figures of the cache's daemon; empty if the daemon is gone.
    #[serde(flatten)]
    pub stats: Stats,
}

impl Running {
    /// `None` if there is neither a cache nor a remaining part of a former one.
    pub fn read() -> Option<Self> {
        let state = LedgerState::read().ok().filter(|state| *state != LedgerState::default())?;
        let alive = Lock::is_taken();
        let mount = folder::mount();
        // Reading a dead daemon's files would fail.
        let stats = if alive { Stats::read(&mount) } else { Stats::default() };
        Some(Self { mount, alive, state, stats })
    }
}

/// Refuses other users: the control files are root's.
pub fn require_root() -> Result<(), Failure> {
    match uzswap_sys::process::is_root() {
        true => Ok(()),
        false => Err(Failure::new("only root may read the figures; use sudo")),
    }
}

pub fn status(arguments: &StatusArguments) -> Result<(), Failure> {
    let in_process = tree_file::running();
    if let Some(process) = arguments.bring_in {
        return bring_in(process, &in_process);
    }
    // Users may inspect their own in-process runs.
    if in_process.is_empty() {
        require_root()?;
    }
    let running = Running::read().filter(|_| uzswap_sys::process::is_root());
    let runs = in_process.iter().map(|(number, tree, _)| InProcess::of(*number, tree));
    if arguments.json {
        let device = running.into_iter().map(Box::new).map(Shown::Device);
        let all: Vec<_> = device.chain(runs.map(Shown::InProcess)).collect();
        let json = serde_json::to_string_pretty(&all);
        show!("{}", json.map_err(|error| Failure::new(error.to_string()))?);
        return Ok(());
    }
    match &running {
        Some(running) => print(running),
        None if in_process.is_empty() => show!("{NONE_RUNS}"),
        None => {}
    }
    runs.for_each(|run| run.print());
    Ok(())
}

/// An element of the JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown {
    Device(Box<Running>),
    InProcess(InProcess),
}

/// The state of an in-process run. Sizes are in bytes.
#[derive(Serialize)]
struct InProcess {
    /// The process number of `uzswap run`.
    in_process: u32,
    memory_limit: u64,
    memory: u64,
    memory_peak: u64,
    faults: u64,
    processes: Vec<Process>,
}

#[derive(Serialize)]
struct Process {
    process: u32,
    name: String,
    memory: u64,
    /// Absent pages: compressed, on the backing, or in another machine's memory.
    out: u64,
    pool: u64,
    faults: u64,
    is_suspended: bool,
}

impl InProcess {
    fn of(number: u32, tree: &Tree) -> Self {
        let table = tree.table();
        let processes = table.members().map(|member| {
            let Member { process, used, figures, is_suspended, .. } = member;
            let name = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
            Process {
                process,
                name: name.trim_end().to_owned(),
                memory: used,
                out: figures.out * PAGE_BYTES as u64,
                pool: figures.pool,
                faults: figures.faults,
                is_suspended,
            }
        });
        let processes: Vec<_> = processes.collect();
        Self {
            in_process: number,
            memory_limit: table.total.load(Relaxed),
            memory: processes.iter().map(|process| process.memory).sum(),
            memory_peak: table.peak.load(Relaxed),
            faults: table.faults.load(Relaxed),
            processes,
        }
    }

    fn print(&self) {
        show!(
            "run --in-process ({}): {} of {} in memory, {} at most; {} faults",
            self.in_process,
            size::show(self.memory),
            size::show(self.memory_limit),
            size::show(self.memory_peak),
            self.faults,
        );
        for process in &self.processes {
            // All pages may be on the backing.
            let pool = match process.pool {
                0 => String::new(),
                pool => format!(", compressed to {}", size::show(pool)),
            };
            show!(
                "  {:>8} {}: {} in memory, {} out{pool}, {} faults{}",
                process.process,
                process.name,
                size::show(process.memory),
                size::show(process.out),
                process.faults,
                if process.is_suspended { "; suspended" } else { "" },
            );
        }
    }
}

/// Has a process bring all of its pages in and keep them in, until this command is ended.
fn bring_in(process: u32, runs: &[(u32, Tree, PathBuf)]) -> Result<(), Failure> {
    const LOOK: Duration = Duration::from_millis(20);
    /// A process that is stopped, also by a debugger, does not answer.
    const PATIENCE: Duration = Duration::from_secs(60);
    let find = |tree: &Tree| tree.table().members().find(|member| member.process == process);
    let is_member = |tree: &Tree| find(tree).is_some();
    let Some((_, tree, _)) = runs.iter().find(|(_, tree, _)| is_member(tree)) else {
        return Err(Failure::new(format!(
            "{process} is no process of an in-process run of this user; `uzswap status` lists them"
        )));
    };
    let table = tree.table();
    table.want_whole(process);
    let began = Instant::now();
    // A small process, or one that was not taken over, has no absent page.
    let is_asked = || find(tree).is_some_and(|member| member.figures.out > 0);
    while is_asked() && table.is_whole(process).is_none() {
        if began.elapsed() > PATIENCE {
            return Err(Failure::new(format!(
                "process {process} does not answer; if it is stopped, let it go on: kill -CONT \
                 {process}"
            )));
        }
        sleep(LOOK);
    }
    match table.is_whole(process) {
        _ if !is_member(tree) => {
            return Err(Failure::new(format!("process {process} has ended")));
        }
        Some(true) | None => {
            show!("all pages of process {process} are in memory until Ctrl-C ends this command")
        }
        Some(false) => {
            return Err(Failure::new(format!(
                "there is no memory for all pages of process {process}; free some, or raise the \
                 limit of its control group"
            )));
        }
    }
    while is_member(tree) {
        sleep(LOOK);
    }
    Ok(())
}

/// One line on the present state.
pub fn describe() -> Option<String> {
    let running = Running::read()?;
    let what = match running.alive {
        true => "is running",
        false => "was killed; the next `uzswap run` or `serve` cleans up",
    };
    Some(format!("{}: {what}", folder::FOLDER))
}

/// `uzswap clean`: undoes the remains of killed runs.
pub fn clean() -> Result<(), Failure> {
    if Running::read().is_none() {
        show!("nothing to clean up");
        return Ok(());
    }
    let lock = Lock::take().map_err(|error| Failure::new(keeper::cannot_lock(&error)))?;
    let Some(lock) = lock else {
        show!("nothing to clean up; the cache is running");
        return Ok(());
    };
    let cleaned = ledger::clean_up(&lock);
    cleaned.done.iter().for_each(|line| show!("{line}"));
    match cleaned.left.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(cleaned.left.join("; "))),
    }
}

fn print(running: &Running) {
    let Running { state, stats, .. } = running;
    let get = |name: &str| stats.get(name);
    let devices: Vec<_> =
        state.areas.iter().map(|area| area.device.display().to_string()).collect();
    show!("{}  {} ({})", running.mount.display(), devices.join(", "), state.transport);
    if !running.alive {
        show!("  its daemon is gone; the next `uzswap run` or `serve` cleans up");
        return;
    }
    print_runs(state);
    if stats.stats.is_empty() {
        show!(
            "  figures   none, as the control files are not mounted; pages are served all the same"
        );
        return;
    }
    show!(
        "  space     {} of {} taken; {} of dead pages",
        size::show(get("swap_used_size")),
        size::show(get("swap_area_size")),
        size::show(get("dead_pages") * PAGE_BYTES as u64),
    );
    print_held(stats);
    show!(
        "  rejected  {} poorly compressed, {} without memory, {} at the limit, {} switched off",
        get("reject_compress_poor"),
        get("reject_alloc_fail"),
        get("reject_reclaim_fail"),
        get("reject_disabled"),
    );
    show!(
        "  traffic   {} pages in, {} out, {} discarded; reads served in {} us (p50), {} us (p99)",
        get("pages_swapped_in"),
        get("pages_swapped_out"),
        get("pages_discarded"),
        get("fault_ns_p50") as f64 / 1000.0,
        get("fault_ns_p99") as f64 / 1000.0,
    );
    show!("  cpus      {}", stats.parameters.get("cpus").map_or("?", String::as_str));
    if !stats.writeback_error.is_empty() {
        show!(
            "  WRITEBACK STOPPED: {}; nothing is lost; repair the backing, then echo Y > \
             {}/parameters/writeback_enabled",
            stats.writeback_error,
            running.mount.display()
        );
    }
    let lost = get("decompress_fail") + get("read_fail");
    if lost > 0 {
        show!("  LOST: {lost} loads failed; the processes that needed them got SIGBUS");
    }
}

fn print_runs(state: &LedgerState) {
    for run in &state.runs {
        let group = run.place.as_ref().map(|place| place.group());
        let usage = group.map(|group| group.usage()).unwrap_or_default();
        show!(
            "  run       {} ({}): {} of {} in memory, {} swapped out",
            run.run.command,
            run.run.pid,
            size::show(usage.current),
            size::show(run.run.memory),
            size::show(usage.swapped),
        );
    }
}

fn print_held(stats: &Stats) {
    let get = |name: &str| stats.get(name);
    let parameter = |name: &str| stats.parameters.get(name).map_or("?", String::as_str);
    show!(
        "  pool      {} of {} for {} of pages, {} ({:.2} : 1, {})",
        size::show(get("pool_total_size")),
        size::show(get("pool_limit")),
        size::show(stats.original_bytes()),
        parameter("compressor"),
        stats.ratio().unwrap_or(0.0),
        "tables ".to_owned() + &size::show(get("metadata_size")),
    );
    show!(
        "  pages     {} held: {} in the pool, {} same-filled, {} sharing another's object, {} on the \
         backing",
        get("stored_pages"),
        get("pool_pages"),
        get("same_filled_pages"),
        get("shared_pages"),
        get("backing_pages"),
    );
    show!(
        "  backing   {} live of {}; {} written, {} read",
        size::show(get("backing_live_size")),
        size::show(get("backing_total_size")),
        size::show(get("backing_bytes_written")),
        size::show(get("backing_bytes_read")),
    );
    if get("remote_limit") > 0 {
        show!(
            "  remote    {} of {} at the store, which {}; {} written, {} reads in {:.0} us (p50), {:.0} us \
             (p99); {} errors, {} lost",
            size::show(get("remote_size")),
            size::show(get("remote_limit")),
            if get("remote_up") == 1 { "answers" } else { "does not answer" },
            size::show(get("remote_bytes_written")),
            get("remote_reads"),
            get("remote_read_ns_p50") as f64 / 1000.0,
            get("remote_read_ns_p99") as f64 / 1000.0,
            get("remote_errors"),
            get("remote_lost"),
        );
    }
}
