//! Moves the oldest pages to the backing, compressed as they are and many to a write.
//!
//! ```text
//! pop the LRU → lock, look again → copy the object into the open segment, mark the entry → unlock
//!   … segment full → submit → (stores, loads, invalidates go on) → written:
//! for each record: lock → still the same entry? → it is on the backing, free the object → unlock
//! ```
//! While a write is in flight the object stays in the pool, where loads read it, and the entry has
//! the place of the write. A newer store or an invalidate removes that place, so the commit does
//! not recognise the entry, and the record is dead.
//!
//! A store that needs space fills a segment of its own and writes it, beside other stores that do
//! the same. The maintaining thread has several writes in flight. If free segments run short, the
//! maintaining thread also cleans (`cleaning`), under the writer's lock. A store takes this lock
//! only when it needs cleaning too.

mod cleaning;

use super::Cache;
use crate::backing::record::{HEADER_BYTES, Layout, Record, records, seal_records};
use crate::backing::seal::{Generation, Seal};
use crate::backing::segments::Use;
use crate::backing::shape::{SEGMENT_BYTES, SEGMENT_PAYLOAD_BYTES, Segment};
use crate::backing::slots::RESERVED;
use crate::backing::{Buffer, Completion, Write};
use crate::config::Config;
use crate::counters::Counter::*;
use crate::ids::Place;
use crate::index::{List, State};
use crate::object::{Extent, Form};
use crate::percpu::PerCpu;
use crate::pool::Header;
use crate::sync::{Mutex, lock};
use cleaning::Cleaning;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// The state of writeback.
pub(crate) struct Writeback {
    writer: Mutex<SegmentWriter>,
    /// Bytes of the writer's buffers.
    writer_bytes: usize,
    /// The buffers of stores that write a segment.
    buffers: PerCpu<StoreBuffer>,
    /// The reason why writeback stopped, if it did.
    failure: Mutex<Option<FailedRequest>>,
    /// A write to the backing failed: nothing is written until writeback is resumed.
    has_failed: AtomicBool,
}

impl Writeback {
    /// `None` if there is no backing.
    pub(crate) fn new(config: Option<&Config>) -> io::Result<Self> {
        let writer = config.map_or_else(
            || Ok(SegmentWriter::idle()),
            |config| SegmentWriter::new(config.pool_bytes_max),
        )?;
        let buffers = config.map_or(0, |config| config.cpus_apart().min(StoreBuffer::MAX));
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

    /// True if writeback stopped, and waits to be resumed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Makes the buffer of a CPU that comes up. Fails without memory.
    pub(crate) fn start_cpu(&self, cpu: usize) -> io::Result<()> {
        self.buffers.start(cpu, StoreBuffer::new)
    }

    /// A CPU goes. A thread that writes from the CPU's buffer keeps the buffer until the write is
    /// done.
    pub(crate) fn stop_cpu(&self, cpu: usize) {
        self.buffers.stop(cpu, |_| {});
    }

    /// CPUs with a buffer.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn cpus_count(&self) -> usize {
        self.buffers.count()
    }
}

/// The maintaining thread's buffers and segments.
struct SegmentWriter {
    buffers: Vec<Buffer>,
    /// The buffer for a segment that is cleaned.
    cleaned: Option<Buffer>,
    /// The segment being filled.
    open: Option<Open>,
    in_flight: Vec<InFlight>,
    /// Segments whose copies are in flight. These segments are not reused before all writes have
    /// ended, because a commit recognises an entry by its old place. That place must not have
    /// another page yet.
    cleaning: Vec<Segment>,
    /// With more live bytes than this, cleaning has won nothing.
    hopeless_above: u64,
}

/// The buffer of a store that writes a segment; `None` during the write.
struct StoreBuffer(Option<Buffer>);

impl StoreBuffer {
    /// The maximum number of such buffers. With more of them, stores would wait for the device
    /// rather than for a buffer.
    const MAX: usize = 16;

    fn new() -> io::Result<Self> {
        Ok(Self(Some(Buffer::new(SEGMENT_BYTES)?)))
    }
}

/// A request to the backing that failed.
pub(crate) struct FailedRequest {
    pub(crate) what: &'static str,
    pub(crate) byte: u64,
    pub(crate) error: io::Error,
}

struct Open {
    segment: Segment,
    buffer: Buffer,
    filled: usize,
    /// The generation of its records' seals.
    generation: Option<Generation>,
}

