//! Moves the oldest pages to the backing, compressed as they are and many to a write.
//!
//! ```text
//! pop the LRU → lock, look again → copy the object into the open segment, mark the entry → unlock
//!   … segment full → submit → (stores, loads, invalidates go on) → written:
//! for each record: lock → still the same entry? → it is on the backing, free the object → unlock
//! ```
//! While a write is in flight the object stays in the pool and answers loads; the entry remembers
//! the place that it is being written to. A newer store or an invalidate forgets that place, and
//! the commit then finds an entry that does not know it: the record is dead on arrival.
//!
//! One thread at a time writes back, under the writer's lock. Where free segments run short it
//! first cleans: copies what is live in the emptiest segments into the open one.

use crate::backing::record::{
    HEADER_BYTES, RECORD_BYTES_MAX, Record, record_bytes, records, records_every,
};
use crate::backing::segments::{RESERVED, SEGMENT_BYTES, Segment, Use};
use crate::backing::{Buffer, Completion, Write};
use crate::cache::{Cache, Reject, Store};
use crate::compress::Codec;
use crate::ids::{Place, SwapEntry};
use crate::index::{Extent, Form, State, Word};
use crate::lru::{Lru, OFF};
use crate::page::{PAGE_BYTES, Page, checksum_of, content_hash};
use crate::pool::Header;
use crate::stats::Counter::*;
use crate::sync::lock;
use std::io;
use std::sync::atomic::Ordering;

/// Segments being filled or written at once.
const BUFFERS: usize = 4;

/// Bytes of all buffers.
pub(crate) const WRITER_BYTES: usize = (BUFFERS + 1) * SEGMENT_BYTES;

/// A segment with more live bytes than this is left alone: thirty copied to win one.
const WORTH_CLEANING: usize = SEGMENT_BYTES - SEGMENT_BYTES / 32;

/// The form of a page written through.
const RAW: Form = Form { bytes: PAGE_BYTES as u16, codec: Codec::Raw };

/// What writes back: buffers, and the segments in hand.
pub(crate) struct Writer {
    buffers: Vec<Buffer>,
    /// Where a segment that is cleaned is read to.
    cleaned: Option<Buffer>,
    /// The segment being filled.
    open: Option<Open>,
    writes_in_flight: usize,
    /// Segments whose records are being moved, and what they were before.
    cleaning: Vec<(Segment, Use)>,
    /// The segment that takes single pages, and how far it is filled.
    singles: Option<(Segment, usize)>,
    /// Where to look for a free segment next.
    cursor: u32,
    /// With more live bytes than this, cleaning has been seen to win nothing.
    hopeless_above: u64,
    /// Why writeback stopped, if it did.
    failure: Option<Failure>,
}

/// A request to the backing that failed.
struct Failure {
    what: &'static str,
    byte: u64,
    error: io::Error,
}

struct Open {
    segment: Segment,
    buffer: Buffer,
    filled: usize,
}

impl Writer {
    pub(crate) fn new() -> io::Result<Self> {
        let buffers = (0..BUFFERS).map(|_| Buffer::new(SEGMENT_BYTES));
        Ok(Self {
            buffers: buffers.collect::<io::Result<_>>()?,
            cleaned: Some(Buffer::new(SEGMENT_BYTES)?),
            cleaning: Vec::with_capacity(64),
            ..Self::idle()
        })
    }

    /// For a cache without a backing.
    pub(crate) fn idle() -> Self {
        Self {
            buffers: Vec::new(),
            cleaned: None,
            open: None,
            writes_in_flight: 0,
            cleaning: Vec::new(),
            singles: None,
            cursor: 0,
            hopeless_above: u64::MAX,
            failure: None,
        }
    }
}

impl Open {
    /// Where a record of `form` would go, if it fits.
    fn place(&self, form: Form) -> Option<Place> {
        (self.filled + record_bytes(form) <= SEGMENT_BYTES)
            .then(|| Place::at(self.segment.start() + self.filled as u64))
    }

