//! `kernel-build`: a small kernel, many compile jobs and little memory, on a fast and a slow disk.
//!
//! All configurations have the same memory in total. With plain swap the command has all of it. For
//! zswap and zram, the pool's bytes are subtracted from the command's limit ten times a second,
//! since the kernel charges these pools to no group. For uzswap, `run --include-pool` subtracts the
//! pool, with all memory of the daemon.

use crate::bench::{Bench, Candidate, Turns};
use crate::error::{Context, Failure};
use crate::install::{is_there, packages, shell};
use crate::machine::{Changes, DISK_BYTES, DISK_OPERATIONS, THROTTLES};
use crate::peer::{FOLDER, Measured, Peer, Room};
use crate::plot::Plot;
use crate::report::{Section, Table};
use clap::{Args, ValueEnum};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uzswap_sys::cgroup;

#[derive(Debug, Args)]
pub struct BuildArguments {
    /// Compile jobs at the same time [default: 8,12,16,20,24].
    #[arg(long, short, value_delimiter = ',')]
    pub jobs: Vec<usize>,
    /// Memory of the command and the pool together.
    #[arg(long, default_value = "512M", value_parser = size)]
    pub memory: u64,
    /// Most bytes of it for a pool; for zram there is no limit [default: half].
    #[arg(long, value_parser = size)]
    pub pool: Option<u64>,
    /// Disks behind the swap.
    #[arg(long, value_delimiter = ',', default_value = "as-is,slow")]
    pub disks: Vec<Disk>,
    /// The target of make; "vmlinux" is the whole kernel [default: mm/].
    #[arg(long)]
    pub target: Option<String>,
    /// Stop a build that takes longer, s. It is not tried again.
    #[arg(long, default_value = "60")]
    pub stop_after: u64,
    /// Configurations: plain, zswap, zram, uzswap-NAME with a compressor's name, which may end with
    /// "+load-control", and in-process, which may end with "+no-load-control".
    #[arg(long, value_delimiter = ',', default_values_t = PEERS.map(String::from))]
    pub peers: Vec<String>,
}

const PEERS: [&str; 8] = [
    "plain",
    "zswap",
    "zram",
    "uzswap-lz4",
    "uzswap-zstd",
    "uzswap-zstd+load-control",
    "in-process",
    "in-process+no-load-control",
];

/// The disk behind the swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Disk {
    /// The machine's own disk.
    AsIs,
    /// A disk as slow as in the original measurement.
    Slow,
}

impl Disk {
    /// The heading of its table.
    fn text(self) -> String {
        match self {
            Self::AsIs => "The disk as it is:".into(),
            Self::Slow => format!(
                "A slow disk: a loop device held to {} MB and {DISK_OPERATIONS} operations a \
                 second in each direction, with a file system that the swap file or our backing \
                 is on. Plain swap and zswap swap to a loop device over their file, which makes \
                 one operation of neighbouring pages:",
                DISK_BYTES / 1_000_000
            ),
        }
    }
}

/// A build to measure.
struct Build {
    disk: Disk,
    jobs: usize,
    peer: Peer,
}

impl Candidate for Build {
    fn name(&self) -> String {
        self.peer.name()
    }

    fn missing(&self) -> Option<String> {
        match (&self.peer, self.disk) {
            (Peer::Zram { .. }, Disk::Slow) => Some("has no disk; as above".into()),
            (_, Disk::Slow) if !Path::new(THROTTLES).join(THROTTLE).exists() => {
                Some("no block controller of cgroup v1, which makes a disk slow".into())
            }
            (Peer::Uzswap { options, .. }, _)
                if options.iter().any(|option| option == LOAD_CONTROL)
                    && cgroup::unified_root().is_none() =>
            {
                Some("no cgroup version 2 here, which has the freezer".into())
            }
            _ => self.peer.missing(),
        }
    }
}

const LOAD_CONTROL: &str = "--load-control";

const THROTTLE: &str = "blkio.throttle.read_bps_device";

fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new().with_binary().parse_size(text).map_err(|error| error.to_string())
}

/// Debian's package of kernel sources, and the packages for building them.
const PACKAGES: [&str; 6] = ["linux-source-6.1", "make", "gcc", "flex", "bison", "bc"];
const ARCHIVE: &str = "/usr/src/linux-source-6.1.tar.xz";