/// A segment that is being written.
struct InFlight {
    segment: Segment,
    generation: Option<Generation>,
}

impl SegmentWriter {
    /// Makes the buffers for a pool of at most `pool_bytes_max`.
    fn new(pool_bytes_max: u64) -> io::Result<Self> {
        // Segments that the thread fills or writes at the same time.
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

    /// Bytes of its idle buffers.
    fn bytes(&self) -> usize {
        (self.buffers.len() + usize::from(self.cleaned.is_some())) * SEGMENT_BYTES
    }

    /// Makes a writer for a cache without a backing.
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

    /// The place of the next record of `form`, if it fits.
    fn place(&self, form: Form) -> Option<Place> {
        (self.filled + self.layout().record_bytes(form) <= SEGMENT_PAYLOAD_BYTES)
            .then(|| Place::at(self.segment.start() + self.filled as u64))
    }

    /// Appends a record that fits. Returns the part of the buffer for its object.
    fn append(&mut self, record: Record) -> &mut [u8] {
        let start = self.filled;
        record.write(&mut self.buffer[start..]);
        self.filled += self.layout().record_bytes(record.form);
        let object = start + HEADER_BYTES;
        &mut self.buffer[object..object + usize::from(record.form.bytes)]
    }

    /// Completes the records and seals them. Called once for each segment. Returns the number of
    /// bytes to write.
    fn finish(&mut self, seal: Option<&Seal>, block_bytes: usize) -> usize {
        if let (Some(seal), Some(generation)) = (seal, self.generation) {
            let records = &mut self.buffer[..self.filled];
            seal_records(seal, generation, self.segment.start(), records);
        }
        let end = (self.filled + HEADER_BYTES).min(SEGMENT_BYTES).next_multiple_of(block_bytes);
        // Clears the rest of the last block: the buffer may have objects that an earlier write,
        // which failed, did not seal.
        self.buffer[self.filled..end].fill(0);
        end
    }
}

/// The result of filling the open segment.
struct Filled {
    /// Bytes of the objects that were copied.
    bytes: usize,
    /// True if no further record fits. Otherwise there is no page left to write.
    is_full: bool,
}

impl Cache {
    /// True if there is a backing that has not failed.
    pub(crate) fn writeback_works(&self) -> bool {
        self.slots.segments.count() > 0 && !self.writeback.has_failed()
    }

