//! Pages written through take one slot each, and find room while there is any.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_engine::backing::FileBacking;
use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, Store};
use uzswap_sys::shared;

fn through(cache: &Cache, area: Area, offset: u32) -> bool {
    let page = page_of(Content::Random, offset.into());
    cache.store_through(area.entry(offset).unwrap(), &page) == Store::Stored
}

fn assert_holds(cache: &Cache, area: Area, offset: u32, content: Content) {
    let mut page = [0; PAGE_BYTES];
    assert_eq!(cache.load(area.entry(offset).unwrap(), &mut page).unwrap(), Load::Hit);
    assert!(page == page_of(content, offset.into()), "page {offset}");
}

#[test]
fn a_page_written_through_takes_a_slot_whatever_the_block() {
    for block_bytes in [512, 4096] {
        let setup = Setup { backing_bytes: 8 << 20, block_bytes, ..Setup::default() };
        let (cache, area, _) = setup.make();
        (0..100).for_each(|offset| assert!(through(&cache, area, offset)));
        let statistic = |name| cache.statistic(name).unwrap();
        assert_eq!(statistic("backing_live_size"), 100 * PAGE_BYTES as u64);
        assert_eq!(statistic("backing_bytes_written"), 100 * PAGE_BYTES as u64);
        (0..100).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
        cache.check();
    }
}

#[test]
fn every_slot_but_the_reserve_is_given_out() {
    let setup = Setup { backing_bytes: 4 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let held = (0..1100).take_while(|offset| through(&cache, area, *offset)).count();
    assert_eq!(held, 1024 - 2 * 64, "all but two segments");
    cache.check();
    // A freed slot is found, wherever it is.
    let mut noise = Noise::new(1);
    for offset in 1100..1400 {
        let gone = noise.below(held as u64) as u32;
        cache.invalidate(area.entry(gone).unwrap());
        assert!(through(&cache, area, offset), "page {offset}");
        assert!(!through(&cache, area, 2000));
        cache.invalidate(area.entry(offset).unwrap());
        assert!(through(&cache, area, gone));
    }
    (0..held as u32).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    cache.check();
}

/// Few pages in each of many segments, some 25 of 32. These segments become free only when the
/// pages move together. Returns the pages.
fn scatter(cache: &Cache, area: Area) -> Vec<u32> {
    (0..1800).for_each(|offset| assert!(through(cache, area, offset)));
    let stays = |offset: &u32| offset.is_multiple_of(18);
    let (held, gone): (Vec<u32>, Vec<u32>) = (0..1800).partition(stays);
    gone.iter().for_each(|offset| cache.invalidate(area.entry(*offset).unwrap()));
    held
}

/// Fills the rest of the backing; the scattered pages have to move.
fn fill_up(cache: &Cache, area: Area, held: &[u32]) {
    let written = 2000..6400;
    for offset in written.clone() {
        let page = page_of(Content::Mixed, offset.into());
        assert_eq!(cache.store(area.entry(offset).unwrap(), &page), Store::Stored, "{offset}");
    }
    cache.shrink(usize::MAX);
    assert_eq!(cache.statistic("backing_full"), Some(0));
    assert_eq!(cache.statistic("pool_pages"), Some(0));
    let cleaned = cache.statistic("segments_cleaned").unwrap();
    assert!(cleaned >= 16, "{cleaned}");
    held.iter().for_each(|offset| assert_holds(cache, area, *offset, Content::Random));
    written.for_each(|offset| assert_holds(cache, area, offset, Content::Mixed));
    cache.check();
}

#[test]
fn pages_written_through_are_packed_when_segments_run_short() {
    let setup =
        Setup { backing_bytes: 8 << 20, pool_bytes: 1 << 20, pages: 20_000, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let held = scatter(&cache, area);
    fill_up(&cache, area, &held);
}

/// The process that takes over knows the owners of the pages.
#[test]
fn a_process_that_takes_the_cache_over_packs_pages_written_through() {
    for seals_backing in [false, true] {
        let memory = shared::create("uzswap-through").unwrap();
        let disk = tempfile::tempfile().unwrap();
        disk.set_len(8 << 20).unwrap();
        let open = || {
            let config = Config {
                pages_max: 20_000,
                ram_bytes: 8 << 20,
                ram_bytes_max: 8 << 20,
                pool_bytes_max: 1 << 20,
                algorithm: "lz4".parse().unwrap(),
                seals_backing,
            };
            let backing = FileBacking::new(disk.try_clone().unwrap(), 8 << 20).unwrap();
            let memory = memory.try_clone().unwrap();
            let cache = Cache::in_file(config, Box::new(backing), memory).unwrap();
            let area = cache.add_area(20_000).unwrap();
            (cache, area)
        };
        let (cache, area) = open();
        let held = scatter(&cache, area);
        drop(cache);
        let (cache, area) = open();
        fill_up(&cache, area, &held);
    }
}

/// Records copied out of a segment are written before another thread uses the segment.
#[test]
fn pages_written_through_find_room_by_cleaning() {
    let setup = Setup { backing_bytes: 4 << 20, pages: 20_000, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let compressed = 10_000..12_200;
    for offset in compressed.clone() {
        let page = page_of(Content::Mixed, offset.into());
        assert_eq!(cache.store(area.entry(offset).unwrap(), &page), Store::Stored, "{offset}");
    }
    cache.shrink(usize::MAX);
    let (held, gone): (Vec<u32>, Vec<u32>) = compressed.partition(|offset| offset % 3 == 0);
    gone.iter().for_each(|offset| cache.invalidate(area.entry(*offset).unwrap()));
    let free = (4 << 20) - cache.statistic("backing_live_size").unwrap();
    // Three segments stay free, and the rest of the space may be in parts.
    let pages = (free / PAGE_BYTES as u64) as u32 - 5 * 64;
    for offset in 0..pages {
        assert!(through(&cache, area, offset), "page {offset} of {pages}");
        cache.check();
    }
    let cleaned = cache.statistic("segments_cleaned").unwrap();
    assert!(cleaned >= 4, "{cleaned}");
    (0..pages).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    held.iter().for_each(|offset| assert_holds(&cache, area, *offset, Content::Mixed));
}

#[test]
fn a_packing_that_fails_leaves_every_page_where_it_is() {
    use std::sync::atomic::Ordering::Relaxed;
    let setup = Setup { backing_bytes: 4 << 20, pool_bytes: 1 << 20, ..Setup::default() };
    for reads in [false, true] {
        let (cache, area, faults) = setup.make();
        (0..890).for_each(|offset| assert!(through(&cache, area, offset)));
        let stays = |offset: &u32| offset.is_multiple_of(30);
        let gone = (0..890).filter(|offset| !stays(offset));
        gone.for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
        for offset in 1000..1200 {
            let page = page_of(Content::Mixed, offset.into());
            assert_eq!(cache.store(area.entry(offset).unwrap(), &page), Store::Stored);
        }
        if reads { &faults.fail_reads } else { &faults.fail_writes }.store(true, Relaxed);
        cache.shrink(usize::MAX);
        assert_eq!(cache.statistic("writeback_stopped"), Some(1));
        faults.fail_reads.store(false, Relaxed);
        faults.fail_writes.store(false, Relaxed);
        (0..890)
            .filter(stays)
            .for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
        (1000..1200).for_each(|offset| assert_holds(&cache, area, offset, Content::Mixed));
        cache.check();
        cache.resume_writeback();
        cache.shrink(usize::MAX);
        assert_eq!(cache.statistic("pool_pages"), Some(0));
        (0..890)
            .filter(stays)
            .for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
        cache.check();
    }
}
