//! What the kernel asks of the disk, by whatever transport it came.

use crate::disk::{Disk, DiskError};
use uzswap_engine::PAGE_BYTES;

/// What is to be done at an offset.
pub(crate) enum Work<'a> {
    /// Fill this.
    Read(&'a mut [u8]),
    /// Take this.
    Write(&'a [u8]),
    /// Forget so many bytes.
    Discard(u64),
}

/// Does it. On an error any part of it may be done.
pub(crate) fn perform(disk: &dyn Disk, offset: u64, work: Work<'_>) -> Result<(), DiskError> {
    match work {
        Work::Read(out) => disk.read(offset, out),
        Work::Write(data) => disk.write(offset, data),
        Work::Discard(bytes) => disk.discard(offset, bytes),
    }
}

/// Whether a read takes longer than waking another thread: more than `pages_max` pages, or a page
/// that has to be read from the backing.
pub(crate) fn takes_long(disk: &dyn Disk, offset: u64, bytes: u64, pages_max: usize) -> bool {
    let page = PAGE_BYTES as u64;
    let pages = bytes / page;
    pages > pages_max as u64 || (0..pages).any(|index| disk.is_slow(offset + index * page))
}

/// What the kernel is told: it keeps a page that was not taken, and does not use one that is lost.
pub(crate) fn errno(error: DiskError) -> i32 {
    match error {
        DiskError::Range => libc::EINVAL,
        DiskError::Full => libc::ENOSPC,
        DiskError::Lost => libc::EIO,
    }
}
