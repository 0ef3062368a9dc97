//! `uzswap run --in-process`: random histories of a program's operations, made from seeds, give the
//! same transcript as alone.
//!
//! ```text
//! UZSWAP_FUZZ_SECONDS=3600  other histories for that long; by default the same few, more with
//!                           UZSWAP_FULL
//! UZSWAP_FUZZ_SEED=0x12     that history alone
//! UZSWAP_FUZZ_SHRINK=0      how long a history that differs is reduced, in seconds
//! UZSWAP_FUZZ_ALL=1         operations with known faults, too
//! ```
//! The program in `tests/history` performs a history. `found.txt` has reduced histories that found
//! a fault. `unmended` has the operations that are left out. A failing test prints the seed and the
//! reduced history.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "histories/generate.rs"]
mod generate;
#[path = "histories/run.rs"]
mod run;
#[path = "histories/shrink.rs"]
mod shrink;
#[path = "histories/unmended.rs"]
mod unmended;

use run::{Rig, Setup, first_difference};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use uzswap_tests::is_full;

/// Seconds for reducing a history. `UZSWAP_FUZZ_SHRINK` overrides it.
const SHRINKING: u64 = 90;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let hex = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    Some(hex.unwrap_or_else(|| text.parse()).expect("a number"))
}

/// Runs a history alone, and in-process in both ways. Returns the differences, and true if pages
/// left in both ways.
fn try_both(rig: &Rig, history: &str) -> (Vec<(Setup, String)>, bool) {
    let alone = rig.run(history, Setup::Alone);
    // These statuses mean that the history itself is at fault.
    let is_sound = ["96", "97", "98"].iter().all(|end| !alone.told.ends_with(&format!(" {end}\n")));
    assert!(is_sound, "alone: {}{}\n{history}", alone.told, alone.said);
    let (mut all, mut has_left) = (Vec::new(), true);
    for way in [Setup::Uffd, Setup::Denied] {
        let with = rig.run(history, way);
        has_left &= with.has_left;
        if with.told != alone.told {
            let difference = first_difference(&alone.told, &with.told);
            all.push((way, format!("{difference}\n{}", with.said)));
        }
    }
    if !all.is_empty() {
        let again = rig.run(history, Setup::Alone).told;
        if again != alone.told {
            let difference = first_difference(&alone.told, &again);
            all = vec![(Setup::Alone, format!("from run to run: {difference}"))];
        }
    }
    (all, has_left)
}

/// Histories of `./check` and of `./check --full`, the same on each machine.
const COUNTS: [u64; 2] = [6, 60];

/// Runs the history of a seed and prints each difference. Returns `None` if there is a difference,
/// otherwise true if pages left.
fn check(rig: &Rig, seed: u64) -> Option<bool> {
    let history = generate::history(seed);
    let (differences, has_left) = try_both(rig, &history);
    let shrinking = number("UZSWAP_FUZZ_SHRINK").unwrap_or(SHRINKING);
    for (way, difference) in &differences {
        println!("seed {seed:#x} differs, {way:?}: {difference}");
        if shrinking == 0 {
            continue;
        }
        let small = shrink::shrink(rig, &history, *way, Duration::from_secs(shrinking));
        let is_sure = shrink::differs(rig, &small, *way);
        println!("reduced{}:\n{small}", if is_sure { "" } else { ", but not in each run" });
    }
    differences.is_empty().then_some(has_left)
}

#[test]
fn any_history_has_the_same_transcript_in_process_as_alone() {
    let rig = Rig::new();
    if let Some(seed) = number("UZSWAP_FUZZ_SEED") {
        print!("{}", generate::history(seed));
        assert!(check(&rig, seed).is_some(), "it differs");
        return;
    }
    let asked = number("UZSWAP_FUZZ_SECONDS");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let first = if asked.is_some() { now.as_secs() << 20 } else { 1 };
    let (start, mut count, mut left, mut differ) = (Instant::now(), 0, 0, Vec::new());
    let most = if asked.is_some() { u64::MAX } else { COUNTS[usize::from(is_full())] };
    while count < most && start.elapsed() < Duration::from_secs(asked.unwrap_or(u64::MAX)) {
        match check(&rig, first + count) {
            Some(has_left) => left += u64::from(has_left),
            None => differ.push(format!("{:#x}", first + count)),
        }
        count += 1;
    }
    for (name, reason) in unmended::rows() {
        println!("left out: {name}: {reason}");
    }
    println!("{count} histories from seed {first:#x} on; in {left} pages left by both doors");
    assert!(differ.is_empty(), "these seeds differ, see above: {}", differ.join(" "));
    assert!(left > count / 3, "pages left in {left} of {count} histories");
}

/// Each history begins with a line `# NAME`. Names in `unmended` are skipped.
#[test]
fn histories_that_found_a_fault_are_the_same_now() {
    let rig = Rig::new();
    let mut failed = Vec::new();
    for part in include_str!("histories/found.txt").split("# ").skip(1) {
        let (name, history) = part.split_once('\n').unwrap();
        if !unmended::is_mended(name) {
            println!("left out: {name}");
            continue;
        }
        for (way, difference) in try_both(&rig, history).0 {
            failed.push(format!("{name}, {way:?}: {difference}"));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Each CPU has buffers and memory set aside. With many CPUs these once took all of a small budget:
/// children of the program ended for want of memory, or waited for it without end.
#[test]
fn a_history_in_little_memory_is_the_same_on_many_cpus() {
    let rig = Rig::with_cpus(128);
    let (differences, has_left) = try_both(&rig, include_str!("histories/many_cpus.txt"));
    assert!(differences.is_empty(), "{differences:?}");
    assert!(has_left, "no page left");
}
