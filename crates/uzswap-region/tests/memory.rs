//! A region holds the bytes that were written, in the memory that it was given.

#![expect(
    unsafe_code,
    reason = "tests count allocations, kill processes or act as a program in C: each says why at the place"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::testing::TestBacking;
use uzswap_region::{Advice, Error, Mode, Pager, RegionVec};

const MIB: usize = 1 << 20;

fn modes() -> Vec<Mode> {
    let modes = [Mode::InThread, Mode::HandlerThreads];
    modes.into_iter().filter(|mode| mode.check().is_ok()).collect()
}

/// Values: some pages compress well, some badly, some to nothing.
fn value(i: usize) -> u64 {
    let mixed = (i as u64 ^ i as u64 >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match i / 512 % 16 {
        0 => 0,
        1 => mixed,
        2 => 42,
        _ if i.is_multiple_of(8) => (i / 512) as u64 * 0x1_0000 + mixed % 64,
        _ => (i / 512) as u64,
    }
}

#[test]
fn four_times_the_budget_comes_back_as_it_was() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(64 * MIB / 8).unwrap();
        assert!(values.iter().step_by(512).take(100).all(|value| *value == 0));
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        for i in 0..values.len() {
            assert_eq!(values[i], value(i), "element {i} in {mode}");
        }
        let mut at = 1;
        for round in 0..200_000 {
            at = (at * 5 + 12_345) % values.len();
            assert_eq!(values[at], value(at), "round {round}");
        }
        let stats = pager.stats();
        let used = stats.get("memory_used").unwrap();
        assert!(used <= pager.memory() * 102 / 100, "{used} bytes of 16 MiB");
        assert!(stats.get("faults").unwrap() > 1000 && stats.get("stored_pages").unwrap() > 4000);
    }
}

/// A small pager needs little more than half of its budget: the rest is for pages.
#[test]
fn a_small_pager_goes_on_with_little_more_than_half_of_its_budget() {
    for mode in modes() {
        let pager = Pager::builder().memory("8M").memory_max(32 << 20).mode(mode);
        let pager = pager.unnamed_backing("/var/tmp", 1 << 30).build().unwrap();
        let least = pager.least_memory() as usize;
        println!("{least} bytes are its least in {mode}: {}", pager.stats());
        assert!(least < 5 * MIB, "{least} bytes in {mode}");
    }
}

#[test]
fn threads_may_end_and_start_again() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(4 * MIB / 8).unwrap();
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        for turn in 0..20 {
            assert_eq!(pager.without_threads(|| turn).unwrap(), turn);
            values.advise(0..values.len(), Advice::PageOut).unwrap();
            assert!((0..values.len()).step_by(64).all(|i| values[i] == value(i)), "{mode}");
        }
    }
}

#[test]
fn pages_go_out_and_come_back_and_are_dropped_when_told() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(4 * MIB / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    values.advise(0..values.len(), Advice::PageOut).unwrap();
    assert_eq!(pager.stats().get("stored_pages"), Some(1024));
    assert!((0..values.len()).all(|i| values[i] == value(i)));
    // A copy is kept, so nothing is compressed again.
    values.advise(0..values.len(), Advice::PageOut).unwrap();
    let unchanged = pager.stats().get("stores_unchanged").unwrap();
    assert!(unchanged > 500, "{unchanged} stores of pages that had not changed");
    values[5] = 7;
    values.clear(512..1030).unwrap();
    assert!((512..1030).all(|i| values[i] == 0));
    assert_eq!((values[5], values[1030], values[511]), (7, value(1030), value(511)));
}

/// Where the pool has more than half of the budget, copies of pages in use are dropped. A page that
/// is read in order is used once, and is evicted with its copy.
#[test]
fn pages_that_are_read_in_order_are_not_compressed_again() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(32 * MIB / 8).unwrap();
    let value = |i: usize| match i % 512 {
        0..160 => (i as u64 ^ i as u64 >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        _ => (i / 512) as u64,
    };
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    let read = || assert!((0..values.len()).all(|i| values[i] == value(i)));
    read();
    let before = pager.stats().get("stores_unchanged").unwrap();
    read();
    let stats = pager.stats();
    assert!(stats.get("pool_total_size").unwrap() > 8 * MIB as u64, "{stats}");
    let unchanged = stats.get("stores_unchanged").unwrap() - before;
    assert!(unchanged > 4096, "{unchanged} of 8192 pages");
}

#[test]
fn pages_are_read_ahead_of_a_thread_that_reads_in_order() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(8 * MIB / 8).unwrap();
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        // The thread that reads ahead may be too late, but not each time.
        let is_read_ahead = (0..100).any(|_| {
            values.advise(0..values.len(), Advice::PageOut).unwrap();
            assert!((0..values.len()).all(|i| values[i] == value(i)));
            pager.stats().get("read_ahead_pages").unwrap() > 0
        });
        assert!(is_read_ahead, "{mode}: {}", pager.stats());
    }
}

