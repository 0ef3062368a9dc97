//! `recovery`: how long programs wait for a page after the daemon is killed.

use crate::bench::Bench;
use crate::error::{Context, Failure};
use crate::faults;
use crate::figures::quantile;
use crate::peer::Peer;
use crate::plot::Plot;
use crate::report::{Section, Table};
use crate::timed_memory::{Memory, MemoryArguments};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::testing::Noise;
use uzswap_sys::process;

const STATE: &str = "/run/uzswap/state.json";
const POOL: &str = "/run/uzswap/mnt/stats/pool_total_size";

/// The program gives up if the next daemon takes longer.
const NEXT_MAX: Duration = Duration::from_secs(60);

/// Time between two kills, enough for the next daemon to start all its threads.
const CALM: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub struct RecoveryArguments {
    /// Kills in a round [default: 20].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub kills: Option<u32>,
    /// Memory that is swapped out when the daemon is killed, MiB [default: 256,1024,4096].
    #[arg(long, value_delimiter = ',')]
    pub held_mib: Option<Vec<usize>>,
}

/// Arguments of the program that kills the daemon.
#[derive(Debug, Args)]
pub struct PausesArguments {
    #[command(flatten)]
    memory: MemoryArguments,
    /// The number of kills.
    #[arg(long)]
    kills: u32,
}

/// Its measurements.
#[derive(Debug, Serialize, Deserialize)]
struct Pauses {
    /// The times from each kill to the next page that came in, in ns.
    ns: Vec<u64>,
    /// Bytes of the pool before the first kill.
    pool: u64,
}

pub fn run(bench: &Bench, arguments: &RecoveryArguments) -> Result<Section, Failure> {
    let kills = arguments.kills.unwrap_or(bench.pick(3, 10, 20));
    let sizes = arguments.held_mib.clone();
    let sizes =
        sizes.unwrap_or_else(|| bench.pick(vec![32], vec![256, 1024], vec![256, 1024, 4096]));
    let peers: Vec<_> = sizes
        .iter()
        .map(|mib| Peer::Uzswap {
            name: format!("{mib} MiB"),
            options: [format!("--pool={mib}M"), "--backing=none".into()].into(),
        })
        .collect();
    let rounds = bench.rounds(1, 3);
    let turns = bench.take_turns(&peers, rounds, |peer| {
        let at = peers.iter().position(|other| std::ptr::eq(other, peer)).unwrap_or_default();
        measure(bench, peer, sizes[at], kills)
    })?;
    let header = ["swapped out", "pool (MiB)", "p50 (ms)", "p90", "longest", "kills"];
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let ns: Vec<_> = own.rounds.iter().flat_map(|run| run.ns.iter().copied()).collect();
            let ms = |share| format!("{:.0}", quantile(&ns, share) as f64 / 1e6);
            let pool = own.median(|run| run.pool as f64) / f64::from(1 << 20);
            vec![format!("{pool:.0}"), ms(0.5), ms(0.9), ms(1.0), ns.len().to_string()]
        })
    });
    let table = Table::new(&header, rows.collect());
    let title = "Wait for a page after the daemon was killed";
    let mut plot = Plot::new("cdf", title, "time (ms)", "kills (%)").log_x();
    for own in &turns {
        let ms = own.rounds.iter().flat_map(|run| &run.ns).map(|ns| *ns as f64 / 1e6);
        plot = plot.distribution(&own.name, ms.collect());
    }
    Section::new("recovery", "The daemon is killed")
        .text(format!(
            "SIGKILL to the daemon, then a page is touched that it had: the time until the next \
             daemon has answered. A Python heap, nothing on a backing, {rounds} rounds of {kills}."
        ))
        .table(table)
        .plot(plot)
        .raw("turns", &turns)
}

fn measure(bench: &Bench, peer: &Peer, mib: usize, kills: u32) -> Result<Pauses, Failure> {
    // The memory has room for everything, so only pages that were pushed out on purpose are out.
    let memory = (2 * mib as u64 + 256) << 20;
    let options = [format!("--mib={mib}"), format!("--kills={kills}")];
    faults::run_swapped(bench, peer, memory, "pauses", &options)
}

/// Kills the daemon, and prints the times as JSON.
pub fn pauses(arguments: &PausesArguments) -> Result<(), Failure> {
    let mut memory = Memory::new(&arguments.memory)?;
    memory.push_out()?;
    let (pages, mut noise) = (memory.pages(), Noise::new(17));
    let pool = fs::read_to_string(POOL).context(POOL)?;
    let mut pauses = Pauses { ns: Vec::new(), pool: pool.trim().parse().context(POOL)? };
    for _ in 0..arguments.kills {
        let daemon = daemon()?;
        process::kill(daemon, signal_hook::consts::SIGKILL).context("SIGKILL")?;
        let began = Instant::now();
        let page = &pages[noise.below(pages.len() as u64) as usize];
        black_box(page[black_box(PAGE_BYTES / 2)]);
        pauses.ns.push(began.elapsed().as_nanos() as u64);
        while self::daemon().map_or(true, |next| next == daemon) {
            if began.elapsed() > NEXT_MAX {
                return Err(Failure::new("no other daemon was started"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(CALM);
    }
    println!("{}", serde_json::to_string(&pauses).context("the times")?);
    Ok(())
}

/// The process number of the daemon.
fn daemon() -> Result<i32, Failure> {
    let text = fs::read_to_string(STATE).context(STATE)?;
    let state: serde_json::Value = serde_json::from_str(&text).context(STATE)?;
    match (&state["outlives_daemon"], state["daemon"]["pid"].as_i64()) {
        (serde_json::Value::Bool(true), Some(pid)) => Ok(pid as i32),
        (_, Some(_)) => Err(Failure::new(
            "nothing outlives the daemon here; that needs Linux 6.4 (uzswap doctor)",
        )),
        _ => Err(Failure::new("no daemon serves; start this under 'uzswap run'")),
    }
}
