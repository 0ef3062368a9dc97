//! One region's memory and the state of its pages.
//!
//! A page is changed only by the thread that made its word `Busy` ([`Space::take`],
//! [`Space::acquire`]); all others wait on the word. The memory of the words is taken when it is
//! first touched, like the region's own, so that a region costs only its touched part
//! ([`crate::page::words`]).

#![expect(
    unsafe_code,
    reason = "pages leave while a program runs: the thread that moves them made their words `Busy`; a thread that touches such a page waits"
)]

use super::Inner;
use crate::budget::{wait, wake_all};
use crate::error::Error;
use crate::page::transition::{FOUND, PINNED, Transition, UNCHANGED};
use crate::page::word::{Kind, Word};
use crate::page::words::{BLOCK, Found, UNIT, UNITS, Words};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::*};
use std::sync::{Arc, Mutex, PoisonError};
use uzswap_engine::{Area, PAGE_BYTES, SwapEntry};
use uzswap_sys::map::{self, Mapping};

pub(crate) struct Space {
    pub(crate) id: u32,
    pub(crate) pager: Arc<Inner>,
    /// `None` once the region is unmapped.
    memory: Mutex<Option<Mapping>>,
    base: usize,
    bytes: usize,
    pages: u32,
    pub(crate) area: Area,
    pub(crate) words: Words,
    /// The program's advice on its accesses: see [`crate::ahead`].
    pub(crate) advice: AtomicU8,
    /// The region is being unmapped, or was: `Busy` pages stay `Busy`.
    is_closed: AtomicBool,
    /// True in a forked child where a file is mapped over the region. See [`crate::copy`].
    is_copy: AtomicBool,
    /// True if the program itself maps and unmaps these addresses. See [`crate::window`].
    is_window: bool,
}

/// A page that the owner of this value has made `Busy`, and its word before.
pub(crate) struct Taken {
    pub(crate) space: Arc<Space>,
    pub(crate) page: u32,
    pub(crate) was: Word,
}

impl Taken {
    /// Ends `Busy`: the word is as before.
    pub(crate) fn put_back(self) {
        self.space.put(self.page, UNCHANGED, self.was);
    }
}

/// The unit of a page in its block.
fn unit_of(page: u32) -> usize {
    (page % BLOCK / UNIT) as usize
}

/// The number of these pages, beginning with the first, that are neighbours in order.
pub(crate) fn neighbours(taken: &[Taken]) -> usize {
    let goes_on = |pair: &&[Taken]| {
        Arc::ptr_eq(&pair[0].space, &pair[1].space) && pair[0].page + 1 == pair[1].page
    };
    taken.windows(2).take_while(goes_on).count() + usize::from(!taken.is_empty())
}

/// The addresses of neighbours.
pub(crate) fn range_of(run: &[Taken]) -> Range<usize> {
    let (space, first) = (&run[0].space, run[0].page);
    space.address(first)..space.address(first + run.len() as u32)
}

impl Space {
    /// A space over memory of which the program has `bytes`; `area` has a key for each page.
    pub(crate) fn new(
        id: u32,
        pager: Arc<Inner>,
        memory: Mapping,
        bytes: usize,
        area: Area,
    ) -> Result<Self, Error> {
        let base = memory.as_ptr() as usize;
        let watched = pager.door.watch(base..base + area.pages() as usize * PAGE_BYTES);
        watched.map_err(|source| Error::Map { bytes, source })?;
        Self::over(id, pager, (base, bytes), area, Some(memory))
    }

    /// A space over the program's own addresses. Its pages get keys of `area` when they are stored.
    pub(crate) fn window(
        id: u32,
        pager: Arc<Inner>,
        (base, bytes): (usize, usize),
        area: Area,
    ) -> Result<Self, Error> {
        Self::over(id, pager, (base, bytes), area, None)
    }

