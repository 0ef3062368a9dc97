//! A cache whose pages are all cold, and the times of reads.

use std::error::Error;
use std::time::Duration;
use uzswap_engine::backing::Backing;
use uzswap_engine::compress::prepare_thread;
use uzswap_engine::{Area, Cache, Config, Load, Page, Store};

pub const PAGES: u32 = 20_000;

pub type Outcome<T> = Result<T, Box<dyn Error>>;

/// A page of which half is noise.
pub fn page(number: u32) -> Page {
    let mut state = u64::from(number) | 1 << 40;
    let mut page = [0; 4096];
    for byte in &mut page[..2048] {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        *byte = (state >> 56) as u8;
    }
    page
}

/// A pseudo-random number.
pub fn next(state: &mut u32) -> u32 {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    *state >> 8
}

/// The time that this share of the reads did not exceed, µs.
pub fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    times.get(((times.len().max(1) - 1) as f64 * share) as usize).map_or(0.0, micros)
}

pub fn micros(time: &Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Stores pages. Waits while there is no room for a page.
pub fn store(cache: &Cache, area: &Area, numbers: std::ops::Range<u32>) -> Outcome<()> {
    prepare_thread();
    for number in numbers {
        let key = area.entry(number).ok_or("no such page")?;
        while cache.store(key, &page(number)) != Store::Stored {
            cache.maintain()?;
        }
        if number % 64 == 0 {
            cache.maintain()?;
        }
    }
    Ok(())
}

/// A cache over a backing, with all pages stored, and room for as many more.
pub fn filled(backing: Box<dyn Backing>) -> Outcome<(Cache, Area)> {
    let config = Config {
        pages_max: 1 << 20,
        ram_bytes: 1 << 30,
        ram_bytes_max: 1 << 30,
        pool_bytes_max: 2 << 20,
        algorithm: "lz4".parse()?,
        seals_backing: true,
    };
    let cache = Cache::new(config, backing)?;
    let area = cache.add_area(2 * PAGES).ok_or("no room for pages")?;
    store(&cache, &area, 0..PAGES)?;
    cache.shrink(1 << 30);
    Ok((cache, area))
}

/// Reads a page; `false` if it is lost. Panics if it has a wrong byte.
pub fn read(cache: &Cache, area: &Area, number: u32) -> bool {
    let mut content = [0; 4096];
    match cache.load(area.entry(number).expect("in the area"), &mut content) {
        Ok(Load::Hit) => {
            assert!(content == page(number), "page {number}");
            true
        }
        Ok(Load::Absent) => panic!("page {number} is absent"),
        Err(_) => false,
    }
}
