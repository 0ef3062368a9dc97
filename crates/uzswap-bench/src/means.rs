//! `means`: the price of a touch of an evicted page in-process, by each means of eviction:
//! userfaultfd with and without moves, guard pages, and protection.

use crate::bench::{Bench, Candidate, Turns};
use crate::error::{Context, Failure};
use crate::peer::{Peer, uzswap};
use crate::report::{Section, Table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::Instant;
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::testing::Noise;
use uzswap_region::Means;

/// The options of `means`.
#[derive(Debug, Args)]
pub struct MeansArguments {
    /// Contents of files in memory, MiB.
    #[arg(long, default_value_t = 384)]
    mib: usize,
    /// Memory of the program, MiB.
    #[arg(long, default_value_t = 256)]
    memory: usize,
}

/// The options of the measured program.
#[derive(Debug, Args)]
pub struct TouchArguments {
    #[arg(long)]
    mib: usize,
    /// Touches by all threads.
    #[arg(long)]
    touches: usize,
    #[arg(long)]
    threads: usize,
    /// Percent of the touches that go to a fixed fifth of the pages.
    #[arg(long)]
    percent: u64,
    /// Percent of the touches that write.
    #[arg(long, default_value_t = 25)]
    writes: u64,
    /// Touches before the measured ones [default: a third of their number].
    #[arg(long)]
    warm_up: Option<usize>,
    /// The number of other touches for each page that is touched in sequence; 0 for no sequence.
    #[arg(long, default_value_t = 0)]
    scan_every: usize,
}

/// The result of one run.
#[derive(Debug, Serialize, Deserialize)]
pub struct Touched {
    /// The mean time of a touch of an absent page, in us.
    pub out_us: f64,
    /// The number of touches of absent pages.
    pub outs: usize,
    /// Seconds for all touches.
    pub seconds: f64,
    /// Seconds of the touches of all threads, without those in sequence.
    pub touch_seconds: f64,
    /// Pages of the memory that were resident at the end.
    pub resident: usize,
}

/// Percent of the touches for a fifth, and threads.
const WAYS: [(u64, usize); 4] = [(80, 1), (95, 1), (80, 2), (95, 2)];

/// A touch that takes at least this long, ns, has found its page out.
const OUT_NS_MIN: u128 = 1500;

impl Candidate for Means {
    fn name(&self) -> String {
        Self::name(*self).into()
    }

    fn missing(&self) -> Option<String> {
        let reason = self.check().err().map(|error| error.to_string());
        reason.or_else(|| Peer::IN_PROCESS.missing())
    }
}

pub fn run(bench: &Bench, arguments: &MeansArguments) -> Result<Section, Failure> {
    let rounds = bench.rounds(3, 7);
    let mib = bench.pick(48, arguments.mib, arguments.mib);
    let memory = bench.pick(32, arguments.memory, arguments.memory);
    let touches = bench.pick(2_000, 100_000, 300_000);
    let all = [Means::Moves, Means::Copies, Means::Guards, Means::Protection];
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut section = Section::new("means", "By what pages leave in-process").text(format!(
        "{mib} MiB of the contents of files in {memory} MiB, touched {touches} times at random, 80 or \
         95 % of it in one fifth, a quarter of them to write; us of a touch that found its page out \
         (to userfaultfd's), and of any. Medians of {rounds} rounds."
    ));
    for (percent, threads) in WAYS {
        let turns = bench.take_turns(&all, rounds, |means| {
            measure(
                *means,
                memory,
                &[
                    format!("--mib={mib}"),
                    format!("--touches={touches}"),
                    format!("--threads={threads}"),
                    format!("--percent={percent}"),
                ],
            )
        })?;
        for (at, own) in turns.iter().enumerate() {
            let cells = own.row(|own| cells(own, &turns[0], touches));
            match rows.get_mut(at) {
                Some(row) => row.extend(cells.into_iter().skip(1)),
                None => rows.push(cells),
            }
        }
        section = section.raw(&format!("{percent} % to a fifth, {threads} threads"), &turns)?;
    }
    let ways = WAYS.map(|(percent, threads)| match threads {
        1 => [format!("{percent} %"), "any".to_owned()],
        _ => [format!("{percent} %, {threads} threads"), "any".to_owned()],
    });
    let ways = ways.concat();
    let header: Vec<_> = ["us"].into_iter().chain(ways.iter().map(String::as_str)).collect();
    Ok(section.table(Table::new(&header, rows)))
}

fn cells(own: &Turns<Touched>, first: &Turns<Touched>, touches: usize) -> Vec<String> {
    let ratio = own.paired(first, |own, first| own.out_us / first.out_us);
    let out = own.median(|run| run.out_us);
    let any = own.median(|run| run.seconds * 1e6 / touches as f64);
    vec![format!("{out:.1} ({ratio:.2})"), format!("{any:.1}")]
}

fn measure(means: Means, memory: usize, options: &[String]) -> Result<Touched, Failure> {
    let own = std::env::current_exe().context("the path of this program")?;
    let memory = format!("--memory={memory}M");
    let mut command = Command::new(uzswap()?);
    command.args(["run", "--quiet", "--in-process", &memory, "--"]).arg(own);
    command.arg("touch-files").args(options).env("UZSWAP_MEANS", means.name());
    let output = command.output().context("uzswap run")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => serde_json::from_slice(&output.stdout).context("the program's output"),
        false => Err(Failure::new(format!("{}: {}", means.name(), stderr.trim()))),
    }
}

