//! Pages recompressed sixteen as one: their size, their content, damage.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Store};

fn statistic(cache: &Cache, name: &str) -> u64 {
    cache.statistic(name).unwrap()
}

/// A small version of a heap's page: pointers into neighbouring objects, small numbers, text.
fn heap_page(seed: u32) -> Page {
    let mut noise = Noise::new(seed.into());
    let mut page = page_of(Content::Text, u64::from(seed));
    for word in page.as_chunks_mut::<8>().0.iter_mut().skip(64) {
        let value = match noise.below(8) {
            0..5 => 0,
            5 => noise.below(16),
            _ => 0x7f12_3456_0000 + u64::from(seed % 8) * 4096 + noise.below(64) * 64,
        };
        *word = value.to_ne_bytes();
    }
    page
}

fn store(cache: &Cache, area: Area, offset: u32, page: &Page) {
    if offset.is_multiple_of(64) {
        cache.maintain().unwrap();
    }
    assert_eq!(cache.store(area.entry(offset).unwrap(), page), Store::Stored);
}

fn load(cache: &Cache, area: Area, offset: u32) -> Result<Page, Error> {
    let mut page = [0xcc; PAGE_BYTES];
    cache.load(area.entry(offset).unwrap(), &mut page).map(|load| {
        assert_eq!(load, Load::Hit);
        page
    })
}

fn assert_holds(cache: &Cache, area: Area, offsets: impl Iterator<Item = u32>) {
    for offset in offsets {
        let held = load(cache, area, offset).unwrap() == heap_page(offset);
        assert!(held, "page {offset} is not what was stored");
    }
}

/// A cache with `pages` pages of heap, all recompressed.
fn recompressed(setup: Setup, pages: u32) -> (Cache, Area, impl Fn(bool)) {
    let (cache, area, faults) = setup.make();
    (0..pages).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    while cache.recompress(1000) > 0 {}
    cache.maintain().unwrap();
    assert_eq!(statistic(&cache, "recompressed_pages"), u64::from(pages / 16 * 16));
    cache.check();
    (cache, area, move |fail| faults.fail_reads.store(fail, Relaxed))
}

#[test]
fn recompressed_pages_come_back_and_take_much_less() {
    for compressor in ["lz4", "zstd", "lzo", "deflate", "wkdm", "raw"] {
        let setup = Setup { compressor, ..Setup::default() };
        let (cache, area, _) = setup.make();
        (0..1024).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
        let before = statistic(&cache, "compressed_bytes");
        let incompressible = statistic(&cache, "stored_incompressible_pages");
        if compressor != "raw" {
            let compressed = statistic(&cache, &format!("pool_pages_{compressor}"));
            assert!(compressed > 900, "{compressor}: {compressed}");
            assert_eq!(compressed + incompressible, 1024);
        }
        cache.maintain().unwrap();
        while cache.recompress(7) > 0 {}
        cache.check();
        assert_eq!(statistic(&cache, "recompressed_pages"), 1024, "{compressor}");
        assert_eq!(statistic(&cache, "pool_pages"), 0);
        let after = statistic(&cache, "compressed_bytes");
        assert!(after * 10 < before * 9, "{compressor}: {after} of {before} bytes");
        assert_holds(&cache, area, 0..1024);
        assert_eq!(statistic(&cache, "loads_recompressed"), 1024);
        assert_eq!(
            cache.load_exclusive(area.entry(5).unwrap(), &mut [0; 4096]).unwrap(),
            Load::Hit
        );
        (6..1024).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
        assert_holds(&cache, area, 0..5);
        cache.check();
        (0..5).for_each(|offset| store(&cache, area, offset, &heap_page(offset + 1)));
        cache.check();
        assert_eq!(statistic(&cache, "recompressed_pages"), 0);
        assert_eq!(load(&cache, area, 3).unwrap(), heap_page(4), "a newer store wins");
    }
}

