//! The slower device that the coldest pages go to, still compressed.
//!
//! [`Backing`] is the engine's only I/O. `slots` divides its space. Segments (`segments`) are
//! written whole while stores and loads go on. They consist of records (`record`), which `seal`
//! encrypts.

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

/// A device or file of a fixed size. All methods may be called from several threads at once.
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

    /// Waits until no write to a range is under way that a killed process began: such a write could
    /// overwrite a later one. Afterwards the range may have any content. `offset` and `bytes` are
    /// multiples of 256 KiB. Errors: the backing cannot tell. Does nothing where writes end with
    /// the process.
    fn settle(&self, _offset: u64, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// A write that ended, in any order. With `wait`, waits for one; `None` then means that none is
    /// under way.
    fn complete(&self, wait: bool) -> Option<Completion>;
}
