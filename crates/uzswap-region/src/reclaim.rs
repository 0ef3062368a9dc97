//! Taking pages out, in threads that do not fault, ahead of need.
//!
//! ```text
//! the hand goes round the resident pages: its tenure is over? → a victim : it stays
//! 64 victims → moved to a batch of the staging area → … touched meanwhile? → moved back
//! the oldest batch → stored in the cache → the memory of its frames given back
//! ```
//! A staged page that is touched again comes back without a codec and counts as used. A page that
//! still equals its copy in the cache is not compressed again: the page was guarded, or the cache
//! compares them.
//!
//! Between the move and the store no page can be lost: the page is in its frame, and its word names
//! the frame. `EBUSY` from a move means that the kernel holds another reference to the page, such
//! as for a device transfer. The page stays. If a page is absent, other code has taken it away, and
//! the process ends.

use crate::core::Inner;
use crate::core::space::{Space, Taken};
use crate::error::Error;
use crate::page::transition::{DROPPED, PASSED, REFUSED, STAGED, STORED, TAKEN_BACK};
use crate::page::word::{Kind, Word};
use crate::staging::BATCH;
use crate::steady;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use uzswap_engine::{PAGE_BYTES, Page, Reject, Store};
use uzswap_policy::order::{LEVELS, Order, Verdict};
use uzswap_sys::cpu::CpuSet;
use uzswap_sys::fault_signals::Blocked;
use uzswap_trace::Log;

/// Consecutive batches without a page that could be moved, after which reclaim reports that nothing
/// can leave.
const IDLE_MAX: usize = 64;

/// Consecutive batches refused by the cache, after which the cache counts as full.
const REFUSALS: usize = 4;

/// Batches between two maintenances of the cache, in continuous reclaim.
const MAINTAIN_EVERY: u32 = 64;
/// Batches between two decisions on the pool's part of the memory, in continuous reclaim. So many
/// batches take about as many faults as a decision ([`uzswap_policy::pool_share`]).
const TEND_POOL_EVERY: u32 = 8;
/// The part of the budget that the pool may leave unused before it is compacted.
const SPARE_PART: u64 = 128;

/// Units that are made together when memory is short: some 12 ms.
const UNITS_AT_ONCE: usize = 16;

/// Rounds of the hand that find every page that may leave.
const ROUNDS: usize = 6;
/// Rounds after which a few pages are enough.
const ROUNDS_FOR_ALL: usize = 2;

impl Inner {
    /// The work of a reclaim thread.
    pub(crate) fn run_reclaim(&self) {
        let _blocked = Blocked::all();
        uzswap_engine::compress::prepare_thread();
        while !self.is_stopping() {
            self.reclaim();
            self.budget.bell().wait();
        }
        // A ring wakes one thread. If this thread ends, the other threads must end, too.
        self.budget.ring();
    }

    /// Takes pages out until there is room.
    fn reclaim(&self) {
        self.maintain();
        // The number of consecutive batches from which no page was stored.
        let mut refused = 0;
        let mut idle = 0;
        for turn in 1u32.. {
            if self.is_stopping() {
                return;
            }
            if turn.is_multiple_of(MAINTAIN_EVERY) {
                self.maintain();
            }
            if turn.is_multiple_of(TEND_POOL_EVERY) {
                self.tend_pool();
            }
            let _steady = self.steady();
            let _own_time = self.log.as_ref().map(Log::own_time);
            self.tend();
            if self.budget.room() >= 2 * self.budget.margin().max(1) {
                if turn > 1 {
                    self.budget.set_moving();
                }
                // The cache may have become smaller. Waiting threads must learn of that.
                return self.budget.changed();
            }
            let is_idle = self.take_out(&mut idle, &mut refused);
            if (is_idle || refused >= REFUSALS) && self.shrink_cache() {
                refused = 0;
                continue;
            }
            if is_idle || refused >= REFUSALS {
                // All pages are pinned, or the pool is full: waiting threads learn that there will
                // be no room.
                self.budget.lend_ahead();
                if self.budget.room() <= 0 {
                    self.budget.give_back(self.lanes.take_charged());
                }
                if self.budget.room() > 0 {
                    return self.budget.changed();
                }
                if is_idle {
                    self.budget.set_stuck();
                }
                return self.budget.set_exhausted();
            }
        }
    }

