//! Any sequence of operations, against a map.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uzswap_engine::testing::fuzz_cache_ops(bytes));
