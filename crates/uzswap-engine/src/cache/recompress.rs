//! Compresses cold pages again while the machine is idle: sixteen as one.
//!
//! ```text
//! the oldest of the LRU → lock, look again → decompress, mark the entry → unlock
//!   … sixteen pages → compress as one (stores, loads, invalidates go on) → pieces into the pool:
//! for each page: lock → still the same entry? → it is in the unit, free the object → unlock
//! ```
//! Recompression works like `writeback`. Until the commit, loads read the object, and the entry has
//! a token. A newer store or an invalidate removes the token. The commit then does not recognise
//! the entry, and the page leaves the unit again. A unit that has lost a quarter of its pages is
//! taken apart the same way: its other pages go into a new unit.
//!
//! The engine reads no clock: the caller of [`Cache::idle`] passes the time.

use super::Cache;
use crate::compress::{Codec, GROUP_PAGES, UNIT_BYTES_MAX, UNIT_PAGES, UnitDecoder, UnitEncoder};
use crate::counters::Counter::*;
use crate::ids::{Handle, SwapEntry};
use crate::index::{List, LockedEntry, State, UnitMember};
use crate::object::{Form, Object};
use crate::page::{PAGE_BYTES, Page, checksum_of, content_hash};
use crate::pool::{COMPRESSED_BYTES_MAX, Header};
use crate::scratch::{Scratch, UnitScratch};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::table::boxed;
use crate::unit::{PIECES, Units};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Units made in one call: some 12 ms, an eighth of a CPU with a call every 100 ms.
const UNITS_A_CALL: usize = 16;

/// With more pages stored and loaded than this since the last call, the cache is in use.
const BUSY_PAGES: u64 = 64;

/// Samples taken in the time of the age. A page may therefore wait an eighth longer.
const LOOKS: u32 = 8;

/// Marks a token of recompression: a second word that is not a place on the backing.
const TOKEN: u64 = 1 << 63;

const _: () = assert!(PIECES * COMPRESSED_BYTES_MAX >= UNIT_BYTES_MAX, "a unit fits in its pieces");

/// The state of recompression.
pub(crate) struct Recompression {
    recompressor: Mutex<Recompressor>,
    /// Objects in the pool that were not used for long, at the last call.
    idle_pages: AtomicUsize,
}

impl Recompression {
    pub(crate) fn new() -> Self {
        Self { recompressor: Mutex::new(Recompressor::new()), idle_pages: AtomicUsize::new(0) }
    }

    /// Prevents new units until this is dropped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Recompressor> {
        lock(&self.recompressor)
    }

    /// Objects in the pool that were not used for long, at the last call.
    pub(crate) fn idle_pages(&self) -> usize {
        self.idle_pages.load(Ordering::Relaxed)
    }
}

/// The state of the thread that recompresses.
pub(crate) struct Recompressor {
    /// Samples: the time, and the number of pages that the LRU had taken at its newest end.
    looks: VecDeque<(Duration, u64)>,
    /// Pages stored and loaded by the last call.
    used: u64,
    tokens: u64,
    work: Option<RecompressBuffers>,
}

/// The buffers, some three megabytes, made with the first page.
struct RecompressBuffers {
    encoder: UnitEncoder,
    decoder: UnitDecoder,
    candidates: Vec<Candidate>,
    pages: Box<[Page]>,
    unit: Box<[u8]>,
}

/// A page for the next unit.
struct Candidate {
    key: SwapEntry,
    checksum: u32,
    /// True if taking the page's numbers apart makes its object smaller.
    is_number: bool,
    from: From,
}

/// The present place of a candidate.
enum From {
    /// The page is in an object of `bytes`, and its entry has the token.
    Pool { token: u64, bytes: u16 },
    /// The page is in a unit that has lost pages.
    Unit(UnitMember),
}

impl Recompressor {
    fn new() -> Self {
        Self { looks: VecDeque::new(), used: 0, tokens: 0, work: None }
    }

