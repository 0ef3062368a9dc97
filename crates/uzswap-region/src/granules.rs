//! Pages that are out may not be accessed: where userfaultfd is denied.
//!
//! ```text
//! out  words → Busy, access forbidden → copied → stored, all or none → memory given back
//! in   charged, words → Busy → loaded → written by /proc/self/mem → access allowed
//! ```
//! A forbidden access is a SIGSEGV, and served as any fault. Nothing is staged: a page is in its
//! place or in the cache. A page that is there by its word may be absent all the same, which reads
//! as zeros, but is never forbidden.
//!
//! Where access changes the kernel splits a mapping in two, and a process may have some 65 000. So
//! pages go out and come in by *granules*: 16 neighbours, or more where much memory is adopted.
//! That is for the number of mappings; each page has a word, and any part of a granule may be in.
//!
//! A thread that makes a second page `Busy` while it has one, and waits for it, goes upwards.

use crate::error::Error;
use crate::fault::Refused;
use crate::lane::{Count, Lane};
use crate::pager::Inner;
use crate::space::{Space, Taken, neighbours};
use crate::word::{Kind, Word};
use std::fs;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::Pagemap;
use uzswap_sys::proc_mem::{OwnMemory, set_access};

/// Pages of a granule.
const LEAST: u32 = 16;
const MOST: u32 = 512;

/// Mappings that a process may have where the kernel does not say.
const MAPPINGS: u64 = 65_530;

/// Pages that are copied at once.
const COPIED: usize = 64;

/// See the module.
pub(crate) struct Granules {
    memory: OwnMemory,
    pagemap: Pagemap,
    /// Pages of each.
    pages: AtomicU32,
    adopted: AtomicU64,
    mappings: u64,
    /// Copies of pages on their way out.
    copies: Mutex<Box<[Page]>>,
}

/// The outcome of an attempt to evict pages.
#[derive(Default, Clone, Copy)]
pub(crate) struct PutOut {
    /// Pages that might have gone.
    pub(crate) found: usize,
    /// Pages that are out.
    pub(crate) out: usize,
}

impl Granules {
    pub(crate) fn new() -> io::Result<Self> {
        let mappings = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let mappings = mappings.and_then(|number| number.trim().parse().ok()).unwrap_or(MAPPINGS);
        Ok(Self {
            memory: OwnMemory::open()?,
            pagemap: Pagemap::open()?,
            pages: AtomicU32::new(LEAST),
            adopted: AtomicU64::new(0),
            mappings,
            copies: Mutex::new(vec![[0; PAGE_BYTES]; COPIED].into()),
        })
    }

    /// In a fork, which has its parent's memory by these descriptors.
    pub(crate) fn renew(&self) -> io::Result<()> {
        self.memory.renew()?;
        self.pagemap.renew()
    }

    /// Those that must stay open.
    pub(crate) fn descriptors(&self) -> Vec<i32> {
        vec![self.memory.descriptor(), self.pagemap.descriptor()]
    }

    pub(crate) fn pagemap(&self) -> &Pagemap {
        &self.pagemap
    }

    /// Counts pages that are adopted: if every other granule is out, half of the mappings that the
    /// process may have are the program's own.
    fn count(&self, pages: u64) {
        let adopted = self.adopted.fetch_add(pages, Relaxed) + pages;
        let fitting = adopted.div_ceil(self.mappings.max(2) / 2).next_power_of_two();
        let fitting = fitting.clamp(LEAST.into(), MOST.into()) as u32;
        self.pages.fetch_max(fitting, Relaxed);
    }

    /// The granule that a page is in.
    fn around(&self, space: &Space, page: u32) -> Range<u32> {
        let pages = self.pages.load(Relaxed);
        let start = page / pages * pages;
        start..(start + pages).min(space.pages())
    }
}

fn range_of(space: &Space, pages: &Range<u32>) -> Range<usize> {
    space.address(pages.start)..space.address(pages.end)
}

fn forbid(space: &Space, pages: &Range<u32>) -> io::Result<()> {
    // SAFETY: adopted memory; a thread that accesses it waits for the words, which we have made
    // `Busy`.
    unsafe { set_access(range_of(space, pages), false) }
}

