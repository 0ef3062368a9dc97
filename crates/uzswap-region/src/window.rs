//! Memory that a program has already: adopted where it lies.
//!
//! A *window* is a [`Space`] over one GiB of addresses. Its pages are the program's, which maps and
//! unmaps them. Only adopted pages have a word other than `Untouched`. So one program has few
//! windows, whatever it maps, and a page is found as in a region.
//!
//! The caller of this module sees the program's system calls before the kernel does. It makes calls
//! that unmap, move or drop adopted pages inside of [`Pager::change`] or [`Pager::move_adopted`].
//! Before a call that gives pages to the kernel it holds them ([`Pager::hold`]). One thread at a
//! time adopts, changes or moves pages.
//!
//! Forks of such a program: [`crate::inherit`].

use crate::door::range_of;
use crate::error::Error;
use crate::lane::Count;
use crate::pager::{Inner, Pager};
use crate::registry;
use crate::space::{Space, Taken, neighbours};
use crate::unnamed::Unnamed;
use crate::word::{Kind, Word};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::bus::{self, Blocked};
use uzswap_sys::cpu;
use uzswap_sys::uffd::Uffd;
use uzswap_tree::Figures;

/// Addresses of a window.
const WINDOW: usize = 1 << 30;

/// Which pages a range may have that is adopted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// None: it was never touched.
    Nothing,
    /// Some, that may be read and written.
    Pages,
    /// Some, that may be read only. Not where pages leave by their protection, which would have to
    /// tell the program's from its own.
    ReadOnlyPages,
}

/// The fate of pages that a call of the program's has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// They are not the pager's any more: they were unmapped, or the mapping there is another's.
    Gone,
    /// They read as zeros.
    Zeroed,
}

impl Change {
    fn word(self) -> Word {
        match self {
            Self::Gone => Word::UNTOUCHED,
            Self::Zeroed => Word::EMPTY,
        }
    }
}

impl Pager {
    /// Takes over memory that the program has: private, anonymous, mapped for reading, of whole
    /// pages, none of which is adopted. The program may go on using it meanwhile.
    ///
    /// # Safety
    /// The range is as said. Nobody unmaps, moves or drops any of it from now on but inside of
    /// [`Self::change`] and [`Self::move_adopted`]. It holds no stack, nothing of this pager's, and
    /// nothing that the kernel reads or writes outside of system calls.
    pub unsafe fn adopt(&self, range: Range<usize>, contents: Contents) -> Result<(), Error> {
        let inner = self.inner();
        inner.check_process()?;
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        for part in parts(range) {
            let space = inner.window_at(part.start)?;
            // SAFETY: the caller's promise.
            unsafe { inner.adopt_part(&space, part, contents) }?;
        }
        Ok(())
    }

    /// True if any page of a range is adopted.
    pub fn has_adopted(&self, range: Range<usize>) -> bool {
        adopted(range).next().is_some()
    }

    /// The parts of a range that are adopted.
    pub fn adopted(&self, range: Range<usize>) -> Vec<Range<usize>> {
        let mut parts: Vec<Range<usize>> = Vec::new();
        for at in adopted(range) {
            match parts.last_mut() {
                Some(last) if last.end == at => last.end += PAGE_BYTES,
                _ => parts.push(at..at + PAGE_BYTES),
            }
        }
        parts
    }

    /// Makes a call that changes the mappings of a range, while no other thread has an adopted page
    /// of it. `call` says whether it did; if not, all is as it was.
    pub fn change<R>(
        &self,
        range: Range<usize>,
        change: Change,
        call: impl FnOnce() -> (R, bool),
    ) -> R {
        let inner = self.inner();
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        let mut taken = inner.take_all(&range);
        let (result, is_done) = call();
        if is_done && change == Change::Zeroed {
            inner.close_dropped(&taken);
            return result;
        }
        let mut given = 0;
        for Taken { space, page, was } in taken.drain(..) {
            if !is_done {
                space.put(page, was);
                continue;
            }
            given += inner.forget(&space, page, was);
            space.put(page, change.word());
        }
        inner.budget.give_back(given);
        if change == Change::Gone {
            inner.take_keys(range);
        }
        result
    }

