//! Swap entry → [`Entry`].
//!
//! Two levels: a directory, and trunks of 16 MiB of address space each, made when the first page in
//! them is stored. A lookup is two loads and no lock. [`Index::provision`] makes a few spare trunks
//! ahead of need, because the kernel may need the storing thread to get memory.
//!
//! [`Index::reclaim`] frees a trunk whose entries are all absent. A thread looks entries up through
//! a [`View`], which pins the thread: the entries that it found stay in memory until the view is
//! dropped. Such an entry may be *gone*: before a trunk leaves the directory, each of its entries,
//! absent and unlocked, is marked gone. No thread can lock a gone entry. A thread that meets a gone
//! entry looks the key up again.

mod entry;
mod trunk;
mod word;

pub(crate) use entry::Entry;
#[cfg(feature = "simulation")]
pub use entry::transition::NAMES as TRANSITIONS;
pub(crate) use entry::transition::{List, Lists, LockedEntry};
pub(crate) use word::{State, UnitMember, Word};

use crate::counters::Counters;
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, Intent, Values};
use crate::ids::{Area, SwapEntry};
use crate::sync::{Backoff, Mutex, lock, pin};
use crossbeam_epoch::{Atomic, Guard, Shared};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use trunk::{Owned, Retired, Trunk, TrunkMemory};

/// Entries in a trunk: 16 MiB of address space, so that a cache of a few MiB wastes little.
#[cfg(not(feature = "shuttle"))]
pub(crate) const TRUNK_ENTRIES: usize = 4096;
/// Small under the model checker, whose atomics are large.
#[cfg(feature = "shuttle")]
pub(crate) const TRUNK_ENTRIES: usize = 8;

fn trunks_of(keys: u32) -> usize {
    (keys as usize).div_ceil(TRUNK_ENTRIES)
}

pub(crate) const TRUNK_BYTES: usize = TRUNK_ENTRIES * size_of::<Entry>();

/// The directory, the spare trunks and the key space.
pub(crate) struct Index {
    trunks: Box<[Atomic<Trunk>]>,
    emptying: Emptying,
    /// The directory for a process that takes the cache over: the number of each trunk's frame plus
    /// one, or 0. Written with `spare` locked.
    directory: Option<Values<DurableAtomic<AtomicU32>>>,
    memory: TrunkMemory,
    spare: Mutex<Vec<Owned>>,
    /// The maximum number of spare trunks.
    spare_max: AtomicUsize,
    /// A hint where the next trunk for pages will be: the number of the last such trunk, plus one.
    next: AtomicUsize,
    /// Trunks that were taken out of the directory, to be freed.
    retired: Arc<Retired>,
    /// Trunks in the directory. An atomic, because a region asks for a cache's size after every
    /// batch.
    made: AtomicUsize,
    /// The part of `made` that is for pages.
    made_for_pages: AtomicUsize,
    /// Areas in use, by first key.
    areas: Mutex<Vec<Area>>,
    /// Trunks with keys of areas of pages.
    page_trunks: AtomicUsize,
    /// Trunks in front of the areas, for records and pieces of units.
    record_trunks: AtomicUsize,
    /// The part of these trunks that is for records.
    shared_trunks: AtomicUsize,
    lists: Lists,
    counters: Arc<Counters>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyKind {
    /// A page.
    Page,
    /// A share record.
    Record,
    /// A piece of a unit.
    Piece,
}

/// Trunks in which an entry became absent since the last [`Index::reclaim`], which checks only
/// these. An index that does not change thus costs `reclaim` next to nothing.
struct Emptying {
    /// A bit for each trunk.
    trunks: Box<[AtomicU64]>,
    /// A bit for each word of `trunks`, set after a bit of that word: 22 words for 1 TiB.
    words: Box<[AtomicU64]>,
}

impl Emptying {
    fn new(trunks: usize) -> Self {
        let none = |bits: usize| -> Box<[_]> {
            (0..bits.div_ceil(64)).map(|_| AtomicU64::new(0)).collect()
        };
        let trunks = none(trunks);
        Self { words: none(trunks.len()), trunks }
    }

