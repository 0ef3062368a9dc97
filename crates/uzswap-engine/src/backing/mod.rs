//! The slower device that the coldest pages go to, still compressed.
//!
//! [`Backing`] is the engine's only I/O. `slots` is its space and who may write where; segments
//! (see `segments`) are written whole while stores and loads go on; `record` is what is in them,
//! and `seal` encrypts them.

mod buffer;
#[expect(unsafe_code, reason = "io_uring takes buffers by address")]
mod file;
mod none;
mod open;
mod outline;
pub(crate) mod record;
pub(crate) mod seal;
pub(crate) mod segments;
mod singles;
pub(crate) mod slots;

pub use buffer::Buffer;
pub use file::FileBacking;
pub use none::NoBacking;
pub(crate) use open::BYTES_MAX;
pub use open::{BackingError, BackingFile, BackingSpec, open_backing, open_backing_file};

use std::io;

/// A write of the start of a buffer, which travels with it.
#[derive(Debug)]
pub struct Write {
    /// Where on the backing, bytes; a multiple of [`Backing::block_bytes`].
    pub offset: u64,
    /// What.
    pub buffer: Buffer,
    /// How much of the buffer, a multiple of [`Backing::block_bytes`].
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
    /// How it ended. After an error nothing may be assumed of the range that it covered.
    pub result: io::Result<()>,
}

/// A device or file of a fixed size. All methods may be called from several threads at once.
///
/// What was written, and reported as done, is read back until it is overwritten, within the life of
/// the value: a swap cache needs no more durability than that.
pub trait Backing: Send + Sync {
    /// Size, bytes. 0: there is none, and nothing else will be called.
    fn bytes(&self) -> u64;

    /// Alignment of offsets, lengths and buffers of writes, bytes; a power of two, at most 4096.
    fn block_bytes(&self) -> usize;

    /// Reads `out.len()` bytes at `offset`, of any alignment.
    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Writes `bytes` (aligned, of an aligned length) and returns when that is done.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Starts a write. It will come out of [`Self::complete`], even if it could not be started.
    fn submit(&self, write: Write);

    /// What is in a range will not be read again before it is written: the device may use the
    /// space otherwise. `offset` and `bytes` are multiples of 256 KiB.
    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Waits until no write to a range is under way that a process began which was killed since: it
    /// could overwrite what is written from now on. What is in the range may be anything then.
    /// `offset` and `bytes` are multiples of 256 KiB. Errors: it cannot be known. Nothing to do for
    /// one whose writes end with the process.
    fn settle(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// A write that ended, in any order. With `wait`, waits for one; `None` then means that none is
    /// under way.
    fn complete(&self, wait: bool) -> Option<Completion>;
}