    /// Gives adopted pages back to the program: all of them are brought in, and stay.
    pub fn release(&self, range: Range<usize>) {
        let inner = self.inner();
        let _blocked = Blocked::all();
        let mut at = range.start / PAGE_BYTES * PAGE_BYTES;
        while at < range.end {
            if let Some((space, page)) = find(at) {
                space.bring_in(page, |word| Some(word.with(Word::USED)));
                let was = space.acquire(page);
                if was.kind() == Kind::Resident {
                    inner.door.let_go(at..at + PAGE_BYTES);
                    inner.budget.give_back(inner.forget(space, page, was));
                    space.put(page, Word::UNTOUCHED);
                } else {
                    space.put(page, was);
                    continue;
                }
            }
            at += PAGE_BYTES;
        }
    }

    /// True if a page is adopted, and not in its place.
    pub fn is_out(&self, address: usize) -> bool {
        find(address).is_some_and(|(space, page)| {
            matches!(space.load(page).kind(), Kind::Stored | Kind::Staged | Kind::Empty)
        })
    }

    /// Raises the budget to this machine's memory, and brings all adopted pages in.
    pub fn bring_all_in(&self) {
        let most = cpu::memory_info().map_or(u64::MAX >> 1, |memory| memory.total);
        // An error would mean that the process has no pager any more.
        let _ = self.set_memory(most);
        let windows: Vec<_> = self.inner().regions().values().map(|space| space.base()).collect();
        let parts = windows.into_iter().flat_map(|base| self.adopted(base..base + WINDOW));
        for at in parts.flat_map(|part| part.step_by(PAGE_BYTES)) {
            // Pages that read as zeros do so for everybody.
            let is_out = find(at).is_some_and(|(space, page)| {
                matches!(space.load(page).kind(), Kind::Stored | Kind::Staged)
            });
            if is_out && let Some(held) = self.hold(at..at + PAGE_BYTES) {
                Self::unhold(held);
            }
        }
    }

    /// Gives all adopted memory back to the program, whatever the budget. Nobody adopts any
    /// meanwhile, and the pager has no threads ([`Self::stop_threads`]).
    pub fn give_all_back(&self) {
        let inner = self.inner();
        inner.budget.set_lifted(true);
        let windows: Vec<_> = inner.regions().values().map(|space| space.base()).collect();
        for base in windows {
            let parts = self.adopted(base..base + WINDOW);
            parts.into_iter().for_each(|part| self.release(part));
        }
    }

    /// Compresses the adopted pages of a range now, but for those held. Errors: there is no room
    /// for all of it, and the rest stays.
    pub fn page_out(&self, range: Range<usize>) -> Result<(), Error> {
        let inner = self.inner();
        for part in parts(range) {
            let known = registry::find(part.start).filter(|space| space.is_window());
            let space = known.and_then(|space| inner.regions().get(&space.id).cloned());
            if let Some(space) = space {
                inner.page_out(&space, pages_of(&space, &part))?;
            }
        }
        Ok(())
    }

    /// Brings in the first adopted pages in a row of a range, and keeps them in memory until
    /// [`Self::unhold`]: the kernel is going to read or write them. Returns where they are; `None`
    /// if none is adopted.
    pub fn hold(&self, range: Range<usize>) -> Option<Range<usize>> {
        let mut held: Option<Range<usize>> = None;
        for at in (range.start / PAGE_BYTES * PAGE_BYTES..range.end).step_by(PAGE_BYTES) {
            let is_held = find(at).is_some_and(|(space, page)| space.bring_in(page, Word::pinned));
            match &mut held {
                Some(held) if is_held => held.end = at + PAGE_BYTES,
                Some(_) => break,
                None if is_held => held = Some(at..at + PAGE_BYTES),
                None => {}
            }
        }
        held
    }

