//! A trace in the making: a file that all recorded processes map.
//!
//! To write an event takes one `fetch_add` on the cursor in the header, and three stores to a place
//! that then belongs to the writer. The writer allocates and locks nothing, and calls only the
//! clock. The file has all of its blocks from the start, so that no store can fail for want of
//! space. A full log takes no more events, but counts them.

#![expect(unsafe_code, reason = "a file that several processes map: it holds only atomics")]

use crate::event::{Event, WORDS};
use crate::header::{CURSOR_AT, HEADER_BYTES, Header, PROCESSES_AT, TraceError};
use crate::read;
use rustix::fs::{self, FallocateFlags};
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use uzswap_sys::map::Mapping;

/// Bytes of a word.
const WORD: usize = size_of::<u64>();

// The file is little-endian, and so are its words in memory.
const _: () = assert!(cfg!(target_endian = "little"));

/// A log that this process writes to.
#[derive(Debug)]
pub struct Log {
    /// The whole file, which keeps its length. It holds only atomics.
    memory: Mapping,
    /// Words in the file.
    words: usize,
    /// The number of this process.
    process: AtomicU32,
    /// Processor time that the pager took in this process, ns.
    own_nanos: AtomicU64,
}

impl Log {
    /// Makes the file of a log with the room of `header`. Only its owner may read it.
    pub fn create(path: &Path, header: &Header) -> Result<(), TraceError> {
        let failed = |source| TraceError::Write { path: path.into(), source };
        let mut file = read::create(path).map_err(failed)?;
        let bytes = HEADER_BYTES as u64 + header.room * crate::EVENT_BYTES as u64;
        let reserved = fs::fallocate(&file, FallocateFlags::empty(), 0, bytes);
        let made = reserved.map_err(Into::into).and_then(|()| file.write_all(&header.to_bytes()));
        made.map_err(|source| {
            // The file is of no use, and another attempt needs its name.
            let _ = std::fs::remove_file(path);
            failed(source)
        })
    }

    /// Opens a log for writing, under a new process number.
    pub fn join(path: &Path) -> Result<Self, TraceError> {
        let failed = |source| TraceError::Read { path: path.into(), source };
        let file = File::options().read(true).write(true).open(path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let mut start = Vec::new();
        (&file).take(HEADER_BYTES as u64).read_to_end(&mut start).map_err(failed)?;
        let header = Header::read(path, &start, bytes)?;
        // By the header, the file has space for all events.
        let words = HEADER_BYTES / WORD + header.room as usize * WORDS;
        if bytes < (words * WORD) as u64 {
            let wanted = (words * WORD) as u64;
            return Err(TraceError::Cut { path: path.into(), found: bytes, wanted });
        }
        let memory = Mapping::of_file(file.as_fd(), words * WORD).map_err(failed)?;
        let (process, own_nanos) = (AtomicU32::new(0), AtomicU64::new(0));
        let log = Self { memory, words, process, own_nanos };
        log.forked();
        Ok(log)
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has this number of words, as long as `self` lives. Every process uses
        // the file by atomics, and no process cuts it: only its maker removes it.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.words) }
    }

    /// Takes a new process number in a forked child. The process's time begins now.
    pub fn forked(&self) {
        let process = self.words()[PROCESSES_AT / WORD].fetch_add(1, Relaxed);
        self.process.store(process as u32, Relaxed);
        self.own_nanos.store(0, Relaxed);
    }

    /// Writes an event. Sets its process and its time.
    pub fn add(&self, event: Event) {
        let words = self.words();
        let at = words[CURSOR_AT / WORD].fetch_add(1, Relaxed);
        let at = (at as usize).saturating_mul(WORDS).saturating_add(HEADER_BYTES / WORD);
        let Some(slot) = words.get(at..at.saturating_add(WORDS)) else { return };
        let spent = nanos(ClockId::ProcessCPUTime).saturating_sub(self.own_nanos.load(Relaxed));
        let process = self.process.load(Relaxed);
        let [first, second, third] = Event { process, micros: spent / 1000, ..event }.to_words();
        slot[1].store(second, Relaxed);
        slot[2].store(third, Relaxed);
        // The store that publishes the event.
        slot[0].store(first, Release);
    }

    /// Counts the calling thread's processor time as the pager's, until the value is dropped.
    pub fn own_time(&self) -> OwnTime<'_> {
        OwnTime { log: self, begin: nanos(ClockId::ThreadCPUTime) }
    }
}

/// See [`Log::own_time`].
#[derive(Debug)]
pub struct OwnTime<'a> {
    log: &'a Log,
    begin: u64,
}

impl Drop for OwnTime<'_> {
    fn drop(&mut self) {
        let spent = nanos(ClockId::ThreadCPUTime).saturating_sub(self.begin);
        self.log.own_nanos.fetch_add(spent, Relaxed);
    }
}

fn nanos(clock: ClockId) -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    tv_sec as u64 * 1_000_000_000 + tv_nsec as u64
}