/// The treatment of pages in a row while it is the same for all.
fn runs(pages: impl IntoIterator<Item = u32>) -> impl Iterator<Item = Range<u32>> {
    let mut pages = pages.into_iter().peekable();
    std::iter::from_fn(move || {
        let start = pages.next()?;
        let mut end = start + 1;
        while pages.next_if_eq(&end).is_some() {
            end += 1;
        }
        Some(start..end)
    })
}

/// Pages of a granule.
#[derive(Default)]
struct Set([u64; MOST as usize / 64]);

impl Set {
    fn add(&mut self, at: u32) {
        self.0[at as usize / 64] |= 1 << (at % 64);
    }

    fn has(&self, at: u32) -> bool {
        self.0[at as usize / 64] & 1 << (at % 64) != 0
    }
}

impl Inner {
    /// Brings a page in, and its granule.
    pub(crate) fn open(&self, granules: &Granules, space: &Space, page: u32) {
        loop {
            match space.load(page).kind() {
                Kind::Busy => space.wait(page),
                // Somebody else has brought it in, or it is the program's own now.
                Kind::Untouched | Kind::Resident => return,
                _ => {
                    let around = granules.around(space, page);
                    let waited = self.charge_granule(space, page, around.len() as i64);
                    let mut lane = self.lanes.here();
                    let brought = self.fill_granule(granules, &mut lane, space, &around);
                    lane.count(Count::Faults, 1);
                    lane.count(Count::FaultsWaited, waited.into());
                    lane.count(Count::Around, (brought as u64).saturating_sub(1));
                    drop(lane);
                    self.budget.give_back((around.len() - brought) as i64);
                }
            }
        }
    }

    /// Charges pages before any is `Busy`, so that a thread that waits for room holds nothing up.
    /// Returns true if it waited.
    fn charge_granule(&self, space: &Space, page: u32, pages: i64) -> bool {
        let mut has_waited = false;
        while !self.budget.try_charge(pages) {
            has_waited = true;
            if self.reclaim_here() {
                continue;
            }
            if !self.budget.charge_patiently() {
                self.die_full(space, page);
            }
            self.budget.charge_anyway(pages - 1);
            break;
        }
        has_waited
    }

    /// Lets the program access pages that are whole. It ends where there can be no more mappings:
    /// they would be lost.
    fn allow(&self, space: &Space, pages: &Range<u32>) {
        // SAFETY: adopted memory, which the program may access, and whose pages are there.
        if let Err(error) = unsafe { set_access(range_of(space, pages), true) } {
            self.die(space, pages.start, &Refused("let anybody access what was brought", &error));
        }
    }

    /// Brings in the evicted pages of a granule, and returns their number.
    fn fill_granule(
        &self,
        granules: &Granules,
        lane: &mut Lane,
        space: &Space,
        around: &Range<u32>,
    ) -> usize {
        let (mut taken, mut stored) = (Set::default(), Set::default());
        for page in around.clone() {
            loop {
                let word = space.load(page);
                match word.kind() {
                    Kind::Untouched | Kind::Resident => break,
                    Kind::Busy => space.wait(page),
                    _ if !space.take(page, word) => {}
                    kind => {
                        taken.add(page - around.start);
                        if kind == Kind::Stored {
                            stored.add(page - around.start);
                        }
                        break;
                    }
                }
            }
        }
        let is_taken = |page: &u32| taken.has(page - around.start);
        let is_stored = |page: &u32| stored.has(page - around.start);
        for run in runs(around.clone().filter(is_stored)) {
            self.write_run(granules, lane, space, run);
        }
        let mut brought = 0;
        for run in runs(around.clone().filter(is_taken)) {
            self.allow(space, &run);
            brought += run.len();
            for page in run {
                let copy = if is_stored(&page) { Word::KEPT } else { 0 };
                space.put(page, Word::RESIDENT.with(Word::USED | copy));
            }
        }
        brought
    }

