//! Calls that move more than may be pinned at one time, but must be complete. The kernel would stop
//! at an absent page, so the agent makes these calls in parts, each with its memory pinned.
//!
//! A blocking call on a stream moves all of its bytes. A list of messages ends at a message whose
//! memory is absent, and that message is lost.

use crate::pins::{
    BUFFERS_MAX, BYTES_MAX, GivenMemory, MOST, Pins, UNTOLD, is_stream, is_type, pin_header,
    pin_message, poke,
};
use crate::{Agent, own_files, thread, whole};
use libc::c_long;
use std::mem::offset_of;
use std::ops::Range;
use uzswap_calls::{Call, raw};
use uzswap_sys::map::PAGE_BYTES;

/// A kind of long call.
pub enum Long {
    Messages,
    Stream,
    Packets,
    Random,
}

/// The kind of a call; `None` if it is not made in parts.
pub fn kind(call: &Call) -> Option<Long> {
    let [file, _, second, third, ..] = call.arguments;
    let kind = match call.number as c_long {
        libc::SYS_recvmmsg | libc::SYS_sendmmsg => return Some(Long::Messages),
        libc::SYS_getrandom => return Some(Long::Random),
        libc::SYS_writev if is_pipe_of_packets(file) => return Some(Long::Packets),
        libc::SYS_writev => is_pipe_or_stream(file) && !own_files::may_show_memory(),
        // For each call with MSG_ZEROCOPY the kernel reports once that it no longer needs the
        // memory.
        libc::SYS_sendto => third as i32 & libc::MSG_ZEROCOPY == 0 && is_stream_socket(file),
        libc::SYS_sendmsg => second as i32 & libc::MSG_ZEROCOPY == 0 && is_stream_socket(file),
        libc::SYS_recvfrom => waits_for_all(third) && is_stream_socket(file),
        libc::SYS_recvmsg => waits_for_all(second) && is_stream_socket(file),
        _ => false,
    };
    kind.then_some(Long::Stream)
}

/// Makes a call in parts. `false` if the call's memory cannot be read. Then the call was not made.
pub fn make(agent: &Agent, call: &mut Call, kind: &Long) -> bool {
    let result = match kind {
        Long::Messages => Some(messages(agent, call)),
        Long::Stream => Stream::of(agent, call),
        Long::Packets => packets(agent, call),
        Long::Random => Some(random(agent, call)),
    };
    if let Some(result) = result {
        call.result = result;
    }
    result.is_some()
}

fn waits_for_all(flags: u64) -> bool {
    flags as i32 & (libc::MSG_WAITALL | libc::MSG_PEEK) == libc::MSG_WAITALL
}

fn is_stream_socket(file: u64) -> bool {
    is_type(file as i32, libc::S_IFSOCK) && is_stream(file as i32)
}

fn is_pipe_or_stream(file: u64) -> bool {
    is_type(file as i32, libc::S_IFIFO) || is_stream_socket(file)
}

/// True for a pipe each of whose packets one `read` takes (`O_DIRECT`).
fn is_pipe_of_packets(file: u64) -> bool {
    // SAFETY: asks for the flags of a descriptor.
    let flags = || unsafe { raw(libc::SYS_fcntl as u64, [file, libc::F_GETFL as u64, 0, 0, 0, 0]) };
    is_type(file as i32, libc::S_IFIFO) && flags() & i64::from(libc::O_DIRECT) != 0
}

/// The answer to a call whose parts have moved `done` bytes, and whose last part answered `result`.
fn sum(done: i64, result: i64) -> i64 {
    if result < 0 && done > 0 { done } else { done + result }
}

/// A call on a stream.
struct Stream {
    number: c_long,
    arguments: [u64; 6],
    /// The message of `sendmsg` or `recvmsg`.
    message: Option<libc::msghdr>,
    /// True if a message had control data (`SCM_RIGHTS`). The kernel stops after such a message.
    has_control: bool,
}

