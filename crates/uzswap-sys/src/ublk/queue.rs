//! The queue of a device: one thread takes requests and answers them.

use super::{SECTOR_BYTES, encoded, is_passing};
use crate::map::{Mapping, PAGE_BYTES};
use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

const FETCH: u32 = 0x20;
const COMMIT_AND_FETCH: u32 = 0x21;

#[repr(C)]
#[derive(Clone, Copy)]
struct IoCommand {
    queue: u16,
    tag: u16,
    result: i32,
    address: u64,
}
const _: () = assert!(size_of::<IoCommand>() == 16);

#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    operation_and_flags: u32,
    sectors: u32,
    start_sector: u64,
    address: u64,
}
const _: () = assert!(size_of::<Descriptor>() == 24);

/// The operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Fill the buffer.
    Read,
    /// Store the data of the buffer.
    Write,
    /// Flush. No data are buffered.
    Flush,
    /// Drop the data.
    Discard,
    /// An operation that the device does not announce.
    Unknown,
}

/// A request, and the buffer of its place in the queue.
pub struct Io {
    tag: u16,
    buffer: Mapping,
    /// Its operation.
    pub operation: Operation,
    /// Its offset on the device, in bytes.
    pub offset: u64,
    /// Its length; for reads and writes, at most that of the buffer.
    pub bytes: u64,
}

impl Io {
    /// Its place in the queue, below the depth.
    pub fn tag(&self) -> usize {
        self.tag.into()
    }

    /// The data of a write.
    pub fn data(&self) -> &[u8] {
        &self.buffer.as_slice()[..self.bytes as usize]
    }

    /// The buffer for the data of a read.
    pub fn data_mut(&mut self) -> &mut [u8] {
        &mut self.buffer.as_mut_slice()[..self.bytes as usize]
    }
}

/// An event for a queue's thread.
pub enum QueueEvent {
    /// A request: [`Queue::commit`] answers it.
    Request(Io),
    /// The bell was rung.
    Rung,
}

/// Wakes the thread of a queue.
#[derive(Clone)]
pub struct Bell(Arc<OwnedFd>);

impl Bell {
    fn new() -> io::Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(fd)))
    }

    /// Wakes the thread, or keeps it from its next sleep.
    pub fn ring(&self) {
        // The write fails only after 2^64 rings without a read.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    fn hush(&self) {
        // An error means that the bell was not rung.
        let _ = rustix::io::read(&*self.0, &mut [0; 8]);
    }
}

/// The descriptors of a queue's requests, written by the kernel.
struct Descriptors {
    base: NonNull<Descriptor>,
    bytes: usize,
}

