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
//! A store that needs room fills a segment of its own and writes it, beside other stores that do
//! the same. The thread that maintains has several writes in flight at once, and cleans where free
//! segments run short: copies what is live in the emptiest segments into the open one. That is
//! under the writer's lock, which a store takes only when it needs cleaning too.

use crate::backing::record::{HEADER_BYTES, Layout, Record, record_at, records, seal_records};
use crate::backing::seal::{Generation, Seal};
use crate::backing::segments::{SEGMENT_BYTES, Segment, Use};
use crate::backing::slots::{RESERVED, Slots};
use crate::backing::{Buffer, Completion, Write};
use crate::cache::Cache;
use crate::ids::Place;
use crate::index::{Extent, Form, List, State};
use crate::percpu::PerCpu;
use crate::pool::Header;
use crate::stats::Counter::*;
use crate::sync::{Mutex, lock};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// A segment with more live bytes than this is left alone: thirty copied to win one.
const WORTH_CLEANING: usize = SEGMENT_BYTES - SEGMENT_BYTES / 32;

/// What writeback has of its own.
pub(crate) struct Writeback {
    writer: Mutex<Writer>,
    /// Bytes of its buffers.
    writer_bytes: usize,
    /// What stores write segments from.
    buffers: PerCpu<StoreBuffer>,
    /// Why it stopped, if it did.
    failure: Mutex<Option<Failure>>,
    /// A write to the backing failed: nothing more is written until someone says so.
    has_failed: AtomicBool,
}

impl Writeback {
    /// For a pool of at most so many bytes; `None`: there is no backing.
    pub(crate) fn new(pool_bytes_max: Option<u64>) -> io::Result<Self> {
        let writer = pool_bytes_max.map_or_else(|| Ok(Writer::idle()), Writer::new)?;
        let buffers = if pool_bytes_max.is_some() { StoreBuffer::COUNT } else { 0 };
        Ok(Self {
            writer_bytes: writer.bytes(),
            writer: Mutex::new(writer),
            buffers: PerCpu::new(buffers),
            failure: Mutex::new(None),
            has_failed: AtomicBool::new(false),
        })
    }

    /// Bytes of all buffers.
    pub(crate) fn bytes(&self) -> usize {
        self.writer_bytes + self.buffers.count() * SEGMENT_BYTES
    }

    /// Whether it stopped, and waits to be resumed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// A CPU comes: a buffer for its stores. Errors: no memory.
    pub(crate) fn start_cpu(&self, cpu: usize) -> io::Result<()> {
        self.buffers.start(cpu, StoreBuffer::new)
    }

    /// A CPU goes. Whoever writes from its buffer has it until that is done.
    pub(crate) fn stop_cpu(&self, cpu: usize) {
        self.buffers.stop(cpu, |_| {});
    }

    /// CPUs that have a buffer.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn cpus_count(&self) -> usize {
        self.buffers.count()
    }
}

/// What the thread that maintains writes back with: buffers, and the segments in hand.
struct Writer {
    buffers: Vec<Buffer>,
    /// Where a segment that is cleaned is read to.
    cleaned: Option<Buffer>,
    /// The segment being filled.
    open: Option<Open>,
    in_flight: Vec<InFlight>,
    /// Segments whose copies are on their way. They take no other use until all writes have
    /// ended: a copy is committed by where its page was, which must not be another page by then.
    cleaning: Vec<Segment>,
    /// With more live bytes than this, cleaning has been seen to win nothing.
    hopeless_above: u64,
}

/// What a store writes a segment from. Gone only while it does.
struct StoreBuffer(Option<Buffer>);

impl StoreBuffer {
    /// How many there are at most: with more, stores would rather wait for the device than for a
    /// buffer.
    const COUNT: usize = 16;

    fn new() -> io::Result<Self> {
        Ok(Self(Some(Buffer::new(SEGMENT_BYTES)?)))
    }
}

/// A request to the backing that failed.
pub(crate) struct Failure {
    pub(crate) what: &'static str,
    pub(crate) byte: u64,
    pub(crate) error: io::Error,
}

struct Open {
    segment: Segment,
    buffer: Buffer,
    filled: usize,
    /// What its records will be sealed in.
    generation: Option<Generation>,
}

/// A segment that is being written.
struct InFlight {
    segment: Segment,
    generation: Option<Generation>,
}

