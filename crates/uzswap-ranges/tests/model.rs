//! Any sequence of operations, against a map, on every index.

use proptest::prelude::*;
use uzswap_ranges::testing::{Harness, decode_ops};
use uzswap_ranges::tree::{LockedMap, LockedTree};
use uzswap_ranges::{RangeIndex, SkipList};

/// Points of the space: enough for some three hundred items, which are a dozen leaves.
const SPACE: u64 = 4000;

fn run<I: RangeIndex>(index: I, bytes: &[u8]) {
    let mut harness = Harness::new(index, I::Preload::default());
    for op in decode_ops(bytes, SPACE, bytes.len() / 16) {
        harness.apply(op);
        harness.check();
    }
}

fn cases() -> u32 {
    if std::env::var_os("UZSWAP_FULL").is_some() { 2000 } else { 24 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn the_skiplist_is_a_map(bytes in prop::collection::vec(any::<u8>(), 8 * 2000)) {
        run(SkipList::new(), &bytes);
    }

    #[test]
    fn the_locked_trees_are_maps(bytes in prop::collection::vec(any::<u8>(), 8 * 500)) {
        run(LockedTree::new(), &bytes);
        run(LockedMap::new(), &bytes);
    }
}
