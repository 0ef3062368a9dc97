//! The program whose faults are timed. It fills more memory than it has, then reads pages at
//! random.

use crate::bench::Bench;
use crate::corpus::Program;
use crate::error::{Context, Failure};
use crate::figures::quantile;
use crate::machine::Changes;
use crate::peer::{Peer, Room};
use crate::timed_memory::{Memory, MemoryArguments};
use clap::Args;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::time::Instant;
use uzswap_engine::Page;
use uzswap_engine::testing::Noise;

/// A read that takes less time, ns, has found its page in memory. No device answers as fast, and
/// nothing else in a loop of reads takes as long.
const FAULT_NS_MIN: u64 = 1_500;

/// Arguments of the program.
#[derive(Debug, Args)]
pub struct FaultArguments {
    #[command(flatten)]
    memory: MemoryArguments,
    /// Touches by each thread.
    #[arg(long)]
    touches: usize,
    /// Threads that touch pages at the same time.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Microseconds of other work between two touches.
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
}

/// Times of faults, ns: those of each thread together, in their order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// The times.
    pub ns: Vec<u64>,
}

impl Faults {
    /// The mean time, ns.
    pub fn mean(&self) -> f64 {
        self.ns.iter().sum::<u64>() as f64 / self.ns.len() as f64
    }

    /// The time that `share` of the faults did not exceed, ns.
    pub fn quantile(&self, share: f64) -> u64 {
        quantile(&self.ns, share)
    }
}

/// Lets a peer swap the program whose faults are timed; see [`run_swapped`].
pub fn measure(
    bench: &Bench,
    peer: &Peer,
    memory: u64,
    options: &[String],
) -> Result<Faults, Failure> {
    run_swapped(bench, peer, memory, "faults", options)
}

/// Lets a peer swap a command of this program, which has `memory` bytes and pages of a Python heap.
/// Returns its output. Read-ahead is off, so that a fault brings in only its own page.
pub fn run_swapped<T: DeserializeOwned>(
    bench: &Bench,
    peer: &Peer,
    memory: u64,
    program: &str,
    options: &[String],
) -> Result<T, Failure> {
    let own = std::env::current_exe().context("the path of this program")?;
    let pages = Program::Python.file()?;
    let mut command =
        vec![own.display().to_string(), program.into(), format!("--pages={}", pages.display())];
    command.extend_from_slice(options);
    let mut changes = Changes::begin();
    changes.set("/proc/sys/vm/page-cluster", "0")?;
    let room = Room::beside_the_pool(memory);
    let measured = peer.run(&mut changes, room, &command, &bench.interrupt)?;
    serde_json::from_str(&measured.stdout).context("the program's output")
}

/// Measures the faults, and prints the times as JSON.
pub fn run(arguments: &FaultArguments) -> Result<(), Failure> {
    let memory = Memory::new(&arguments.memory)?;
    let pages = memory.pages();
    let ns = std::thread::scope(|scope| {
        let threads = 0..arguments.threads as u64;
        let threads: Vec<_> = threads
            .map(|number| scope.spawn(move || touch(arguments, pages, 13 + number)))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    println!("{}", serde_json::to_string(&Faults { ns }).context("the times")?);
    Ok(())
}

/// The body of a thread. Returns the times of its faults, ns.
fn touch(arguments: &FaultArguments, pages: &[Page], seed: u64) -> Vec<u64> {
    let (mut noise, mut faults) = (Noise::new(seed), Vec::new());
    for _ in 0..arguments.touches {
        let page = &pages[noise.below(pages.len() as u64) as usize];
        let began = Instant::now();
        black_box(page[black_box(64)]);
        let ns = began.elapsed().as_nanos() as u64;
        if ns >= FAULT_NS_MIN {
            faults.push(ns);
        }
        let pause = Instant::now();
        while (pause.elapsed().as_micros() as u64) < arguments.pause_us {
            std::hint::spin_loop();
        }
    }
    faults
}
