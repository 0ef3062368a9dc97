//! Words that other threads, and handlers of signals, read whole while they are replaced.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*, fence};

/// See the module. `version` is odd while the words are replaced.
#[derive(Debug)]
pub struct Versioned<const WORDS: usize> {
    version: AtomicU32,
    words: [AtomicU64; WORDS],
}

impl<const WORDS: usize> Versioned<WORDS> {
    /// All are 0.
    pub const fn zeros() -> Self {
        Self { version: AtomicU32::new(0), words: [const { AtomicU64::new(0) }; WORDS] }
    }

    /// Replaces the words. No handler that calls this or [`Self::get`] may interrupt the caller,
    /// because the handler would wait for its own thread.
    pub fn set(&self, words: [u64; WORDS]) {
        let mut version = self.version.load(Relaxed);
        loop {
            version &= !1;
            match self.version.compare_exchange_weak(version, version + 1, Acquire, Relaxed) {
                Ok(_) => break,
                Err(now) => version = now,
            }
        }
        fence(Release);
        self.words.iter().zip(words).for_each(|(to, word)| to.store(word, Relaxed));
        self.version.store(version + 2, Release);
    }

    /// Returns all words of one call of `set`.
    pub fn get(&self) -> [u64; WORDS] {
        loop {
            let version = self.version.load(Acquire);
            let words = self.words.each_ref().map(|word| word.load(Relaxed));
            fence(Acquire);
            if version.is_multiple_of(2) && self.version.load(Relaxed) == version {
                return words;
            }
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_never_sees_words_of_two_writes() {
        let versioned = Versioned::<3>::zeros();
        std::thread::scope(|scope| {
            for first in [1, 2] {
                let versioned = &versioned;
                scope.spawn(move || {
                    (first..20_000).step_by(2).for_each(|word| versioned.set([word; 3]));
                });
            }
            for _ in 0..20_000 {
                let [first, second, third] = versioned.get();
                assert!(first == second && second == third);
            }
        });
    }
}
