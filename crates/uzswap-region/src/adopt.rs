//! The words of memory as it is adopted, changed by a call, and given back.
//!
//! Adopted pages that were not used yet are `Empty`, and share a word with their neighbours until
//! one of them is used. So each step here works word by word, not page by page, and asks the kernel
//! once for the present pages ([`Present`]).

#![expect(
    unsafe_code,
    reason = "memory that a program has already, and its copy in a fork: the code that adopts a range sees each call that changes it; a child that writes pages to their places has one thread"
)]

use crate::core::Inner;
use crate::core::registry;
use crate::core::space::{Space, Taken};
use crate::error::Error;
use crate::page::transition::{ADOPTED, RELEASED, Transition, UNCHANGED};
use crate::page::word::{Kind, Word};
use crate::page::words::BLOCK;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::map::{self, Pagemap, Scanned};

/// The addresses of a window are a multiple of this.
const WINDOW: usize = 1 << 30;
/// A window has no more addresses.
const WINDOW_MAX: usize = 1 << 43;

/// A mapping is long if it is at least this many times the budget: closing each of its pages would
/// take tables of a 64th of the budget.
const LONG: u64 = 8;
/// The longest range that is searched if the kernel lists pages only one by one (before Linux 6.7).
/// The search takes some tenths of a second.
const BLIND: usize = 256 << 30;

/// The pages that an adopted range may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// None: the range was never touched.
    Nothing,
    /// Some, that may be read and written.
    Pages,
    /// Some pages, which may only be read. The mode of protection refuses such a range: it could
    /// not tell the program's protection from its own.
    ReadOnlyPages,
}

/// The parts of a range that have pages. The kernel lists them step by step, as the caller walks
/// through the range.
struct Present<'a> {
    /// `None` if the range has no pages.
    pagemap: Option<&'a Pagemap>,
    scanned: Scanned,
    end: usize,
    /// The answer for a part that the kernel does not report.
    if_unknown: bool,
}

impl<'a> Present<'a> {
    fn new(pagemap: Option<&'a Pagemap>, range: Range<usize>) -> Self {
        Self { pagemap, scanned: Scanned::all(), end: range.end, if_unknown: true }
    }

    /// Pages of a range that the program has written, or that the kernel has swapped out.
    fn of_used(pagemap: &'a Pagemap, range: Range<usize>) -> Self {
        let scanned = Scanned::but_zeros();
        Self { pagemap: Some(pagemap), scanned, end: range.end, if_unknown: false }
    }

    /// The first address at or after `at` that may have a page or a guard. The addresses of
    /// successive calls only grow.
    fn from(&mut self, at: usize) -> usize {
        let Some(pagemap) = self.pagemap else { return self.end };
        let next = self.scanned.next(pagemap, at..self.end);
        next.unwrap_or(if self.if_unknown { at } else { self.end })
    }
}

/// All adopted pages of a range, which the owner of this value has made `Busy`.
#[derive(Default)]
pub(crate) struct AllTaken {
    /// The pages that have words of their own.
    pub(crate) pages: Vec<Taken>,
    pub(crate) emptied: Emptied,
}

/// `Empty` pages that share words, in order.
#[derive(Default)]
pub(crate) struct Emptied(Vec<(Arc<Space>, Range<u32>)>);

impl Emptied {
    fn push(&mut self, space: &Arc<Space>, pages: Range<u32>) {
        match self.0.last_mut() {
            Some((last, run)) if Arc::ptr_eq(last, space) && run.end == pages.start => {
                run.end = pages.end;
            }
            _ => self.0.push((space.clone(), pages)),
        }
    }

    pub(crate) fn end_busy(&self, by: &Transition, word: Word) {
        self.0.iter().for_each(|(space, pages)| space.end_all_busy(pages.clone(), by, word));
    }

    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().map(|(space, pages)| space.address(pages.start)..space.address(pages.end))
    }
}

impl AllTaken {
    fn put_back(&mut self) {
        self.pages.drain(..).for_each(Taken::put_back);
        self.emptied.end_busy(UNCHANGED, Word::EMPTY);
        self.emptied.0.clear();
    }
}

impl Space {
    /// Ends the `Busy` of pages that the caller has made so.
    fn end_all_busy(&self, pages: Range<u32>, by: &Transition, word: Word) {
        let mut at = pages.start;
        while at < pages.end {
            let found = self.words.find(at);
            self.end_busy(&found, by, word);
            at = found.end();
        }
    }

