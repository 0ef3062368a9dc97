//! Memory that a program has already, and that the pager adopts where it lies.
//!
//! A *window* is a [`Space`] over whole GiB of addresses. The program maps and unmaps its pages.
//! Only adopted pages have a word other than `Untouched`. So one program has few windows, whatever
//! it maps, and a page is found as in a region. Adopted pages that were not used yet share words
//! ([`crate::page::words`]), so a reservation of terabytes is one window, and costs little.
//!
//! The caller of this module sees the program's system calls before the kernel does. The caller
//! makes a call that unmaps, moves or drops adopted pages inside of [`Pager::change`] or
//! [`Pager::move_adopted`]. Before a call that gives pages to the kernel, the caller pins them
//! ([`Pager::pin`]). One thread at a time adopts, changes or moves pages.
//!
//! [`crate::inherit`] has the forks of a program with adopted memory.

#![expect(
    unsafe_code,
    reason = "memory that a program has already, and its copy in a fork: the code that adopts a range sees each call that changes it; a child that writes pages to their places has one thread"
)]

use crate::adopt::{AllTaken, Contents, windows};
use crate::core::Inner;
use crate::core::registry;
use crate::core::space::{Space, Taken, neighbours, range_of};
use crate::error::Error;
use crate::lane::Count;
use crate::layers::Layers;
use crate::page::transition::{CARRIED, DROPPED, GONE, TAKEN_BACK, Transition, UNCHANGED};
use crate::page::word::{Kind, Word};
use crate::pager::Pager;
use crate::steady;
use std::ops::Range;
use std::sync::Arc;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::fault_signals::Blocked;
use uzswap_sys::uffd::Uffd;
use uzswap_sys::{cpu, map};
use uzswap_tree::{Figures, Remote};

/// The result for pages that a call of the program has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// They no longer belong to the pager: they were unmapped, or another mapping took their place.
    Gone,
    /// They read as zeros.
    Zeroed,
}

impl Change {
    /// The change of a page's word, and the word.
    fn of_word(self) -> (&'static Transition, Word) {
        match self {
            Self::Gone => (GONE, Word::UNTOUCHED),
            Self::Zeroed => (DROPPED, Word::EMPTY),
        }
    }
}

impl Pager {
    /// Takes over memory of the program: private, anonymous, mapped for reading, of whole pages,
    /// none of which is adopted. The program may use the memory during the call.
    ///
    /// # Safety
    /// The range is as said. From now on its pages are unmapped, moved or dropped only inside of
    /// [`Self::change`] and [`Self::move_adopted`]. It holds no stack, nothing of this pager's, and
    /// nothing that the kernel reads or writes outside of system calls.
    pub unsafe fn adopt(&self, range: Range<usize>, contents: Contents) -> Result<(), Error> {
        let inner = self.inner();
        inner.check_process()?;
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        inner.windows_over(range.clone())?;
        let is_long = inner.is_long(&range);
        for (space, pages) in windows(range) {
            // SAFETY: the caller's promise.
            unsafe { inner.adopt_part(space, pages, (contents, is_long)) }?;
        }
        Ok(())
    }

    /// True if a page of a range is adopted.
    pub fn has_adopted(&self, range: Range<usize>) -> bool {
        self.first_adopted(range).is_some()
    }

    /// The address of the first page of a range that is adopted.
    pub fn first_adopted(&self, range: Range<usize>) -> Option<usize> {
        adopted(range).next().map(|piece| piece.start)
    }

