//! Pages compressed with a dictionary: when a dictionary is trained and used, and that pages come
//! back.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_engine::testing::{Content, Noise, Setup, make_page, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Store};

const SETUP: Setup = Setup {
    seals_backing: true,
    pages: 40_000,
    ram_bytes: 256 << 20,
    pool_bytes: 128 << 20,
    backing_bytes: 0,
    block_bytes: 512,
    compressor: "zstd",
};

const OBJECT_BYTES: usize = 128;

fn statistic(cache: &Cache, name: &str) -> u64 {
    cache.statistic(name).unwrap()
}

/// A page of a program with 64 kinds of objects: half of each is the same in all of its kind.
fn heap_page(seed: u32) -> Page {
    let mut noise = Noise::new(seed.into());
    let mut page = [0; PAGE_BYTES];
    let mut kind = [0; PAGE_BYTES];
    for object in page.as_chunks_mut::<OBJECT_BYTES>().0 {
        make_page(Content::Random, noise.below(64), &mut kind);
        object[..56].copy_from_slice(&kind[..56]);
        for field in object.as_chunks_mut::<8>().0.iter_mut().skip(7) {
            let value = match noise.below(16) {
                0..12 => 0,
                12..14 => noise.below(16),
                _ => 0x7f12_3456_0000 + noise.below(4096) * 64,
            };
            *field = value.to_ne_bytes();
        }
    }
    page
}

/// A page that no dictionary helps with: a few hundred bytes of noise.
fn noisy_page(seed: u32) -> Page {
    let mut page = page_of(Content::Random, u64::from(seed) | 1 << 40);
    page[900..].fill(0);
    page
}

fn store_as(cache: &Cache, area: Area, offset: u32, page: &Page) {
    if offset.is_multiple_of(64) {
        cache.maintain().unwrap();
    }
    assert_eq!(cache.store(area.entry(offset).unwrap(), page), Store::Stored);
}

fn store(cache: &Cache, area: Area, offset: u32) {
    store_as(cache, area, offset, &heap_page(offset));
}

fn load(cache: &Cache, area: Area, offset: u32) -> Result<Page, Error> {
    let mut page = [0xcc; PAGE_BYTES];
    cache.load(area.entry(offset).unwrap(), &mut page).map(|load| {
        assert_eq!(load, Load::Hit);
        page
    })
}

fn assert_holds(cache: &Cache, area: Area, mut offsets: impl Iterator<Item = u32>) {
    let wrong = offsets.find(|offset| load(cache, area, *offset).unwrap() != heap_page(*offset));
    assert_eq!(wrong, None, "not what was stored");
    cache.check();
}

#[test]
fn once_16_mib_are_held_a_dictionary_is_trained_and_new_pages_are_smaller() {
    let (cache, area, _) = SETUP.make();
    (0..4095).for_each(|offset| store(&cache, area, offset));
    cache.maintain().unwrap();
    assert_eq!(statistic(&cache, "dictionaries"), 0);
    let before = statistic(&cache, "compressed_bytes");
    let metadata = statistic(&cache, "metadata_size");
    store(&cache, area, 4095);
    cache.maintain().unwrap();
    assert_eq!(statistic(&cache, "dictionaries"), 1);
    let dictionary = statistic(&cache, "dictionary_size");
    assert!((32 << 10..256 << 10).contains(&dictionary), "{dictionary}");
    assert!(statistic(&cache, "metadata_size") >= metadata + dictionary);
    assert_eq!(statistic(&cache, "stores_dictionary"), 0);
    (4096..8191).for_each(|offset| store(&cache, area, offset));
    let after = statistic(&cache, "compressed_bytes") - before;
    assert!(after < before * 3 / 4, "{before} bytes without, {after} with");
    assert!(statistic(&cache, "stores_dictionary") > 4000);
    let [with, without] = ["dictionary_trial_bytes", "dictionary_plain_bytes"];
    assert!(statistic(&cache, with) < statistic(&cache, without) * 3 / 4);
    assert_holds(&cache, area, 0..8191);
}

#[test]
fn other_compressors_and_small_pools_train_none() {
    for compressor in ["lz4", "deflate"] {
        let (cache, area, _) = Setup { compressor, ..SETUP }.make();
        (0..5000).for_each(|offset| store(&cache, area, offset));
        assert_eq!(statistic(&cache, "dictionaries"), 0, "{compressor}");
    }
    let (cache, area, _) = SETUP.make();
    cache.set_attribute("dictionary_enabled", "N").unwrap();
    (0..5000).for_each(|offset| store(&cache, area, offset));
    assert_eq!(statistic(&cache, "dictionaries"), 0, "switched off");
    // Many pages are stored, few at a time.
    let (cache, area, _) = SETUP.make();
    (0..5000).for_each(|page| store_as(&cache, area, page % 3000, &heap_page(page)));
    assert_eq!(statistic(&cache, "dictionaries"), 0, "too few pages");
}

#[test]
fn as_more_is_stored_another_dictionary_is_trained_and_held_pages_keep_theirs() {
    let (cache, area, _) = SETUP.make();
    let trained = |before: u32, last: u32| {
        (before..last).for_each(|offset| store(&cache, area, offset));
        cache.maintain().unwrap();
        statistic(&cache, "dictionaries")
    };
    assert_eq!(trained(0, 4096), 1);
    assert_eq!(trained(4096, 4 * 4096 - 1), 1);
    assert_eq!(trained(4 * 4096 - 1, 4 * 4096), 2);
    assert_eq!(trained(4 * 4096, 5 * 4096), 2);
    assert_holds(&cache, area, (0..5 * 4096).step_by(3));
}

