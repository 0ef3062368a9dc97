//! LZ4, block format, by liblz4; levels 0 and −1 are encoders of our own.

mod block;
mod bytes;
mod words;

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};

pub(super) struct Lz4 {
    /// The library's acceleration, or that of an encoder of ours.
    level: i32,
    words: words::Words,
    bytes: bytes::Bytes,
}

impl Lz4 {
    pub(super) fn new() -> Self {
        Self { level: 1, words: words::Words::new(), bytes: bytes::Bytes::new() }
    }

    pub(super) fn set_level(&mut self, level: i32) {
        self.level = level;
    }
}

impl Compressor for Lz4 {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match self.level {
            0 => self.words.compress(page, out),
            ..0 => self.bytes.compress(page, out),
            // The library keeps its hash table (16 KiB) per thread and resets it between pages.
            1.. => lzzzz::lz4::compress(page, out, self.level).ok(),
        }
    }

    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable> {
        match lzzzz::lz4::decompress(object, page) {
            Ok(PAGE_BYTES) => Ok(()),
            _ => Err(Undecodable),
        }
    }
}

#[cfg(test)]
mod tests;