impl Stream {
    fn of(agent: &Agent, call: &Call) -> Option<i64> {
        let [_, at, bytes, ..] = call.arguments;
        let number = call.number as c_long;
        let mut rest = Pins::new(agent);
        let (message, given) = match number {
            libc::SYS_writev => (None, GivenMemory::list(at, bytes)?),
            libc::SYS_sendto | libc::SYS_recvfrom => {
                rest.pin(call.arguments[4], UNTOLD);
                rest.pin(call.arguments[5], size_of::<u32>() as u64);
                (None, GivenMemory::One { at, bytes: bytes.min(BYTES_MAX) })
            }
            _ => {
                let message = pin_header(&mut rest, at)?;
                (
                    Some(message),
                    GivenMemory::list(message.msg_iov as u64, message.msg_iovlen as u64)?,
                )
            }
        };
        let mut stream = Self { number, arguments: call.arguments, message, has_control: false };
        let mut done = 0;
        for (start, bytes) in given.parts() {
            let mut moved = 0;
            while moved < bytes {
                let part = (start.wrapping_add(moved), (bytes - moved).min(MOST));
                let mut pins = Pins::new(agent);
                pins.pin(part.0, part.1);
                let result = stream.make_part(part, done == 0);
                done = sum(done, result);
                if result < 0 || result as u64 != part.1 || stream.has_control {
                    return Some(done);
                }
                moved += part.1;
            }
        }
        Some(done)
    }

    /// Moves a part. Only the first part has an address and a control message. Only at the first
    /// part may a broken stream raise a signal. Later the answer is the number of bytes that were
    /// moved.
    fn make_part(&mut self, (at, bytes): (u64, u64), is_first: bool) -> i64 {
        let part = libc::iovec { iov_base: at as *mut _, iov_len: bytes as usize };
        let [file, _, _, flags, name, name_bytes] = self.arguments;
        let quiet = if is_first { 0 } else { libc::MSG_NOSIGNAL as u64 };
        let arguments = match self.number {
            libc::SYS_writev => [file, &raw const part as u64, 1, 0, 0, 0],
            libc::SYS_sendto if is_first => [file, at, bytes, flags, name, name_bytes],
            libc::SYS_sendto => [file, at, bytes, flags | quiet, 0, 0],
            libc::SYS_recvfrom => [file, at, bytes, flags, name, name_bytes],
            _ => return self.make_message(part, is_first, quiet),
        };
        // SAFETY: a part of the program's request.
        unsafe { raw(self.number as u64, arguments) }
    }

    fn make_message(&mut self, mut part: libc::iovec, is_first: bool, quiet: u64) -> i64 {
        let [file, header, flags, ..] = self.arguments;
        let Some(mut message) = self.message else { return -i64::from(libc::EFAULT) };
        let is_read = self.number == libc::SYS_recvmsg;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !is_first && !is_read {
            (message.msg_name, message.msg_namelen) = (std::ptr::null_mut(), 0);
            (message.msg_control, message.msg_controllen) = (std::ptr::null_mut(), 0);
        }
        let flags = if is_read { flags } else { flags | quiet };
        let arguments = [file, &raw mut message as u64, flags, 0, 0, 0];
        // SAFETY: a part of the program's request; the header is a copy that names only that part.
        let result = unsafe { raw(self.number as u64, arguments) };
        if is_read && result >= 0 {
            let field = |offset: usize| header + offset as u64;
            poke(field(offset_of!(libc::msghdr, msg_namelen)), &message.msg_namelen);
            poke(field(offset_of!(libc::msghdr, msg_controllen)), &message.msg_controllen);
            poke(field(offset_of!(libc::msghdr, msg_flags)), &message.msg_flags);
            self.has_control = message.msg_controllen > 0;
        }
        result
    }
}

