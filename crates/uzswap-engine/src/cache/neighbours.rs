//! Loads neighbouring pages from the backing with one read for all of them.
//!
//! Pages that were written together lie in the order of their keys. A run of such neighbours is
//! read, still compressed, into the end of the caller's own pages:
//!
//! ```text
//! pages   |   0   |   1   |   2   |   3   |  …                     |
//! read                                         [ r0  r1  r2  r3 … ]
//! ```
//! Page i is decoded from a copy of its record, so it may overwrite the record. The run ends before
//! a page that would overwrite the next record. Nothing is allocated.
//!
//! The entries of a run are locked during the read, so that its records can be neither cleaned away
//! nor overwritten. The thread does not wait for these locks, because no thread waits for an entry
//! while it holds another. The run ends before a page that cannot be locked or decoded. That page
//! is then loaded by itself, and this load reports the reason.

use super::fetch::verify;
use super::{Cache, Load};
use crate::counters::Counter::*;
use crate::error::Error;
use crate::ids::SwapEntry;
use crate::index::{LockedEntry, State};
use crate::object::Extent;
use crate::page::{PAGE_BYTES, Page};

/// The maximum number of pages of a run: as many as a front end asks for at a time.
const PAGES_MAX: usize = 64;

/// The maximum bytes between two records that one read covers. To read more takes longer than a
/// second request.
const GAP_MAX: u64 = 32 << 10;

/// Neighbours with their entries locked, and the byte range of their records on the backing.
struct LockedNeighbours<'a> {
    entries: [Option<LockedEntry<'a>>; PAGES_MAX],
    count: usize,
    start: u64,
    end: u64,
    /// True if the neighbours are pages written through, each in a slot.
    is_single: bool,
}

impl Cache {
    /// Loads many neighbouring pages, beginning with `first`. Passes each outcome to `loaded`, with
    /// the page's offset from `first`. An error of `loaded` ends the call.
    pub fn load_many<E>(
        &self,
        first: SwapEntry,
        pages: &mut [Page],
        mut loaded: impl FnMut(usize, Result<Load, Error>, &mut Page) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut next = 0;
        while next < pages.len() {
            let key = SwapEntry(first.0 + next as u32);
            let run = self.load_run(key, &mut pages[next..]);
            for (offset, page) in pages.iter_mut().enumerate().skip(next).take(run) {
                loaded(offset, Ok(Load::Hit), page)?;
            }
            next += run;
            if run == 0 {
                let load = self.load(key, &mut pages[next]);
                loaded(next, load, &mut pages[next])?;
                next += 1;
            }
        }
        Ok(())
    }

    /// Loads the run of pages that begins with `first`, by one read of the backing, and returns
    /// their number; 0 if there is no such run. The other `pages` may be overwritten.
    fn load_run(&self, first: SwapEntry, pages: &mut [Page]) -> usize {
        let view = self.index.view();
        let is_placed = |key| matches!(view.peek(key).state(), State::Placed(_));
        if pages.len() < 2 || !is_placed(first) || !is_placed(SwapEntry(first.0 + 1)) {
            return 0;
        }
        let locked = |offset: usize| view.try_lock(SwapEntry(first.0 + offset as u32));
        let mut run = LockedNeighbours::new();
        let block = self.backing.block_bytes() as u64;
        let most = pages.len().min(PAGES_MAX);
        for locked in (0..most).map_while(locked) {
            let State::Placed(extent) = locked.state() else { break };
            let is_single = self.slots.is_single(extent.place);
            let bytes = self.slots.bytes_to_read(extent) as u64;
            let end = extent.place.byte() + bytes;
            let ends = Ends { start: extent.place.byte(), end, is_single };
            if !run.take_in(ends, locked, block, pages.as_flattened().len()) {
                break;
            }
        }
        if run.count < 2 {
            return 0;
        }
        let (start, bytes) = run.blocks(run.end, block);
        let records = pages.as_flattened().len() - bytes;
        if self.backing.read(start, &mut pages.as_flattened_mut()[records..]).is_err() {
            return 0;
        }
        self.counters.increment(BackingReads);
        self.counters.add(BackingBytesRead, bytes as i64);
        let place = |extent: Extent| records + (extent.place.byte() - start) as usize;
        let count = self.decode_run(first, &mut run, pages, place);
        self.counters.add(LoadsBacking, count as i64);
        self.counters.add(Loads, count as i64);
        count
    }

    /// Decodes the pages of a run from their records, which are at `place` in the memory of the
    /// pages. Returns the number of pages before the first that does not verify.
    fn decode_run(
        &self,
        first: SwapEntry,
        run: &mut LockedNeighbours<'_>,
        pages: &mut [Page],
        place: impl Fn(Extent) -> usize,
    ) -> usize {
        for page in 0..run.count {
            let Some((extent, proof)) = run.place(page) else { return page };
            let end = self.slots.bytes_to_read(extent);
            let record = &mut pages.as_flattened_mut()[place(extent)..][..end];
            let owner = SwapEntry(first.0 + page as u32);
            let held = self.open_read(owner, extent, proof, record);
            // Only now, because the segment of an unlocked entry may get another use, in which
            // records have other lengths.
            run.unlock(page);
            let Ok(held) = held else { return page };
            let (bytes, checksum) = (held.object.len(), held.checksum);
            let mut scratch = self.scratch.lock_here();
            scratch.object[..bytes].copy_from_slice(held.object);
            let decoded = scratch.decompress(extent.form.codec, bytes, &mut pages[page]);
            drop(scratch);
            if verify(decoded, checksum, &pages[page]).is_err() {
                return page;
            }
            let end = (page + 1) * PAGE_BYTES;
            if run.extent(page + 1).is_some_and(|next| place(next) < end) {
                return page + 1;
            }
        }
        run.count
    }
}

/// The byte range of a record on the backing.
struct Ends {
    start: u64,
    end: u64,
    is_single: bool,
}

impl<'a> LockedNeighbours<'a> {
    fn new() -> Self {
        let entries = [const { None }; PAGES_MAX];
        Self { entries, count: 0, start: 0, end: 0, is_single: false }
    }

    /// Adds the next record. `false` if this record does not follow the others, or if more than
    /// `most` bytes in whole blocks would have to be read.
    fn take_in(&mut self, record: Ends, locked: LockedEntry<'a>, block: u64, most: usize) -> bool {
        let Ends { start, end, is_single } = record;
        if self.count == 0 {
            (self.start, self.is_single) = (start, is_single);
        } else {
            let follows = (self.end..=self.end + GAP_MAX).contains(&start);
            if is_single != self.is_single || !follows || self.blocks(end, block).1 > most {
                return false;
            }
        }
        self.end = end;
        self.entries[self.count] = Some(locked);
        self.count += 1;
        true
    }

    /// The offset and length, in whole blocks, of a read up to `end`.
    fn blocks(&self, end: u64, block: u64) -> (u64, usize) {
        let start = self.start / block * block;
        (start, (end.next_multiple_of(block) - start) as usize)
    }

    /// The extent of a page's record that is still to be decoded.
    fn extent(&self, page: usize) -> Option<Extent> {
        let locked = self.entries.get(page)?.as_ref()?;
        let State::Placed(extent) = locked.state() else { return None };
        Some(extent)
    }

    /// The place of a page's record, and the proof that the record is the page's.
    fn place(&self, page: usize) -> Option<(Extent, u64)> {
        let extent = self.extent(page)?;
        Some((extent, self.entries[page].as_ref()?.proof()))
    }

    /// Unlocks a page's entry.
    fn unlock(&mut self, page: usize) {
        self.entries[page] = None;
    }
}