/// The sources, unpacked and configured. This is done once.
fn sources() -> Result<PathBuf, Failure> {
    let folder = Path::new(FOLDER).join("linux");
    if folder.join(".ready").exists() {
        return Ok(folder);
    }
    if !Path::new(ARCHIVE).exists() || ["flex", "bison", "bc"].iter().any(|name| !is_there(name)) {
        packages(&PACKAGES)?;
    }
    eprintln!("uzswap-bench: unpacking the kernel's sources");
    fs::create_dir_all(&folder).context(FOLDER)?;
    shell(&format!("tar xf {ARCHIVE} --strip-components=1"), &folder)?;
    shell("make -s tinyconfig && touch .ready", &folder)?;
    Ok(folder)
}

fn peer(name: &str) -> Result<Peer, Failure> {
    let lz4 = || "lz4".to_owned();
    Ok(match name {
        "plain" => Peer::Plain,
        "zswap" => Peer::Zswap { compressor: "lzo".into() },
        "zram" => Peer::Zram { compressor: lz4() },
        "in-process+no-load-control" => Peer::InProcess { compressor: None, is_controlled: false },
        "in-process" => Peer::IN_PROCESS,
        other => {
            let Some(compressor) = other.strip_prefix("uzswap-") else {
                let known = PEERS.join(", ");
                return Err(Failure::new(format!("unknown configuration '{other}'; use {known}")));
            };
            let controlled = compressor.strip_suffix("+load-control");
            let compressor = controlled.unwrap_or(compressor);
            let mut name = format!("uzswap, {compressor}");
            let mut options = vec!["--compressor".to_owned(), compressor.to_owned()];
            if controlled.is_some() {
                name += ", load control";
                options.push(LOAD_CONTROL.to_owned());
            }
            Peer::Uzswap { name, options }
        }
    })
}

pub fn run(bench: &Bench, arguments: &BuildArguments) -> Result<Section, Failure> {
    let peers = arguments.peers.iter().map(|name| peer(name));
    let peers = peers.collect::<Result<Vec<_>, _>>()?;
    let jobs = match arguments.jobs.is_empty() {
        true => bench.pick(vec![4], vec![24], vec![8, 12, 16, 20, 24]),
        false => arguments.jobs.clone(),
    };
    // A whole build takes minutes each time. With plain swap on the slow disk it would take days.
    let part = bench.pick("init/", "mm/", "mm/");
    let target = arguments.target.clone().unwrap_or(part.into());
    let pool = arguments.pool.unwrap_or(arguments.memory / 2);
    let time_max = Duration::from_secs(arguments.stop_after);
    let folder = sources()?;
    let mut builds = Vec::new();
    for &disk in &arguments.disks {
        for &jobs in &jobs {
            builds.extend(peers.iter().map(|peer| Build { disk, jobs, peer: peer.clone() }));
        }
    }
    // The largest number of jobs matters most, and gets more rounds.
    let most = jobs.iter().max().copied();
    let rounds = |jobs| bench.rounds(1, if Some(jobs) == most { 5 } else { 1 });
    let rounds_of = |build: &Build| rounds(build.jobs);
    let was_stopped = |run: &Measured| !run.is_whole;
    let turns = bench.take_turns_until(&builds, rounds_of, was_stopped, |build| {
        shell("make -s clean && sync && echo 3 > /proc/sys/vm/drop_caches", &folder)?;
        let make = format!("make -s -j{} {target} >/dev/null", build.jobs);
        let script = format!("cd {} && {make}", folder.display());
        let command = ["sh".to_owned(), "-c".to_owned(), script];
        let room = Room {
            memory: arguments.memory,
            pool: Some(pool),
            slow_disk: build.disk == Disk::Slow,
            time_max: Some(time_max),
        };
        build.peer.run(&mut Changes::begin(), room, &command, &bench.interrupt)
    })?;
    let times = jobs.iter().map(|jobs| match rounds(*jobs) {
        1 => format!("N = {jobs} once"),
        more => format!("N = {jobs} medians of {more} rounds"),
    });
    let times = times.collect::<Vec<_>>().join(", ");
    let mut section =
        Section::new("kernel-build", "A kernel build in little memory").text(format!(
            "Linux 6.1, tinyconfig, make -jN {target}, {} MiB for the build and the pool together; \
             {}. Plain swap has all of it for the build. What zswap's or \
             zram's pool takes is taken from the build's limit ten times a second, since the kernel \
             charges it to nobody; what our daemon takes, by itself (run --include-pool). A pool \
             has {} MiB at most; zram's has no limit. I/O is the sum of pages in, pages out and \
             major faults; changes are against plain swap. A build that takes more than {} s is \
             stopped, and not tried again.",
            arguments.memory >> 20,
            times,
            pool >> 20,
            time_max.as_secs(),
        ));
    for disk in &arguments.disks {
        let of = builds.iter().zip(&turns).filter(|(build, _)| build.disk == *disk);
        let of: Vec<_> = of.collect();
        section = section.text(disk.text()).table(table(&of)).plot(plot(*disk, &of));
    }
    section.raw("turns", &turns)
}

