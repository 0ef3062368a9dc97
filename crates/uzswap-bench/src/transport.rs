//! `transport`: what a fault costs without a cache behind the device, and what ours adds.

use crate::corpus;
use crate::error::{Context, Failure};
use crate::faults::Faults;
use crate::figures::{median, prepare, publish, table};
use crate::machine::Changes;
use crate::peer::{Interrupt, Peer};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// What to measure.
#[derive(Debug, Args)]
pub struct TransportArguments {
    /// Rounds; each measures every configuration once.
    #[arg(long, default_value_t = 5)]
    pub rounds: usize,
    /// Random touches in a round.
    #[arg(long, default_value_t = 40_000)]
    pub touches: usize,
    /// Memory that the program has, MiB; it takes three times as much.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(4..))]
    pub limit_mib: u16,
    /// Microseconds that the program computes between two touches.
    #[arg(long, default_value_t = 0)]
    pub pause_us: u64,
    /// Compressors to measure.
    #[arg(long, value_delimiter = ',', default_value = "lz4,lzo,zstd")]
    pub compressors: Vec<String>,
    /// Folder for the report and the raw values.
    #[arg(long)]
    pub report: Option<PathBuf>,
}

/// The program takes so many times the memory that it has.
const MEMORY_RATIO: usize = 3;

/// A bar with the time that is left.
pub fn progress(steps: usize) -> ProgressBar {
    let bar = ProgressBar::new(steps as u64);
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

fn peers(compressors: &[String]) -> Vec<Peer> {
    let ours = |name: &str, options: &[&str]| Peer::Uzswap {
        name: name.into(),
        options: options.iter().map(|option| (*option).to_owned()).collect(),
    };
    let mut peers = vec![ours("plain memory", &["--bare", "--backing", "none", "--size", "1G"])];
    for name in compressors {
        let options = ["--pool", "512M", "--backing", "none", "--compressor", name];
        peers.push(ours(name, &options));
    }
    peers
}

/// Measures and prints.
pub fn run(arguments: &TransportArguments) -> Result<(), Failure> {
    prepare(arguments.report.as_deref())?;
    let interrupt = Interrupt::catch()?;
    let pages = corpus::python()?;
    let own = std::env::current_exe().context("the path of this program")?;
    let limit_mib = usize::from(arguments.limit_mib);
    let memory_mib = MEMORY_RATIO * limit_mib;
    let command = [
        own.display().to_string(),
        "faults".into(),
        format!("--pages={}", pages.display()),
        format!("--mib={memory_mib}"),
        format!("--touches={}", arguments.touches),
        format!("--pause-us={}", arguments.pause_us),
    ];
    let peers = peers(&arguments.compressors);
    let mut runs: Vec<Vec<Faults>> = peers.iter().map(|_| Vec::new()).collect();
    let bar = progress(arguments.rounds * peers.len());
    for _ in 0..arguments.rounds {
        for (peer, runs) in peers.iter().zip(&mut runs) {
            bar.set_message(peer.name());
            // A fault brings in its own page alone.
            let mut changes = Changes::begin()?;
            changes.set("/proc/sys/vm/page-cluster", "0")?;
            let measured = peer.run((limit_mib as u64) << 20, &command, &interrupt)?;
            runs.push(serde_json::from_str(&measured.stdout).context("the program's output")?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let us =
        |runs: &[Faults], share: f64| median(runs.iter().map(|r| r.quantile(share) as f64)) / 1e3;
    let header = ["behind the device", "p50 (us)", "p90", "p99", "p99.9", "added at p50", "faults"];
    let rows: Vec<Vec<String>> = peers
        .iter()
        .zip(&runs)
        .map(|(peer, own)| {
            // Pairs of one round: what else the machine did then is in both.
            let added = own.iter().zip(&runs[0]);
            let added = added.map(|(a, b)| a.quantile(0.5) as f64 - b.quantile(0.5) as f64);
            let mut row = vec![peer.name()];
            row.extend([0.5, 0.9, 0.99, 0.999].map(|share| format!("{:.1}", us(own, share))));
            row.push(format!("{:+.1}", median(added) / 1e3));
            row.push(own.iter().map(|run| run.ns.len()).sum::<usize>().to_string());
            row
        })
        .collect();
    let text = format!(
        "Random swap-in of a Python heap, {memory_mib} MiB in {limit_mib}, one thread, \
         page-cluster 0; medians of {} rounds.\n\n{}\n",
        arguments.rounds,
        table(&header, &rows)
    );
    let raw: Vec<_> = peers.iter().map(Peer::name).zip(&runs).collect();
    publish(arguments.report.as_deref(), "transport", &text, &raw)
}