    /// The parts of a range that are adopted.
    pub fn adopted(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for part in adopted(range) {
            match parts.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => parts.push(part),
            }
        }
        parts
    }

    /// Makes a call that changes the mappings of a range, while no other thread has an adopted page
    /// of it. `call` returns true if it succeeded; otherwise nothing has changed.
    pub fn change<R>(
        &self,
        range: Range<usize>,
        change: Change,
        call: impl FnOnce() -> (R, bool),
    ) -> R {
        let inner = self.inner();
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        let AllTaken { pages, emptied } = inner.take_all(&range);
        let (result, is_done) = call();
        let is_gone = is_done && change == Change::Gone;
        let (by, word) = if is_done { change.of_word() } else { (UNCHANGED, Word::EMPTY) };
        emptied.end_busy(by, word);
        if is_done && change == Change::Zeroed {
            inner.close_dropped(&pages);
            return result;
        }
        let mut given = 0;
        for Taken { space, page, was } in pages {
            if !is_done {
                space.put(page, UNCHANGED, was);
                continue;
            }
            given += inner.forget(&space, page, was);
            space.put(page, by, word);
        }
        inner.budget.give_back(given);
        if is_gone {
            inner.take_keys(range);
        }
        result
    }

    /// Gives adopted pages back to the program: brings all of them in, for good.
    pub fn release(&self, range: Range<usize>) {
        let inner = self.inner();
        let _blocked = Blocked::all();
        for (space, pages) in windows(range) {
            let mut at = pages.start;
            while at < pages.end {
                at = inner.release_from(space, at..pages.end);
            }
        }
    }

    /// True if a page is adopted but absent. Pages that were never used do not count: the kernel
    /// reports them itself.
    pub fn is_out(&self, address: usize) -> bool {
        find(address).is_some_and(|(space, page)| {
            let is_out =
                matches!(space.load(page).kind(), Kind::Stored | Kind::Staged | Kind::Empty);
            is_out && space.has_own_word(page)
        })
    }

    /// Raises the budget to this machine's memory, and brings all adopted pages in.
    pub fn bring_all_in(&self) {
        let most = cpu::memory_info().map_or(u64::MAX >> 1, |memory| memory.total);
        // An error would mean that the process has no pager any more.
        let _ = self.set_memory(most);
        // After this no page is on its way out, and no further page leaves.
        drop(steady::unsteady());
        let windows: Vec<_> = self.inner().regions().values().cloned().collect();
        for space in windows {
            let mut next = space.next_touched(0);
            while let Some(page) = next {
                // Pages that read as zeros do so for every reader. A thread that is bringing a page
                // in may end before the page is present.
                if matches!(space.load(page).kind(), Kind::Stored | Kind::Staged | Kind::Busy) {
                    space.bring_in(page, |word| Some(word.with(Word::USED)));
                }
                next = space.next_touched(page + 1);
            }
        }
    }

    /// Finds the used pages of long mappings that were left open (`doors/guards.rs`), and charges
    /// them. They may leave from now on.
    pub fn find_used(&self) {
        let inner = self.inner();
        if !inner.door.leaves_open() {
            return;
        }
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        let windows: Vec<_> = inner.regions().values().cloned().collect();
        for space in windows {
            inner.find_used_in(&space);
        }
        inner.budget.ring();
    }

    /// Gives all adopted memory back to the program, whatever the budget. No thread adopts memory
    /// during the call, and the pager has no threads ([`Self::stop_threads`]).
    pub fn give_all_back(&self) {
        let inner = self.inner();
        inner.budget.set_lifted(true);
        let windows: Vec<_> = inner.regions().values().map(|space| space.range()).collect();
        windows.into_iter().for_each(|window| self.release(window));
    }

    /// Compresses the adopted pages of a range now, except pinned ones. Fails if there is no room
    /// for all of it. Then the other pages stay as they are.
    pub fn page_out(&self, range: Range<usize>) -> Result<(), Error> {
        let inner = self.inner();
        for (space, pages) in windows(range) {
            let space = inner.regions().get(&space.id).cloned();
            space.map_or(Ok(()), |space| inner.page_out(&space, pages))?;
        }
        Ok(())
    }

    /// Makes a call that moves a mapping (`mremap`), and may change its length to `bytes`. The
    /// pages move with it. `source` is the later state of their old addresses. `call` returns the
    /// new address, or `None` if it failed. Pages by which the mapping grows are adopted as well;
    /// those by which it shrinks were unmapped.
    ///
    /// # Safety
    /// As of [`Self::adopt`], for the new addresses, of which nothing is adopted.
    pub unsafe fn move_adopted(
        &self,
        whole: Range<usize>,
        bytes: usize,
        source: Change,
        call: impl FnOnce() -> Option<usize>,
    ) -> Result<(), Error> {
        let inner = self.inner();
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        let AllTaken { pages, emptied } = inner.take_all(&whole);
        // The staging area knows the pages in its frames by their old addresses.
        let pages: Vec<Taken> = pages.into_iter().map(|taken| inner.unstage(taken)).collect();
        // The kernel ends the registration of the mapping at the new place. If the kernel had
        // merged the mapping with a neighbour, the neighbour's registration would end, too, and its
        // pages would read as zeros. An error means that there are several mappings, which the
        // kernel does not move in one call.
        let _ = map::set_joined(whole.clone(), false);
        let Some(to) = call() else {
            let _ = map::set_joined(whole, true);
            pages.into_iter().for_each(Taken::put_back);
            emptied.end_busy(UNCHANGED, Word::EMPTY);
            return Ok(());
        };
        let stays = to == whole.start;
        let from = whole.start..whole.start + whole.len().min(bytes);
        let is_kept = |taken: &Taken| taken.space.address(taken.page) < from.end;
        let (pages, unmapped): (Vec<_>, Vec<_>) = pages.into_iter().partition(is_kept);
        for Taken { space, page, was } in unmapped {
            inner.budget.give_back(inner.forget(&space, page, was));
            space.put(page, GONE, Word::UNTOUCHED);
        }
        let result = inner.register_moved(&pages, (from.start, to), bytes);
        // When the mapping is registered like its neighbours, the kernel may merge them.
        for range in [to..to + bytes, from.clone()] {
            let _ = map::set_joined(range, true);
        }
        let (by, word) = source.of_word();
        for Taken { space, page, was } in pages {
            let address = to + (space.address(page) - from.start);
            if stays && result.is_ok() {
                space.put(page, UNCHANGED, was);
                continue;
            }
            if result.is_ok() {
                inner.carry(&space, page, was, address);
            } else {
                inner.budget.give_back(inner.forget(&space, page, was));
            }
            space.put(page, by, word);
        }
        let (by, word) = if stays { (UNCHANGED, Word::EMPTY) } else { (by, word) };
        emptied.end_busy(by, word);
        result?;
        for part in emptied.ranges().filter(|_| !stays) {
            let moved = |at: usize| to + (at.min(from.end) - from.start);
            inner.give_empty(moved(part.start)..moved(part.end))?;
        }
        match source {
            Change::Gone if !stays => inner.take_keys(whole),
            Change::Gone => {}
            Change::Zeroed => {
                let failed = |source| Error::Map { bytes: from.len(), source };
                self.adopted(from.clone())
                    .into_iter()
                    .try_for_each(|part| inner.door.watch(part))
                    .map_err(failed)?;
            }
        }
        inner.give_empty(to + from.len()..to + bytes)
    }

    /// True if pages leave by a move, and so leave memory of devices in place: the kernel refuses
    /// to move a page that a device reads or writes.
    pub fn leaves_pinned_in(&self) -> bool {
        self.inner().door.uffd().is_some_and(Uffd::can_move)
    }

    /// Names the program's only thread: while that thread brings a page in, no other thread can see
    /// the page. `None` if there are other threads, or will soon be.
    pub fn set_only_thread(&self, thread: Option<i32>) {
        self.inner().door.set_only_thread(thread.unwrap_or(0));
    }

    /// The descriptors that serve faults: closing one loses all evicted pages.
    pub fn descriptors(&self) -> Vec<i32> {
        let inner = self.inner();
        let backing = inner.layers.as_ref().map_or_else(Vec::new, Layers::descriptors);
        [inner.door.descriptors(), inner.staging.descriptors(), backing, self.sockets()].concat()
    }

    /// The descriptors among [`Self::descriptors`] that are connections to a store.
    pub fn sockets(&self) -> Vec<i32> {
        self.inner().tiers.as_ref().map_or_else(Vec::new, uzswap_remote::Tiers::descriptors)
    }

    /// Removes this process's segments from the store, if there is one, because the process ends. A
    /// page that a thread needs afterwards may never come in.
    pub fn leave_store(&self) {
        let inner = self.inner();
        if let (Some(tiers), Ok(())) = (&inner.tiers, inner.check_process()) {
            tiers.clear();
        }
    }

    /// The present use of the pager's budget, bytes.
    pub fn used_bytes(&self) -> u64 {
        let inner = self.inner();
        let pages = inner.budget.charged().max(0) as u64;
        pages * PAGE_BYTES as u64 + inner.cache.memory_bytes() as u64
    }

    /// While the process is suspended, threads that need an evicted page wait. Reclaim continues.
    pub fn set_suspended(&self, is_suspended: bool) {
        self.inner().budget.set_suspended(is_suspended);
    }

    /// The counts since the pager was made, and the evicted pages.
    pub fn figures(&self) -> Figures {
        let inner = self.inner();
        let of = |name: &str| inner.cache.statistic(name).unwrap_or(0);
        Figures {
            faults: inner.lanes.counts()[Count::Faults as usize],
            stored: of("stores"),
            out: of("stored_pages"),
            pool: of("pool_total_size"),
            backing: of("backing_live_size"),
            remote: inner.cache.remote().bytes,
        }
    }

    /// The activity at the store in another machine's memory; `None` if there is no store.
    pub fn remote(&self) -> Option<Remote> {
        let cache = &self.inner().cache;
        let times = cache.remote_read_times()?.by_power().counts;
        let figures = cache.remote();
        let (written, errors, lost) = (figures.bytes_written, figures.errors, figures.lost);
        Some(Remote { written, errors, lost, times })
    }
}

