//! `sharing`: the compressed memory that one pool for all processes of a command would save.
//!
//! In-process each process has its own pool, which keeps equal pages once. One pool for the tree
//! would also keep equal pages of several processes once. Each command runs alone, with all memory.
//! When its processes have the most memory they are stopped, and all their pages are read and
//! compressed.

use crate::bench::Bench;
use crate::error::{Context, Failure};
use crate::install::require;
use crate::peer::FOLDER;
use crate::report::{Section, Table};
use clap::Args;
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use uzswap_engine::compress::{Codecs, prepare_thread};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::Mapped;
use uzswap_sys::process;
use uzswap_sys::process_pages::ProcessPages;

#[derive(Debug, Args)]
pub struct SharingArguments {
    /// Measure this command instead.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// A command of several processes.
struct Workload {
    name: &'static str,
    /// A shell command that succeeds if its programs are installed, and its Debian packages.
    is_there: &'static str,
    packages: &'static [&'static str],
    /// A shell script in a folder of its own.
    script: &'static str,
}

const WORKLOADS: [Workload; 6] = [
    Workload {
        name: "multiprocessing, 4 forks",
        is_there: "command -v python3",
        packages: &["python3"],
        script: include_str!("sharing/pool.sh"),
    },
    Workload {
        name: "joblib, 4 workers",
        is_there: "/usr/bin/python3 -c 'import joblib, pandas'",
        packages: &["python3-joblib", "python3-pandas"],
        script: include_str!("sharing/joblib.sh"),
    },
    Workload {
        name: "pytest-xdist, 4 workers",
        is_there: "/usr/bin/python3 -c 'import xdist, pandas'",
        packages: &["python3-pytest-xdist", "python3-pandas"],
        script: include_str!("sharing/xdist.sh"),
    },
    Workload {
        name: "gunicorn, 4 preloaded workers",
        is_there: "command -v gunicorn",
        packages: &["gunicorn"],
        script: include_str!("sharing/gunicorn.sh"),
    },
    Workload {
        name: "make -j8, g++",
        is_there: "command -v g++ && command -v make",
        packages: &["g++", "make"],
        script: include_str!("sharing/build.sh"),
    },
    Workload {
        name: "Redis, BGSAVE",
        is_there: "command -v redis-server && command -v python3",
        packages: &["redis-server", "python3"],
        script: include_str!("sharing/redis.sh"),
    },
];

/// The interval at which the memory of all processes is read.
const LOOK: Duration = Duration::from_millis(400);

/// The memory is read again when it has grown by one part in this many.
const GROWTH: u64 = 16;

/// Bytes of compressed pages at one moment.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct PoolSizes {
    processes: usize,
    /// The memory of all processes. Each frame is counted once.
    memory: u64,
    /// Bytes of the pools if each process has its own.
    apart: u64,
    /// Bytes of one pool for all processes.
    together: u64,
    /// The part of the saved bytes for pages that processes share in memory as well, since a fork.
    since_fork: u64,
}

pub fn run(bench: &Bench, arguments: &SharingArguments) -> Result<Section, Failure> {
    let mut measured = Vec::new();
    if !arguments.command.is_empty() {
        measured.push((arguments.command.join(" "), measure(bench, &arguments.command)?));
    }
    let few = bench.pick(1, WORKLOADS.len(), WORKLOADS.len());
    for workload in WORKLOADS[..few].iter().filter(|_| arguments.command.is_empty()) {
        bench.label(workload.name);
        require(workload.is_there, workload.packages)?;
        let script = ["sh", "-c", workload.script].map(str::to_owned);
        measured.push((workload.name.to_owned(), measure(bench, &script)?));
    }
    let header = [
        "command",
        "processes",
        "memory",
        "pools apart",
        "one pool",
        "saved (%)",
        "since a fork (%)",
    ];
    let rows = measured.iter().map(|(name, shared)| row(name, *shared)).collect();
    Section::new("sharing", "One pool for the processes of a command")
        .text(
            "Each command runs alone. When its processes have most memory they are stopped, and \
             their private pages are compressed with lz4: MiB of objects if each process has a \
             pool of its own, which keeps equal pages once, and if one pool serves all. *Since a \
             fork*: the part that processes have in common in memory, too.",
        )
        .table(Table::new(&header, rows))
        .raw("shared", &measured)
}

