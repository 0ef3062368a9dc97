//! A request of the kernel to the disk, by either transport.

use crate::disk::{Disk, DiskError};
use uzswap_engine::PAGE_BYTES;

/// True if a read takes longer than waking another thread: more than `pages_max` pages, or a page
/// that has to be read from the backing.
pub(crate) fn takes_long(disk: &dyn Disk, offset: u64, bytes: u64, pages_max: usize) -> bool {
    let page = PAGE_BYTES as u64;
    let pages = bytes / page;
    pages > pages_max as u64 || (0..pages).any(|index| disk.is_slow(offset + index * page))
}

/// The result for the kernel. It keeps a page that was rejected, and does not use one that is lost.
pub(crate) fn errno(error: DiskError) -> i32 {
    match error {
        DiskError::Range => libc::EINVAL,
        DiskError::Full => libc::ENOSPC,
        DiskError::Lost => libc::EIO,
    }
}