/// The measured program: reads files to memory and touches it. Prints a [`Touched`] as JSON.
pub fn touch(arguments: &TouchArguments) -> Result<(), Failure> {
    let memory = contents(arguments.mib << 20)?;
    let touches = arguments.touches / arguments.threads;
    let run = |thread: usize, touches: usize| touch_some(arguments, &memory, thread, touches);
    // Brings the working set into memory.
    run(99, arguments.warm_up.unwrap_or(arguments.touches / 3));
    let began = Instant::now();
    let (outs, out_ns, all_ns) = std::thread::scope(|scope| {
        let run = &run;
        if arguments.threads == 1 {
            return run(0, touches);
        }
        let threads: Vec<_> = (0..arguments.threads)
            .map(|thread| scope.spawn(move || run(thread, touches)))
            .collect();
        let all = threads.into_iter().map(|thread| thread.join().expect("it only touches"));
        all.fold((0, 0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2))
    });
    let seconds = began.elapsed().as_secs_f64();
    let touched = Touched {
        out_us: out_ns as f64 / 1e3 / outs.max(1) as f64,
        outs,
        seconds,
        touch_seconds: all_ns as f64 / 1e9,
        resident: resident(&memory)?,
    };
    println!("{}", serde_json::to_string(&touched).context("the figures")?);
    Ok(())
}

/// The touches of a thread: the number whose page was absent, their ns, and the ns of all touches.
fn touch_some(
    arguments: &TouchArguments,
    memory: &[AtomicU8],
    thread: usize,
    touches: usize,
) -> (usize, u128, u128) {
    let mut noise = Noise::new(thread as u64 + 1);
    let pages = (memory.len() / PAGE_BYTES) as u64;
    let byte = |page: u64| &memory[page as usize * PAGE_BYTES + 64];
    let (mut outs, mut out_ns, mut all_ns) = (0, 0, 0);
    for turn in 0..touches {
        // The fifth is scattered over the memory.
        let page = match noise.below(100) < arguments.percent {
            true => noise.below(pages / 5) * 5,
            false => noise.below(pages),
        };
        let is_write = noise.below(100) < arguments.writes;
        let began = Instant::now();
        match is_write {
            true => byte(page).store(turn as u8, Relaxed),
            false => _ = black_box(byte(page).load(Relaxed)),
        }
        let ns = began.elapsed().as_nanos();
        all_ns += ns;
        if ns >= OUT_NS_MIN {
            (outs, out_ns) = (outs + 1, out_ns + ns);
        }
        if arguments.scan_every > 0 && turn.is_multiple_of(arguments.scan_every) {
            let page = (turn / arguments.scan_every) as u64 % pages;
            black_box(byte(page).load(Relaxed));
        }
    }
    (outs, out_ns, all_ns)
}

/// Number of resident pages of this memory, from its mappings.
fn resident(memory: &[AtomicU8]) -> Result<usize, Failure> {
    const SMAPS: &str = "/proc/self/smaps";
    let own = memory.as_ptr() as usize..memory.as_ptr_range().end as usize;
    let text = fs::read_to_string(SMAPS).context(SMAPS)?;
    let (mut resident_kib, mut is_own) = (0, false);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        if let Some((start, end)) = first.split_once('-') {
            let [start, end] = [start, end].map(|at| usize::from_str_radix(at, 16).unwrap_or(0));
            is_own = start < own.end && own.start < end;
        } else if is_own && first == "Rss:" {
            resident_kib += second.parse::<usize>().unwrap_or(0);
        }
    }
    Ok((resident_kib << 10) / PAGE_BYTES)
}

/// This many bytes of the system's files, repeated if the files have fewer.
fn contents(bytes: usize) -> Result<Vec<AtomicU8>, Failure> {
    let mut files = Vec::new();
    for folder in ["/usr/bin", "/usr/lib", "/usr/share"] {
        list(Path::new(folder), &mut files);
    }
    files.sort_unstable();
    let mut memory: Vec<AtomicU8> = Vec::with_capacity(bytes);
    let mut part = vec![0; 1 << 16];
    while memory.len() < bytes {
        let before = memory.len();
        for file in &files {
            let Ok(mut file) = File::open(file) else { continue };
            while let Ok(read @ 1..) = file.read(&mut part) {
                let left = bytes - memory.len();
                memory.extend(part[..read.min(left)].iter().map(|byte| AtomicU8::new(*byte)));
            }
        }
        if memory.len() == before {
            return Err(Failure::new("there are no files in /usr to read"));
        }
    }
    Ok(memory)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => list(&entry.path(), files),
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
}
