//! `skew`: a working set beside colder pages, at equal memory in total.
//!
//! The result depends on which pages leave. Compressed pages count on both sides: the cgroup has
//! the memory less zram's pool, and in-process the pool is a part of the memory.

use crate::bench::{Bench, Candidate, Turns};
use crate::error::{Context, Failure};
use crate::machine::Changes;
use crate::means::Touched;
use crate::peer::{Peer, Room};
use crate::report::{Section, Table};
use clap::Args;
use serde::Serialize;
use uzswap_engine::PAGE_BYTES;

#[derive(Debug, Args)]
pub struct SkewArguments {
    /// Contents of files, MiB; the memory is two thirds of that [default: 1536].
    #[arg(long)]
    pub mib: Option<u64>,
    /// Percents of the touches that go to a fixed fifth of the pages.
    #[arg(long, value_delimiter = ',', default_value = "95,80")]
    pub percents: Vec<u64>,
    /// Compressors of ours.
    #[arg(long, value_delimiter = ',', default_value = "lz4,zstd")]
    pub compressors: Vec<String>,
    /// Peers whose names begin with these texts [default: all].
    #[arg(long, value_delimiter = ';')]
    pub only: Vec<String>,
}

/// Percent of the touches that write.
const WRITES: usize = 30;
/// With a scan, one page in sequence for this many other touches.
const SCAN_EVERY: usize = 4;

#[derive(Debug, Serialize)]
struct RunMeasurements {
    touched: Touched,
    pool_peak: u64,
}

pub fn run(bench: &Bench, arguments: &SkewArguments) -> Result<Section, Failure> {
    let mib = arguments.mib.unwrap_or(bench.pick(96, 384, 1536));
    let rounds = bench.rounds(1, 3);
    let pages = (mib << 20) as usize / PAGE_BYTES;
    let (warm_up, touches) = bench.pick((pages, pages), (2 * pages, pages), (4 * pages, 2 * pages));
    // The first files are programs, which compress worse than all files together. With less memory,
    // a group without zram's pool has no room for the program itself.
    let part = bench.pick([6, 5], [3, 4], [2, 3]);
    let memory = (mib << 20) * part[0] / part[1];
    let in_process =
        |name: &String| Peer::InProcess { compressor: Some(name.clone()), is_controlled: true };
    let mut peers = vec![Peer::Zram { compressor: "lz4".into() }];
    peers.extend(arguments.compressors.iter().map(in_process));
    let is_asked = |peer: &Peer| arguments.only.iter().any(|name| peer.name().starts_with(name));
    peers.retain(|peer| arguments.only.is_empty() || is_asked(peer));
    let own = std::env::current_exe().context("the path of this program")?;
    let mut section = Section::new("skew", "A working set beside colder pages").text(format!(
        "{mib} MiB of the contents of files in {} MiB, zram's pool included. One thread touches \
         pages at random, {WRITES} % of them to write; so many of 100 touches go to one fifth of the \
         pages. After {warm_up} touches {touches} are measured. With a scan, a page in order is read \
         for each {SCAN_EVERY} touches, and not counted. A touch that takes 1.5 us is a fault. \
         Medians of {rounds} rounds, 'against' of those in pairs.",
        memory >> 20
    ));
    let ways =
        arguments.percents.iter().flat_map(|percent| [(*percent, 0), (*percent, SCAN_EVERY)]);
    for (percent, scan_every) in ways {
        let command = [
            own.display().to_string(),
            "touch-files".into(),
            format!("--mib={mib}"),
            format!("--touches={touches}"),
            format!("--warm-up={warm_up}"),
            "--threads=1".into(),
            format!("--percent={percent}"),
            format!("--writes={WRITES}"),
            format!("--scan-every={scan_every}"),
        ];
        let turns = bench.take_turns(&peers, rounds, |peer| {
            let mut changes = Changes::begin();
            changes.set("/proc/sys/vm/page-cluster", "0")?;
            let room = Room { memory, pool: Some(memory), slow_disk: false, time_max: None };
            let measured = peer.run(&mut changes, room, &command, &bench.interrupt)?;
            let touched = serde_json::from_str(&measured.stdout).context("the program's output")?;
            Ok(RunMeasurements { touched, pool_peak: measured.pool_peak })
        })?;
        let name = match scan_every {
            0 => format!("{percent} % to a fifth"),
            _ => format!("{percent} % to a fifth, and a scan"),
        };
        section =
            section.text(format!("{name}:")).table(table(&turns, touches)).raw(&name, &turns)?;
    }
    Ok(section)
}

fn table(turns: &[Turns<RunMeasurements>], touches: usize) -> Table {
    let mean = |run: &RunMeasurements| run.touched.touch_seconds * 1e6 / touches as f64;
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let share = own.median(|run| run.touched.outs as f64 * 100.0 / touches as f64);
            let resident = own.median(|run| (run.touched.resident >> 8) as f64);
            vec![
                format!("{resident:.0}"),
                format!("{:.0}", own.median(|run| (run.pool_peak >> 20) as f64)),
                format!("{share:.1}"),
                format!("{:.1}", own.median(|run| run.touched.out_us)),
                format!("{:.2}", own.median(mean)),
                format!("{:.2}", own.paired(&turns[0], |own, first| mean(own) / mean(first))),
            ]
        })
    });
    let first = ["held by", "resident (MiB)", "pool at most (MiB)", "touches that fault (%)"];
    let header: Vec<_> =
        first.into_iter().chain(["a fault (us)", "a touch (us)", "against"]).collect();
    Table::new(&header, rows.collect())
}
