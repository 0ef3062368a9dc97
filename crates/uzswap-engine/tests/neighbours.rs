//! Neighbours on the backing come back with one read.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::testing::{Content, Setup, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Store};

const PAGES: u32 = 1000;

fn content(offset: u32) -> Content {
    [Content::Text, Content::Pointers, Content::Mixed, Content::Random][offset as usize / 16 % 4]
}

fn page(offset: u32) -> Page {
    page_of(content(offset), offset.into())
}

/// A cache with all pages on the backing.
fn written_back(block_bytes: usize) -> (Cache, Area, impl Fn(bool, bool)) {
    let setup = Setup { pages: PAGES, backing_bytes: 8 << 20, block_bytes, ..Setup::default() };
    let (cache, area, faults) = setup.make();
    for offset in 0..PAGES {
        assert_eq!(cache.store(area.entry(offset).unwrap(), &page(offset)), Store::Stored);
    }
    cache.shrink(usize::MAX);
    assert_eq!(cache.statistic("backing_pages"), Some(PAGES.into()));
    let set = move |fail, damage| {
        faults.fail_reads.store(fail, Relaxed);
        faults.damage_reads.store(damage, Relaxed);
    };
    (cache, area, set)
}

fn load_many(cache: &Cache, area: Area, first: u32, count: u32) -> Vec<Result<(), Error>> {
    let mut pages = vec![[0; PAGE_BYTES]; count as usize];
    let mut all = Vec::new();
    let loaded = |offset: usize, load: Result<Load, Error>, page_: &mut Page| {
        if let Ok(load) = load {
            assert_eq!(load, Load::Hit);
            assert!(*page_ == page(first + offset as u32), "page {offset} from {first}");
        }
        all.push(load.map(drop));
        Ok::<_, ()>(())
    };
    cache.load_many(area.entry(first).unwrap(), &mut pages, loaded).unwrap();
    all
}

#[test]
fn a_window_takes_few_reads_whatever_is_in_it() {
    for block_bytes in [512, 4096] {
        let (cache, area, _) = written_back(block_bytes);
        let read = |name| cache.statistic(name).unwrap();
        for first in (0..PAGES - 64).step_by(37) {
            assert!(load_many(&cache, area, first, 64).iter().all(Result::is_ok));
        }
        let (pages, reads) = (read("loads_backing"), read("backing_reads"));
        assert_eq!(pages, read("loads"));
        assert!(reads * 20 < pages, "{reads} reads for {pages} pages, blocks of {block_bytes}");
        cache.check();
    }
}

#[test]
fn pages_that_cannot_be_read_together_fail_one_by_one() {
    let (cache, area, set) = written_back(512);
    set(true, false);
    let all = load_many(&cache, area, 100, 64);
    assert!(all.iter().all(|load| matches!(load, Err(Error::Backing { .. }))));
    assert_eq!(cache.statistic("read_fail"), Some(64));
    // In each read a middle bit is flipped: in a record, or between records.
    let windows = (100..800).step_by(64);
    set(false, true);
    let damaged = windows.clone().filter(|first| {
        let all = load_many(&cache, area, *first, 64);
        all.iter().any(|load| matches!(load, Err(Error::Damaged { .. })))
    });
    assert!(damaged.count() >= 8);
    set(false, false);
    for first in windows {
        assert!(load_many(&cache, area, first, 64).iter().all(Result::is_ok));
    }
}

#[test]
fn pages_that_are_gone_or_elsewhere_do_not_end_the_window() {
    let (cache, area, _) = written_back(512);
    cache.invalidate(area.entry(10).unwrap());
    assert_eq!(cache.store(area.entry(20).unwrap(), &page(20)), Store::Stored);
    let mut pages = vec![[7; PAGE_BYTES]; 40];
    let loaded = |offset: usize, load: Result<Load, Error>, page_: &mut Page| {
        let expected = if offset == 10 { Load::Absent } else { Load::Hit };
        assert_eq!(load.unwrap(), expected);
        assert!(offset == 10 || *page_ == page(offset as u32), "page {offset}");
        Ok::<_, ()>(())
    };
    cache.load_many(area.entry(0).unwrap(), &mut pages, loaded).unwrap();
}
