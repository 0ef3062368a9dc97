//! The compared configurations: uzswap, and its alternatives.

use crate::bench::{Candidate, Interrupt};
use crate::error::{Context, Failure};
use crate::machine::{Changes, ZRAM};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_region::Mode;
use uzswap_sys::cgroup::Group;
use uzswap_sys::{cpu, process};

/// The folder of swap files and sources: on a disk, not in memory.
pub const FOLDER: &str = "/var/tmp/uzswap-bench";

const ZSWAP: &str = "/sys/module/zswap/parameters";

/// Size of a peer's swap area, enough for all benchmarks.
const AREA_BYTES: u64 = 4 << 30;

/// The step by which a group's limit is lowered.
const LIMIT_STEP: u64 = 4 << 20;

/// The interval of checks of a running command, and the checks for each sample.
const TICK: Duration = Duration::from_millis(5);
const SAMPLED: u32 = 20;

/// A configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Peer {
    /// The kernel's swap to a file.
    Plain,
    /// A swap disk with the kernel's zswap in front of it.
    Zswap {
        /// Its `compressor`.
        compressor: String,
    },
    /// The kernel's swap to compressed memory.
    Zram {
        /// Its `comp_algorithm`.
        compressor: String,
    },
    /// `uzswap run` with these options.
    Uzswap {
        /// Its name in tables.
        name: String,
        options: Vec<String>,
    },
    /// A region, which the measured program makes itself.
    Region {
        compressor: String,
        /// True if threads of the pager serve its faults.
        handlers: bool,
    },
    /// Memory whose faults are served without a cache ([`crate::floor`]).
    Floor,
    /// The command alone, with all of the machine's memory.
    Alone,
    /// `uzswap run --in-process`.
    InProcess {
        /// The compressor of the run, if it is not the default.
        compressor: Option<String>,
        /// True with load control.
        is_controlled: bool,
    },
}

/// The resources of a command.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Memory, bytes.
    pub memory: u64,
    /// The maximum bytes of this memory for the pool. `None` if the pool is beside the memory.
    pub pool: Option<u64>,
    /// Swap files and the backing are on a slow disk.
    pub slow_disk: bool,
    /// Time after which the command is stopped.
    pub time_max: Option<Duration>,
}

impl Room {
    /// Memory for the command alone.
    pub fn beside_the_pool(memory: u64) -> Self {
        Self { memory, pool: None, slow_disk: false, time_max: None }
    }
}

/// The folder of the slow disk, and its content.
const DISK: &str = "/var/tmp/uzswap-bench/disk";
const DISK_IMAGE_BYTES: u64 = 5 << 30;
const BACKING_BYTES: u64 = 2 << 30;

/// The measurements of a command.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Measured {
    /// Wall-clock time, s.
    pub seconds: f64,
    /// True if the command ended by itself, false if it was stopped.
    pub is_whole: bool,
    /// CPU time of the whole machine in this time, s: of the command, the kernel, and the process
    /// that serves pages.
    pub cpu_seconds: f64,
    pub major_faults: u64,
    /// Pages swapped in, from any device.
    pub pages_in: u64,
    /// Pages swapped out, to any device.
    pub pages_out: u64,
    /// Bytes that were read from a disk for these pages.
    pub device_read: u64,
    /// Bytes that were written to a disk for these pages.
    pub device_written: u64,
    /// Peak of the bytes of compressed pages in memory, sampled ten times a second.
    pub pool_peak: u64,
    /// The share of the cache's pages whose slots the kernel had freed: the mean of the samples, 0
    /// to 1. Unknown for other configurations. The kernel tells zram of each freed slot
    /// immediately.
    #[serde(default)]
    pub dead_share: Option<f64>,
    #[serde(skip)]
    pub stdout: String,
}

impl Candidate for Peer {
    fn name(&self) -> String {
        match self {
            Self::Plain => "plain swap".into(),
            Self::Zswap { compressor } => format!("zswap, {compressor}"),
            Self::Zram { compressor } => format!("zram, {compressor}"),
            Self::Uzswap { name, .. } => name.clone(),
            Self::Region { compressor, handlers: false } => format!("region, {compressor}"),
            Self::Region { compressor, handlers: true } => {
                format!("region, {compressor}, handlers")
            }
            Self::Floor => "userfaultfd, no cache".into(),
            Self::Alone => "alone".into(),
            Self::InProcess { is_controlled: false, .. } => "in-process, no load control".into(),
            Self::InProcess { compressor: None, .. } => "in-process".into(),
            Self::InProcess { compressor: Some(name), .. } => format!("in-process, {name}"),
        }
    }