    /// Takes victims out; true if there is nothing to do. Counts consecutive rounds in which no
    /// page could be taken, and in which none was stored.
    fn take_out(&self, idle: &mut usize, refused: &mut usize) -> bool {
        self.door.tend();
        self.drop_copies();
        let batch = self.hole();
        let found = self.victims();
        let is_dry = found.is_empty();
        // A page that cannot be moved (the program may not write to it) is no victim.
        let taken = self.stage(found, batch);
        *idle = if taken == 0 { *idle + 1 } else { 0 };
        let is_dry = *idle > IDLE_MAX || is_dry;
        let depth = if is_dry || *refused > 0 { 0 } else { self.depth() };
        let mut is_idle = is_dry;
        while self.staging.queued() > depth {
            is_idle = false;
            *refused = if self.store_oldest() == 0 { *refused + 1 } else { 0 };
        }
        is_idle
    }

    /// Reclaim by a thread that finds no room, which on a busy machine gets the CPU before the
    /// reclaim threads do. The thread has made a page `Busy` that is neither in the region nor
    /// staged. No thread that it needs waits for that page. `false` if the thread gained no room
    /// and should wait.
    pub(crate) fn reclaim_here(&self) -> bool {
        if self.budget.is_suspended() {
            return false;
        }
        let Some(_steady) = steady::try_steady() else { return false };
        self.tend();
        if let Some(batch) = self.staging.take_hole() {
            let found = self.victims();
            self.stage(found, batch);
        }
        let depth = self.depth();
        let mut stored = 0;
        while stored < BATCH / 4 && (self.staging.queued() > depth || stored == 0) {
            if self.staging.queued() == 0 {
                break;
            }
            stored += self.store_oldest();
        }
        stored > 0
    }

    /// Does the cache's work that needs a thread, but never while the process forks: the child gets
    /// a copy of the cache's locks.
    fn maintain(&self) {
        let _steady = self.steady();
        // After an error a new CPU shares other CPUs' resources, and the next call tries again.
        let _ = self.cache.follow_cpus(&CpuSet::of_caller());
        self.tend_pool();
        // `tend` meets the same errors again.
        let _ = self.cache.maintain();
        self.budget.give_back(self.lanes.take_unused());
        // Memory that the pool took and does not need is better used for pages.
        let spare = self.cache.statistic("pool_reserve_size").unwrap_or(0);
        if spare > self.budget.bytes() / SPARE_PART {
            self.cache.give_sections_back();
            self.account();
        }
    }

    /// Makes the cache write back and give memory back, if there is no room and nothing is left to
    /// take out: after the budget became smaller. True if that made room.
    fn shrink_cache(&self) -> bool {
        let before = self.budget.room();
        if before > 0 {
            return false;
        }
        // A backing that has failed is tried again, now that there is no other place for pages.
        self.cache.resume_writeback();
        let missing = (2 * self.budget.margin().max(1) - before) as usize;
        self.cache.shrink(missing * PAGE_BYTES);
        if self.cache.pool_bytes() as u64 > self.budget.bytes() / 2 {
            // Recompression makes the oldest pages smaller, and slower to bring in.
            self.cache.recompress(UNITS_AT_ONCE);
        }
        self.cache.give_sections_back();
        self.account();
        self.budget.room() > before
    }

    /// Batches that wait in the staging area before they are stored: a 32nd of the memory.
    fn depth(&self) -> usize {
        (self.budget.limit().max(0) as usize / 32 / BATCH).min(self.staging_batches() / 2)
    }

    /// Lets the cache prepare memory for stores, and counts its size.
    pub(crate) fn tend(&self) {
        // Without memory for a new reserve, stores use up the present one, and are then rejected.
        let _ = self.cache.prepare();
        self.account();
    }

