//! The program whose page-outs and faults are timed.
//!
//! It fills memory with pages, has all pushed out, and touches each page once, while no page must
//! leave: in random order, in sequence, and from two threads. Before each of these it writes to
//! every page and pushes all out again, so that each finds the same state.

use crate::error::{Context, Failure};
use crate::timed_memory::{Memory, MemoryArguments};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::fs;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;
use uzswap_engine::{PAGE_BYTES, Page};

/// A touch that takes less time, ns, has found its page in memory: no fault is as fast.
pub const FAULT_NS_MIN: u64 = 500;

const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Interval of checks of recompression, the equal counts after which it is complete, and the checks
/// after which the program gives up.
const LOOK: Duration = Duration::from_millis(500);
const LOOKS_ALIKE: u32 = 4;
const LOOKS_MAX: u32 = 120;

/// Arguments of the program.
#[derive(Debug, Args)]
pub struct TouchArguments {
    #[command(flatten)]
    memory: MemoryArguments,
    /// Only page-outs: this many of all pages.
    #[arg(long)]
    outs: Option<usize>,
    /// Only touches in random order, of pages that the swap device has recompressed.
    #[arg(long, conflicts_with = "outs")]
    recompressed: bool,
}

/// Its measurements.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Touched {
    /// Pages in the memory.
    pub pages: usize,
    /// ns a page, for each page-out of a few hundred pages.
    pub out_ns: Vec<u64>,
    /// ns a page, until all pages were out and written; one value for each push-out.
    pub all_out_ns: Vec<f64>,
    /// Pages that were recompressed before they were touched.
    pub recompressed: usize,
    /// ns of each touch in random order, without read-ahead.
    pub random_ns: Vec<u64>,
    /// ns a page in sequence, with the read-ahead of the machine.
    pub in_order_ns: f64,
    /// Touches a second in random order, from one thread and from two.
    pub rates: [f64; 2],
}

/// Changes each page's content. So no old copy can be used, and no page is identical to a copy that
/// the kernel has freed without notice.
fn dirty(memory: &mut [Page]) {
    for page in memory {
        let byte = &mut page[PAGE_BYTES / 2];
        *byte = byte.wrapping_add(1);
    }
}

fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut noise = Noise::new(5);
    for at in (1..count).rev() {
        order.swap(at, noise.below(at as u64 + 1) as usize);
    }
    order
}

/// The control files of the cache that this program swaps to.
fn cache() -> Result<PathBuf, Failure> {
    let found = Some(PathBuf::from("/run/uzswap/mnt")).filter(|folder| folder.is_dir());
    found.ok_or_else(|| Failure::new("no cache to look into; start this under 'uzswap run'"))
}

fn touch(page: &Page) {
    black_box(page[black_box(64)]);
}

/// Touches each page once. Returns the ns of each touch.
fn one_by_one(pages: &[Page], order: &[usize]) -> Vec<u64> {
    let mut times = Vec::with_capacity(order.len());
    for &at in order {
        let began = Instant::now();
        touch(&pages[at]);
        times.push(began.elapsed().as_nanos() as u64);
    }
    times
}

/// Touches a second: each of `threads` touches its part of the memory in random order.
fn rate(pages: &[Page], threads: usize) -> f64 {
    let parts: Vec<&[Page]> = pages.chunks(pages.len().div_ceil(threads)).collect();
    let orders: Vec<_> = parts.iter().map(|part| shuffled(part.len())).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (part, order) in parts.iter().zip(&orders) {
            scope.spawn(|| order.iter().for_each(|at| touch(&part[*at])));
        }
    });
    pages.len() as f64 / start.elapsed().as_secs_f64()
}

/// Measures the times, and prints a [`Touched`] as JSON.
pub fn run(arguments: &TouchArguments) -> Result<(), Failure> {
    let mut memory = Memory::new(&arguments.memory)?;
    let mut touched = Touched { pages: memory.pages().len(), ..Touched::default() };
    match arguments.outs {
        Some(outs) => {
            for _ in 0..outs {
                touched.push_out(&mut memory)?;
            }
        }
        None if arguments.recompressed => touched.touch_recompressed(&mut memory)?,
        None => touched.touch_all(&mut memory)?,
    }
    println!("{}", serde_json::to_string(&touched).context("the times")?);
    Ok(())
}

impl Touched {
    fn push_out(&mut self, memory: &mut Memory) -> Result<(), Failure> {
        dirty(memory.pages_mut());
        let out = memory.push_out()?;
        self.out_ns.extend(out.request_ns);
        self.all_out_ns.push(out.all_ns);
        Ok(())
    }

    fn touch_recompressed(&mut self, memory: &mut Memory) -> Result<(), Failure> {
        let cache = cache()?;
        let parameter = cache.join("parameters/recompress_idle_seconds");
        fs::write(&parameter, "1").context(&parameter.display().to_string())?;
        fs::write(PAGE_CLUSTER, "0").context(PAGE_CLUSTER)?;
        self.push_out(memory)?;
        let statistic = cache.join("stats/recompressed_pages");
        let mut alike = 0;
        for _ in 0..LOOKS_MAX {
            std::thread::sleep(LOOK);
            let text = fs::read_to_string(&statistic).context("recompressed_pages")?;
            let count = text.trim().parse().context("recompressed_pages")?;
            alike = if count == self.recompressed && count > 0 { alike + 1 } else { 0 };
            self.recompressed = count;
            if alike == LOOKS_ALIKE {
                break;
            }
        }
        self.random_ns = one_by_one(memory.pages(), &shuffled(self.pages));
        Ok(())
    }

    fn touch_all(&mut self, memory: &mut Memory) -> Result<(), Failure> {
        let read_ahead = fs::read_to_string(PAGE_CLUSTER).context(PAGE_CLUSTER)?;
        fs::write(PAGE_CLUSTER, "0").context(PAGE_CLUSTER)?;
        self.push_out(memory)?;
        self.random_ns = one_by_one(memory.pages(), &shuffled(self.pages));
        for threads in [1, 2] {
            self.push_out(memory)?;
            self.rates[threads - 1] = rate(memory.pages(), threads);
        }
        fs::write(PAGE_CLUSTER, read_ahead.trim()).context(PAGE_CLUSTER)?;
        self.push_out(memory)?;
        let start = Instant::now();
        memory.pages().iter().for_each(touch);
        self.in_order_ns = start.elapsed().as_nanos() as f64 / self.pages as f64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_every_page_once() {
        let mut order = shuffled(1000);
        assert_ne!(order[..10], (0..10).collect::<Vec<_>>());
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }

    #[test]
    fn a_rate_touches_all_from_any_number_of_threads() {
        let pages = vec![[1; PAGE_BYTES]; 101];
        assert!(rate(&pages, 1) > 0.0 && rate(&pages, 2) > 0.0);
    }
}
