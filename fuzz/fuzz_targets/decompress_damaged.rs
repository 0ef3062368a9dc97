//! Damaged objects into every decoder.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use uzswap_engine::compress::{Algorithm, Codec, Codecs};
use uzswap_engine::testing::fuzz_decompress_damaged;

thread_local! {
    static CODECS: RefCell<Codecs> =
        RefCell::new(Codecs::new(Algorithm { codec: Codec::Raw, level: 0 }));
}

fuzz_target!(|bytes: &[u8]| {
    CODECS.with_borrow_mut(|codecs| fuzz_decompress_damaged(codecs, bytes));
});
