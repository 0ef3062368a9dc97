//! Adopted memory leaves and comes back by each means without a wrong byte: with threads, forks,
//! drops, and system calls.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;
use uzswap_region::{Change, Contents, Means, Mode, OnFork, Pager};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;

const ALL: &[Means] = &[Means::Moves, Means::Copies, Means::Guards, Means::Protection];

/// Runs a test by each of these means, each in a process of its own (this program again), since a
/// process has one pager that adopts memory.
fn by_each(name: &str, means: &[Means], test: fn(Means)) {
    if let Ok(means) = std::env::var("MEANS") {
        return test(means.parse().unwrap());
    }
    for means in means.iter().filter(|means| means.check().is_ok()) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--nocapture"]).env("MEANS", means.name());
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{means:?}: {}\n{said}", output.status);
    }
}

/// Private memory of the program's own.
#[derive(Clone, Copy)]
struct Mapped {
    at: usize,
    pages: usize,
}

impl Mapped {
    fn map(pages: usize) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, -1, 0) };
        assert!(at != libc::MAP_FAILED);
        // A page that is used alone would be 2 MiB. Refused without huge pages.
        // SAFETY: the call changes no contents.
        unsafe { libc::madvise(at, pages * PAGE, libc::MADV_NOHUGEPAGE) };
        Self { at: at as usize, pages }
    }

    fn word(&self, page: usize, at: usize) -> &'static AtomicU64 {
        assert!(page < self.pages && at < WORDS);
        // SAFETY: the word is inside the mapping, which stays until the test ends.
        unsafe { &*((self.at + page * PAGE + at * 8) as *const AtomicU64) }
    }

    fn adopt(&self, pager: &Pager, has_pages: bool) {
        let range = self.at..self.at + self.pages * PAGE;
        let contents = if has_pages { Contents::Pages } else { Contents::Nothing };
        // SAFETY: the mapping is as `adopt` requires. Before each change of it, the code below
        // calls the pager.
        unsafe { pager.adopt(range, contents) }.unwrap();
    }

    fn write(&self, page: usize, version: u32) {
        (0..WORDS).for_each(|at| self.word(page, at).store(value(page, version, at), Relaxed));
    }

    #[track_caller]
    fn check(&self, page: usize, version: u32) {
        for at in 0..WORDS {
            let (found, should) = (self.word(page, at).load(Relaxed), value(page, version, at));
            assert_eq!(found, should, "word {at} of page {page} at version {version}");
        }
    }

    /// Makes the kernel drop pages, as a program's call does.
    fn drop_pages(&self, pager: &Pager, first: usize, count: usize) {
        let start = self.at + first * PAGE;
        pager.change(start..start + count * PAGE, Change::Zeroed, || {
            // SAFETY: the pages are inside the mapping, and the caller notes that they are dropped.
            let done = unsafe {
                libc::madvise(start as *mut libc::c_void, count * PAGE, libc::MADV_DONTNEED)
            };
            ((), done == 0)
        });
    }
}

/// The value of a word at a version; zeros at version 0. A quarter of each page compresses badly.
fn value(page: usize, version: u32, at: usize) -> u64 {
    let mixed = ((page as u64) << 32 ^ u64::from(version) << 12 ^ at as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match (version, at % 4) {
        (0, _) => 0,
        (_, 0) => mixed ^ mixed >> 29,
        _ => (page as u64) << 32 | u64::from(version),
    }
}

fn pager(means: Means, memory: &str) -> Pager {
    let pager = Pager::builder().memory(memory).mode(means.mode()).means(means);
    pager.on_fork(OnFork::Whole).build().unwrap()
}

fn seconds() -> u64 {
    if std::env::var_os("UZSWAP_FULL").is_some() { 30 } else { 1 }
}

#[test]
fn neighbours_of_several_threads_leave_and_come_back_whole() {
    by_each("neighbours_of_several_threads_leave_and_come_back_whole", ALL, share_pages);
}

fn share_pages(means: Means) {
    const THREADS: usize = 4;
    const PAGES: usize = 8 << 8;
    let pager = pager(means, "24M");
    let (own, shared) = (Mapped::map(3 * PAGES), Mapped::map(PAGES));
    // Some of the memory was used before its adoption, and some is fresh.
    (0..PAGES).for_each(|page| shared.write(page, 7));
    shared.adopt(&pager, true);
    own.adopt(&pager, false);
    let end = Instant::now() + Duration::from_secs(seconds());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let pager = &pager;
            scope.spawn(move || use_pages((own, shared), pager, (thread, THREADS), end));
        }
        scope.spawn(|| keep_to_the_budget(&pager, end));
    });
    let stats = pager.stats();
    let figure = |name| stats.get(name).unwrap();
    assert!(figure("faults") > 500 && figure("stores") > 500, "{means:?}: {stats}");
    let used = figure("memory_used");
    assert!(used <= pager.memory() * 105 / 100, "{means:?}: {used}");
}

