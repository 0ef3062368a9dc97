//! Long writes to files. If several processes append to a file (`O_APPEND`), the bytes of one call
//! stay together. So the program's call must stay one call, with all of its memory present. The
//! agent copies memory that it cannot pin. The copy does not count in the budget during the call.

use crate::pins::{BUFFERS_MAX, GivenMemory, Pins, is_moved_whole, peek_bytes};
use crate::{Agent, layout, thread};
use libc::c_long;
use std::ops::Range;
use uzswap_calls::{Call, raw};
use uzswap_sys::map::{PAGE_BYTES, place};

/// Bytes that are pinned and copied at a time.
pub const PART: u64 = 1 << 20;

/// The memory that a write is given. `None` if the call writes no file.
fn given(call: &Call) -> Option<GivenMemory> {
    let [_, at, count, ..] = call.arguments;
    match call.number as c_long {
        libc::SYS_write | libc::SYS_pwrite64 => Some(GivenMemory::One { at, bytes: count }),
        libc::SYS_writev | libc::SYS_pwritev | libc::SYS_pwritev2 => {
            Some(GivenMemory::Vector { at, count })
        }
        _ => None,
    }
}

/// True if a call writes to a file.
pub fn is_write(call: &Call) -> bool {
    given(call).is_some()
}

/// Makes a long write to a file in one call. `false` if the call is no such write, if the kernel
/// will refuse its list, or if there is no memory for a copy.
pub fn write(agent: &Agent, call: &mut Call) -> bool {
    let Some(given) = given(call) else { return false };
    let mut vector = Pins::new(agent);
    if let GivenMemory::Vector { at, count } = given {
        vector.pin(at, count.min(BUFFERS_MAX) * size_of::<libc::iovec>() as u64);
        if GivenMemory::list(at, count).is_none() {
            return false;
        }
    }
    let bytes = given.bytes();
    if !is_moved_whole(call.arguments[0] as i32) {
        return false;
    }
    layout::await_complete();
    let pages = bytes + 2 * PAGE_BYTES as u64 * given.parts().count() as u64;
    if let Some(mut pins) = Pins::of_all(agent, pages) {
        given.parts().for_each(|(at, bytes)| _ = pins.pin(at, bytes));
        // SAFETY: the program's own call.
        call.result = unsafe { raw(call.number, call.arguments) };
        return true;
    }
    let mut used = thread::Use::begin();
    let Some(copy) = map(bytes) else { return false };
    used.note_mapping(copy.clone());
    let copied = copy_parts(agent, given, copy.clone());
    if copied == 0 {
        return false;
    }
    let one = libc::iovec { iov_base: copy.start as *mut _, iov_len: copied };
    let mut arguments = call.arguments;
    (arguments[1], arguments[2]) = match given {
        GivenMemory::One { .. } => (copy.start as u64, copied as u64),
        GivenMemory::Vector { .. } => (&raw const one as u64, 1),
    };
    // SAFETY: the program's call, with a copy of its memory.
    call.result = unsafe { raw(call.number, arguments) };
    true
}

/// Maps memory that does not leave, and belongs neither to the program nor to the pager. The
/// [`thread::Use`] that notes it unmaps it.
pub fn map(bytes: u64) -> Option<Range<usize>> {
    let access = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE) as u64;
    let wanted = place::next(bytes as usize) as u64;
    // SAFETY: a new mapping, where nothing is: the address is a wish.
    let at = unsafe { raw(libc::SYS_mmap as u64, [wanted, bytes, access, flags, u64::MAX, 0]) };
    (at > 0).then_some(at as usize..at as usize + bytes as usize)
}

/// Copies the given memory up to the first unreadable byte, and returns the number of bytes.
fn copy_parts(agent: &Agent, given: GivenMemory, to: Range<usize>) -> usize {
    let mut done = to.start;
    for (at, bytes) in given.parts() {
        let wanted = bytes.min((to.end - done) as u64);
        let copied = copy_part(agent, (at, wanted), done);
        done += copied;
        if (copied as u64) < wanted {
            break;
        }
    }
    done - to.start
}

/// Copies the readable part of a buffer to a mapping that only the caller uses, and returns its
/// length.
pub fn copy_part(agent: &Agent, (at, bytes): (u64, u64), to: usize) -> usize {
    let mut done = 0;
    while done < bytes {
        let count = (bytes - done).min(PART) as usize;
        let from = at.wrapping_add(done);
        let mut pins = Pins::new(agent);
        pins.pin(from, count as u64);
        // SAFETY: the caller's own mapping.
        let part =
            unsafe { std::slice::from_raw_parts_mut((to + done as usize) as *mut u8, count) };
        let read = peek_bytes(from, part);
        done += read as u64;
        if read < count {
            break;
        }
    }
    done as usize
}
