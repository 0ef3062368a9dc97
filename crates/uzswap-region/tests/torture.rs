//! Eight threads read, write, drop, page out, pin and fork while the budget changes, regions are
//! mapped and unmapped, the backing fails, and other programs start. Takes seconds; ten minutes
//! with `UZSWAP_FULL=1`.
//!
//! Half of the threads have a pager that copies its regions to forks, the others a pager that does
//! not. `process.rs` shows the effect of an unreadable backing on a process.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::testing::{Faults, Noise, TestBacking};
use uzswap_region::{Advice, Means, Mode, OnFork, Pager, RegionVec};

const MIB: usize = 1 << 20;
const WORDS: usize = 512;
const THREADS: u64 = 8;
const PAGES: usize = 1024;

/// The most time that an expected event may take beyond that.
const PATIENCE: Duration = Duration::from_secs(120);

fn duration() -> Duration {
    Duration::from_secs(if std::env::var_os("UZSWAP_FULL").is_some() { 300 } else { 3 })
}

/// Word `at` of a page at a version. Half of the pages compress badly.
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

    /// Forks a child, which has this content, or no region at all.
    fn fork(&self, on_fork: OnFork) {
        // SAFETY: the child looks at data that this thread alone writes, and exits.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            if on_fork == OnFork::Absent {
                // Another test covers its message. SAFETY: closes a descriptor of the child's own.
                unsafe { libc::close(2) };
            }
            self.check_all();
            // SAFETY: the call ends the child without running the parent's functions for the exit.
            unsafe { libc::_exit(0) };
        }
        let mut status = 0;
        // SAFETY: the call waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        let status = ExitStatus::from_raw(status);
        match on_fork {
            OnFork::PrivateCopy => assert!(status.success(), "a copy: {status}"),
            OnFork::Absent | OnFork::Whole => {
                assert_eq!(status.signal(), Some(libc::SIGSEGV), "{status}")
            }
        }
    }

    fn step(&mut self, noise: &mut Noise, on_fork: OnFork) {
        let page = noise.below(PAGES as u64) as usize;
        let end = (page + 1 + noise.below(100) as usize).min(PAGES);
        let range = page * WORDS..end * WORDS;
        match noise.below(400) {
            // No room is no loss: a page that cannot be evicted stays.
            0 => _ = self.values.advise(range, Advice::PageOut),
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
            5 if noise.below(20) == 0 => self.fork(on_fork),
            5..150 => self.write(page),
            _ => (0..WORDS).step_by(37).for_each(|at| self.check(page, at)),
        }
    }
}

fn pager(mode: Mode, on_fork: OnFork, means: Means) -> (Pager, Arc<Faults>) {
    let (backing, faults) = TestBacking::new(64 * MIB, 4096);
    let pager = Pager::builder().memory("12M").mode(mode).reclaim_threads(2);
    let pager = pager.on_fork(on_fork).means(means);
    (pager.build_on(Box::new(backing)).unwrap(), faults)
}

/// Changes the budget, starts a program, and makes the backing fail for a moment. During that
/// moment there is memory for all pages.
fn meddle(noise: &mut Noise, pager: &Pager, faults: &Faults) {
    let pause = || std::thread::sleep(Duration::from_millis(20));
    pause();
    pager.set_memory((12 + noise.below(6)) << 20).unwrap();
    assert!(std::process::Command::new("/bin/true").status().unwrap().success());
    if noise.below(8) == 0 {
        pager.set_memory(48 << 20).unwrap();
        let fault = if noise.below(2) == 0 { &faults.fail_writes } else { &faults.full };
        fault.store(true, Relaxed);
        (0..5).for_each(|_| pause());
        fault.store(false, Relaxed);
    }
}

fn torture(mode: Mode, means: Means, duration: Duration) {
    let kinds = [OnFork::PrivateCopy, OnFork::Absent];
    let pagers = kinds.map(|on_fork| (on_fork, pager(mode, on_fork, means)));
    let (done, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let run = |seed: u64| {
            let (on_fork, (pager, _)) = &pagers[seed as usize % 2];
            let mut noise = Noise::new(seed);
            let mut owned = Owned::new(pager, seed);
            while !done.load(Relaxed) {
                (0..50).for_each(|_| owned.step(&mut noise, *on_fork));
                if noise.below(200) == 0 {
                    owned.check_all();
                    owned = Owned::new(pager, seed);
                }
            }
            owned.check_all();
        };
        let threads: Vec<_> = (1..=THREADS).map(|seed| scope.spawn(move || run(seed))).collect();
        for (_, (pager, faults)) in &pagers {
            let over = &over;
            scope.spawn(move || {
                let mut noise = Noise::new(99);
                while !over.load(Relaxed) {
                    meddle(&mut noise, pager, faults);
                }
            });
        }
        let began = Instant::now();
        let is_late = || began.elapsed() > duration + PATIENCE;
        let missing = || pagers.iter().any(|(_, (pager, _))| missing(pager).is_some());
        while began.elapsed() < duration || missing() && !is_late() {
            std::thread::sleep(Duration::from_millis(20));
        }
        done.store(true, Relaxed);
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        over.store(true, Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    for (_, (pager, _)) in &pagers {
        assert_eq!(missing(pager), None, "{}", pager.stats());
    }
}

/// An expected event that has not happened yet.
fn missing(pager: &Pager) -> Option<&'static str> {
    let names = ["faults_staged", "stores_unchanged", "written_back_pages", "fault_around_pages"];
    names.into_iter().find(|name| pager.stats().get(name).unwrap() == 0)
}

#[test]
fn nothing_is_lost_whatever_threads_do() {
    for mode in [Mode::InThread, Mode::HandlerThreads] {
        if mode.check().is_ok() {
            torture(mode, Means::Moves, duration());
            // This pager copies pages, as on a kernel that cannot move them.
            torture(mode, Means::Copies, duration() / 5);
        }
    }
}