type Of<'a> = (&'a Build, &'a Turns<Measured>);

/// Pages in, pages out and major faults.
fn io(run: &Measured) -> f64 {
    (run.pages_in + run.pages_out + run.major_faults) as f64
}

fn device_mb(run: &Measured) -> f64 {
    (run.device_read + run.device_written) as f64 / 1e6
}

fn table(of: &[Of<'_>]) -> Table {
    let header = [
        "N",
        "swap",
        "pages in",
        "pages out",
        "major faults",
        "I/O",
        "change",
        "disk (MB)",
        "MB saved",
        "time (s)",
        "change",
        "CPU (%)",
        "pool peak (MB)",
        "dead (%)",
    ];
    let rows = of.iter().map(|(build, own)| {
        let plain =
            of.iter().find(|(other, _)| other.jobs == build.jobs && other.peer == Peer::Plain);
        let mut row = vec![build.jobs.to_string()];
        row.extend(own.row(|own| cells(own, plain.map(|(_, plain)| *plain))));
        row
    });
    Table::new(&header, rows.collect())
}

fn cells(own: &Turns<Measured>, plain: Option<&Turns<Measured>>) -> Vec<String> {
    let change = |figure: &dyn Fn(&Measured) -> f64| {
        // A build that was stopped has not done the same work.
        let is_whole = |turns: &Turns<Measured>| turns.rounds.iter().all(|run| run.is_whole);
        let plain = plain.filter(|plain| !plain.rounds.is_empty() && is_whole(plain));
        let Some(plain) = plain.filter(|_| is_whole(own)) else { return "-".into() };
        let ratio = own.paired(plain, |own, plain| figure(own) / figure(plain).max(1e-9));
        format!("{:+.0} %", (ratio - 1.0) * 100.0)
    };
    let saved = plain.map_or(f64::NAN, |plain| {
        own.paired(plain, |own, plain| device_mb(plain) - device_mb(own))
    });
    vec![
        format!("{:.0}", own.median(|run| run.pages_in as f64)),
        format!("{:.0}", own.median(|run| run.pages_out as f64)),
        format!("{:.0}", own.median(|run| run.major_faults as f64)),
        format!("{:.0}", own.median(io)),
        change(&io),
        format!("{:.0}", own.median(device_mb)),
        if saved.is_nan() { "-".into() } else { format!("{saved:.0}") },
        time(own),
        change(&|run| run.seconds),
        format!("{:.0}", own.median(|run| 100.0 * run.cpu_seconds / run.seconds)),
        format!("{:.0}", own.median(|run| run.pool_peak as f64 / 1e6)),
        match own.median(|run| run.dead_share.unwrap_or(f64::NAN) * 100.0) {
            share if share.is_nan() => "-".into(),
            share => format!("{share:.1}"),
        },
    ]
}

/// The median time. If a build was stopped, it took longer than that.
fn time(own: &Turns<Measured>) -> String {
    let more = if own.rounds.iter().all(|run| run.is_whole) { "" } else { "> " };
    format!("{more}{:.1}", own.median(|run| run.seconds))
}

/// Time over the number of jobs.
fn plot(disk: Disk, of: &[Of<'_>]) -> Plot {
    let (name, title) = match disk {
        Disk::AsIs => ("time", "Time of a kernel build, the disk as it is"),
        Disk::Slow => ("time-slow", "Time of a kernel build, slow disk"),
    };
    let mut plot = Plot::new(name, title, "compile jobs", "time (s)");
    let mut names: Vec<String> = Vec::new();
    for (build, _) in of {
        if !names.contains(&build.name()) {
            names.push(build.name());
        }
    }
    for name in names {
        let own = of.iter().filter(|(build, _)| build.name() == name);
        let points = own.map(|(build, own)| [build.jobs as f64, own.median(|run| run.seconds)]);
        plot = plot.series(&name, points.collect());
    }
    plot
}