    /// Appends a record that fits; its object's place in the buffer.
    fn append(&mut self, record: Record) -> &mut [u8] {
        let start = self.filled;
        record.write(&mut self.buffer[start..]);
        self.filled += record_bytes(record.form);
        let object = start + HEADER_BYTES;
        &mut self.buffer[object..object + usize::from(record.form.bytes)]
    }
}

/// Why filling the open segment ended.
#[derive(PartialEq)]
enum Filled {
    /// Nothing more fits.
    Full,
    /// No page is left to write.
    Exhausted,
}

impl Cache {
    /// Whether there is a backing that has not failed.
    pub(crate) fn writeback_works(&self) -> bool {
        self.segments.count() > 0 && !self.writeback_failed.load(Ordering::Relaxed)
    }

    /// Why writeback stopped, if it did. It is tried again after [`Self::resume_writeback`].
    pub fn writeback_failure(&self) -> Option<String> {
        let writer = lock(&self.writer);
        let Failure { what, byte, error } = writer.failure.as_ref()?;
        Some(format!("{what} at byte {byte}: {error}"))
    }

    /// Tries writeback again after a failure.
    pub fn resume_writeback(&self) {
        lock(&self.writer).failure = None;
        self.writeback_failed.store(false, Ordering::Relaxed);
        self.doorbell.ring();
    }

    /// Writes back segment after segment until `enough`, given the bytes that are still in flight
    /// and leave the pool if all goes well, or until nothing can be written.
    pub(crate) fn write_back(&self, enough: impl Fn(usize) -> bool) {
        let mut writer = lock(&self.writer);
        while !enough(0) && self.writeback_works() {
            let goes_on = match enough(writer.writes_in_flight * SEGMENT_BYTES) {
                true => self.complete(&mut writer, true),
                false => self.write_segment(&mut writer),
            };
            if !goes_on {
                break;
            }
        }
        self.settle(&mut writer);
    }

    /// Writes one segment back and waits for it; whether pages left the pool.
    pub(crate) fn write_back_one(&self) -> bool {
        if !self.writeback_works() {
            return false;
        }
        let before = self.pool.bytes();
        let mut writer = lock(&self.writer);
        if self.pool.bytes() < before {
            return true; // Whoever held the writer made room.
        }
        let written = self.counters.get(WrittenBack);
        self.write_segment(&mut writer);
        self.settle(&mut writer);
        self.counters.get(WrittenBack) > written
    }

    /// Fills a segment with the oldest pages and submits it; whether there may be more to write.
    fn write_segment(&self, writer: &mut Writer) -> bool {
        if !self.clean_if_short(writer) || !self.open(writer, RESERVED) {
            self.counters.increment(BackingFull);
            return false;
        }
        let Some(open) = &mut writer.open else { return false };
        let filled = self.fill(open);
        if open.filled > 0 {
            self.submit(writer);
        }
        filled == Filled::Full && self.writeback_works()
    }

    /// Makes sure that a segment is open; `reserved` free ones are left alone.
    fn open(&self, writer: &mut Writer, reserved: usize) -> bool {
        if writer.open.is_some() {
            return true;
        }
        while writer.buffers.is_empty() && self.complete(writer, true) {}
        let Some(segment) = self.free_segment(writer, reserved) else { return false };
        let Some(buffer) = writer.buffers.pop() else { return false };
        self.segments.set_state(segment, Use::Open);
        writer.open = Some(Open { segment, buffer, filled: 0 });
        true
    }

    /// A free segment, if more than `reserved` are.
    fn free_segment(&self, writer: &mut Writer, reserved: usize) -> Option<Segment> {
        let count = self.segments.count() as u32;
        let from = writer.cursor;
        let numbers = (0..count).map(|step| Segment((from + step) % count));
        let mut free = numbers.filter(|segment| self.segments.is_free(*segment));
        let first = free.next()?;
        (free.take(reserved).count() == reserved).then(|| {
            writer.cursor = first.0;
            first
        })
    }

