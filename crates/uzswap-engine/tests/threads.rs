//! Many threads make all calls of one cache at the same time. Each returned page must be a page
//! that a correct cache may return.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Area, Cache, Load, PAGE_BYTES, Page, Store, SwapEntry};

const THREADS: u64 = 4;
/// Keys that one thread writes and all threads read, without a lock.
const OWNED: u64 = 800;
/// Keys that all threads write, each under a lock.
const LOCKED: u64 = 800;

fn duration() -> Duration {
    Duration::from_secs(if std::env::var_os("UZSWAP_FULL").is_some() { 60 } else { 2 })
}

/// The content of version `version` of a page: absent for a third, and one of a few shared contents
/// for a third.
fn version_page(key: u64, version: u64) -> Option<Page> {
    match version % 3 {
        0 => None,
        1 => Some(page_of(Content::Pointers, version / 3 % 16)),
        _ => Some(page_of(Content::pick(version / 3), key << 32 | version)),
    }
}

/// The versions of a key. A reader may see the version that was complete when its read began, the
/// version that was begun when its read ended, or any between them.
#[derive(Default)]
struct Versions {
    begun: AtomicU64,
    done: AtomicU64,
}

struct Stress {
    cache: Cache,
    area: Area,
    owned: Vec<Versions>,
    locked: Vec<Mutex<Option<Page>>>,
    /// Rejected stores, after which a page is absent for a while.
    rejected: AtomicU64,
}

impl Stress {
    fn new() -> Self {
        let setup =
            Setup { pages: (OWNED + LOCKED) as u32, backing_bytes: 16 << 20, ..Setup::default() };
        let (cache, area, _) = setup.make();
        Self {
            cache,
            area,
            owned: (0..OWNED).map(|_| Versions::default()).collect(),
            locked: (0..LOCKED).map(|_| Mutex::new(None)).collect(),
            rejected: AtomicU64::new(0),
        }
    }

    fn entry(&self, key: u64) -> SwapEntry {
        self.area.entry(key as u32).unwrap()
    }

    /// Repeats the store until it succeeds, since the only thread that brings memory on line may be
    /// late. Counts a rejected store when it succeeds, so that a reader that found no page sees the
    /// count change.
    fn store(&self, key: u64, page: &Page) {
        let mut was_rejected = 0;
        while self.cache.store(self.entry(key), page) != Store::Stored {
            was_rejected = 1;
            self.rejected.fetch_add(1, SeqCst);
            self.cache.maintain().unwrap();
        }
        self.rejected.fetch_add(was_rejected, SeqCst);
    }

    /// The next version of a key that this thread owns.
    fn write_owned(&self, key: u64) {
        let versions = &self.owned[key as usize];
        let version = versions.begun.load(SeqCst) + 1;
        versions.begun.store(version, SeqCst);
        match version_page(key, version) {
            Some(page) => self.store(key, &page),
            None if version.is_multiple_of(2) => self.cache.invalidate(self.entry(key)),
            None => {
                let mut page = [0; PAGE_BYTES];
                let loaded = self.cache.load_exclusive(self.entry(key), &mut page).unwrap();
                let before = version_page(key, version - 1);
                assert_eq!(loaded == Load::Hit, before.is_some(), "key {key} at {version}");
                assert!(before.is_none_or(|before| before == page), "key {key} at {version}");
            }
        }
        versions.done.store(version, SeqCst);
    }

    fn read_owned(&self, key: u64) {
        let versions = &self.owned[key as usize];
        let rejected = self.rejected.load(SeqCst);
        let oldest = versions.done.load(SeqCst);
        let mut page = [0xcc; PAGE_BYTES];
        let loaded = self.cache.load(self.entry(key), &mut page).unwrap();
        let newest = versions.begun.load(SeqCst);
        let got = (loaded == Load::Hit).then_some(page);
        if (oldest..=newest).any(|version| version_page(key, version) == got) {
            return;
        }
        // Absent is also right while a rejected store is repeated; it is counted later.
        while versions.done.load(SeqCst) < newest {
            std::thread::yield_now();
        }
        let excused = got.is_none() && self.rejected.load(SeqCst) > rejected;
        assert!(excused, "key {key}, versions {oldest} to {newest}: {loaded:?}, of none of them");
    }

