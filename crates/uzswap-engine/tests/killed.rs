//! A process with a cache is killed at random moments, again and again; each time another
//! process takes the cache over and every page is right.
//!
//! Three threads store, drop and load pages of their own while a fourth writes back, recompresses,
//! compacts, trains and changes the compressor. A file has two versions of each page: the version
//! that is about to be stored, and the previous one.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "a test")]

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, FileBacking};
use uzswap_engine::testing::{Content, Noise, page_of};
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, Store};

const THREADS: u32 = 3;
/// Pages of each thread; together three times the pool.
const PAGES: u32 = 3000;
const POOL_BYTES: u64 = 8 << 20;
const BACKING_BYTES: u64 = 48 << 20;

/// With this in its environment the test is the process that is killed; the value has its
/// parameters.
const CHILD: &str = "UZSWAP_KILLED_CHILD";

/// Parameters of a run.
#[derive(Clone, Copy)]
struct Scenario {
    compressor: &'static str,
    seals: bool,
}

const SETTINGS: [Scenario; 3] = [
    Scenario { compressor: "zstd", seals: true },
    Scenario { compressor: "lz4", seals: false },
    Scenario { compressor: "wkdm", seals: true },
];

/// Everything that outlives a process.
struct Left {
    memory: OwnedFd,
    versions: File,
    backing: PathBuf,
    setting: Scenario,
}

impl Left {
    fn open(&self) -> (Cache, Area) {
        let file = File::options().read(true).write(true).open(&self.backing).unwrap();
        let backing: Box<dyn Backing> = Box::new(FileBacking::new(file, BACKING_BYTES).unwrap());
        let config = Config {
            pages_max: THREADS * PAGES + 8192,
            ram_bytes: 64 << 20,
            ram_bytes_max: 64 << 20,
            pool_bytes_max: POOL_BYTES,
            algorithm: self.setting.compressor.parse().unwrap(),
            seals_backing: self.setting.seals,
        };
        let memory = self.memory.try_clone().unwrap();
        let cache = Cache::in_file(config, backing, memory).unwrap();
        let area = cache.add_area(THREADS * PAGES).unwrap();
        (cache, area)
    }

    /// The version with which a call has last begun, and the version with which a call has last
    /// ended.
    fn versions(&self, page: u32) -> (u64, u64) {
        let mut words = [0; 16];
        self.versions.read_exact_at(&mut words, u64::from(page) * 16).unwrap();
        let (begun, done) = words.split_at(8);
        (
            u64::from_ne_bytes(begun.try_into().unwrap()),
            u64::from_ne_bytes(done.try_into().unwrap()),
        )
    }

    fn begin(&self, page: u32, version: u64) {
        self.versions.write_all_at(&version.to_ne_bytes(), u64::from(page) * 16).unwrap();
    }

    fn end(&self, page: u32, version: u64) {
        self.versions.write_all_at(&version.to_ne_bytes(), u64::from(page) * 16 + 8).unwrap();
    }
}

/// The content of a version of a page; `None` if the page is absent.
fn content(page: u32, version: u64) -> Option<[u8; PAGE_BYTES]> {
    let mut noise = Noise::new(version);
    let kind = noise.below(16);
    if version == 0 || kind == 0 {
        return None;
    }
    let (content, shared) = (Content::pick(noise.word()), noise.below(24));
    // Some pages are identical to others.
    let seed = if kind < 4 { shared } else { version << 32 | u64::from(page) };
    Some(page_of(content, seed))
}

fn put(cache: &Cache, area: Area, page: u32, version: u64) {
    let key = area.entry(page).unwrap();
    match content(page, version) {
        None => cache.invalidate(key),
        Some(bytes) => {
            let stored = cache.store(key, &bytes) == Store::Stored
                || cache.store_through(key, &bytes) == Store::Stored;
            assert!(stored, "there is room for all of them");
        }
    }
}

/// Which of two versions a page is.
fn look(cache: &Cache, area: Area, page: u32, versions: [u64; 2]) -> Result<u64, String> {
    let mut bytes = [0; PAGE_BYTES];
    let loaded = match cache.load(area.entry(page).unwrap(), &mut bytes) {
        Ok(Load::Hit) => Some(bytes),
        Ok(Load::Absent) => None,
        Err(error) => return Err(format!("page {page}: {error}")),
    };
    let found = versions.into_iter().find(|version| content(page, *version) == loaded);
    found.ok_or_else(|| {
        let what = loaded.map(|_| "other bytes").unwrap_or("absent");
        format!("page {page} is neither of {versions:?} but {what}")
    })
}