    fn missing(&self) -> Option<String> {
        let lacks = |path: &str| !Path::new(path).exists();
        let offers = |path: String, name: &str| {
            fs::read_to_string(path).is_ok_and(|text| {
                text.split_whitespace().any(|w| w.trim_matches(['[', ']']) == name)
            })
        };
        match self {
            Self::Zswap { .. } if lacks(ZSWAP) => Some("this kernel has no zswap".into()),
            Self::Zram { .. } if lacks(ZRAM) => Some("this kernel has no zram device".into()),
            Self::Zram { compressor } if !offers(format!("{ZRAM}/comp_algorithm"), compressor) => {
                Some(format!("this kernel's zram has no {compressor}"))
            }
            Self::Zram { .. }
                if fs::read_to_string(format!("{ZRAM}/disksize"))
                    .is_ok_and(|size| size.trim() != "0") =>
            {
                Some("zram0 is in use".into())
            }
            Self::Region { handlers, .. } => {
                let mode = if *handlers { Mode::HandlerThreads } else { Mode::InThread };
                mode.check().err().map(|error| error.to_string())
            }
            Self::Floor | Self::InProcess { .. } => {
                Mode::InThread.check().err().map(|error| error.to_string())
            }
            _ => None,
        }
    }
}

impl Peer {
    /// `uzswap run --in-process` with its defaults.
    pub const IN_PROCESS: Self = Self::InProcess { compressor: None, is_controlled: true };

    pub fn run(
        &self,
        changes: &mut Changes,
        room: Room,
        command: &[String],
        interrupt: &Interrupt,
    ) -> Result<Measured, Failure> {
        fs::create_dir_all(FOLDER).context(FOLDER)?;
        if room.slow_disk {
            changes.slow_disk(Path::new(DISK), DISK_IMAGE_BYTES)?;
        }
        if let Self::Uzswap { options, .. } = self {
            return run_uzswap(room, options, command, interrupt);
        }
        match self {
            Self::InProcess { compressor, is_controlled } => {
                let control = (!is_controlled).then_some("--no-load-control");
                let below = in_process(room, compressor.as_deref(), control)?;
                return run_in_process(below, room, command, interrupt);
            }
            Self::Alone => {
                let mut alone = Command::new(&command[0]);
                alone.args(&command[1..]);
                return run_unlimited(alone, room.time_max, interrupt);
            }
            _ => {}
        }
        self.set_up(changes, room)?;
        let group = changes.group(room.memory)?;
        let child = Command::new("sh")
            .args(["-c", "echo 0 > \"$0\" && exec \"$@\""])
            .arg(group.entrance())
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("sh")?;
        let before = Counters::read();
        let limit = Cell::new(room.memory);
        let ended = wait(child, interrupt, room.time_max, || {
            let pool = self.pool_bytes();
            if room.pool.is_some() {
                // The kernel charges zswap's or zram's pool to no group, so the pool's bytes are
                // subtracted from the limit.
                let left = room.memory.saturating_sub(pool).max(room.memory / 4);
                limit.set(lower(&group, limit.get(), left));
            }
            pool
        })?;
        let after = Counters::read();
        let count = |name: &str| after.get(name).saturating_sub(before.get(name));
        let on_disk = matches!(self, Self::Plain | Self::Zswap { .. });
        let (pages_in, pages_out) = (count("pswpin"), count("pswpout"));
        Ok(Measured {
            seconds: ended.seconds,
            is_whole: ended.is_whole,
            cpu_seconds: after.cpu_seconds - before.cpu_seconds,
            major_faults: count("pgmajfault"),
            pages_in: pages_in + count("zswpin"),
            pages_out: pages_out + count("zswpout"),
            device_read: if on_disk { pages_in * 4096 } else { 0 },
            device_written: if on_disk { pages_out * 4096 } else { 0 },
            pool_peak: ended.peak,
            dead_share: None,
            stdout: ended.stdout,
        })
    }

    /// The options by which the measured program takes its memory from this peer.
    pub fn memory_options(&self, budget_mib: usize) -> Vec<String> {
        match self {
            Self::Region { compressor, handlers } => {
                let region = format!("--region={compressor}");
                let budget = format!("--budget-mib={budget_mib}");
                let handlers = handlers.then(|| "--handlers".to_owned());
                [region, budget].into_iter().chain(handlers).collect()
            }
            Self::Floor => vec!["--floor".into()],
            Self::InProcess { .. } => vec!["--in-process".into()],
            _ => Vec::new(),
        }
    }

