//! The program for zswap. It fills its memory with pages, has them swapped out, and reports the
//! pool's memory. Then it frees half of the pages and reports again.

use crate::error::{Context, Failure};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;
use uzswap_engine::PAGE_BYTES;
use uzswap_engine::testing::Noise;
use uzswap_sys::map::Mapping;

/// Arguments of the program.
#[derive(Debug, Args)]
pub struct HoldArguments {
    /// The file of the pages.
    #[arg(long)]
    pub pages: PathBuf,
    /// Their number.
    #[arg(long)]
    pub count: usize,
}

/// Numbers of pages, and the bytes of memory that they took.
#[derive(Debug, Serialize, Deserialize)]
pub struct Occupancy {
    pub full_pages: usize,
    pub full_bytes: u64,
    /// The pages that remained after half were freed.
    pub half_pages: usize,
    pub half_bytes: u64,
    /// The times of random loads, ns; none for the kernel's.
    #[serde(default)]
    pub loads_ns: Vec<u64>,
}

impl Occupancy {
    /// Bytes a page.
    pub fn full(&self) -> f64 {
        self.full_bytes as f64 / self.full_pages as f64
    }

    /// Bytes for each remaining page.
    pub fn half(&self) -> f64 {
        self.half_bytes as f64 / self.half_pages as f64
    }
}

/// Pages in zswap, and the bytes of its pool.
fn zswap() -> Result<(usize, u64), Failure> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        kib.map(|kib| kib * 1024).ok_or_else(|| {
            Failure::new(format!("/proc/meminfo has no {name}; it needs Linux 5.19"))
        })
    };
    Ok((bytes("Zswapped")? as usize / PAGE_BYTES, bytes("Zswap")?))
}

/// Measures the memory, and prints an [`Occupancy`] as JSON.
pub fn run(arguments: &HoldArguments) -> Result<(), Failure> {
    let what = arguments.pages.display().to_string();
    let pages = fs::read(&arguments.pages).context(&what)?;
    let bytes = (arguments.count * PAGE_BYTES).min(pages.len());
    let mut memory = Mapping::reserved(bytes).context("memory")?;
    memory.as_mut_slice()[..bytes].copy_from_slice(&pages[..bytes]);
    drop(pages);
    memory.page_out(0, bytes).context("MADV_PAGEOUT")?;
    let (full_pages, full_bytes) = zswap()?;
    for page in freed(bytes / PAGE_BYTES) {
        memory.discard(page * PAGE_BYTES, PAGE_BYTES).context("MADV_DONTNEED")?;
    }
    // Shrinks slabs, which also compacts zsmalloc.
    fs::write("/proc/sys/vm/drop_caches", "2").context("/proc/sys/vm/drop_caches")?;
    let (half_pages, half_bytes) = zswap()?;
    let held = Occupancy { full_pages, full_bytes, half_pages, half_bytes, loads_ns: Vec::new() };
    println!("{}", serde_json::to_string(&held).context("the result")?);
    Ok(())
}

/// The random half of the pages that is freed after the first measurement.
pub fn freed(count: usize) -> impl Iterator<Item = usize> {
    let mut noise = Noise::new(3);
    (0..count).filter(move |_| noise.below(2) == 0)
}
