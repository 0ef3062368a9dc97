//! The backing: segments on a local disk and at a store.
//!
//! ```text
//! write    to a local slot → the background thread copies it to the store
//!          no slot is free → that of the oldest segment that replicas have → else wait, else error
//! read     from the copy that answers faster lately → the other one
//!          only the store has it → its servers in turn, until the timeout
//! ```
//! With 0 copies each segment keeps its slot, and the store is a second, faster copy: losing the
//! store costs time only. With 1 or 2 copies a segment may be at the store alone, after that many
//! replicas have acknowledged it. Then there is more space than the local disk has. Without a disk,
//! a write waits for the store.
//!
//! No thread that reads waits for a write. The lock `space` is held for a few instructions, or for
//! a scan of the table when a segment gives its slot up.

use crate::store::{Got, Put, Store, lock};
use crate::table::{LOCAL, NONE, PAGES, REMOTE, SegmentTable, WRITING, number, word};
use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use uzswap_engine::backing::{
    Backing, Buffer, Completion, RemoteFigures, SEGMENT_BYTES, SEGMENT_PAYLOAD_BYTES, Write,
};
use uzswap_engine::times::Counted;

/// How long a write waits for a slot before it fails.
const SLOT_PATIENCE: Duration = Duration::from_secs(5);
/// Longer reads are for cleaning, which no program waits for.
const SHORT_READ: usize = 64 << 10;
/// One read in this many goes to the slower copy, to measure its time.
const PROBE: u64 = 64;
/// The pause between attempts to read a segment that only the store has.
const PAUSE: Duration = Duration::from_millis(20);
/// The maximum number of removed segments that are still to be removed at the store. Further
/// segments expire at the store.
pub(crate) const DEAD_MAX: usize = 1 << 16;

thread_local! {
    /// True if the store answered this thread's last read.
    static WAS_REMOTE: Cell<bool> = const { Cell::new(false) };
}

/// The state of the background thread.
pub(crate) struct UpkeepState {
    /// The segment that is being copied.
    pub(crate) buffer: Buffer,
    pub(crate) shown: Option<Instant>,
    pub(crate) renewed: Instant,
    pub(crate) paused: Option<Instant>,
}

impl UpkeepState {
    /// Errors: no memory.
    pub(crate) fn new() -> io::Result<Self> {
        let buffer = Buffer::new(SEGMENT_BYTES)?;
        Ok(Self { buffer, shown: None, renewed: Instant::now(), paused: None })
    }
}

/// Local slots.
pub(crate) struct LocalSpace {
    pub(crate) free: Vec<u32>,
    pub(crate) used: usize,
    /// The maximum number of slots in use. A fork may use more.
    pub(crate) limit: usize,
}

/// The backing. Clones share it.
#[derive(Clone)]
pub struct Tiers(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) local: Box<dyn Backing>,
    pub(crate) copies: u8,
    pub(crate) table: SegmentTable,
    pub(crate) space: Mutex<LocalSpace>,
    /// The segment in each slot.
    pub(crate) owners: Mutex<Vec<u32>>,
    /// Rung when a slot may have become free.
    pub(crate) room: Condvar,
    /// Numbers of segments to remove at the store.
    pub(crate) dead: Mutex<Vec<u64>>,
    /// Writes that were complete when they were submitted.
    pub(crate) done: Mutex<Vec<Completion>>,
    /// Bytes of segments at the store.
    pub(crate) bytes: AtomicU64,
    pub(crate) bytes_max: u64,
    pub(crate) next: AtomicU64,
    pub(crate) has_failed: AtomicBool,
    pub(crate) has_recovered: AtomicBool,
    /// True if the process is ending, and its segments may be gone.
    pub(crate) is_ending: AtomicBool,
    /// The process that owns the backing. A child of `vfork` runs in its parent's memory.
    pub(crate) process: AtomicU32,
    /// Mean times of the last reads.
    pub(crate) remote_ns: AtomicU64,
    pub(crate) local_ns: AtomicU64,
    pub(crate) turn: AtomicU64,
    pub(crate) work: Mutex<UpkeepState>,
}

fn gone() -> io::Error {
    rustix::io::Errno::NOENT.into()
}

impl Inner {
    fn has_disk(&self) -> bool {
        self.local.bytes() > 0
    }

    pub(crate) fn local_offset(slot: u32, offset: u64) -> u64 {
        u64::from(slot) * SEGMENT_BYTES as u64 + offset % SEGMENT_BYTES as u64
    }