/// The budget is kept at all checks except a few in a thousand, which read the figures while other
/// threads write them.
fn keep_to_the_budget(pager: &Pager, end: Instant) {
    let (mut looks, mut beyond) = (0, Vec::new());
    while Instant::now() < end {
        let used = pager.stats().get("memory_used").unwrap();
        if used > pager.memory() * 102 / 100 {
            beyond.push(used);
        }
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(beyond.len() * 100 <= looks, "at {} of {looks} looks: {beyond:?}", beyond.len());
}

/// Writes, checks, drops and sends out every fourth page, which is this thread's own. It also reads
/// pages that no thread writes, and must never find a half-filled page.
fn use_pages(
    (own, shared): (Mapped, Mapped),
    pager: &Pager,
    (thread, threads): (usize, usize),
    end: Instant,
) {
    let mut noise = Noise::new(thread as u64 + 1);
    let mut versions = vec![0u32; own.pages];
    let mut below = move |end: usize| noise.below(end as u64) as usize;
    let zero = File::open("/dev/zero").unwrap();
    while Instant::now() < end {
        let mine = below(own.pages / threads) * threads + thread;
        match below(40) {
            0..15 => {
                versions[mine] += 1;
                own.write(mine, versions[mine]);
            }
            15..25 => own.check(mine, versions[mine]),
            25..36 => {
                let (page, at) = (below(shared.pages), below(WORDS));
                assert_eq!(shared.word(page, at).load(Relaxed), value(page, 7, at), "{page} {at}");
            }
            36 => {
                // Reads this thread's own pages in order.
                let start = below(own.pages / threads - 64);
                for page in (start..start + 64).map(|page| page * threads + thread) {
                    own.check(page, versions[page]);
                }
            }
            37 => {
                let start = own.at + mine * PAGE;
                pager.page_out(start..start + 40 * PAGE).unwrap();
            }
            38 => {
                own.drop_pages(pager, mine, 1);
                versions[mine] = 0;
                own.check(mine, 0);
            }
            _ => {
                // The kernel writes to a pinned page.
                let start = own.at + mine * PAGE;
                let held = pager.pin(start..start + PAGE).unwrap();
                // SAFETY: this thread's own page, pinned.
                let bytes = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, PAGE) };
                zero.read_at(bytes, 0).unwrap();
                Pager::unpin(held);
                versions[mine] = 0;
            }
        }
    }
    (0..own.pages).filter(|page| page % threads == thread).for_each(|page| {
        own.check(page, versions[page]);
    });
}

#[test]
fn a_thread_alone_finds_each_page_whole() {
    by_each("a_thread_alone_finds_each_page_whole", ALL, be_alone);
}

fn be_alone(means: Means) {
    let pager = pager(means, "18M");
    let memory = Mapped::map(24 << 8);
    memory.adopt(&pager, false);
    // SAFETY: takes nothing.
    pager.set_only_thread(Some(unsafe { libc::gettid() }));
    let mut noise = Noise::new(3);
    let mut versions = vec![0u32; memory.pages];
    for _ in 0..40_000 {
        let page = noise.below(memory.pages as u64) as usize;
        memory.check(page, versions[page]);
        versions[page] += 1;
        memory.write(page, versions[page]);
    }
    // Reads the pages in order, so that a thread of the pager reads ahead.
    for _ in 0..2 {
        (0..memory.pages).for_each(|page| memory.check(page, versions[page]));
    }
    assert!(pager.stats().get("faults").unwrap() > 5000);
}