    /// Holds a range, if all of it is adopted and there; holds nothing, and returns no page, if
    /// none of it is adopted. `None` if only parts are. Unlike [`Self::hold`] it calls nothing of
    /// the C library and uses no vector registers but those of any x86-64.
    pub fn hold_present(range: Range<usize>) -> Option<Range<usize>> {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let is_adopted = find(start).is_some();
        let mut at = start;
        while at < range.end {
            let is_as_first = match find(at) {
                Some((space, page)) => is_adopted && space.pin_present(page),
                None => !is_adopted,
            };
            if !is_as_first {
                if is_adopted {
                    Self::unhold(start..at);
                }
                return None;
            }
            at += PAGE_BYTES;
        }
        Some(start..if is_adopted { at } else { start })
    }

    /// Ends [`Self::hold`] and [`Self::hold_present`] for the range that they returned; like the
    /// latter it leaves vector registers alone.
    pub fn unhold(held: Range<usize>) {
        let mut at = held.start;
        while at < held.end {
            if let Some((space, page)) = find(at) {
                space.unpin(page);
            }
            at += PAGE_BYTES;
        }
    }

    /// Makes a call that moves a mapping (`mremap`). Its pages go along; `source` is the state of
    /// their old addresses afterwards. `call` returns their new address, and `None` if it failed.
    /// The pages `grown` behind them are adopted as well.
    ///
    /// # Safety
    /// As of [`Self::adopt`], for where they are then, of which nothing is adopted.
    pub unsafe fn move_adopted(
        &self,
        from: Range<usize>,
        source: Change,
        grown: usize,
        call: impl FnOnce() -> Option<usize>,
    ) -> Result<(), Error> {
        let inner = self.inner();
        let _blocked = Blocked::all();
        let _steady = inner.steady();
        let taken = inner.take_all(&from);
        // In their frames they would be known by the addresses that they have now.
        let taken: Vec<Taken> = taken.into_iter().map(|taken| inner.unstage(taken)).collect();
        let Some(to) = call() else {
            taken.into_iter().for_each(Taken::put_back);
            return Ok(());
        };
        let result = inner.register_moved(&taken, (from.start, to), from.len() + grown);
        for Taken { space, page, was } in taken {
            let address = to + (space.address(page) - from.start);
            if to == from.start && result.is_ok() {
                space.put(page, was);
                continue;
            }
            if result.is_ok() {
                inner.carry(&space, page, was, address);
            } else {
                inner.budget.give_back(inner.forget(&space, page, was));
            }
            space.put(page, source.word());
        }
        result?;
        match source {
            Change::Gone if to != from.start => inner.take_keys(from.clone()),
            Change::Gone => {}
            Change::Zeroed => {
                let failed = |source| Error::Map { bytes: from.len(), source };
                self.adopted(from.clone())
                    .into_iter()
                    .try_for_each(|part| inner.door.watch(part))
                    .map_err(failed)?;
            }
        }
        let tail = to + from.len()..to + from.len() + grown;
        for part in parts(tail) {
            let space = inner.window_at(part.start)?;
            inner.keys.give(&space, pages_of(&space, &part));
            for page in pages_of(&space, &part) {
                if space.take(page, Word::UNTOUCHED) {
                    space.put(page, Word::EMPTY);
                }
            }
        }
        Ok(())
    }

    /// Pages leave by a move rather than by a copy, and the kernel refuses to move a page that a
    /// device reads or writes.
    pub fn leaves_pinned_in(&self) -> bool {
        self.inner().door.uffd().is_some_and(Uffd::can_move)
    }

    /// Names the only thread of the program: no other looks at a page while that one brings it in.
    /// `None`: there are others, or will be in a moment.
    pub fn set_only_thread(&self, thread: Option<i32>) {
        self.inner().door.set_only_thread(thread.unwrap_or(0));
    }

    /// The descriptors that serve faults: closing one loses all evicted pages.
    pub fn descriptors(&self) -> Vec<i32> {
        let inner = self.inner();
        let backing = inner.unnamed.iter().map(Unnamed::descriptor).collect();
        [inner.door.descriptors(), inner.staging.descriptors(), backing, self.sockets()].concat()
    }

