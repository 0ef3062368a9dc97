//! The part of the FUSE protocol that one regular file needs.
//!
//! Layouts are those of include/uapi/linux/fuse.h, version 7.31; every field is in the machine's
//! byte order. A request is a header of 40 bytes and arguments; a reply a header of 16 and results.

/// Bytes of a request's header.
const REQUEST_HEADER: usize = 40;
/// Bytes of a reply's header.
const REPLY_HEADER: usize = 16;
/// Bytes before the data of a write.
pub(crate) const WRITE_OVERHEAD: usize = REQUEST_HEADER + 40;
/// The offsets of a request's number, and of the file's number. There is one file.
pub(crate) const UNIQUE_AT: usize = 8;
pub(crate) const OUTCOME_AT: usize = 16;
/// Longest reply, without the data of a read.
const REPLY_BYTES_MAX: usize = 128;

const VERSION: (u32, u32) = (7, 31);

pub(crate) mod opcode {
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
}

/// Several direct I/O requests may be under way.
const INIT_ASYNC_DIO: u32 = 1 << 15;
/// Writes of more than a page.
const INIT_BIG_WRITES: u32 = 1 << 5;
/// The reply to INIT has `max_pages`.
const INIT_MAX_PAGES: u32 = 1 << 22;
/// I/O bypasses the page cache.
const OPEN_DIRECT_IO: u32 = 1;
/// Writes need not wait for each other.
const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
/// The kernel sends no FLUSH when a descriptor is closed (Linux 5.16). A process cannot die before
/// FLUSH is answered, even when it is killed.
const OPEN_NO_FLUSH: u32 = 1 << 5;

/// The kind of request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    Init {
        minor: u32,
        flags: u32,
    },
    GetAttributes,
    Open,
    Read {
        offset: u64,
        bytes: usize,
    },
    Write {
        offset: u64,
        bytes: usize,
    },
    Discard {
        offset: u64,
        bytes: u64,
    },
    /// Release, sync: answered, and nothing else is done.
    Nothing,
    /// A descriptor was closed. The refusal stops further FLUSH requests (before Linux 5.16).
    Flush,
    /// The kernel expects no reply.
    Silent,
    /// The file system is gone.
    Destroy,
    /// A request that does not apply to such a file.
    Unknown,
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) unique: u64,
    pub(crate) ask: Ask,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

impl Request {
    /// Parses a request from the device; `None` if it is cut short.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let arguments = bytes.get(REQUEST_HEADER..)?;
        let ask = match u32_at(bytes, 4)? {
            opcode::INIT => {
                Ask::Init { minor: u32_at(arguments, 4)?, flags: u32_at(arguments, 12)? }
            }
            opcode::GETATTR => Ask::GetAttributes,
            opcode::OPEN => Ask::Open,
            opcode::READ => {
                Ask::Read { offset: u64_at(arguments, 8)?, bytes: u32_at(arguments, 16)? as usize }
            }
            opcode::WRITE => {
                let length = u32_at(arguments, 16)? as usize;
                bytes.get(WRITE_OVERHEAD..WRITE_OVERHEAD + length)?;
                Ask::Write { offset: u64_at(arguments, 8)?, bytes: length }
            }
            opcode::FALLOCATE => discard(arguments)?,
            opcode::RELEASE | opcode::FSYNC => Ask::Nothing,
            opcode::FLUSH => Ask::Flush,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => Ask::Silent,
            opcode::DESTROY => Ask::Destroy,
            _ => Ask::Unknown,
        };
        Some(Self { unique: u64_at(bytes, 8)?, ask })
    }
}

/// A request to punch a hole, or to write zeros, which has the same effect here. Other modes would
/// change the size.
fn discard(arguments: &[u8]) -> Option<Ask> {
    let mode = u32_at(arguments, 24)?;
    let punch = (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE) as u32;
    let zero = libc::FALLOC_FL_ZERO_RANGE as u32;
    let keep = libc::FALLOC_FL_KEEP_SIZE as u32;
    Some(if mode == punch || mode & !keep == zero {
        Ask::Discard { offset: u64_at(arguments, 8)?, bytes: u64_at(arguments, 16)? }
    } else {
        Ask::Unknown
    })
}

/// A reply in the making, without the data of a read.
pub(crate) struct Reply {
    bytes: [u8; REPLY_BYTES_MAX],
    len: usize,
}

impl Reply {
    /// An empty success.
    pub(crate) fn ok(unique: u64) -> Self {
        let mut reply = Self { bytes: [0; REPLY_BYTES_MAX], len: REPLY_HEADER };
        reply.bytes[8..16].copy_from_slice(&unique.to_ne_bytes());
        reply
    }

