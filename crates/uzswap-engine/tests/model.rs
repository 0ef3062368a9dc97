//! Any sequence of operations, against a map: in every configuration, with a backing that fails.

#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use uzswap_engine::testing::{Content, Harness, Op, Setup, decode_ops};

const PAGES: u32 = 3000;

fn setups() -> Vec<Setup> {
    let base = Setup { pages: PAGES, ..Setup::default() };
    vec![
        base,
        Setup { compressor: "zstd", backing_bytes: 4 << 20, ..base },
        Setup { pool_bytes: 1 << 20, backing_bytes: 8 << 20, block_bytes: 4096, ..base },
        Setup { pool_bytes: 1 << 20, backing_bytes: 3 << 20, seals_backing: false, ..base },
        Setup { pool_bytes: 1 << 20, backing_bytes: 2 << 20, compressor: "deflate", ..base },
    ]
}

fn run(bytes: &[u8], check_each: bool) {
    for setup in setups() {
        let mut harness = Harness::new(setup);
        for op in decode_ops(bytes, PAGES) {
            harness.apply(op);
            if check_each {
                harness.cache.check();
            }
        }
        harness.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn short_sequences_match_the_model_after_each_step(
        bytes in prop::collection::vec(any::<u8>(), 0..600)
    ) {
        run(&bytes, true);
    }
}

/// Long sequences: `UZSWAP_FULL=1` has more.
fn cases() -> u32 {
    if std::env::var_os("UZSWAP_FULL").is_some() { 100 } else { 6 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    #[test]
    fn long_sequences_match_the_model(bytes in prop::collection::vec(any::<u8>(), 20_000..60_000)) {
        run(&bytes, false);
    }
}

/// Fills and refills so that the pool overflows, segments are cleaned and everything moves.
#[test]
fn heavy_churn_through_a_small_pool_matches_the_model() {
    let (mut with_dictionary, mut numbers) = (0, 0);
    for (round, setup) in setups().into_iter().enumerate() {
        let mut harness = Harness::new(setup);
        let mut noise = uzswap_engine::testing::Noise::new(round as u64 + 1);
        // A dictionary to begin with: too few of the later pages stay in the pool to train on.
        for offset in 0..640 {
            let content = Content::Pointers;
            harness.apply(Op::Store { offset, content, seed: offset.into(), through: false });
        }
        harness.apply(Op::Train);
        for step in 0..60_000 {
            let word = noise.word().to_le_bytes();
            let op = decode_ops(&word[..4], PAGES).next().unwrap();
            // Mostly stores and loads, and no failures: those have their own tests.
            let op = match op {
                Op::FailWrites(_) | Op::FailReads(_) => Op::Maintain,
                Op::Set("compressor", _) if setup.compressor == "zstd" => Op::Train,
                op => op,
            };
            harness.apply(op);
            if step % 10_000 == 0 {
                harness.check();
            }
        }
        harness.check();
        with_dictionary += harness.cache.statistic("stores_dictionary").unwrap();
        numbers += harness.cache.statistic("stores_numbers").unwrap();
    }
    assert!(with_dictionary > 1000, "{with_dictionary}");
    assert!(numbers > 1000, "{numbers}");
}