#[test]
fn pages_come_back_from_the_backing_after_any_training_and_change_of_compressor() {
    let (cache, area, _) = Setup { pages: 3000, backing_bytes: 16 << 20, ..SETUP }.make();
    let (mut from, mut trained, mut on_backing) = (0, 0, 0);
    for (compressor, is_on) in [
        ("zstd", "Y"),
        ("zstd:3", "Y"),
        ("lz4", "Y"),
        ("zstd:19", "Y"),
        ("zstd", "N"),
        ("zstd", "Y"),
    ] {
        cache.set_attribute("compressor", compressor).unwrap();
        cache.set_attribute("dictionary_enabled", is_on).unwrap();
        let stores = statistic(&cache, "stores_dictionary");
        (from..from + 1000).for_each(|offset| store(&cache, area, offset));
        let is_used = from > 0 && compressor != "lz4" && is_on == "Y";
        assert_eq!(statistic(&cache, "stores_dictionary") > stores, is_used, "{compressor}");
        from += 200;
        // lz4 tries no page, and all pages of the previous round may be on the backing.
        let is_trained = cache.train();
        assert!(is_trained || compressor == "lz4", "after {compressor}");
        trained += u64::from(is_trained);
        assert_holds(&cache, area, 0..from);
        // The next round stores the pages beyond again.
        cache.shrink(1 << 20);
        cache.recompress(4);
        on_backing = statistic(&cache, "backing_pages");
    }
    assert!(on_backing > 300, "{on_backing}");
    assert!(statistic(&cache, "recompressions") > 100);
    assert_holds(&cache, area, 0..from + 200);
    assert_eq!(statistic(&cache, "dictionaries"), trained);
}

#[test]
fn at_most_64_dictionaries_are_made() {
    let (cache, area, _) = Setup { pages: 3000, ..SETUP }.make();
    (0..1200).for_each(|offset| store(&cache, area, offset));
    assert!((0..64).all(|_| cache.train()));
    let bytes = statistic(&cache, "dictionary_size");
    assert!(bytes < 5 << 20, "{bytes}");
    assert!(!cache.train());
    (0..1200).for_each(|offset| store(&cache, area, offset));
    assert_holds(&cache, area, 0..300);
}

#[test]
fn a_dictionary_that_gains_nothing_is_tried_but_not_used_until_it_gains() {
    let (cache, area, _) = SETUP.make();
    (0..1200).for_each(|offset| store(&cache, area, offset));
    assert!(cache.train());
    let count = || statistic(&cache, "stores_dictionary");
    // Every 32nd of these is tried, and takes some 900 bytes.
    (0..12_000).for_each(|seed| store_as(&cache, area, seed % 2000, &noisy_page(seed)));
    let before = count();
    (0..640).for_each(|seed| store_as(&cache, area, seed, &noisy_page(seed + 20_000)));
    assert!(count() <= before + 64, "it is still used");
    // These pages gain from the dictionary, which shows once enough of them were tried.
    (0..12_000).for_each(|seed| store_as(&cache, area, seed % 2000, &heap_page(seed)));
    let before = count();
    (0..600).for_each(|offset| store(&cache, area, offset));
    assert!(count() > before + 500);
    assert_eq!(statistic(&cache, "dictionaries"), 1);
    assert_holds(&cache, area, 0..600);
}

#[test]
fn pages_with_nothing_to_learn_train_none_and_are_kept_as_before() {
    let (cache, area, _) = Setup { pages: 3000, ..SETUP }.make();
    assert!(!cache.train(), "an empty cache");
    for offset in 0..100 {
        store_as(&cache, area, offset, &page_of(Content::Random, offset.into()));
    }
    assert!(!cache.train(), "nothing but noise");
    (100..200).for_each(|offset| store(&cache, area, offset));
    assert_holds(&cache, area, 100..200);
}

#[test]
fn a_damaged_object_is_an_error_whatever_bit_turned() {
    let (cache, area, _) = Setup { pages: 3000, ..SETUP }.make();
    (0..1200).for_each(|offset| store(&cache, area, offset));
    assert!(cache.train());
    for offset in 1200..1220 {
        store(&cache, area, offset);
        let key = area.entry(offset).unwrap();
        let (mut bit, mut errors) = (0, 0);
        while cache.damage(key, bit).is_some() {
            match load(&cache, area, offset) {
                Err(Error::Damaged { .. }) => errors += 1,
                // Some bits of a stream have no meaning.
                Ok(page) => assert!(page == heap_page(offset)),
                other => panic!("{other:?}"),
            }
            cache.damage(key, bit).unwrap();
            // All bits of the header, which names the dictionary; then some bits.
            bit += if bit < 32 { 1 } else { 61 };
        }
        assert!(errors * 10 >= bit / 61 * 8, "{errors} errors, {bit} bits");
    }
    assert_holds(&cache, area, 0..1220);
    assert_eq!(statistic(&cache, "stores_dictionary"), 20);
}