    /// Copies the oldest pages into the open segment, marking their entries.
    fn fill(&self, open: &mut Open) -> Filled {
        // Each listed entry is spared at most once a call.
        let mut chances = self.lru.len();
        while let Some(key) = self.lru.pop(&self.index) {
            let entry = self.index.existing(key);
            let mut locked = entry.lock();
            let State::Pooled(object) = locked.state() else { continue };
            if locked.word().is_in_writeback() || Lru::is_listed(entry.aux()) {
                continue; // Stored anew since it was popped.
            }
            if locked.word().is_referenced() && chances > 0 {
                chances -= 1;
                self.counters.increment(SecondChances);
                let word = locked.word().with_referenced(false);
                locked.set(word);
                self.lru.push(&self.index, key);
                continue;
            }
            let Some(place) = open.place(object.form) else {
                self.lru.push_oldest(&self.index, key);
                return Filled::Full;
            };
            let Header { checksum, .. } = self.pool.header(object.handle);
            let record = Record { owner: key, checksum, form: object.form, moved_from: None };
            self.pool.read(object.handle, open.append(record));
            let word = locked.word().with_writeback(true);
            locked.set(word);
            locked.set_aux(place.0);
        }
        Filled::Exhausted
    }

    /// Starts the write of the open segment.
    fn submit(&self, writer: &mut Writer) {
        let Some(open) = writer.open.take() else { return };
        let Open { segment, mut buffer, filled } = open;
        // So that the records end here, whatever the buffer held before.
        let end = (filled + HEADER_BYTES).min(SEGMENT_BYTES);
        buffer[filled..end].fill(0);
        let bytes = end.next_multiple_of(self.backing.block_bytes());
        self.backing.submit(Write { offset: segment.start(), buffer, bytes });
        writer.writes_in_flight += 1;
    }

    /// Waits for every write in flight.
    fn settle(&self, writer: &mut Writer) {
        while self.complete(writer, true) {}
    }

    /// Takes one write that ended and commits it; `false` when there is none (yet).
    fn complete(&self, writer: &mut Writer, wait: bool) -> bool {
        if writer.writes_in_flight == 0 {
            return false;
        }
        let Some(Completion { write, result }) = self.backing.complete(wait) else { return false };
        writer.writes_in_flight -= 1;
        let segment = Segment::of(Place::at(write.offset));
        match result {
            Ok(()) => {
                self.counters.add(BackingBytesWritten, write.bytes as i64);
                self.commit(segment, &write.buffer);
            }
            Err(error) => self.give_up(writer, segment, &write.buffer, error),
        }
        writer.buffers.push(write.buffer);
        self.finish_cleaning(writer);
        true
    }

    fn commit(&self, segment: Segment, buffer: &[u8]) {
        for (offset, record) in records(buffer) {
            let place = Place::at(segment.start() + offset as u64);
            self.commit_record(place, record);
        }
        self.segments.set_state(segment, Use::Written);
    }

    fn commit_record(&self, place: Place, record: Record) {
        let key = record.owner;
        let extent = Extent { place, form: record.form };
        let mut locked = self.index.existing(key).lock();
        let known = match locked.state() {
            State::Pooled(_) => locked.word().is_in_writeback() && locked.aux() == place.0,
            // A segment that is being cleaned takes no new records, so an entry still in it is the
            // one that was copied.
            State::Placed(at) => {
                record.moved_from == Some(Segment::of(at.place))
                    && self.segments.state(Segment::of(at.place)) == Use::Cleaning
            }
            State::Absent | State::Filled(_) | State::Shared(_) => false,
        };
        if !known {
            return;
        }
        if record.moved_from.is_none() {
            self.counters.increment(WrittenBack);
        }
        self.segments.add(extent);
        let old = self.publish(key, &mut locked, Word::new(State::Placed(extent)));
        locked.set_aux(record.checksum.into());
        drop(locked);
        self.dispose(old);
    }