    /// Makes all pages of a range `Busy`. None of them is adopted.
    fn begin(&self, pages: Range<u32>) {
        let mut at = pages.start;
        while at < pages.end {
            let found = self.words.find(at);
            let is_new = found.word == Word::UNTOUCHED && found.take();
            assert!(is_new, "a page is adopted twice");
            match found.is_within(&pages) {
                true => at = found.end(),
                false => self.divide(&found, Word::UNTOUCHED),
            }
        }
    }
}

/// The windows that a range lies in, each with its pages of the range.
pub(crate) fn windows(range: Range<usize>) -> impl Iterator<Item = (&'static Space, Range<u32>)> {
    // A program may name addresses that no memory has.
    let range = range.start..range.end.min(registry::END);
    let mut at = range.start;
    std::iter::from_fn(move || {
        while at < range.end {
            let space = registry::find(at).filter(|space| space.is_window());
            let start = at;
            let end = space.map_or((at / WINDOW + 1) * WINDOW, |space| space.end());
            at = end.min(range.end);
            if let Some(space) = space {
                let behind = (at - space.base()).div_ceil(PAGE_BYTES) as u32;
                return Some((space, space.page_of(start)..behind));
            }
        }
        None
    })
}

/// Drops the kernel's zero page from memory that may only be read. A forked child does not inherit
/// that page in a mapping that was never written, although its word would say that the page is
/// present. The page stays if the kernel does not distinguish it from other pages (before Linux
/// 6.7).
fn drop_zeros(pagemap: &Pagemap, at: usize, there: &mut [bool], guards: &[bool]) {
    let (mut used, end) = (Scanned::but_zeros(), at + there.len() * PAGE_BYTES);
    let pages = (at..).step_by(PAGE_BYTES);
    for ((address, there), is_guard) in pages.zip(there).zip(guards) {
        if !*there || *is_guard || !used.next(pagemap, address..end).is_ok_and(|at| at > address) {
            continue;
        }
        // SAFETY: a mapped page of zeros, which reads as zeros again. No thread may write it before
        // it is adopted: a call that permits writing waits for the layout's lock.
        *there = unsafe { map::discard_range(address..address + PAGE_BYTES) }.is_err();
    }
}