    /// Writes stored pages to their places, which may not be accessed yet.
    fn write_run(&self, granules: &Granules, lane: &mut Lane, space: &Space, run: Range<u32>) {
        // A buffer for each lane, for good.
        let window = lane.window(COPIED, |pages| {
            self.budget.charge_anyway(pages);
            true
        });
        let mut at = run.start;
        while at < run.end {
            let pages = match window {
                // SAFETY: mapped memory of the lane's, which is ours, for that many pages; nobody
                // else refers to it.
                Some((window, most)) => unsafe {
                    let count = most.min((run.end - at) as usize);
                    std::slice::from_raw_parts_mut(window as *mut Page, count)
                },
                None => std::slice::from_mut(&mut *lane.page),
            };
            self.load_many(space, at, pages);
            // SAFETY: adopted memory, private and anonymous; its content is in the cache.
            let written = unsafe { granules.memory.write(space.address(at), pages.as_flattened()) };
            if let Err(error) = written {
                self.die(space, at, &Refused("write", &error));
            }
            at += pages.len() as u32;
        }
    }

    /// Takes granules out that were not used since the hand last came by.
    pub(crate) fn take_granules_out(&self, granules: &Granules) -> PutOut {
        let drops_copies = self.drops_copies();
        let victims = self.victims_by(|space, page, found| {
            let around = granules.around(space, page);
            self.pass_granule(space, &around, drops_copies, found);
            around.end
        });
        self.put_out(granules, victims)
    }

    /// The hand passes a granule; all of it that is in is a victim, or nothing.
    fn pass_granule(
        &self,
        space: &Arc<Space>,
        around: &Range<u32>,
        drops_copies: bool,
        found: &mut Vec<Taken>,
    ) {
        let words = || around.clone().map(|page| (page, space.load(page)));
        let mut is_used = false;
        for (_, word) in words() {
            match word.kind() {
                Kind::Busy => return,
                Kind::Resident if word.pins() > 0 => return,
                Kind::Resident => is_used |= word.has(Word::USED),
                _ => {}
            }
        }
        if !is_used {
            let before = found.len();
            for (page, was) in words().filter(|(_, word)| word.kind() == Kind::Resident) {
                if was.pins() > 0 || !space.take(page, was) {
                    // It is in use after all.
                    return found.drain(before..).for_each(Taken::put_back);
                }
                found.push(Taken { space: space.clone(), page, was });
            }
            return;
        }
        for (page, was) in words().filter(|(_, word)| word.has(Word::USED)) {
            let is_resident = was.kind() == Kind::Resident;
            if is_resident && drops_copies && was.has(Word::KEPT) && space.take(page, was) {
                self.cache.invalidate(space.key(page));
                space.put(page, was.without(Word::KEPT | Word::USED));
            } else if is_resident {
                // If it changed meanwhile, it was used.
                space.change(page, was, was.without(Word::USED));
            }
        }
    }

    /// Takes pages out that are `Busy` by us: neighbours together, all of them or none.
    fn put_out(&self, granules: &Granules, victims: Vec<Taken>) -> PutOut {
        let mut taken = PutOut { found: victims.len(), out: 0 };
        let mut left = &victims[..];
        while !left.is_empty() {
            let run = neighbours(left);
            if self.put_run_out(granules, &left[..run]) {
                taken.out += run;
            }
            left = &left[run..];
        }
        taken
    }

    fn put_run_out(&self, granules: &Granules, run: &[Taken]) -> bool {
        let (space, first) = (&run[0].space, run[0].page);
        let pages = first..first + run.len() as u32;
        // An error: there can be no more mappings, or the program has taken the memory away.
        let is_out = forbid(space, &pages).is_ok() && self.store_run(granules, space, &pages);
        if !is_out {
            for page in pages.clone() {
                self.cache.invalidate(space.key(page));
            }
            self.allow(space, &pages);
        }
        for page in pages.clone() {
            space.put(page, if is_out { Word::STORED } else { Word::RESIDENT.with(Word::USED) });
        }
        if is_out {
            self.budget.give_back(run.len() as i64);
        }
        is_out
    }

