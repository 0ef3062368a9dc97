//! A pager that records writes down each touch of an absent page, with the page's size.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use uzswap_engine::testing::TestBacking;
use uzswap_policy::pager_memory::PagerMemory;
use uzswap_policy::replay::{Policy, simulate};
use uzswap_region::{Advice, Mode, OnFork, Pager, PagerPolicy, RegionVec, Stats};
use uzswap_trace::{Header, Log, Steps, Trace, What};

const MIB: usize = 1 << 20;
/// Numbers of a page.
const EACH: usize = 512;

fn trace_of(work: impl FnOnce(&Pager)) -> Trace {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let header = Header {
        room: 1 << 18,
        asked: 0,
        memory: 8 << 20,
        processes: 0,
        compressor: "lz4".into(),
        program: "test".into(),
    };
    Log::create(&path, &header).unwrap();
    let pager = Pager::builder().memory("8M").mode(Mode::InThread).accesses(&path).build();
    let pager = pager.unwrap();
    work(&pager);
    drop(pager);
    Trace::read(&path).unwrap()
}

#[test]
fn each_touch_of_a_page_that_is_not_there_is_written_down() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let pages = 32 * MIB / 4096;
    let mut base = 0;
    let trace = trace_of(|pager| {
        let mut values: RegionVec<u64> = pager.vec_zeroed(pages * EACH).unwrap();
        base = values.as_ptr() as u64 / 4096;
        // A pager that does not record would bring in 64 pages at a time here.
        for page in 0..pages {
            for (at, value) in values[page * EACH..][..EACH].iter_mut().enumerate() {
                *value = if page % 4 == 0 { 42 } else { (page * at) as u64 };
            }
        }
        let sum: u64 = (0..pages).map(|page| values[page * EACH]).sum();
        assert_eq!(sum, 42 * pages as u64 / 4);
        values.clear(0..EACH * 10).unwrap();
    });
    assert_eq!((trace.header.lost(), trace.header.processes), (0, 1));
    let mut touches: BTreeMap<u64, Vec<What>> = BTreeMap::new();
    for event in &trace.events {
        assert!((base..base + pages as u64).contains(&event.page), "{event:?}");
        touches.entry(event.page - base).or_default().push(event.what);
    }
    assert_eq!(touches.len(), pages);
    assert!(touches.values().all(|whats| whats[0] == What::New));
    // At most 8 of the 32 MiB are present when the second pass begins. The pass brings in the other
    // pages one by one, so its touches are recorded in any order.
    let of = |what| trace.events.iter().filter(move |event| event.what == what);
    assert!(of(What::Back).count() >= pages * 3 / 4, "{}", of(What::Back).count());
    assert!(of(What::New).all(|event| event.is_write && event.site != 0 && event.bytes == 0));
    assert!(of(What::Back).all(|event| !event.is_write && event.site != 0));
    for event in of(What::Back).chain(of(What::Left)) {
        let is_filled = (event.page - base).is_multiple_of(4);
        assert_eq!(event.is_same_filled, is_filled, "{event:?}");
        assert_eq!(event.bytes == 0, is_filled, "{event:?}");
    }
    assert_eq!(
        of(What::Gone).map(|event| event.page - base).collect::<Vec<_>>(),
        Vec::from_iter(0..10)
    );
    let times = trace.events.iter().map(|event| event.micros);
    assert!(times.clone().max() > times.min(), "time goes on");
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_of_the_pager() {
    let pager = Pager::builder().memory("8M").accesses("/nowhere/trace").build();
    assert!(pager.unwrap_err().to_string().starts_with("/nowhere/trace: No such file"));
}

/// Pages of the program whose faults are compared.
const PAGES: usize = 12_000;

/// Nine of ten touches go to a fifth of the pages, which are scattered.
fn touches(count: usize) -> impl Iterator<Item = usize> {
    let mut noise = 88_172_645_463_325_252_u64;
    (0..count).map(move |_| {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        let any = (noise >> 20) as usize;
        if noise % 10 < 9 { any % (PAGES / 5) * 5 } else { any % PAGES }
    })
}

