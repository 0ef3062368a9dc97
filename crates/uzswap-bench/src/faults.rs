//! The program whose faults are timed: it fills more memory than it has, then touches pages at
//! random.

use crate::error::{Context, Failure};
use crate::figures::quantile;
use crate::memory::{Memory, MemoryArguments};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::time::Instant;
use uzswap_engine::Page;
use uzswap_engine::testing::Noise;

/// Touches that take less found their page in memory, ns: no device answers as fast, and nothing
/// else in a loop that only reads takes as long.
const FAULT_NS_MIN: u64 = 1_500;

/// What to do.
#[derive(Debug, Args)]
pub struct FaultArguments {
    #[command(flatten)]
    memory: MemoryArguments,
    /// Touches of each thread.
    #[arg(long)]
    touches: usize,
    /// Threads that touch pages at once.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Microseconds of other work between two.
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
}

/// Times of faults, ns, thread by thread in the order in which they happened.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Faults {
    /// The times.
    pub ns: Vec<u64>,
}

impl Faults {
    /// The time that `share` of the faults did not exceed, ns.
    pub fn quantile(&self, share: f64) -> u64 {
        quantile(&self.ns, share)
    }
}

/// Does it, and prints the times as JSON.
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

/// What one thread does: the times of its faults, ns.
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