#[test]
fn metadata_of_a_recompressed_page_is_below_32_bytes() {
    let metadata = |cache: &Cache| {
        // A piece's header of 8 bytes, and 72 bytes in front of a unit of 16 pages.
        statistic(cache, "metadata_size") + statistic(cache, "recompressed_pages") * (72 + 32) / 16
    };
    let setup =
        Setup { pages: 98_304, pool_bytes: 1 << 30, ram_bytes: 1 << 30, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let mut measures = Vec::new();
    for offset in 0..65_536 {
        let page = heap_page(offset);
        store(&cache, area, offset, &page);
        if (offset + 1) % 16_384 == 0 {
            while cache.recompress(1000) > 0 {}
            measures.push((metadata(&cache), statistic(&cache, "stored_pages")));
        }
    }
    let [(bytes, pages), .., (more_bytes, more_pages)] = measures[..] else { panic!() };
    let each = (more_bytes - bytes) as f64 / (more_pages - pages) as f64;
    println!("metadata of one more recompressed page: {each:.1} bytes");
    assert!(each <= 32.0, "{each} bytes");
}

#[test]
fn only_idle_pages_are_recompressed_and_the_oldest_first() {
    let (cache, area, _) = Setup::default().make();
    cache.set_attribute("recompress_idle_seconds", "8").unwrap();
    let recompressed = || statistic(&cache, "recompressed_pages");
    (0..160).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    let idle = |seconds| cache.idle(Duration::from_secs(seconds));
    for seconds in 100..108 {
        assert_eq!(idle(seconds), 0, "at {seconds}");
    }
    (160..400).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    assert_eq!(idle(108), 0, "it is in use");
    assert_eq!(statistic(&cache, "pool_idle_pages"), 160);
    (400..432).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    while idle(109) > 0 {}
    assert_eq!(recompressed(), 160);
    for offset in 0..432 {
        let (_, before) = (load(&cache, area, offset), statistic(&cache, "loads_recompressed"));
        assert_eq!(before > u64::from(offset), offset < 160, "page {offset}");
    }
    // Pages that were just loaded have a second chance, like new ones.
    idle(118);
    while idle(118) > 0 {}
    assert_eq!(recompressed(), 160);
    (119..140).for_each(|seconds| while idle(seconds) > 0 {});
    assert_eq!(recompressed(), 432);
    cache.set_attribute("recompress_idle_seconds", "0").unwrap();
    (0..160).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    (140..400).for_each(|seconds| assert_eq!(idle(seconds), 0));
    cache.check();
}

#[test]
fn pages_that_gain_nothing_stay_as_they_are_and_are_not_tried_again() {
    let (cache, area, _) = Setup::default().make();
    for offset in 0..64 {
        store(&cache, area, offset, &page_of(Content::Random, offset.into()));
    }
    // Four at a time, and twelve are too few to try.
    assert_eq!(cache.recompress(100), 52);
    assert_eq!(statistic(&cache, "recompress_poor"), 52);
    assert_eq!(statistic(&cache, "recompressed_pages"), 0);
    assert_eq!(cache.recompress(100), 0);
    cache.check();
    // Among others a few fit, and the rest go into the next unit.
    for offset in 64..128 {
        let page = match offset % 8 {
            0 => page_of(Content::Random, offset.into()),
            _ => heap_page(offset),
        };
        store(&cache, area, offset, &page);
    }
    while cache.recompress(100) > 0 {}
    cache.check();
    assert!(statistic(&cache, "recompressed_pages") >= 48);
    for offset in (0..128).filter(|offset| *offset < 64 || offset % 8 == 0) {
        let random = page_of(Content::Random, offset.into());
        assert!(load(&cache, area, offset).unwrap() == random, "page {offset}");
    }
    assert_holds(&cache, area, (64..128).filter(|offset| offset % 8 != 0));
}

/// Floats are taken apart as pages, in units, and in units that are made from remains of units.
#[test]
fn pages_of_numbers_are_taken_apart_in_units_too() {
    let number_page = |offset: u32| match offset % 4 {
        number @ 0..2 => page_of(Content::Numbers, number.into()),
        number => page_of(Content::Prices, number.into()),
    };
    let setup = Setup { compressor: "lz4", ..Setup::default() };
    let (cache, area, _) = setup.make();
    cache.set_attribute("same_pages_enabled", "N").unwrap();
    (0..256).for_each(|offset| store(&cache, area, offset, &number_page(offset)));
    assert_eq!(statistic(&cache, "stores_numbers"), 256);
    let assert_held = |offsets: &mut dyn Iterator<Item = u32>| {
        for offset in offsets {
            assert!(load(&cache, area, offset).unwrap() == number_page(offset), "page {offset}");
        }
    };
    assert_held(&mut (0..256));
    assert_eq!(cache.recompress(100), 0, "all were loaded just now");
    let before = statistic(&cache, "compressed_bytes");
    while cache.recompress(100) > 0 {}
    cache.check();
    assert_eq!(statistic(&cache, "recompressed_pages"), 256);
    assert!(statistic(&cache, "compressed_bytes") * 3 < before);
    assert_held(&mut (0..256));
    for offset in (0..256).filter(|offset| offset % 4 != 0) {
        cache.invalidate(area.entry(offset).unwrap());
    }
    while cache.recompress(100) > 0 {}
    cache.check();
    assert_eq!(statistic(&cache, "recompressed_pages"), 64);
    assert_held(&mut (0..256).step_by(4));
}

#[test]
fn pages_left_in_units_that_have_lost_a_third_are_put_together() {
    let (cache, area, _) = recompressed(Setup::default(), 960);
    let kept = |offset: &u32| !offset.is_multiple_of(3);
    let full = statistic(&cache, "compressed_bytes");
    (0..960).filter(|o| !kept(o)).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    while cache.recompress(100) > 0 {}
    cache.check();
    assert_eq!(statistic(&cache, "recompressed_pages"), 640);
    let left = statistic(&cache, "compressed_bytes");
    assert!(left * 4 < full * 3, "{left} of {full}");
    assert_holds(&cache, area, (0..960).filter(kept));
    // If fewer pages are left than a unit takes, they stay, and are not tried again and again.
    let rest = (0..960).filter(kept).skip(24);
    rest.for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    while cache.recompress(100) > 0 {}
    assert_eq!(cache.recompress(100), 0);
    cache.check();
    assert_holds(&cache, area, (0..960).filter(kept).take(24));
}

#[test]
fn a_unit_that_has_lost_most_of_its_pages_is_taken_apart() {
    let (cache, area, _) = recompressed(Setup::default(), 640);
    let kept = |offset: &u32| offset.is_multiple_of(4);
    let full = statistic(&cache, "compressed_bytes");
    (0..640).filter(|o| !kept(o)).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    cache.check();
    assert_eq!(statistic(&cache, "compressed_bytes"), full, "until it is idle");
    while cache.recompress(100) > 0 {}
    cache.check();
    assert_eq!(statistic(&cache, "recompressed_pages"), 160);
    assert!(statistic(&cache, "compressed_bytes") * 2 < full);
    assert_holds(&cache, area, (0..640).filter(kept));
}

#[test]
fn units_are_written_back_and_read_from_the_backing() {
    let setup = Setup { backing_bytes: 16 << 20, ..Setup::default() };
    let (cache, area, fail_reads) = recompressed(setup, 640);
    cache.shrink(usize::MAX);
    cache.check();
    assert_eq!(statistic(&cache, "pool_total_size"), 0);
    assert!(cache.is_on_backing(area.entry(9).unwrap()));
    fail_reads(true);
    assert!(matches!(load(&cache, area, 9), Err(Error::Backing { .. })));
    fail_reads(false);
    assert_holds(&cache, area, 0..640);
    (0..640).filter(|o| o % 16 != 3).for_each(|o| cache.invalidate(area.entry(o).unwrap()));
    assert_eq!(cache.recompress(100), 0, "what is on the backing stays there");
    cache.check();
    assert_holds(&cache, area, (0..640).filter(|offset| offset % 16 == 3));
    (0..640).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    assert_eq!(statistic(&cache, "backing_live_size"), 0);
    cache.check();
}

#[test]
fn a_damaged_unit_is_an_error_and_never_other_bytes() {
    let (cache, area, _) = recompressed(Setup::default(), 16);
    let (mut bits, mut errors) = (0, 0);
    while cache.damage(area.entry(0).unwrap(), bits * 97).is_some() {
        for offset in 0..16 {
            match load(&cache, area, offset) {
                Ok(page) => assert!(page == heap_page(offset), "bit {}", bits * 97),
                Err(Error::Damaged { .. }) => errors += 1,
                Err(other) => panic!("{other}"),
            }
        }
        cache.damage(area.entry(0).unwrap(), bits * 97).unwrap();
        bits += 1;
    }
    assert!(errors > bits * 4, "{errors} errors for {bits} bits");
    assert_eq!(statistic(&cache, "decompress_fail"), errors as u64);
    // A damaged page gets no new checksum, and a damaged unit is not taken apart.
    let damages = |bit: &usize| {
        cache.damage(area.entry(0).unwrap(), *bit).unwrap();
        let is_damaged = load(&cache, area, 0).is_err();
        if !is_damaged {
            cache.damage(area.entry(0).unwrap(), *bit).unwrap();
        }
        is_damaged
    };
    assert!((700..).find(damages).is_some());
    (1..16).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    assert!(load(&cache, area, 0).is_err());
    (16..64).for_each(|offset| store(&cache, area, offset, &heap_page(offset)));
    cache.damage(area.entry(20).unwrap(), 2000).unwrap();
    assert!(load(&cache, area, 20).is_err());
    while cache.recompress(100) > 0 {}
    assert!(load(&cache, area, 0).is_err());
    assert!(load(&cache, area, 20).is_err());
    assert_holds(&cache, area, (16..64).filter(|offset| *offset != 20));
    cache.check();
}

#[test]
fn a_full_pool_is_recompressed_as_far_as_there_is_room() {
    const POOL: u64 = 1 << 20;
    // Below the limit, objects of the first compressor leave space for a unit's first pages.
    // Objects of the second compressor leave none.
    for (compressor, leaves_room) in [("lz4", true), ("lz4:1", false)] {
        let setup = Setup { pages: 6000, pool_bytes: POOL, compressor, ..Setup::default() };
        let (cache, area, _) = setup.make();
        let taken = (0..6000)
            .take_while(|offset| {
                cache.maintain().unwrap();
                cache.store(area.entry(*offset).unwrap(), &heap_page(*offset)) == Store::Stored
            })
            .count() as u32;
        assert!(taken < 6000);
        let before = statistic(&cache, "pool_total_size");
        let most = if leaves_room { POOL } else { before };
        for _ in 0..100 {
            cache.recompress(100);
            cache.maintain().unwrap();
            assert!(statistic(&cache, "pool_total_size") <= most, "{compressor}");
        }
        cache.check();
        assert_holds(&cache, area, 0..taken);
    }
}

#[test]
fn identical_pages_are_recompressed_once() {
    let (cache, area, _) = Setup::default().make();
    for offset in 0..320 {
        store(&cache, area, offset, &heap_page(offset / 2));
    }
    while cache.recompress(100) > 0 {}
    cache.check();
    // Before the first `maintain` there are no records to share.
    let shared = statistic(&cache, "shared_pages");
    assert!(shared >= 256);
    assert_eq!(statistic(&cache, "recompressed_pages"), 320 - shared / 2);
    for offset in 0..320 {
        assert!(load(&cache, area, offset).unwrap() == heap_page(offset / 2));
        cache.invalidate(area.entry(offset).unwrap());
    }
    assert_eq!(statistic(&cache, "pool_total_size"), 0);
    cache.check();
}

#[test]
fn units_move_with_the_rest_of_the_pool() {
    let (cache, area, _) = recompressed(Setup { pool_bytes: 16 << 20, ..Setup::default() }, 2000);
    let moved = statistic(&cache, "pages_compacted");
    for (section, _) in cache.sections() {
        let _ = cache.empty_section(section);
        cache.check();
        assert_holds(&cache, area, 0..2000);
    }
    assert!(statistic(&cache, "pages_compacted") > moved);
}
