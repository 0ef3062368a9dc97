//! The program whose faults are timed: it fills more memory than it has, then touches pages at
//! random.

use crate::error::{Context, Failure};
use crate::figures::quantile;
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::testing::Noise;

/// Touches that take less found their page in memory, ns: no device answers as fast, and nothing
/// else in a loop that only reads takes as long.
const FAULT_NS_MIN: u64 = 1_500;

/// What to do.
#[derive(Debug, Args)]
pub struct FaultArguments {
    /// Pages to fill the memory with, one after another.
    #[arg(long)]
    pub pages: PathBuf,
    /// Memory to fill, MiB.
    #[arg(long)]
    pub mib: usize,
    /// Touches.
    #[arg(long)]
    pub touches: usize,
    /// Microseconds of other work between two.
    #[arg(long, default_value_t = 0)]
    pub pause_us: u64,
}

/// Times of faults, ns, in the order in which they happened.
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
    let what = arguments.pages.display().to_string();
    let pages = fs::read(&arguments.pages).context(&what)?;
    let (pages, _) = pages.as_chunks::<PAGE_BYTES>();
    if pages.is_empty() {
        return Err(Failure::new(format!("{what}: not even one page")));
    }
    let count = (arguments.mib << 20) / PAGE_BYTES;
    let mut memory = vec![[0u8; PAGE_BYTES]; count];
    let mut noise = Noise::new(7);
    for (number, page) in memory.iter_mut().enumerate() {
        *page = pages[number % pages.len()];
        if number >= pages.len() {
            // Not twice the same page: that would be kept once.
            let at = noise.below(PAGE_BYTES as u64 / 8) as usize * 8;
            page[at..at + 8].copy_from_slice(&noise.word().to_le_bytes());
        }
    }
    let mut faults = Faults::default();
    for _ in 0..arguments.touches {
        let page = &memory[noise.below(count as u64) as usize];
        let began = Instant::now();
        black_box(page[black_box(64)]);
        let ns = began.elapsed().as_nanos() as u64;
        if ns >= FAULT_NS_MIN {
            faults.ns.push(ns);
        }
        let pause = Instant::now();
        while (pause.elapsed().as_micros() as u64) < arguments.pause_us {
            std::hint::spin_loop();
        }
    }
    println!("{}", serde_json::to_string(&faults).context("the times")?);
    Ok(())
}
