//! LZ4, block format, by liblz4.

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};

pub(super) struct Lz4 {
    acceleration: i32,
}

impl Lz4 {
    pub(super) fn new() -> Self {
        Self { acceleration: 1 }
    }

    pub(super) fn set_acceleration(&mut self, acceleration: i32) {
        self.acceleration = acceleration;
    }
}

impl Compressor for Lz4 {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        // The library keeps its hash table (16 KiB) per thread and resets it between pages.
        lzzzz::lz4::compress(page, out, self.acceleration).ok()
    }

    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        match lzzzz::lz4::decompress(object, page) {
            Ok(PAGE_BYTES) => Ok(()),
            _ => Err(Undecodable),
        }
    }
}