    fn over(
        id: u32,
        pager: Arc<Inner>,
        (base, bytes): (usize, usize),
        area: Area,
        memory: Option<Mapping>,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes, source };
        let is_window = memory.is_none();
        let pages = if is_window { (bytes / PAGE_BYTES) as u32 } else { area.pages() };
        let words = Words::new(pages).map_err(failed)?;
        Ok(Self {
            id,
            pager,
            memory: Mutex::new(memory),
            base,
            bytes,
            pages,
            area,
            words,
            advice: AtomicU8::new(0),
            is_closed: AtomicBool::new(false),
            is_copy: AtomicBool::new(false),
            is_window,
        })
    }

    pub(crate) fn is_window(&self) -> bool {
        self.is_window
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn pages(&self) -> u32 {
        self.pages
    }

    pub(crate) fn contains(&self, address: usize) -> bool {
        address.wrapping_sub(self.base) < self.pages as usize * PAGE_BYTES
    }

    pub(crate) fn page_of(&self, address: usize) -> u32 {
        ((address - self.base) / PAGE_BYTES) as u32
    }

    pub(crate) fn address(&self, page: u32) -> usize {
        self.base + page as usize * PAGE_BYTES
    }

    pub(crate) fn key(&self, page: u32) -> SwapEntry {
        let key = self.key_if_any(page);
        key.expect("a page of a region has a key, and one that is stored has")
    }

    /// The key of a page. In a window a page may have no key before it is stored.
    pub(crate) fn key_if_any(&self, page: u32) -> Option<SwapEntry> {
        let at = match self.is_window {
            false => page,
            true => self.units(page)?[unit_of(page)]? * UNIT + page % UNIT,
        };
        self.area.entry(at)
    }

    /// The number of pages, beginning with `page`, that have consecutive keys; at least one.
    pub(crate) fn keys_in_order(&self, page: u32) -> usize {
        if !self.is_window {
            return (self.pages - page) as usize;
        }
        let units = self.units(page).unwrap_or_default();
        let first = unit_of(page);
        let is_next = |unit: &usize| {
            units[*unit].is_some() && units[*unit] == units[unit - 1].map(|keys| keys + 1)
        };
        let more = (first + 1..UNITS).take_while(is_next).count();
        (UNIT - page % UNIT) as usize + more * UNIT as usize
    }

    /// The first key of each unit in a page's block, in a window. `None` if the page has no word of
    /// its own.
    pub(crate) fn units(&self, page: u32) -> Option<[Option<u32>; UNITS]> {
        let keys = self.words.keys(page)?;
        Some(keys.map(|keys| keys.load(Relaxed).checked_sub(1)))
    }

    /// Sets the keys of a page's unit, or takes them away. The page has a word of its own.
    pub(crate) fn set_unit(&self, page: u32, keys: Option<u32>) {
        let all = self.words.keys(page).expect("asked of pages that have words of their own");
        all[unit_of(page)].store(keys.map_or(0, |keys| keys + 1), Relaxed);
    }

    /// Bytes of the tables that grow with the region's size; groups of words are counted as they
    /// are made.
    pub(crate) fn table_bytes(&self) -> usize {
        self.words.top_bytes() + size_of::<Self>()
    }

    pub(crate) fn load(&self, page: u32) -> Word {
        self.words.find(page).word
    }

    /// Makes a page `Busy` if its word is still `from`. The page gets a word of its own.
    pub(crate) fn take(&self, page: u32, from: Word) -> bool {
        loop {
            let found = self.words.find(page);
            if found.word != from || !found.take() {
                return false;
            }
            if !found.is_shared() {
                return true;
            }
            self.divide(&found, from);
        }
    }

    /// Divides a word that pages share, and that the caller has made `Busy`. The new words are
    /// `now`.
    pub(crate) fn divide(&self, found: &Found<'_>, now: Word) {
        let group = self.words.add(found, now);
        let more = self.words.group_pages(group + 1) - self.words.group_pages(group);
        if more > 0 {
            self.pager.budget.charge_anyway(more);
        }
        if now == Word::EMPTY && found.is_block() {
            self.note_used(found.first(), group);
        }
        self.publish(found, Word::divided(group));
    }

    /// Finds the used pages of a block that was left open. The block's pages were `Empty` and are
    /// `Busy` now, and `group` has their new words.
    fn note_used(&self, first: u32, group: u32) {
        if !self.pager.door.leaves_open() {
            return;
        }
        let mut there = [false; BLOCK as usize];
        self.pager.door.close(self.address(first), &mut there, true);
        let used = there.iter().enumerate().filter(|(_, is_there)| **is_there);
        let word = Word::RESIDENT.with(Word::USED);
        FOUND.check(|| (Kind::Empty, word.kind()));
        used.clone().for_each(|(at, _)| self.words.of_group(group, at).store(word.0, Relaxed));
        self.pager.budget.charge_anyway(used.count() as i64);
    }

    /// Changes a word that is still `from`, for changes that need no `Busy`.
    pub(crate) fn change(&self, page: u32, by: &Transition, from: Word, to: Word) -> bool {
        let found = self.words.find(page);
        found.word == from && found.change(by, to)
    }

    /// Waits until a page is not `Busy`, makes it `Busy`, and returns its former word.
    pub(crate) fn acquire(&self, page: u32) -> Word {
        loop {
            let word = self.load(page);
            if word.kind() == Kind::Busy {
                self.wait(page);
            } else if self.take(page, word) {
                return word;
            }
        }
    }

    /// Ends `Busy`, and wakes the waiting threads.
    pub(crate) fn put(&self, page: u32, by: &Transition, word: Word) {
        let found = self.words.find(page);
        debug_assert!(!found.is_shared());
        self.end_busy(&found, by, word);
    }

    /// Notes that a page that stays `Busy` is in another place.
    pub(crate) fn note_place(&self, page: u32, by: &Transition, place: Kind) {
        let slot = self.words.find(page).slot;
        // Another thread may begin to wait at this moment.
        let moved = |word: u32| {
            by.check(|| (Word(word).before(), place));
            Some(word & Word::WAITED | Word::busy(place).0)
        };
        slot.fetch_update(AcqRel, Relaxed, moved).expect("each word is moved");
    }

    /// Ends `Busy` of all pages of a word.
    pub(crate) fn end_busy(&self, found: &Found<'_>, by: &Transition, word: Word) {
        by.check(|| (Word(found.slot.load(Relaxed)).before(), word.kind()));
        self.publish(found, word);
    }

    fn publish(&self, found: &Found<'_>, word: Word) {
        let was = Word(found.slot.swap(word.0, AcqRel));
        debug_assert!(was.kind() == Kind::Busy);
        if was.has(Word::WAITED) {
            wake_all(found.slot);
        }
    }

    /// Waits until a page is not `Busy`; may return earlier.
    pub(crate) fn wait(&self, page: u32) {
        const SPINS: usize = 100;
        let slot = self.words.find(page).slot;
        let busy = || {
            let word = Word(slot.load(Relaxed));
            (word.group().is_none() && word.kind() == Kind::Busy).then_some(word)
        };
        for _ in 0..SPINS {
            if busy().is_none() {
                return;
            }
            std::hint::spin_loop();
        }
        let Some(word) = busy() else { return };
        let waited = word.with(Word::WAITED);
        if word == waited || slot.compare_exchange(word.0, waited.0, AcqRel, Relaxed).is_ok() {
            wait(slot, waited.0);
        }
    }

    /// Pins a page if it is present; `None` if its word is `Untouched`.
    pub(crate) fn pin_present(&self, page: u32) -> Option<bool> {
        loop {
            let found = self.words.find(page);
            let pinned = match found.word.kind() {
                Kind::Untouched => return None,
                Kind::Resident => found.word.pinned(),
                _ => None,
            };
            let Some(pinned) = pinned else { return Some(false) };
            if found.change(PINNED, pinned) {
                return Some(true);
            }
        }
    }

    /// Takes one pin from a page. A page loses its pins when the program unmaps or drops it.
    pub(crate) fn unpin(&self, page: u32) {
        loop {
            let found = self.words.find(page);
            let word = found.word;
            match word.kind() {
                Kind::Busy if self.is_closed.load(Acquire) => return,
                // Another thread is at work on the page. It does not move a pinned page.
                Kind::Busy => self.wait(page),
                Kind::Resident if word.pins() > 0 => {
                    if found.change(PINNED, word.unpinned()) {
                        return;
                    }
                }
                _ => return,
            }
        }
    }

    /// True if a page shares its word with no other.
    pub(crate) fn has_own_word(&self, page: u32) -> bool {
        !self.words.find(page).is_shared()
    }

    /// The first page, beginning with `page`, that has a word of its own.
    pub(crate) fn next_touched(&self, page: u32) -> Option<u32> {
        self.words.next(page, |_| true)
    }

    /// The first resident page, beginning with `page`.
    pub(crate) fn next_resident(&self, page: u32) -> Option<u32> {
        self.words.next(page, |word| word.kind() == Kind::Resident)
    }

    /// Pages of a range of bytes: all that overlap the range, or only those inside it.
    pub(crate) fn pages_of(
        &self,
        bytes: &Range<usize>,
        covered: bool,
    ) -> Result<Range<u32>, Error> {
        if bytes.start > bytes.end || bytes.end > self.bytes {
            let must = format!("a range within the {} bytes of the region", self.bytes);
            let value = bytes.end as u64;
            return Err(Error::Range { what: "the end of the range", value, must });
        }
        // A range that ends with the region covers the region's last page.
        let end_covers = bytes.end == self.bytes;
        let pages = match covered {
            true if end_covers => bytes.start.div_ceil(PAGE_BYTES)..bytes.end.div_ceil(PAGE_BYTES),
            true => bytes.start.div_ceil(PAGE_BYTES)..bytes.end / PAGE_BYTES,
            false => bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES),
        };
        Ok(pages.start as u32..(pages.end as u32).max(pages.start as u32))
    }

    /// Gives the memory of pages that are all `Busy` back to the kernel.
    pub(crate) fn discard(&self, pages: Range<u32>) {
        if self.is_window {
            let range = self.address(pages.start)..self.address(pages.end);
            // SAFETY: as below; the content of these pages is in a frame, or not needed.
            let done = unsafe { map::discard_range(range) };
            return done.expect("MADV_DONTNEED of memory that is mapped");
        }
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &*memory else { return };
        let offset = pages.start as usize * PAGE_BYTES;
        // SAFETY: the caller has decided that the content of these pages is not needed.
        let done = unsafe { memory.discard_part(offset, pages.len() * PAGE_BYTES) };
        done.expect("MADV_DONTNEED of our own mapping");
    }

    /// Lets pages leave after the program has locked its memory. An error would mean that the space
    /// is not mapped.
    pub(crate) fn unlock(&self) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = memory.as_ref().map(Mapping::unlock);
    }

    /// Makes every page `Busy` for good, unmaps the memory, and returns how many pages had memory.
    pub(crate) fn close(&self) -> i64 {
        // This comes before any page is taken for good.
        self.is_closed.store(true, Release);
        let mut resident = 0;
        let mut at = self.next_touched(0);
        while let Some(page) = at {
            let was = self.acquire(page);
            match was.kind() {
                Kind::Resident => resident += 1,
                Kind::Staged => self.pager.staging.disown(was.frame(), (self.id, page)),
                _ => {}
            }
            at = self.next_touched(page + 1);
        }
        drop(self.memory.lock().unwrap_or_else(PoisonError::into_inner).take());
        resident + self.words.group_pages(self.words.groups())
    }

    pub(crate) fn range(&self) -> Range<usize> {
        self.base..self.end()
    }

    pub(crate) fn end(&self) -> usize {
        self.address(self.pages)
    }

    /// Decides if processes that are forked from now on inherit the memory.
    pub(crate) fn set_inherited(&self, is_inherited: bool) -> io::Result<()> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(memory) = &*memory else { return Ok(()) };
        memory.set_inherited(0, self.range().len(), is_inherited)
    }

    /// Writes pages to a file, in a forked child that has inherited the memory.
    pub(crate) fn write_pages(
        &self,
        pages: Range<u32>,
        file: &File,
        offset: u64,
    ) -> io::Result<()> {
        let (at, bytes) = (self.address(pages.start), pages.len() * PAGE_BYTES);
        // SAFETY: the bytes are mapped, as the caller promises, and this runs in the process's only
        // thread.
        let bytes = unsafe { std::slice::from_raw_parts(at as *const u8, bytes) };
        file.write_all_at(bytes, offset)
    }

    /// Maps the part of a file that begins at `offset` over the memory, in a forked child that has
    /// inherited it.
    pub(crate) fn cover(&self, file: &File, offset: u64) -> io::Result<()> {
        // SAFETY: the fork has the memory at these addresses; its content is in the file.
        unsafe { map::map_file_over(self.range(), file.as_fd(), offset) }?;
        self.is_copy.store(true, Relaxed);
        Ok(())
    }

    /// Unmaps the memory that a fork has inherited and could not complete.
    pub(crate) fn abandon(&self) {
        self.is_copy.store(false, Relaxed);
        // SAFETY: the fork has the region's memory at these addresses, or the file; no code has
        // used it yet.
        let done = unsafe { map::unmap_range(self.range()) };
        done.expect("munmap of a mapping");
    }

    /// True if this is a fork with a copy of the region.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_copy.load(Relaxed)
    }

    /// Unmaps the fork's copy, if there is one.
    pub(crate) fn drop_copy(&self) -> bool {
        let had = self.is_copy.swap(false, Relaxed);
        if had {
            // SAFETY: the region's user gives it up, and with it the mapping in its place.
            let done = unsafe { map::unmap_range(self.range()) };
            done.expect("munmap of a mapping");
        }
        had
    }
}
