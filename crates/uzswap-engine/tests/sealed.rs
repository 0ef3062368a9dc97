//! An attacker reads and changes the backing: no page can be read from it, and a changed record is
//! an error on its page alone.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use uzswap_engine::testing::{Content, Faults, Setup, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Store, SwapEntry};

/// Pages are stored raw, so that bytes on the backing can be compared with the page.
fn setup() -> Setup {
    let setup = Setup { pages: 600, compressor: "raw", block_bytes: 4096, ..Setup::default() };
    Setup { backing_bytes: 8 << 20, ..setup }
}

struct Made {
    cache: Cache,
    area: Area,
    disk: Arc<Faults>,
}

impl Made {
    fn new(setup: Setup) -> Self {
        let (cache, area, disk) = setup.make();
        Self { cache, area, disk }
    }

    fn key(&self, offset: u32) -> SwapEntry {
        self.area.entry(offset).unwrap()
    }

    fn store(&self, offset: u32, page: &Page) {
        self.cache.maintain().unwrap();
        assert_eq!(self.cache.store(self.key(offset), page), Store::Stored);
    }

    fn store_through(&self, offset: u32, page: &Page) {
        self.cache.maintain().unwrap();
        assert_eq!(self.cache.store_through(self.key(offset), page), Store::Stored);
    }

    fn record(&self, offset: u32) -> Range<usize> {
        self.cache.record_of(self.key(offset)).unwrap()
    }

    /// Returns the page, or `None` if it is damaged; anything else fails the test.
    fn load(&self, offset: u32) -> Option<Page> {
        let mut page = [0xcc; PAGE_BYTES];
        match self.cache.load(self.key(offset), &mut page) {
            Ok(Load::Hit) => Some(page),
            Err(Error::Damaged { .. }) => None,
            other => panic!("page {offset}: {other:?}"),
        }
    }

    fn load_many(&self, offsets: Range<u32>) -> Vec<Option<Page>> {
        let mut pages = vec![[0xcc; PAGE_BYTES]; offsets.len()];
        let mut loaded = Vec::new();
        let told = |_, load, page: &mut Page| {
            loaded.push(match load {
                Ok(Load::Hit) => Some(*page),
                Err(Error::Damaged { .. }) => None,
                other => panic!("{other:?}"),
            });
            Ok::<_, ()>(())
        };
        self.cache.load_many(self.key(offsets.start), &mut pages, told).unwrap();
        loaded
    }

    /// Asserts that pages are those of `of`, except the damaged ones.
    fn assert_damaged(&self, damaged: &[u32], offsets: Range<u32>, of: impl Fn(u32) -> Page) {
        for offset in offsets.clone() {
            let expected = (!damaged.contains(&offset)).then(|| of(offset));
            assert!(self.load(offset) == expected, "page {offset}, damaged {damaged:?}");
        }
        for (offset, page) in offsets.clone().zip(self.load_many(offsets)) {
            let expected = (!damaged.contains(&offset)).then(|| of(offset));
            assert!(page == expected, "page {offset} of many, damaged {damaged:?}");
        }
    }
}

fn noise(offset: u32) -> Page {
    page_of(Content::Random, offset.into())
}

/// Half of the pages are records in segments, half are written through.
fn with_pages(setup: Setup, page: impl Fn(u32) -> Page) -> Made {
    let made = Made::new(setup);
    (0..100).for_each(|offset| made.store(offset, &page(offset)));
    made.cache.shrink(usize::MAX);
    (100..200).for_each(|offset| made.store_through(offset, &page(offset)));
    assert_eq!(made.cache.statistic("backing_pages"), Some(200));
    made
}