    /// The number of pages that entered the list since `age` ago, if `listed` have entered it in
    /// all. `None` if there is no sample that old.
    fn younger(&mut self, now: Duration, age: Duration, listed: u64) -> Option<u64> {
        if self.looks.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= age / LOOKS) {
            self.looks.push_back((now, listed));
        }
        let old = |look: Option<&(Duration, u64)>| {
            look.is_some_and(|(at, _)| now.saturating_sub(*at) >= age)
        };
        while old(self.looks.get(1)) {
            self.looks.pop_front();
        }
        let (_, then) = self.looks.front().filter(|look| old(Some(look)))?;
        Some(listed.saturating_sub(*then))
    }
}

impl RecompressBuffers {
    /// `None` without memory.
    fn new() -> Option<Self> {
        let mut candidates = Vec::new();
        candidates.try_reserve_exact(UNIT_PAGES).ok()?;
        Some(Self {
            encoder: UnitEncoder::new()?,
            decoder: UnitDecoder::new()?,
            candidates,
            pages: boxed(UNIT_PAGES, || [0; PAGE_BYTES]).ok()?,
            unit: boxed(UNIT_BYTES_MAX, || 0).ok()?,
        })
    }
}

impl Cache {
    /// Does postponed work while the cache is idle: recompresses pages that have been in the pool
    /// for `recompress_idle_seconds`. The maintaining thread calls it every 100 ms or so, with the
    /// time since any fixed moment. Returns the number of recompressed pages.
    pub fn idle(&self, now: Duration) -> usize {
        let mut recompressor = lock(&self.recompression.recompressor);
        let Some(age) = self.attributes.recompress_idle() else {
            self.recompression.idle_pages.store(0, Ordering::Relaxed);
            return 0;
        };
        let stored = self.counters.get(Stores);
        let used = stored + self.counters.get(Loads);
        let before = std::mem::replace(&mut recompressor.used, used);
        let is_busy = used.saturating_sub(before) > BUSY_PAGES;
        let listed = stored + self.counters.get(SecondChances);
        let Some(younger) = recompressor.younger(now, age, listed) else { return 0 };
        let lists = self.index.lists();
        let cold = (lists.len(List::Lru) as u64).saturating_sub(younger);
        self.recompression
            .idle_pages
            .store(cold as usize + lists.len(List::Cold), Ordering::Relaxed);
        if is_busy {
            0
        } else {
            self.recompress_some(&mut recompressor, cold as usize, UNITS_A_CALL, || self.is_rung())
        }
    }

    /// Recompresses the oldest pages of the pool, of any age, into at most `units` units. Returns
    /// the number of pages that were recompressed or gained too little.
    pub fn recompress(&self, units: usize) -> usize {
        let mut recompressor = lock(&self.recompression.recompressor);
        let cold = self.index.lists().len(List::Lru);
        self.recompress_some(&mut recompressor, cold, units, || false)
    }

    /// Recompresses the oldest `cold` pages into at most `units` units, together with the remaining
    /// pages of units that have lost many pages. It stops early when the caller `is_wanted`
    /// elsewhere.
    fn recompress_some(
        &self,
        recompressor: &mut Recompressor,
        mut cold: usize,
        units: usize,
        is_wanted: impl Fn() -> bool,
    ) -> usize {
        let mut made = 0;
        // The next unit whose remaining pages are taken.
        let mut cursor = 0;
        for _ in 0..units {
            if !self.gather(recompressor, &mut cold, &mut cursor) {
                break;
            }
            let Some(pages) = self.make_unit(recompressor) else { break };
            made += pages;
            if is_wanted() {
                break; // Stores need the room more.
            }
        }
        if let Some(work) = &mut recompressor.work {
            work.candidates.drain(..).rev().for_each(|candidate| self.put_back(&candidate, false));
        }
        if made > 0 {
            self.compact();
        }
        made
    }

    /// Fills the list of candidates; true if they suffice for a unit.
    fn gather(
        &self,
        recompressor: &mut Recompressor,
        cold: &mut usize,
        cursor: &mut usize,
    ) -> bool {
        let held = recompressor.work.as_ref().map_or(0, |work| work.candidates.len());
        let lacks = UNIT_PAGES.saturating_sub(held + *cold);
        if self.units.left(lacks) < lacks {
            return false;
        }
        if recompressor.work.is_none() {
            if self.provide_units().is_none() {
                return false; // No memory: the next call tries again.
            }
            recompressor.work = RecompressBuffers::new();
        }
        let Recompressor { work: Some(work), tokens, .. } = recompressor else {
            return false;
        };
        self.gather_left(work, cursor);
        while work.candidates.len() < UNIT_PAGES && *cold > 0 {
            let view = self.index.view();
            let Some((locked, object)) = view.take_oldest(List::Lru) else { break };
            *cold -= 1;
            self.take_in(work, tokens, locked, object);
        }
        work.candidates.len() == UNIT_PAGES
    }