    /// A write failed: its pages stay in the pool, the oldest again, and writeback stops.
    fn give_up(&self, writer: &mut Writer, segment: Segment, buffer: &[u8], error: io::Error) {
        self.fail(writer, Failure { what: "write", byte: segment.start(), error });
        for (offset, record) in records(buffer) {
            let place = Place::at(segment.start() + offset as u64);
            let mut locked = self.index.existing(record.owner).lock();
            let ours = matches!(locked.state(), State::Pooled(_))
                && locked.word().is_in_writeback()
                && locked.aux() == place.0;
            if ours {
                let word = locked.word().with_writeback(false);
                locked.set(word);
                locked.set_aux(OFF);
                self.lru.push_oldest(&self.index, record.owner);
            }
        }
        self.segments.set_state(segment, Use::Free);
        self.stop_cleaning(writer);
    }

    fn fail(&self, writer: &mut Writer, failure: Failure) {
        self.counters.increment(WritebackFail);
        self.writeback_failed.store(true, Ordering::Relaxed);
        writer.failure = Some(failure);
    }

    /// Cleans until more than the reserved segments are free; `false` when there is nothing to win.
    fn clean_if_short(&self, writer: &mut Writer) -> bool {
        while self.segments.is_short() {
            let live = self.segments.live_bytes();
            let hopeless = !self.segments.cleaning_can_win(live) || live > writer.hopeless_above;
            if hopeless || !self.writeback_works() {
                return false;
            }
            let worth = |victim: &Segment| self.segments.live(*victim) <= WORTH_CLEANING;
            let room = writer.cleaning.len() < writer.cleaning.capacity();
            match self.segments.cheapest().filter(worth) {
                Some(victim) if room => {
                    if !self.clean(writer, victim) {
                        return false;
                    }
                }
                victim => {
                    self.submit(writer);
                    self.settle(writer);
                    // What was just written is itself the only one left worth cleaning: stop, and
                    // do not try again before something has died.
                    if victim.is_none() && self.segments.is_short() {
                        writer.hopeless_above = live.saturating_sub(SEGMENT_BYTES as u64);
                        return false;
                    }
                }
            }
        }
        writer.hopeless_above = u64::MAX;
        true
    }

    /// Copies what is live in a segment elsewhere; it is free once that is written.
    fn clean(&self, writer: &mut Writer, victim: Segment) -> bool {
        let Some(mut content) = writer.cleaned.take() else { return false };
        let was = self.segments.state(victim);
        self.segments.set_state(victim, Use::Cleaning);
        writer.cleaning.push((victim, was));
        let cleaned = match self.backing.read(victim.start(), &mut content) {
            Ok(()) if was == Use::WrittenSingly => {
                let found = records_every(&content, self.single_bytes());
                self.copy_live(writer, victim, &content, found)
            }
            Ok(()) => self.copy_live(writer, victim, &content, records(&content)),
            Err(error) => {
                self.fail(writer, Failure { what: "read", byte: victim.start(), error });
                false
            }
        };
        writer.cleaned = Some(content);
        if cleaned {
            self.finish_cleaning(writer);
        } else {
            self.stop_cleaning(writer);
        }
        cleaned
    }

    /// Copies a segment's live records into open ones.
    fn copy_live(
        &self,
        writer: &mut Writer,
        victim: Segment,
        content: &[u8],
        records: impl Iterator<Item = (usize, Record)>,
    ) -> bool {
        for (offset, found) in records {
            let Some(entry) = self.index.get(found.owner) else { continue };
            // Before the entry is locked: a commit may have to lock the same one.
            if writer.open.as_ref().is_some_and(|open| open.place(found.form).is_none()) {
                self.submit(writer);
                self.settle(writer);
            }
            if !self.writeback_works() || !self.open(writer, 0) {
                return false;
            }
            let Some(open) = &mut writer.open else { return false };
            let place = Place::at(victim.start() + offset as u64);
            let locked = entry.lock();
            if locked.state() == State::Placed(Extent { place, form: found.form }) {
                let checksum = locked.aux() as u32;
                let record = Record { checksum, moved_from: Some(victim), ..found };
                let object = offset + HEADER_BYTES;
                let bytes = usize::from(found.form.bytes);
                open.append(record).copy_from_slice(&content[object..object + bytes]);
            }
        }
        true
    }