impl Writer {
    /// For a pool of at most `pool_bytes_max`.
    fn new(pool_bytes_max: u64) -> io::Result<Self> {
        // Segments that it fills or writes at once.
        let count = if pool_bytes_max < 64 << 20 { 2 } else { 4 };
        let buffers = (0..count).map(|_| Buffer::new(SEGMENT_BYTES));
        Ok(Self {
            buffers: buffers.collect::<io::Result<_>>()?,
            cleaned: Some(Buffer::new(SEGMENT_BYTES)?),
            in_flight: Vec::with_capacity(count),
            cleaning: Vec::with_capacity(64),
            ..Self::idle()
        })
    }

    /// Bytes of the buffers that it has at hand.
    fn bytes(&self) -> usize {
        (self.buffers.len() + usize::from(self.cleaned.is_some())) * SEGMENT_BYTES
    }

    /// For a cache without a backing.
    fn idle() -> Self {
        Self {
            buffers: Vec::new(),
            cleaned: None,
            open: None,
            in_flight: Vec::new(),
            cleaning: Vec::new(),
            hopeless_above: u64::MAX,
        }
    }
}

impl Open {
    fn layout(&self) -> Layout {
        if self.generation.is_some() { Layout::Sealed } else { Layout::Plain }
    }

    /// Where a record of `form` would go, if it fits.
    fn place(&self, form: Form) -> Option<Place> {
        (self.filled + self.layout().record_bytes(form) <= SEGMENT_BYTES)
            .then(|| Place::at(self.segment.start() + self.filled as u64))
    }

    /// Appends a record that fits; its object's place in the buffer.
    fn append(&mut self, record: Record) -> &mut [u8] {
        let start = self.filled;
        record.write(&mut self.buffer[start..]);
        self.filled += self.layout().record_bytes(record.form);
        let object = start + HEADER_BYTES;
        &mut self.buffer[object..object + usize::from(record.form.bytes)]
    }

    /// Ends the records, whatever the buffer held before, and seals them, once; the bytes to write.
    fn finish(&mut self, seal: Option<&Seal>, block_bytes: usize) -> usize {
        if let (Some(seal), Some(generation)) = (seal, self.generation) {
            let records = &mut self.buffer[..self.filled];
            seal_records(seal, generation, self.segment.start(), records);
        }
        let end = (self.filled + HEADER_BYTES).min(SEGMENT_BYTES);
        self.buffer[self.filled..end].fill(0);
        end.next_multiple_of(block_bytes)
    }
}

/// What filling the open segment came to.
struct Filled {
    /// Bytes of the objects that were copied.
    bytes: usize,
    /// Whether nothing more fits. Otherwise no page is left to write.
    is_full: bool,
}

impl Cache {
    /// Whether there is a backing that has not failed.
    pub(crate) fn writeback_works(&self) -> bool {
        self.slots.segments.count() > 0 && !self.writeback.has_failed()
    }

    /// Why writeback stopped, if it did. It is tried again after [`Self::resume_writeback`].
    pub fn writeback_failure(&self) -> Option<String> {
        let failure = lock(&self.writeback.failure);
        let Failure { what, byte, error } = failure.as_ref()?;
        let (what, byte, code, kind) = (*what, *byte, error.raw_os_error(), error.kind());
        // Without the lock, which who fails to write waits for: a text takes memory.
        drop(failure);
        let error = code.map_or_else(|| kind.into(), io::Error::from_raw_os_error);
        Some(format!("{what} at byte {byte}: {error}"))
    }

    /// Tries writeback again after a failure.
    pub fn resume_writeback(&self) {
        let mut failure = lock(&self.writeback.failure);
        *failure = None;
        self.writeback.has_failed.store(false, Ordering::Relaxed);
        drop(failure);
        self.ring();
    }

    /// Writes back segment after segment until `enough`, given the bytes that are still in flight
    /// and leave the pool if all goes well, or until objects of `bytes_max` were written, or
    /// nothing can be. Before each, `top_up` makes ready what stores need, which may take memory:
    /// without the writer's lock, which stores may be waiting for.
    pub(crate) fn write_back(
        &self,
        bytes_max: usize,
        enough: impl Fn(usize) -> bool,
        top_up: impl Fn(),
    ) {
        let mut left = bytes_max;
        while left > 0 && !enough(0) && self.writeback_works() {
            top_up();
            let mut writer = lock(&self.writeback.writer);
            let goes_on = if enough(writer.in_flight.len() * SEGMENT_BYTES) {
                self.complete(&mut writer, true)
            } else {
                let filled = self.write_segment(&mut writer);
                left = left.saturating_sub(filled.bytes);
                filled.is_full && self.writeback_works()
            };
            if !goes_on {
                break;
            }
        }
        self.settle(&mut lock(&self.writeback.writer));
    }

