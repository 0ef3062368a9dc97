//! Histories of the real engine by seeds: threads take turns, the backing fails, bits flip,
//! memory is refused. Each page that comes back is compared with the model. The same seed gives
//! the same history.
//!
//! ```text
//! UZSWAP_SIMULATE_SECONDS=3600    how long; 10 without
//! UZSWAP_SIMULATE_SEED=0x12       that history alone
//! ```
//! Rules: a load returns the page that was last stored. A load may return an error if the copy was
//! damaged or the backing does not answer, but never another page, and never `Absent`. A store is
//! not rejected for lack of memory unless memory was refused. Every action ends. `simulator.seeds`
//! has the seeds that found a fault; they run first.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use device::{Device, Simulated, segment};
use profile::{Chances, Kind, PROFILES, Pattern, Profile, REMOTE, REMOTE_SEEDS, one_of};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use uzswap_engine::testing::{Content, Noise, Setup, page_of};
use uzswap_engine::{Area, Cache, Error, Load, PAGE_BYTES, Page, Reject, Store, SwapEntry};
use uzswap_sync::turns::{self, Pace, ThreadBody};

/// Blocks of this size and more are refused: chunks of tables, trunks, contexts.
const LARGE_BYTES: usize = 4 << 10;

/// The maximum number of steps of one action of a thread. A store may try 4000 times for memory,
/// with some steps each.
const STEPS_MAX: u64 = 60_000;

/// The maximum number of steps of the maintaining thread before it prepares memory for stores.
const ABSENT_MAX: u64 = 20_000;

#[path = "simulator/device.rs"]
mod device;
#[path = "simulator/profile.rs"]
mod profile;

thread_local! {
    /// Large allocations that succeed before all others of this thread are refused.
    static GRANTED: Cell<u64> = const { Cell::new(u64::MAX) };
}

struct Refusing;

// SAFETY: the system's allocator, except for blocks that are refused.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // Messages of a failing test are exempt.
        let is_meant = layout.size() >= LARGE_BYTES && !std::thread::panicking();
        if is_meant && GRANTED.get() != u64::MAX {
            if GRANTED.get() == 0 {
                return std::ptr::null_mut();
            }
            GRANTED.set(GRANTED.get() - 1);
        }
        // SAFETY: the caller's promise, passed on; so below.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Pages in a trunk of the index.
const TRUNK: u32 = 4096;

/// Shared by the threads of a history.
struct World {
    cache: Cache,
    area: Area,
    device: Arc<Device>,
    /// For each storing thread, its pages.
    models: Vec<Mutex<BTreeMap<u32, (Content, u64)>>>,
    /// Pages that may be errors until they are stored anew.
    damaged: Mutex<BTreeSet<u32>>,
    memory_was_refused: AtomicBool,
    working: AtomicUsize,
    /// True once threads that still work must end.
    is_over: AtomicBool,
    pages: u32,
    /// The limit of the pool in bytes.
    limit: usize,
    profile: &'static Profile,
}

impl World {
    fn key(&self, offset: u32) -> SwapEntry {
        self.area.entry(offset).unwrap()
    }

    /// The pages of a thread.
    fn own(&self, thread: usize) -> Range<u32> {
        let share = self.pages / self.models.len() as u32;
        thread as u32 * share..(thread as u32 + 1) * share
    }

    fn check_loaded(&self, thread: usize, offset: u32, load: Result<Load, Error>, page: &Page) {
        let held = lock(&self.models[thread]).get(&offset).copied();
        match (load, held) {
            (Ok(Load::Absent), None) => {}
            (Ok(Load::Hit), Some((content, seed))) => {
                assert!(*page == page_of(content, seed), "page {offset} is not what was stored");
            }
            (Err(Error::Backing { .. }), Some(_)) => {
                let may_fail = self.device.chances.read_fails > 0 || self.is_lost(offset);
                assert!(may_fail, "page {offset}: nothing failed");
            }
            (Err(Error::Damaged { .. }), Some(_)) if lock(&self.damaged).contains(&offset) => {}
            (got, held) => panic!("page {offset}: {got:?}, and stored was {held:?}"),
        }
    }

