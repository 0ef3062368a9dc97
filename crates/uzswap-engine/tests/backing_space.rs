//! A backing that is little larger than its live records lasts for ever.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Area, Cache, Load, PAGE_BYTES, Store};

const PAGES: u32 = 8000;

/// These tests fill the backing. With a small pool all pages go to the backing.
fn setup(backing_bytes: usize) -> Setup {
    Setup { pages: PAGES, pool_bytes: 1 << 20, backing_bytes, ..Setup::default() }
}

/// Seeds of the stored pages; `None` for an absent page.
struct Churn {
    cache: Cache,
    area: Area,
    noise: Noise,
    held: Vec<Option<u64>>,
}

impl Churn {
    fn new(backing_bytes: usize) -> Self {
        let (cache, area, _) = setup(backing_bytes).make();
        let held = vec![None; PAGES as usize];
        Self { cache, area, noise: Noise::new(1), held }
    }

    fn store(&mut self, offset: u32) {
        let seed = self.noise.word();
        let page = page_of(Content::Mixed, seed);
        let stored = self.cache.store(self.area.entry(offset).unwrap(), &page);
        assert_eq!(stored, Store::Stored, "page {offset}");
        self.held[offset as usize] = Some(seed);
    }

    fn invalidate(&mut self, offset: u32) {
        self.cache.invalidate(self.area.entry(offset).unwrap());
        self.held[offset as usize] = None;
    }

    fn statistic(&self, name: &str) -> u64 {
        self.cache.statistic(name).unwrap()
    }

    fn write_back_all(&self) {
        self.cache.shrink(usize::MAX);
        assert_eq!(self.statistic("pool_pages"), 0, "all of it fits on the backing");
    }

    fn check(&self) {
        let mut page = [0; PAGE_BYTES];
        for (key, seed) in self.area.entries().zip(&self.held) {
            let loaded = self.cache.load(key, &mut page).unwrap();
            assert_eq!(loaded == Load::Hit, seed.is_some(), "{key:?}");
            assert!(seed.is_none_or(|seed| page == page_of(Content::Mixed, seed)), "{key:?}");
        }
        assert_eq!(self.statistic("backing_full"), 0);
        assert_eq!(self.statistic("writeback_stopped"), 0);
        self.cache.check();
    }
}

/// Bytes of the records of all pages together.
fn live_bytes() -> usize {
    let mut churn = Churn::new(64 << 20);
    (0..PAGES).for_each(|offset| churn.store(offset));
    churn.write_back_all();
    churn.statistic("backing_live_size") as usize
}

#[test]
fn with_three_tenths_to_spare_a_backing_never_fills() {
    let live = live_bytes();
    let mut churn = Churn::new(live / 10 * 13);
    (0..PAGES).for_each(|offset| churn.store(offset));
    churn.write_back_all();
    let first = churn.statistic("backing_bytes_written");
    for step in 1..=60_000 {
        let offset = churn.noise.below(PAGES.into()) as u32;
        match churn.noise.below(4) {
            0 => churn.invalidate(offset),
            _ => churn.store(offset),
        }
        if step % 500 == 0 {
            churn.cache.maintain().unwrap();
        }
        if step % 10_000 == 0 {
            // As full as possible: every page, and all of them on the backing.
            for offset in 0..PAGES {
                if churn.held[offset as usize].is_none() {
                    churn.store(offset);
                }
            }
            churn.write_back_all();
            churn.check();
        }
    }
    let written = churn.statistic("backing_bytes_written") - first;
    let stored = (churn.statistic("written_back_pages") - u64::from(PAGES)) * live as u64;
    let stored = stored / u64::from(PAGES);
    println!(
        "live {live} bytes of {}: {:.2} bytes written for each of a page, {} segments cleaned",
        live / 10 * 13,
        written as f64 / stored as f64,
        churn.statistic("segments_cleaned"),
    );
    assert!(churn.statistic("segments_cleaned") > 100);
}

#[test]
fn space_of_dropped_pages_is_used_again() {
    let mut churn = Churn::new(live_bytes() / 10 * 13);
    for _ in 0..6 {
        (0..PAGES).for_each(|offset| churn.store(offset));
        churn.write_back_all();
        churn.check();
        (0..PAGES).for_each(|offset| churn.invalidate(offset));
        assert_eq!(churn.statistic("backing_live_size"), 0);
        churn.check();
    }
    // No record had to be copied: segments died whole.
    assert_eq!(churn.statistic("segments_cleaned"), 0);
}

/// Beyond its size, pages are rejected or stay in the pool, and no stored page is lost.
#[test]
fn a_backing_that_is_too_small_fills_and_loses_nothing() {
    let mut churn = Churn::new(live_bytes() / 2);
    let mut rejected = 0;
    for offset in 0..PAGES {
        let seed = churn.noise.word();
        let key = churn.area.entry(offset).unwrap();
        match churn.cache.store(key, &page_of(Content::Mixed, seed)) {
            Store::Stored => churn.held[offset as usize] = Some(seed),
            Store::Rejected(_) => rejected += 1,
        }
    }
    assert!((PAGES / 4..PAGES).contains(&rejected), "{rejected}");
    assert!(churn.statistic("backing_full") > 0);
    let mut page = [0; PAGE_BYTES];
    for (key, seed) in churn.area.entries().zip(&churn.held) {
        let loaded = churn.cache.load(key, &mut page).unwrap();
        assert_eq!(loaded == Load::Hit, seed.is_some());
        assert!(seed.is_none_or(|seed| page == page_of(Content::Mixed, seed)));
    }
    // After half of the pages are gone there is room again.
    (0..PAGES).step_by(2).for_each(|offset| churn.invalidate(offset));
    churn.cache.shrink(usize::MAX);
    churn.cache.maintain().unwrap();
    (0..PAGES / 8).step_by(2).for_each(|offset| churn.store(offset));
    churn.cache.check();
}