    fn set_up(&self, changes: &mut Changes, room: Room) -> Result<(), Failure> {
        let is_off = !matches!(self, Self::Zswap { .. }) && Path::new(ZSWAP).exists();
        if is_off {
            changes.set(&format!("{ZSWAP}/enabled"), "N")?;
        }
        let swap = |changes: &mut Changes| match room.slow_disk {
            true => changes.swap_file_merged(&Path::new(DISK).join("swap"), AREA_BYTES),
            false => changes.swap_file(&Path::new(FOLDER).join("swap"), AREA_BYTES),
        };
        match self {
            Self::Plain => swap(changes),
            Self::Zswap { compressor } => {
                swap(changes)?;
                if let Some(pool) = room.pool {
                    // zswap's limit is a percentage of the machine's memory.
                    let hundredth = cpu::memory_info().context("/proc/meminfo")?.total / 100;
                    let percent = pool.div_ceil(hundredth.max(1)).clamp(1, 100).to_string();
                    changes.set(&format!("{ZSWAP}/max_pool_percent"), &percent)?;
                }
                changes.set(&format!("{ZSWAP}/compressor"), compressor)?;
                changes.set(&format!("{ZSWAP}/enabled"), "Y")
            }
            Self::Zram { compressor } => {
                changes.zram(compressor, AREA_BYTES)?;
                changes.swap_on(Path::new("/dev/zram0"), AREA_BYTES)
            }
            _ => Ok(()),
        }
    }

    /// Bytes of compressed pages in memory now.
    fn pool_bytes(&self) -> u64 {
        match self {
            Self::Zram { .. } => zram_memory(),
            Self::Zswap { .. } => {
                let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
                let line = text.lines().find_map(|line| line.strip_prefix("Zswap:"));
                number(line.unwrap_or_default(), 0) * 1024
            }
            _ => 0,
        }
    }
}

fn number(text: &str, field: usize) -> u64 {
    text.split_whitespace().nth(field).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Bytes of zram's pool: `mem_used_total`, the third field of `mm_stat`.
pub fn zram_memory() -> u64 {
    number(&fs::read_to_string(format!("{ZRAM}/mm_stat")).unwrap_or_default(), 2)
}

/// uzswap's program, in the folder of this program.
pub fn uzswap() -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().context("the path of this program")?;
    let path = own.with_file_name("uzswap");
    match path.exists() {
        true => Ok(path),
        false => Err(Failure::new(format!("{} is missing; build it first", path.display()))),
    }
}

fn run_uzswap(
    room: Room,
    options: &[String],
    command: &[String],
    interrupt: &Interrupt,
) -> Result<Measured, Failure> {
    let report = tempfile::NamedTempFile::new().context("a temporary file")?;
    let mut given = Vec::new();
    if let Some(pool) = room.pool {
        given.extend([format!("--pool={pool}"), "--include-pool".into()]);
    }
    if room.slow_disk {
        given.push(format!("--backing={DISK}/backing:{BACKING_BYTES}"));
    }
    let child = Command::new(uzswap()?)
        .args(["run", "--memory", &room.memory.to_string(), "--report"])
        .arg(report.path())
        .args(options)
        .args(given)
        .args(["--quiet", "--"])
        .args(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("uzswap")?;
    let before = Counters::read();
    let ended = wait(child, interrupt, room.time_max, || 0)?;
    let after = Counters::read();
    let text = fs::read_to_string(report.path()).context("the report")?;
    let report: serde_json::Value = serde_json::from_str(&text).context("the report")?;
    let stat = |name: &str| report["stats"][name].as_u64().unwrap_or(0);
    Ok(Measured {
        seconds: report["seconds"].as_f64().unwrap_or(0.0),
        is_whole: ended.is_whole,
        cpu_seconds: after.cpu_seconds - before.cpu_seconds,
        major_faults: report["major_faults"].as_u64().unwrap_or(0),
        pages_in: stat("pages_swapped_in"),
        pages_out: stat("pages_swapped_out"),
        device_read: stat("backing_bytes_read"),
        device_written: stat("backing_bytes_written"),
        pool_peak: report["pool_peak"].as_u64().unwrap_or(0),
        dead_share: report["dead_share"].as_f64(),
        stdout: ended.stdout,
    })
}

/// `uzswap run`, without the command. The pool is always a part of the memory in-process.
fn in_process(
    room: Room,
    compressor: Option<&str>,
    control: Option<&str>,
) -> Result<Command, Failure> {
    let mut below = Command::new(uzswap()?);
    below.args(["run", "--in-process", "--quiet", "--memory", &room.memory.to_string()]);
    below.args(compressor.map(|name| format!("--compressor={name}"))).args(control);
    if room.slow_disk {
        below.arg(format!("--backing={DISK}:{BACKING_BYTES}"));
    }
    Ok(below)
}

/// Changes a group's limit. Returns the limit that was reached. The kernel refuses a limit that it
/// cannot reach in one step, so this lowers the limit in steps. After an error no more can be
/// swapped out now, and the next check tries again.
fn lower(group: &Group, mut limit: u64, target: u64) -> u64 {
    while limit != target {
        let next = target.max(limit.saturating_sub(LIMIT_STEP));
        if group.set_limit(next, 0).is_err() {
            break;
        }
        limit = next;
    }
    limit
}

/// Runs a command by `uzswap run --in-process`, whose report has the size of the pool.
fn run_in_process(
    mut below: Command,
    room: Room,
    command: &[String],
    interrupt: &Interrupt,
) -> Result<Measured, Failure> {
    let report = tempfile::NamedTempFile::new().context("a temporary file")?;
    below.arg("--report").arg(report.path()).arg("--").args(command);
    let measured = run_unlimited(below, room.time_max, interrupt)?;
    let text = fs::read_to_string(report.path()).context("the report")?;
    // A stopped command leaves no report.
    let report: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    Ok(Measured { pool_peak: report["pool_peak"].as_u64().unwrap_or(0), ..measured })
}

/// Runs a configuration without a cgroup. Swapping by this program is not counted.
fn run_unlimited(
    mut command: Command,
    time_max: Option<Duration>,
    interrupt: &Interrupt,
) -> Result<Measured, Failure> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("uzswap")?;
    let before = Counters::read();
    let ended = wait(child, interrupt, time_max, || 0)?;
    let after = Counters::read();
    Ok(Measured {
        seconds: ended.seconds,
        is_whole: ended.is_whole,
        cpu_seconds: after.cpu_seconds - before.cpu_seconds,
        major_faults: 0,
        pages_in: 0,
        pages_out: 0,
        device_read: 0,
        device_written: 0,
        pool_peak: 0,
        dead_share: None,
        stdout: ended.stdout,
    })
}

