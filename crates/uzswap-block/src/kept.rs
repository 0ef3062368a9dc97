//! The parts of a server that outlive its process: the connections to the kernel, and the requests
//! that the server has taken and not answered.
//!
//! The kernel waits while any process has a connection's descriptor. A thread takes a request into
//! its buffer, which lies in memory that outlives the process, with a mark:
//!
//! | number of the request | outcome | |
//! |---|---|---|
//! | 0 | | none is under way |
//! | its number | none | taken: to be served, again if need be |
//! | its number | known | served: to be answered with that, and not served again |
//!
//! After the answer to a write, another write to the same page may follow immediately. So a write
//! that is about to be answered is never done again. A second answer to a request has no effect,
//! because the kernel has already forgotten its number.

#![expect(
    unsafe_code,
    reason = "memory that several processes map, one after the other: one of them serves at a time; it holds atomics, or data of a single thread"
)]

use crate::disk::DiskError;
use crate::protocol::{OUTCOME_AT, UNIQUE_AT};
use crate::request;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use uzswap_sys::shared::{Part, SharedMemory};
use uzswap_sys::{fuse, map};

/// The descriptors of these parts.
#[derive(Debug)]
pub struct KeptServer {
    /// A connection for each thread.
    connections: Vec<OwnedFd>,
    requests: OwnedFd,
}

impl KeptServer {
    /// For a server with this number of threads, which has not started yet. `requests` is an empty
    /// file from [`uzswap_sys::shared`]. If another process is to take over, its pages must be
    /// unswappable.
    pub fn new(threads: usize, requests: OwnedFd) -> io::Result<Self> {
        let connections = (0..threads).map(|_| fuse::open()).collect::<io::Result<_>>()?;
        Ok(Self { connections, requests })
    }

    /// The connections and requests, from descriptors.
    pub fn of(connections: Vec<OwnedFd>, requests: OwnedFd) -> Self {
        Self { connections, requests }
    }

    /// The connections.
    pub fn connections(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.connections.iter().map(AsFd::as_fd)
    }

    /// The file with the requests.
    pub fn requests(&self) -> BorrowedFd<'_> {
        self.requests.as_fd()
    }

    /// The connections, the mark that they have been used, and a buffer of `bytes`, whole pages,
    /// for each.
    pub(crate) fn open(
        self,
        bytes: usize,
    ) -> io::Result<(Vec<OwnedFd>, Greeted, Vec<RequestBuffer>)> {
        let count = self.connections.len();
        let memory = SharedMemory::map(self.requests, count * bytes + map::PAGE_BYTES)?;
        // SAFETY: one process maps the file at a time: the next server is started when the last is
        // gone, and other processes have only the descriptor. This process maps the memory only
        // here.
        let mut parts = unsafe { memory.into_parts(bytes) }?;
        let greeted = parts.pop().map(Greeted).ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.connections, greeted, parts.into_iter().map(RequestBuffer).collect()))
    }
}

/// A mark that the kernel's first request was answered.
pub(crate) struct Greeted(Part);

impl Greeted {
    pub(crate) fn is_set(&self) -> bool {
        self.0.word(0) != 0
    }

    pub(crate) fn set(&mut self) {
        self.0.set_word(0, 1);
    }
}

/// The memory of a request that a thread has taken.
pub(crate) struct RequestBuffer(Part);

/// Marks an outcome, which is stored in place of the file's number: there is one file, number 1.
const KNOWN: u64 = 1 << 63;

const _: () = assert!(map::PAGE_BYTES > crate::protocol::WRITE_OVERHEAD);

impl RequestBuffer {
    /// Notes that the buffer has no request.
    pub(crate) fn clear(&mut self) {
        self.0.set_word(UNIQUE_AT, 0);
    }

    /// Notes that the buffer's request was served.
    pub(crate) fn set_outcome(&mut self, outcome: Result<(), DiskError>) {
        let errno = outcome.err().map_or(0, request::errno);
        self.0.set_word(OUTCOME_AT, KNOWN | errno as u64);
    }

    /// The outcome of the buffer's request if that was served: an error number or 0.
    pub(crate) fn outcome(&self) -> Option<i32> {
        let word = self.0.word(OUTCOME_AT);
        (word & KNOWN != 0).then_some((word & !KNOWN) as i32)
    }

    /// True if the buffer has a request.
    pub(crate) fn has_request(&self) -> bool {
        self.0.word(UNIQUE_AT) != 0
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::WRITE_OVERHEAD;

    #[test]
    fn a_buffer_has_the_outcome_of_the_request_in_it() {
        let file = uzswap_sys::shared::create("uzswap-test").unwrap();
        let memory = SharedMemory::map(file, 2 * map::PAGE_BYTES).unwrap();
        // SAFETY: no other process has the file.
        let mut parts = unsafe { memory.into_parts(map::PAGE_BYTES) }.unwrap();
        let mut buffer = RequestBuffer(parts.pop().unwrap());
        assert!(!buffer.has_request());
        buffer.bytes_mut()[..WRITE_OVERHEAD].fill(1);
        assert!(buffer.has_request() && buffer.outcome().is_none());
        buffer.set_outcome(Ok(()));
        assert_eq!(buffer.outcome(), Some(0));
        buffer.set_outcome(Err(DiskError::Full));
        assert_eq!(buffer.outcome(), Some(request::errno(DiskError::Full)));
        assert_eq!(buffer.bytes()[4..8], [1; 4], "the rest stays");
        buffer.clear();
        assert!(!buffer.has_request());
    }
}