    /// True if the store has lost the page's segment.
    fn is_lost(&self, offset: u32) -> bool {
        match self.cache.record_of(self.key(offset)) {
            Some(record) => lock(&self.device.lost).contains(&segment(record.start as u64)),
            // A piece of a unit has no record of its own.
            None => self.device.chances.segment_is_lost > 0,
        }
    }

    fn load(&self, thread: usize, offset: u32, exclusive: bool) {
        let mut page = [0xcc; PAGE_BYTES];
        let load = match exclusive {
            true => self.cache.load_exclusive(self.key(offset), &mut page),
            false => self.cache.load(self.key(offset), &mut page),
        };
        let is_hit = matches!(load, Ok(Load::Hit));
        self.check_loaded(thread, offset, load, &page);
        if exclusive && is_hit {
            lock(&self.models[thread]).remove(&offset);
            lock(&self.damaged).remove(&offset);
        }
    }

    fn load_many(&self, thread: usize, offsets: Range<u32>) {
        let mut pages = vec![[0xcc; PAGE_BYTES]; offsets.len()];
        let told = |offset, load, page: &mut Page| {
            self.check_loaded(thread, offsets.start + offset as u32, load, page);
            Ok::<_, ()>(())
        };
        self.cache.load_many(self.key(offsets.start), &mut pages, told).unwrap();
    }

    fn store(&self, thread: usize, offset: u32, (content, seed): (Content, u64), through: bool) {
        let page = page_of(content, seed);
        let mut stored = Store::Rejected(Reject::CompressPoor);
        if !through {
            stored = self.cache.store(self.key(offset), &page);
        }
        if stored == Store::Rejected(Reject::AllocFail) {
            let refused = self.memory_was_refused.load(Relaxed);
            let steps = turns::seen(self.models.len());
            assert!(
                refused || steps < ABSENT_MAX,
                "page {offset} was rejected for lack of memory, none was refused, and the thread \
                 that maintains took {steps} steps meanwhile"
            );
        }
        if stored != Store::Stored {
            turns::begin();
            stored = self.cache.store_through(self.key(offset), &page);
        }
        let mut model = lock(&self.models[thread]);
        match stored {
            Store::Stored => drop(model.insert(offset, (content, seed))),
            // A page that is only written through leaves an older page in place if it is rejected.
            Store::Rejected(_) if through => {}
            Store::Rejected(_) => drop(model.remove(&offset)),
        }
        if stored == Store::Stored || !through {
            lock(&self.damaged).remove(&offset);
        }
    }

    fn discard(&self, thread: usize, offset: u32) {
        self.cache.invalidate(self.key(offset));
        lock(&self.models[thread]).remove(&offset);
        lock(&self.damaged).remove(&offset);
    }

    /// Flips a bit of a page's copy, in any place.
    fn turn_bit(&self, thread: usize, offset: u32) {
        if !lock(&self.models[thread]).contains_key(&offset) {
            return;
        }
        if let Some(record) = self.cache.record_of(self.key(offset)) {
            lock(&self.damaged).insert(offset);
            let bit = self.device.below(record.len() as u64 * 8) as usize;
            lock(&self.device.content)[record.start + bit / 8] ^= 1 << (bit % 8);
        } else if self.cache.has_object(self.key(offset)) {
            lock(&self.damaged).insert(offset);
            self.cache.damage(self.key(offset), self.device.below(8 * 64) as usize);
        }
    }