    /// Stores pages that nobody can access, and gives their memory back; `false` if one of them is
    /// not taken.
    fn store_run(&self, granules: &Granules, space: &Space, pages: &Range<u32>) -> bool {
        let mut copies = granules.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let mut at = pages.start;
        while at < pages.end {
            let count = ((pages.end - at) as usize).min(COPIED);
            let part = &mut copies[..count];
            if granules.memory.read(space.address(at), part.as_flattened_mut()).is_err() {
                return false;
            }
            if !(at..).zip(part).all(|(page, copy)| self.keep(space, page, copy)) {
                return false;
            }
            at += count as u32;
        }
        space.discard(pages.clone());
        true
    }

    /// Takes the pages of a range out now. Error: there is no room for all.
    pub(crate) fn page_granules_out(
        &self,
        granules: &Granules,
        space: &Arc<Space>,
        pages: Range<u32>,
    ) -> Result<(), Error> {
        let mut at = pages.start;
        while at < pages.end {
            let end = granules.around(space, at).end.min(pages.end);
            let victims = self.take_resident(space, &mut (at..end));
            let taken = self.put_out(granules, victims);
            if taken.out < taken.found {
                return Err(Error::Full { reason: "the pool and the backing are full" });
            }
            self.tend();
            at = end;
        }
        Ok(())
    }

    /// Of pages that are adopted and `Busy` by us, which are there; those that are not may not be
    /// accessed from now on.
    pub(crate) fn close(
        &self,
        granules: &Granules,
        space: &Space,
        pages: Range<u32>,
        there: &mut [bool],
    ) {
        granules.count(pages.len() as u64);
        // An absent page beside one that is there counts as there.
        for page in pages.clone().step_by(LEAST as usize) {
            let near = page / LEAST * LEAST..(page / LEAST + 1) * LEAST;
            let near = near.start.max(pages.start)..near.end.min(pages.end);
            let near = (near.start - pages.start) as usize..(near.end - pages.start) as usize;
            let any = there[near.clone()].contains(&true);
            there[near].fill(any);
        }
        let absent = pages.clone().filter(|page| !there[(page - pages.start) as usize]);
        let absent: Vec<_> = runs(absent).collect();
        for run in absent {
            if forbid(space, &run).is_err() {
                there[(run.start - pages.start) as usize..(run.end - pages.start) as usize]
                    .fill(true);
            }
        }
    }

    /// Ends the `Busy` of pages in order that the program has dropped: whole granules may not be
    /// accessed until they come in; in others the accessible pages stay accessible.
    pub(crate) fn close_dropped(&self, taken: &[Taken]) {
        let mut left = taken;
        while let Some(Taken { space, page: first, .. }) = left.first() {
            let count = neighbours(left);
            let whole = whole(*first..first + count as u32);
            let is_closed = !whole.is_empty() && forbid(space, &whole).is_ok();
            for Taken { space, page, was } in &left[..count] {
                let is_in = self.forget(space, *page, *was) > 0;
                let stays = is_in && !(is_closed && whole.contains(page));
                if is_in && !stays {
                    self.budget.give_back(1);
                }
                let is = if stays { Word::RESIDENT.with(Word::USED) } else { Word::EMPTY };
                space.put(*page, is);
            }
            left = &left[count..];
        }
    }
}

/// The pages of a row that make up whole granules, of the smallest kind.
fn whole(row: Range<u32>) -> Range<u32> {
    let (start, end) = (row.start.next_multiple_of(LEAST), row.end / LEAST * LEAST);
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_a_row_are_found_and_whole_granules_of_them() {
        let found: Vec<_> = runs([1, 2, 3, 7, 9, 10]).collect();
        assert_eq!(found, [1..4, 7..8, 9..11]);
        assert_eq!(runs([]).next(), None);
        assert_eq!(whole(3..70), 16..64);
        assert!(whole(17..31).is_empty() && whole(3..18).is_empty());
        assert_eq!(whole(16..32), 16..32);
        let mut set = Set::default();
        set.add(511);
        assert!(set.has(511) && !set.has(510) && !set.has(447));
    }
}