    /// Gives every CPU the buffers for pages of units, before there are units. `None` without
    /// memory.
    pub(crate) fn provide_units(&self) -> Option<()> {
        let make = || UnitScratch::new().map(Some);
        self.scratch.provide(|scratch| !scratch.has_unit(), make, Scratch::provide_unit)
    }

    /// Makes a page that was taken off its list a candidate, if it qualifies.
    fn take_in(
        &self,
        work: &mut RecompressBuffers,
        tokens: &mut u64,
        locked: LockedEntry<'_>,
        object: Object,
    ) {
        if locked.word().is_referenced() {
            return locked.spared();
        }
        let page = &mut work.pages[work.candidates.len()];
        let header = {
            let mut scratch = self.scratch.lock_here();
            let bytes = usize::from(object.form.bytes);
            let header = self.pool.read(object.handle, &mut scratch.object[..bytes]);
            scratch.decompress(object.form.codec, bytes, page).ok().map(|()| header)
        };
        match header {
            Some(Header { checksum, .. }) if checksum_of(content_hash(page)) == checksum => {
                *tokens += 1;
                let token = TOKEN | *tokens;
                let key = locked.key();
                locked.in_flight(token);
                let from = From::Pool { token, bytes: object.form.bytes };
                let is_number = object.form.codec.is_for_numbers();
                work.candidates.push(Candidate { key, checksum, is_number, from });
            }
            // Damaged: each load reports the damage. A new checksum would hide the damage.
            _ => locked.cooled(),
        }
    }

    /// Adds the remaining pages of units that have lost a quarter.
    fn gather_left(&self, work: &mut RecompressBuffers, cursor: &mut usize) {
        while work.candidates.len() < UNIT_PAGES {
            let Some((number, unit)) = self.units.sparse(*cursor) else { return };
            match self.take_apart(work, unit) {
                Some(true) => *cursor = number + 1,
                Some(false) => {} // The other pages go into the next unit.
                None => self.units.keep_sparse(unit), // On the backing, or damaged.
            }
        }
    }

    /// Adds the remaining pages of a unit, while there is space for candidates. True if all were
    /// added; `None` when the unit cannot be read.
    fn take_apart(&self, work: &mut RecompressBuffers, unit: SwapEntry) -> Option<bool> {
        let mut there = 0;
        for piece in Units::pieces(unit) {
            match self.index.view().peek(piece).state() {
                State::Pooled(_) => {}
                State::Absent => break,
                _ => return None,
            }
            there += self.fetch_piece(piece, &mut work.unit[there..]).ok()??;
        }
        let taken = self.units.taken(unit);
        for position in (0..UNIT_PAGES as u8).filter(|position| taken >> position & 1 != 0) {
            let start = &work.unit[..there];
            UnitDecoder::bytes_for(start, position.into())?;
            let key = SwapEntry(UnitDecoder::key_of(start, position.into())?);
            let member = UnitMember { unit, position };
            let is_candidate = |candidate: &Candidate| candidate.key == key;
            if work.candidates.iter().any(is_candidate) {
                continue;
            }
            if work.candidates.len() == UNIT_PAGES {
                return Some(false);
            }
            let checksum = {
                let view = self.index.view();
                let Some(locked) = view.lock(key) else { continue };
                if locked.state() != State::Member(member) {
                    continue; // The page left just now.
                }
                locked.proof() as u32
            };
            let page = &mut work.pages[work.candidates.len()];
            let is_number = work.decoder.page(start, position.into(), page).ok()?;
            if checksum_of(content_hash(page)) != checksum {
                return None;
            }
            let from = From::Unit(member);
            work.candidates.push(Candidate { key, checksum, is_number, from });
        }
        Some(true)
    }

