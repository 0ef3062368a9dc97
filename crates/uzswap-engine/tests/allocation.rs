//! No path of a request allocates, because the kernel may need the storing thread to get memory.
//!
//! The C library's allocator is replaced for this whole program, so that allocations of the codecs
//! in C are counted too. Rust's allocator uses the replacement as well.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::fs::File;
use std::hint::black_box;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use uzswap_engine::backing::{Backing, FileBacking};
use uzswap_engine::compress::{Codecs, prepare_thread};
use uzswap_engine::testing::{Content, Noise, Setup, TestBacking, page_of, stay_on_a_cpu};
use uzswap_engine::{Area, Cache, Load, PAGE_BYTES, Store};

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_free(old: *mut c_void);
    fn malloc_usable_size(block: *mut c_void) -> usize;
    fn __libc_memalign(alignment: usize, bytes: usize) -> *mut c_void;
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Large blocks that were freed.
    static FREED: Cell<u64> = const { Cell::new(0) };
    /// True if the test notes locks that this thread holds while it allocates. A check, which is
    /// not a part of the test, clears this.
    static IS_WATCHED: Cell<bool> = const { Cell::new(false) };
    /// The number of large allocations until one is refused; 0 if none is.
    static REFUSED_IN: Cell<u64> = const { Cell::new(0) };
}

/// Locks that no serving thread takes: those of training, of recompression, of areas, of CPU
/// hotplug, of making descriptors, and of bringing sections on line.
const APART: [&str; 7] = [
    "Trainer",
    "Recompressor",
    "Vec<uzswap_engine::ids::Area>",
    "hotplug::Cpus",
    "percpu::Up",
    "zspage::Making",
    "pool::Growing",
];

/// Other locks that a watched thread has held while it allocated.
static HELD: [OnceLock<&str>; 16] = [const { OnceLock::new() }; 16];

fn count() {
    ALLOCATIONS.set(ALLOCATIONS.get() + 1);
    if IS_WATCHED.get() {
        uzswap_sync::held(|kind| {
            if !APART.iter().any(|apart| kind.ends_with(apart)) {
                // Counts in the first slot that is free or has this kind.
                let _ = HELD.iter().find(|slot| *slot.get_or_init(|| kind) == kind);
            }
        });
    }
}

/// True if this is the large allocation that the test makes fail.
fn is_refused(bytes: usize) -> bool {
    let left = REFUSED_IN.get();
    let is_large = bytes >= LARGE_BYTES;
    REFUSED_IN.set(left.saturating_sub(is_large.into()));
    is_large && left == 1
}

#[unsafe(no_mangle)]
extern "C" fn malloc(bytes: usize) -> *mut c_void {
    count();
    if is_refused(bytes) {
        return std::ptr::null_mut();
    }
    // SAFETY: the same contract as the replaced function; so below.
    unsafe { __libc_malloc(bytes) }
}

