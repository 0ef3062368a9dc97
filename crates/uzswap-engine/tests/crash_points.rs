//! The process is killed at every single store to memory that outlives it; each time another
//! process takes the cache over and every page is right.
//!
//! No process is killed here. Before each store the test copies the memory and the backing, as a
//! kill would leave them. Another cache takes the copy over, and then the store continues. A scene
//! sets a cache up, and then makes the transitions whose stores are tried. All scenes together make
//! every transition of the table in `index/entry/transition.rs`.

#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "crash_points/device.rs"]
mod device;

use device::backing;
use rustix::fs::{MemfdFlags, SeekFrom, fstat, ftruncate, memfd_create, seek};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use uzswap_engine::backing::Backing;
use uzswap_engine::testing::{Content, Faults, page_of};
use uzswap_engine::{
    Area, Cache, Config, Load, PAGE_BYTES, Page, Store, TRANSITIONS, crash_points,
};

/// Two trunks of the index.
const PAGES: u32 = 8192;
const BACKING_BYTES: usize = 4 << 20;

/// The process that is copied as if it were killed.
struct Watched {
    memory: File,
    backing: Arc<Faults>,
    model: Model,
    called: Called,
    seals: bool,
    /// True if the process that takes over is killed at each store, too.
    twice: bool,
    scene: &'static str,
    /// The last transition, how often it was made, and the stores since.
    transition: &'static str,
    times: BTreeMap<&'static str, usize>,
    stores: usize,
    places: usize,
}

/// The expected pages: as last stored, or absent.
type Model = BTreeMap<u32, Page>;
/// Pages that unfinished calls change; the process that takes over repeats the calls.
type Called = BTreeMap<u32, Option<Page>>;

