//! The cost of a fault: `fault PAGES [random|sequential] [THREADS] [COMPRESSOR] [MODE]`.
//!
//! Fills a region with the pages of a file (as `uzswap record` writes them), evicts all pages, and
//! touches each page once. The budget is so large that the touches evict no page. Prints
//! nanoseconds.

use std::hint::black_box;
use std::time::Instant;
use uzswap_region::{Advice, Mode, Pager, RegionVec};

const PAGE: usize = 4096;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument =
        |at: usize, default: &str| arguments.get(at).map_or(default.to_owned(), String::clone);
    let content = std::fs::read(argument(0, "pages"))?;
    let (order, compressor) = (argument(1, "random"), argument(3, "lz4"));
    let threads: usize = argument(2, "1").parse()?;
    let mode: Mode = argument(4, "in-thread").parse()?;
    let pages = content.len() / PAGE;

    let memory = (content.len() as u64 * 2).max(64 << 20);
    let pager = Pager::builder().memory(memory).compressor(&compressor).mode(mode).build()?;
    let mut region: RegionVec<u8> = pager.vec_zeroed(pages * PAGE)?;
    region.copy_from_slice(&content[..pages * PAGE]);

    let start = Instant::now();
    region.advise(0..region.len(), Advice::PageOut)?;
    let out = start.elapsed().as_nanos() / pages as u128;

    let mut touched: Vec<u32> = (0..pages as u32).collect();
    if order == "random" {
        shuffle(&mut touched);
    }
    let region = &region[..];
    let start = Instant::now();
    let mut latencies: Vec<u64> = std::thread::scope(|scope| {
        let part = pages.div_ceil(threads);
        let parts: Vec<_> = touched
            .chunks(part)
            .map(|part| scope.spawn(move || part.iter().map(|page| touch(region, *page)).collect()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap_or_else(|_| Vec::new())).collect()
    });
    let elapsed = start.elapsed().as_nanos() / pages as u128;
    assert_eq!(region, &content[..pages * PAGE], "every byte is as it was");

    latencies.sort_unstable();
    let percentile = |of: usize| latencies[(latencies.len() * of / 1000).min(latencies.len() - 1)];
    println!("out {out} in {elapsed}");
    for (name, of) in [("p50", 500), ("p90", 900), ("p99", 990), ("p99.9", 999)] {
        println!("{name} {}", percentile(of));
    }
    if std::env::var_os("STATS").is_some() {
        println!("{}", pager.stats());
    }
    Ok(())
}

fn touch(region: &[u8], page: u32) -> u64 {
    let start = Instant::now();
    black_box(region[page as usize * PAGE]);
    start.elapsed().as_nanos() as u64
}

/// A fixed order that looks random.
fn shuffle(values: &mut [u32]) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for i in (1..values.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        values.swap(i, (state >> 33) as usize % (i + 1));
    }
}
