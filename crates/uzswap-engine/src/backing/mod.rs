//! The slower device that the coldest pages go to, still compressed.
//!
//! [`Backing`] is the engine's only I/O. `slots` divides its space. Segments (`segments`) are
//! written whole while stores and loads continue. They consist of records (`record`), which `seal`
//! encrypts.

mod buffer;
mod file;
mod none;
mod open;
mod outline;
pub(crate) mod record;
pub(crate) mod seal;
pub(crate) mod segments;
pub(crate) mod shape;
mod singles;
pub(crate) mod slots;

pub use buffer::Buffer;
pub use file::FileBacking;
pub use none::NoBacking;
pub(crate) use open::BYTES_MAX;
pub use open::{BackingError, BackingFile, BackingSpec, open_backing, open_backing_file};
pub use shape::{SEGMENT_BYTES, SEGMENT_PAYLOAD_BYTES};

use crate::times::Counted;
use std::io;

/// A write of the start of a buffer. It owns the buffer.
#[derive(Debug)]
pub struct Write {
    /// The offset on the backing in bytes, a multiple of [`Backing::block_bytes`].
    pub offset: u64,
    /// The buffer whose start is written.
    pub buffer: Buffer,
    /// The length of the write, a multiple of [`Backing::block_bytes`].
    pub bytes: usize,
}

impl Write {
    /// The bytes to write.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.bytes]
    }
}

/// A write that ended.
#[derive(Debug)]
pub struct Completion {
    /// The write, with its buffer back.
    pub write: Write,
    /// Its result. After an error the whole range may have any content.
    pub result: io::Result<()>,
}

/// A device or file of a fixed size. Several threads may call all methods at the same time.
///
/// A range that was written keeps its content until it is overwritten, within the life of the
/// value: a swap cache needs no more durability than that.
pub trait Backing: Send + Sync {
    /// Size in bytes. 0: there is no backing, and no other method is called.
    fn bytes(&self) -> u64;

    /// Alignment of offsets, lengths and buffers of writes, bytes; a power of two, at most 4096.
    fn block_bytes(&self) -> usize;

    /// Reads `out.len()` bytes at `offset`, of any alignment.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` (aligned, of an aligned length) and returns when the write is done.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Starts a write. [`Self::complete`] returns it, even if it could not be started.
    fn submit(&self, write: Write);

    /// Tells that a range is not read again before it is written, so the device may use the space
    /// otherwise. `offset` and `bytes` are multiples of 256 KiB.
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Waits until no write of a killed process is under way to a range, since it could overwrite a
    /// later write. Afterwards the range may have any content. `offset` and `bytes` are multiples
    /// of 256 KiB. Fails if the backing does not know if a write is under way. Does nothing where
    /// writes end with the process.
    fn wait_for_left_writes(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// A write that ended, in any order. With `wait`, it waits for a write to end, and `None` means
    /// that no write is under way.
    fn complete(&self, wait: bool) -> Option<Completion>;

    /// True if single pages may be written, each to a page-sized slot.
    fn takes_pages(&self) -> bool {
        true
    }

    /// Writes a page to its slot, in a segment that is given out slot by slot.
    fn write_page(&self, offset: u64, page: &[u8]) -> io::Result<()> {
        self.write(offset, page)
    }

    /// Reads another copy, after [`Self::read`] has returned bytes other than those written.
    /// `None` if there is no other copy.
    fn read_other(&self, _offset: u64, _out: &mut [u8]) -> Option<io::Result<()>> {
        None
    }

    /// Tells the backing that the segment at an offset is free, so that no record in it is read
    /// again. No thread takes the segment before this returns. Any thread may call this, so an
    /// implementation neither waits nor allocates.
    fn free(&self, _offset: u64) {}

    /// True, once, after a failed backing works again.
    fn has_recovered(&self) -> bool {
        false
    }

    /// Figures of a store in another machine's memory, if the backing has one.
    fn remote(&self) -> RemoteFigures {
        RemoteFigures::default()
    }

    /// The times of the reads that the store answered; `None` if there is no store.
    fn remote_read_times(&self) -> Option<Counted> {
        None
    }
}

/// Figures of a store of segments in another machine's memory, since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemoteFigures {
    /// True while the store answers.
    pub is_up: bool,
    /// Bytes of our segments at the store.
    pub bytes: u64,
    /// The maximum bytes that our segments may take at the store.
    pub bytes_max: u64,
    /// Reads that the store answered.
    pub reads: u64,
    /// Bytes of these reads.
    pub bytes_read: u64,
    /// Segments written to the store.
    pub writes: u64,
    /// Bytes of these segments.
    pub bytes_written: u64,
    /// Requests that failed or were not answered in time.
    pub errors: u64,
    /// Segments that the store no longer had, or had only a part of.
    pub lost: u64,
    /// Segments that the store refused because it was full.
    pub full: u64,
}