fn row(name: &str, shared: PoolSizes) -> Vec<String> {
    let PoolSizes { processes, memory, apart, together, since_fork } = shared;
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / (1 << 20) as f64);
    let percent = |part: u64| format!("{:.0}", part as f64 * 100.0 / apart.max(1) as f64);
    let bytes = [memory, apart, together].map(mib);
    let parts = [apart - together, since_fork].map(percent);
    let first = [name.to_owned(), processes.to_string()];
    first.into_iter().chain(bytes).chain(parts).collect()
}

/// Kills the command when this value is dropped.
struct CommandGuard(Child);

impl Drop for CommandGuard {
    fn drop(&mut self) {
        for pid in process::tree(self.0.id() as i32) {
            // An error means that the process has just ended.
            let _ = process::kill(pid, signal_hook::consts::SIGKILL);
        }
        let _ = self.0.wait();
    }
}

/// Runs a command, and reads its memory whenever it has grown.
fn measure(bench: &Bench, command: &[String]) -> Result<PoolSizes, Failure> {
    let folder = Path::new(FOLDER).join("sharing");
    fs::create_dir_all(&folder).context(FOLDER)?;
    let mut child = Command::new(&command[0]);
    child.args(&command[1..]).current_dir(&folder).stdin(Stdio::null());
    child.env("LC_ALL", "C").stdout(Stdio::null()).stderr(Stdio::null());
    let mut running = CommandGuard(child.spawn().context(&command[0])?);
    let pid = running.0.id() as i32;
    let (mut most, mut shared) = (0, PoolSizes::default());
    while running.0.try_wait().context("the command")?.is_none() {
        bench.interrupt.check()?;
        std::thread::sleep(LOOK);
        let processes = process::tree(pid);
        let memory = processes.iter().filter_map(|pid| process::anonymous_bytes(*pid)).sum::<u64>();
        if memory > most + most / GROWTH {
            most = memory;
            shared = read(&processes)?;
        }
    }
    match running.0.wait().context("the command")?.success() {
        true => Ok(shared),
        false => Err(Failure::new(format!("the measured command failed: {}", command.join(" ")))),
    }
}

/// Stops processes, and reads their memory.
fn read(processes: &[i32]) -> Result<PoolSizes, Failure> {
    let send = |signal| processes.iter().for_each(|pid| drop(process::kill(*pid, signal)));
    send(signal_hook::consts::SIGSTOP);
    let mut reader = PageSizer::new()?;
    for pid in processes {
        // An error means that the process has just ended.
        let _ = reader.add(*pid);
    }
    send(signal_hook::consts::SIGCONT);
    Ok(reader.shared)
}

struct PageSizer {
    codecs: Codecs,
    /// Bytes of the object for each content.
    objects: HashMap<u64, u64>,
    frames: HashSet<u64>,
    shared: PoolSizes,
}

impl PageSizer {
    fn new() -> Result<Self, Failure> {
        prepare_thread();
        let codecs = Codecs::new("lz4".parse().context("lz4")?);
        Ok(Self {
            codecs,
            objects: HashMap::new(),
            frames: HashSet::new(),
            shared: PoolSizes::default(),
        })
    }

    fn add(&mut self, pid: i32) -> std::io::Result<()> {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let open = |name| File::open(format!("/proc/{pid}/{name}"));
        let there = ProcessPages { memory: open("mem")?, pagemap: open("pagemap")? };
        let mut own = HashSet::new();
        self.shared.processes += 1;
        for mapped in maps.lines().filter_map(Mapped::parse).filter(Mapped::is_heap) {
            there.read(mapped.range, |state, page| {
                if state.is_present() && !state.is_of_file() {
                    self.add_page(page, state.frame(), &mut own);
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn add_page(&mut self, page: &Page, frame: u64, own: &mut HashSet<u64>) {
        let is_new_frame = self.frames.insert(frame);
        self.shared.memory += if is_new_frame { PAGE_BYTES as u64 } else { 0 };
        // A pool has no bytes for a page of one repeated word.
        if page.windows(16).step_by(8).all(|pair| pair[..8] == pair[8..]) {
            return;
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(page);
        let content = hasher.finish();
        if !own.insert(content) {
            return;
        }
        let codecs = &mut self.codecs;
        let known = self.objects.len();
        let bytes = *self.objects.entry(content).or_insert_with(|| {
            let mut object = [0; PAGE_BYTES];
            codecs.compress(page, &mut object).map_or(PAGE_BYTES, |(_, bytes)| bytes) as u64
        });
        self.shared.apart += bytes;
        match self.objects.len() > known {
            true => self.shared.together += bytes,
            false if !is_new_frame => self.shared.since_fork += bytes,
            false => {}
        }
    }
}