/// Pages that came in together are evicted together, so the next pass has whole windows again.
#[test]
fn pages_that_are_read_in_order_again_and_again_come_in_many_at_a_time() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(32 * MIB / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    let read = |times| {
        for _ in 0..times {
            assert!((0..values.len()).step_by(64).all(|i| values[i] == value(i)));
        }
        pager.stats().get("faults").unwrap()
    };
    let before = read(12);
    let faults = read(4) - before;
    assert!(faults < 4 * 8192 / 8, "{faults} faults for four times 8192 pages");
}

#[test]
fn pages_that_were_only_read_go_out_too() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let values: RegionVec<u64> = pager.vec_zeroed(4 * MIB / 8).unwrap();
    for _ in 0..2 {
        assert!(values.iter().all(|value| *value == 0));
        values.advise(0..values.len(), Advice::PageOut).unwrap();
        let stats = pager.stats();
        assert_eq!((stats.get("stored_pages"), stats.get("pool_pages")), (Some(1024), Some(0)));
    }
}

#[test]
fn pinned_memory_stays_and_system_calls_can_use_it() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut bytes: RegionVec<u8> = pager.vec_zeroed(4 * MIB).unwrap();
    let pinned = bytes.pin(4096..3 * 4096).unwrap();
    bytes.advise(0..4 * MIB, Advice::PageOut).unwrap();
    let mut zero = std::fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut zero, &mut bytes[4096..3 * 4096]).unwrap();
    drop(pinned);
    let was = bytes[4096..3 * 4096].to_vec();
    bytes.advise(0..4 * MIB, Advice::PageOut).unwrap();
    let failed = std::io::Read::read_exact(&mut zero, &mut bytes[4096..3 * 4096]).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(bytes[4096..3 * 4096], was);
    assert!(matches!(bytes.pin(0..9 * MIB), Err(Error::Range { .. })));
}

#[test]
fn a_pin_may_be_dropped_after_its_region() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let region = pager.map(MIB).unwrap();
    let pinned = region.pin(0..4096).unwrap();
    drop(region);
    drop(pinned);
}