    /// Writes one segment back, for a store that needs room; whether pages left the pool.
    pub(crate) fn write_back_one(&self) -> bool {
        if !self.writeback_works() {
            return false;
        }
        let written = if self.slots.is_short() { None } else { self.write_own_segment() };
        written.unwrap_or_else(|| self.write_as_writer())
    }

    /// Fills a segment and writes it beside others that do; whether pages left the pool. `None` if
    /// there is no segment to be had without cleaning.
    fn write_own_segment(&self) -> Option<bool> {
        let before = self.pool.bytes();
        let mut own = self.writeback.buffers.lock_here();
        if self.pool.bytes() < before {
            return Some(true); // Whoever had the buffer made room.
        }
        let segment = self.take_space(|slots| slots.take_segment(RESERVED))?;
        let buffer = own.0.take().expect("whoever has the lock puts it back");
        let mut open = self.open_segment(segment, buffer);
        self.fill(&mut open);
        let written = if open.filled > 0 {
            self.write(&mut open)
        } else {
            self.slots.give_segment(segment, Use::Open);
            false
        };
        own.0 = Some(open.buffer);
        Some(written)
    }

    fn open_segment(&self, segment: Segment, buffer: Buffer) -> Open {
        let generation = self.seal.as_ref().map(Seal::next);
        Open { segment, buffer, filled: 0, generation }
    }

    /// Writes a segment and waits for it; whether pages left the pool.
    fn write(&self, open: &mut Open) -> bool {
        let bytes = open.finish(self.seal.as_ref(), self.backing.block_bytes());
        match self.backing.write(open.segment.start(), &open.buffer[..bytes]) {
            Ok(()) => {
                self.counters.add(BackingBytesWritten, bytes as i64);
                self.commit(open.segment, open.generation, &open.buffer) > 0
            }
            Err(error) => {
                self.give_up(open.segment, &open.buffer, error);
                false
            }
        }
    }

    /// The same as the one writer, which cleans where that is needed.
    fn write_as_writer(&self) -> bool {
        let before = self.pool.bytes();
        let mut writer = lock(&self.writeback.writer);
        if self.pool.bytes() < before {
            return true; // Whoever held the writer made room.
        }
        let written = self.counters.get(WrittenBack);
        self.write_segment(&mut writer);
        self.settle(&mut writer);
        self.counters.get(WrittenBack) > written
    }

    /// Fills a segment with the oldest pages and submits it.
    fn write_segment(&self, writer: &mut Writer) -> Filled {
        let nothing = Filled { bytes: 0, is_full: false };
        if !self.clean_if_short(writer) || !self.open(writer, RESERVED) {
            self.counters.increment(BackingFull);
            return nothing;
        }
        let Some(open) = &mut writer.open else { return nothing };
        let filled = self.fill(open);
        self.submit(writer);
        filled
    }

    /// Makes sure that a segment is open; `reserved` free ones are left alone.
    fn open(&self, writer: &mut Writer, reserved: usize) -> bool {
        if writer.open.is_some() {
            return true;
        }
        while writer.buffers.is_empty() && self.complete(writer, true) {}
        let Some(buffer) = writer.buffers.pop() else { return false };
        let Some(segment) = self.slots.take_segment(reserved) else {
            writer.buffers.push(buffer);
            return false;
        };
        writer.open = Some(self.open_segment(segment, buffer));
        true
    }

    /// Copies the oldest pages into the open segment, marking their entries.
    fn fill(&self, open: &mut Open) -> Filled {
        let mut bytes = 0;
        // Each listed entry is spared at most once a call.
        let lists = self.index.lists();
        let mut chances = lists.len(List::Cold) + lists.len(List::Lru);
        let view = self.index.view();
        // Once there is none on the lists of the coldest, they are not asked for each page.
        let mut list = List::Cold;
        loop {
            let Some((locked, object)) = view.take_oldest(list) else {
                if list == List::Lru {
                    break;
                }
                list = List::Lru;
                continue;
            };
            if locked.word().is_referenced() && chances > 0 {
                chances -= 1;
                locked.spared();
                continue;
            }
            let Some(place) = open.place(object.form) else {
                locked.returned();
                return Filled { bytes, is_full: true };
            };
            let Header { checksum, .. } = self.pool.header(object.handle);
            let owner = locked.key();
            let record = Record { owner, checksum, form: object.form, moved_from: None };
            self.pool.read(object.handle, open.append(record));
            bytes += usize::from(object.form.bytes);
            locked.in_flight(place.0);
        }
        Filled { bytes, is_full: false }
    }

