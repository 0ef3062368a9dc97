//! Replays recorded programs on a region: the pager faults as often as the simulator says.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use uzswap_engine::testing::TestBacking;
use uzswap_policy::pager_memory::PagerMemory;
use uzswap_policy::replay::{Policy, ReplayCounts, Step, simulate};
use uzswap_region::{Mode, OnFork, Pager, PagerPolicy, RegionVec, Stats};
use uzswap_trace::{Steps, Trace};

/// The number of 64-bit numbers in a page.
const EACH: usize = 512;

/// Traces of `uzswap-trace`, and sizes of memory at which they fault, MiB. Without `UZSWAP_FULL=1`
/// the test replays them in the second size alone.
const RECORDED: [(&str, [u64; 3]); 7] = [
    ("heap", [20, 24, 28]),
    ("numpy", [28, 32, 40]),
    ("node", [40, 48, 56]),
    ("java", [24, 28, 32]),
    ("cc", [24, 28, 32]),
    ("sqlite", [20, 22, 24]),
    ("sort", [24, 28, 32]),
];

/// The percentage by which the simulator may be off for one trace, and on average.
const OFF_MAX: u64 = 25;
const OFF_MEAN_MAX: u64 = 12;
/// Here the program nearly fits, and a few pages make a great difference.
const NEARLY_FITS: [(&str, u64); 2] = [("numpy", 40), ("java", 32)];
const OFF_MAX_WHERE_IT_NEARLY_FITS: u64 = 60;

/// The time of a read for a pager that does not measure its backing, ns.
const READ_NANOS: u64 = 100_000;

/// The percentage by which the pager's faults under two policies differ clearly.
const CLEARLY: u64 = 12;

fn read(name: &str) -> Steps {
    let path =
        format!("{}/../uzswap-trace/tests/data/{name}.trace.zst", env!("CARGO_MANIFEST_DIR"));
    let packed = std::fs::read(&path).unwrap();
    let mut bytes = vec![0; 4 << 20];
    let len = zstd_safe::decompress(&mut bytes[..], &packed).unwrap();
    Steps::of(&Trace::from_bytes(&PathBuf::from(path), &bytes[..len]).unwrap())
}

/// Unique content that lz4 compresses to `bytes` bytes.
fn fill(page: &mut [u64], bytes: u16, noise: &mut u64) {
    let mut next = || {
        *noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        *noise ^ *noise >> 32
    };
    page.fill(0);
    if bytes > 0 {
        // A page has at least one word of data; lz4 takes some bytes for the zeros behind it.
        let words = (usize::from(bytes).saturating_sub(24) / 8).clamp(1, EACH);
        page[..words].fill_with(&mut next);
    }
}

/// Touches the pages of a region as the program touched its memory.
fn program(pager: &Pager, steps: &Steps) -> Stats {
    let places = *steps.places.last().unwrap() as usize + 1;
    let mut values: RegionVec<u64> = pager.vec_zeroed(places * EACH).unwrap();
    let mut was_touched = vec![false; steps.pages];
    let (mut noise, mut sum) = (1, 0);
    for step in &steps.all {
        let (Step::Touch { page, .. } | Step::Gone { page }) = *step;
        let first = steps.places[page as usize] as usize * EACH;
        let range = first..first + EACH;
        let Step::Touch { bytes, is_write, changes, .. } = *step else {
            values.clear(range).unwrap();
            continue;
        };
        let is_new = !std::mem::replace(&mut was_touched[page as usize], true);
        if !is_write && !is_new {
            sum ^= values[first];
        }
        if is_new || changes {
            fill(&mut values[range], bytes, &mut noise);
        }
    }
    std::hint::black_box(sum);
    pager.stats()
}

