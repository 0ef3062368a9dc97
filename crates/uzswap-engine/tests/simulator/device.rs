//! The backing of a simulated history: a device, or a store in another machine's memory beside it.
//!
//! The store loses segments, whose pages are errors from then on, and answers with other bytes than
//! were written. In those cases the device beside the store has a second copy. Writes end late and
//! in any order.

use crate::lock;
use crate::profile::Chances;
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use uzswap_engine::backing::{Backing, Completion, SEGMENT_BYTES, Write};
use uzswap_engine::testing::Noise;
use uzswap_sync::turns;

/// The maximum number of steps of other threads while one thread reads or writes.
const IO_STEPS: u64 = 1 << 12;

/// A device that fails, shared by the backing of a cache and by its successor's.
pub struct Device {
    pub content: Mutex<Vec<u8>>,
    pub pending: Mutex<Vec<Write>>,
    pub noise: Mutex<Noise>,
    pub is_reliable: AtomicBool,
    pub chances: Chances,
    pub block_bytes: usize,
    /// Segments that the store has lost.
    pub lost: Mutex<BTreeSet<u64>>,
    /// Segments that are given out page by page: no store has them.
    pub paged: Mutex<BTreeSet<u64>>,
}

/// The segment at an offset.
pub fn segment(offset: u64) -> u64 {
    offset / SEGMENT_BYTES as u64
}

impl Device {
    pub fn happens(&self, in_thousand: u64) -> bool {
        !self.is_reliable.load(Relaxed) && self.below(1000) < in_thousand
    }

    pub fn below(&self, end: u64) -> u64 {
        lock(&self.noise).below(end)
    }

    /// Reads as a store answers. Fails if the store has lost the segment.
    fn read_far(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let own = segment(offset);
        if lock(&self.paged).contains(&own) {
            return Ok(());
        }
        if self.happens(self.chances.segment_is_lost) {
            lock(&self.lost).insert(own);
        }
        if lock(&self.lost).contains(&own) {
            return Err(io::Error::from_raw_os_error(2));
        }
        if self.happens(self.chances.reply_is_wrong) {
            let content = lock(&self.content);
            let other = self.below((content.len() - out.len()) as u64 + 1) as usize;
            let bit = self.below(out.len() as u64 * 8) as usize;
            let half = out.len() / 2;
            match self.below(4) {
                0 => out.copy_from_slice(&content[other..][..out.len()]),
                1 => out[bit / 8] ^= 1 << (bit % 8),
                2 => out[half..].fill(0),
                _ => out.fill(0),
            }
        }
        Ok(())
    }

    /// Notes that a segment is written, or free.
    fn forget(&self, offset: u64, is_paged: bool) {
        lock(&self.lost).remove(&segment(offset));
        match is_paged {
            true => lock(&self.paged).insert(segment(offset)),
            false => lock(&self.paged).remove(&segment(offset)),
        };
    }

    /// Writes all bytes; or writes a part or noise, and returns an error.
    fn write_now(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let fails = self.happens(self.chances.write_fails);
        let mut content = lock(&self.content);
        let there = &mut content[offset as usize..][..bytes.len()];
        if !fails {
            there.copy_from_slice(bytes);
            return Ok(());
        }
        let blocks = (bytes.len() / self.block_bytes) as u64;
        let torn = self.below(blocks + 1) as usize * self.block_bytes;
        match self.below(3) {
            0 => {}
            1 => there[..torn].copy_from_slice(&bytes[..torn]),
            _ => there[torn..].fill(0xee),
        }
        let codes = [5, 28];
        Err(io::Error::from_raw_os_error(codes[self.below(2) as usize]))
    }
}

pub struct Simulated(pub Arc<Device>);

impl Backing for Simulated {
    fn bytes(&self) -> u64 {
        lock(&self.0.content).len() as u64
    }

    fn block_bytes(&self) -> usize {
        self.0.block_bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        turns::pause(IO_STEPS);
        if self.0.happens(self.0.chances.read_fails) {
            return Err(io::Error::from_raw_os_error(5));
        }
        out.copy_from_slice(&lock(&self.0.content)[offset as usize..][..out.len()]);
        turns::step();
        self.0.read_far(offset, out)
    }

    fn read_other(&self, offset: u64, out: &mut [u8]) -> Option<io::Result<()>> {
        turns::pause(IO_STEPS);
        (self.0.chances.reply_is_wrong > 0).then(|| {
            out.copy_from_slice(&lock(&self.0.content)[offset as usize..][..out.len()]);
            Ok(())
        })
    }

    fn write_page(&self, offset: u64, page: &[u8]) -> io::Result<()> {
        self.0.forget(offset, true);
        self.write(offset, page)
    }

    fn free(&self, offset: u64) {
        self.0.forget(offset, false);
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        turns::step();
        let written = self.0.write_now(offset, bytes);
        turns::pause(IO_STEPS);
        written
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        turns::step();
        lock(&self.0.content)[offset as usize..][..bytes as usize].fill(0xdd);
        Ok(())
    }

    fn submit(&self, write: Write) {
        turns::step();
        self.0.forget(write.offset, false);
        lock(&self.0.pending).push(write);
    }

    /// Completes any write under way; without `wait`, perhaps none.
    fn complete(&self, wait: bool) -> Option<Completion> {
        turns::step();
        let count = lock(&self.0.pending).len() as u64;
        if count == 0 || !wait && self.0.below(2) == 0 {
            return None;
        }
        let write = lock(&self.0.pending).swap_remove(self.0.below(count) as usize);
        let result = self.0.write_now(write.offset, write.bytes());
        Some(Completion { write, result })
    }
}
