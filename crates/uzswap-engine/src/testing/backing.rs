//! A backing that fails on command.

use crate::backing::{Backing, Completion, Write};
use crate::sync::{Mutex, lock};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Switches of a [`TestBacking`], kept by the test.
#[derive(Debug, Default)]
pub struct Faults {
    /// Writes fail with EIO.
    pub fail_writes: AtomicBool,
    /// Writes fail with ENOSPC.
    pub full: AtomicBool,
    /// Reads fail with EIO.
    pub fail_reads: AtomicBool,
    /// Reads return a flipped bit.
    pub damage_reads: AtomicBool,
    /// Its content.
    content: Mutex<Vec<u8>>,
}

impl Faults {
    /// The content, as an attacker with access to the device reads and changes it.
    pub fn tamper<T>(&self, with: impl FnOnce(&mut [u8]) -> T) -> T {
        with(&mut lock(&self.content))
    }
}

/// A backing in memory. A submitted write is done when it is completed, not before.
pub struct TestBacking {
    pending: Mutex<VecDeque<Write>>,
    faults: Arc<Faults>,
    block_bytes: usize,
}

impl TestBacking {
    /// A backing of `bytes` of zeros, and its faults.
    pub fn new(bytes: usize, block_bytes: usize) -> (Self, Arc<Faults>) {
        let faults = Arc::new(Faults::default());
        *lock(&faults.content) = vec![0; bytes];
        let backing = Self {
            pending: Mutex::new(VecDeque::with_capacity(16)),
            faults: faults.clone(),
            block_bytes,
        };
        (backing, faults)
    }
}

impl Backing for TestBacking {
    fn bytes(&self) -> u64 {
        lock(&self.faults.content).len() as u64
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.faults.fail_reads.load(Relaxed) {
            return Err(io::Error::from_raw_os_error(5));
        }
        out.copy_from_slice(&lock(&self.faults.content)[offset as usize..][..out.len()]);
        if self.faults.damage_reads.load(Relaxed) {
            let middle = out.len() / 2;
            out[middle] ^= 1;
        }
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        assert!(offset.is_multiple_of(self.block_bytes as u64), "an unaligned write");
        assert!(bytes.len().is_multiple_of(self.block_bytes), "a write of part of a block");
        if self.faults.fail_writes.load(Relaxed) {
            // A failed write may have changed its whole range.
            lock(&self.faults.content)[offset as usize..][..bytes.len()].fill(0xee);
            return Err(io::Error::from_raw_os_error(5));
        }
        if self.faults.full.load(Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        lock(&self.faults.content)[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        // Overwritten, so that a read of a discarded range is noticed.
        lock(&self.faults.content)[offset as usize..][..bytes as usize].fill(0xdd);
        Ok(())
    }

    fn submit(&self, write: Write) {
        lock(&self.pending).push_back(write);
    }

    fn complete(&self, _wait: bool) -> Option<Completion> {
        // The newest first, since completions may come in any order.
        let write = lock(&self.pending).pop_back()?;
        let result = self.write(write.offset, write.bytes());
        Some(Completion { write, result })
    }
}