    /// The body of a storing thread.
    fn work(&self, thread: usize, seed: u64, count: u32) {
        let mut noise = Noise::new(seed);
        let roles = self.profile.roles;
        let role = &roles[thread % roles.len()];
        let own = self.own(thread);
        // Some go over all of their pages, others over a few again and again.
        let spread = [8, 200, own.len() as u64][noise.below(3) as usize].min(own.len() as u64);
        let sweeps = noise.below(2) == 0;
        let mut usual = role.content.unwrap_or_else(|| Content::pick(noise.word()));
        let mut next = own.start;
        if role.order == Pattern::Trunks {
            let looks = (0..STEPS_MAX).take_while(|_| self.is_filling());
            looks.for_each(|_| {
                turns::begin();
                turns::wait();
            });
        }
        for _ in 0..count {
            if self.is_over.load(Relaxed) {
                break;
            }
            turns::begin();
            let kind = role.kind(&mut noise);
            let mut offset = own.start + noise.below(spread) as u32;
            if role.order != Pattern::Any || sweeps && kind == Kind::Store {
                offset = next;
                next += if role.order == Pattern::Trunks { TRUNK } else { 1 };
            }
            let content = match role.content {
                None if noise.below(2) == 0 => Content::pick(noise.word()),
                _ => usual,
            };
            // Few seeds, so that some pages are the same.
            let seeds = if role.content.is_some() { u64::MAX } else { 1000 };
            self.act(thread, kind, offset, (content, noise.below(seeds)), &mut noise);
            if next >= own.end {
                next = own.start;
                match role.order {
                    Pattern::Any | Pattern::Around => {}
                    Pattern::Trunks => {
                        self.is_over.store(true, Relaxed);
                    }
                    Pattern::Tides(kept) => {
                        let goes = own.clone().filter(|_| noise.below(100) >= kept);
                        goes.for_each(|offset| {
                            turns::begin();
                            self.discard(thread, offset);
                        });
                        let is_random = usual == Content::Random;
                        usual = if is_random { Content::Mixed } else { Content::Random };
                    }
                }
            }
        }
        self.working.fetch_sub(1, Relaxed);
    }

    /// True while other threads fill the pool: it has less than nine tenths of its limit.
    fn is_filling(&self) -> bool {
        let full = self.limit / 10 * 9;
        self.cache.pool_bytes() < full && self.working.load(Relaxed) > 1
    }

    fn act(&self, thread: usize, kind: Kind, offset: u32, page: (Content, u64), noise: &mut Noise) {
        let own = self.own(thread);
        match kind {
            Kind::Store => self.store(thread, offset, page, false),
            Kind::StoreThrough => self.store(thread, offset, page, true),
            Kind::Load => self.load(thread, offset, false),
            Kind::LoadMany => self.load_many(thread, offset..(offset + 20).min(own.end)),
            Kind::LoadExclusive => self.load(thread, offset, true),
            Kind::Discard => self.discard(thread, offset),
            Kind::DiscardMany => {
                let end = (offset + noise.below(150) as u32).min(own.end);
                (offset..end).for_each(|offset| self.discard(thread, offset));
            }
            Kind::Resume => self.cache.resume_writeback(),
            Kind::TurnBit => {
                if self.device.happens(self.device.chances.bit_turns) {
                    self.turn_bit(thread, offset);
                }
            }
            Kind::Set => {
                let settings = [
                    ("compressor", "lz4"),
                    ("compressor", "zstd"),
                    ("compressor", "raw"),
                    ("max_compression_ratio", "60"),
                    ("max_compression_ratio", "100"),
                ];
                let (name, value) = settings[noise.below(5) as usize];
                self.cache.set_attribute(name, value).unwrap();
            }
            Kind::Shrink => drop(self.cache.shrink(noise.below(64) as usize * PAGE_BYTES)),
        }
    }

    /// The body of the maintaining thread.
    fn maintain(&self, seed: u64) {
        let mut noise = Noise::new(seed);
        while self.working.load(Relaxed) > 0 {
            turns::begin();
            self.cache.wait_for_work(Duration::ZERO);
            let kind = if self.profile.only_maintains { 19 } else { noise.below(20) };
            match kind {
                0 => drop(self.cache.recompress(1 + noise.below(3) as usize)),
                1 => drop(self.cache.empty_section(noise.below(3) as usize)),
                2 => drop(self.cache.give_sections_back()),
                4 => drop(self.cache.set_section(noise.below(3) as usize, "offline")),
                5 => drop(self.cache.set_section(noise.below(3) as usize, "online")),
                3 if noise.below(3) == 0 => drop(self.cache.train()),
                _ => self.maintain_once(noise.below(4)),
            }
            for _ in 0..noise.below(60) {
                turns::wait();
            }
        }
    }

    /// Perhaps refuses memory after `granted` allocations.
    fn maintain_once(&self, granted: u64) {
        if self.device.happens(self.device.chances.memory_is_refused) {
            self.memory_was_refused.store(true, Relaxed);
            GRANTED.set(if self.profile.is_starved { 0 } else { granted });
        }
        // After an error the next call tries again.
        let _ = self.cache.maintain();
        GRANTED.set(u64::MAX);
    }

