//! Compressed pages that a program no longer touches leave the memory to the pages that it uses.

#![allow(clippy::unwrap_used, reason = "tests")]

use uzswap_engine::testing::TestBacking;
use uzswap_region::{Pager, RegionVec};

const MIB: usize = 1 << 20;
const WORDS: usize = 512;

/// Half of each page is noise.
fn value(i: usize) -> u64 {
    let mixed = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    if i.is_multiple_of(2) { (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) } else { 7 }
}

fn filled(pager: &Pager, bytes: usize) -> RegionVec<u64> {
    let mut values: RegionVec<u64> = pager.vec_zeroed(bytes / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    values
}

/// Faults of the last of many passes over memory that fits, if memory that is never used again
/// takes none.
fn faults_of_a_pass(old_bytes: usize, backing_bytes: usize) -> u64 {
    let (backing, _) = TestBacking::new(backing_bytes, 512);
    let pager = Pager::builder().memory("32M").build_on(Box::new(backing)).unwrap();
    let old = filled(&pager, old_bytes);
    let mut used = filled(&pager, 16 * MIB);
    let mut before = 0;
    for pass in 0..60 {
        before = pager.stats().get("faults").unwrap();
        // The pages are touched in an order in which no fault continues another fault.
        for step in 0..used.len() / WORDS {
            let at = step * 1003 % (used.len() / WORDS) * WORDS;
            assert_eq!(used[at], value(at).wrapping_add(pass), "word {at}");
            used[at] = value(at).wrapping_add(pass + 1);
        }
    }
    let faults = pager.stats().get("faults").unwrap() - before;
    println!("{}", pager.stats());
    assert!((0..old.len()).all(|i| old[i] == value(i)));
    faults
}

#[test]
fn pages_that_are_never_used_again_go_to_the_backing() {
    let faults = faults_of_a_pass(48 * MIB, 64 * MIB);
    assert!(faults < 400, "{faults} faults at 4096 pages");
}

#[test]
fn where_the_backing_is_full_the_pool_has_them() {
    // Each pass compares all pages that it touches, and the process goes on.
    faults_of_a_pass(16 * MIB, 2 * MIB);
}