#[unsafe(no_mangle)]
extern "C" fn calloc(number: usize, bytes: usize) -> *mut c_void {
    count();
    if is_refused(number * bytes) {
        return std::ptr::null_mut();
    }
    // SAFETY: as in `malloc`.
    unsafe { __libc_calloc(number, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: as in `malloc`; the caller answers for `old`.
    unsafe { __libc_realloc(old, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(old: *mut c_void) {
    // SAFETY: as in `malloc`; the caller answers for `old`.
    unsafe {
        FREED.set(FREED.get() + u64::from(malloc_usable_size(old) >= LARGE_BYTES));
        __libc_free(old);
    }
}

#[unsafe(no_mangle)]
extern "C" fn aligned_alloc(alignment: usize, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: as in `malloc`.
    unsafe { __libc_memalign(alignment, bytes) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(
    out: *mut *mut c_void,
    alignment: usize,
    bytes: usize,
) -> c_int {
    let memory = aligned_alloc(alignment, bytes);
    if memory.is_null() {
        return 12; // ENOMEM
    }
    // SAFETY: the caller answers for `out`.
    unsafe { out.write(memory) };
    0
}

/// Allocations of this thread while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

/// True if repeatable work allocates nothing. A thread of another test that has ended leaves its
/// garbage of the epochs to the next thread, which allocates a block for that garbage. This does
/// not happen three times in a row.
fn allocates_nothing(mut work: impl FnMut()) -> bool {
    (0..3).any(|_| allocations(&mut work) == 0)
}

const PAGES: u32 = 2000;
/// The least size of contexts, dictionaries and samples.
const LARGE_BYTES: usize = 4 << 10;
const CODECS: [&str; 8] = ["raw", "lz4", "lz4:0", "lz4:-1", "zstd", "lzo", "deflate", "wkdm"];

/// A pool too small for the stored pages, so that stores write back and clean.
fn setup(compressor: &'static str) -> Setup {
    Setup { pages: PAGES, pool_bytes: 1 << 20, compressor, ..Setup::default() }
}

/// One round of all calls of a front end. The same `seed` gives the same pages.
fn requests(cache: &Cache, area: Area, seed: u64) {
    let mut noise = Noise::new(seed);
    let mut page = [0; PAGE_BYTES];
    for offset in 0..PAGES {
        let key = area.entry(offset).unwrap();
        let content = Content::pick(noise.word());
        let stored = page_of(content, noise.below(300));
        if cache.store(key, &stored) != Store::Stored {
            let _ = cache.store_through(key, &stored);
        }
        let back = area.entry(noise.below(u64::from(offset) + 1) as u32).unwrap();
        match noise.below(8) {
            0 => cache.invalidate(back),
            1 => _ = cache.load_exclusive(back, &mut page).unwrap(),
            2..5 => _ = cache.load(back, &mut page).unwrap(),
            _ => {}
        }
    }
    cache.shrink(usize::MAX);
    for key in area.entries() {
        let _ = cache.load(key, &mut page).unwrap();
    }
}

/// Stores 640 pages, most of which end up compressed as parts of units.
fn store_recompressed(cache: &Cache, area: &Area) {
    for (seed, key) in (0..).zip(area.entries().take(640)) {
        assert_eq!(cache.store(key, &page_of(Content::Pointers, seed)), Store::Stored);
        if seed % 64 == 63 {
            cache.maintain().unwrap();
            cache.recompress(100);
        }
    }
    assert!(cache.statistic("recompressed_pages").unwrap() > 300);
}

#[test]
fn requests_for_recompressed_pages_allocate_nothing() {
    prepare_thread();
    let setup = Setup { backing_bytes: 8 << 20, ..setup("zstd") };
    let (cache, area, _) = setup.make();
    let mut page = [0; PAGE_BYTES];
    store_recompressed(&cache, &area);
    for round in 0..2 {
        assert!(allocates_nothing(|| {
            for (seed, key) in (0..).zip(area.entries().take(640)) {
                assert_eq!(cache.load(key, &mut page).unwrap(), Load::Hit);
                if seed % 3 == round {
                    assert_eq!(cache.store(key, &page_of(Content::Text, seed)), Store::Stored);
                }
            }
        }));
        cache.shrink(usize::MAX);
    }
}

fn serves_without_allocating(setup: Setup, backing: Box<dyn Backing>) {
    prepare_thread();
    let (cache, area) = setup.make_on(backing);
    // The first round allocates memory as the maintaining thread would: records for identical
    // pages.
    requests(&cache, area, 0);
    cache.maintain().unwrap();
    for seed in 1..4 {
        let is_free = allocates_nothing(|| requests(&cache, area, seed));
        assert!(is_free, "{}: round {seed}", setup.compressor);
    }
    cache.check();
    for statistic in
        ["duplicate_pages", "written_back_pages", "loads_backing", "stores_same_filled"]
    {
        assert!(cache.statistic(statistic).unwrap() > 0, "{}: {statistic}", setup.compressor);
    }
}

#[test]
fn allocations_of_either_language_are_counted() {
    assert_eq!(allocations(|| drop(black_box(Vec::<u8>::with_capacity(100)))), 1);
    assert_eq!(allocations(|| drop(black_box(Box::new([0u8; 1])))), 1);
    // Two contexts of zstd and a workspace, two of deflate, the table of lzo, the sections of wkdm.
    assert!(allocations(|| drop(black_box(Codecs::new("lz4".parse().unwrap())))) >= 7);
    assert_eq!(allocations(|| _ = black_box(page_of(Content::Text, 1))), 0);
}

#[test]
fn requests_allocate_nothing() {
    for compressor in CODECS {
        let setup = setup(compressor);
        let (backing, _) = TestBacking::new(12 << 20, setup.block_bytes);
        serves_without_allocating(setup, Box::new(backing));
    }
}

#[test]
fn requests_with_a_dictionary_allocate_nothing() {
    prepare_thread();
    let setup = Setup { backing_bytes: 12 << 20, ..setup("zstd") };
    let (cache, area, _) = setup.make();
    requests(&cache, area, 0);
    for (round, compressor) in ["zstd", "zstd:3", "zstd:-9", "zstd"].into_iter().enumerate() {
        cache.set_attribute("compressor", compressor).unwrap();
        for (seed, key) in (0..).zip(area.entries()) {
            cache.maintain().unwrap();
            let page = page_of(Content::Text, seed << 8 | round as u64);
            assert_eq!(cache.store(key, &page), Store::Stored);
        }
        assert!(cache.train(), "{compressor}");
        let before = cache.statistic("stores_dictionary").unwrap();
        let is_free = allocates_nothing(|| requests(&cache, area, round as u64 + 1));
        assert!(is_free, "{compressor}");
        assert!(cache.statistic("stores_dictionary").unwrap() > before + 100, "{compressor}");
    }
    cache.check();
}

#[test]
fn without_the_memory_to_train_a_cache_goes_on_without_dictionaries() {
    prepare_thread();
    let mut page = [0; PAGE_BYTES];
    let mut trained = 0;
    for refused in 1.. {
        let (cache, area, _) = Setup { compressor: "zstd", ..Setup::default() }.make();
        let pages = || (0..).zip(area.entries().take(1500));
        for (seed, key) in pages() {
            cache.maintain().unwrap();
            assert_eq!(cache.store(key, &page_of(Content::Text, seed)), Store::Stored);
        }
        REFUSED_IN.set(refused);
        trained += u64::from(cache.train());
        let is_over = REFUSED_IN.replace(0) > 0;
        for (seed, key) in pages() {
            let other = page_of(Content::Text, seed + 2000);
            cache.maintain().unwrap();
            assert_eq!(cache.store(key, &other), Store::Stored);
            assert_eq!(cache.load(key, &mut page).unwrap(), Load::Hit);
            assert!(page == other);
        }
        cache.check();
        if is_over {
            // Everything was granted.
            assert!(cache.statistic("stores_dictionary").unwrap() > 1000);
            assert!(trained < refused - 3, "{trained} of {refused}");
            break;
        }
    }
}

#[test]
fn requests_allocate_nothing_where_the_backing_is_a_file() {
    for uses_io_uring in [true, false] {
        let path = format!("{}/allocation-{uses_io_uring}", env!("CARGO_TARGET_TMPDIR"));
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(12 << 20).unwrap();
        let backing = FileBacking::new(file, 12 << 20).unwrap();
        let backing = if uses_io_uring { backing } else { backing.without_io_uring() };
        serves_without_allocating(setup("lz4"), Box::new(backing));
    }
}

#[test]
fn a_first_page_in_new_address_space_allocates_nothing() {
    prepare_thread();
    let (cache, area, _) = Setup { pages: 4 << 12, ..Setup::default() }.make();
    let page = page_of(Content::Text, 1);
    let allocations = allocations(|| {
        for trunk in 0..4 {
            assert_eq!(cache.store(area.entry(trunk << 12).unwrap(), &page), Store::Stored);
        }
    });
    assert_eq!(allocations, 0);
}

#[test]
fn a_thread_s_first_requests_allocate_nothing_once_it_is_prepared() {
    for compressor in CODECS {
        let (cache, area, _) = Setup { compressor, ..Setup::default() }.make();
        let allocations = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                prepare_thread();
                let page = page_of(Content::Pointers, 1);
                let mut back = [0; PAGE_BYTES];
                let key = area.entry(0).unwrap();
                allocations(|| {
                    assert_eq!(cache.store(key, &page), Store::Stored);
                    assert_eq!(cache.load(key, &mut back).unwrap(), Load::Hit);
                })
            });
            thread.join().unwrap()
        });
        assert_eq!(allocations, 0, "{compressor}");
    }
}

#[test]
fn after_a_change_of_compressor_requests_allocate_nothing() {
    prepare_thread();
    let (cache, area, _) = Setup::default().make();
    for compressor in ["zstd:19", "zstd", "deflate:12", "lz4:9", "zstd:9", "zstd:-50", "deflate"] {
        cache.set_attribute("compressor", compressor).unwrap();
        // More pages than a context of zstd takes to find its memory too large.
        let is_free = allocates_nothing(|| {
            for seed in 0..400 {
                let page = page_of(Content::Pointers, seed);
                assert_eq!(cache.store(area.entry(0).unwrap(), &page), Store::Stored);
            }
        });
        assert!(is_free, "{compressor}");
    }
}

#[test]
fn a_failed_write_allocates_nothing() {
    let setup = Setup { backing_bytes: 4 << 20, ..Setup::default() };
    let (cache, area, faults) = setup.make();
    for round in 0..2 {
        for (seed, key) in (0..).zip(area.entries().take(200)) {
            assert_eq!(cache.store(key, &page_of(Content::Text, seed)), Store::Stored);
        }
        faults.fail_writes.store(round > 0, Relaxed);
        assert_eq!(allocations(|| _ = cache.shrink(usize::MAX)), 0);
        assert_eq!(cache.writeback_failure().is_some(), round > 0);
    }
}

/// A serving thread waits for the holder of a lock. If the holder allocates, it waits for memory,
/// for which the kernel may need the serving thread.
#[test]
fn no_thread_allocates_under_a_lock_that_a_server_thread_may_wait_for() {
    prepare_thread();
    let setup = Setup {
        pages: 1 << 16,
        ram_bytes: 64 << 20,
        pool_bytes: 24 << 20,
        backing_bytes: 64 << 20,
        compressor: "zstd",
        ..Setup::default()
    };
    IS_WATCHED.set(true);
    let (cache, area, faults) = setup.make();
    cache.set_attribute("recompress_idle_seconds", "1").unwrap();
    for (seed, key) in (0..).zip(area.entries().skip(30_000).take(3000)) {
        cache.maintain().unwrap();
        assert_eq!(cache.store(key, &page_of(Content::Text, seed)), Store::Stored);
    }
    assert!(cache.train());
    for round in 0..4 {
        for offset in 0..6000 {
            let key = area.entry(round * 6000 + offset).unwrap();
            // Each page twice, so that there are records; gradually on more of the backing.
            let page = page_of(Content::pick(u64::from(offset / 2 % 7)), u64::from(offset / 2));
            if cache.store(key, &page) != Store::Stored {
                let _ = cache.store_through(key, &page);
            }
            if offset % 100 == 0 {
                cache.maintain().unwrap();
            }
        }
        cache.train();
        cache.recompress(40);
        for compressor in ["lz4", "deflate:3", "zstd:3", "zstd"] {
            cache.set_attribute("compressor", compressor).unwrap();
        }
        cache.idle(Duration::from_secs(round.into()));
        cache.shrink(4 << 20);
        cache.give_sections_back();
        let _ = (cache.sections(), cache.class_stats());
        faults.fail_writes.store(true, Relaxed);
        let key = area.entry(60_000).unwrap();
        assert_ne!(cache.store_through(key, &page_of(Content::Random, 1)), Store::Stored);
        assert!(cache.writeback_failure().is_some());
        faults.fail_writes.store(false, Relaxed);
        cache.resume_writeback();
        let gone = area.entries().skip(round as usize * 6000).step_by(3).take(1500);
        gone.for_each(|key| cache.invalidate(key));
    }
    for statistic in ["shared_pages", "recompressed_pages", "backing_pages", "stores_dictionary"] {
        assert!(cache.statistic(statistic).unwrap() > 0, "{statistic}");
    }
    cache.remove_area(area);
    cache.maintain().unwrap();
    IS_WATCHED.set(false);
    let held: Vec<_> = HELD.iter().filter_map(OnceLock::get).collect();
    assert!(held.is_empty(), "{held:?}");
}

#[test]
fn without_memory_for_its_tables_a_cache_rejects_pages_or_goes_on_and_reports_the_error() {
    prepare_thread();
    let (mut page, mut failures) = ([0; PAGE_BYTES], 0);
    for refused in 1.. {
        let setup = Setup { pages: 32 << 12, pool_bytes: 16 << 20, ..Setup::default() };
        let (cache, area, _) = setup.make();
        let mut stored = Vec::with_capacity(2000);
        REFUSED_IN.set(refused);
        for number in 0..2000 {
            if number % 10 == 0 {
                failures += u64::from(cache.maintain().is_err());
            }
            // Each page twice, in new address space all the time.
            let key = area.entry((number % 20) * 4096 + number / 20).unwrap();
            let seed = u64::from(number / 2);
            if cache.store(key, &page_of(Content::Random, seed)) == Store::Stored {
                stored.push((key, seed));
            }
        }
        let is_over = REFUSED_IN.replace(0) > 0;
        for (key, seed) in &stored {
            assert_eq!(cache.load(*key, &mut page).unwrap(), Load::Hit);
            assert!(page == page_of(Content::Random, *seed));
        }
        cache.maintain().unwrap();
        cache.check();
        assert!(stored.len() > 1000, "{} without number {refused}", stored.len());
        if is_over {
            // Everything was granted.
            assert_eq!(stored.len(), 2000);
            assert!(failures >= 8, "{failures} failures of {refused}");
            break;
        }
    }
}

/// A serving thread does not free memory that others have retired: a thread that waits for memory
/// may have the allocator's lock.
#[test]
fn trunks_are_freed_by_the_thread_that_maintains() {
    let (cache, area, _) = Setup { pages: 200 << 12, ..Setup::default() }.make();
    let page = page_of(Content::Filled, 1);
    let mut by_maintenance = 0;
    std::thread::scope(|scope| {
        for trunk in 0..200 {
            let key = area.entry(trunk << 12).unwrap();
            assert_eq!(cache.store(key, &page), Store::Stored);
            cache.invalidate(key);
            let before = FREED.get();
            cache.maintain().unwrap();
            by_maintenance += FREED.get() - before;
            let freed = scope.spawn(|| {
                let mut page = [0; PAGE_BYTES];
                let before = FREED.get();
                for _ in 0..1000 {
                    cache.invalidate(area.entry(0).unwrap());
                    let _ = cache.load(area.entry(0).unwrap(), &mut page).unwrap();
                }
                FREED.get() - before
            });
            assert_eq!(freed.join().unwrap(), 0, "by a thread that serves, after {trunk} trunks");
        }
    });
    // A thread of another test may delay it for some time.
    for _ in 0..1000 {
        if by_maintenance == 0 {
            std::thread::sleep(Duration::from_millis(10));
            let before = FREED.get();
            cache.maintain().unwrap();
            by_maintenance += FREED.get() - before;
        }
    }
    assert!(by_maintenance > 0);
    cache.check();
}

/// Page faults of the calling thread that took memory from the kernel without a read.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    // The text behind the name, which may have spaces.
    let (_, behind) = stat.rsplit_once(')').unwrap();
    behind.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// The deepest path is the load of a page in a unit whose pieces are on the backing.
#[test]
fn the_deepest_load_of_a_prepared_thread_takes_no_memory_from_the_kernel() {
    let setup = Setup { backing_bytes: 8 << 20, ..setup("zstd") };
    let (cache, area, _) = setup.make();
    store_recompressed(&cache, &area);
    cache.shrink(usize::MAX);
    let load = || {
        let mut page = [0; PAGE_BYTES];
        for (seed, key) in (0..).zip(area.entries().take(640)) {
            assert_eq!(cache.load(key, &mut page).unwrap(), Load::Hit);
            assert!(page == page_of(Content::Pointers, seed));
        }
    };
    // Both threads use the contexts of one CPU.
    stay_on_a_cpu();
    // After this only the stack of the next thread is not faulted in. Its size differs, so that the
    // thread does not get a stack that another thread has left.
    load();
    faults();
    let taken = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(384 << 10);
        let thread = thread.spawn_scoped(scope, || {
            prepare_thread();
            faults();
            let before = faults();
            load();
            faults() - before
        });
        thread.unwrap().join().unwrap()
    });
    assert_eq!(taken, 0);
}
