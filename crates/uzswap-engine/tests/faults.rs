//! Memory or the backing fails: loads return an error, no byte is wrong, and no other page is lost.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_engine::testing::{Content, Faults, Setup, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Reject, Store, SwapEntry};

const CODECS: [&str; 8] = ["raw", "lz4", "lz4:0", "lz4:-1", "zstd", "lzo", "deflate", "wkdm"];

fn statistic(cache: &Cache, name: &str) -> u64 {
    cache.statistic(name).unwrap()
}

fn key(area: Area, offset: u32) -> SwapEntry {
    area.entry(offset).unwrap()
}

fn content(offset: u32) -> Page {
    page_of(Content::pick(offset.into()), offset.into())
}

fn store(cache: &Cache, area: Area, offset: u32) -> Store {
    cache.maintain().unwrap();
    cache.store(key(area, offset), &content(offset))
}

/// Loads a page into a buffer that is neither zeros nor the page.
fn load(cache: &Cache, area: Area, offset: u32) -> (Result<Load, Error>, Page) {
    let mut page = [0xcc; PAGE_BYTES];
    (cache.load(key(area, offset), &mut page), page)
}

fn assert_holds(cache: &Cache, area: Area, offset: u32) {
    let (loaded, page) = load(cache, area, offset);
    assert_eq!(loaded.unwrap(), Load::Hit, "page {offset}");
    assert!(page == content(offset), "page {offset} is not what was stored");
}

/// Many small pages on the backing, and a few in the pool.
fn with_pages_on_the_backing(compressor: &'static str) -> (Cache, Area, std::sync::Arc<Faults>) {
    let setup = Setup { backing_bytes: 16 << 20, compressor, ..Setup::default() };
    let (cache, area, faults) = setup.make();
    (0..600).for_each(|offset| assert_eq!(store(&cache, area, offset), Store::Stored));
    cache.shrink(usize::MAX);
    (600..700).for_each(|offset| assert_eq!(store(&cache, area, offset), Store::Stored));
    (cache, area, faults)
}

#[test]
fn a_damaged_object_is_an_error_and_a_counter_whatever_bit_turned() {
    for compressor in CODECS {
        let (cache, area, _) = Setup { compressor, ..Setup::default() }.make();
        for offset in 0..24 {
            assert_eq!(store(&cache, area, offset), Store::Stored);
            let (mut bits, mut errors) = (0, 0);
            let before = statistic(&cache, "decompress_fail");
            while cache.damage(key(area, offset), bits * 53).is_some() {
                match load(&cache, area, offset) {
                    (Err(Error::Damaged { .. }), _) => errors += 1,
                    // Some bits of a stream have no meaning, such as those after its end.
                    (Ok(Load::Hit), page) => assert!(page == content(offset), "{compressor}"),
                    (other, _) => panic!("{compressor}: {other:?}"),
                }
                let exclusive = cache.load_exclusive(key(area, offset), &mut [0; PAGE_BYTES]);
                match exclusive {
                    // The page is still in the cache, and still an error.
                    Err(_) => errors += 1,
                    Ok(_) => assert_eq!(store(&cache, area, offset), Store::Stored),
                }
                cache.damage(key(area, offset), bits * 53);
                bits += 1;
                if cache.statistic("stored_pages") != Some(u64::from(offset) + 1) {
                    panic!("{compressor}: a damaged page is no longer held");
                }
            }
            assert_eq!(statistic(&cache, "decompress_fail") - before, errors);
            let filled = Content::pick(offset.into()) as u8 <= Content::Filled as u8;
            assert!(filled || errors * 10 >= 2 * bits as u64 * 9, "{errors} of {bits}");
        }
        cache.check();
    }
}

#[test]
fn damage_to_one_page_is_no_damage_to_another() {
    let (cache, area, _) = Setup::default().make();
    (0..60).for_each(|offset| assert_eq!(store(&cache, area, offset), Store::Stored));
    cache.damage(key(area, 2), 99).unwrap();
    assert!(load(&cache, area, 2).0.is_err());
    (0..60).filter(|offset| *offset != 2).for_each(|offset| assert_holds(&cache, area, offset));
    // A damaged page is not shared with an identical one: the pages are compared.
    let same = content(2);
    assert_eq!(cache.store(key(area, 100), &same), Store::Stored);
    let mut page = [0; PAGE_BYTES];
    assert_eq!(cache.load(key(area, 100), &mut page).unwrap(), Load::Hit);
    assert!(page == same);
    // A page that is stored anew is whole again.
    assert_eq!(store(&cache, area, 2), Store::Stored);
    assert_holds(&cache, area, 2);
    cache.check();
}