/// A program that writes all pages, which compress to 1300 bytes, and then reads by a pattern.
fn program(pager: &Pager) -> Stats {
    let mut values: RegionVec<u64> = pager.vec_zeroed(PAGES * EACH).unwrap();
    values.advise(0..PAGES * EACH, Advice::Random).unwrap();
    let mut noise = 1u64;
    for page in 0..PAGES {
        for value in &mut values[page * EACH..][..160] {
            noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *value = noise ^ noise >> 32;
        }
    }
    let sum = touches(8 * PAGES).fold(0u64, |sum, page| sum.wrapping_add(values[page * EACH]));
    assert_ne!(sum, 0);
    // The figures are read while the region still has its pages.
    pager.stats()
}

#[test]
fn the_policy_is_the_one_that_was_given() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let [order, clock] = PagerPolicy::ALL.map(|policy| {
        let pager = Pager::builder().memory("26M").mode(Mode::InThread).policy(policy);
        program(&pager.build().unwrap()).get("faults").unwrap()
    });
    assert!(order * 10 < clock * 9, "{order} faults by levels, {clock} in the order of coming");
}

/// The faults on pages that had left.
fn loaded(stats: &Stats) -> u64 {
    let of = |name| stats.get(name).unwrap();
    of("faults") - of("faults_staged") - of("faults_untouched")
}

#[test]
fn the_simulator_tells_the_faults_that_the_pager_has() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let trace = trace_of(|pager| _ = program(pager));
    assert_eq!(trace.header.lost(), 0);
    let steps = Steps::of(&trace);
    let mut sums = [0, 0];
    for memory in [26, 32, 38].map(|mib| mib * MIB as u64) {
        // The pager's own faults differ by a tenth from run to run, and as much between an idle
        // machine and a busy one.
        let mut runs = [(); 3].map(|()| {
            let pager = Pager::builder().memory(memory).mode(Mode::InThread).build().unwrap();
            loaded(&program(&pager))
        });
        runs.sort_unstable();
        let real = runs[1];
        let simulated =
            simulate(Policy::ORDER, &steps.all, None, PagerMemory::of_pager(memory, None), 0)
                .faults();
        println!("{memory} bytes: {real} faults, {simulated} simulated");
        // A trace lacks touches of pages that were present during the recording. Some of these
        // touches keep a staged page from leaving. Their number grows with the pager's memory.
        assert!(simulated.abs_diff(real) * 10 <= real * 3, "{real} faults, {simulated} simulated");
        sums = [sums[0] + real, sums[1] + simulated];
    }
    let [real, simulated] = sums;
    assert!(simulated.abs_diff(real) * 6 <= real, "{real} faults together, {simulated} simulated");
}

/// Pages that are written once, and pages that the program then goes round.
const OLD: usize = 10_000;
const ROUND: usize = 3_500;
const ROUNDS: usize = 30;

/// A program that goes round in a part of its pages, in an order in which no fault continues
/// another one.
fn rounds(pager: &Pager) -> Stats {
    let mut values: RegionVec<u64> = pager.vec_zeroed((OLD + ROUND) * EACH).unwrap();
    let mut noise = 1u64;
    for page in 0..OLD + ROUND {
        for value in &mut values[page * EACH..][..220] {
            noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            *value = noise ^ noise >> 32;
        }
    }
    for step in 0..ROUNDS * ROUND {
        values[(OLD + step * 1003 % ROUND) * EACH] += 1;
    }
    pager.stats()
}

#[test]
fn the_simulator_gives_idle_pages_to_the_backing_as_the_pager_does() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let trace = trace_of(|pager| _ = rounds(pager));
    assert_eq!(trace.header.lost(), 0);
    let steps = Steps::of(&trace);
    let memory = 28 * MIB as u64;
    let (backing, _) = TestBacking::new(64 * MIB, 512);
    let pager = Pager::builder().memory(memory).mode(Mode::InThread);
    let pager = pager.on_fork(OnFork::PrivateCopy).build_on(Box::new(backing)).unwrap();
    let real = loaded(&rounds(&pager));
    // The pager takes a read of a backing that it does not measure for one of 100 µs.
    let [with, without] = [Some(100_000), None].map(|read_nanos| {
        let room = PagerMemory::of_pager(memory, read_nanos);
        simulate(Policy::ORDER, &steps.all, Some(&steps.places), room, 0).faults()
    });
    println!("{real} faults, {with} simulated, {without} if the pool keeps idle pages");
    assert!(with.abs_diff(real) * 3 <= real, "{real} faults, {with} simulated");
    assert!(without > 2 * real, "{real} faults, {without} if the pool keeps idle pages");
}
