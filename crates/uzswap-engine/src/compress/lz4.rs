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

/// The library keeps a hash table (16 KiB) per thread, resets it between pages, and panics in a
/// thread that is ending and has it no more. Such a thread may still have to compress a page: for a
/// fault of another library's that ends after this. So this is begun after the table, to end before
/// it, and tells whether it is there.
struct Table;

thread_local! {
    static TABLE: Table = Table::begin();
}

impl Table {
    fn begin() -> Self {
        // Whatever comes of it, there is a table then.
        let _ = lzzzz::lz4::compress(&[0], &mut [0; 16], 1);
        Self
    }
}

impl Drop for Table {
    fn drop(&mut self) {}
}

impl Compressor for Lz4 {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match self.level {
            0 => self.words.compress(page, out),
            ..0 => self.bytes.compress(page, out),
            1.. => match TABLE.try_with(|_| lzzzz::lz4::compress(page, out, self.level).ok()) {
                Ok(object) => object,
                Err(_) => self.words.compress(page, out),
            },
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