    /// Up to 64 pages whose tenure is over.
    fn victims(&self) -> Vec<Taken> {
        let capacity = self.capacity();
        let unchanged = self.cache.statistic("stores_unchanged").unwrap_or(0);
        let mut hand = self.hand.lock().unwrap_or_else(PoisonError::into_inner);
        let hand = &mut *hand;
        hand.order.tend(self.returns.seen(unchanged), capacity);
        let keeps = hand.order.keeps_copies(capacity);
        let regions: Vec<_> = self.regions().values().cloned().collect();
        let mut found = Vec::with_capacity(BATCH);
        let start = regions.iter().position(|space| space.id >= hand.region).unwrap_or(0);
        for turn in 0..ROUNDS * regions.len() + 1 {
            let (round, at) = (turn / regions.len().max(1), (start + turn) % regions.len().max(1));
            let Some(space) = regions.get(at) else { break };
            if round >= ROUNDS_FOR_ALL && !found.is_empty() {
                break;
            }
            let mut page = if turn == 0 && space.id == hand.region { hand.page } else { 0 };
            while let Some(at) = space.next_resident(page) {
                page = at + 1;
                let pass = (at, round as u32, keeps);
                let Some(was) = self.pass(&mut hand.order, space, pass) else { continue };
                found.push(Taken { space: space.clone(), page: at, was });
                if found.len() == BATCH {
                    (hand.region, hand.page) = (space.id, page);
                    return found;
                }
            }
            if at + 1 == regions.len() {
                hand.order.end_pass();
            }
        }
        found
    }

    /// The hand passes a page. Returns the former word of a victim.
    fn pass(
        &self,
        order: &mut Order,
        space: &Space,
        (page, round, keeps): (u32, u32, [bool; LEVELS]),
    ) -> Option<Word> {
        let word = space.load(page);
        if word.kind() != Kind::Resident || word.pins() > 0 {
            return None;
        }
        let verdict = match word.has(Word::USED) {
            true => order.judge(word.level(), word.passes(), round),
            false => Verdict::Leaves,
        };
        match verdict {
            Verdict::Stays { passes } => {
                let stays = word.with_passes(passes);
                if self.drops_copy(word, keeps) {
                    if let Some(left) = self.drop_copy(space, page, word) {
                        space.put(page, PASSED, left.with_passes(passes));
                    }
                } else if stays != word {
                    // If the word has changed, the page was used.
                    space.change(page, PASSED, word, stays);
                }
                None
            }
            Verdict::Leaves if !self.door.may_leave(space, page) => None,
            // Dropping a copy that is out of date costs nothing.
            Verdict::Leaves if word.has(Word::KEPT | Word::STALE) => {
                self.drop_copy(space, page, word)
            }
            Verdict::Leaves => space.take(page, word).then_some(word),
        }
    }

    /// Drops the copies of pages that have just come from the cache, if the copies are not worth
    /// their room.
    fn drop_copies(&self) {
        let hand = self.hand.lock().unwrap_or_else(PoisonError::into_inner);
        let keeps = hand.order.keeps_copies(self.capacity());
        drop(hand);
        let mut near: Option<Arc<Space>> = None;
        for (region, page) in self.lanes.take_loaded() {
            if near.as_ref().is_none_or(|space| space.id != region) {
                near = self.regions().get(&region).cloned();
            }
            let Some(space) = &near else { continue };
            let word = space.load(page);
            if self.drops_copy(word, keeps)
                && let Some(left) = self.drop_copy(space, page, word)
            {
                space.put(page, PASSED, left);
            }
        }
    }

    /// True if a page's copy is not worth its room. The copy is out of date, or the cache has more
    /// than half of the memory, or another page in that room saves more. The copy of a guarded page
    /// is most likely on the backing, and dropping it wins no memory.
    fn drops_copy(&self, word: Word, keeps: [bool; LEVELS]) -> bool {
        let may = word.kind() == Kind::Resident && word.has(Word::KEPT) && !word.has(Word::GUARDED);
        let is_short = || self.cache.memory_bytes() as u64 > self.budget.bytes() / 2;
        may && (word.has(Word::STALE) || is_short() || !keeps[usize::from(word.level())])
    }

    /// Makes a page `Busy` and drops the cache's copy of it; returns its word without the copy.
    fn drop_copy(&self, space: &Space, page: u32, word: Word) -> Option<Word> {
        space.take(page, word).then(|| {
            self.cache.invalidate(space.key(page));
            word.without(Word::KEPT | Word::STALE)
        })
    }