/// Fills the pool while writes fail with one of the faults; no page may be lost.
fn writeback_stops_and_resumes(fault: impl Fn(&Faults) -> &AtomicBool, says: &str) {
    let setup = Setup { pool_bytes: 1 << 20, backing_bytes: 8 << 20, ..Setup::default() };
    let (cache, area, faults) = setup.make();
    let mut offsets = 0..area.pages();
    fault(&faults).store(true, Relaxed);
    let full = offsets.find(|offset| store(&cache, area, *offset) != Store::Stored).unwrap();
    // Writeback stopped at the first failure, and reports it.
    let failures = statistic(&cache, "writeback_fail");
    let failure = cache.writeback_failure().unwrap();
    assert!(failure.contains("write at byte") && failure.contains(says), "{failure}");
    assert_eq!(statistic(&cache, "writeback_stopped"), 1);
    assert_eq!(statistic(&cache, "written_back_pages"), 0);
    // Writes that are in flight together fail together.
    assert!((1..=5).contains(&failures), "{failures}");
    assert_eq!(statistic(&cache, "stored_pages"), full.into());
    (0..full).for_each(|offset| assert_holds(&cache, area, offset));
    cache.check();

    // The cache retries nothing, even when the device has recovered.
    fault(&faults).store(false, Relaxed);
    let rejected = Store::Rejected(Reject::ReclaimFail);
    assert_eq!(store(&cache, area, 2992), Store::Stored, "a filled page takes no room");
    assert_eq!(cache.store(key(area, 2998), &page_of(Content::Random, 1)), rejected);
    assert_eq!(cache.store_through(key(area, 2998), &page_of(Content::Random, 1)), rejected);
    assert_eq!(cache.shrink(usize::MAX), 0);
    assert_eq!(statistic(&cache, "writeback_fail"), failures);
    assert_eq!(statistic(&cache, "backing_bytes_written"), 0);

    cache.resume_writeback();
    assert_eq!(cache.writeback_failure(), None);
    offsets.for_each(|offset| assert_eq!(store(&cache, area, offset), Store::Stored));
    (0..area.pages()).filter(|offset| *offset != full).for_each(|offset| {
        assert_holds(&cache, area, offset);
    });
    assert_eq!(statistic(&cache, "writeback_stopped"), 0);
    assert!(statistic(&cache, "written_back_pages") > 500);
    cache.check();
}

#[test]
fn after_a_write_error_pages_stay_in_memory_and_writeback_waits_to_be_resumed() {
    writeback_stops_and_resumes(|faults| &faults.fail_writes, "os error 5");
}

#[test]
fn after_a_full_device_pages_stay_in_memory_and_writeback_waits_to_be_resumed() {
    writeback_stops_and_resumes(|faults| &faults.full, "no storage space");
}

/// Pages that go leave holes, which compaction leaves alone while they are few. Holes do not keep
/// the pool above the size at which it takes pages again.
#[test]
fn a_pool_that_was_full_takes_pages_again_whatever_holes_it_has() {
    for gone in 0..24 {
        let setup = Setup { pool_bytes: 2 << 20, backing_bytes: 8 << 20, ..Setup::default() };
        let (cache, area, faults) = setup.make();
        faults.fail_writes.store(true, Relaxed);
        let full = (0..area.pages()).find(|offset| store(&cache, area, *offset) != Store::Stored);
        let full = full.unwrap();
        for offset in (0..full).step_by(3).take(gone * 6) {
            cache.invalidate(key(area, offset));
        }
        faults.fail_writes.store(false, Relaxed);
        cache.resume_writeback();
        assert_eq!(store(&cache, area, full), Store::Stored, "without {gone} times six pages");
        cache.check();
    }
}

#[test]
fn a_failed_write_through_is_a_rejection_and_stops_writeback() {
    let (cache, area, faults) = with_pages_on_the_backing("lz4");
    faults.fail_writes.store(true, Relaxed);
    let page = page_of(Content::Random, 77);
    assert_eq!(cache.store_through(key(area, 2000), &page), Store::Rejected(Reject::ReclaimFail));
    assert!(cache.writeback_failure().is_some());
    assert_eq!(load(&cache, area, 2000).0.unwrap(), Load::Absent);
    faults.fail_writes.store(false, Relaxed);
    cache.resume_writeback();
    assert_eq!(cache.store_through(key(area, 2000), &page), Store::Stored);
    let (loaded, back) = load(&cache, area, 2000);
    assert!(loaded.unwrap() == Load::Hit && back == page);
    (0..700).for_each(|offset| assert_holds(&cache, area, offset));
    cache.check();
}