    /// Those of them that are connections to a store.
    pub fn sockets(&self) -> Vec<i32> {
        self.inner().tiers.as_ref().map_or_else(Vec::new, uzswap_remote::Tiers::descriptors)
    }

    /// The process ends: removes its segments from the store, if there is one. A page that is read
    /// from then on may never come in.
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

    /// Has threads that need an evicted page wait until this is over. Reclaim goes on.
    pub fn set_held(&self, is_held: bool) {
        self.inner().budget.set_held(is_held);
    }

    /// The counts since the pager was made, and the evicted pages.
    pub fn figures(&self) -> Figures {
        let inner = self.inner();
        let of = |name: &str| inner.cache.statistic(name).unwrap_or(0);
        Figures {
            faults: inner.lanes.counts()[Count::Faults as usize],
            stored: of("stores"),
            held: of("stored_pages"),
            pool: of("pool_total_size"),
        }
    }
}

/// The parts of a range that lie in one window each.
fn parts(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        // The last addresses are the kernel's.
        let end = range.end.min((at / WINDOW + 1).saturating_mul(WINDOW));
        let part = at..end;
        at = end;
        (!part.is_empty()).then_some(part)
    })
}

fn pages_of(space: &Space, part: &Range<usize>) -> Range<u32> {
    let first = (part.start - space.base()) / PAGE_BYTES;
    first as u32..(part.end - space.base()).div_ceil(PAGE_BYTES) as u32
}

/// The addresses of a range's pages that are adopted.
fn adopted(range: Range<usize>) -> impl Iterator<Item = usize> {
    let windows = parts(range).filter_map(|part| {
        let space = registry::find(part.start).filter(|space| space.is_window())?;
        Some((space, pages_of(space, &part)))
    });
    windows.flat_map(|(space, pages)| {
        let mut at = pages.start;
        std::iter::from_fn(move || {
            while let Some(page) = space.next_touched(at).filter(|page| *page < pages.end) {
                at = page + 1;
                if space.load(page).kind() != Kind::Untouched {
                    return Some(space.address(page));
                }
            }
            None
        })
    })
}

/// The page at an address, if it may be adopted.
fn find(address: usize) -> Option<(&'static Space, u32)> {
    let space = registry::find(address).filter(|space| space.is_window())?;
    let page = space.page_of(address);
    (space.load(page).kind() != Kind::Untouched).then_some((space, page))
}

impl Space {
    /// Brings a page in and changes its word while it is there; `false` if it is not adopted.
    fn bring_in(&self, page: u32, to: impl Fn(Word) -> Option<Word>) -> bool {
        loop {
            let word = self.load(page);
            match word.kind() {
                Kind::Untouched => return false,
                Kind::Resident => {
                    if self.change(page, word, to(word).expect("pinned 2^18 times")) {
                        return true;
                    }
                }
                _ => {
                    let _blocked = Blocked::all();
                    bus::on_own_stack(|| self.pager.fault(self, page, true));
                }
            }
        }
    }
}

impl Inner {
    /// The window that an address lies in; made if it is the first in it.
    fn window_at(self: &Arc<Self>, address: usize) -> Result<Arc<Space>, Error> {
        let known = |address| registry::find(address).map(|space| space.id);
        if let Some(id) = known(address) {
            let foreign = Error::Foreign { address };
            return self.regions().get(&id).cloned().ok_or(foreign);
        }
        let base = address / WINDOW * WINDOW;
        let max = self.cache.pages_max() as u64 * PAGE_BYTES as u64;
        let area = self.keys.area().ok_or(Error::Addresses { bytes: WINDOW, max })?;
        let space = Space::window(self.next_region(), self.clone(), (base, WINDOW), area);
        let space = Arc::new(space?);
        self.count_table(space.table_bytes() as i64);
        self.regions_mut().insert(space.id, space.clone());
        registry::add(&space);
        self.account();
        Ok(space)
    }

