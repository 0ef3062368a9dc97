//! File I/O with memory that may be paged out, in any mode.
//!
//! In the in-thread mode the kernel cannot bring a page in: a system call on absent memory returns
//! EFAULT. These functions copy through a buffer of their own. The thread makes that copy, so its
//! faults are served. The copy costs some 0.1 ns a byte.

use rustix::fd::AsFd;
use std::io;

/// Small enough to stay in a processor's cache, large enough that the calls do not count.
const BUFFER_BYTES: usize = 256 << 10;

/// `read(2)` into memory that may be paged out: the number of bytes read, 0 at the end of the file.
///
/// From a pipe, a socket or a terminal it may read less than there is, as `read` does.
pub fn read(file: impl AsFd, into: &mut [u8]) -> io::Result<usize> {
    in_parts(into, |_, buffer| rustix::io::read(&file, buffer))
}

/// `pread(2)` into memory that may be paged out.
pub fn read_at(file: impl AsFd, into: &mut [u8], offset: u64) -> io::Result<usize> {
    in_parts(into, |done, buffer| rustix::io::pread(&file, buffer, offset + done as u64))
}

/// `write(2)` from memory that may be paged out: the number of bytes written.
pub fn write(file: impl AsFd, from: &[u8]) -> io::Result<usize> {
    out_parts(from, |_, buffer| rustix::io::write(&file, buffer))
}

/// `pwrite(2)` from memory that may be paged out.
pub fn write_at(file: impl AsFd, from: &[u8], offset: u64) -> io::Result<usize> {
    out_parts(from, |done, buffer| rustix::io::pwrite(&file, buffer, offset + done as u64))
}

/// Reads until `into` is full, until a call returns fewer bytes than requested, or until a call
/// fails.
fn in_parts(
    into: &mut [u8],
    mut call: impl FnMut(usize, &mut [u8]) -> rustix::io::Result<usize>,
) -> io::Result<usize> {
    let mut buffer = vec![0; BUFFER_BYTES.min(into.len())];
    let mut done = 0;
    for part in into.chunks_mut(BUFFER_BYTES) {
        let buffer = &mut buffer[..part.len()];
        let count = match call(done, buffer) {
            Ok(count) => count,
            // The bytes that were read count; the next call meets the error again.
            Err(_) if done > 0 => break,
            Err(error) => return Err(error.into()),
        };
        part[..count].copy_from_slice(&buffer[..count]);
        done += count;
        if count < part.len() {
            break;
        }
    }
    Ok(done)
}

/// Writes until all of `from` is written, until a call writes fewer bytes than it was given, or
/// until a call fails.
fn out_parts(
    from: &[u8],
    mut call: impl FnMut(usize, &[u8]) -> rustix::io::Result<usize>,
) -> io::Result<usize> {
    let mut buffer = vec![0; BUFFER_BYTES.min(from.len())];
    let mut done = 0;
    for part in from.chunks(BUFFER_BYTES) {
        let buffer = &mut buffer[..part.len()];
        buffer.copy_from_slice(part);
        let count = match call(done, buffer) {
            Ok(count) => count,
            Err(_) if done > 0 => break,
            Err(error) => return Err(error.into()),
        };
        done += count;
        if count < part.len() {
            break;
        }
    }
    Ok(done)
}
