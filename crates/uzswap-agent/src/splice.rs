//! `vmsplice`: the kernel would still use the program's pages after the call, when they may leave.
//! So a pipe gets pages of ours with the same bytes. The bytes begin at the same offsets in their
//! pages, so that the same number of bytes fits into the pipe. If the call reads from a pipe, the
//! kernel itself makes a copy.

use crate::pins::{
    BUFFERS_MAX, GivenMemory, Pins, is_type, make_once, make_until_it_sees, pin_vector, refuse,
};
use crate::{Agent, layout, thread, whole};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::map::PAGE_BYTES;

/// See the module.
pub fn splice(agent: &Agent, call: &mut Call) -> Outcome {
    let [file, vector, count, ..] = call.arguments;
    layout::await_complete();
    let mut pins = Pins::new(agent);
    let is_reader = ask(file, libc::F_GETFL) & i64::from(libc::O_ACCMODE) == libc::O_RDONLY.into();
    if is_reader || !is_type(file as i32, libc::S_IFIFO) {
        pin_vector(&mut pins, vector, count);
        make_until_it_sees(agent, call, &[1]);
        return Outcome::Done;
    }
    pins.pin(vector, count.min(BUFFERS_MAX) * size_of::<libc::iovec>() as u64);
    match GivenMemory::list(vector, count) {
        Some(given) if given.bytes() > 0 => give_copy(agent, call, given),
        // The kernel refuses the list, or does nothing.
        _ => make_once(call),
    }
    Outcome::Done
}

/// The answer of `fcntl` to a question about a descriptor.
fn ask(file: u64, command: i32) -> i64 {
    // SAFETY: asks only.
    unsafe { raw(libc::SYS_fcntl as u64, [file, command as u64, 0, 0, 0, 0]) }
}

/// Gives a pipe a copy of the bytes, up to its free room.
fn give_copy(agent: &Agent, call: &mut Call, given: GivenMemory) {
    // A part of a page takes as much of the pipe as a whole one.
    let pages =
        ask(call.arguments[0], libc::F_GETPIPE_SZ).max(PAGE_BYTES as i64) as usize / PAGE_BYTES;
    let list_bytes = (pages * size_of::<libc::iovec>()).next_multiple_of(PAGE_BYTES);
    let mut used = thread::Use::begin();
    let Some(copy) = whole::map((list_bytes + pages * PAGE_BYTES) as u64) else {
        call.result = -i64::from(libc::ENOMEM);
        return;
    };
    used.note_mapping(copy.clone());
    let list = copy.start as *mut libc::iovec;
    let (mut to, mut number) = (copy.start + list_bytes, 0);
    for (at, bytes) in given.parts().filter(|(_, bytes)| *bytes > 0) {
        let place = to + at as usize % PAGE_BYTES;
        let room = copy.end.saturating_sub(place) as u64;
        let copied = whole::copy_part(agent, (at, bytes.min(room)), place);
        if copied > 0 {
            let part = libc::iovec { iov_base: place as *mut _, iov_len: copied };
            // SAFETY: each part has a page of its own at least, and the list has room for as many
            // parts as there are pages. The mapping is ours alone.
            unsafe { list.add(number).write(part) };
            number += 1;
        }
        if (copied as u64) < bytes {
            break;
        }
        to = (place + copied).next_multiple_of(PAGE_BYTES);
    }
    if number == 0 {
        // The first byte of the memory cannot be read.
        refuse(call, libc::EFAULT);
        return;
    }
    let [file, _, _, flags, ..] = call.arguments;
    // SAFETY: the program's call, with a copy of its memory, which no thread changes.
    call.result = unsafe { raw(call.number, [file, list as u64, number as u64, flags, 0, 0]) };
}
