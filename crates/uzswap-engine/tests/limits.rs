//! Limits, their hysteresis, the order of writeback, and each reason to reject a page.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;
use uzswap_engine::backing::{Backing, Completion, Write};
use uzswap_engine::testing::{Content, Setup, TestBacking, page_of};
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, Reject, Store};

const FULL: Store = Store::Rejected(Reject::ReclaimFail);

fn statistic(cache: &Cache, name: &str) -> u64 {
    cache.statistic(name).unwrap()
}

fn set(cache: &Cache, name: &str, value: impl ToString) {
    cache.set_attribute(name, &value.to_string()).unwrap();
}

fn store(cache: &Cache, area: Area, offset: u32, content: Content) -> Store {
    // Brings memory on line as the front end's thread would.
    cache.maintain().unwrap();
    cache.store(area.entry(offset).unwrap(), &page_of(content, offset.into()))
}

/// Stores incompressible pages, a frame each, until one is rejected. Returns their number.
fn fill(cache: &Cache, area: Area, from: u32) -> u32 {
    let mut offsets = from..area.pages();
    let full = offsets.find(|offset| store(cache, area, *offset, Content::Random) != Store::Stored);
    full.expect("more pages than the pool holds") - from
}

fn assert_holds(cache: &Cache, area: Area, offset: u32, content: Content) {
    let mut page = [0; PAGE_BYTES];
    assert_eq!(cache.load(area.entry(offset).unwrap(), &mut page).unwrap(), Load::Hit);
    assert!(page == page_of(content, offset.into()), "page {offset}");
}

/// Asserts that the oldest of pages stored in this order are on the backing. Writeback takes
/// sixteen pages from each shard of the LRU in turn, so the order is right to within one round.
fn assert_oldest_written(cache: &Cache, area: Area, mut offsets: Range<u32>) {
    let on_backing = |offset: &u32| cache.is_on_backing(area.entry(*offset).unwrap());
    let newest_written = offsets.clone().rev().find(on_backing).unwrap();
    let oldest_kept = offsets.find(|offset| !on_backing(offset)).unwrap();
    assert!(newest_written < oldest_kept + 256, "{newest_written} left before {oldest_kept}");
}

#[test]
fn the_lower_of_the_two_pool_limits_holds() {
    let (cache, area, _) = Setup { pool_bytes: 32 << 20, ..Setup::default() }.make();
    let ram_bytes = Setup::default().ram_bytes;
    for (percent, bytes) in [(5, 32 << 20), (100, 2 << 20), (9, 5 << 20), (10, 9 << 20)] {
        set(&cache, "max_pool_percent", percent);
        set(&cache, "max_pool_bytes", bytes);
        let limit = (ram_bytes / 100 * percent).min(bytes) / PAGE_BYTES as u64;
        assert_eq!(statistic(&cache, "pool_limit"), limit * PAGE_BYTES as u64);
        assert_eq!(u64::from(fill(&cache, area, 0)), limit, "{percent} percent, {bytes} bytes");
        assert_eq!(statistic(&cache, "pool_total_size"), limit * PAGE_BYTES as u64);
        area.entries().for_each(|key| cache.invalidate(key));
    }
    cache.check();
}

#[test]
fn a_lowered_limit_drops_nothing_and_a_raised_one_is_used() {
    let (cache, area, _) = Setup { pool_bytes: 4 << 20, ..Setup::default() }.make();
    assert_eq!(fill(&cache, area, 0), 1024);
    set(&cache, "max_pool_bytes", 2 << 20);
    assert_eq!(store(&cache, area, 2000, Content::Random), FULL);
    (0..1024).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    set(&cache, "max_pool_bytes", 6 << 20);
    assert_eq!(fill(&cache, area, 1024), 512);
    (0..1536).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    cache.check();
}