/// A pager whose pages are not guarded when they come from its backing, as in a run in-process. The
/// backing never fills.
fn with_backing(memory: u64, policy: PagerPolicy) -> Pager {
    let (backing, _) = TestBacking::new(256 << 20, 512);
    let pager = Pager::builder().memory(memory).mode(Mode::InThread).policy(policy);
    pager.on_fork(OnFork::PrivateCopy).build_on(Box::new(backing)).unwrap()
}

/// The median of the faults of three runs on pages that had left. The pager's own faults differ by
/// up to a tenth from run to run.
fn faults(pager: impl Fn() -> Pager, steps: &Steps) -> u64 {
    let mut runs = [(); 3].map(|()| {
        let stats = program(&pager(), steps);
        let of = |name| stats.get(name).unwrap();
        of("faults") - of("faults_staged") - of("faults_untouched") - of("faults_guarded")
    });
    runs.sort_unstable();
    runs[1]
}

fn is_full() -> bool {
    std::env::var_os("UZSWAP_FULL").is_some()
}

/// Prints the faults of both, and returns the percentage by which they differ.
fn off(name: &str, mib: u64, policy: PagerPolicy, real: u64, counts: ReplayCounts) -> u64 {
    let simulated = counts.faults();
    println!("| {name} | {mib} | {policy} | {real} | {simulated} |");
    let off = simulated.abs_diff(real) * 100 / real.max(1);
    let is_steep = NEARLY_FITS.contains(&(name, mib));
    let off_max = if is_steep { OFF_MAX_WHERE_IT_NEARLY_FITS } else { OFF_MAX };
    assert!(off <= off_max, "{name} in {mib} MiB: {real} faults, {simulated} simulated");
    off
}

fn assert_mean(all: &[u64]) {
    let mean = all.iter().sum::<u64>() / all.len() as u64;
    assert!(mean <= OFF_MEAN_MAX, "{mean} % on average: {all:?}");
}

#[test]
fn the_pager_faults_on_recorded_programs_as_often_as_the_simulator_says() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let mut all = Vec::new();
    for (name, memories) in RECORDED {
        let steps = read(name);
        for mib in if is_full() { &memories[..] } else { &memories[1..2] } {
            let pager = || Pager::builder().memory(mib << 20).mode(Mode::InThread).build().unwrap();
            let real = faults(pager, &steps);
            let room = PagerMemory::of_pager(mib << 20, None);
            let counts = simulate(Policy::ORDER, &steps.all, Some(&steps.places), room, 0);
            all.push(off(name, *mib, PagerPolicy::Order, real, counts));
        }
    }
    assert_mean(&all);
}

#[test]
fn with_a_backing_it_faults_as_often_as_the_simulator_says_and_policies_compare_alike() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let policies = if is_full() { &PagerPolicy::ALL[..] } else { &[PagerPolicy::Order] };
    let (mut all, mut read_nanos) = (Vec::new(), 0);
    for (name, memories) in RECORDED {
        let steps = read(name);
        for mib in if is_full() { &memories[..] } else { &memories[..1] } {
            let compared = policies.iter().map(|policy| {
                let real = faults(|| with_backing(mib << 20, *policy), &steps);
                let (room, policy) = (PagerMemory::of_pager(mib << 20, Some(READ_NANOS)), *policy);
                let places = Some(&*steps.places);
                let counts = simulate(Policy::Pager(policy), &steps.all, places, room, 0);
                all.push(off(name, *mib, policy, real, counts));
                read_nanos += counts.read_nanos;
                (real, counts.faults())
            });
            let compared: Vec<_> = compared.collect();
            if let [(real, simulated), (real_of_clock, simulated_of_clock)] = compared[..]
                && real.abs_diff(real_of_clock) * 100 > real.min(real_of_clock) * CLEARLY
            {
                let (real, simulated) = (real < real_of_clock, simulated < simulated_of_clock);
                assert_eq!(real, simulated, "{name} in {mib} MiB: {compared:?}");
            }
        }
    }
    assert!(read_nanos > 0, "the pool has room for all pages");
    assert_mean(&all);
}