    /// The maximum number of pages in memory at the same time.
    pub(crate) fn capacity(&self) -> u64 {
        self.budget.limit().max(0) as u64
    }

    /// Returns a batch for victims. This may wait for other threads' pages, so we have no page
    /// `Busy` yet: those threads may wait for ours.
    fn hole(&self) -> u32 {
        loop {
            match self.staging.take_hole() {
                Some(batch) => return batch,
                None if self.staging.queued() > 0 => {
                    self.store_oldest();
                }
                // Other threads use all batches, and will return them.
                None => std::thread::yield_now(),
            }
        }
    }

    /// Moves victims to a batch of the staging area and queues the batch; returns the number of
    /// moved pages.
    fn stage(&self, victims: Vec<Taken>, batch: u32) -> usize {
        let mut taken = 0;
        let mut left = &victims[..];
        while !left.is_empty() {
            let frame = batch as usize * BATCH + (victims.len() - left.len());
            let (moved, looked_at) = self.move_out(left, frame);
            taken += moved;
            left = &left[looked_at..];
        }
        if taken > 0 {
            self.staging.queue(batch);
        } else {
            self.staging.give_hole(batch);
        }
        taken
    }

    /// Moves the first of these pages to frames. Returns the number of moved pages, and of those
    /// that need no further try.
    fn move_out(&self, victims: &[Taken], frame: usize) -> (usize, usize) {
        let (moved, is_whole) = self.door.move_out(self, victims, frame);
        for (at, victim) in victims[..moved].iter().enumerate() {
            self.staging.enter(frame + at, (victim.space.id, victim.page));
            victim.space.put(victim.page, STAGED, Word::staged(frame + at, victim.was));
        }
        let Some(stays) = victims.get(moved).filter(|_| !is_whole) else { return (moved, moved) };
        stays.space.put(stays.page, REFUSED, stays.was.with(Word::USED));
        (moved, moved + 1)
    }

    /// Stores the pages of the oldest batch in the queue, and returns the number of pages that have
    /// left.
    pub(crate) fn store_oldest(&self) -> usize {
        let Some(number) = self.staging.take_oldest() else { return 0 };
        let batch = self.staging.batch(number);
        let (mut stored, mut compared) = (0, 0);
        let mut near: Option<Arc<Space>> = None;
        for at in 0..BATCH {
            // A thread that takes a page back keeps the page's word `Busy` until the page is gone
            // from the frame.
            while let Some((region, page)) = batch.owner(at) {
                if near.as_ref().is_none_or(|space| space.id != region) {
                    near = self.regions().get(&region).cloned();
                }
                let Some(space) = &near else { break };
                let frame = number as usize * BATCH + at;
                let word = space.load(page);
                if word.kind() == Kind::Busy {
                    std::thread::yield_now();
                } else if word.kind() != Kind::Staged || word.frame() != frame {
                    break;
                } else if space.take(page, word) {
                    stored += usize::from(self.store(space, page, frame, word));
                    let is_compared = word.copy_bits() == Word::KEPT;
                    compared += u64::from(is_compared);
                    break;
                }
            }
        }
        self.returns.count_departed(stored as u64, compared);
        let pages = self.staging.give_back(number);
        self.tend();
        self.budget.give_back(pages);
        stored
    }

    /// Stores a page that is in a frame, and whose word is `Busy`. A guarded page needs no store:
    /// it is unchanged since it was loaded. If the cache refuses the page, moves it back.
    fn store(&self, space: &Space, page: u32, frame: usize, was: Word) -> bool {
        if was.has(Word::GUARDED) || self.keep(space, page, self.staging.page(frame)) {
            self.note_left(space, page, was);
            space.put(page, STORED, self.returns.departs(was));
            return true;
        }
        self.take_back(space, page, frame);
        space.put(page, TAKEN_BACK, Word::RESIDENT.with(Word::USED));
        false
    }