    /// Makes a unit of the first candidates, or finds that they gain too little. Returns their
    /// number. Candidates that did not fit stay for the next unit. `None` if the pool is full.
    fn make_unit(&self, recompressor: &mut Recompressor) -> Option<usize> {
        let work = recompressor.work.as_mut()?;
        let keys: [u32; UNIT_PAGES] = std::array::from_fn(|i| work.candidates[i].key.0);
        let numbers: [bool; UNIT_PAGES] = std::array::from_fn(|i| work.candidates[i].is_number);
        let encoded = work.encoder.encode(&keys, &work.pages, &numbers, &mut work.unit);
        let (bytes, count) = encoded.unwrap_or((UNIT_BYTES_MAX, GROUP_PAGES));
        let is_poor = encoded.is_none() || !gains(&work.candidates[..count], bytes);
        let unit = match is_poor {
            true => None,
            false => Some(self.keep_unit(&work.unit[..bytes], count)?),
        };
        for (position, candidate) in (0..).zip(work.candidates.drain(..count)) {
            match unit {
                Some(unit) => self.enter(&candidate, UnitMember { unit, position }),
                None => self.put_back(&candidate, true),
            }
        }
        work.pages.copy_within(count.., 0);
        let counter = if is_poor { RecompressPoor } else { Recompressed };
        self.counters.add(counter, count as i64);
        Some(count)
    }

    /// Puts a unit into the pool, with `count` pages that are about to enter it.
    fn keep_unit(&self, bytes: &[u8], count: usize) -> Option<SwapEntry> {
        let piece_bytes = bytes.len().div_ceil(bytes.len().div_ceil(COMPRESSED_BYTES_MAX));
        let pieces = || bytes.chunks(piece_bytes);
        let mut handles = [const { None }; PIECES];
        for (slot, piece) in handles.iter_mut().zip(pieces()) {
            let Ok(handle) = self.pool.alloc(piece.len(), false) else {
                handles.iter().flatten().for_each(|handle: &Handle| self.pool.free(*handle));
                return None;
            };
            *slot = Some(handle);
        }
        let Some(unit) = self.units.take(&self.index, count) else {
            handles.iter().flatten().for_each(|handle: &Handle| self.pool.free(*handle));
            return None;
        };
        for ((key, handle), piece) in
            Units::pieces(unit).zip(handles.iter().flatten()).zip(pieces())
        {
            let form = Form { bytes: piece.len() as u16, codec: Codec::Piece };
            // The pages' checksums are in their entries.
            self.pool.write(*handle, Header { owner: key, checksum: 0 }, piece);
            let state = State::Pooled(Object { handle: *handle, form });
            let old = self.index.view().lock_existing(key).stored(state);
            debug_assert_eq!(old, State::Absent, "of an unused unit");
        }
        Some(unit)
    }

    /// Moves a page into its slot of a unit, if its entry is still the same.
    fn enter(&self, candidate: &Candidate, member: UnitMember) {
        let view = self.index.view();
        let Some(locked) = view.lock(candidate.key) else { return self.leave_unit(member) };
        let is_same = match candidate.from {
            From::Pool { token, .. } => locked.is_in_flight_as(token),
            From::Unit(from) => locked.state() == State::Member(from),
        };
        if !is_same {
            drop(locked);
            return self.leave_unit(member);
        }
        self.dispose(locked.joined(member, candidate.checksum));
    }

    /// Puts a page back: as the oldest, or, if `is_done`, so that recompression skips it.
    fn put_back(&self, candidate: &Candidate, is_done: bool) {
        match candidate.from {
            From::Pool { token, .. } => {
                let view = self.index.view();
                let Some(locked) = view.lock(candidate.key) else { return };
                match locked.is_in_flight_as(token) {
                    true if is_done => locked.cooled(),
                    true => locked.returned(),
                    false => {}
                }
            }
            From::Unit(member) if is_done => self.units.keep_sparse(member.unit),
            From::Unit(_) => {}
        }
    }
}

/// True if pages gain an eighth as a unit of `bytes`. Pages that come from a unit always gain.
fn gains(candidates: &[Candidate], bytes: usize) -> bool {
    let before = candidates.iter().map(|candidate| match candidate.from {
        From::Pool { bytes, .. } => usize::from(bytes),
        From::Unit(_) => PAGE_BYTES,
    });
    bytes * 8 <= before.sum::<usize>() * 7
}
