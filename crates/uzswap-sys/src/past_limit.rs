//! Writes to a file of ours beyond the size that this process may give a file (`RLIMIT_FSIZE`).

use crate::map::Mapping;
use rustix::fd::AsFd;
use rustix::thread::gettid;
use std::io;

/// Writes a part of a file that has that part already, whatever this process's limit of a file's
/// size is. The kernel applies the limit to calls that write, and not to mappings. `offset` is a
/// multiple of the page. Errors: `StorageFull` if the disk has no room or fails.
pub fn write(file: impl AsFd, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let part = Mapping::of_part(file.as_fd(), offset, bytes.len())?;
    let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let to = libc::iovec { iov_base: part.as_ptr().cast(), iov_len: bytes.len() };
    let thread = gettid().as_raw_nonzero().get();
    // The kernel makes the copy: if the disk has no room, it answers with an error, but a store of
    // ours would raise a signal.
    // SAFETY: reads the bytes, and writes the mapping, which is as long and nobody else's.
    let written =
        unsafe { libc::process_vm_writev(thread, &raw const from, 1, &raw const to, 1, 0) };
    match written {
        -1 if io::Error::last_os_error().raw_os_error() != Some(libc::EFAULT) => {
            Err(io::Error::last_os_error())
        }
        written if written == bytes.len() as isize => Ok(()),
        _ => Err(io::ErrorKind::StorageFull.into()),
    }
}