    /// Starts the write of the open segment, if there is anything in it.
    fn submit(&self, writer: &mut Writer) {
        let Some(mut open) = writer.open.take_if(|open| open.filled > 0) else { return };
        let bytes = open.finish(self.seal.as_ref(), self.backing.block_bytes());
        let Open { segment, buffer, generation, .. } = open;
        self.backing.submit(Write { offset: segment.start(), buffer, bytes });
        writer.in_flight.push(InFlight { segment, generation });
    }

    /// Cleans where space is short, and takes some then.
    pub(crate) fn clean_for<T>(&self, take: impl FnOnce(&Slots) -> Option<T>) -> Option<T> {
        let mut writer = lock(&self.writeback.writer);
        let cleaned = self.clean_if_short(&mut writer);
        let taken = cleaned.then(|| take(&self.slots)).flatten();
        self.settle(&mut writer);
        taken
    }

    /// Writes what was copied and waits for every write in flight. Whoever writes does so at last:
    /// another may have taken over the writer in between, and then there is less to wait for.
    fn settle(&self, writer: &mut Writer) {
        if self.writeback_works() {
            self.submit(writer);
        }
        while self.complete(writer, true) {}
        // Empty; or the backing has failed, and the pages stay where they were copied from.
        if let Some(Open { segment, buffer, .. }) = writer.open.take() {
            self.slots.give_segment(segment, Use::Open);
            writer.buffers.push(buffer);
        }
        self.finish_cleaning(writer);
    }

    /// Takes one write that ended and commits it; `false` when there is none (yet).
    fn complete(&self, writer: &mut Writer, wait: bool) -> bool {
        if writer.in_flight.is_empty() {
            return false;
        }
        let Some(Completion { write, result }) = self.backing.complete(wait) else { return false };
        let segment = Segment::of(Place::at(write.offset));
        let written = writer.in_flight.iter().position(|write| write.segment == segment);
        let written = written.expect("what completes was submitted");
        let InFlight { generation, .. } = writer.in_flight.swap_remove(written);
        match result {
            Ok(()) => {
                self.counters.add(BackingBytesWritten, write.bytes as i64);
                self.commit(segment, generation, &write.buffer);
            }
            Err(error) => self.give_up(segment, &write.buffer, error),
        }
        writer.buffers.push(write.buffer);
        true
    }

    /// Makes the records of a written segment what their entries mean; how many still wanted it.
    fn commit(&self, segment: Segment, generation: Option<Generation>, buffer: &[u8]) -> usize {
        let place = |offset: usize| Place::at(segment.start() + offset as u64);
        let committed = records(buffer, self.slots.layout)
            .filter(|(offset, record)| self.commit_record(place(*offset), generation, *record))
            .count();
        if self.slots.segments.written(segment) {
            self.slots.give_segment(segment, Use::Open);
        }
        committed
    }

    fn commit_record(&self, place: Place, generation: Option<Generation>, record: Record) -> bool {
        let key = record.owner;
        let extent = Extent { place, form: record.form };
        let view = self.index.view();
        let Some(locked) = view.lock(key) else { return false };
        let known = match locked.state() {
            State::Pooled(_) => locked.is_in_flight_as(place.0),
            // A segment that is being cleaned takes no new records, so an entry still in it is the
            // one that was copied.
            State::Placed(at) => {
                record.moved_from == Some(Segment::of(at.place))
                    && self.slots.segments.state(Segment::of(at.place)) == Use::Cleaning
            }
            State::Absent | State::Filled(_) | State::Shared(_) | State::Member(_) => false,
        };
        if !known {
            return false;
        }
        if record.moved_from.is_none() {
            self.counters.increment(WrittenBack);
        }
        self.slots.add(extent);
        let proof = generation.map_or(record.checksum.into(), |generation| generation.0);
        self.dispose(match record.moved_from {
            None => locked.landed(extent, proof),
            Some(_) => locked.moved_on_backing(extent, proof),
        });
        true
    }

    /// A write failed: its pages stay in the pool, the oldest again, and writeback stops.
    fn give_up(&self, segment: Segment, buffer: &[u8], error: io::Error) {
        self.fail(Failure { what: "write", byte: segment.start(), error });
        for (offset, record) in records(buffer, self.slots.layout) {
            let place = Place::at(segment.start() + offset as u64);
            let view = self.index.view();
            if let Some(locked) = view.lock(record.owner)
                && locked.is_in_flight_as(place.0)
            {
                locked.returned();
            }
        }
        self.slots.give_segment(segment, Use::Open);
    }

