//! Gives damaged objects to every decoder.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::cell::RefCell;
use uzswap_engine::compress::Codecs;
use uzswap_engine::testing::{fuzz_decompress_damaged, trained_codecs};

thread_local! {
    static CODECS: RefCell<Codecs> = RefCell::new(trained_codecs());
}

fuzz_target!(|bytes: &[u8]| {
    CODECS.with_borrow_mut(|codecs| fuzz_decompress_damaged(codecs, bytes));
});
