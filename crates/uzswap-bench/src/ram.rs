//! A backing in plain memory: a device that takes no time, so that only uzswap is measured.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use uzswap_engine::backing::{Backing, Completion, Write};

/// Bytes under one lock: a segment, since only one thread writes a segment at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Memory that outlives its caches.
#[derive(Clone)]
pub struct Ram(Arc<[Mutex<Box<[u8]>>]>);

impl Ram {
    /// `bytes` of touched memory.
    pub fn new(bytes: usize) -> Self {
        let piece = |_| Mutex::new(vec![1; PIECE_BYTES].into_boxed_slice());
        Self((0..bytes.div_ceil(PIECE_BYTES)).map(piece).collect())
    }

    /// A backing over this memory.
    pub fn backing(&self) -> Box<dyn Backing> {
        Box::new(RamBacking { ram: self.clone(), done: Mutex::default() })
    }
}

struct RamBacking {
    ram: Ram,
    /// Submitted writes, which are complete immediately.
    done: Mutex<VecDeque<Completion>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backing for RamBacking {
    fn bytes(&self) -> u64 {
        (self.ram.0.len() * PIECE_BYTES) as u64
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (piece, at) = (offset as usize / PIECE_BYTES, offset as usize % PIECE_BYTES);
        out.copy_from_slice(&lock(&self.ram.0[piece])[at..at + out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (piece, at) = (offset as usize / PIECE_BYTES, offset as usize % PIECE_BYTES);
        lock(&self.ram.0[piece])[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn discard(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn submit(&self, write: Write) {
        let result = self.write(write.offset, write.bytes());
        lock(&self.done).push_back(Completion { write, result });
    }

    fn complete(&self, _wait: bool) -> Option<Completion> {
        lock(&self.done).pop_front()
    }
}
