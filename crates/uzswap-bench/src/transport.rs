//! `transport`: a fault without a cache behind the device, and the cost of our cache.

use crate::bench::Bench;
use crate::error::Failure;
use crate::faults;
use crate::peer::Peer;
use crate::plot::Plot;
use crate::report::{Section, Table};
use clap::Args;

#[derive(Debug, Args)]
pub struct TransportArguments {
    /// Random touches in a round [default: 40000].
    #[arg(long)]
    pub touches: Option<usize>,
    /// Memory of the program, MiB; it uses three times as much.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(4..))]
    pub limit_mib: u16,
    /// Microseconds that the program computes between two touches.
    #[arg(long, default_value_t = 0)]
    pub pause_us: u64,
    /// Compressors to measure.
    #[arg(long, value_delimiter = ',', default_value = "lz4,lzo,zstd")]
    pub compressors: Vec<String>,
}

/// The program uses this multiple of its memory.
const MEMORY_RATIO: usize = 3;

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

pub fn run(bench: &Bench, arguments: &TransportArguments) -> Result<Section, Failure> {
    let limit_mib = usize::from(arguments.limit_mib);
    let memory_mib = MEMORY_RATIO * limit_mib;
    let touches = arguments.touches.unwrap_or(bench.pick(2_000, 20_000, 40_000));
    let options = [
        format!("--mib={memory_mib}"),
        format!("--touches={touches}"),
        format!("--pause-us={}", arguments.pause_us),
    ];
    let memory = (limit_mib as u64) << 20;
    let rounds = bench.rounds(2, 5);
    let turns = bench.take_turns(&peers(&arguments.compressors), rounds, |peer| {
        faults::measure(bench, peer, memory, &options)
    })?;
    let header = ["behind the device", "p50 (us)", "p90", "p99", "p99.9", "added at p50", "faults"];
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let us = |share| own.median(|run| run.quantile(share) as f64) / 1e3;
            let mut row: Vec<_> = [0.5, 0.9, 0.99, 0.999].map(|s| format!("{:.1}", us(s))).into();
            let added = own.paired(&turns[0], |own, plain| {
                own.quantile(0.5) as f64 - plain.quantile(0.5) as f64
            });
            row.push(format!("{:+.1}", added / 1e3));
            row.push(own.rounds.iter().map(|run| run.ns.len()).sum::<usize>().to_string());
            row
        })
    });
    let table = Table::new(&header, rows.collect());
    let title = "Faults through the swap device";
    let mut plot = Plot::new("cdf", title, "time (us)", "faults (%)").log_x();
    for own in &turns {
        let us = own.rounds.iter().flat_map(|run| &run.ns).map(|ns| *ns as f64 / 1e3);
        plot = plot.distribution(&own.name, us.collect());
    }
    Section::new("transport", "A fault through the transport")
        .text(format!(
            "Random swap-in of a Python heap, {memory_mib} MiB in {limit_mib}, one thread, \
             page-cluster 0; medians of {rounds} rounds."
        ))
        .table(table)
        .plot(plot)
        .raw("turns", &turns)
}