/// The parts of a range that are adopted, in pieces.
fn adopted(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    windows(range).flat_map(|(space, pages)| {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            while at < pages.end {
                let found = space.words.find(at);
                let piece = at..found.end().min(pages.end);
                at = piece.end;
                if found.word.kind() != Kind::Untouched {
                    return Some(space.address(piece.start)..space.address(piece.end));
                }
            }
            None
        })
    })
}

/// The page at an address, if it may be adopted.
pub(crate) fn find(address: usize) -> Option<(&'static Space, u32)> {
    let space = registry::find(address).filter(|space| space.is_window())?;
    let page = space.page_of(address);
    (space.load(page).kind() != Kind::Untouched).then_some((space, page))
}

impl Inner {
    /// Takes back the keys of pages that are not adopted any more.
    fn take_keys(&self, range: Range<usize>) {
        windows(range).for_each(|(space, pages)| self.keys.take(space, pages));
    }

    /// Ends `Busy` of pages that the program has dropped, given in order.
    fn close_dropped(&self, taken: &[Taken]) {
        let stays = |one: &Taken| {
            // A system call of the program uses the page, and would fail if the page were closed.
            let is_pinned = one.was.kind() == Kind::Resident && one.was.pins() > 0;
            is_pinned && self.door.may_be_absent()
        };
        let mut left = taken;
        while let Some(first) = left.first() {
            let open = left.iter().take_while(|one| !stays(one)).count();
            let run = neighbours(&left[..open]).max(1);
            let is_closed = !stays(first) && self.door.close_dropped(range_of(&left[..run]));
            for Taken { space, page, was } in &left[..run] {
                let is_in = self.forget(space, *page, *was) > 0;
                self.budget.give_back((is_in && is_closed).into());
                let kept = was.without(Word::KEPT | Word::STALE | Word::GUARDED);
                space.put(*page, DROPPED, if is_in && !is_closed { kept } else { Word::EMPTY });
            }
            left = &left[run..];
        }
    }

