//! A large write that several threads share, so that all CPUs compress its pages at the same time.
//!
//! The thread that took the write owns the batch and its buffer; helpers read the buffer under a
//! shared lock. Owner and helpers take a few pages at a time until none is left. So any number of
//! helpers will do, and none is needed.

use crate::disk::{Disk, DiskError};
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use uzswap_engine::PAGE_BYTES;

/// Pages that a thread takes at a time: some 20 µs of work, several times the cost of taking them.
const CHUNK_PAGES: usize = 4;

/// Writes of fewer pages are not shared: waking a thread takes as long as compressing three.
pub(crate) const BATCH_PAGES_MIN: usize = 12;

/// How long the owner spins for the last chunk before it sleeps.
const SPIN: Duration = Duration::from_micros(30);

/// One thread's current write.
#[derive(Default)]
pub(crate) struct Batch {
    /// The write's place on the disk and its size, bytes; constant while there are helpers.
    offset: AtomicUsize,
    bytes: AtomicUsize,
    /// First page that no thread has taken.
    next: AtomicUsize,
    /// Threads that were called and have not left.
    helpers: AtomicUsize,
    failure: Mutex<Option<DiskError>>,
    gone: Condvar,
}

impl Batch {
    /// Starts a write of `bytes` at `offset`. There must be no helpers.
    pub(crate) fn start(&self, offset: u64, bytes: usize) {
        self.offset.store(offset as usize, Relaxed);
        self.bytes.store(bytes, Relaxed);
        self.next.store(0, Relaxed);
    }

    pub(crate) fn expect(&self) {
        self.helpers.fetch_add(1, Relaxed);
    }

    pub(crate) fn leave(&self) {
        if self.helpers.fetch_sub(1, Release) == 1 {
            // Under the lock, so that an owner that is about to sleep does not miss the notice.
            drop(self.failure.lock().unwrap_or_else(PoisonError::into_inner));
            self.gone.notify_one();
        }
    }

    /// Writes the pages that no thread has taken yet. The batch's data are at the start of `data`.
    pub(crate) fn work(&self, disk: &dyn Disk, data: &[u8]) {
        let chunk_bytes = CHUNK_PAGES * PAGE_BYTES;
        let data = &data[..self.bytes.load(Relaxed)];
        loop {
            let from = self.next.fetch_add(CHUNK_PAGES, Relaxed) * PAGE_BYTES;
            if from >= data.len() {
                return;
            }
            let chunk = &data[from..data.len().min(from + chunk_bytes)];
            let offset = (self.offset.load(Relaxed) + from) as u64;
            if let Err(error) = disk.write(offset, chunk) {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        }
    }

    /// Waits until all helpers have left. Fails if a page was not stored.
    pub(crate) fn finish(&self) -> Result<(), DiskError> {
        let began = Instant::now();
        while self.helpers.load(Acquire) > 0 && began.elapsed() < SPIN {
            std::hint::spin_loop();
        }
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        while self.helpers.load(Acquire) > 0 {
            failure = self.gone.wait(failure).unwrap_or_else(PoisonError::into_inner);
        }
        failure.take().map_or(Ok(()), Err)
    }
}
