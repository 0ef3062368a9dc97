//! Replays recorded programs on a region: the pager faults as often as the simulator says.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use uzswap_policy::costs::for_pages;
use uzswap_policy::replay::{Policy, Step, simulate};
use uzswap_region::{Mode, Pager, RegionVec, Stats};
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
/// In 40 MiB the rounds of `numpy` nearly fit, and a few pages make a great difference.
const OFF_MAX_OF_NUMPY: u64 = 50;

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

#[test]
fn the_pager_faults_on_recorded_programs_as_often_as_the_simulator_says() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let mut all = Vec::new();
    for (name, memories) in RECORDED {
        let steps = read(name);
        let is_full = std::env::var_os("UZSWAP_FULL").is_some();
        for mib in if is_full { &memories[..] } else { &memories[1..2] } {
            let memory = mib << 20;
            // The pager's own faults differ by up to a tenth from run to run.
            let mut runs = [(); 3].map(|()| {
                let pager = Pager::builder().memory(memory).mode(Mode::InThread).build().unwrap();
                let stats = program(&pager, &steps);
                let of = |name| stats.get(name).unwrap();
                let others = of("faults_staged") + of("faults_untouched") + of("faults_guarded");
                of("faults") - others
            });
            runs.sort_unstable();
            let real = runs[1];
            let places = Some(&*steps.places);
            let counts = simulate(Policy::ORDER, &steps.all, places, for_pages(memory), 0);
            let simulated = counts.faults();
            println!("| {name} | {mib} | {real} | {simulated} |");
            let off = simulated.abs_diff(real) * 100 / real.max(1);
            let off_max = if name == "numpy" { OFF_MAX_OF_NUMPY } else { OFF_MAX };
            assert!(off <= off_max, "{name} in {mib} MiB: {real} faults, {simulated} simulated");
            all.push(off);
        }
    }
    let mean = all.iter().sum::<u64>() / all.len() as u64;
    assert!(mean <= OFF_MEAN_MAX, "{mean} % on average: {all:?}");
}