/// Threads read pages without a pause, and the pages leave all the time.
#[test]
fn a_reader_of_a_page_that_leaves_finds_it_whole() {
    by_each("a_reader_of_a_page_that_leaves_finds_it_whole", ALL, read_what_leaves);
}

fn read_what_leaves(means: Means) {
    let pager = pager(means, "24M");
    let memory = Mapped::map(40);
    (0..40).for_each(|page| memory.write(page, 3));
    memory.adopt(&pager, true);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut noise = Noise::new(seed);
                while !is_over.load(Relaxed) {
                    let (page, at) = (noise.below(40) as usize, noise.below(500) as usize);
                    for at in at..at + 12 {
                        let found = memory.word(page, at).load(Relaxed);
                        assert_eq!(found, value(page, 3, at), "{page} {at}");
                    }
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(seconds());
        while Instant::now() < end {
            pager.page_out(memory.at..memory.at + 40 * PAGE).unwrap();
        }
        is_over.store(true, Relaxed);
    });
}

/// Mappings do not run out, however many separate pages are present, and guards use no mappings.
#[test]
fn every_second_page_of_much_memory_can_be_in() {
    by_each(
        "every_second_page_of_much_memory_can_be_in",
        &[Means::Guards, Means::Protection],
        touch_every_second,
    );
}

fn touch_every_second(means: Means) {
    const PAGES: usize = 600 << 8;
    let pager = pager(means, "400M");
    let memory = Mapped::map(PAGES);
    memory.adopt(&pager, false);
    let every_second = || (0..PAGES).step_by(2);
    every_second().for_each(|page| memory.word(page, 5).store(page as u64 + 1, Relaxed));
    let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(mappings < 60_000 && (means == Means::Protection || mappings < 2000), "{mappings}");
    for page in every_second() {
        assert_eq!(memory.word(page, 5).load(Relaxed), page as u64 + 1);
        assert_eq!(memory.word(page, 6).load(Relaxed), 0);
    }
    (1..PAGES).step_by(2).for_each(|page| assert_eq!(memory.word(page, 5).load(Relaxed), 0));
    memory.release(&pager);
}

impl Mapped {
    /// Unmaps the memory, as the program would.
    fn release(&self, pager: &Pager) {
        let range = self.at..self.at + self.pages * PAGE;
        pager.change(range, Change::Gone, || {
            // SAFETY: no thread uses it any more.
            let done = unsafe { libc::munmap(self.at as *mut libc::c_void, self.pages * PAGE) };
            ((), done == 0)
        });
    }
}

/// Forks while other threads fault.
#[test]
fn a_fork_has_a_copy_of_every_page_and_pages_of_its_own() {
    let name = "a_fork_has_a_copy_of_every_page_and_pages_of_its_own";
    by_each(name, ALL, fork_while_threads_touch);
}

fn fork_while_threads_touch(means: Means) {
    const THREADS: usize = 3;
    const PAGES: usize = 6 << 8;
    let pager = pager(means, "14M");
    let memory = Mapped::map(THREADS * PAGES);
    memory.adopt(&pager, false);
    // The version of each page, or its previous version.
    let versions: Vec<_> = (0..memory.pages).map(|_| AtomicU32::new(0)).collect();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (versions, is_over) = (&versions, &is_over);
            scope.spawn(move || {
                let mut noise = Noise::new(thread as u64);
                while !is_over.load(Relaxed) {
                    let page = noise.below(PAGES as u64) as usize * THREADS + thread;
                    let next = versions[page].load(Relaxed) + 1;
                    memory.check(page, next - 1);
                    memory.write(page, next);
                    versions[page].store(next, Release);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(seconds());
        let mut forks = 0;
        while Instant::now() < end || forks < 5 {
            let status = fork_and_check(&pager, memory, &versions);
            assert!(status.success(), "{means:?}: fork {forks}: {status}");
            forks += 1;
        }
        is_over.store(true, Relaxed);
    });
}

/// The child checks each page, whose version is the noted one, the next one, or between the two.
/// Then the child writes all pages.
fn fork_and_check(pager: &Pager, memory: Mapped, versions: &[AtomicU32]) -> ExitStatus {
    let still = pager.before_fork().unwrap();
    // SAFETY: the child runs the code below, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        still.in_child().unwrap();
        pager.after_fork().unwrap();
        for (page, version) in versions.iter().enumerate() {
            let version = version.load(Acquire);
            for at in 0..WORDS {
                let found = memory.word(page, at).load(Relaxed);
                let may = [version, version + 1].map(|version| value(page, version, at));
                if !may.contains(&found) {
                    eprintln!("word {at} of page {page} at {version}: {found:#x} {may:x?}");
                    std::process::abort();
                }
            }
        }
        (0..memory.pages).for_each(|page| memory.write(page, 1 << 30));
        (0..memory.pages).for_each(|page| memory.check(page, 1 << 30));
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(0) };
    }
    still.in_parent();
    let mut status = 0;
    // SAFETY: the call waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    ExitStatus::from_raw(status)
}