/// Data that no codec makes smaller, so that nearly all of it is on the backing.
fn noise(i: usize) -> u64 {
    let mut word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^= word >> 29;
    word.wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

fn noisy(mode: Mode) -> (Pager, RegionVec<u64>) {
    let (backing, _) = TestBacking::new(64 * MIB, 512);
    let builder = Pager::builder().memory("8M").mode(mode);
    let pager = builder.build_on(Box::new(backing)).unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(24 * MIB / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = noise(i));
    (pager, values)
}

#[test]
fn pages_that_are_only_read_are_not_written_to_the_backing_again() {
    for mode in modes() {
        let (pager, values) = noisy(mode);
        let count = |name: &str| pager.stats().get(name).unwrap();
        let is_whole = || (0..values.len()).all(|i| values[i] == noise(i));
        // Pages that had not been written yet are written now.
        assert!(is_whole());
        let (reads, loads) = (count("backing_reads"), count("loads_backing"));
        let written = count("written_back_pages");
        for _ in 0..3 {
            assert!(is_whole());
        }
        let written = count("written_back_pages") - written;
        let (reads, loads) = (count("backing_reads") - reads, count("loads_backing") - loads);
        assert!(loads > 12_000 && reads * 2 < loads, "{mode}: {reads} reads for {loads} pages");
        assert!(written * 4 < loads, "{mode}: {written} written, {loads} read");
    }
}

#[test]
fn a_page_that_came_in_for_a_read_can_be_written() {
    for mode in modes() {
        let (pager, mut values) = noisy(mode);
        let count = |name: &str| pager.stats().get(name).unwrap();
        for round in 1..4 {
            // Each page is read first.
            for i in 0..values.len() {
                assert_eq!(values[i], noise(i) + round - 1, "{mode}: element {i}");
                values[i] += 1;
            }
        }
        let (pages, guarded) = (3 * values.len() as u64 / 512, count("faults_guarded"));
        assert!(guarded > 0 && guarded * 3 < pages, "{mode}: {guarded} faults, {pages} pages");
        // At random places, and down.
        let mut at = 1;
        for _ in 0..20_000 {
            at = (at * 5 + 12_345) % values.len();
            assert_eq!(values[at], noise(at) + 3, "{mode}: element {at}");
            values[at] = noise(at) + 3;
        }
        for i in (0..values.len()).rev() {
            assert_eq!(values[i], noise(i) + 3, "{mode}: element {i}");
            values[i] += 1;
        }
        // Four threads in each page.
        let (quarters, _) = values.as_chunks_mut::<128>();
        std::thread::scope(|scope| {
            let mut parts: Vec<Vec<_>> = (0..4).map(|_| Vec::new()).collect();
            for (number, quarter) in quarters.iter_mut().enumerate() {
                parts[number % 4].push((number * 128, quarter));
            }
            for part in parts {
                scope.spawn(move || {
                    for (first, quarter) in part {
                        for (at, value) in quarter.iter_mut().enumerate() {
                            assert_eq!(*value, noise(first + at) + 4);
                            *value += 1;
                        }
                    }
                });
            }
        });
        assert!((0..values.len()).all(|i| values[i] == noise(i) + 5), "{mode}");
        // A system call writes a page that a read has brought in.
        for page in (0..values.len() / 512).step_by(97) {
            let range = page * 512..page * 512 + 512;
            assert_eq!(values[range.start], noise(range.start) + 5);
            let pinned = values.pin(range.clone()).unwrap();
            let zeros = std::fs::File::open("/dev/zero").unwrap();
            let bytes = bytemuck::cast_slice_mut(&mut values[range.clone()]);
            (&zeros).read_exact(bytes).unwrap();
            drop(pinned);
            assert!(values[range].iter().all(|value| *value == 0));
        }
    }
}

#[test]
fn wrong_use_is_refused_with_a_remedy() {
    let error = |builder: uzswap_region::PagerBuilder| builder.build().unwrap_err().to_string();
    assert!(error(Pager::builder()).contains("budget is 0"));
    assert!(error(Pager::builder().memory("1M")).contains("8388608"));
    assert!(error(Pager::builder().memory("12Q")).contains("512M"));
    assert!(error(Pager::builder().memory("16M").compressor("lz5")).contains("zstd"));
    assert!(error(Pager::builder().memory("16M").backing("/no/such:4M")).contains("No such file"));
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    assert!(pager.map(0).unwrap_err().to_string().contains("at least 1"));
    assert!(pager.map(1 << 46).unwrap_err().to_string().contains("addresses"));
    let stack = 0u8;
    // SAFETY: no region has this address.
    let error = unsafe { pager.unmap(std::ptr::from_ref(&stack) as usize) }.unwrap_err();
    assert!(error.to_string().contains("not the start of a region"), "{error}");
}

/// The kernel may find a page changed while it moves the page (its mark *accessed* was set again,
/// or the page is being migrated). The kernel begins again, and then does not count its moves
/// (docs/design/failure.md).
#[test]
fn nothing_is_lost_while_the_kernel_looks_at_which_pages_are_used() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(MIB / 8).unwrap();
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        let (values, done) = (&values, &AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    // Clears the marks.
                    std::fs::write("/proc/self/clear_refs", "1").unwrap();
                    // Migrates pages. An error means that only root may ask for this.
                    let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
                }
            });
            let reader = scope.spawn(|| {
                let began = Instant::now();
                while began.elapsed() < Duration::from_secs(2) {
                    for at in (0..values.len()).step_by(512) {
                        assert_eq!(values[at], value(at), "element {at}, {mode}");
                    }
                }
            });
            while !reader.is_finished() {
                values.advise(0..values.len(), Advice::PageOut).unwrap();
            }
            done.store(true, Relaxed);
            reader.join().unwrap();
        });
    }
}

/// A pipe of `vmsplice` refers to pages without pinning them, as a socket of `MSG_ZEROCOPY` does:
/// the pages are evicted all the same, and the pipe delivers their content.
#[test]
fn a_pipe_delivers_the_content_that_its_pages_had_when_it_got_them() {
    const PAGES: usize = 64;
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(32 * MIB / 8).unwrap();
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        let mut wrong = 0;
        for round in 0..20 {
            let (mut out, into) = std::io::pipe().unwrap();
            let first = round * PAGES * 512;
            let given = &values[first..first + PAGES * 512];
            assert!((first..).zip(given).all(|(i, found)| *found == value(i)), "{mode}");
            let whole =
                libc::iovec { iov_base: given.as_ptr().cast_mut().cast(), iov_len: PAGES * 4096 };
            let pinned = values.pin(first..first + PAGES * 512).unwrap();
            // SAFETY: the memory outlives the pipe.
            let spliced = unsafe {
                libc::fcntl(into.as_raw_fd(), libc::F_SETPIPE_SZ, PAGES * 4096);
                libc::vmsplice(into.as_raw_fd(), &whole, 1, 0)
            };
            assert_eq!(spliced, (PAGES * 4096) as isize, "{mode}");
            drop(pinned);
            // All pages leave, and pages that come in get frames that other pages had.
            for i in (20 * PAGES * 512..values.len()).chain(first..first + PAGES * 512) {
                assert_eq!(values[i], value(i), "{mode}: element {i}");
            }
            let mut delivered = vec![0u64; PAGES * 512];
            out.read_exact(bytemuck::cast_slice_mut(&mut delivered)).unwrap();
            let pages = delivered.as_chunks::<512>().0.iter().enumerate();
            let is_right = |(page, found): &(usize, &[u64; 512])| {
                (first + page * 512..).zip(found.iter()).all(|(i, found)| *found == value(i))
            };
            wrong += pages.filter(|page| !is_right(page)).count();
        }
        assert_eq!(wrong, 0, "of {} pages, {mode}", 20 * PAGES);
    }
}
