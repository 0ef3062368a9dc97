//! Eight threads that read, write, drop, take out and pin what is theirs, while the budget changes,
//! regions come and go, and other programs are started. Seconds; ten minutes with `UZSWAP_FULL=1`.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::testing::{Noise, TestBacking};
use uzswap_region::{Advice, Mode, Pager, RegionVec};

const MIB: usize = 1 << 20;
const WORDS: usize = 512;
const THREADS: u64 = 8;
const PAGES: usize = 1024;

fn duration() -> Duration {
    Duration::from_secs(if std::env::var_os("UZSWAP_FULL").is_some() { 300 } else { 3 })
}

/// What word `at` of a page at a version is. Half of the pages compress badly.
fn word(seed: u64, version: u32, at: usize) -> u64 {
    match version {
        0 => 0,
        _ if version.is_multiple_of(2) => seed << 32 | u64::from(version),
        _ => {
            let mixed = (seed << 40 ^ u64::from(version) << 20 ^ at as u64)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
        }
    }
}

/// One thread's pages, and the version that each must have.
struct Owned {
    values: RegionVec<u64>,
    versions: Vec<u32>,
    seed: u64,
}

impl Owned {
    fn new(pager: &Pager, seed: u64) -> Self {
        let values = pager.vec_zeroed(PAGES * WORDS).unwrap();
        let mut owned = Self { values, versions: vec![0; PAGES], seed };
        (0..PAGES).for_each(|page| owned.write(page));
        owned
    }

    fn seed_of(&self, page: usize) -> u64 {
        self.seed * PAGES as u64 + page as u64
    }

    fn check(&self, page: usize, at: usize) {
        let (version, found) = (self.versions[page], self.values[page * WORDS + at]);
        assert_eq!(
            found,
            word(self.seed_of(page), version, at),
            "word {at} of page {page} at {version}"
        );
    }

    fn check_all(&self) {
        (0..PAGES).for_each(|page| (0..WORDS).for_each(|at| self.check(page, at)));
    }

    fn write(&mut self, page: usize) {
        let version = self.versions[page] + 1;
        for at in 0..WORDS {
            self.values[page * WORDS + at] = word(self.seed_of(page), version, at);
        }
        self.versions[page] = version;
    }

    fn step(&mut self, noise: &mut Noise) {
        let page = noise.below(PAGES as u64) as usize;
        let end = (page + 1 + noise.below(100) as usize).min(PAGES);
        let range = page * WORDS..end * WORDS;
        match noise.below(400) {
            0 => self.values.advise(range, Advice::PageOut).unwrap(),
            1 => {
                self.values.clear(range).unwrap();
                self.versions[page..end].fill(0);
            }
            2 => {
                let _pinned = self.values.pin(range).unwrap();
                (page..end).for_each(|page| self.check(page, 1));
            }
            3 => (page..end).for_each(|page| self.check(page, 0)),
            4 => self.values.touch(range).unwrap(),
            5..150 => self.write(page),
            _ => (0..WORDS).step_by(37).for_each(|at| self.check(page, at)),
        }
    }
}

fn torture(mode: Mode) {
    let (backing, _) = TestBacking::new(128 * MIB, 4096);
    let pager = Pager::builder().memory("16M").mode(mode).reclaim_threads(2);
    let pager = pager.build_on(Box::new(backing)).unwrap();
    let (until, over) = (Instant::now() + duration(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let run = |seed: u64| {
            let mut noise = Noise::new(seed);
            let mut owned = Owned::new(&pager, seed);
            while Instant::now() < until {
                (0..50).for_each(|_| owned.step(&mut noise));
                if noise.below(200) == 0 {
                    owned.check_all();
                    owned = Owned::new(&pager, seed);
                }
            }
            owned.check_all();
        };
        let threads: Vec<_> = (1..=THREADS).map(|seed| scope.spawn(move || run(seed))).collect();
        scope.spawn(|| {
            let mut noise = Noise::new(99);
            while !over.load(Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
                pager.set_memory((12 + noise.below(12)) << 20).unwrap();
                assert!(std::process::Command::new("/bin/true").status().unwrap().success());
            }
        });
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    let stats = pager.stats();
    for name in ["faults_staged", "stores_unchanged", "written_back_pages", "fault_around_pages"] {
        assert!(stats.get(name).unwrap() > 0, "{name}: {stats}");
    }
}

#[test]
fn nothing_is_lost_whatever_threads_do() {
    for mode in [Mode::InThread, Mode::HandlerThreads] {
        if mode.check().is_ok() {
            torture(mode);
        }
    }
}
