//! The cost of maintenance does not grow with the number of stored pages. It prints a table for the
//! same changes with 1 GiB, 64 GiB and 1 TiB of swapped pages. `UZSWAP_FULL=1` takes all pages (5
//! GiB of memory). Otherwise the test takes a 64th, or the part that `UZSWAP_PART` names.
//!
//! A load is compared with a read of one random word, in memory of the index's size. No index of
//! this size waits for less.
//!
//! Of 64 pages 62 are one word repeated, one is identical to others, and one is tiny. The backing
//! is a sparse file. The cache is like a daemon's: its index is in memory that outlives the
//! process.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use rustix::time::{ClockId, clock_gettime};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use uzswap_engine::backing::FileBacking;
use uzswap_engine::testing::Noise;
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, Store};
use uzswap_sys::shared::{self, SharedMemory};

/// Pages that change between two calls of maintenance: runs of neighbours, as the kernel's are. One
/// half is stored anew. The other half is dropped, and stored again in the next round.
const RUNS: u64 = 16;
const RUN: u32 = 256;
const ROUNDS: u32 = 400;

const ENTRY_BYTES: usize = 16;

fn fill(offset: u32, round: u32, page: &mut [u8; PAGE_BYTES]) {
    let word = |number: u64| (number * 0x0101_0101 + 1).to_ne_bytes();
    let (words, _) = page.as_chunks_mut::<8>();
    let changes = word(u64::from(offset) + u64::from(round));
    match offset % 64 {
        0 => {
            words.fill(word(3));
            words[1] = word(u64::from(offset / 64 % 8) + 4);
        }
        1 => {
            words.fill(changes);
            words[1] = word(u64::from(offset) << 8);
        }
        _ => words.fill(changes),
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Memory as a daemon has it, without huge pages where the machine has none.
fn memory() -> OwnedFd {
    shared::create_unswappable().or_else(|_| shared::create("uzswap-terabyte")).unwrap()
}

/// Words in memory like the index's, as many bytes as its entries take.
struct Floor(SharedMemory);

impl Floor {
    fn new(pages: u32) -> Self {
        let words = SharedMemory::map(memory(), pages as usize * ENTRY_BYTES).unwrap();
        words.prefer_huge(0, words.len());
        words.populate(0, words.len()).unwrap();
        Self(words)
    }

    /// The time to read one word.
    fn read(&self, noise: &mut Noise) -> Duration {
        let at = noise.below((self.0.len() / ENTRY_BYTES) as u64) as usize * ENTRY_BYTES;
        let before = Instant::now();
        // SAFETY: the address is aligned and inside the mapping, whose pages are all populated; no
        // thread writes. The read is volatile, so it happens between the two clock reads.
        let word = unsafe { self.0.as_ptr().add(at).cast::<u64>().read_volatile() };
        assert_eq!(word, 0);
        before.elapsed()
    }
}

fn cache(pages: u32, folder: &std::path::Path) -> (Cache, Area) {
    let bytes = u64::from(pages) * PAGE_BYTES as u64 / 4;
    let file = std::fs::File::create_new(folder.join(pages.to_string())).unwrap();
    file.set_len(bytes).unwrap();
    let config = Config {
        pages_max: pages,
        ram_bytes: 2 << 30,
        ram_bytes_max: 2 << 30,
        pool_bytes_max: 2 << 30,
        algorithm: "lz4".parse().unwrap(),
        seals_backing: true,
    };
    let backing = Box::new(FileBacking::new(file, bytes).unwrap());
    let cache = Cache::in_file(config, backing, memory()).unwrap();
    let area = cache.add_area(pages).unwrap();
    (cache, area)
}

fn store(cache: &Cache, area: Area, offset: u32, round: u32) {
    let mut page = [0; PAGE_BYTES];
    fill(offset, round, &mut page);
    let key = area.entry(offset).unwrap();
    while cache.store(key, &page) != Store::Stored {
        cache.maintain().unwrap();
    }
}

/// The mean of the middle half: finer than the clock's steps, and without the few disturbed rounds.
fn middle(times: &mut [Duration]) -> u128 {
    times.sort_unstable();
    let quarter = times.len() / 4;
    let middle = &times[quarter..times.len() - quarter];
    middle.iter().sum::<Duration>().as_nanos() / middle.len() as u128
}

fn median(mut times: Vec<Duration>) -> u128 {
    times.sort_unstable();
    times[times.len() / 2].as_nanos()
}

/// A round's maintenance, ns of CPU time, and the medians of a load and of a word's read, ns.
fn measure(pages: u32, folder: &std::path::Path) -> (u128, u128, u128) {
    let (cache, area) = cache(pages, folder);
    let floor = Floor::new(pages);
    for offset in 0..pages {
        if offset.is_multiple_of(4096) {
            cache.maintain().unwrap();
        }
        store(&cache, area, offset, 0);
    }
    let mut noise = Noise::new(u64::from(pages));
    let (mut times, mut loads, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    let mut page = [0; PAGE_BYTES];
    let mut gone = Vec::new();
    for round in 1..=ROUNDS {
        for offset in gone.drain(..) {
            store(&cache, area, offset, round);
        }
        for run in 0..RUNS {
            let first = noise.below(u64::from(pages - RUN)) as u32;
            for offset in first..first + RUN {
                match run % 2 {
                    0 => store(&cache, area, offset, round),
                    _ => {
                        cache.invalidate(area.entry(offset).unwrap());
                        gone.push(offset);
                    }
                }
            }
        }
        let before = cpu_time();
        cache.maintain().unwrap();
        cache.idle(Duration::from_millis(100) * round);
        times.push(cpu_time() - before);
        for _ in 0..200 {
            let key = area.entry(noise.below(pages.into()) as u32).unwrap();
            let before = Instant::now();
            let load = cache.load(key, &mut page).unwrap();
            if load == Load::Hit {
                loads.push(before.elapsed());
            }
            reads.push(floor.read(&mut noise));
        }
    }
    let stored = cache.statistic("stored_pages").unwrap();
    assert!(stored + u64::from(RUN) * RUNS >= pages.into(), "{stored} pages of {pages}");
    (middle(&mut times), median(loads), median(reads))
}

#[test]
fn maintenance_costs_as_much_as_changes_however_many_pages_are_held() {
    let part = std::env::var("UZSWAP_PART").map(|text| text.parse().unwrap());
    let divisor = part.unwrap_or(if std::env::var_os("UZSWAP_FULL").is_some() { 1 } else { 64 });
    let folder = tempfile::tempdir().unwrap();
    println!("| swapped | maintenance, ns of CPU | load p50, ns | one read, ns |");
    println!("|---|---|---|---|");
    for gib in [1, 64, 1024] {
        let pages = gib * (1 << 18) / divisor;
        let (maintenance, load, read) = measure(pages, folder.path());
        println!("| {} MiB | {maintenance} | {load} | {read} |", gib * 1024 / divisor);
    }
}