#[test]
fn nothing_of_a_page_is_found_on_a_backing_that_is_sealed() {
    for seals_backing in [false, true] {
        let made = with_pages(Setup { seals_backing, ..setup() }, noise);
        assert_eq!(made.cache.statistic("backing_sealed"), Some(seals_backing.into()));
        let there: HashSet<[u8; 16]> =
            made.disk.tamper(|disk| disk.as_chunks().0.iter().copied().collect());
        let found = (0..200)
            .flat_map(|offset| noise(offset).as_chunks::<16>().0.to_vec())
            .filter(|part| there.contains(part))
            .count();
        // Without sealing the search finds all bytes of the pages, so the test can fail.
        assert_eq!(found, if seals_backing { 0 } else { 200 * PAGE_BYTES / 16 });
        made.assert_damaged(&[], 0..200, noise);
    }
}

#[test]
fn records_that_were_swapped_are_errors_and_whole_again_when_they_are_put_back() {
    let made = with_pages(setup(), noise);
    for (one, other) in [(3, 77), (103, 177), (3, 103)] {
        let swap = || {
            let (one, other) = (made.record(one), made.record(other));
            let bytes = one.len().min(other.len());
            made.disk.tamper(|disk| {
                (0..bytes).for_each(|at| disk.swap(one.start + at, other.start + at));
            });
        };
        swap();
        made.assert_damaged(&[one, other], 0..200, noise);
        swap();
        made.assert_damaged(&[], 0..200, noise);
    }
}

#[test]
fn a_record_that_was_there_before_is_an_error() {
    let made = Made::new(setup());
    let fill = |page: &dyn Fn(u32) -> Page| {
        made.store(0, &page(0));
        made.cache.shrink(usize::MAX);
        (100..164).for_each(|offset| made.store_through(offset, &page(offset)));
    };
    let pages = || std::iter::once(0).chain(100..164);
    fill(&noise);
    // Slots belong to a CPU. If the test migrated to another CPU, it tries again.
    let turn = |number: u32| {
        let before = made.disk.tamper(|disk| disk.to_vec());
        let places: Vec<_> = pages().map(|offset| made.record(offset)).collect();
        pages().for_each(|offset| made.cache.invalidate(made.key(offset)));
        fill(&|offset| noise(offset + 1000 * number));
        // Pages that did not move, and their places.
        let same = pages().zip(places).filter(|(offset, place)| made.record(*offset) == *place);
        let (same, places): (Vec<_>, Vec<_>) = same.unzip();
        let is_enough = same.first() == Some(&0) && same.len() > 1;
        is_enough.then_some((number, before, same, places))
    };
    let (number, before, same, places) = (1..1000).find_map(turn).expect("places are used again");
    let newer = |offset: u32| noise(offset + 1000 * number);
    assert!(same.iter().any(|offset| *offset < 100), "a record is where it was: {same:?}");
    assert!(same.iter().any(|offset| *offset >= 100), "a page is in its old slot: {same:?}");
    let assert_damaged = |damaged: &[u32]| {
        made.assert_damaged(damaged, 0..1, newer);
        made.assert_damaged(damaged, 100..164, newer);
    };
    assert_damaged(&[]);
    let now = made.disk.tamper(|disk| {
        let now = disk.to_vec();
        for place in places {
            disk[place.clone()].copy_from_slice(&before[place]);
        }
        now
    });
    assert_damaged(&same);
    made.disk.tamper(|disk| disk.copy_from_slice(&now));
    assert_damaged(&[]);
}