#[test]
fn a_full_pool_takes_nothing_until_it_is_below_the_threshold() {
    let (cache, area, _) = Setup { pool_bytes: 2 << 20, ..Setup::default() }.make();
    set(&cache, "accept_threshold_percent", 50);
    assert_eq!(fill(&cache, area, 0), 512);
    assert_eq!(statistic(&cache, "pool_limit_hit"), 1);
    for left in (256..512).rev() {
        assert_eq!(store(&cache, area, 1000, Content::Random), FULL, "{left} pages left");
        cache.invalidate(area.entry(left).unwrap());
    }
    assert_eq!(statistic(&cache, "reject_reclaim_fail"), 257);
    // A page without an object is stored all the same.
    assert_eq!(store(&cache, area, 1001, Content::Zero), Store::Stored);
    assert_eq!(store(&cache, area, 1000, Content::Random), FULL, "257 pages are above 50 percent");
    cache.invalidate(area.entry(255).unwrap());
    assert_eq!(store(&cache, area, 1000, Content::Random), Store::Stored);
    // Once the pool accepts pages again, it accepts them up to the limit.
    assert_eq!(fill(&cache, area, 1002), 256);
    cache.check();
}

#[test]
fn a_rejected_store_leaves_no_older_copy() {
    let (cache, area, _) = Setup { pool_bytes: 2 << 20, ..Setup::default() }.make();
    let key = area.entry(7).unwrap();
    fill(&cache, area, 0);
    let mut page = [0; PAGE_BYTES];
    assert_eq!(cache.store(key, &page_of(Content::Random, 9999)), FULL);
    assert_eq!(cache.load(key, &mut page).unwrap(), Load::Absent);
    cache.check();
}

