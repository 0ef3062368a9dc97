//! LZ4, block format, by liblz4. Levels 0 and −1 are encoders of our own. The name without a level
//! takes level 0 for pages of words, and the library for all others.

mod block;
mod bytes;
mod words;

use super::{Compressor, Undecodable};
use crate::page::{PAGE_BYTES, Page};

/// The level that chooses an encoder for each page.
pub(super) const BY_PAGE: i32 = -2;

/// A page of words has at least this many words of 48 bits, such as pointers and small numbers. On
/// pages of five programs, objects are as large as the library's within 2 %. Objects of heaps take
/// 0.7 to 0.8 of the library's time to make, and 0.8 to decode (docs/benchmarks.md).
const WORDS_MIN: usize = PAGE_BYTES / size_of::<u64>() / 2;

fn is_of_words(page: &Page) -> bool {
    let words = page.as_chunks::<8>().0;
    // 1 for a longer word: an addition and shifts, which any processor does to several words.
    let is_long = |bytes: &[u8; 8]| ((u64::from_le_bytes(*bytes) >> 48) + 0xffff) >> 16;
    let long: u64 = words.iter().map(is_long).sum();
    words.len() - long as usize >= WORDS_MIN
}

pub(super) struct Lz4 {
    /// The library's acceleration, the level of our own encoder, or [`BY_PAGE`].
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

    /// Compresses bytes that are not a program's page, such as planes of numbers. Uses the library
    /// where the level leaves the choice.
    pub(super) fn compress_bytes(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        let level = if self.level == BY_PAGE { 1 } else { self.level };
        match level {
            0 => self.words.compress(page, out),
            ..0 => self.bytes.compress(page, out),
            1.. => match TABLE.try_with(|_| lzzzz::lz4::compress(page, out, level).ok()) {
                Ok(object) => object,
                Err(_) => self.words.compress(page, out),
            },
        }
    }
}

/// The library has a hash table (16 KiB) for each thread, and resets it between pages. The library
/// panics in an ending thread that has freed the table. Such a thread may still compress a page,
/// for a fault in another library's destructor. This variable is made after the table, so it is
/// dropped before the table. While the variable exists, the table exists.
struct ThreadTable;

thread_local! {
    static TABLE: ThreadTable = ThreadTable::begin();
}

impl ThreadTable {
    fn begin() -> Self {
        // After this call the table exists, even on an error.
        let _ = lzzzz::lz4::compress(&[0], &mut [0; 16], 1);
        Self
    }
}

impl Drop for ThreadTable {
    fn drop(&mut self) {}
}

impl Compressor for Lz4 {
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize> {
        match self.level {
            BY_PAGE if is_of_words(page) => self.words.compress(page, out),
            _ => self.compress_bytes(page, out),
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