    fn use_locked(&self, number: u64, noise: &mut Noise) {
        let key = OWNED + number;
        let mut held = self.locked[number as usize].lock().unwrap();
        let mut page = [0xcc; PAGE_BYTES];
        let take = match noise.below(8) {
            0..3 => {
                let content = Content::pick(noise.word());
                let stored = page_of(content, noise.below(200));
                self.store(key, &stored);
                *held = Some(stored);
                return;
            }
            3 => {
                self.cache.invalidate(self.entry(key));
                *held = None;
                return;
            }
            4 => true,
            _ => false,
        };
        let loaded = match take {
            true => self.cache.load_exclusive(self.entry(key), &mut page).unwrap(),
            false => self.cache.load(self.entry(key), &mut page).unwrap(),
        };
        assert!((loaded == Load::Hit).then_some(page) == *held, "key {key}: {loaded:?}");
        if take {
            *held = None;
        }
    }

    /// The actions of an operator and of the maintaining thread.
    fn disturb(&self, noise: &mut Noise) {
        let compressors = ["lz4", "zstd", "lzo", "deflate", "wkdm", "raw", "zstd:3"];
        match noise.below(8) {
            0 => drop(self.cache.shrink(noise.below(2 << 20) as usize)),
            1 => {
                let compressor = compressors[noise.below(6) as usize];
                self.cache.set_attribute("compressor", compressor).unwrap();
            }
            // These calls may fail because a section is busy or absent.
            2 => {
                let section = noise.below(3) as usize;
                drop(self.cache.empty_section(section));
                drop(self.cache.set_section(section, "offline"));
                drop(self.cache.set_section(section, "online"));
            }
            3 => {
                let limit = ((1 + noise.below(8)) << 20).to_string();
                self.cache.set_attribute("max_pool_bytes", &limit).unwrap();
            }
            4 => {
                let states = self.cache.cpu_state_names();
                let cpu = noise.below(self.cache.cpu_states().len() as u64) as usize;
                // The error that this is the last CPU is an answer.
                drop(self.cache.set_cpu(cpu, states[noise.below(states.len() as u64) as usize]));
            }
            _ => self.cache.maintain().unwrap(),
        }
    }

    fn run(&self, thread: u64, until: Instant) -> u64 {
        let mut noise = Noise::new(thread + 1);
        let mut operations = 0;
        while Instant::now() < until {
            for _ in 0..100 {
                match noise.below(200) {
                    0 => self.disturb(&mut noise),
                    1..60 => self.write_owned(noise.below(OWNED / THREADS) * THREADS + thread),
                    60..130 => self.read_owned(noise.below(OWNED)),
                    _ => self.use_locked(noise.below(LOCKED), &mut noise),
                }
                operations += 1;
            }
        }
        operations
    }
}

#[test]
fn threads_load_only_pages_that_were_stored() {
    let stress = Stress::new();
    let until = Instant::now() + duration();
    let operations: u64 = std::thread::scope(|scope| {
        let run = |thread| stress.run(thread, until);
        let threads: Vec<_> = (0..THREADS).map(|t| scope.spawn(move || run(t))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    for key in 0..OWNED {
        stress.read_owned(key);
    }
    for (number, held) in (0..).zip(&stress.locked) {
        let mut page = [0xcc; PAGE_BYTES];
        let loaded = stress.cache.load(stress.entry(OWNED + number), &mut page).unwrap();
        assert!((loaded == Load::Hit).then_some(page) == *held.lock().unwrap());
    }
    stress.cache.check();
    let statistic = |name| stress.cache.statistic(name).unwrap();
    println!("{operations} operations, {} rejected", stress.rejected.load(SeqCst));
    for name in ["duplicate_pages", "written_back_pages", "loads_backing", "pages_compacted"] {
        assert!(statistic(name) > 0, "{name}");
    }
}