    /// At the end, with a device that works: checks every page, and every count.
    fn check(&self) {
        self.device.is_reliable.store(true, Relaxed);
        self.cache.resume_writeback();
        let _ = self.cache.maintain();
        for thread in 0..self.models.len() {
            self.own(thread).for_each(|offset| self.load(thread, offset, false));
        }
        self.cache.check();
        let held: usize = self.models.iter().map(|model| lock(model).len()).sum();
        assert_eq!(self.cache.statistic("stored_pages"), Some(held as u64));
        self.check_open();
    }

    /// A pool that was full takes a page again, unless the backing is full, too.
    fn check_open(&self) {
        let count = |name| self.cache.statistic(name).unwrap();
        let (full, page) = (count("backing_full"), page_of(Content::Random, u64::MAX));
        let is_taken = (0..4).any(|_| {
            let _ = self.cache.maintain();
            self.cache.store(self.key(0), &page) != Store::Rejected(Reject::ReclaimFail)
        });
        let has_backing = count("backing_total_size") > 0;
        assert!(is_taken || !has_backing || count("backing_full") > full, "the pool stays closed");
    }
}

/// The parameters of a history, from its seed.
struct Plan {
    profile: &'static Profile,
    setup: Setup,
    chances: Chances,
    workers: usize,
    count: u32,
    pace: Pace,
    lives: u64,
}

fn plan(seed: u64) -> Plan {
    let mut noise = Noise::new(seed);
    let profile = match seed & REMOTE_SEEDS {
        0 => one_of(PROFILES, |profile| profile.share, &mut noise),
        _ => &REMOTE,
    };
    let mut pick = |all: &[u64]| all[noise.below(all.len() as u64) as usize];
    let setup = Setup {
        pages: pick(profile.pages) as u32,
        pool_bytes: pick(profile.pool_kib) << 10,
        backing_bytes: (pick(profile.backing_mib) << 20) as usize,
        block_bytes: pick(&[512, 4096]) as usize,
        // The segments of a remote store are always sealed.
        seals_backing: pick(&[0, 1]) == 1 || seed & REMOTE_SEEDS != 0,
        ..Setup::default()
    };
    let chances = Chances {
        write_fails: pick(profile.write_fails),
        read_fails: pick(profile.read_fails),
        bit_turns: pick(profile.bit_turns),
        memory_is_refused: pick(profile.memory_is_refused),
        segment_is_lost: 0,
        reply_is_wrong: 0,
    };
    let workers = pick(profile.workers) as usize;
    let count = pick(profile.count) as u32;
    let pace = Pace { turn: pick(profile.turn), hold: pick(profile.hold) };
    // A cache is dropped in the middle, and the next cache starts on its backing.
    let lives = 1 + pick(&[0, 0, 1]);
    // Picked last, so that older seeds keep their histories.
    let segment_is_lost = pick(profile.segment_is_lost);
    let reply_is_wrong = pick(profile.reply_is_wrong);
    let chances = Chances { segment_is_lost, reply_is_wrong, ..chances };
    Plan { profile, setup, chances, workers, count, pace, lives }
}

/// Runs one history and returns its steps.
fn simulate(seed: u64) -> Result<u64, String> {
    let Plan { profile, setup, chances, workers, count, pace, lives } = plan(seed);
    let device = Arc::new(Device {
        content: Mutex::new(vec![0; setup.backing_bytes]),
        pending: Mutex::default(),
        noise: Mutex::new(Noise::new(seed ^ 0x5eed)),
        is_reliable: AtomicBool::new(false),
        chances,
        block_bytes: setup.block_bytes,
        lost: Mutex::default(),
        paged: Mutex::default(),
    });
    let mut steps = 0;
    for life in 0..lives {
        lock(&device.pending).clear();
        device.is_reliable.store(false, Relaxed);
        let (cache, area) = setup.make_on(Box::new(Simulated(device.clone())));
        cache.set_attribute("accept_threshold_percent", profile.accept_percent).unwrap();
        // There is a maintaining thread from the start.
        cache.wait_for_work(Duration::ZERO);
        let world = Arc::new(World {
            cache,
            area,
            device: device.clone(),
            models: (0..workers).map(|_| Mutex::default()).collect(),
            damaged: Mutex::default(),
            memory_was_refused: AtomicBool::new(false),
            working: AtomicUsize::new(workers),
            is_over: AtomicBool::new(false),
            pages: setup.pages,
            limit: setup.pool_bytes as usize,
            profile,
        });
        let mut all: Vec<ThreadBody<'static>> = Vec::new();
        for thread in 0..workers {
            let (world, seed) = (world.clone(), seed * 31 + life * 7 + thread as u64);
            all.push(Box::new(move || world.work(thread, seed, count)));
        }
        let maintainer = world.clone();
        all.push(Box::new(move || maintainer.maintain(seed * 31 + life * 7 + 30)));
        steps += turns::run(seed ^ life, pace, STEPS_MAX, all)?;
        world.check();
    }
    Ok(steps)
}

