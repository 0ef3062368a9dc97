//! Forks of a process with regions.

use super::*;

#[test]
fn a_fork_that_touches_a_region_gets_a_signal_and_a_reason_and_never_zeros() {
    let output = run("fork touches");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("does not inherit"), "{}", stderr(&output));
}

pub(crate) fn fork_touches() {
    let pager = builder().build().unwrap();
    let values = filled(&pager, 40 * MIB);
    for at in [0, values.len() - 1] {
        let status = in_fork(|| _ = std::hint::black_box(values[at]));
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "element {at}");
    }
    assert!(is_whole(&values), "the parent goes on");
}

#[test]
fn a_fork_that_leaves_regions_alone_goes_on() {
    assert_passes("fork leaves");
}

pub(crate) fn fork_leaves() {
    let pager = builder().build().unwrap();
    let mut values = filled(&pager, 40 * MIB);
    for round in 0..4 {
        let other = filled(&pager, 2 * MIB);
        let status = in_fork(|| {
            assert!(pager.map(4096).is_err() && other.touch(0..1).is_err());
            drop(other);
            // The child's own pager works.
            let own = builder().build().unwrap();
            assert!(is_whole(&filled(&own, 24 * MIB)));
            drop(own);
            drop(pager.clone());
        });
        assert!(status.success(), "{status}");
        // Pages also go out while a child lives.
        values.advise(0..values.len(), Advice::PageOut).unwrap();
        assert!(is_whole(&values), "round {round}");
        values[0] = 0;
    }
}

#[test]
fn a_fork_may_have_a_copy_that_is_its_own_and_so_may_its_forks() {
    assert_passes("fork copies");
}

/// A pager of each mode that this process may use.
fn copying_pagers(memory: &str) -> Vec<Pager> {
    let modes = [Mode::InThread, Mode::HandlerThreads];
    let modes = modes.into_iter().filter(|mode| mode.check().is_ok());
    let builder = || Pager::builder().memory(memory).on_fork(OnFork::PrivateCopy);
    modes.map(|mode| builder().mode(mode).build().unwrap()).collect()
}

/// Regions whose pages are in every state: on their way out, compressed, in memory, written since
/// they came back, dropped, and never touched.
pub(crate) fn fork_copies() {
    const DROPPED: std::ops::Range<usize> = 5 * MIB / 8..7 * MIB / 8;
    let pagers = copying_pagers("16M");
    let mut all: Vec<_> = pagers.iter().map(|pager| filled(pager, 40 * MIB)).collect();
    let untouched: Vec<RegionVec<u64>> =
        pagers.iter().map(|pager| pager.vec_zeroed(MIB).unwrap()).collect();
    let value = |i: usize, version: u64| match i {
        i if DROPPED.contains(&i) => 0,
        i if i % 5000 == 0 => i as u64 / 3 + version,
        i => i as u64 / 3,
    };
    let is_at = |values: &[u64], version: u64| {
        values.iter().enumerate().all(|(i, found)| *found == value(i, version))
    };
    let write = |values: &mut [u64], version: u64| {
        let at = (0..values.len()).step_by(5000).filter(|i| !DROPPED.contains(i));
        at.for_each(|i| values[i] = value(i, version));
    };
    for values in &mut all {
        values.clear(DROPPED).unwrap();
        write(values, 1);
        let staged = pagers[0].stats().get("staged_pages").unwrap();
        assert!(pagers[0].stats().get("stored_pages").unwrap() > 1000, "{staged} staged");
    }
    let (mut told, mut tell) = std::io::pipe().unwrap();
    // SAFETY: the child checks, forks and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(tell);
        assert!(all.iter().all(|values| is_at(values, 1)));
        assert!(untouched.iter().all(|values| values.iter().all(|value| *value == 0)));
        // Waits until the parent has written to all of its own pages and paged them out.
        std::io::Read::read_exact(&mut told, &mut [0]).unwrap();
        assert!(all.iter().all(|values| is_at(values, 1)), "what the parent writes is its own");
        all.iter_mut().for_each(|values| write(values, 3));
        let status = in_fork(|| {
            assert!(all.iter().all(|values| is_at(values, 3)), "a fork of the fork");
            all.iter_mut().for_each(|values| write(values, 4));
        });
        assert!(status.success() && all.iter().all(|values| is_at(values, 3)), "{status}");
        assert!(all[0].touch(0..1).is_err() && pagers[0].map(PAGE).is_err());
        // A pager of the fork's own, and a copy for its fork.
        let own = filled(&copying_pagers("8M")[0], 12 * MIB);
        assert!(in_fork(|| assert!(is_whole(&own) && is_at(&all[0], 3))).success());
        let at = format!("{:x}-", all[0].as_ptr() as usize);
        let is_mapped = || std::fs::read_to_string("/proc/self/maps").unwrap().contains(&at);
        assert!(is_mapped());
        drop(all);
        assert!(!is_mapped(), "a copy goes with its region");
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(0) }
    }
    for values in &mut all {
        assert!(is_at(values, 1));
        write(values, 2);
        values.advise(0..values.len(), Advice::PageOut).unwrap();
    }
    for pager in &pagers {
        // Except pages of zeros and the reserve for faults.
        let charged = pager.stats().get("charged_pages").unwrap();
        assert!(charged < 1500, "{charged} pages stay while a fork shares them");
    }
    std::io::Write::write_all(&mut tell, &[0]).unwrap();
    let mut status = 0;
    // SAFETY: the call waits for the child that was just made.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(std::process::ExitStatus::from_raw(status).success(), "{status}");
    assert!(all.iter().all(|values| is_at(values, 2)), "what the child writes is its own");
}