/// A program may reserve terabytes, and use a page here and there.
#[test]
fn a_reservation_of_a_tebibyte_costs_little_more_than_its_pages() {
    by_each("a_reservation_of_a_tebibyte_costs_little_more_than_its_pages", ALL, reserve);
}

const RESERVED: usize = 1 << 28;

/// The number of the i-th used page. These pages are far apart.
fn far_apart(i: usize) -> usize {
    i * 0x0123_4567 % (RESERVED / 2 - 4096) * 2
}

fn reserve(means: Means) {
    const FIRST: usize = 64;
    const ALL: usize = 4000;
    let pager = pager(means, "20M");
    let memory = Mapped::map(RESERVED);
    let whole = memory.at..memory.at + RESERVED * PAGE;
    (0..FIRST).for_each(|i| memory.write(far_apart(i), 1));
    let used = || pager.stats().get("memory_used").unwrap() as usize;
    let before = used();
    memory.adopt(&pager, true);
    let cost = used() - before;
    // Four bytes for 16 MiB; pages with their words.
    let most = (256 << 10) + FIRST * (PAGE + 2 * 260) + (16 << 10);
    assert!(cost <= most, "{means:?}: {cost} bytes of {most}");
    for i in FIRST..ALL {
        memory.write(far_apart(i), 1);
        if i % 64 == 0 {
            pager.find_used();
        }
    }
    pager.find_used();
    let stats = pager.stats();
    assert!(stats.get("stores").unwrap() > 100, "{means:?}: {stats}");
    // Each page that is stored takes room for 64 keys, which reclaim makes up for.
    let is_kept = || used() <= pager.memory() as usize * 102 / 100;
    let end = Instant::now() + Duration::from_secs(20);
    while !is_kept() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(is_kept(), "{means:?}: {}", used());
    pager.page_out(whole.clone()).unwrap();
    assert!(pager.is_out(memory.at + far_apart(77) * PAGE));
    assert!(!pager.is_out(memory.at + (far_apart(77) + 200) * PAGE), "the kernel says so");
    (0..ALL).for_each(|i| memory.check(far_apart(i), 1));
    (0..100).for_each(|i| memory.check(far_apart(i) + 1, 0));
    // The kernel may write to pages that were never used.
    let fresh = memory.at + (far_apart(5) + 1000) * PAGE;
    let held = pager.pin(fresh..fresh + 2 * PAGE).unwrap();
    assert_eq!(held.len(), 2 * PAGE);
    // SAFETY: the pages are mapped and pinned, and no other code uses them.
    let bytes = unsafe { std::slice::from_raw_parts_mut(fresh as *mut u8, 2 * PAGE) };
    File::open("/dev/zero").unwrap().read_at(bytes, 0).unwrap();
    Pager::unpin(held);
    pager.page_out(whole.clone()).unwrap();
    reserve_in_fork(&pager, memory, ALL);
    let quarter = RESERVED / 4;
    let is_in = |i: &usize, quarters: Range<usize>| quarters.contains(&(far_apart(*i) / quarter));
    memory.drop_pages(&pager, 0, quarter);
    (0..ALL).for_each(|i| memory.check(far_apart(i), !is_in(&i, 0..1) as u32));
    if means.mode() == Mode::InThread {
        move_part(&pager, memory, quarter / 2 + 77..quarter + 5077);
    }
    let last = whole.start + 3 * quarter * PAGE..whole.end;
    pager.release(last.clone());
    assert!(!pager.has_adopted(last));
    (0..ALL).filter(|i| is_in(i, 3..4)).for_each(|i| memory.check(far_apart(i), 1));
    memory.release(&pager);
    assert!(!pager.has_adopted(whole));
}

