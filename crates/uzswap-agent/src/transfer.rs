//! `read`, `write`, `pread` and `pwrite`: a long call is made in parts, until a part is incomplete.
//!
//! Threads and processes may share an open file and its position. The kernel serves one read there
//! at a time. So a long read first moves the position by all bytes that it will read. Then it reads
//! its parts at their places ([`TakenPart`]).

use crate::pins::{
    BYTES_MAX, Pins, TRIES, is_beyond, is_moved_whole, is_type, make_once, moves_nothing_by_error,
    status_of,
};
use crate::{Agent, layout, own_files, unlisted, whole};
use libc::c_long;
use uzswap_calls::{Call, Outcome, raw};

/// See the module.
pub fn transfer(agent: &Agent, call: &mut Call) -> Outcome {
    let [file, at, bytes, ..] = call.arguments;
    let number = call.number as c_long;
    layout::await_complete();
    if is_beyond(at, bytes) {
        // The kernel refuses the whole call, but would accept a part of it.
        make_once(call);
        return Outcome::Done;
    }
    let bytes = bytes.min(BYTES_MAX);
    let is_cut = || Pins::of_file(agent, file, bytes).left() < bytes;
    let is_write = matches!(number, libc::SYS_write | libc::SYS_pwrite64);
    // Writes to the file of the process's memory are made part by part.
    let may_be_memory = own_files::may_show_memory();
    if is_write && !may_be_memory && is_cut() && whole::write(agent, call) {
        return Outcome::Done;
    }
    let is_long_read = number == libc::SYS_read && is_cut();
    match is_long_read.then(|| TakenPart::take(file, bytes)).flatten() {
        Some(taken) => {
            let number = libc::SYS_pread64 as u64;
            let arguments = [file, at, bytes, taken.start, 0, 0];
            let mut read = Call { number, arguments, result: Call::NOT_MADE };
            move_parts(agent, &mut read, (bytes, taken.bytes));
            taken.give_back(read.result);
            call.result = read.result;
        }
        None => move_parts(agent, call, (bytes, bytes)),
    }
    if number == libc::SYS_pread64 {
        own_files::read_pagemap(agent, call);
    }
    if !is_write {
        unlisted::correct_text(agent, call);
    }
    Outcome::Done
}

/// Makes a call of `bytes` bytes part by part, up to `all` of them.
fn move_parts(agent: &Agent, call: &mut Call, (bytes, all): (u64, u64)) {
    let [file, at, _, place, ..] = call.arguments;
    let number = call.number as c_long;
    let is_write = matches!(number, libc::SYS_write | libc::SYS_pwrite64);
    let is_at_place = matches!(number, libc::SYS_pread64 | libc::SYS_pwrite64);
    let (mut done, mut tries) = (0, 0);
    loop {
        let mut pins = Pins::of_file(agent, file, bytes - done);
        let part = (bytes - done).min(pins.left()).min(in_blocks(all - done));
        pins.pin(at + done, part);
        let place = if is_at_place { place.wrapping_add(done) } else { place };
        let arguments = [file, at + done, part, place, call.arguments[4], call.arguments[5]];
        let shown = own_files::show(agent, call, done, part);
        // SAFETY: a part of the program's request.
        let result = unsafe { raw(call.number, arguments) };
        drop((shown, pins));
        let buffer = (at + done) as usize..(at + done + part) as usize;
        if result == -i64::from(libc::EFAULT)
            && tries < TRIES
            && agent.pager.has_adopted(buffer)
            && moves_nothing_by_error(call)
        {
            // Another thread has changed the mapping, or a handler has unpinned the pages.
            tries += 1;
            continue;
        }
        if result < 0 {
            call.result = if done > 0 { done as i64 } else { result };
            return;
        }
        let moved = (result as u64).min(all - done);
        done += moved;
        let is_whole = moved == part && done < all;
        // A pipe or a terminal may never deliver more.
        if !is_whole || !is_write && !is_moved_whole(file as i32) {
            call.result = done as i64;
            return;
        }
    }
}

/// The bytes to ask for where `bytes` are left of a file. A file that is read past the page cache
/// (`O_DIRECT`) is read in whole blocks, also at its end.
pub fn in_blocks(bytes: u64) -> u64 {
    const BLOCK: u64 = 64 << 10;
    bytes.checked_next_multiple_of(BLOCK).unwrap_or(bytes)
}

/// A part of a regular file that a read has taken by moving the position behind it.
pub struct TakenPart {
    file: u64,
    pub start: u64,
    pub bytes: u64,
}

impl TakenPart {
    /// Takes up to `bytes` bytes of the file from its position. `None` if the file has none there,
    /// or if its size is unknown, as in `/proc`.
    pub fn take(file: u64, bytes: u64) -> Option<Self> {
        if !is_type(file as i32, libc::S_IFREG) {
            return None;
        }
        let size = status_of(file as i32)?.st_size;
        let left = size.checked_sub(seek(file, 0)).filter(|left| (1..=size).contains(left))?;
        let bytes = bytes.min(left as u64);
        let end = u64::try_from(seek(file, bytes as i64)).ok()?;
        Some(Self { file, start: end.checked_sub(bytes)?, bytes })
    }

    /// Moves the position back by the bytes that the read did not return.
    pub fn give_back(self, result: i64) {
        let missing = self.bytes as i64 - result.max(0);
        if missing > 0 {
            seek(self.file, -missing);
        }
    }
}

/// Moves a file's position by `by` bytes, and returns the new position, or an error.
fn seek(file: u64, by: i64) -> i64 {
    let arguments = [file, by as u64, libc::SEEK_CUR as u64, 0, 0, 0];
    // SAFETY: given numbers only.
    unsafe { raw(libc::SYS_lseek as u64, arguments) }
}