    pub(crate) fn fail(&self, failure: Failure) {
        self.counters.increment(WritebackFail);
        // Under the lock: it has stopped exactly while there is a reason.
        let mut reason = lock(&self.writeback.failure);
        *reason = Some(failure);
        self.writeback.has_failed.store(true, Ordering::Relaxed);
    }

    /// Cleans until more than the reserved segments are free; `false` when there is nothing to win.
    fn clean_if_short(&self, writer: &mut Writer) -> bool {
        if self.slots.is_short() {
            self.slots.drain();
            self.settle(writer);
        }
        while self.slots.is_short() {
            let live = self.slots.segments.live_bytes();
            let hopeless = !self.slots.cleaning_can_win(live) || live > writer.hopeless_above;
            if !self.writeback_works() || hopeless && !self.pack_singles() {
                return false;
            }
            if !hopeless && !self.clean_one(writer, live) {
                return false;
            }
        }
        writer.hopeless_above = u64::MAX;
        true
    }

    /// Cleans the cheapest segment, or sees to it that what was cleaned is free.
    fn clean_one(&self, writer: &mut Writer, live: u64) -> bool {
        let worth = |victim: &Segment| self.slots.segments.live(*victim) <= WORTH_CLEANING;
        let victim = self.slots.segments.cheapest().filter(worth);
        let room = writer.cleaning.len() < writer.cleaning.capacity();
        if let (Some(victim), true) = (victim, room) {
            return self.clean(writer, victim);
        }
        let cleaned = self.counters.get(SegmentsCleaned);
        self.settle(writer);
        let won_nothing = victim.is_none() || self.counters.get(SegmentsCleaned) == cleaned;
        // What was just written is itself the only one left worth cleaning, or what lives in the
        // others cannot be read: stop, and do not try again before something has died.
        if won_nothing && self.slots.is_short() && !self.pack_singles() {
            writer.hopeless_above = live.saturating_sub(SEGMENT_BYTES as u64);
            return false;
        }
        true
    }

    /// Copies what is live in a segment elsewhere; it is free once that is written.
    fn clean(&self, writer: &mut Writer, victim: Segment) -> bool {
        let Some(mut content) = writer.cleaned.take() else { return false };
        let cleaned = if self.slots.segments.turn(victim, Use::Written, Use::Cleaning) {
            let copied = match self.backing.read(victim.start(), &mut content) {
                Ok(()) => self.copy_live(writer, victim, &mut content),
                Err(error) => {
                    self.fail(Failure { what: "read", byte: victim.start(), error });
                    false
                }
            };
            writer.cleaning.push(victim);
            copied
        } else {
            true // The last record in it died just now: it is free.
        };
        writer.cleaned = Some(content);
        cleaned
    }

    /// Copies a segment's live records into open ones. What cannot be opened stays where it is: it
    /// is an error to whoever loads it, and may be whole the next time.
    fn copy_live(&self, writer: &mut Writer, victim: Segment, content: &mut [u8]) -> bool {
        let (mut next, layout) = (0, self.slots.layout);
        while let Some(found) = record_at(content, next, layout) {
            let offset = next;
            next += layout.record_bytes(found.form);
            // Before the entry is locked: a commit may have to lock the same one.
            if writer.open.as_ref().is_some_and(|open| open.place(found.form).is_none()) {
                self.settle(writer);
            }
            if !self.writeback_works() || !self.open(writer, 0) {
                return false;
            }
            let Some(open) = &mut writer.open else { return false };
            let extent =
                Extent { place: Place::at(victim.start() + offset as u64), form: found.form };
            let view = self.index.view();
            let Some(locked) = view.lock(found.owner) else { continue };
            if locked.state() == State::Placed(extent) {
                let bytes = &mut content[offset..][..layout.bytes(found.form)];
                if let Ok(held) = self.open_held(found.owner, extent, locked.proof(), bytes) {
                    let checksum = held.checksum;
                    let record = Record { checksum, moved_from: Some(victim), ..found };
                    open.append(record).copy_from_slice(held.object);
                }
            }
        }
        true
    }

    /// Frees the segments whose last record has been moved, and leaves others as they were.
    /// No copy is on its way.
    fn finish_cleaning(&self, writer: &mut Writer) {
        for victim in writer.cleaning.drain(..) {
            if self.slots.segments.written(victim) {
                self.slots.give_segment(victim, Use::Open);
                self.counters.increment(SegmentsCleaned);
            }
        }
    }
}