    /// Notes that the store's copy of a segment is not used any more.
    pub(crate) fn drop_remote(&self, old: u64, length: usize) {
        if old & REMOTE == 0 {
            return;
        }
        self.bytes.fetch_sub(length as u64, Relaxed);
        self.remove_later(number(old));
    }

    pub(crate) fn remove_later(&self, number: u64) {
        let mut dead = lock(&self.dead);
        if dead.len() < DEAD_MAX {
            dead.push(number);
        }
    }

    /// A slot for a segment to write. Waits a limited time for a free slot.
    fn take_slot(&self) -> Option<u32> {
        let until = Instant::now() + SLOT_PATIENCE;
        let mut space = lock(&self.space);
        loop {
            if space.used < space.limit
                && let Some(slot) = space.free.pop()
            {
                space.used += 1;
                return Some(slot);
            }
            // A fork may use more slots than the limit.
            if let Some(slot) = self.vacate() {
                return Some(slot);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.store.is_fit() {
                return None;
            }
            self.store.ring();
            let waited = self.room.wait_timeout(space, left.min(Duration::from_millis(100)));
            space = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the slot from the oldest segment that the store has too.
    fn vacate(&self) -> Option<u32> {
        loop {
            let segment = self.table.oldest(LOCAL | REMOTE)?;
            let old = self.table.get(segment);
            let slot = self.table.slot(segment);
            if old & (LOCAL | REMOTE | PAGES) == LOCAL | REMOTE
                && self.table.change(segment, old, old & !LOCAL)
            {
                self.table.set_place(segment, NONE, self.table.length(segment));
                return Some(slot);
            }
        }
    }

    /// True if a write finds a slot now.
    pub(crate) fn has_room(&self) -> bool {
        let space = lock(&self.space);
        space.used < space.limit || self.table.oldest(LOCAL | REMOTE).is_some()
    }

    /// Begins to write a segment. Returns its number and its slot.
    fn begin(&self, segment: usize, bytes: usize) -> io::Result<(u64, u32)> {
        let slot = match self.copies {
            0 => segment as u32,
            _ => self.take_slot().ok_or_else(|| {
                self.has_failed.store(true, Relaxed);
                io::Error::from(rustix::io::Errno::NOSPC)
            })?,
        };
        let number = self.next.fetch_add(1, Relaxed);
        let length = self.table.length(segment);
        self.table.set_place(segment, slot, bytes.min(SEGMENT_PAYLOAD_BYTES));
        let old = self.table.swap(segment, word(number, WRITING));
        self.drop_remote(old, length);
        lock(&self.owners)[slot as usize] = segment as u32;
        Ok((number, slot))
    }

    fn end(&self, segment: usize, result: &io::Result<()>) {
        let number = number(self.table.get(segment));
        let flags = if result.is_ok() { LOCAL } else { 0 };
        if self.table.change(segment, word(number, WRITING), word(number, flags)) && flags != 0 {
            self.store.ring();
        }
        // After an error the engine frees the segment, and with it the slot.
    }

    /// Writes a segment to the store, if there is no local disk.
    fn write_far(&self, segment: usize, bytes: &[u8]) -> io::Result<()> {
        if !self.store.is_fit() {
            self.has_failed.store(true, Relaxed);
            return Err(rustix::io::Errno::TIMEDOUT.into());
        }
        let bytes = &bytes[..bytes.len().min(SEGMENT_PAYLOAD_BYTES)];
        let number = self.next.fetch_add(1, Relaxed);
        let old = self.table.swap(segment, word(number, WRITING));
        self.drop_remote(old, self.table.length(segment));
        self.table.set_place(segment, NONE, bytes.len());
        let put = self.store.put(&mut self.store.keeper(), number, bytes, self.copies);
        if matches!(put, Put::Done(copies) if copies >= self.copies) {
            self.bytes.fetch_add(bytes.len() as u64, Relaxed);
            self.table.swap(segment, word(number, REMOTE));
            return Ok(());
        }
        self.table.swap(segment, 0);
        self.remove_later(number);
        self.has_failed.store(true, Relaxed);
        Err(match put {
            Put::Full => rustix::io::Errno::NOSPC.into(),
            Put::Done(_) => io::Error::other("fewer replicas have it than --remote-copies says"),
            Put::Down => rustix::io::Errno::TIMEDOUT.into(),
        })
    }

    fn read_local(&self, slot: u32, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let began = Instant::now();
        let read = self.local.read(Self::local_offset(slot, offset), out);
        average(&self.local_ns, began);
        WAS_REMOTE.set(false);
        read
    }

    fn read_remote(&self, segment: usize, old: u64, offset: u64, out: &mut [u8]) -> Got {
        let began = Instant::now();
        let at = (offset % SEGMENT_BYTES as u64) as usize;
        // Records end before the segment's length. A read of whole blocks may extend beyond it.
        let (there, beyond) =
            out.split_at_mut(self.table.length(segment).saturating_sub(at).min(out.len()));
        beyond.fill(0);
        let got = match there.is_empty() {
            true => Got::Whole,
            false => self.store.get(number(old), at, there),
        };
        average(&self.remote_ns, began);
        WAS_REMOTE.set(got == Got::Whole);
        got
    }

    /// Forgets a copy at the store that is missing or damaged.
    fn forget_remote(&self, segment: usize, old: u64) {
        if self.table.change(segment, old, old & !REMOTE) {
            self.drop_remote(old, self.table.length(segment));
            self.store.ring();
        }
    }

    /// Reads from a segment that only the store has.
    pub(crate) fn read_far(
        &self,
        segment: usize,
        old: u64,
        offset: u64,
        out: &mut [u8],
    ) -> io::Result<()> {
        let until = Instant::now() + self.store.address().timeout;
        loop {
            match self.read_remote(segment, old, offset, out) {
                Got::Whole => return Ok(()),
                _ if self.is_ending.load(SeqCst) => std::thread::sleep(PAUSE),
                Got::Lost => return Err(gone()),
                Got::Down if Instant::now() >= until => {
                    return Err(rustix::io::Errno::TIMEDOUT.into());
                }
                Got::Down => std::thread::sleep(PAUSE),
            }
        }
    }

    /// True if the store is to be read first.
    fn prefers_remote(&self, bytes: usize) -> bool {
        if !self.store.is_up() || bytes > SHORT_READ {
            return false;
        }
        let is_faster = self.remote_ns.load(Relaxed) <= self.local_ns.load(Relaxed);
        is_faster != self.turn.fetch_add(1, Relaxed).is_multiple_of(PROBE)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_by(offset, out, |bytes| self.prefers_remote(bytes))
    }

    /// Reads from the store if `prefers_remote` returns true for the number of bytes, or if there
    /// is no other copy.
    fn read_by(
        &self,
        offset: u64,
        out: &mut [u8],
        prefers_remote: impl Fn(usize) -> bool,
    ) -> io::Result<()> {
        let segment = (offset / SEGMENT_BYTES as u64) as usize;
        loop {
            let old = self.table.get(segment);
            if old & LOCAL == 0 {
                return match old & REMOTE {
                    0 => Err(gone()),
                    _ => self.read_far(segment, old, offset, out),
                };
            }
            if old & REMOTE != 0 && prefers_remote(out.len()) {
                match self.read_remote(segment, old, offset, out) {
                    Got::Whole => return Ok(()),
                    Got::Lost => self.forget_remote(segment, old),
                    Got::Down => {}
                }
                // The segment may have given the slot up by now.
                if self.table.get(segment) & LOCAL == 0 {
                    continue;
                }
            }
            let read = self.read_local(self.table.slot(segment), offset, out);
            fence(SeqCst);
            if self.table.get(segment) & (LOCAL | PAGES) == old & (LOCAL | PAGES) {
                return read;
            }
        }
    }
}

/// Adds the time since `began` to a mean of the last few reads.
fn average(mean: &AtomicU64, began: Instant) {
    let ns = began.elapsed().as_nanos() as u64;
    let before = mean.load(Relaxed);
    let after = if before == u64::MAX || before == 0 { ns } else { before - before / 8 + ns / 8 };
    mean.store(after, Relaxed);
}

impl Tiers {
    /// The descriptors that must stay open.
    pub fn descriptors(&self) -> Vec<i32> {
        self.0.store.descriptors()
    }

    /// Wakes the thread in [`Self::run`].
    pub fn ring(&self) {
        self.0.store.ring();
    }
}

impl Backing for Tiers {
    fn bytes(&self) -> u64 {
        self.0.table.count() as u64 * SEGMENT_BYTES as u64
    }

    fn block_bytes(&self) -> usize {
        self.0.local.block_bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read(offset, out)
    }

    fn read_other(&self, offset: u64, out: &mut [u8]) -> Option<io::Result<()>> {
        let inner = &*self.0;
        let segment = (offset / SEGMENT_BYTES as u64) as usize;
        let old = inner.table.get(segment);
        if WAS_REMOTE.get() && old & LOCAL != 0 {
            if old & REMOTE != 0 {
                inner.store.figures.lost();
                inner.forget_remote(segment, old);
            }
            // Does not ask the store: by now it may have another copy, which is damaged as well.
            return Some(inner.read_by(offset, out, |_| false));
        }
        if old & (LOCAL | REMOTE) != LOCAL | REMOTE {
            return None;
        }
        let got = inner.read_remote(segment, old, offset, out);
        Some(if got == Got::Whole { Ok(()) } else { Err(gone()) })
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let inner = &*self.0;
        let segment = (offset / SEGMENT_BYTES as u64) as usize;
        if !inner.has_disk() {
            return inner.write_far(segment, bytes);
        }
        let (_, slot) = inner.begin(segment, bytes.len())?;
        let written = inner.local.write(Inner::local_offset(slot, 0), bytes);
        inner.end(segment, &written);
        written
    }

    fn submit(&self, write: Write) {
        let inner = &*self.0;
        let segment = (write.offset / SEGMENT_BYTES as u64) as usize;
        let begun = match inner.has_disk() {
            true => inner.begin(segment, write.bytes),
            false => {
                let result = inner.write_far(segment, write.bytes());
                lock(&inner.done).push(Completion { write, result });
                return;
            }
        };
        match begun {
            Ok((_, slot)) => {
                inner.local.submit(Write { offset: Inner::local_offset(slot, 0), ..write });
            }
            Err(error) => lock(&inner.done).push(Completion { write, result: Err(error) }),
        }
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        let inner = &*self.0;
        if let Some(done) = lock(&inner.done).pop() {
            return Some(done);
        }
        let Completion { write, result } = inner.local.complete(wait)?;
        let slot = (write.offset / SEGMENT_BYTES as u64) as usize;
        let segment = lock(&inner.owners)[slot] as usize;
        inner.end(segment, &result);
        let offset = segment as u64 * SEGMENT_BYTES as u64;
        Some(Completion { write: Write { offset, ..write }, result })
    }

    fn takes_pages(&self) -> bool {
        self.0.has_disk()
    }

    fn write_page(&self, offset: u64, page: &[u8]) -> io::Result<()> {
        let inner = &*self.0;
        let segment = (offset / SEGMENT_BYTES as u64) as usize;
        if inner.table.get(segment) & PAGES == 0 {
            inner.begin_pages(segment)?;
        }
        inner.local.write(Inner::local_offset(inner.table.slot(segment), offset), page)
    }

    fn free(&self, offset: u64) {
        let inner = &*self.0;
        let segment = (offset / SEGMENT_BYTES as u64) as usize;
        let slot = inner.table.slot(segment);
        let old = inner.table.swap(segment, 0);
        inner.drop_remote(old, inner.table.length(segment));
        if inner.copies > 0 && slot != NONE {
            inner.table.set_place(segment, NONE, 0);
            let mut space = lock(&inner.space);
            space.free.push(slot);
            space.used -= 1;
            drop(space);
            inner.room.notify_one();
        }
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // Slots pass from segment to segment, so the local file keeps its size.
        if self.0.copies == 0 { self.0.local.discard(offset, bytes) } else { Ok(()) }
    }

    fn wait_for_left_writes(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let inner = &*self.0;
        match inner.table.slot((offset / SEGMENT_BYTES as u64) as usize) {
            NONE => Ok(()),
            slot => inner.local.wait_for_left_writes(Inner::local_offset(slot, 0), bytes),
        }
    }

    fn has_recovered(&self) -> bool {
        self.0.has_recovered.swap(false, Relaxed)
    }

    fn remote(&self) -> RemoteFigures {
        RemoteFigures {
            is_up: self.0.store.is_up(),
            bytes: self.0.bytes.load(Relaxed),
            bytes_max: self.0.bytes_max,
            ..self.0.store.figures.all()
        }
    }

    fn remote_read_times(&self) -> Option<Counted> {
        Some(self.0.store.figures.times.counted())
    }
}

impl Inner {
    /// Makes a segment ready for writes page by page.
    fn begin_pages(&self, segment: usize) -> io::Result<()> {
        let slot = match self.copies {
            0 => segment as u32,
            _ => self.take_slot().ok_or(rustix::io::Errno::NOSPC)?,
        };
        let space = lock(&self.space);
        if self.table.get(segment) & PAGES == 0 {
            self.table.set_place(segment, slot, SEGMENT_BYTES);
            let old = self.table.swap(segment, word(0, LOCAL | PAGES));
            self.drop_remote(old, 0);
        } else if self.copies > 0 {
            // Another thread has done this.
            let mut space = space;
            space.free.push(slot);
            space.used -= 1;
        }
        Ok(())
    }
}