    /// Frees the segments of which the last record has been moved.
    fn finish_cleaning(&self, writer: &mut Writer) {
        writer.cleaning.retain(|(victim, _)| {
            let moved = self.segments.live(*victim) == 0;
            if moved {
                self.segments.set_state(*victim, Use::Free);
                self.counters.increment(SegmentsCleaned);
            }
            !moved
        });
    }

    /// Leaves the segments in hand as they were: what was copied out of them is not committed.
    fn stop_cleaning(&self, writer: &mut Writer) {
        writer.cleaning.drain(..).for_each(|(victim, was)| self.segments.set_state(victim, was));
    }

    /// Takes a page that [`Self::store`] rejected straight to the backing, uncompressed, as a page
    /// that the kernel's zswap rejects goes to the swap device. Waits for the write.
    pub fn store_through(&self, key: SwapEntry, page: &Page) -> Store {
        let rejected = Store::Rejected(Reject::ReclaimFail);
        let Ok(entry) = self.index.ensure(key) else { return Store::Rejected(Reject::AllocFail) };
        if !self.writeback_works() {
            return rejected;
        }
        let mut writer = lock(&self.writer);
        let Some((place, checksum)) = self.write_single(&mut writer, key, page) else {
            return rejected;
        };
        let extent = Extent { place, form: RAW };
        let mut locked = entry.lock();
        self.segments.add(extent);
        let old = self.publish(key, &mut locked, Word::new(State::Placed(extent)));
        locked.set_aux(checksum.into());
        drop(locked);
        self.dispose(old);
        self.counters.increment(WrittenThrough);
        Store::Stored
    }

    /// Bytes that a page written through takes: a record in whole blocks.
    fn single_bytes(&self) -> usize {
        RECORD_BYTES_MAX.next_multiple_of(self.backing.block_bytes())
    }

    /// Writes a page to a place of its own.
    fn write_single(
        &self,
        writer: &mut Writer,
        key: SwapEntry,
        page: &Page,
    ) -> Option<(Place, u32)> {
        let bytes = self.single_bytes();
        let (segment, at) = match writer.singles.take() {
            Some((segment, at)) if at + bytes <= SEGMENT_BYTES => (segment, at),
            full => {
                if let Some((segment, _)) = full {
                    self.segments.set_state(segment, Use::WrittenSingly);
                }
                let short = !self.clean_if_short(writer);
                let segment = self.free_segment(writer, RESERVED).filter(|_| !short);
                let Some(segment) = segment else {
                    self.counters.increment(BackingFull);
                    return None;
                };
                self.segments.set_state(segment, Use::Open);
                (segment, 0)
            }
        };
        writer.singles = Some((segment, at + bytes));
        let checksum = checksum_of(content_hash(page));
        let staging = &mut writer.cleaned.as_mut()?[..bytes];
        Record { owner: key, checksum, form: RAW, moved_from: None }.write(staging);
        staging[HEADER_BYTES..RECORD_BYTES_MAX].copy_from_slice(page);
        let offset = segment.start() + at as u64;
        match self.backing.write(offset, staging) {
            Ok(()) => {
                self.counters.add(BackingBytesWritten, bytes as i64);
                Some((Place::at(offset), checksum))
            }
            Err(error) => {
                self.fail(writer, Failure { what: "write", byte: offset, error });
                None
            }
        }
    }
}