    /// The reason why writeback stopped, if it did. [`Self::resume_writeback`] tries again.
    pub fn writeback_failure(&self) -> Option<String> {
        let failure = lock(&self.writeback.failure);
        let FailedRequest { what, byte, error } = failure.as_ref()?;
        let (what, byte, code, kind) = (*what, *byte, error.raw_os_error(), error.kind());
        // Unlocks first: the text takes memory, and a thread whose write fails waits for the lock.
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

    /// Writes back segment after segment until `enough` is true, objects of `bytes_max` were
    /// written, or nothing is left to write. `enough` gets the bytes in flight that will leave the
    /// pool. Before each segment `top_up` prepares memory for stores. It may allocate, so it runs
    /// without the writer's lock, which stores may wait for.
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
                self.write_segment(&mut writer).is_none_or(|filled| {
                    left = left.saturating_sub(filled.bytes);
                    filled.is_full && self.writeback_works()
                })
            };
            if !goes_on {
                break;
            }
        }
        self.flush(&mut lock(&self.writeback.writer));
    }

    /// Writes one segment back, for a store that needs space; true if pages left the pool.
    pub(crate) fn write_back_one(&self) -> bool {
        if !self.writeback_works() {
            return false;
        }
        let written = if self.slots.is_short() { None } else { self.write_own_segment() };
        written.unwrap_or_else(|| self.write_as_writer())
    }

    /// Fills a segment and writes it beside other stores; true if pages left the pool. `None` if no
    /// segment is free without cleaning.
    fn write_own_segment(&self) -> Option<bool> {
        let before = self.pool.bytes();
        let mut own = self.writeback.buffers.lock_here();
        if self.pool.bytes() < before {
            return Some(true); // The thread that had the buffer made space.
        }
        let segment = self.take_space(|slots| slots.take_segment(RESERVED))?;
        let buffer = own.0.take().expect("the thread with the lock puts it back");
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

    /// Writes a segment and waits for it; true if pages left the pool.
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

    /// Writes with the writer's lock, and cleans if that is needed.
    fn write_as_writer(&self) -> bool {
        let before = self.pool.bytes();
        let mut has_begun = false;
        loop {
            let mut writer = lock(&self.writeback.writer);
            if self.pool.bytes() < before {
                // The thread that had the writer made space.
                if has_begun {
                    self.flush(&mut writer);
                }
                return true;
            }
            let written = self.counters.get(WrittenBack);
            if self.write_segment(&mut writer).is_some() {
                self.flush(&mut writer);
                return self.counters.get(WrittenBack) > written;
            }
            has_begun = true;
        }
    }

    /// Fills a segment with the oldest pages and submits it. `None` if cleaning has not made the
    /// space yet; the next call continues it.
    fn write_segment(&self, writer: &mut SegmentWriter) -> Option<Filled> {
        let nothing = Some(Filled { bytes: 0, is_full: false });
        let cleaning = self.clean_if_short(writer);
        if cleaning == Cleaning::Unfinished {
            return None;
        }
        if cleaning == Cleaning::Hopeless || !self.open(writer, RESERVED) {
            self.counters.increment(BackingFull);
            return nothing;
        }
        let Some(open) = &mut writer.open else { return nothing };
        let filled = self.fill(open);
        self.submit(writer);
        Some(filled)
    }

    /// Makes sure that a segment is open; `reserved` free segments stay.
    fn open(&self, writer: &mut SegmentWriter, reserved: usize) -> bool {
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
        // Once the list of the coldest is empty, it is not tried for each page.
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

    /// Starts the write of the open segment, if it is not empty.
    fn submit(&self, writer: &mut SegmentWriter) {
        let Some(mut open) = writer.open.take_if(|open| open.filled > 0) else { return };
        let bytes = open.finish(self.seal.as_ref(), self.backing.block_bytes());
        let Open { segment, buffer, generation, .. } = open;
        self.backing.submit(Write { offset: segment.start(), buffer, bytes });
        writer.in_flight.push(InFlight { segment, generation });
    }

    /// Writes the copied records and waits for every write in flight. If another thread was the
    /// writer since, there is less to wait for.
    fn flush(&self, writer: &mut SegmentWriter) {
        if self.writeback_works() {
            self.submit(writer);
        }
        while self.complete(writer, true) {}
        // The segment is empty; or the backing has failed, and the pages stay at their old places.
        if let Some(Open { segment, buffer, .. }) = writer.open.take() {
            self.slots.give_segment(segment, Use::Open);
            writer.buffers.push(buffer);
        }
        self.finish_cleaning(writer);
    }

    /// Takes one write that ended and commits it; `false` when none has ended.
    fn complete(&self, writer: &mut SegmentWriter, wait: bool) -> bool {
        if writer.in_flight.is_empty() {
            return false;
        }
        let Some(Completion { write, result }) = self.backing.complete(wait) else { return false };
        let segment = Segment::of(Place::at(write.offset));
        let written = writer.in_flight.iter().position(|write| write.segment == segment);
        let written = written.expect("only submitted writes complete");
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

    /// Makes the entries of a written segment's records refer to these records. Returns the number
    /// of entries that were still the same.
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
            // A segment that is being cleaned takes no new records, so the entry is the copied one.
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

    /// After a failed write the pages stay in the pool, as the oldest again, and writeback stops.
    fn give_up(&self, segment: Segment, buffer: &[u8], error: io::Error) {
        self.fail(FailedRequest { what: "write", byte: segment.start(), error });
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

    pub(crate) fn fail(&self, failure: FailedRequest) {
        self.counters.increment(WritebackFail);
        // Set under the lock, so that writeback is stopped exactly while there is a reason.
        let mut reason = lock(&self.writeback.failure);
        *reason = Some(failure);
        self.writeback.has_failed.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    /// A write that failed leaves objects in its buffer that were never sealed.
    #[test]
    fn old_bytes_of_a_buffer_are_not_written() {
        let mut buffer = Buffer::new(SEGMENT_BYTES).unwrap();
        buffer.fill(0xaa);
        let segment = Segment::of(Place::at(0));
        let mut open = Open { segment, buffer, filled: 100, generation: None };
        let bytes = open.finish(None, 4096);
        assert_eq!(bytes, 4096);
        assert!(open.buffer[..100].iter().all(|byte| *byte == 0xaa));
        assert!(open.buffer[100..bytes].iter().all(|byte| *byte == 0));
    }
}