    /// A failure; `errno` is positive, as in errno.h.
    pub(crate) fn error(unique: u64, errno: i32) -> Self {
        let mut reply = Self::ok(unique);
        reply.bytes[4..8].copy_from_slice(&(-errno).to_ne_bytes());
        reply
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        let at = REPLY_HEADER + at;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// The answer to `Init`, which accepts some of the kernel's offers.
    pub(crate) fn init(unique: u64, minor: u32, flags: u32, request_bytes_max: usize) -> Self {
        let mut reply = Self::ok(unique);
        let flags = flags & (INIT_ASYNC_DIO | INIT_BIG_WRITES | INIT_MAX_PAGES);
        let pages = (request_bytes_max / 4096) as u16;
        reply.put(0, &VERSION.0.to_ne_bytes());
        reply.put(4, &VERSION.1.min(minor).to_ne_bytes());
        reply.put(12, &flags.to_ne_bytes());
        // The maximum number of requests under way; the kernel holds others back. A loop device
        // sends up to 128.
        reply.put(16, &128u16.to_ne_bytes());
        reply.put(18, &96u16.to_ne_bytes());
        reply.put(20, &(request_bytes_max as u32).to_ne_bytes());
        reply.put(24, &1u32.to_ne_bytes());
        reply.put(28, &pages.to_ne_bytes());
        reply.len = REPLY_HEADER + 64;
        reply
    }

    /// The answer to `GetAttributes`: a regular file of `bytes` bytes.
    pub(crate) fn attributes(unique: u64, bytes: u64) -> Self {
        let mut reply = Self::ok(unique);
        // Valid for a day, in seconds: no attribute of the file ever changes.
        reply.put(0, &86_400u64.to_ne_bytes());
        let attributes = 16;
        reply.put(attributes, &1u64.to_ne_bytes());
        reply.put(attributes + 8, &bytes.to_ne_bytes());
        reply.put(attributes + 16, &(bytes / 512).to_ne_bytes());
        reply.put(attributes + 60, &(libc::S_IFREG | 0o600).to_ne_bytes());
        reply.put(attributes + 64, &1u32.to_ne_bytes());
        reply.put(attributes + 80, &4096u32.to_ne_bytes());
        reply.len = REPLY_HEADER + attributes + 88;
        reply
    }

    /// The answer to `Open`.
    pub(crate) fn opened(unique: u64) -> Self {
        let mut reply = Self::ok(unique);
        let flags = OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES | OPEN_NO_FLUSH;
        reply.put(8, &flags.to_ne_bytes());
        reply.len = REPLY_HEADER + 16;
        reply
    }

    /// The answer to `Write`.
    pub(crate) fn written(unique: u64, bytes: usize) -> Self {
        let mut reply = Self::ok(unique);
        reply.put(0, &(bytes as u32).to_ne_bytes());
        reply.len = REPLY_HEADER + 8;
        reply
    }

    /// The bytes that go before `data` bytes of a read.
    pub(crate) fn finish(&mut self, data: usize) -> &[u8] {
        let total = (self.len + data) as u32;
        self.bytes[0..4].copy_from_slice(&total.to_ne_bytes());
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: u32, arguments: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; REQUEST_HEADER];
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[8..16].copy_from_slice(&77u64.to_ne_bytes());
        bytes.extend_from_slice(arguments);
        bytes
    }

    fn read_or_write(offset: u64, bytes: u32) -> Vec<u8> {
        let mut arguments = vec![0; 40];
        arguments[8..16].copy_from_slice(&offset.to_ne_bytes());
        arguments[16..20].copy_from_slice(&bytes.to_ne_bytes());
        arguments
    }

    #[test]
    fn reads_and_writes_are_parsed() {
        let read = Request::parse(&request(opcode::READ, &read_or_write(8192, 4096))).unwrap();
        assert_eq!(read.unique, 77);
        assert_eq!(read.ask, Ask::Read { offset: 8192, bytes: 4096 });
        let mut write = request(opcode::WRITE, &read_or_write(4096, 4));
        assert!(Request::parse(&write).is_none(), "the data is missing");
        write.extend_from_slice(b"data");
        let ask = Request::parse(&write).unwrap().ask;
        assert_eq!(ask, Ask::Write { offset: 4096, bytes: 4 });
    }

    #[test]
    fn only_holes_and_zeros_are_discards() {
        let fallocate = |mode: i32| {
            let mut arguments = vec![0; 32];
            arguments[8..16].copy_from_slice(&4096u64.to_ne_bytes());
            arguments[16..24].copy_from_slice(&8192u64.to_ne_bytes());
            arguments[24..28].copy_from_slice(&mode.to_ne_bytes());
            Request::parse(&request(opcode::FALLOCATE, &arguments)).unwrap().ask
        };
        let discard = Ask::Discard { offset: 4096, bytes: 8192 };
        assert_eq!(fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE), discard);
        assert_eq!(fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE), discard);
        assert_eq!(fallocate(0), Ask::Unknown);
    }

    /// A killed process with the file open would wait for its own answer.
    #[test]
    fn a_process_that_closes_the_file_waits_for_no_answer() {
        let mut opened = Reply::opened(9);
        let flags = u32_at(opened.finish(0), REPLY_HEADER + 8).unwrap();
        assert_eq!(flags & OPEN_NO_FLUSH, OPEN_NO_FLUSH);
        let flush = Request::parse(&request(opcode::FLUSH, &[0; 24])).unwrap();
        assert_eq!(flush.ask, Ask::Flush, "an older kernel asks, and is told not to again");
    }

    #[test]
    fn any_bytes_are_a_request_or_none() {
        let mut state = 1u64;
        for length in 0..200 {
            let bytes: Vec<u8> = (0..length)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            let parsed = Request::parse(&bytes);
            assert!(parsed.is_none() || length >= REQUEST_HEADER);
        }
    }

    #[test]
    fn replies_say_their_length() {
        let mut reply = Reply::error(9, libc::EIO);
        let bytes = reply.finish(0);
        assert_eq!(bytes.len(), REPLY_HEADER);
        assert_eq!(bytes[0..4], 16u32.to_ne_bytes());
        assert_eq!(bytes[4..8], (-5i32).to_ne_bytes());
        assert_eq!(Reply::ok(9).finish(4096)[0..4], 4112u32.to_ne_bytes());
        assert_eq!(Reply::attributes(9, 1 << 30).finish(0).len(), 16 + 104);
    }
}
