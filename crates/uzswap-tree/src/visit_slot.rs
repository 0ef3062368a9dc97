//! The visit of a process, as its slot has it: see [`crate::visit`].

use crate::clock;
use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

/// Bytes of a page, and the most pages that are granted at a time.
pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const PAGES_MAX: u32 = 256;
/// The most bytes to ask for at a time.
pub const VISIT_BYTES_MAX: u64 = PAGES_MAX as u64 * PAGE_BYTES;

/// The state of a visit, in one word, so that a late answer never meets the next visit:
///
/// ```text
/// 31           12 11     2 1   0
/// | number       | pages  | state |
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VisitWord(u32);

impl VisitWord {
    pub(crate) const FREE: u32 = 0;
    pub(crate) const WRITTEN: u32 = 1;
    pub(crate) const ASKED: u32 = 2;
    pub(crate) const GRANTED: u32 = 3;
    const PAGES_SHIFT: u32 = 2;
    const NUMBER_SHIFT: u32 = 12;
    const PAGES_MASK: u32 = (1 << (Self::NUMBER_SHIFT - Self::PAGES_SHIFT)) - 1;

    pub(crate) fn state(self) -> u32 {
        self.0 & 3
    }

    /// The number of granted pages, from the page of the first byte.
    pub(crate) fn pages(self) -> u32 {
        self.0 >> Self::PAGES_SHIFT & Self::PAGES_MASK
    }

    /// The same visit in another state.
    pub(crate) fn with(self, state: u32, pages: u32) -> Self {
        let number = self.0 >> Self::NUMBER_SHIFT << Self::NUMBER_SHIFT;
        Self(number | pages.min(PAGES_MAX) << Self::PAGES_SHIFT | state)
    }

    /// The next visit, which no thread makes yet.
    pub(crate) fn next(self) -> Self {
        Self(self.0.wrapping_add(1 << Self::NUMBER_SHIFT)).with(Self::FREE, 0)
    }
}

const _: () = assert!(PAGES_MAX <= VisitWord::PAGES_MASK);

/// The visit of a process.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct VisitSlot {
    /// A [`VisitWord`].
    word: AtomicU32,
    /// The [`Name`] of the host.
    pub(crate) host: AtomicU64,
    /// The first byte, and how many are asked for.
    pub(crate) from: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

impl VisitSlot {
    pub(crate) fn load(&self) -> VisitWord {
        VisitWord(self.word.load(SeqCst))
    }

    pub(crate) fn change(&self, from: VisitWord, to: VisitWord) -> bool {
        let is_changed = self.word.compare_exchange(from.0, to.0, SeqCst, SeqCst).is_ok();
        wake(&self.word);
        is_changed
    }

    /// Asks for pages, by a visit that the calling thread has taken.
    pub(crate) fn ask(&self, taken: VisitWord) -> VisitWord {
        let asked = taken.with(VisitWord::ASKED, 0);
        self.word.store(asked.0, SeqCst);
        asked
    }

    /// Waits while a word is unchanged, but no longer than `most`.
    pub(crate) fn wait(&self, word: VisitWord, most: Duration) {
        wait(&self.word, word.0, most);
    }

    /// Ends a visit of the process that had the slot.
    pub(crate) fn clear(&self) {
        self.word.store(self.load().next().0, SeqCst);
        wake(&self.word);
    }

    /// Takes the visit for the calling thread, once the visits of other threads are over. `None` if
    /// another thread's visit stays unchanged for this time.
    pub(crate) fn await_free(&self, patience: Duration) -> Option<VisitWord> {
        let end = || clock() + patience.as_millis() as u64;
        let (mut seen, mut until) = (self.load(), end());
        loop {
            if let Some(word) = self.take() {
                return Some(word);
            }
            let now = self.load();
            if now != seen {
                (seen, until) = (now, end());
            } else if clock() >= until {
                return None;
            }
            self.wait(now, Duration::from_millis(1));
        }
    }

    /// Takes the visit for the calling thread, and returns its word. `None` if another thread has
    /// it.
    pub(crate) fn take(&self) -> Option<VisitWord> {
        let word = self.load();
        let taken = word.with(VisitWord::WRITTEN, 0);
        (word.state() == VisitWord::FREE && self.change(word, taken)).then_some(taken)
    }
}

/// Wakes threads of any process that wait for a word.
pub(crate) fn wake(word: &AtomicU32) {
    // With a valid address this cannot fail.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Waits while a word has a value, but no longer than `most`.
pub(crate) fn wait(word: &AtomicU32, value: u32, most: Duration) {
    // In any case the caller checks again.
    let _ = futex::wait(word, futex::Flags::empty(), value, most.try_into().ok().as_ref());
}

/// Rings a bell, which wakes the threads of all processes that wait for it.
pub(crate) fn ring(bell: &AtomicU32) {
    bell.fetch_add(1, SeqCst);
    wake(bell);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_tells_its_state_and_pages_and_every_visit_has_another() {
        let word = VisitWord(u32::MAX).next();
        for (state, pages) in [(VisitWord::ASKED, 0), (VisitWord::GRANTED, PAGES_MAX)] {
            let word = word.with(state, pages);
            assert_eq!((word.state(), word.pages()), (state, pages));
            assert_eq!((word.next().state(), word.next().pages()), (VisitWord::FREE, 0));
            assert_ne!(word.next(), word.with(VisitWord::FREE, 0));
        }
    }
}
