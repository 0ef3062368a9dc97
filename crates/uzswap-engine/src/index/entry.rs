//! The state of one page: a word, guarded by a bit of itself, and a second word that depends on it.
//!
//! Every change of an entry, and every access to its object, happens between [`Entry::lock`] and
//! the drop of the guard, so the lock keeps an object alive. A thread holds the lock while it
//! copies one object (some 30 ns), and never while it compresses. A thread holds the lock longer
//! for a page that it decompresses, either to compare the page or to put it into a unit. The lock
//! is also held longer during a read from the backing, a move by packing, or an exclusive load.
//! Only a second user of the same page waits for such a thread.
//!
//! Only `transition` changes an entry: the private items here are visible there and nowhere else.

pub(crate) mod transition;

use super::word::{State, Word};
use crate::crash_points::DurableAtomic;
use crate::sync::Backoff;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::profile::{HeldLock, Waiting};

/// See the module. 16 bytes for each page of used address space. All zeros means absent.
#[repr(C)]
pub(crate) struct Entry {
    word: DurableAtomic<AtomicU64>,
    /// Its meaning depends on the word's state. `Pooled`: links of the LRU list, guarded by the
    /// list's lock rather than the entry's. `Pooled`, in flight: the [`crate::ids::Place`] being
    /// written, or a token of recompression, which is no place. `Placed`: the generation of the
    /// record's seal or, where records are not sealed, the page's checksum. `Member`: the page's
    /// checksum. Otherwise 0.
    second: DurableAtomic<AtomicU64>,
}

#[cfg(not(feature = "shuttle"))]
const _: () = assert!(size_of::<Entry>() == 16);

impl Entry {
    pub(crate) fn new() -> Self {
        Self { word: DurableAtomic::new(Word::ABSENT.0), second: DurableAtomic::new(0) }
    }

    /// The present state, without the lock: for answers that need no object, and for hints.
    pub(crate) fn peek(&self) -> Word {
        Word(self.word.load(Ordering::Acquire) & !Word::LOCKED)
    }

    /// True if a thread has locked the entry.
    pub(super) fn is_locked(&self) -> bool {
        self.word.load(Ordering::Acquire) & Word::LOCKED != 0
    }

    /// Waits for the entry; `None` if it is gone.
    pub(crate) fn lock(&self) -> Option<EntryLock<'_>> {
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

    /// Locks the entry, unless it is locked or gone.
    pub(crate) fn try_lock(&self) -> Option<EntryLock<'_>> {
        let word = self.word.load(Ordering::Relaxed) & !Word::LOCKED;
        if word == Word::GONE.0 {
            return None;
        }
        self.word
            .compare_exchange(word, word | Word::LOCKED, Ordering::Acquire, Ordering::Relaxed)
            .ok()?;
        let held = HeldLock::start(Self::KIND, std::ptr::from_ref(self).addr());
        Some(EntryLock { entry: self, word: Word(word), _held: held })
    }

    /// The name of this lock in a profile.
    const KIND: &str = "Entry";

    fn is_gone(&self) -> bool {
        self.word.load(Ordering::Relaxed) == Word::GONE.0
    }

    /// Makes the entry gone, if it is absent and not locked.
    pub(super) fn become_gone(&self) -> bool {
        let (absent, gone) = (Word::ABSENT.0, Word::GONE.0);
        self.word.compare_exchange(absent, gone, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Undoes [`Self::become_gone`].
    pub(super) fn become_absent(&self) {
        self.word.store(Word::ABSENT.0, Ordering::Release);
    }

    /// A word that the owner of a retired trunk may use, since no page uses it: the trunk's entries
    /// are all gone.
    #[cfg(not(feature = "shuttle"))]
    pub(super) fn link_of_retired(&self) -> &DurableAtomic<AtomicU64> {
        debug_assert!(self.is_gone());
        &self.second
    }
}

/// An entry that only this thread may read and change, until this is dropped.
pub(crate) struct EntryLock<'a> {
    entry: &'a Entry,
    /// The entry's word after this is dropped.
    word: Word,
    // Dropped after the word is written back.
    _held: HeldLock,
}

impl EntryLock<'_> {
    fn state(&self) -> State {
        self.word.state()
    }

    fn second(&self) -> u64 {
        self.entry.second.load(Ordering::Relaxed)
    }

    fn set_second(&mut self, value: u64) {
        self.entry.second.store(value, Ordering::Relaxed);
    }
}

impl Drop for EntryLock<'_> {
    fn drop(&mut self) {
        // Release: the next thread that locks the entry sees the object and the second word.
        self.entry.word.store(self.word.0, Ordering::Release);
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::ids::SwapEntry;

    #[test]
    fn a_locked_entry_cannot_be_taken_until_it_is_dropped() {
        let entry = Entry::new();
        let mut locked = entry.lock().unwrap();
        assert!(entry.try_lock().is_none());
        let word = Word::new(State::Shared(SwapEntry(3)));
        locked.word = word;
        assert_eq!(entry.peek(), Word::ABSENT, "published by the drop");
        drop(locked);
        assert_eq!(entry.peek(), word);
        assert!(entry.try_lock().is_some());
    }
}