thread_local! {
    static WATCHED: RefCell<Option<Watched>> = const { RefCell::new(None) };
    static MADE: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

/// A copy of a sparse file.
fn copy(file: &File) -> OwnedFd {
    let copy: File = memfd_create("copy", MemfdFlags::empty()).unwrap().into();
    let bytes = fstat(file).unwrap().st_size as u64;
    ftruncate(&copy, bytes).unwrap();
    let mut end = 0;
    while let Ok(start) = seek(file, SeekFrom::Data(end)) {
        end = seek(file, SeekFrom::Hole(start)).unwrap();
        let mut content = vec![0; (end - start) as usize];
        file.read_exact_at(&mut content, start).unwrap();
        copy.write_all_at(&content, start).unwrap();
    }
    copy.into()
}

/// A crash point: another cache takes over a copy of the memory.
fn stop() {
    let Some(mut watched) = WATCHED.take() else { return };
    if watched.is_new() {
        crash_points::watch(None, Some(note));
        watched.places += 1;
        watched.take_over();
        crash_points::watch(Some(stop), Some(note));
    }
    watched.stores += 1;
    WATCHED.set(Some(watched));
}

fn note(transition: &'static str) {
    MADE.with_borrow_mut(|made| made.insert(transition));
    WATCHED.with_borrow_mut(|watched| {
        if let Some(watched) = watched {
            watched.transition = transition;
            *watched.times.entry(transition).or_default() += 1;
            watched.stores = 0;
        }
    });
}

impl Watched {
    /// True if a point like this was not tried often enough. A writeback makes some transitions a
    /// hundred times, and a dictionary is copied byte by byte.
    fn is_new(&self) -> bool {
        let times = self.times.get(self.transition).copied().unwrap_or(0);
        // Tries only one in five of the points at which the next process is killed too.
        let is_one = !self.twice || self.stores % 5 == 1;
        is_full() || is_one && times < 3 && (self.stores < 64 || self.stores.is_multiple_of(512))
    }

    fn take_over(&self) {
        let (memory, content) = (copy(&self.memory), self.backing.tamper(|all| all.to_vec()));
        let (backing, faults) = backing(Some(&content));
        let Self { scene, transition, stores, .. } = self;
        let place = format!("{scene}: {stores} stores after {transition}");
        if self.twice {
            let memory = memory.try_clone().unwrap().into();
            let (model, called) = (self.model.clone(), self.called.clone());
            let (times, stores) = (BTreeMap::new(), 0);
            let (twice, transition) = (false, "the start of the recovery");
            let backing = faults;
            WATCHED.set(Some(Self {
                memory,
                backing,
                model,
                called,
                twice,
                transition,
                times,
                stores,
                ..*self
            }));
            crash_points::watch(Some(stop), Some(note));
        }
        let (cache, area) = open(memory, backing, self.seals);
        crash_points::watch(None, None);
        drop(WATCHED.take());
        self.compare(&cache, area, &place);
    }

    /// Compares the model with a cache that was taken over.
    fn compare(&self, cache: &Cache, area: Area, place: &str) {
        cache.check();
        for offset in 0..PAGES {
            let expected = self.model.get(&offset);
            let found = look(cache, area, offset);
            let Some(new) = self.called.get(&offset) else {
                assert!(found.as_ref() == Ok(&expected.copied()), "{place}: page {offset}");
                continue;
            };
            // Until the call is repeated the page may be lost, but nothing else.
            let is_one =
                |page: &Option<Page>| page.is_none() || *page == expected.copied() || page == new;
            assert!(found.as_ref().map_or(true, is_one), "{place}: page {offset}");
        }
        for (offset, new) in &self.called {
            put(cache, area, *offset, new.as_ref());
            assert!(look(cache, area, *offset).as_ref() == Ok(new), "{place}: page {offset} again");
        }
        // The cache works like one that was never interrupted.
        cache.maintain().unwrap();
        cache.recompress(2);
        cache.shrink(1 << 20);
        cache.check();
        for (offset, page) in &self.model {
            let page = self.called.get(offset).copied().unwrap_or(Some(*page));
            assert!(look(cache, area, *offset) == Ok(page), "{place}: page {offset}, later");
        }
        (0..PAGES).filter_map(|offset| area.entry(offset)).for_each(|key| cache.invalidate(key));
        cache.maintain().unwrap();
        cache.check();
        let left = |what| cache.statistic(what).unwrap();
        assert_eq!((left("stored_pages"), left("compressed_bytes")), (0, 0), "{place}");
    }
}

fn is_full() -> bool {
    std::env::var_os("UZSWAP_FULL").is_some()
}

/// A cache in memory that outlives it.
fn open(memory: OwnedFd, backing: Box<dyn Backing>, seals: bool) -> (Cache, Area) {
    let config = Config {
        pages_max: PAGES,
        ram_bytes: 8 << 20,
        ram_bytes_max: 8 << 20,
        pool_bytes_max: 8 << 20,
        algorithm: "lz4".parse().unwrap(),
        seals_backing: seals,
    };
    let cache = Cache::in_file(config, backing, memory).unwrap();
    let area = cache.add_area(PAGES).unwrap();
    (cache, area)
}

/// A cache, and its expected content.
struct World {
    cache: Cache,
    area: Area,
    model: Model,
    /// Pages that the transitions store or drop; the process that takes over repeats the call.
    called: Called,
    memory: File,
    faults: Arc<Faults>,
    seals: bool,
    twice: bool,
}

impl World {
    fn new(seals: bool) -> Self {
        let memory = memfd_create("cache", MemfdFlags::empty()).unwrap();
        let file = memory.try_clone().unwrap().into();
        let (backing, faults) = backing(None);
        let (cache, area) = open(memory, backing, seals);
        let (model, called) = (Model::new(), Called::new());
        Self { cache, area, model, called, memory: file, faults, seals, twice: false }
    }

    fn store(&mut self, offset: u32, page: Page) {
        put(&self.cache, self.area, offset, Some(&page));
        self.model.insert(offset, page);
    }

    fn store_many(&mut self, offsets: impl Iterator<Item = u32>, content: Content) {
        for offset in offsets {
            if offset.is_multiple_of(128) {
                self.cache.maintain().unwrap();
            }
            self.store(offset, page_of(content, offset.into()));
        }
    }

    fn drop_page(&mut self, offset: u32) {
        put(&self.cache, self.area, offset, None);
        self.model.remove(&offset);
    }

    /// Stores a page past the pool.
    fn store_through(&mut self, offset: u32) {
        let page = page_of(Content::Random, offset.into());
        let key = self.area.entry(offset).unwrap();
        assert_eq!(self.cache.store_through(key, &page), Store::Stored);
        self.model.insert(offset, page);
    }

    /// Notes the change that the transitions make to a page.
    fn calls(&mut self, offset: u32, page: Option<Page>) {
        self.called.insert(offset, page);
    }

    /// Makes the transitions, with all crash points tried.
    fn act(self, scene: &'static str, act: impl FnOnce(&Cache, Area)) {
        let watched = Watched {
            memory: self.memory,
            backing: self.faults,
            model: self.model,
            called: self.called,
            seals: self.seals,
            twice: self.twice,
            scene,
            transition: "the start",
            times: BTreeMap::new(),
            stores: 0,
            places: 0,
        };
        WATCHED.set(Some(watched));
        crash_points::watch(Some(stop), Some(note));
        act(&self.cache, self.area);
        crash_points::watch(None, None);
        let watched = WATCHED.take().unwrap();
        watched.take_over();
        self.cache.check();
        println!("{scene}: {} places", watched.places);
    }
}

fn put(cache: &Cache, area: Area, offset: u32, page: Option<&Page>) {
    let key = area.entry(offset).unwrap();
    match page {
        None => cache.invalidate(key),
        Some(page) => {
            let stored = cache.store(key, page) == Store::Stored
                || cache.store_through(key, page) == Store::Stored;
            assert!(stored, "there is room for all of them");
        }
    }
}

fn look(cache: &Cache, area: Area, offset: u32) -> Result<Option<Page>, String> {
    let mut page = [0; PAGE_BYTES];
    match cache.load(area.entry(offset).unwrap(), &mut page) {
        Ok(Load::Hit) => Ok(Some(page)),
        Ok(Load::Absent) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// A small heap page, which gains in a unit.
fn heap_page(seed: u32) -> Page {
    let mut page = page_of(Content::Text, u64::from(seed));
    let words = page.as_chunks_mut::<8>().0.iter_mut().skip(64).enumerate();
    words.for_each(|(at, word)| {
        let value =
            if at.is_multiple_of(3) { 0x7f12_3456_0000 + u64::from(seed) * 4096 } else { 0 };
        *word = value.to_ne_bytes();
    });
    page
}

impl World {
    /// Stores heap pages and recompresses them: units of sixteen.
    fn recompressed(seals: bool, pages: u32) -> Self {
        let mut world = Self::new(seals);
        (0..pages).for_each(|offset| world.store(offset, heap_page(offset)));
        world.cache.maintain().unwrap();
        assert_eq!(world.cache.recompress(1000), pages as usize);
        assert_eq!(world.statistic("recompressed_pages"), u64::from(pages));
        world
    }

    /// Stores pages and writes them to the backing.
    fn placed(seals: bool, pages: u32) -> Self {
        let mut world = Self::new(seals);
        world.store_many(0..pages, Content::Mixed);
        world.cache.shrink(usize::MAX);
        assert_eq!(world.statistic("backing_pages"), u64::from(pages));
        world
    }

    fn statistic(&self, name: &str) -> u64 {
        self.cache.statistic(name).unwrap()
    }

    /// Makes a call that stores or drops a page.
    fn call(mut self, scene: &'static str, offset: u32, page: Option<Page>) {
        self.calls(offset, page);
        self.act(scene, |cache, area| put(cache, area, offset, page.as_ref()));
    }
}

fn mixed(seed: u64) -> Page {
    page_of(Content::Mixed, 1000 + seed)
}

fn stores(seals: bool) {
    let pooled = || {
        let mut world = World::new(seals);
        world.store_many(0..20, Content::Mixed);
        world
    };
    pooled().call("a page is stored", 30, Some(mixed(0)));
    pooled().call("the first of a trunk", 5000, Some(mixed(0)));
    pooled().call("over one in the pool", 3, Some(page_of(Content::Text, 7)));
    pooled().call("over one, as it was", 3, Some(page_of(Content::Mixed, 3)));
    pooled().call("one that does not compress", 30, Some(page_of(Content::Random, 7)));
    pooled().call("one word repeated", 3, Some([7; PAGE_BYTES]));
    World::placed(seals, 20).call("over one on the backing", 3, Some(mixed(0)));
    World::recompressed(seals, 16).call("over one in a unit", 3, Some(mixed(0)));
    pooled().call("one in the pool is dropped", 3, None);
    World::placed(seals, 20).call("one on the backing is dropped", 3, None);
    World::placed(seals, 1).call("the only one in its segment is dropped", 0, None);
    World::recompressed(seals, 16).call("one in a unit is dropped", 3, None);
    let mut last = World::recompressed(seals, 16);
    (1..16).for_each(|offset| last.drop_page(offset));
    last.call("the last in a unit is dropped", 0, None);
    let mut exclusive = pooled();
    exclusive.calls(3, None);
    exclusive.act("a page is loaded and dropped", |cache, area| {
        let loaded = cache.load_exclusive(area.entry(3).unwrap(), &mut [0; PAGE_BYTES]);
        assert_eq!(loaded.unwrap(), Load::Hit);
    });
    pooled().act("a page is loaded", |cache, area| {
        assert!(look(cache, area, 3).unwrap().is_some());
    });
}

/// Pages, one of which is about to be shared.
fn unshared(seals: bool) -> World {
    let mut world = World::new(seals);
    world.store_many(0..20, Content::Mixed);
    // The first page that might be shared asks for records.
    world.store(100, page_of(Content::Mixed, 5));
    world.cache.maintain().unwrap();
    world
}

/// Two pages that share a record, which is in a unit with others or alone in it; the second is to
/// be dropped.
fn record_in_unit(seals: bool, others: bool) -> World {
    let mut member = World::new(seals);
    (0..16).for_each(|offset| member.store(offset, heap_page(offset)));
    member.store(20, heap_page(3));
    member.cache.maintain().unwrap();
    member.store(20, [0; PAGE_BYTES]);
    member.store(20, heap_page(3));
    assert_eq!(member.statistic("shared_pages"), 2);
    assert_eq!(member.cache.recompress(1), 16);
    member.drop_page(3);
    if !others {
        (0..16).filter(|offset| *offset != 3).for_each(|offset| member.drop_page(offset));
    }
    member
}

fn shares(seals: bool) {
    let same = page_of(Content::Mixed, 3);
    let one = || unshared(seals);
    let shared = |pages: u32| {
        let mut world = one();
        (0..pages).for_each(|offset| world.store(40 + offset, same));
        assert_eq!(world.statistic("shared_pages"), u64::from(pages) + 1);
        world
    };
    one().call("a page is the same as another", 40, Some(same));
    shared(1).call("as two others", 50, Some(same));
    shared(2).call("one that shares is dropped", 40, None);
    let mut last = shared(1);
    last.drop_page(3);
    last.call("the last that shares is dropped", 40, None);
    let mut placed = shared(1);
    placed.cache.shrink(usize::MAX);
    placed.drop_page(3);
    placed.call("the last that shares what is on the backing is dropped", 40, None);
    record_in_unit(seals, true).call("a record leaves its unit", 20, None);
    record_in_unit(seals, false).call("the last of its unit", 20, None);
}

fn writeback(seals: bool) {
    let pooled = |content| {
        let mut world = World::new(seals);
        world.store_many(0..40, content);
        assert!(look(&world.cache, world.area, 5).unwrap().is_some());
        world
    };
    pooled(Content::Mixed).act("pages are written back", |cache, _| {
        cache.shrink(usize::MAX);
    });
    let failing = pooled(Content::Mixed);
    let faults = failing.faults.clone();
    failing.act("a write fails", |cache, _| {
        faults.fail_writes.store(true, Relaxed);
        cache.shrink(usize::MAX);
        faults.fail_writes.store(false, Relaxed);
        cache.resume_writeback();
    });
    let units = World::recompressed(seals, 32);
    units.act("units are written back", |cache, _| {
        cache.shrink(usize::MAX);
    });
    let through = |mut world: World, scene, offset| {
        let page = page_of(Content::Random, 77);
        world.calls(offset, Some(page));
        world.act(scene, |cache, area| {
            let key = area.entry(offset).unwrap();
            assert_eq!(cache.store_through(key, &page), Store::Stored);
        });
    };
    through(pooled(Content::Mixed), "a page is written through", 50);
    through(pooled(Content::Mixed), "over one in the pool", 5);
    let mut single = pooled(Content::Mixed);
    single.store_through(60);
    through(single, "over one written through", 60);
    through(World::placed(seals, 20), "over one in a segment", 5);
}

/// Fills the backing except three segments, and drops most of these pages.
fn nearly_full(seals: bool, single: bool) -> World {
    let mut world = World::new(seals);
    // A segment at a time.
    let pages = if single { 64 } else { 160 };
    let end = (BACKING_BYTES as u32 >> 18) - 3;
    for segment in 0..end {
        for offset in segment * pages..(segment + 1) * pages {
            match single {
                true => world.store_through(offset),
                false => world.store(offset, page_of(Content::Mixed, offset.into())),
            }
        }
        world.cache.shrink(usize::MAX);
    }
    let kept = |offset: &u32| offset.is_multiple_of(61);
    (0..end * pages).filter(|offset| !kept(offset)).for_each(|offset| world.drop_page(offset));
    world
}

fn cleaning(seals: bool) {
    for (scene, single) in [("segments are cleaned", false), ("single pages are packed", true)] {
        let mut world = nearly_full(seals, single);
        world.store_many(4000..4400, Content::Mixed);
        let before = world.statistic("segments_cleaned");
        let cleaned = RefCell::new(0);
        world.act(scene, |cache, _| {
            cache.shrink(usize::MAX);
            *cleaned.borrow_mut() = cache.statistic("segments_cleaned").unwrap() - before;
        });
        assert!(cleaned.into_inner() > 0, "{scene}: none");
    }
}

fn recompression(seals: bool) {
    let mut world = World::new(seals);
    (0..20).for_each(|offset| world.store(offset, heap_page(offset)));
    assert!(look(&world.cache, world.area, 5).unwrap().is_some());
    world.act("pages are recompressed", |cache, _| assert_eq!(cache.recompress(1), 16));
    let mut poor = World::new(seals);
    poor.store_many(0..20, Content::Random);
    poor.act("pages gain nothing", |cache, _| assert!(cache.recompress(1) > 0));
    let mut left = World::recompressed(seals, 32);
    (0_u32..32).filter(|offset| offset.is_multiple_of(2)).for_each(|offset| left.drop_page(offset));
    left.act("what is left in two units goes into one", |cache, _| {
        assert_eq!(cache.recompress(1), 16);
    });
}

fn moves(seals: bool) {
    let holed = || {
        let mut world = World::new(seals);
        world.store_many(0..600, Content::Mixed);
        (0..600)
            .filter(|offset: &u32| !offset.is_multiple_of(4))
            .for_each(|offset| world.drop_page(offset));
        world
    };
    holed().act("objects are moved together", |cache, _| {
        cache.maintain().unwrap();
        assert!(cache.statistic("pages_compacted").unwrap() > 0);
    });
    let mut roomy = holed();
    roomy.store_many(1000..1500, Content::Random);
    (1000..1500).for_each(|offset| roomy.drop_page(offset));
    roomy.act("a section is emptied", |cache, _| {
        let (section, _) = cache.sections()[0];
        cache.empty_section(section).unwrap();
    });
    let mut large = World::new(seals);
    large.store_many(0..900, Content::Random);
    large.cache.maintain().unwrap();
    (0..900).for_each(|offset| large.drop_page(offset));
    large.store_many(5000..5010, Content::Mixed);
    large.act("memory and a trunk are given back", |cache, _| cache.maintain().unwrap());
    let mut trained = World::new(seals);
    trained.cache.set_attribute("compressor", "zstd").unwrap();
    trained.store_many(0..400, Content::Pointers);
    let page = page_of(Content::Pointers, 1000);
    trained.calls(3, Some(page));
    trained.act("a dictionary is trained and used", |cache, area| {
        assert!(cache.train());
        put(cache, area, 3, Some(&page));
    });
    holed().act("an attribute changes", |cache, _| {
        cache.set_attribute("compressor", "zstd:3").unwrap();
    });
}

#[test]
fn a_process_killed_at_any_store_leaves_every_page() {
    stores(true);
    shares(true);
    writeback(true);
    recompression(true);
    moves(true);
    cleaning(true);
    let made = MADE.take();
    let missing: Vec<_> = TRANSITIONS.iter().filter(|name| !made.contains(*name)).collect();
    assert!(missing.is_empty(), "no scene makes {missing:?}");
}

#[test]
fn a_process_killed_at_any_store_leaves_every_page_with_a_plain_backing_too() {
    stores(false);
    writeback(false);
    cleaning(false);
}

#[test]
fn a_recovery_killed_at_any_store_leaves_every_page() {
    let twice = |world| World { twice: true, ..world };
    let same = page_of(Content::Mixed, 3);
    twice(unshared(true)).call("a page is the same as another", 40, Some(same));
    twice(record_in_unit(true, false)).call("the last of a unit is dropped", 20, None);
    twice(World::placed(true, 20)).call("over one on the backing", 3, Some(mixed(0)));
    let mut few = World::new(false);
    few.store_many(0..4, Content::Mixed);
    twice(few).act("pages are written back", |cache, _| _ = cache.shrink(usize::MAX));
}