// SAFETY: a mapping that is only read, by copying, and that no thread owns.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(device: &File, depth: u16) -> io::Result<Self> {
        let bytes = (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(PAGE_BYTES);
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing. The first
        // queue's descriptors are at the beginning.
        let base = unsafe {
            let null = std::ptr::null_mut();
            let flags = MapFlags::SHARED | MapFlags::POPULATE;
            mmap(null, bytes, ProtFlags::READ, flags, device, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, bytes })
    }

    /// The descriptor of a request that has arrived and is not answered yet.
    fn get(&self, tag: u16) -> Descriptor {
        let tag = usize::from(tag);
        assert!((tag + 1) * size_of::<Descriptor>() <= self.bytes);
        // SAFETY: by the assertion, the descriptor is inside the mapping. It is aligned, because
        // the mapping is an array. The read is volatile and a copy, because the kernel writes to
        // this memory, though not while the request is ours.
        unsafe { self.base.as_ptr().add(tag).read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and no reference into it was ever given out.
        // Unmapping a mapped range does not fail.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

/// The requests of a device. The kernel accepts answers only from the thread that fetches.
pub struct Queue {
    ring: IoUring,
    device: File,
    /// The device file exists after the queue has fetched.
    descriptors: Option<Descriptors>,
    /// Completions that arrived during the fetch.
    early: VecDeque<cqueue::Entry>,
    /// The requests that the kernel has, by tag.
    places: Box<[Option<Io>]>,
    /// Places that the kernel does not use any more.
    ended: usize,
    bell: Bell,
    is_listening: bool,
    is_encoded: bool,
    io_bytes_max: usize,
}

/// Marks the bell's completions: no tag is that large.
const RUNG: u64 = u64::MAX;

impl Queue {
    pub(super) fn open(
        id: u32,
        depth: u16,
        io_bytes_max: u32,
        is_encoded: bool,
    ) -> io::Result<Self> {
        let path = format!("/dev/ublkc{id}");
        let device = File::options().read(true).write(true).open(path)?;
        let place = |tag| -> io::Result<Option<Io>> {
            let buffer = Mapping::populated(io_bytes_max as usize)?;
            Ok(Some(Io { tag, buffer, operation: Operation::Unknown, offset: 0, bytes: 0 }))
        };
        Ok(Self {
            // The ring has space for a command of every tag and for the bell, so a push always
            // succeeds.
            ring: IoUring::builder().setup_coop_taskrun().build(u32::from(depth) * 2)?,
            device,
            descriptors: None,
            early: VecDeque::new(),
            places: (0..depth).map(place).collect::<io::Result<_>>()?,
            ended: 0,
            bell: Bell::new()?,
            is_listening: false,
            is_encoded,
            io_bytes_max: io_bytes_max as usize,
        })
    }

    /// Most requests under way.
    pub fn depth(&self) -> usize {
        self.places.len()
    }

    /// Longest read or write.
    pub fn io_bytes_max(&self) -> usize {
        self.io_bytes_max
    }

    /// Wakes this queue's thread.
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Asks for the first requests. From now on the calling thread serves the device. Fails if the
    /// kernel refuses that.
    ///
    /// This process may be killed at any point of this call, and then another process must be able
    /// to take the device over. So the call asks for all requests together, and maps the
    /// descriptors afterwards. The kernel lets no other process map the descriptors before a new
    /// recovery, and refuses a recovery if the previous server has not asked for all requests.
    pub fn fetch(&mut self) -> io::Result<()> {
        for tag in 0..self.places.len() {
            self.push(tag, FETCH, 0);
        }
        while !self.ring.submission().is_empty() {
            match self.ring.submit() {
                Err(error) if is_passing(&error) => {}
                other => _ = other?,
            }
        }
        // Some completions may be requests, if the device was taken over.
        self.early = self.ring.completion().collect();
        if let Some(failed) = self.early.iter().find(|entry| entry.result() < 0) {
            return Err(io::Error::from_raw_os_error(-failed.result()));
        }
        let depth = self.places.len() as u16;
        self.descriptors = Some(Descriptors::map(&self.device, depth)?);
        Ok(())
    }

    /// True if there will be no more requests.
    pub fn has_ended(&self) -> bool {
        self.ended == self.places.len()
    }

    /// The next event, if there is one already.
    pub fn take(&mut self) -> Option<QueueEvent> {
        loop {
            let entry = match self.early.pop_front() {
                Some(entry) => entry,
                None => self.ring.completion().next()?,
            };
            let tag = entry.user_data();
            if tag == RUNG {
                self.is_listening = cqueue::more(entry.flags());
                self.bell.hush();
                return Some(QueueEvent::Rung);
            }
            let place = &mut self.places[tag as usize];
            if entry.result() < 0 {
                // Aborted: the device is stopped, and the kernel does not use the buffer any more.
                self.ended += 1;
                continue;
            }
            let mut io = place.take().expect("the kernel completes only requests that it has");
            let descriptors = self.descriptors.as_ref().expect("they are mapped by the fetch");
            let descriptor = descriptors.get(tag as u16);
            io.operation = match descriptor.operation_and_flags & 0xff {
                0 => Operation::Read,
                1 => Operation::Write,
                2 => Operation::Flush,
                3 => Operation::Discard,
                _ => Operation::Unknown,
            };
            io.offset = descriptor.start_sector * SECTOR_BYTES;
            io.bytes = u64::from(descriptor.sectors) * SECTOR_BYTES;
            return Some(QueueEvent::Request(io));
        }
    }

    /// Answers a request with the next [`Self::submit`] or [`Self::wait`], and asks for another.
    /// `result`: bytes done, or a negative error number.
    pub fn commit(&mut self, io: Io, result: i32) {
        let tag = io.tag();
        // The kernel does not check the length.
        assert!(io.buffer.len() >= self.io_bytes_max && self.places[tag].is_none());
        self.places[tag] = Some(io);
        self.push(tag, COMMIT_AND_FETCH, result);
    }

    fn push(&mut self, tag: usize, command: u32, result: i32) {
        let io = self.places[tag].as_ref().expect("a pushed request is in its place");
        let address = io.buffer.as_ptr().addr() as u64;
        let command = match self.is_encoded {
            true => encoded(command, size_of::<IoCommand>(), false),
            false => command,
        };
        let plain = IoCommand { queue: 0, tag: tag as u16, result, address };
        // SAFETY: plain numbers without padding, read as bytes.
        let plain: [u8; 16] = unsafe { std::mem::transmute(plain) };
        let entry = opcode::UringCmd16::new(types::Fd(self.device.as_raw_fd()), command)
            .cmd(plain)
            .build()
            .user_data(tag as u64);
        // SAFETY: the buffer is a mapping of its own, as long as the longest request of the device.
        // It stays in its place, and no thread uses it, until the command has completed. A queue
        // that is dropped before leaves the mapping to the kernel.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("there is room for a command of each tag");
    }

    /// Submits pending answers to the kernel.
    pub fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            // After an error (a signal, a moment without memory) the answers stay, and the next
            // call submits them.
            let _ = self.ring.submit();
        }
    }

    /// Submits answers to the kernel and waits for an event. May return without an event.
    pub fn wait(&mut self) {
        if !self.is_listening {
            let fd = types::Fd(self.bell.0.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true);
            // SAFETY: the request names no memory; the descriptor is the queue's own.
            let pushed = unsafe { self.ring.submission().push(&entry.build().user_data(RUNG)) };
            self.is_listening = pushed.is_ok();
        }
        // After an error (a signal, a moment without memory) the caller checks and calls again.
        let _ = self.ring.submit_and_wait(1);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // A thread normally ends with its device, so this thread probably panics. The kernel may
        // still copy into the buffers of commands that have not completed.
        if !self.has_ended() {
            self.places.iter_mut().filter_map(Option::take).for_each(std::mem::forget);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        // From <linux/ublk_cmd.h>, as a C compiler computes them.
        assert_eq!(encoded(FETCH, 16, false), 0xc010_7520);
        assert_eq!(encoded(COMMIT_AND_FETCH, 16, false), 0xc010_7521);
    }
}
