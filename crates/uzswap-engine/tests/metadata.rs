//! The memory that a stored page costs besides its object.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Cache, PAGE_BYTES, Page, Store};

/// Header in front of each object in the pool.
const OBJECT_HEADER_BYTES: u64 = 8;
/// Bytes that a cache of any size takes: spare trunks of the index, the first chunks of tables.
const FIXED_BYTES_MAX: f64 = 1.5 * 1024.0 * 1024.0;

const PAGES: u32 = 120_000;

/// Bytes of metadata, and the number of pages so far.
#[derive(Clone, Copy)]
struct Measure {
    bytes: u64,
    pages: u64,
}

impl Measure {
    fn of(cache: &Cache) -> Self {
        let statistic = |name| cache.statistic(name).unwrap();
        let headers = OBJECT_HEADER_BYTES * statistic("pool_pages");
        Self { bytes: statistic("metadata_size") + headers, pages: statistic("stored_pages") }
    }

    fn each(self) -> f64 {
        self.bytes as f64 / self.pages as f64
    }

    fn since(self, before: Self) -> Self {
        Self { bytes: self.bytes - before.bytes, pages: self.pages - before.pages }
    }
}

/// A page like those of a swapped-out heap. 8 in 100 are one word repeated, 5 in 100 were stored
/// before, 5 in 100 are incompressible, and the rest are log-normal around `median` bytes.
fn heap_page(noise: &mut Noise, median: f64) -> Page {
    match noise.below(100) {
        0..6 => page_of(Content::Zero, 0),
        6..8 => page_of(Content::Filled, noise.word()),
        8..13 => page_of(Content::Text, noise.below(50)),
        13..18 => page_of(Content::Random, noise.word()),
        _ => {
            let normal: f64 = (0..8).map(|_| noise.below(128) as f64 / 127.0).sum::<f64>() - 4.0;
            let words = (median * (normal * 0.75).exp() / 8.0) as usize;
            let mut page = page_of(Content::Random, noise.word());
            page[(words * 8).min(PAGE_BYTES)..].fill(0);
            page
        }
    }
}

/// Fills a cache and measures the bytes of one more page: in the pool, and on the backing.
fn measure(median: f64) -> [f64; 2] {
    let setup = Setup {
        pages: PAGES,
        pool_bytes: 1 << 30,
        ram_bytes: 1 << 30,
        backing_bytes: 256 << 20,
        ..Setup::default()
    };
    let (cache, area, _) = setup.make();
    let mut noise = Noise::new(1);
    let mut measures = Vec::new();
    for (number, key) in (0..PAGES).zip(area.entries()) {
        if number.is_multiple_of(64) {
            cache.maintain().unwrap();
        }
        if number == PAGES / 6 {
            measures.push(Measure::of(&cache));
        }
        assert_eq!(cache.store(key, &heap_page(&mut noise, median)), Store::Stored);
    }
    let statistic = |name| cache.statistic(name).unwrap();
    let object_bytes = statistic("compressed_bytes") / statistic("pool_pages");
    measures.push(Measure::of(&cache));
    cache.shrink(usize::MAX);
    assert_eq!(statistic("pool_pages"), 0);
    measures.push(Measure::of(&cache));
    let [first, pooled, placed] = measures[..] else { panic!("three times") };
    let more = pooled.since(first).each();
    let fixed = pooled.bytes as f64 - more * pooled.pages as f64;
    let on_backing = more - (pooled.bytes - placed.bytes) as f64 / pooled.pages as f64;
    println!(
        "objects of {object_bytes} bytes: metadata of one more page {more:.1} bytes in the pool, \
         {on_backing:.1} on the backing; of any cache {:.2} MiB",
        fixed / f64::from(1 << 20)
    );
    assert!(fixed <= FIXED_BYTES_MAX, "{fixed} bytes for a cache without pages");
    [more, on_backing]
}

#[test]
fn one_more_page_of_a_kibibyte_costs_at_most_32_bytes_of_metadata() {
    assert!(measure(750.0).iter().all(|bytes| *bytes <= 32.0));
}

/// One page in nine is stored raw here, in its own zspage, whose descriptor takes 48 bytes.
#[test]
fn one_more_page_that_compresses_poorly_costs_at_most_33_bytes_of_metadata() {
    assert!(measure(1100.0).iter().all(|bytes| *bytes <= 33.0));
}

#[test]
fn a_cache_that_keeps_little_ahead_is_smaller_and_takes_pages_all_the_same() {
    let (pool_bytes, ram_bytes) = (1 << 30, 1 << 30);
    let setup = Setup { pages: PAGES, pool_bytes, ram_bytes, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let before = cache.memory_bytes();
    cache.keep_ahead(32 << 20);
    assert!(before - cache.memory_bytes() >= 14 * (64 << 10), "fourteen tables of 64 KiB");
    let mut noise = Noise::new(1);
    for (number, key) in (0..PAGES / 4).zip(area.entries()) {
        if number.is_multiple_of(64) {
            cache.maintain().unwrap();
        }
        assert_eq!(cache.store(key, &heap_page(&mut noise, 750.0)), Store::Stored);
    }
    cache.check();
}