/// The result of a command.
pub struct Ended {
    seconds: f64,
    is_whole: bool,
    /// The largest sample.
    peak: u64,
    /// The command's output, if the command has printed all of it.
    pub stdout: String,
}

/// Waits for a command whose output is piped, and stops it when its time is up. Fails if the
/// command fails. The error has the command's last message, if standard error is piped.
pub fn wait(
    mut child: Child,
    interrupt: &Interrupt,
    time_max: Option<Duration>,
    sample: impl Fn() -> u64,
) -> Result<Ended, Failure> {
    let began = Instant::now();
    let (Some(stdout), mut peak) = (child.stdout.take(), 0) else {
        return Err(Failure::new("no pipe from the command"));
    };
    let stderr = child.stderr.take();
    let reader = std::thread::spawn(move || std::io::read_to_string(stdout).unwrap_or_default());
    let errors = std::thread::spawn(move || stderr.and_then(|it| std::io::read_to_string(it).ok()));
    let (mut told, mut is_whole, mut look) = (false, true, 0u32);
    let (status, seconds) = loop {
        if let Some(status) = child.try_wait().context("the command")? {
            break (status, began.elapsed().as_secs_f64());
        }
        let is_late = time_max.is_some_and(|most| began.elapsed() > most);
        if (interrupt.came() || is_late) && !told {
            // An error means that the command has just ended. `run` passes the signal on. Processes
            // that a shell leaves are killed with its group.
            let _ = process::kill(child.id() as i32, signal_hook::consts::SIGTERM);
            (told, is_whole) = (true, false);
        }
        if look.is_multiple_of(SAMPLED) {
            peak = peak.max(sample());
        }
        look += 1;
        std::thread::sleep(TICK);
    };
    interrupt.check()?;
    if !is_whole {
        return Ok(Ended { seconds, is_whole, peak, stdout: String::new() });
    }
    if !status.success() {
        let how = status.signal().map_or(format!("{status}"), |signal| format!("signal {signal}"));
        let said = errors.join().ok().flatten().unwrap_or_default();
        let said = said.lines().last().map(|last| format!(": {last}")).unwrap_or_default();
        return Err(Failure::new(format!("the measured command failed: {how}{said}")));
    }
    let stdout = reader.join().unwrap_or_default();
    Ok(Ended { seconds, is_whole, peak, stdout })
}

/// The kernel's counters of the whole machine.
struct Counters {
    vm: BTreeMap<String, u64>,
    cpu_seconds: f64,
}

impl Counters {
    fn read() -> Self {
        let vm = fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let pair = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let ticks: Vec<u64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .filter_map(|number| number.parse().ok())
            .collect();
        // user nice system idle iowait irq softirq steal: all except idle, iowait and steal.
        let busy = ticks.iter().take(7).sum::<u64>() - ticks.iter().skip(3).take(2).sum::<u64>();
        Self { vm: vm.lines().filter_map(pair).collect(), cpu_seconds: busy as f64 / 100.0 }
    }

    fn get(&self, name: &str) -> u64 {
        self.vm.get(name).copied().unwrap_or(0)
    }
}