    /// Takes back the keys of pages that are not adopted any more.
    fn take_keys(&self, range: Range<usize>) {
        for part in parts(range) {
            let known = registry::find(part.start).filter(|space| space.is_window());
            if let Some(space) = known {
                self.keys.take(space, pages_of(space, &part));
            }
        }
    }

    /// # Safety
    /// As of [`Pager::adopt`].
    unsafe fn adopt_part(
        &self,
        space: &Space,
        part: Range<usize>,
        contents: Contents,
    ) -> Result<(), Error> {
        let pages = pages_of(space, &part);
        if !self.keys.give(space, pages.clone()) {
            let max = self.cache.pages_max() as u64 * PAGE_BYTES as u64;
            return Err(Error::Addresses { bytes: part.len(), max });
        }
        // A thread that faults there as soon as it is registered waits for us.
        for page in pages.clone() {
            assert!(space.take(page, Word::UNTOUCHED), "a page is adopted twice");
        }
        let registered = self.door.watch(part.clone());
        if let Err(source) = registered {
            pages.for_each(|page| space.put(page, Word::UNTOUCHED));
            return Err(Error::Map { bytes: part.len(), source });
        }
        let (mut there, mut guards) = ([false; 512], [false; 512]);
        let mut charged = 0;
        let mut at = pages.start;
        while at < pages.end {
            let many = ((pages.end - at) as usize).min(there.len());
            let found = (&mut there[..many], &mut guards[..many]);
            let known = self.find_pages(space.address(at), contents, found);
            for ((page, is_there), is_guard) in (at..).zip(&there[..known]).zip(&guards) {
                if *is_guard {
                    // Of the program's own: an access is to fail.
                    space.put(page, Word::UNTOUCHED);
                    continue;
                }
                if *is_there && contents == Contents::Pages {
                    // A page that was given up (MADV_FREE) is in use again once it is written, and
                    // one of the kernel's zeros becomes the program's own.
                    let byte = space.address(page) as *mut u8;
                    // SAFETY: mapped and writable, as the caller says; a byte that is exchanged for
                    // itself stays, even if another thread writes it meanwhile. Adding nothing to
                    // it would be no write at all: compilers leave that out.
                    let byte = unsafe { AtomicU8::from_ptr(byte) };
                    let value = byte.load(Relaxed);
                    // Another one has written it: so much the better.
                    let _ = byte.compare_exchange(value, value, Relaxed, Relaxed);
                }
                charged += i64::from(*is_there);
                space.put(
                    page,
                    if *is_there { Word::RESIDENT.with(Word::USED) } else { Word::EMPTY },
                );
            }
            at += known as u32;
        }
        self.budget.charge_anyway(charged);
        Ok(())
    }

    /// Finds out which pages of a range there are, and which are guards of the program's. Touches
    /// of all others come to us from now on. Returns the number of pages looked at.
    fn find_pages(
        &self,
        at: usize,
        contents: Contents,
        (there, guards): (&mut [bool], &mut [bool]),
    ) -> usize {
        let many = there.len();
        let has_pages = contents != Contents::Nothing;
        guards.fill(false);
        let known = if has_pages {
            let pagemap = self.door.pagemap();
            // Of a kernel that does not say, no guards are known.
            let _ = pagemap.have_guards(at, guards);
            pagemap.have_pages(at, there)
        } else {
            there.fill(false);
            Ok(many)
        };
        // A page that cannot be asked about is taken to be there. An absent one then ends the
        // process.
        let known = known.unwrap_or_else(|_| {
            there.fill(true);
            many
        });
        there.iter_mut().zip(guards).for_each(|(there, is_guard)| *there |= *is_guard);
        self.door.close(at, &mut there[..known], has_pages);
        known
    }

    /// Makes all adopted pages of a range `Busy`. It waits for none while it has another: the
    /// holder of that one may wait for memory, and reclaim for a page that is held here.
    fn take_all(&self, range: &Range<usize>) -> Vec<Taken> {
        let mut taken = Vec::new();
        while let Some((space, page)) = self.take_free(range, &mut taken) {
            taken.drain(..).for_each(Taken::put_back);
            space.wait(page);
        }
        taken
    }