/// `writev` to a pipe of packets. The kernel makes a packet of each page of the list's bytes,
/// across its buffers. So parts end where such a page ends. Each part is a copy, since it may have
/// more buffers than may be pinned.
fn packets(agent: &Agent, call: &Call) -> Option<i64> {
    let [file, list, count, ..] = call.arguments;
    let given = GivenMemory::list(list, count)?;
    let mut used = thread::Use::begin();
    let copy = whole::map(whole::PART)?;
    used.note_mapping(copy.clone());
    let (mut done, mut filled) = (0, 0);
    let mut parts = given.parts();
    let mut rest = parts.next();
    while let Some((at, bytes)) = rest {
        let part = bytes.min(whole::PART - filled as u64);
        let copied = whole::copy_part(agent, (at, part), copy.start + filled);
        filled += copied;
        let is_read = copied as u64 == part;
        if !is_read {
            // If the kernel cannot read all of a packet, it writes no part of the packet.
            filled = filled / PAGE_BYTES * PAGE_BYTES;
        }
        rest = match bytes - part {
            _ if !is_read => None,
            0 => parts.next(),
            more => Some((at.wrapping_add(part), more)),
        };
        if rest.is_none() || filled as u64 == whole::PART {
            // SAFETY: bytes of a mapping of ours, to the program's file.
            let write = || unsafe { raw(libc::SYS_write as u64, arguments(file, &copy, filled)) };
            let is_beyond = !is_read && filled == 0;
            let result = if is_beyond { -i64::from(libc::EFAULT) } else { write() };
            done = sum(done, result);
            if result != filled as i64 {
                break;
            }
            filled = 0;
        }
    }
    Some(done)
}

fn arguments(file: u64, copy: &Range<usize>, bytes: usize) -> [u64; 6] {
    [file, copy.start as u64, bytes as u64, 0, 0, 0]
}

/// `recvmmsg`, `sendmmsg`, in parts: a part has no more messages than may be pinned.
fn messages(agent: &Agent, call: &Call) -> i64 {
    const BYTES: u64 = size_of::<libc::mmsghdr>() as u64;
    let [file, all, count, flags, time, _] = call.arguments;
    // By one call the kernel sends at most `BUFFERS_MAX` messages.
    let is_sent = call.number as c_long == libc::SYS_sendmmsg;
    let count = u64::from(count as u32).min(if is_sent { BUFFERS_MAX } else { u64::MAX });
    let mut done = 0;
    while (done as u64) < count {
        let first = all.wrapping_add(done as u64 * BYTES);
        let mut pins = Pins::new(agent);
        pins.pin(time, size_of::<libc::timespec>() as u64);
        let fits = |number: &u64| {
            // First, since the kernel writes there once a message is received.
            pins.pin(first.wrapping_add(number * BYTES), BYTES);
            pin_message(&mut pins, first.wrapping_add(number * BYTES));
            pins.left() > 0
        };
        let some = 0..(count - done as u64).min(BUFFERS_MAX);
        let part = some.take_while(fits).count().max(1);
        let waits_for_one = flags & libc::MSG_WAITFORONE as u64 != 0 && done > 0;
        let more = if waits_for_one { libc::MSG_DONTWAIT as u64 } else { 0 };
        let arguments = [file, first, part as u64, flags | more, time, 0];
        // SAFETY: a part of the program's list, with the time that it has given.
        let result = unsafe { raw(call.number, arguments) };
        done = sum(done, result);
        if result < part as i64 {
            break;
        }
    }
    done
}

/// `getrandom`.
fn random(agent: &Agent, call: &Call) -> i64 {
    let [at, bytes, flags, ..] = call.arguments;
    let bytes = bytes.min(BYTES_MAX);
    let mut done = 0;
    while (done as u64) < bytes {
        let (from, part) = (at.wrapping_add(done as u64), (bytes - done as u64).min(MOST));
        let mut pins = Pins::new(agent);
        pins.pin(from, part);
        // SAFETY: a part of the program's request.
        let result = unsafe { raw(call.number, [from, part, flags, 0, 0, 0]) };
        done = sum(done, result);
        if result != part as i64 {
            break;
        }
    }
    done
}
