//! A request of the kernel to the disk, from either transport.

use crate::disk::{Disk, DiskError};
use uzswap_engine::PAGE_BYTES;

/// True if a read takes longer than waking another thread: it has more than `pages_max` pages, or
/// one of them is on the backing.
pub(crate) fn takes_long(disk: &dyn Disk, offset: u64, bytes: u64, pages_max: usize) -> bool {
    let page = PAGE_BYTES as u64;
    let pages = bytes / page;
    pages > pages_max as u64 || (0..pages).any(|index| disk.is_slow(offset + index * page))
}

/// The result for the kernel, which keeps a rejected page, and does not use a lost one.
pub(crate) fn errno(error: DiskError) -> i32 {
    match error {
        DiskError::Range => libc::EINVAL,
        DiskError::Full => libc::ENOSPC,
        DiskError::Lost => libc::EIO,
    }
}