#[test]
fn each_bit_of_a_record_is_vouched_for_and_so_is_its_end() {
    let text = |offset: u32| page_of(Content::ALL[2 + offset as usize % 6], offset.into());
    let made = with_pages(Setup { compressor: "zstd", ..setup() }, text);
    for offset in [0, 1, 2, 3, 50, 150] {
        let record = made.record(offset);
        // Bytes 4 to 7 of a record name the segment that cleaning copied it from; a load ignores
        // them.
        let is_free = |at: usize| offset < 100 && (4..8).contains(&at);
        for at in (0..record.len()).filter(|at| record.len() < 600 || at % 7 == 0 || *at < 64) {
            let turn = || made.disk.tamper(|disk| disk[record.start + at] ^= 1 << (at % 8));
            turn();
            let expected = is_free(at).then(|| text(offset));
            assert!(made.load(offset) == expected, "byte {at} of page {offset}");
            turn();
        }
        for cut in [1, 16, 17, record.len() / 2, record.len()] {
            let whole = made.disk.tamper(|disk| disk.to_vec());
            // The bytes are changed for certain: zeros cut to zeros would be no change.
            let tail = record.end - cut..record.end;
            made.disk.tamper(|disk| disk[tail].iter_mut().for_each(|byte| *byte = !*byte));
            made.assert_damaged(&[offset], 0..200, text);
            made.disk.tamper(|disk| disk.copy_from_slice(&whole));
        }
    }
    made.assert_damaged(&[], 0..200, text);
}

/// A record that cannot be read is not moved, and does not keep others from moving.
#[test]
fn cleaning_and_packing_leave_forgeries_where_they_are_and_come_to_an_end() {
    let setup = Setup { pages: 3000, backing_bytes: 4 << 20, pool_bytes: 1 << 20, ..setup() };
    let made = Made::new(setup);
    let (mut seeds, mut damaged) = (vec![0; 3000], Vec::new());
    for round in 1..12u32 {
        for step in 0..300u32 {
            let offset = (step * 7 + round * 131) % 600;
            let seed = u64::from(round) << 32 | u64::from(offset);
            let page = page_of(Content::Mixed, seed);
            let key = made.key(offset);
            made.cache.maintain().unwrap();
            let stored = made.cache.store(key, &page) == Store::Stored
                || made.cache.store_through(key, &page) == Store::Stored;
            seeds[offset as usize] = if stored { seed } else { 0 };
            damaged.retain(|other| *other != offset);
        }
        made.cache.shrink(usize::MAX);
        let victim = (0..600).find(|offset| {
            !damaged.contains(offset) && made.cache.record_of(made.key(*offset)).is_some()
        });
        if let Some(victim) = victim {
            let record = made.record(victim);
            made.disk.tamper(|disk| disk[record.start + 40] ^= 1);
            damaged.push(victim);
        }
        made.cache.check();
    }
    assert!(made.cache.statistic("segments_cleaned").unwrap() > 0, "nothing was cleaned");
    assert!(!damaged.is_empty());
    for offset in (0..600).filter(|offset| seeds[*offset as usize] != 0) {
        let whole = page_of(Content::Mixed, seeds[offset as usize]);
        let expected = (!damaged.contains(&offset)).then_some(whole);
        assert!(made.load(offset) == expected, "page {offset}");
    }
    // Damaged pages can be dropped like others.
    damaged.iter().for_each(|offset| made.cache.invalidate(made.key(*offset)));
    made.cache.check();
}

/// All segments that are worth cleaning have a forged record.
#[test]
fn cleaning_gives_up_where_nothing_can_be_read() {
    let setup = Setup { pages: 9000, backing_bytes: 24 << 20, pool_bytes: 1 << 20, ..setup() };
    let made = Made::new(setup);
    let page = |offset: u32| page_of(Content::Random, offset.into());
    let mut stored = 0;
    for offset in 0..5400 {
        made.cache.maintain().unwrap();
        if made.cache.store(made.key(offset), &page(offset)) != Store::Stored {
            break;
        }
        stored = offset + 1;
    }
    made.cache.shrink(usize::MAX);
    // Every other page goes, so that all segments are worth cleaning, and none can be read.
    (0..stored).filter(|offset| offset % 2 == 1).for_each(|offset| {
        made.cache.invalidate(made.key(offset));
    });
    made.disk.tamper(|disk| disk.iter_mut().for_each(|byte| *byte ^= 1));
    for offset in 6000..9000 {
        let _ = made.cache.store(made.key(offset), &page(offset));
    }
    made.cache.maintain().unwrap();
    made.cache.check();
    assert!(stored > 1000 && made.load(0).is_none());
}
