//! A file or block device with direct I/O. Writes use io_uring, or are made one after another where
//! the kernel or a container forbids io_uring.
//!
//! Pages are written so that memory becomes free. With buffered I/O the page cache would keep a
//! second copy of them, and would allocate.

#![expect(
    unsafe_code,
    reason = "io_uring takes buffers by address: a buffer is a mapping of its own and stays until the ring has answered"
)]

use super::{Backing, Completion, Write};
use crate::backing::record::RECORD_BYTES_MAX;
use io_uring::{IoUring, opcode, types};
use rustix::fs::{AtFlags, FallocateFlags, FileType, OFlags, StatxFlags};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The maximum number of writes under way.
const DEPTH: usize = 16;
/// The strictest alignment of direct I/O.
const BLOCK_BYTES_MAX: usize = 4096;

/// See the module.
pub struct FileBacking {
    file: File,
    bytes: u64,
    block_bytes: usize,
    discards: bool,
    queue: Mutex<Queue>,
}

struct Queue {
    ring: Option<IoUring>,
    /// Writes under way; the index is the ring's user data.
    slots: [Option<Write>; DEPTH],
    /// Writes that ended without the ring.
    done: Vec<Completion>,
}

impl FileBacking {
    /// A backing of the first `bytes` of an open file or block device.
    ///
    /// Errors: `Unsupported` when the file system has no direct I/O.
    pub fn new(file: File, bytes: u64) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags | OFlags::DIRECT)
            .map_err(|_| io::Error::from(io::ErrorKind::Unsupported))?;
        let block_bytes = block_bytes(&file);
        let queue = Queue {
            ring: IoUring::new(DEPTH as u32).ok(),
            slots: [const { None }; DEPTH],
            done: Vec::with_capacity(DEPTH),
        };
        Ok(Self { file, bytes, block_bytes, discards: false, queue: Mutex::new(queue) })
    }

    /// Discards space that is no longer in use, on a disk that supports this, or in a file whose
    /// space need not stay reserved.
    pub fn with_discard(self) -> Self {
        Self { discards: true, ..self }
    }

    /// Makes one write after the other: for comparison, and for tests of that path.
    pub fn without_io_uring(self) -> Self {
        self.queue().ring = None;
        self
    }

    /// Ends a write that was made without the ring, or not at all.
    pub fn end(&self, write: Write, result: io::Result<()>) {
        self.queue().done.push(Completion { write, result });
    }

    /// The file or device.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// True if writes go through io_uring.
    pub fn uses_io_uring(&self) -> bool {
        self.queue().ring.is_some()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // After a panic elsewhere the queue is in a state between two calls, so it stays usable.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The alignment of direct I/O by `statx`; the strictest one where `statx` does not report it.
fn block_bytes(file: &File) -> usize {
    let statx = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    match statx {
        Ok(s) if s.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && s.stx_dio_offset_align > 0 => {
            (s.stx_dio_offset_align.max(s.stx_dio_mem_align) as usize).min(BLOCK_BYTES_MAX)
        }
        _ => BLOCK_BYTES_MAX,
    }
}

/// The number of checks for a write under way, 10 ms apart, before the wait fails. No write takes
/// that long.
const LOOKS: u32 = 3000;

/// Waits until a device's count of requests shows no write under way.
fn wait_for_quiet(count: &str) -> io::Result<()> {
    for _ in 0..LOOKS {
        let text = std::fs::read_to_string(count)?;
        if text.split_whitespace().nth(1) == Some("0") {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// The buffer for a record that is not aligned: the longest record and a block on either side.
#[repr(align(4096))]
struct Bounce([u8; (RECORD_BYTES_MAX + 2 * BLOCK_BYTES_MAX).next_multiple_of(BLOCK_BYTES_MAX)]);

impl Backing for FileBacking {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let block = self.block_bytes as u64;
        let aligned = offset.is_multiple_of(block)
            && (out.len() as u64).is_multiple_of(block)
            && (out.as_ptr() as usize).is_multiple_of(self.block_bytes);
        if aligned {
            return self.file.read_exact_at(out, offset);
        }
        let start = offset / block * block;
        let end = (offset + out.len() as u64).next_multiple_of(block);
        let mut bounce = Bounce([0; _]);
        let window = bounce
            .0
            .get_mut(..(end - start) as usize)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a read beyond a record"))?;
        self.file.read_exact_at(window, start)?;
        let skip = (offset - start) as usize;
        out.copy_from_slice(&window[skip..skip + out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if self.discards {
            rustix::fs::fallocate(&self.file, flags, offset, bytes)?;
        }
        Ok(())
    }

    fn wait_for_left_writes(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let stat = rustix::fs::fstat(&self.file)?;
        if !FileType::from_raw_mode(stat.st_mode).is_block_device() {
            // A file system waits for direct writes to the file before it makes zeros, and the
            // space stays reserved.
            let zeros = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
            return Ok(rustix::fs::fallocate(&self.file, zeros, offset, bytes)?);
        }
        let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        wait_for_quiet(&format!("/sys/dev/block/{major}:{minor}/inflight"))
    }

    fn submit(&self, write: Write) {
        let mut queue = self.queue();
        let free = queue.slots.iter().position(Option::is_none);
        if let (Some(slot), true) = (free, queue.ring.is_some())
            && queue.start(&self.file, slot, &write)
        {
            queue.slots[slot] = Some(write);
            return;
        }
        let result = self.write(write.offset, write.bytes());
        queue.done.push(Completion { write, result });
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        let mut queue = self.queue();
        if let Some(done) = queue.done.pop() {
            return Some(done);
        }
        loop {
            if let Some((slot, result)) = queue.reap() {
                let write = queue.slots[slot].take().expect("the ring answers a write once");
                let result = self.finish(&write, result);
                return Some(Completion { write, result });
            }
            if !wait || queue.slots.iter().all(Option::is_none) {
                return None;
            }
            queue.wait();
        }
    }
}

impl FileBacking {
    /// Turns the ring's answer into a result, and writes the rest of a short write.
    fn finish(&self, write: &Write, result: i32) -> io::Result<()> {
        let written = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result))?;
        match written {
            n if n == write.bytes => Ok(()),
            0 => Err(io::ErrorKind::WriteZero.into()),
            n => {
                // Direct I/O ends at a block, so the rest is as aligned as the whole.
                let n = n / self.block_bytes * self.block_bytes;
                self.write(write.offset + n as u64, &write.bytes()[n..])
            }
        }
    }
}

impl Queue {
    /// Passes a write to the kernel; `false` if the kernel does not take it.
    fn start(&mut self, file: &File, slot: usize, write: &Write) -> bool {
        let Some(ring) = &mut self.ring else { return false };
        let fd = types::Fd(file.as_raw_fd());
        let entry = opcode::Write::new(fd, write.buffer.as_ptr(), write.bytes as u32)
            .offset(write.offset)
            .build()
            .user_data(slot as u64);
        // SAFETY: the buffer is a mapping of its own, so its bytes stay in place while the `Write`
        // moves into the slot. No thread touches the write in the slot until the ring has answered.
        // Dropping the queue first waits for the answers.
        let pushed = unsafe { ring.submission().push(&entry) };
        // The kernel takes an entry or leaves it in the queue. The next call retries after an error
        // of `submit` (a signal, a moment without memory).
        pushed.is_ok() && {
            let _ = ring.submit();
            true
        }
    }

    fn reap(&mut self) -> Option<(usize, i32)> {
        let entry = self.ring.as_mut()?.completion().next()?;
        Some((entry.user_data() as usize, entry.result()))
    }

    fn wait(&mut self) {
        if let Some(ring) = &mut self.ring {
            // Interrupted or busy: the caller tries again.
            let _ = ring.submit_and_wait(1);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        while self.slots.iter().any(Option::is_some) {
            match self.reap() {
                Some((slot, _)) => self.slots[slot] = None,
                None => self.wait(),
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::backing::Buffer;

    fn file(bytes: u64) -> File {
        let directory = std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or("/var/tmp".into());
        let flags = OFlags::RDWR | OFlags::TMPFILE;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let file = File::from(rustix::fs::open(directory, flags, mode).unwrap());
        file.set_len(bytes).unwrap();
        file
    }

    fn backings() -> [FileBacking; 2] {
        let backing = || FileBacking::new(file(1 << 20), 1 << 20).unwrap();
        [backing(), backing().without_io_uring()]
    }

    fn buffer(byte: u8) -> Buffer {
        let mut buffer = Buffer::new(65536).unwrap();
        buffer.fill(byte);
        buffer
    }

    #[test]
    fn submitted_writes_complete_and_read_back_at_any_alignment() {
        for backing in backings() {
            for i in 0..16 {
                backing.submit(Write { offset: i * 65536, buffer: buffer(i as u8), bytes: 65536 });
            }
            let mut offsets: Vec<_> = std::iter::from_fn(|| backing.complete(true))
                .map(|done| {
                    done.result.unwrap();
                    assert_eq!(done.write.buffer.len(), 65536);
                    done.write.offset / 65536
                })
                .collect();
            offsets.sort_unstable();
            assert_eq!(offsets, (0..16).collect::<Vec<_>>());
            for (offset, bytes) in [(0, 16), (65536 - 16, 4112), (65536 * 3 + 1, 700), (16, 4096)] {
                let mut out = vec![0xff; bytes];
                backing.read(offset, &mut out).unwrap();
                let expected = |i: usize| ((offset + i as u64) / 65536) as u8;
                assert!(out.iter().enumerate().all(|(i, byte)| *byte == expected(i)), "{offset}");
            }
        }
    }

    #[test]
    fn a_write_beyond_the_end_of_a_full_device_is_an_error() {
        // /dev/full answers every write with ENOSPC.
        let full = File::options().read(true).write(true).open("/dev/full").unwrap();
        for backing in [
            FileBacking::new(full.try_clone().unwrap(), 1 << 20),
            FileBacking::new(full, 1 << 20).map(FileBacking::without_io_uring),
        ] {
            let Ok(backing) = backing else { continue };
            backing.submit(Write { offset: 0, buffer: buffer(1), bytes: 65536 });
            let done = backing.complete(true).unwrap();
            assert_eq!(done.result.unwrap_err().kind(), io::ErrorKind::StorageFull);
            assert!(backing.complete(true).is_none());
        }
    }

    #[test]
    fn discarded_parts_of_a_file_take_no_space() {
        use std::os::unix::fs::MetadataExt;
        for discards in [false, true] {
            let backing = FileBacking::new(file(1 << 20), 1 << 20).unwrap();
            let backing = if discards { backing.with_discard() } else { backing };
            let blocks = || backing.file.metadata().unwrap().blocks();
            for offset in (0..1 << 20).step_by(65536) {
                backing.write(offset, &buffer(7)).unwrap();
            }
            let full = blocks();
            backing.discard(256 << 10, 512 << 10).unwrap();
            let given = (full - blocks()) * 512;
            assert_eq!(given, if discards { 512 << 10 } else { 0 });
            let mut out = [0; 4096];
            backing.read(0, &mut out).unwrap();
            assert_eq!(out, [7; 4096]);
        }
    }

    #[test]
    fn io_uring_is_used_where_the_kernel_has_it() {
        let allowed = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
        if allowed.is_ok_and(|value| value.trim() == "0") {
            assert!(FileBacking::new(file(4096), 4096).unwrap().uses_io_uring());
        }
    }
}
