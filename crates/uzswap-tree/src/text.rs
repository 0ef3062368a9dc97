//! A text in the file that all processes of a tree map.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// A text that one process writes once, and that is empty until then. Its bytes are in words of
/// eight.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Text<const WORDS: usize> {
    bytes: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Text<WORDS> {
    /// Writes the joined parts of a text, cut to the available room; `false` if it was cut.
    /// Allocates nothing.
    pub(crate) fn write(&self, text: &[&[u8]]) -> bool {
        let mut bytes = 0;
        let mut fits = true;
        for byte in text.iter().flat_map(|part| part.iter()) {
            let Some(word) = self.words.get(bytes / 8) else {
                fits = false;
                break;
            };
            word.fetch_or(u64::from(*byte) << (bytes % 8 * 8), Relaxed);
            bytes += 1;
        }
        self.bytes.store(bytes as u32, Relaxed);
        fits
    }

    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        let bytes = (self.bytes.load(Relaxed) as usize).min(WORDS * 8);
        let words = self.words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes());
        words.take(bytes)
    }

    /// True if the written text equals this text, cut to the available room.
    pub(crate) fn says(&self, text: &[&[u8]]) -> bool {
        self.bytes().eq(text.iter().copied().flatten().copied().take(WORDS * 8))
    }
}