    /// Sets the bit without a check before: a check could read a bit that `take` is about to take.
    fn add(&self, trunk: usize) {
        let set = |words: &[AtomicU64], number: usize| {
            let bit = 1 << (number % 64);
            words[number / 64].fetch_or(bit, Ordering::AcqRel) & bit == 0
        };
        // If the bit was set, the thread that set it takes care of the word.
        if set(&self.trunks, trunk) {
            set(&self.words, trunk / 64);
        }
    }

    /// Takes all bits, one after another.
    fn take(&self) -> impl Iterator<Item = usize> {
        let words = (0..self.words.len()).flat_map(|at| Self::take_word(&self.words, at));
        words.flat_map(|at| Self::take_word(&self.trunks, at))
    }

    /// Takes the bits of a word.
    fn take_word(words: &[AtomicU64], at: usize) -> impl Iterator<Item = usize> {
        let mut left = match words[at].load(Ordering::Relaxed) {
            0 => 0,
            _ => words[at].swap(0, Ordering::AcqRel),
        };
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(at * 64 + bit)
        })
    }
}

/// No spare trunk: [`Index::provision`] is late, or there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoTrunk;

impl Index {
    /// The number of spare trunks. The kernel gives out swap slots mostly in order, so that a trunk
    /// serves 16 MiB of stores. Sixteen trunks serve 256 MiB.
    const SPARE: usize = 16;

    /// An index for at most `pages_max` pages over all areas, in the process's memory or in memory
    /// that outlives it.
    pub(crate) fn new(pages_max: u32, durable: Option<&Arc<Durable>>) -> Self {
        let memory = TrunkMemory(durable.cloned());
        Self {
            trunks: (0..trunks_of(pages_max)).map(|_| Atomic::null()).collect(),
            emptying: Emptying::new(trunks_of(pages_max)),
            directory: durable.map(Durable::directory),
            spare: Mutex::new(Vec::with_capacity(Self::SPARE)),
            spare_max: AtomicUsize::new(Self::SPARE),
            next: AtomicUsize::new(0),
            retired: Arc::new(Retired::new(&memory)),
            memory,
            made: AtomicUsize::new(0),
            made_for_pages: AtomicUsize::new(0),
            areas: Mutex::new(Vec::new()),
            page_trunks: AtomicUsize::new(0),
            record_trunks: AtomicUsize::new(0),
            shared_trunks: AtomicUsize::new(0),
            lists: Lists::new(),
            counters: Arc::new(Counters::new()),
        }
    }

    /// Prefetches a key's entry, assuming that its trunk is at home: for a thread that is about to
    /// look the entry up. Without this, the thread reads the directory and only then the entry, and
    /// both may be cache misses.
    pub(crate) fn prefetch(&self, key: SwapEntry) {
        if let Some(durable) = &self.memory.0 {
            durable.prefetch(key.0 as usize * size_of::<Entry>());
        }
    }