impl Inner {
    /// Makes the windows that a range needs, unless they exist.
    pub(crate) fn windows_over(self: &Arc<Self>, range: Range<usize>) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            at = match registry::find(at) {
                Some(space) if space.is_window() => space.end(),
                Some(_) => return Err(Error::Foreign { address: at }),
                None => self.make_window(at..range.end)?.end(),
            };
        }
        Ok(())
    }

    /// The window of an address. Makes the window at its first address.
    pub(crate) fn window_at(self: &Arc<Self>, address: usize) -> Result<Arc<Space>, Error> {
        self.windows_over(address..address + 1)?;
        let id = registry::find(address).map(|space| space.id);
        let space = id.and_then(|id| self.regions().get(&id).cloned());
        space.ok_or(Error::Foreign { address })
    }

    /// Makes a window for the beginning of a range, up to the next window.
    fn make_window(self: &Arc<Self>, range: Range<usize>) -> Result<Arc<Space>, Error> {
        let base = range.start / WINDOW * WINDOW;
        let ends_at = |end: &usize| *end >= range.end || registry::find(*end).is_some();
        let mut ends = (base + WINDOW..base + WINDOW_MAX).step_by(WINDOW);
        let end = ends.find(ends_at).unwrap_or(base + WINDOW_MAX);
        let bytes = end - base;
        let max = self.cache.pages_max() as u64 * PAGE_BYTES as u64;
        let area = self.keys.area().ok_or(Error::Addresses { bytes, max })?;
        let space = Space::window(self.next_region(), self.clone(), (base, bytes), area);
        let space = Arc::new(space?);
        self.count_table(space.table_bytes() as i64);
        self.regions_mut().insert(space.id, space.clone());
        registry::add(&space);
        self.account();
        Ok(space)
    }

    /// True if a mapping is long. Where pages leave behind guards, a long mapping is left open.
    pub(crate) fn is_long(&self, range: &Range<usize>) -> bool {
        range.len() as u64 / LONG > self.budget.bytes()
    }

    /// # Safety
    /// As of [`crate::Pager::adopt`].
    pub(crate) unsafe fn adopt_part(
        &self,
        space: &Space,
        pages: Range<u32>,
        (contents, is_long): (Contents, bool),
    ) -> Result<(), Error> {
        let range = space.address(pages.start)..space.address(pages.end);
        let has_pages = contents != Contents::Nothing;
        if has_pages && range.len() > BLIND && !self.door.pagemap().can_scan(range.start) {
            let source = io::ErrorKind::Unsupported.into();
            return Err(Error::Map { bytes: range.len(), source });
        }
        // A thread that faults in the range after it is registered waits for us.
        space.begin(pages.clone());
        if let Err(source) = self.door.watch(range.clone()) {
            space.end_all_busy(pages, UNCHANGED, Word::UNTOUCHED);
            return Err(Error::Map { bytes: range.len(), source });
        }
        let mut present = Present::new(has_pages.then(|| self.door.pagemap()), range);
        let mut at = pages.start;
        while at < pages.end {
            let found = space.words.find(at);
            if !found.is_shared() {
                let end = (at / BLOCK + 1).saturating_mul(BLOCK).min(pages.end);
                // SAFETY: the caller's promise.
                at = unsafe { self.adopt_pages(space, at..end, contents) };
                continue;
            }
            let first = present.from(space.address(at));
            // Words without pages, in order.
            let mut end = at;
            while end < pages.end
                && let found = space.words.find(end)
                && found.is_shared()
                && space.address(found.end()) <= first
            {
                end = found.end();
            }
            if at < end && self.close_unused(space, at..end, is_long) {
                space.end_all_busy(at..end, ADOPTED, Word::EMPTY);
                at = end;
            } else {
                space.divide(&found, Word::busy(Kind::Untouched));
            }
        }
        Ok(())
    }

    /// Closes any number of pages that were never used, at little cost. `false` if each page has to
    /// be closed by itself. A long mapping may stay open.
    fn close_unused(&self, space: &Space, pages: Range<u32>, is_long: bool) -> bool {
        let range = space.address(pages.start)..space.address(pages.end);
        if self.door.leaves_open() { is_long } else { self.door.close_unused(range).is_ok() }
    }

    /// Adopts pages of a block that are `Busy` by their own words, and charges the present ones.
    /// Returns the next page.
    ///
    /// # Safety
    /// As of [`crate::Pager::adopt`].
    unsafe fn adopt_pages(&self, space: &Space, pages: Range<u32>, contents: Contents) -> u32 {
        let (mut there, mut guards) = ([false; BLOCK as usize], [false; BLOCK as usize]);
        let found = (&mut there[..pages.len()], &mut guards[..pages.len()]);
        let known = self.find_pages(space.address(pages.start), contents, found);
        let mut charged = 0;
        for ((page, is_there), is_guard) in pages.clone().zip(&there[..known]).zip(&guards) {
            if *is_guard {
                // The page is a guard of the program's own: an access must fail.
                space.put(page, ADOPTED, Word::UNTOUCHED);
                continue;
            }
            if *is_there && contents == Contents::Pages {
                // A write reclaims a page that the program gave up (MADV_FREE), and replaces the
                // kernel's zero page by a page of the program's.
                let byte = space.address(page) as *mut u8;
                // SAFETY: the byte is mapped and writable, as the caller promises. A byte that is
                // exchanged for itself stays, even if another thread writes it at the same time.
                // Compilers would drop an addition of zero.
                let byte = unsafe { AtomicU8::from_ptr(byte) };
                let value = byte.load(Relaxed);
                // Another thread has written the byte, which is as good.
                let _ = byte.compare_exchange(value, value, Relaxed, Relaxed);
            }
            charged += i64::from(*is_there);
            let word = if *is_there { Word::RESIDENT.with(Word::USED) } else { Word::EMPTY };
            space.put(page, ADOPTED, word);
        }
        self.budget.charge_anyway(charged);
        pages.start + known as u32
    }

    /// Finds the present pages of a range, and the program's guards. From now on touches of all
    /// other pages are faults for us. Returns the number of pages looked at.
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
            // If the kernel does not list guards, we know of none.
            let _ = pagemap.have_guards(at, guards);
            pagemap.have_pages(at, there)
        } else {
            there.fill(false);
            Ok(many)
        };
        if let (Ok(known), Contents::ReadOnlyPages) = (&known, contents) {
            drop_zeros(self.door.pagemap(), at, &mut there[..*known], guards);
        }
        // We assume that a page is present if the kernel gives no answer. If it is absent, a touch
        // of it ends the process.
        let known = known.unwrap_or_else(|_| {
            there.fill(true);
            many
        });
        there.iter_mut().zip(guards).for_each(|(there, is_guard)| *there |= *is_guard);
        self.door.close(at, &mut there[..known], has_pages);
        known
    }

    /// Finds the used pages in a window's mappings that were left open.
    pub(crate) fn find_used_in(&self, space: &Space) {
        let mut present = Present::of_used(self.door.pagemap(), space.range());
        let mut at = 0;
        while at < space.pages() {
            let found = space.words.find(at);
            if found.is_shared() && found.word == Word::EMPTY {
                let used = present.from(space.address(at));
                if used >= space.end() {
                    return;
                }
                let used = space.page_of(used);
                if used >= found.end() {
                    at = used;
                    continue;
                }
                // If the word has changed meanwhile, another thread uses the page.
                if found.take() {
                    space.divide(&found, Word::EMPTY);
                }
                at = at.max(used / BLOCK * BLOCK);
                continue;
            }
            at = found.end();
        }
    }

    /// Gives the first of these pages back to the program, and those behind it that the same step
    /// can take. Returns the next page.
    pub(crate) fn release_from(&self, space: &Space, pages: Range<u32>) -> u32 {
        let empty = self.release_empty(space, pages.clone());
        if empty > pages.start {
            return empty;
        }
        let (page, found) = (pages.start, space.words.find(pages.start));
        if !found.is_shared() {
            return self.release_page(space, page);
        }
        match found.word.kind() {
            Kind::Untouched => return found.end(),
            Kind::Busy => space.wait(page),
            // Pages outside of the range share the word.
            _ if found.take() => space.divide(&found, found.word),
            _ => {}
        }
        page
    }

    /// Releases the first `Empty` pages, and returns the number of the page after them.
    fn release_empty(&self, space: &Space, pages: Range<u32>) -> u32 {
        let mut end = pages.start;
        while end < pages.end
            && let found = space.words.find(end)
            && found.word == Word::EMPTY
            && found.is_within(&pages)
            && found.take()
        {
            end = found.end();
        }
        if end > pages.start {
            self.door.open_unused(space.address(pages.start)..space.address(end));
            space.end_all_busy(pages.start..end, RELEASED, Word::UNTOUCHED);
        }
        end
    }

    /// Gives a page with its own word back to the program, and returns the next page.
    fn release_page(&self, space: &Space, page: u32) -> u32 {
        if !space.bring_in(page, |word| Some(word.with(Word::USED))) {
            return page + 1;
        }
        let was = space.acquire(page);
        if was.kind() != Kind::Resident {
            space.put(page, UNCHANGED, was);
            return page;
        }
        self.door.let_go(space.address(page)..space.address(page + 1));
        self.budget.give_back(self.forget(space, page, was));
        space.put(page, RELEASED, Word::UNTOUCHED);
        page + 1
    }

    /// Adopts pages as `Empty`. With userfaultfd such pages are absent.
    pub(crate) fn give_empty(self: &Arc<Self>, range: Range<usize>) -> Result<(), Error> {
        self.windows_over(range.clone())?;
        for (space, pages) in windows(range) {
            let mut at = pages.start;
            while at < pages.end {
                let found = space.words.find(at);
                let is_new = found.word == Word::UNTOUCHED && found.take();
                if is_new && !found.is_within(&pages) {
                    space.divide(&found, Word::UNTOUCHED);
                    continue;
                }
                if is_new {
                    space.end_busy(&found, ADOPTED, Word::EMPTY);
                }
                at = found.end();
            }
        }
        Ok(())
    }

    /// Makes all adopted pages of a range `Busy`. Does not wait for a page while it has others. The
    /// thread that has the awaited page may wait for memory, and reclaim for a page that this call
    /// has taken.
    pub(crate) fn take_all(&self, range: &Range<usize>) -> AllTaken {
        let mut taken = AllTaken::default();
        while let Some((space, page)) = self.take_free(range, &mut taken) {
            taken.put_back();
            space.wait(page);
        }
        taken
    }

    /// Takes pages of a range, up to the first page that another thread has. Returns that page.
    fn take_free(&self, range: &Range<usize>, taken: &mut AllTaken) -> Option<(Arc<Space>, u32)> {
        for (space, pages) in windows(range.clone()) {
            let Some(space) = self.regions().get(&space.id).cloned() else { continue };
            let mut at = pages.start;
            while at < pages.end {
                let found = space.words.find(at);
                match found.word.kind() {
                    Kind::Untouched => {}
                    Kind::Busy => return Some((space, at)),
                    // The word has changed just now.
                    _ if !found.take() => continue,
                    _ if !found.is_shared() => {
                        let (space, was) = (space.clone(), found.word);
                        taken.pages.push(Taken { space, page: at, was });
                    }
                    _ if found.is_within(&pages) => {
                        taken.emptied.push(&space, found.first()..found.end());
                    }
                    _ => {
                        space.divide(&found, found.word);
                        continue;
                    }
                }
                at = found.end();
            }
        }
        None
    }
}