#[test]
fn a_read_error_is_an_error_and_the_page_is_there_when_the_device_is_back() {
    let (cache, area, faults) = with_pages_on_the_backing("zstd");
    let on_backing: Vec<_> =
        (0..700).filter(|offset| cache.is_on_backing(key(area, *offset))).collect();
    assert!(on_backing.len() > 300);
    faults.fail_reads.store(true, Relaxed);
    for (tries, offset) in (1..).zip(&on_backing) {
        let error = load(&cache, area, *offset).0.unwrap_err();
        let Error::Backing { source, .. } = &error else { panic!("{error:?}") };
        assert_eq!(source.raw_os_error(), Some(5));
        assert!(cache.load_exclusive(key(area, *offset), &mut [0; PAGE_BYTES]).is_err());
        assert_eq!(statistic(&cache, "read_fail"), 2 * tries);
    }
    // Pages in memory are not affected.
    (0..700).filter(|offset| !on_backing.contains(offset)).for_each(|offset| {
        assert_holds(&cache, area, offset);
    });
    faults.fail_reads.store(false, Relaxed);
    (0..700).for_each(|offset| assert_holds(&cache, area, offset));
    cache.check();
}

#[test]
fn a_damaged_record_is_an_error_and_a_counter() {
    for compressor in CODECS {
        let (cache, area, faults) = with_pages_on_the_backing(compressor);
        faults.damage_reads.store(true, Relaxed);
        let mut errors = 0;
        for offset in (0..700).filter(|offset| cache.is_on_backing(key(area, *offset))) {
            match load(&cache, area, offset) {
                (Err(Error::Damaged { .. }), _) => errors += 1,
                (Ok(Load::Hit), page) => assert!(page == content(offset), "{compressor}"),
                (other, _) => panic!("{compressor}: {other:?}"),
            }
        }
        assert_eq!(statistic(&cache, "decompress_fail"), errors);
        assert!(errors > 100, "{compressor}: {errors}");
        faults.damage_reads.store(false, Relaxed);
        (0..700).for_each(|offset| assert_holds(&cache, area, offset));
        cache.check();
    }
}

/// A backing that is nearly full and has to be cleaned while reads or writes fail.
#[test]
fn a_fault_while_cleaning_loses_nothing() {
    let faults: [fn(&Faults) -> &AtomicBool; 2] = [|f| &f.fail_reads, |f| &f.fail_writes];
    for fault in faults {
        let setup = Setup { pool_bytes: 1 << 20, backing_bytes: 5 << 20, ..Setup::default() };
        let (cache, area, faults) = setup.make();
        let mut seeds = vec![0; 2000];
        let store = |offset: u32, seed: u64| {
            cache.maintain().unwrap();
            cache.store(key(area, offset), &page_of(Content::Pointers, seed))
        };
        let mut round = 0;
        while cache.writeback_failure().is_none() {
            round += 1;
            assert!(round < 20, "no segment was ever cleaned");
            // Every third page stays, so that no segment dies by itself.
            for offset in (0..2000).filter(|offset| round == 1 || offset % 3 > 0) {
                let seed = round * 10_000 + u64::from(offset);
                let stored = store(offset, seed);
                let seed = if stored == Store::Stored { seed } else { 0 };
                seeds[offset as usize] = seed;
            }
            fault(&faults).store(statistic(&cache, "segments_cleaned") > 0, Relaxed);
        }
        fault(&faults).store(false, Relaxed);
        for _ in ["stopped", "resumed"] {
            for (offset, seed) in (0..).zip(&seeds) {
                let (loaded, page) = load(&cache, area, offset);
                match (loaded.unwrap(), *seed) {
                    (Load::Absent, 0) => {}
                    (Load::Hit, seed) => assert!(page == page_of(Content::Pointers, seed)),
                    (Load::Absent, seed) => panic!("page {offset} of seed {seed} is lost"),
                }
            }
            cache.check();
            cache.resume_writeback();
            cache.shrink(usize::MAX);
        }
    }
}