#[test]
fn a_copy_is_of_one_moment_whatever_other_threads_write() {
    assert_passes("fork copies while threads write");
}

/// Each thread writes a value to a region, then notes it in ordinary memory. So in a copy each
/// value is the noted one, or its successor.
pub(crate) fn fork_copies_while_threads_write() {
    const SLOTS: usize = 4 * MIB / 8 / THREADS;
    const THREADS: usize = 8;
    for pager in copying_pagers("16M") {
        let mut regions: Vec<RegionVec<u64>> =
            (0..THREADS).map(|_| pager.vec_zeroed(SLOTS * 8).unwrap()).collect();
        let noted: Vec<AtomicU64> = (0..THREADS * SLOTS).map(|_| AtomicU64::new(0)).collect();
        let is_over = AtomicBool::new(false);
        let at: Vec<usize> = regions.iter().map(|region| region.as_ptr() as usize).collect();
        std::thread::scope(|scope| {
            for (thread, region) in regions.iter_mut().enumerate() {
                let (noted, is_over) = (&noted, &is_over);
                scope.spawn(move || {
                    let mut noise = Noise::new(thread as u64);
                    while !is_over.load(SeqCst) {
                        let slot = noise.below(SLOTS as u64) as usize;
                        let noted = &noted[thread * SLOTS + slot];
                        let next = noted.load(SeqCst) + 1;
                        region[slot * 8..][..8].fill(next << 8 | thread as u64);
                        noted.store(next, SeqCst);
                    }
                });
            }
            for round in 0..6 {
                let status = in_fork(|| {
                    let (mut written, mut wrong) = (0, 0);
                    for (i, noted) in noted.iter().enumerate() {
                        let (thread, slot) = (i / SLOTS, i % SLOTS);
                        let noted = noted.load(SeqCst);
                        // SAFETY: the words are inside the region. The child has a copy of it,
                        // which no other thread writes.
                        let found = unsafe {
                            std::slice::from_raw_parts((at[thread] + slot * 64) as *const u64, 8)
                        };
                        let is_of = |value: &u64| match noted {
                            0 if *value == 0 => true,
                            n => [n, n + 1].map(|n| n << 8 | thread as u64).contains(value),
                        };
                        written += usize::from(noted > 0);
                        wrong += usize::from(!found.iter().all(is_of));
                    }
                    assert!(round == 0 || written > 0);
                    assert_eq!(wrong, 0, "of {written} in round {round}");
                });
                assert!(status.success(), "round {round}: {status}");
            }
            is_over.store(true, SeqCst);
        });
        assert!(pager.stats().get("stored_pages").unwrap() > 0);
    }
}

#[test]
fn a_fork_of_which_no_copy_can_be_made_dies_with_the_reason_when_it_touches_a_region() {
    for (case, reason) in [("fork cannot copy", "os error 27"), ("fork cannot read", "os error 5")]
    {
        let output = run(case);
        let text = stderr(&output);
        assert!(output.status.success(), "{case}: {text}");
        assert!(text.contains("could not be copied") && text.contains(reason), "{case}: {text}");
    }
}

pub(crate) fn fork_cannot_copy() {
    let pager = builder().on_fork(OnFork::PrivateCopy).build().unwrap();
    let values = filled(&pager, 24 * MIB);
    let limit = libc::rlimit { rlim_cur: MIB as u64, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the call takes a structure of this type.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
    dies_in_fork(&values);
    assert!(is_whole(&values), "the parent goes on");
}

#[track_caller]
fn dies_in_fork(values: &[u64]) {
    assert!(in_fork(|| ()).success());
    for at in [0, values.len() - 1] {
        let status = in_fork(|| _ = std::hint::black_box(values[at]));
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "element {at}");
    }
}

pub(crate) fn fork_cannot_read() {
    let (backing, faults) = TestBacking::new(64 * MIB, 4096);
    let builder = Pager::builder().memory("8M").mode(Mode::InThread).on_fork(OnFork::PrivateCopy);
    let pager = builder.build_on(Box::new(backing)).unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(24 * MIB / 8).unwrap();
    let noise = |i: usize| Noise::new(i as u64 + 1).word();
    values.iter_mut().enumerate().for_each(|(i, value)| *value = noise(i));
    faults.fail_reads.store(true, SeqCst);
    dies_in_fork(&values);
    faults.fail_reads.store(false, SeqCst);
    assert!((0..values.len()).all(|i| values[i] == noise(i)), "the parent goes on");
    assert!(in_fork(|| assert!((0..values.len()).all(|i| values[i] == noise(i)))).success());
}