/// The child finds all pages, and uses others. None is pinned for a thread of the parent.
fn reserve_in_fork(pager: &Pager, memory: Mapped, all: usize) {
    let at = memory.at + far_apart(3) * PAGE;
    let held = pager.pin(at..at + PAGE).unwrap();
    let still = pager.before_fork().unwrap();
    // SAFETY: the child runs the code below, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        still.in_child().unwrap();
        pager.after_fork().unwrap();
        (0..all).for_each(|i| memory.check(far_apart(i), 1));
        pager.page_out(at..at + PAGE).unwrap();
        assert!(pager.is_out(at), "it is pinned");
        (0..1000).for_each(|i| memory.write(far_apart(i) + 300, 2));
        (0..1000).for_each(|i| memory.check(far_apart(i) + 300, 2));
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(0) };
    }
    still.in_parent();
    Pager::unpin(held);
    let mut status = 0;
    // SAFETY: the child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(ExitStatus::from_raw(status).success(), "{status:#x}");
}

/// Moves a part of a reservation elsewhere, and back.
fn move_part(pager: &Pager, memory: Mapped, pages: Range<usize>) {
    let (home, bytes) = (memory.at + pages.start * PAGE, pages.len() * PAGE);
    let used = || (0..4000).map(far_apart).filter(|page| pages.contains(page));
    let version = |page: usize| u32::from(page >= RESERVED / 4);
    let free = Mapped::map(pages.len() + 1);
    let away = free.at + PAGE;
    for (from, to) in [(home, away), (away, home)] {
        let call = || {
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: both places have only mappings of this test. The old place stays mapped, so
            // that the library does not map its own memory there.
            let at = unsafe {
                let at = libc::mremap(from as *mut _, bytes, bytes, flags, to);
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
                libc::mmap(from as *mut _, bytes, 0, flags | libc::MAP_FIXED, -1, 0);
                at
            };
            (at != libc::MAP_FAILED).then_some(at as usize)
        };
        // SAFETY: nothing at the target is adopted; the threads of this test use neither.
        unsafe { pager.move_adopted(from..from + bytes, bytes, Change::Gone, call) }.unwrap();
        assert!(!pager.has_adopted(from..from + bytes));
        let moved = Mapped { at: to - pages.start * PAGE, pages: RESERVED };
        used().take(200).for_each(|page| moved.check(page, version(page)));
        assert_eq!(pager.adopted(to..to + bytes).iter().map(Range::len).sum::<usize>(), bytes);
    }
}

/// A guard of the program's own is no page of ours.
#[test]
fn guards_of_the_programs_own_stay() {
    by_each("guards_of_the_programs_own_stay", ALL, have_a_guard);
}

fn have_a_guard(means: Means) {
    if Means::Guards.check().is_err() {
        return;
    }
    let pager = pager(means, "10M");
    let memory = Mapped::map(64);
    (0..64).for_each(|page| memory.write(page, 1));
    let guarded = (memory.at + 20 * PAGE) as *mut libc::c_void;
    // SAFETY: the page is inside the mapping. 102 is MADV_GUARD_INSTALL, since Linux 6.13.
    assert_eq!(unsafe { libc::madvise(guarded, PAGE, 102) }, 0);
    memory.adopt(&pager, true);
    pager.page_out(memory.at..memory.at + 64 * PAGE).unwrap();
    (0..64).filter(|page| *page != 20).for_each(|page| memory.check(page, 1));
    let mut byte = [0];
    let own = File::open("/proc/self/mem").unwrap();
    assert!(own.read_at(&mut byte, guarded as u64).is_err(), "{means:?}: it is a guard");
    assert!(!pager.has_adopted(guarded as usize..guarded as usize + PAGE));
    // The kernel finds no page, either.
    let mut zero = File::open("/dev/zero").unwrap();
    // SAFETY: the kernel refuses to write there.
    let bytes = unsafe { std::slice::from_raw_parts_mut(guarded.cast::<u8>(), PAGE) };
    assert!(zero.read(bytes).is_err());
}