#[test]
fn with_a_backing_a_full_pool_writes_its_oldest_pages_back() {
    let setup = Setup { pool_bytes: 2 << 20, backing_bytes: 16 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    for offset in 0..2000 {
        // Without the maintaining thread the store itself makes space.
        let stored = cache.store(area.entry(offset).unwrap(), &page_of(Content::Random, 1));
        assert_eq!(stored, Store::Stored);
        set(&cache, "same_pages_enabled", "N");
        assert!(statistic(&cache, "pool_total_size") <= 2 << 20);
    }
    let on_backing = |offset: &u32| cache.is_on_backing(area.entry(*offset).unwrap());
    let written = (0..2000).filter(on_backing).count() as u32;
    assert!(written >= 2000 - 512, "{written}");
    assert_oldest_written(&cache, area, 0..2000);
    cache.check();
}

#[test]
fn a_page_that_was_loaded_gets_a_second_chance() {
    let setup = Setup { pool_bytes: 8 << 20, backing_bytes: 16 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    for offset in 0..1024 {
        assert_eq!(store(&cache, area, offset, Content::Random), Store::Stored);
    }
    let on_backing = |offset: u32| cache.is_on_backing(area.entry(offset).unwrap());
    (0..100).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    // Shrinks by a quarter of the pages. The loaded pages are spared, so all come from the 924
    // others.
    cache.shrink(1 << 20);
    assert_eq!(statistic(&cache, "second_chances"), 100);
    assert!((0..100).all(|offset| !on_backing(offset)), "spared");
    let written = (100..1024).filter(|offset| on_backing(*offset)).count();
    assert!((256..400).contains(&written), "{written}");
    assert_oldest_written(&cache, area, 100..1024);
    // The second chance is used up: pages that are not loaded again leave in their turn.
    cache.shrink(usize::MAX);
    assert!((0..1024).all(on_backing));
    (0..1024).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    assert_eq!(statistic(&cache, "second_chances"), 100);
    cache.check();
}

#[test]
fn a_page_that_compresses_poorly_is_rejected_or_kept_as_it_is() {
    let (cache, area, _) = Setup::default().make();
    let poor = Store::Rejected(Reject::CompressPoor);
    assert_eq!(store(&cache, area, 0, Content::Random), Store::Stored);
    assert_eq!(statistic(&cache, "stored_incompressible_pages"), 1);
    set(&cache, "max_compression_ratio", 90);
    assert_eq!(store(&cache, area, 0, Content::Random), poor);
    assert_eq!(statistic(&cache, "stored_incompressible_pages"), 0);
    assert_eq!(store(&cache, area, 1, Content::Mixed), Store::Stored);
    // A quarter of the page is noise.
    set(&cache, "max_compression_ratio", 24);
    assert_eq!(store(&cache, area, 2, Content::Mixed), poor);
    assert_eq!(store(&cache, area, 3, Content::Filled), Store::Stored);
    assert_eq!(statistic(&cache, "reject_compress_poor"), 2);
    assert_holds(&cache, area, 1, Content::Mixed);
    cache.check();
}

#[test]
fn a_cache_that_is_switched_off_gives_its_pages_back_and_takes_none() {
    let (cache, area, _) = Setup::default().make();
    for (offset, content) in (0..).zip(Content::ALL) {
        assert_eq!(store(&cache, area, offset, content), Store::Stored);
    }
    set(&cache, "enabled", "N");
    for (offset, content) in (0..).zip(Content::ALL) {
        let disabled = Store::Rejected(Reject::Disabled);
        assert_eq!(store(&cache, area, 100 + offset, content), disabled);
        assert_holds(&cache, area, offset, content);
    }
    assert_eq!(statistic(&cache, "reject_disabled"), Content::ALL.len() as u64);
    assert_eq!(statistic(&cache, "stored_pages"), Content::ALL.len() as u64);
    set(&cache, "enabled", "Y");
    assert_eq!(store(&cache, area, 20, Content::Text), Store::Stored);
    cache.check();
}

#[test]
fn after_a_change_of_compressor_older_pages_stay_readable() {
    let setup = Setup { backing_bytes: 8 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let compressors =
        ["lz4", "zstd", "lzo", "deflate", "wkdm", "raw", "zstd:19", "lz4:20", "deflate:9"];
    for (first, compressor) in (0..).step_by(100).zip(compressors) {
        set(&cache, "compressor", compressor);
        assert_eq!(cache.attribute("compressor").unwrap(), compressor);
        for offset in first..first + 100 {
            let content = Content::pick(offset.into());
            assert_eq!(store(&cache, area, offset, content), Store::Stored);
        }
    }
    assert!(cache.set_attribute("compressor", "lz5").is_err());
    assert_eq!(cache.attribute("compressor").unwrap(), "deflate:9");
    for _ in ["in the pool", "on the backing"] {
        for offset in 0..800 {
            assert_holds(&cache, area, offset, Content::pick(offset.into()));
        }
        cache.shrink(usize::MAX);
    }
    assert_eq!(statistic(&cache, "pool_pages"), 0);
    cache.check();
}

#[test]
fn without_memory_on_line_a_store_is_rejected_and_the_next_one_after_maintenance_is_not() {
    let (cache, area, _) = Setup::default().make();
    let page = |offset: u32| page_of(Content::Random, offset.into());
    let mut stores = (0..).map(|offset| cache.store(area.entry(offset).unwrap(), &page(offset)));
    let rejected = stores.find(|stored| *stored != Store::Stored);
    assert_eq!(rejected, Some(Store::Rejected(Reject::AllocFail)));
    assert_eq!(statistic(&cache, "reject_alloc_fail"), 1);
    assert_eq!(statistic(&cache, "pool_limit_hit"), 0);
    cache.maintain().unwrap();
    assert_eq!(cache.store(area.entry(2999).unwrap(), &page(2999)), Store::Stored);
    cache.check();
}

/// A backing that claims a size.
struct Claims(u64);

impl Backing for Claims {
    fn bytes(&self) -> u64 {
        self.0
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, _offset: u64, _out: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn submit(&self, _write: Write) {
        unreachable!("nothing is written back");
    }

    fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn complete(&self, _wait: bool) -> Option<Completion> {
        None
    }
}

/// A place has 40 bits for units of 16 bytes.
#[test]
fn a_backing_beyond_the_reach_of_places_is_refused() {
    let made = |bytes| {
        let config = Config {
            pages_max: 1000,
            ram_bytes: 8 << 20,
            ram_bytes_max: 8 << 20,
            pool_bytes_max: 8 << 20,
            algorithm: "lz4".parse().unwrap(),
            seals_backing: true,
        };
        Cache::new(config, Box::new(Claims(bytes))).map(drop)
    };
    let error = made((16 << 40) + (256 << 10)).unwrap_err().to_string();
    assert!(error.contains("the backing") && error.contains("at most 16 TiB"), "{error}");
    assert!(made((2 << 20) - 1).unwrap_err().to_string().contains("at least 2 MiB"));
    made(2 << 20).unwrap();
}

/// Frames are free, but no descriptor is.
#[test]
fn a_store_that_finds_no_descriptor_waits_a_moment_for_one_and_is_then_rejected() {
    let setup = Setup { pages: 1 << 16, pool_bytes: 16 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    // Several frames for each descriptor, then one frame for each.
    let several = (0..area.pages()).find(|offset| {
        let _ = store(&cache, area, *offset, Content::Mixed);
        statistic(&cache, "pool_total_size") >= 14 << 20
    });
    (0..=several.unwrap()).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    // There is a maintaining thread, but it is busy elsewhere.
    cache.wait_for_work(Duration::ZERO);
    let cache = Arc::new(cache);
    let (sender, receiver) = mpsc::channel();
    let storing = cache.clone();
    std::thread::spawn(move || {
        let full = (0..area.pages()).find_map(|offset| {
            let page = page_of(Content::Random, offset.into());
            let stored = storing.store(area.entry(offset).unwrap(), &page);
            (stored != Store::Stored).then_some((offset, stored))
        });
        sender.send(full.unwrap())
    });
    let ended = receiver.recv_timeout(Duration::from_secs(20));
    let (full, stored) = ended.expect("a store tries again and again");
    assert_eq!(stored, Store::Rejected(Reject::AllocFail), "after {full} pages");
    assert!(statistic(&cache, "pool_total_size") < 15 << 20, "frames were left");
    assert_eq!(store(&cache, area, full, Content::Random), Store::Stored);
    cache.check();
}

/// Stores as much as each write frees, in new address space, so that the pool keeps its size.
#[derive(Default)]
struct WritingProgram {
    cache: OnceLock<(Arc<Cache>, Area)>,
    writes: AtomicU32,
}

impl WritingProgram {
    /// The address space of a trunk of the index.
    const STEP: u32 = 4096;
    /// Incompressible pages in a segment.
    const PAGES: u32 = 63;

    /// The pages stored at a write. Each write has its own trunk.
    fn pages(write: u32) -> Range<u32> {
        let first = (write + 8) * Self::STEP;
        first..first + Self::PAGES
    }

    fn store(&self) {
        let Some((cache, area)) = self.cache.get() else { return };
        let write = self.writes.fetch_add(1, Relaxed) + 1;
        assert!(write < 200, "a pass goes on as long as pages are stored");
        for offset in Self::pages(write) {
            let page = page_of(Content::Random, offset.into());
            let stored = cache.store(area.entry(offset).unwrap(), &page);
            assert_eq!(stored, Store::Stored, "page {offset} after {write} writes");
        }
    }
}

/// A backing; a program stores when one of its writes has ended.
struct Beside(TestBacking, Arc<WritingProgram>);

impl Backing for Beside {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(offset, bytes)
    }

    fn submit(&self, write: Write) {
        self.0.submit(write);
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.0.discard(offset, bytes)
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        self.0.complete(wait).inspect(|_| self.1.store())
    }
}

#[test]
fn a_pass_of_writeback_ends_while_stores_go_on_and_stores_get_memory_meanwhile() {
    let setup =
        Setup { pages: 1 << 20, ram_bytes: 128 << 20, pool_bytes: 64 << 20, ..Setup::default() };
    let program = Arc::new(WritingProgram::default());
    let (backing, _) = TestBacking::new(128 << 20, setup.block_bytes);
    let (cache, area) = setup.make_on(Box::new(Beside(backing, program.clone())));
    let cache = Arc::new(cache);
    set(&cache, "accept_threshold_percent", 100);
    let held = 0..60 << 8;
    for offset in held.clone() {
        if offset % 64 == 0 {
            cache.maintain().unwrap();
        }
        let page = page_of(Content::Random, offset.into());
        assert_eq!(cache.store(area.entry(offset).unwrap(), &page), Store::Stored);
    }
    assert_eq!(statistic(&cache, "pool_total_size"), 60 << 20);
    set(&cache, "accept_threshold_percent", 50);
    assert!(program.cache.set((cache.clone(), area)).is_ok());
    cache.maintain().unwrap();
    // The pool was 28 MiB too large, and each write takes 63 pages.
    let writes = program.writes.load(Relaxed);
    assert!((110..125).contains(&writes), "{writes}");
    let stored = (1..=writes).flat_map(WritingProgram::pages);
    held.chain(stored).for_each(|offset| assert_holds(&cache, area, offset, Content::Random));
    cache.check();
}