/// Uses the cache until it is killed.
fn child(left: &Left, seed: u64) {
    let (cache, area) = left.open();
    let failed = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, left, failed) = (&cache, &left, &failed);
            scope.spawn(move || {
                uzswap_engine::compress::prepare_thread();
                let mut noise = Noise::new(seed + u64::from(thread));
                let mut next = noise.word() >> 16;
                while !failed.load(Relaxed) {
                    let page = thread * PAGES + noise.below(PAGES.into()) as u32;
                    let (_, done) = left.versions(page);
                    if noise.below(3) == 0 {
                        if let Err(wrong) = look(cache, area, page, [done, done]) {
                            eprintln!("{wrong}");
                            failed.store(true, Relaxed);
                        }
                        continue;
                    }
                    next += 1;
                    left.begin(page, next);
                    put(cache, area, page, next);
                    left.end(page, next);
                }
            });
        }
        let mut noise = Noise::new(seed + 99);
        while !failed.load(Relaxed) {
            cache.wait_for_work(Duration::from_millis(2));
            cache.maintain().unwrap();
            match noise.below(8) {
                0 | 1 => _ = cache.recompress(2),
                2 => _ = cache.shrink(1 << 20),
                3 => {
                    let section = cache.sections()[0].0;
                    let _ = cache.set_section(section, "offline");
                    let _ = cache.set_section(noise.below(8) as usize, "online");
                }
                4 => {
                    let compressor = ["lz4", "zstd", "wkdm", "raw"][noise.below(4) as usize];
                    cache.set_attribute("compressor", compressor).unwrap();
                }
                5 => _ = cache.train(),
                _ => {}
            }
        }
    });
    std::process::exit(1);
}

/// Takes the cache over in this process and checks everything. Unfinished calls are repeated.
fn check(left: &Left, round: u32) -> Duration {
    let began = Instant::now();
    let (cache, area) = left.open();
    let took = began.elapsed();
    cache.check();
    for page in 0..THREADS * PAGES {
        let (begun, done) = left.versions(page);
        if begun != done {
            put(&cache, area, page, begun);
            left.end(page, begun);
        }
        if let Err(wrong) = look(&cache, area, page, [begun, begun]) {
            panic!("round {round}: {wrong}, after {done} and {begun}");
        }
    }
    cache.check();
    took
}

fn run(setting: usize, rounds: u32) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let backing = folder.path().join("backing");
    File::create(&backing).unwrap().set_len(BACKING_BYTES).unwrap();
    let versions = memfd_create("versions", MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&versions, u64::from(THREADS * PAGES) * 16).unwrap();
    let memory = uzswap_sys::shared::create("uzswap-test").unwrap();
    fcntl_setfd(&memory, FdFlags::empty()).unwrap();
    let left = Left { memory, versions: versions.into(), backing, setting: SETTINGS[setting] };
    let mut noise = Noise::new(7 + setting as u64);
    let mut pauses = Vec::new();
    for round in 0..rounds {
        let words = [
            left.memory.as_raw_fd().to_string(),
            left.versions.as_raw_fd().to_string(),
            left.backing.display().to_string(),
            setting.to_string(),
            round.to_string(),
        ];
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_that_is_killed", "--ignored", "--nocapture"])
            .env(CHILD, words.join(" "))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(2000 + noise.below(150_000)));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "round {round}: it found something wrong: {status}");
        pauses.push(check(&left, round));
    }
    pauses.sort_unstable();
    let (cache, _) = left.open();
    let held = ["stored", "pool", "backing", "recompressed", "shared", "same_filled"]
        .map(|what| format!("{what} {}", cache.statistic(&format!("{what}_pages")).unwrap()));
    let dictionaries = cache.statistic("dictionaries").unwrap();
    println!("pages at the end: {}; {dictionaries} dictionaries", held.join(", "));
    println!("taken over in {:?} (median), {:?} at most", pauses[pauses.len() / 2], pauses.last());
}

#[test]
#[ignore = "started by the others"]
fn the_process_that_is_killed() {
    let Ok(words) = std::env::var(CHILD) else { return };
    let words: Vec<_> = words.split(' ').collect();
    let [memory, versions, backing, setting, round] = words[..] else { panic!("{words:?}") };
    let open = |number: &str| {
        // SAFETY: the parent has left it open for this process, which takes each once.
        unsafe { OwnedFd::from_raw_fd(number.parse().unwrap()) }
    };
    let left = Left {
        memory: open(memory),
        versions: open(versions).into(),
        backing: backing.into(),
        setting: SETTINGS[setting.parse::<usize>().unwrap()],
    };
    child(&left, round.parse::<u64>().unwrap() << 8);
}

/// As many as requested, or a few.
fn rounds() -> u32 {
    let asked = std::env::var("UZSWAP_KILLS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(6)
}

#[test]
fn a_killed_cache_with_a_sealed_backing_and_dictionaries_loses_no_page() {
    run(0, rounds());
}

#[test]
fn a_killed_cache_with_a_plain_backing_loses_no_page() {
    run(1, rounds());
}

#[test]
fn a_killed_cache_with_pages_of_numbers_loses_no_page() {
    run(2, rounds());
}