    /// Drops the copies of a page that we have made `Busy`, and returns the number of charged
    /// pages.
    pub(crate) fn forget(&self, space: &Space, page: u32, was: Word) -> i64 {
        self.note_gone(space, page);
        if was.kind() == Kind::Stored || was.has(Word::KEPT) {
            self.cache.invalidate(space.key(page));
        }
        if was.kind() == Kind::Staged {
            // The batch gives its charge back.
            self.staging.disown(was.frame(), (space.id, page));
        }
        i64::from(was.kind() == Kind::Resident)
    }

    /// Moves a page in a frame back to its place.
    fn unstage(&self, taken: Taken) -> Taken {
        let Taken { space, page, was } = taken;
        if was.kind() != Kind::Staged {
            return Taken { space, page, was };
        }
        self.take_back(&space, page, was.frame());
        space.note_place(page, TAKEN_BACK, Kind::Resident);
        let copy = was.copy_bits();
        Taken { space, page, was: Word::RESIDENT.with(Word::USED | copy) }
    }

    /// Makes the new places of moved pages `Busy`, and registers them.
    fn register_moved(
        self: &Arc<Self>,
        taken: &[Taken],
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Result<(), Error> {
        for Taken { space, page, .. } in taken {
            let address = to + (space.address(*page) - from);
            let window = self.window_at(address)?;
            // If the mapping stays in place, the page is `Busy` already.
            if address != space.address(*page) {
                window.take(window.page_of(address), Word::UNTOUCHED);
            }
        }
        let failed = |source| Error::Map { bytes, source };
        self.door.watch(to..to + bytes).map_err(failed)
    }

    /// Gives a page's state to its new address, whose word is `Busy`.
    fn carry(self: &Arc<Self>, space: &Space, page: u32, was: Word, address: usize) {
        self.note_gone(space, page);
        let window = self.window_at(address).expect("made by `register_moved`");
        let to = window.page_of(address);
        let is = match was.kind() {
            Kind::Stored => self.carry_copy(space, page, (&window, to)),
            _ => {
                if was.has(Word::KEPT) {
                    self.cache.invalidate(space.key(page));
                }
                was.without(Word::KEPT | Word::STALE | Word::GUARDED)
            }
        };
        window.put(to, CARRIED, is);
    }

    /// Moves a page that is in the cache: its copy gets another key.
    fn carry_copy(&self, space: &Space, page: u32, (window, to): (&Space, u32)) -> Word {
        let mut content: Box<Page> = Box::new([0; PAGE_BYTES]);
        self.load(space, page, &mut content);
        self.cache.invalidate(space.key(page));
        self.tend();
        if self.keep(window, to, &content) {
            return Word::STORED;
        }
        self.budget.charge_anyway(1);
        self.copy_in(window, to, std::slice::from_ref(&*content), 0);
        Word::RESIDENT.with(Word::USED)
    }
}