    /// Takes pages of a range; one that somebody else has ends it.
    fn take_free(&self, range: &Range<usize>, taken: &mut Vec<Taken>) -> Option<(Arc<Space>, u32)> {
        for part in parts(range.clone()) {
            let id = registry::find(part.start).filter(|space| space.is_window());
            let Some(space) = id.and_then(|space| self.regions().get(&space.id).cloned()) else {
                continue;
            };
            let pages = pages_of(&space, &part);
            let mut at = pages.start;
            while let Some(page) = space.next_touched(at).filter(|page| *page < pages.end) {
                let was = space.load(page);
                match was.kind() {
                    Kind::Untouched => {}
                    Kind::Busy => return Some((space, page)),
                    _ if space.take(page, was) => {
                        taken.push(Taken { space: space.clone(), page, was })
                    }
                    // It has changed just now.
                    _ => continue,
                }
                at = page + 1;
            }
        }
        None
    }

    /// Ends the `Busy` of pages in order that the program has dropped.
    fn close_dropped(&self, taken: &[Taken]) {
        let stays = |one: &Taken| {
            // A system call of the program uses it, and would fail.
            let is_held = one.was.kind() == Kind::Resident && one.was.pins() > 0;
            is_held && self.door.may_be_absent()
        };
        let mut left = taken;
        while let Some(first) = left.first() {
            let open = left.iter().take_while(|one| !stays(one)).count();
            let run = neighbours(&left[..open]).max(1);
            let is_closed = !stays(first) && self.door.close_dropped(range_of(&left[..run]));
            for Taken { space, page, was } in &left[..run] {
                let is_in = self.forget(space, *page, *was) > 0;
                self.budget.give_back((is_in && is_closed).into());
                let held = was.without(Word::KEPT | Word::STALE | Word::GUARDED);
                space.put(*page, if is_in && !is_closed { held } else { Word::EMPTY });
            }
            left = &left[run..];
        }
    }

    /// Drops the copies of a page that we have made `Busy`, and returns the number of charged
    /// pages.
    pub(crate) fn forget(&self, space: &Space, page: u32, was: Word) -> i64 {
        if was.kind() == Kind::Stored || was.has(Word::KEPT) {
            self.cache.invalidate(space.key(page));
        }
        if was.kind() == Kind::Staged {
            // The batch gives its charge back.
            self.staging.disown(was.frame(), space, page);
        }
        i64::from(was.kind() == Kind::Resident)
    }

    /// Moves a page back that is in a frame.
    fn unstage(&self, taken: Taken) -> Taken {
        let Taken { space, page, was } = taken;
        if was.kind() != Kind::Staged {
            return Taken { space, page, was };
        }
        self.take_back(&space, page, was.frame());
        let copy = was.copy_bits();
        Taken { space, page, was: Word::RESIDENT.with(Word::USED | copy) }
    }

    /// Registers where pages are after a move, and makes all of it `Busy` before.
    fn register_moved(
        self: &Arc<Self>,
        taken: &[Taken],
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Result<(), Error> {
        for Taken { space, page, .. } in taken {
            let address = to + (space.address(*page) - from);
            let window = self.window_at(address)?;
            let at = window.page_of(address);
            if !self.keys.give(&window, at..at + 1) {
                let max = self.cache.pages_max() as u64 * PAGE_BYTES as u64;
                return Err(Error::Addresses { bytes, max });
            }
            // In place, it is `Busy` already.
            if address != space.address(*page) {
                window.take(window.page_of(address), Word::UNTOUCHED);
            }
        }
        let failed = |source| Error::Map { bytes, source };
        self.door.watch(to..to + bytes).map_err(failed)
    }

    /// Has a page known by its new address; its word there is `Busy`.
    fn carry(self: &Arc<Self>, space: &Space, page: u32, was: Word, address: usize) {
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
        window.put(to, is);
    }

    /// The same of a page that is in the cache: its content, under another key.
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