/// Runs a history, and names its seed if it fails.
fn run(seed: u64) -> u64 {
    let done = std::panic::catch_unwind(|| simulate(seed));
    let name = plan(seed).profile.name;
    let again = format!("of \"{name}\"; UZSWAP_SIMULATE_SEED={seed:#x} repeats it");
    match done {
        Ok(Ok(steps)) => steps,
        Ok(Err(what)) => panic!("seed {seed:#x}: {what}; {again}"),
        Err(_) => panic!("seed {seed:#x}: see above; {again}"),
    }
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let hex = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    Some(hex.unwrap_or_else(|| text.parse()).expect("a number"))
}

#[test]
fn any_history_gives_back_the_stored_pages_or_an_error() {
    if let Some(seed) = number("UZSWAP_SIMULATE_SEED") {
        println!("seed {seed:#x}: {} steps", run(seed));
        return;
    }
    let found = include_str!("simulator.seeds").lines().filter(|line| !line.starts_with('#'));
    for line in found {
        let seed = line.split_whitespace().next().and_then(|seed| seed.strip_prefix("0x"));
        run(u64::from_str_radix(seed.expect("0x…"), 16).expect("digits"));
    }
    try_seeds(0);
}

#[test]
fn any_history_with_a_remote_store_gives_back_the_stored_pages_or_an_error() {
    if number("UZSWAP_SIMULATE_SEED").is_none() {
        try_seeds(REMOTE_SEEDS);
    }
}

/// Tries seeds with these bits for a while.
fn try_seeds(bits: u64) {
    let asked = number("UZSWAP_SIMULATE_SECONDS");
    let seconds = asked.unwrap_or(10);
    let start = Instant::now();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // The short run shows the effect of a change: the same histories each time. The long form of
    // the test tries other seeds.
    let first = bits | if asked.is_some() { now.unwrap().as_secs() << 20 } else { 1 << 32 };
    let (mut histories, mut steps) = (0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        steps += run(first + histories);
        histories += 1;
    }
    println!("{histories} histories from seed {first:#x} on, {steps} steps, {seconds} s");
    assert!(histories > 0);
}

#[test]
fn a_seed_gives_the_same_history_again() {
    for seed in 1..6 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}

#[test]
fn recompression_that_gets_no_memory_is_tried_again() {
    const PAGES: u32 = 64;
    let (cache, area, _) = Setup::default().make();
    for offset in 0..PAGES {
        let page = page_of(Content::Text, offset.into());
        assert_eq!(cache.store(area.entry(offset).unwrap(), &page), Store::Stored);
    }
    cache.maintain().unwrap();
    // Each of the thread's allocations is refused once.
    let mut granted = 0;
    loop {
        GRANTED.set(granted);
        let pages = cache.recompress(1);
        GRANTED.set(u64::MAX);
        cache.check();
        if pages > 0 {
            break;
        }
        granted += 1;
        assert!(granted < 1000, "it never begins");
    }
    assert!(granted > 4, "{granted} blocks: what it is made with is no longer refused");
    while cache.recompress(4) > 0 {}
    assert!(cache.statistic("recompressed_pages").unwrap() > 0);
    for offset in 0..PAGES {
        let mut page = [0; PAGE_BYTES];
        assert_eq!(cache.load(area.entry(offset).unwrap(), &mut page).unwrap(), Load::Hit);
        assert!(page == page_of(Content::Text, offset.into()), "page {offset}");
    }
}