    /// A view to look entries up.
    pub(crate) fn view(&self) -> View<'_> {
        View { index: self, pinned: pin() }
    }

    /// Counters. Transitions update those that follow from states.
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// The lists of the oldest objects in the pool.
    pub(crate) fn lists(&self) -> &Lists {
        &self.lists
    }

    /// Makes spare trunks up to their maximum, but no more than pages can still need, and one for
    /// records. Allocates, so it is never called to serve a request. Fails without memory.
    pub(crate) fn provision(&self) -> io::Result<()> {
        let made = self.made_for_pages.load(Ordering::Relaxed);
        let missing = self.page_trunks.load(Ordering::Relaxed).saturating_sub(made);
        let wanted = (missing + 1).min(self.spare_max.load(Ordering::Relaxed));
        loop {
            let spare = lock(&self.spare);
            if spare.len() >= wanted {
                return Ok(());
            }
            let number = self.next_without(&spare);
            drop(spare);
            let trunk = self.memory.make(number)?;
            let mut spare = lock(&self.spare);
            // Another thread may have made a trunk since, and `spare` has no space for more.
            if spare.len() < wanted {
                spare.push(trunk);
            } else {
                drop(spare);
                self.memory.free(trunk);
            }
        }
    }

    /// The next trunk that is missing and has no spare one at its home.
    fn next_without(&self, spare: &[Owned]) -> usize {
        let next = self.next.load(Ordering::Relaxed);
        let Some(directory) = &self.directory else { return next };
        let is_missing = |number: &usize| {
            directory[*number].load(Ordering::Relaxed) == 0
                && !spare.iter().any(|trunk| self.memory.is_home(trunk, *number))
        };
        let end = directory.len().min(next + 2 * Self::SPARE);
        (next..end).find(is_missing).unwrap_or(next)
    }

    /// Takes over the trunks that another process has left. Called once, after the keys of records
    /// are taken.
    pub(crate) fn adopt(&self, durable: &Arc<Durable>) -> io::Result<()> {
        let records = self.record_trunks.load(Ordering::Relaxed);
        for (number, frame) in durable.adopt_trunks()? {
            let trunk = TrunkMemory::in_frame(durable, frame);
            self.trunks[number].store(trunk.shared(), Ordering::Release);
            self.emptying.add(number);
            self.made.fetch_add(1, Ordering::Relaxed);
            self.made_for_pages.fetch_add(usize::from(number >= records), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Trunks of records that were taken over, from the start of their area.
    pub(crate) fn adopted_trunks(&self, area: Area) -> usize {
        let view = self.view();
        let firsts = area.entries().step_by(TRUNK_ENTRIES);
        firsts.take_while(|first| view.get(*first).is_some()).count()
    }

    /// Retires trunks of pages in which every entry is absent, and returns their number. Frees
    /// retired trunks that no thread can use any more. Trunks of records stay: their owners rely on
    /// them. Allocates: never called to serve a request.
    pub(crate) fn reclaim(&self) -> usize {
        self.retired.free();
        let records = self.record_trunks.load(Ordering::Relaxed);
        let pages = self.emptying.take().filter(|number| *number >= records);
        let pages = pages.collect::<Vec<_>>();
        // Prefetches all entries together: each is probably a cache miss.
        pages.iter().for_each(|number| self.prefetch(SwapEntry((number * TRUNK_ENTRIES) as u32)));
        pages.into_iter().filter(|number| self.reclaim_trunk(*number)).count()
    }

    fn reclaim_trunk(&self, number: usize) -> bool {
        let view = self.view();
        let slot = &self.trunks[number];
        let at = slot.load(Ordering::Acquire, &view.pinned);
        let Some(trunk) = trunk::get(at) else { return false };
        let entries = trunk::entries(trunk);
        // Most trunks fail at their first entries, without a change.
        if let Some(kept) = entries.iter().find(|entry| entry.peek() != Word::ABSENT) {
            // A locked entry may be about to become absent, which was noted already. Any other
            // entry is noted when it becomes absent.
            if kept.is_locked() {
                self.emptying.add(number);
            }
            return false;
        }
        // If this trunk goes, a thread that has just made it in order to store finds a spare one.
        self.made_for_pages.fetch_sub(1, Ordering::Relaxed);
        let held = match self.provision() {
            Ok(()) => entries.iter().position(|entry| !entry.become_gone()),
            Err(_) => Some(0), // There is no spare trunk: better to keep this one.
        };
        if let Some(held) = held {
            entries[..held].iter().for_each(Entry::become_absent);
            self.emptying.add(number);
            self.made_for_pages.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let spare = lock(&self.spare);
        if let Some(directory) = &self.directory {
            directory[number].store(0, Ordering::Release);
        }
        slot.store(Shared::null(), Ordering::Release);
        drop(spare);
        self.made.fetch_sub(1, Ordering::Relaxed);
        trunk::retire(at, &self.retired, &view.pinned);
        true
    }

    /// Takes keys for `pages` pages.
    pub(crate) fn add_area(&self, pages: u32) -> Option<Area> {
        let area = self.take_keys(pages)?;
        self.page_trunks.fetch_add(trunks_of(area.pages), Ordering::Relaxed);
        self.next.store(area.first as usize / TRUNK_ENTRIES, Ordering::Relaxed);
        Some(area)
    }

    /// Takes keys for records, for ever, before any other area.
    pub(crate) fn add_records(&self, count: u32) -> Option<Area> {
        let area = self.add_pieces(count)?;
        self.shared_trunks.fetch_add(trunks_of(area.pages), Ordering::Relaxed);
        Some(area)
    }

    /// Takes keys for pieces of units, before any area of pages.
    pub(crate) fn add_pieces(&self, count: u32) -> Option<Area> {
        let area = self.take_keys(count)?;
        self.record_trunks.fetch_add(trunks_of(area.pages), Ordering::Relaxed);
        Some(area)
    }

    /// Takes the lowest free range of `count` keys, in whole trunks.
    fn take_keys(&self, count: u32) -> Option<Area> {
        let mut areas = lock(&self.areas);
        let mut first = 0;
        let mut at = 0;
        for area in areas.iter() {
            let begin = area.first as usize / TRUNK_ENTRIES;
            if begin - first >= trunks_of(count) {
                break;
            }
            first = begin + trunks_of(area.pages);
            at += 1;
        }
        if count == 0 || first + trunks_of(count) > self.trunks.len() {
            return None;
        }
        let area = Area { first: (first * TRUNK_ENTRIES) as u32, pages: count };
        areas.insert(at, area);
        Some(area)
    }

    /// Gives the keys of an area of pages back. All entries of the area are absent.
    pub(crate) fn remove_area(&self, area: Area) {
        lock(&self.areas).retain(|other| *other != area);
        self.page_trunks.fetch_sub(trunks_of(area.pages), Ordering::Relaxed);
    }

    /// Bytes of the index: trunks, spare ones included, and the directory.
    pub(crate) fn bytes(&self) -> usize {
        (self.made.load(Ordering::Relaxed) + lock(&self.spare).len()) * TRUNK_BYTES
            + self.trunks.len() * size_of::<Atomic<Trunk>>()
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.trunks.iter_mut().for_each(|slot| trunk::drop_in(slot, &self.memory));
        let spare = std::mem::take(&mut *lock(&self.spare));
        spare.into_iter().for_each(|trunk| self.memory.free(trunk));
    }
}

/// An index as one thread sees it: no entry that it finds is freed before this is dropped. A view
/// delays the freeing of trunks, and nothing else, even while a load reads from the backing.
pub(crate) struct View<'a> {
    index: &'a Index,
    pinned: Guard,
}

impl View<'_> {
    /// Notes that an entry becomes absent. The entry stays locked until it is absent.
    fn note_absent(&self, key: SwapEntry) {
        self.index.emptying.add(key.0 as usize / TRUNK_ENTRIES);
    }

    pub(crate) fn kind(&self, key: SwapEntry) -> KeyKind {
        let trunk = key.0 as usize / TRUNK_ENTRIES;
        if trunk >= self.index.record_trunks.load(Ordering::Relaxed) {
            KeyKind::Page
        } else if trunk >= self.index.shared_trunks.load(Ordering::Relaxed) {
            KeyKind::Piece
        } else {
            KeyKind::Record
        }
    }

    fn lists(&self) -> &Lists {
        &self.index.lists
    }

    fn counters(&self) -> &Counters {
        &self.index.counters
    }

    /// The place to note a change of both words of an entry, if entries outlive the process.
    fn intent(&self) -> Option<&Intent> {
        Some(self.index.memory.0.as_ref()?.intent())
    }

    /// The entry of a key, or `None` where no page near it was stored.
    pub(crate) fn get(&self, key: SwapEntry) -> Option<&Entry> {
        let key = key.0 as usize;
        let slot = self.index.trunks.get(key / TRUNK_ENTRIES)?;
        let trunk = trunk::get(slot.load(Ordering::Acquire, &self.pinned))?;
        Some(&trunk::entries(trunk)[key % TRUNK_ENTRIES])
    }

    /// The entry of a key that is on a list, or of a share record: it exists, and is not gone.
    pub(crate) fn existing(&self, key: SwapEntry) -> &Entry {
        self.get(key).expect("the entry of a page that is held is not freed")
    }

    /// Locks an entry that is not freed: of a share record, of a piece of a unit, or of a stored
    /// page.
    pub(crate) fn lock_existing(&self, key: SwapEntry) -> LockedEntry<'_> {
        let lock = self.existing(key).lock().expect("its trunk is not freed");
        LockedEntry::new(self, key, lock)
    }

    /// Locks a page's entry if it is not locked.
    pub(crate) fn try_lock(&self, key: SwapEntry) -> Option<LockedEntry<'_>> {
        Some(LockedEntry::new(self, key, self.get(key)?.try_lock()?))
    }

    /// The state of a page, without a lock.
    pub(crate) fn peek(&self, key: SwapEntry) -> Word {
        self.get(key).map_or(Word::ABSENT, Entry::peek)
    }

    /// Locks a page's entry; `None` if there is none, and then the page is absent.
    pub(crate) fn lock(&self, key: SwapEntry) -> Option<LockedEntry<'_>> {
        let mut backoff = Backoff::new();
        loop {
            if let Some(lock) = self.get(key)?.lock() {
                return Some(LockedEntry::new(self, key, lock));
            }
            // The key's trunk is leaving the directory, or will stay there after all.
            backoff.wait();
        }
    }

    /// Locks a page's entry, and makes it from a spare trunk if there is none.
    pub(crate) fn lock_made(&self, key: SwapEntry) -> Result<LockedEntry<'_>, NoTrunk> {
        loop {
            self.ensure(key)?;
            if let Some(locked) = self.lock(key) {
                return Ok(locked);
            }
        }
    }

    /// Makes a key's entry from a spare trunk, where there is none yet.
    pub(crate) fn ensure(&self, key: SwapEntry) -> Result<(), NoTrunk> {
        if self.get(key).is_some() {
            return Ok(());
        }
        let number = key.0 as usize / TRUNK_ENTRIES;
        let slot = &self.index.trunks[number];
        // `spare` is locked from the check to the change: of several threads that need the same
        // trunk, one takes a spare trunk.
        let mut spare = lock(&self.index.spare);
        if slot.load(Ordering::Acquire, &self.pinned).is_null() {
            let memory = &self.index.memory;
            let at_home = spare.iter().position(|trunk| memory.is_home(trunk, number));
            let trunk = at_home.map(|at| spare.swap_remove(at)).or_else(|| spare.pop());
            let trunk = trunk.ok_or(NoTrunk)?;
            let directory = self.index.directory.as_ref();
            if let (Some(directory), Some(frame)) = (directory, self.index.memory.frame_of(&trunk))
            {
                // Before any store to the trunk, so that a process that takes over finds it.
                directory[number].store(frame.word(), Ordering::Release);
            }
            slot.store(trunk.shared(), Ordering::Release);
            // The store that needs the trunk may find no space for its page.
            self.index.emptying.add(number);
            self.index.made.fetch_add(1, Ordering::Relaxed);
            let is_for_pages = number >= self.index.record_trunks.load(Ordering::Relaxed);
            self.index.made_for_pages.fetch_add(usize::from(is_for_pages), Ordering::Relaxed);
            if is_for_pages {
                self.index.next.store(number + 1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Every trunk: the key of its first entry, and its entries.
    pub(crate) fn trunks(&self) -> impl Iterator<Item = (SwapEntry, &[Entry])> {
        self.index.trunks.iter().enumerate().filter_map(|(number, slot)| {
            let trunk = trunk::get(slot.load(Ordering::Acquire, &self.pinned))?;
            Some((SwapEntry((number * TRUNK_ENTRIES) as u32), &trunk::entries(trunk)[..]))
        })
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const TRUNK: u32 = TRUNK_ENTRIES as u32;

    #[test]
    fn areas_take_the_lowest_gap_that_fits() {
        let index = Index::new(10 * TRUNK, None);
        let a = index.add_area(TRUNK).unwrap();
        let b = index.add_area(2 * TRUNK + 1).unwrap();
        let c = index.add_area(1).unwrap();
        assert_eq!((a.first, b.first, c.first), (0, TRUNK, 4 * TRUNK));
        index.remove_area(b);
        let d = index.add_area(4 * TRUNK).unwrap();
        assert_eq!(d.first, 5 * TRUNK, "the gap of three is too small");
        let e = index.add_area(3 * TRUNK).unwrap();
        assert_eq!(e.first, TRUNK);
        assert_eq!(index.add_area(2 * TRUNK), None, "one trunk is left");
        assert_eq!(index.add_area(0), None);
    }

    #[test]
    fn a_trunk_is_made_only_from_the_spare_ones() {
        let index = Index::new(10 * TRUNK, None);
        index.add_area(10 * TRUNK).unwrap();
        let view = index.view();
        assert!(view.get(SwapEntry(5)).is_none());
        assert_eq!(view.ensure(SwapEntry(5)), Err(NoTrunk));
        index.provision().unwrap();
        assert_eq!(view.ensure(SwapEntry(5)), Ok(()));
        assert!(view.get(SwapEntry(TRUNK - 1)).is_some());
        assert!(view.get(SwapEntry(TRUNK)).is_none());
    }

    #[test]
    fn a_trunk_is_freed_once_every_entry_is_absent_and_unlocked() {
        let index = Index::new(3 * TRUNK, None);
        index.add_records(TRUNK).unwrap();
        index.add_area(2 * TRUNK).unwrap();
        index.provision().unwrap();
        let (first, second) = (SwapEntry(0), SwapEntry(TRUNK + 7));
        let view = index.view();
        [first, second].iter().for_each(|key| view.ensure(*key).unwrap());
        let held = view.lock(second).unwrap();
        assert_eq!(index.reclaim(), 0, "one is kept, of the other an entry is locked");
        drop(held);
        let last = || view.lock(SwapEntry(2 * TRUNK - 1)).unwrap();
        assert_eq!(last().stored(State::Shared(SwapEntry(3))), State::Absent);
        assert_eq!(index.reclaim(), 0, "a page is held");
        assert_eq!(index.emptying.take().count(), 0, "nothing changed: nothing is looked at");
        assert_eq!(last().dropped(), State::Shared(SwapEntry(3)));
        let stale = view.get(second).unwrap();
        assert_eq!(index.reclaim(), 1);
        assert_eq!(stale.peek().state(), State::Absent);
        assert!(stale.lock().is_none(), "it is gone");
        assert!(view.lock(second).is_none() && view.lock(first).is_some());
        assert!(view.lock_made(second).is_ok());
        drop(view);
        assert_eq!(index.made.load(Ordering::Relaxed), 2, "of three that were made one was freed");
        let directory = index.trunks.len() * size_of::<Atomic<Trunk>>();
        assert_eq!(index.bytes(), directory + 4 * TRUNK_BYTES, "and two are ready");
    }

    #[test]
    fn no_more_is_kept_ready_than_can_be_needed() {
        let index = Index::new(30 * TRUNK, None);
        index.add_records(9 * TRUNK).unwrap();
        let ready = || {
            index.provision().unwrap();
            lock(&index.spare).len()
        };
        assert_eq!(ready(), 1);
        let one = index.add_area(7).unwrap();
        assert_eq!(ready(), 2);
        index.remove_area(one);
        let many = index.add_area(20 * TRUNK).unwrap();
        assert_eq!(ready(), Index::SPARE);
        let view = index.view();
        for key in many.entries().step_by(TRUNK as usize) {
            ready();
            view.ensure(key).unwrap();
        }
        assert_eq!(ready(), 1, "every page has its trunk");
    }
}
