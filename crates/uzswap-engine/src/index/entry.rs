//! One page's record: its word, guarded by a bit of itself, and a second word that depends on it.
//!
//! Every change of an entry, and every look at the object it names, happens between
//! [`Entry::lock`] and the drop of the guard; that is what keeps an object alive while it is read.
//! The lock is held for the copy of one object (some 30 ns) and never while compressing. It is held
//! longer while a page is decompressed to be compared with one that may be the same, or taken in
//! for a unit; while a record is read from the backing, or packing moves it; and for an
//! exclusive load. Nobody waits for that but a second user of the same page.

use super::word::{State, Word};
use crate::sync::Backoff;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::profile::{Held, Waiting};

/// See the module. 16 bytes a page of address space in use. All zeros it is absent.
#[repr(C)]
pub(crate) struct Entry {
    word: AtomicU64,
    /// By state of the word:
    /// `Pooled` — links of the LRU list, guarded by the list's lock, not by this entry's;
    /// `Pooled`, writeback in flight — the [`crate::ids::Place`] being written, or a token of
    /// recompression, which is none;
    /// `Placed` — the generation that its record was sealed in or, where records are not sealed,
    /// the page's checksum; `Member` — the page's checksum. Otherwise 0.
    aux: AtomicU64,
}

#[cfg(not(feature = "shuttle"))]
const _: () = assert!(size_of::<Entry>() == 16);

impl Entry {
    pub(crate) fn new() -> Self {
        Self { word: AtomicU64::new(Word::ABSENT.0), aux: AtomicU64::new(0) }
    }

    /// The state now, without the lock: for answers that need no object, and for hints.
    pub(crate) fn peek(&self) -> Word {
        Word(self.word.load(Ordering::Acquire) & !Word::LOCKED)
    }

    /// Waits for the entry; `None` if it is gone.
    pub(crate) fn lock(&self) -> Option<Locked<'_>> {
        let mut locked = self.try_lock();
        if locked.is_some() || self.is_gone() {
            return locked;
        }
        let waiting = Waiting::start(Self::KIND);
        let mut backoff = Backoff::new();
        while locked.is_none() && !self.is_gone() {
            backoff.wait();
            locked = self.try_lock();
        }
        waiting.end();
        locked
    }

    /// Takes the entry if nobody has it and it is not gone.
    pub(crate) fn try_lock(&self) -> Option<Locked<'_>> {
        let word = self.word.load(Ordering::Relaxed) & !Word::LOCKED;
        if word == Word::GONE.0 {
            return None;
        }
        self.word
            .compare_exchange(word, word | Word::LOCKED, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Locked { entry: self, word: Word(word), _held: Held::start(Self::KIND) })
    }

    /// What a profile calls this lock.
    const KIND: &str = "Entry";

    fn is_gone(&self) -> bool {
        self.word.load(Ordering::Relaxed) == Word::GONE.0
    }

    /// Makes the entry gone, if it is absent and nobody has it.
    pub(super) fn leave(&self) -> bool {
        let (absent, gone) = (Word::ABSENT.0, Word::GONE.0);
        self.word.compare_exchange(absent, gone, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Undoes [`Self::leave`].
    pub(super) fn stay(&self) {
        self.word.store(Word::ABSENT.0, Ordering::Release);
    }

    pub(crate) fn aux(&self) -> &AtomicU64 {
        &self.aux
    }

    /// Makes an entry of a process that was killed one that nobody has and nothing is under way
    /// with; `undone` tells the second word where its change was not completed. What is in the
    /// second word of a page in the pool is nothing.
    pub(crate) fn settle(&self, undone: impl Fn(Word, u64) -> Option<u64>) -> Word {
        let word = self.peek();
        let aux = self.aux.load(Ordering::Relaxed);
        let (word, aux) = match word.state() {
            State::Placed(_) | State::Member(_) => (word, undone(word, aux).unwrap_or(aux)),
            State::Absent => (Word::ABSENT, 0),
            State::Filled(_) | State::Pooled(_) | State::Shared(_) => {
                (word.with_writeback(false), 0)
            }
        };
        self.aux.store(aux, Ordering::Relaxed);
        self.word.store(word.0, Ordering::Release);
        word
    }
}

/// An entry that this thread alone may look into and change, until this is dropped.
pub(crate) struct Locked<'a> {
    entry: &'a Entry,
    word: Word,
    // Dropped after the word is written back.
    _held: Held,
}

impl Locked<'_> {
    pub(crate) fn word(&self) -> Word {
        self.word
    }

    pub(crate) fn state(&self) -> State {
        self.word.state()
    }

    /// What the entry will be when the guard is dropped.
    pub(crate) fn set(&mut self, word: Word) {
        self.word = word;
    }

    pub(crate) fn aux(&self) -> u64 {
        self.entry.aux.load(Ordering::Relaxed)
    }

    pub(crate) fn set_aux(&mut self, value: u64) {
        self.entry.aux.store(value, Ordering::Relaxed);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // Release: whoever locks next sees the object and `aux` as this holder left them.
        self.entry.word.store(self.word.0, Ordering::Release);
    }
}