    /// Gives the cache a page, in the pool or past it; `false` if there is no room in either.
    pub(crate) fn keep(&self, space: &Space, page: u32, content: &Page) -> bool {
        let Some(key) = self.keys.give(space, page) else { return false };
        let mut store = self.cache.store(key, content);
        if store == Store::Rejected(Reject::AllocFail) {
            self.tend();
            store = self.cache.store(key, content);
        }
        if store == Store::Rejected(Reject::ReclaimFail) && self.give_pool_all() {
            self.account();
            store = self.cache.store(key, content);
        }
        store == Store::Stored || self.cache.store_through(key, content) == Store::Stored
    }

    /// Takes the resident pages of a range out now, and stores them. Fails if there is no room for
    /// all.
    pub(crate) fn page_out(&self, space: &Arc<Space>, pages: Range<u32>) -> Result<(), Error> {
        let _blocked = Blocked::all();
        uzswap_engine::compress::prepare_thread();
        let _steady = self.steady();
        self.tend();
        let mut left = pages.into_iter();
        while !left.is_empty() {
            let batch = self.hole();
            let victims = self.take_resident(space, &mut left);
            self.stage(victims, batch);
            self.drain()?;
        }
        self.drain()
    }

    /// Makes the next pages `Busy` that are resident and not pinned, 64 at most.
    pub(crate) fn take_resident(&self, space: &Arc<Space>, pages: &mut Range<u32>) -> Vec<Taken> {
        let mut taken = Vec::with_capacity(BATCH);
        while taken.len() < BATCH
            && let Some(page) = space.next_resident(pages.start).filter(|page| *page < pages.end)
        {
            pages.start = page + 1;
            let was = space.load(page);
            if was.kind() == Kind::Resident && was.pins() == 0 && space.take(page, was) {
                taken.push(Taken { space: space.clone(), page, was });
            }
        }
        if taken.len() < BATCH {
            pages.start = pages.end;
        }
        taken
    }

    /// Stores everything that is staged.
    fn drain(&self) -> Result<(), Error> {
        while self.staging.queued() > 0 {
            let failed = self.staging.queued();
            if self.store_oldest() == 0 && self.staging.queued() >= failed {
                let reason = "the pool and the backing are full";
                return Err(Error::Full { reason });
            }
        }
        Ok(())
    }

    /// Drops the pages of a range: they read as zeros from now on.
    pub(crate) fn drop_pages(&self, space: &Space, pages: Range<u32>) {
        let _blocked = Blocked::all();
        let _steady = self.steady();
        let mut at = pages.start;
        while let Some(first) = space.next_touched(at).filter(|page| *page < pages.end) {
            // Neighbours together: one call for up to 64 pages. Waits only for the first page,
            // since threads that have the others may wait for this one.
            let mut words = vec![space.acquire(first)];
            let free = (first + 1..pages.end).take(BATCH - 1).map_while(|page| {
                let word = space.load(page);
                let may = word.kind() != Kind::Busy && space.has_own_word(page);
                (may && space.take(page, word)).then_some(word)
            });
            words.extend(free);
            let end = first + words.len() as u32;
            if words.iter().any(|word| word.kind() == Kind::Resident) {
                space.discard(first..end);
            }
            let mut given = 0;
            for (page, was) in (first..end).zip(words) {
                if was.kind() != Kind::Untouched && was.kind() != Kind::Empty {
                    self.note_gone(space, page);
                    self.cache.invalidate(space.key(page));
                }
                let is_resident = was.kind() == Kind::Resident;
                if is_resident && was.pins() > 0 {
                    let at = space.address(page);
                    // A pinned page stays; an error would mean that the page is present.
                    let _ = self.uffd().zero(at..at + PAGE_BYTES);
                    let held = was.without(Word::KEPT | Word::STALE | Word::GUARDED);
                    space.put(page, DROPPED, held);
                    continue;
                }
                if was.kind() == Kind::Staged {
                    self.staging.disown(was.frame(), (space.id, page));
                }
                given += i64::from(is_resident);
                space.put(page, DROPPED, Word::UNTOUCHED);
            }
            self.budget.give_back(given);
            at = end;
        }
    }

    pub(crate) fn stop_reclaim(&self) {
        self.set_stopping(true);
        self.budget.bell().ring();
    }
}
