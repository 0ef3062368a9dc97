//! The kernel's files that show this process's memory: `/proc/self/pagemap` lists the pages,
//! `/proc/self/mem` reads and writes them.

use crate::pins::{BUFFERS_MAX, Pins, buffer_of, peek_bytes};
use crate::{Agent, inside};
use libc::c_long;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_calls::{Call, raw};
use uzswap_region::Mode;
use uzswap_sys::map::PAGE_BYTES;

/// Corrects the kernel's list of this process's pages, if a call has read that list. The kernel
/// lists a guard as a swapped-out page, but the page is absent.
pub fn read_pagemap(agent: &Agent, call: &Call) {
    const ENTRY: u64 = size_of::<u64>() as u64;
    const SWAPPED_OR_GUARD: u64 = 1 << 62 | 1 << 58;
    let [file, to, _, offset, ..] = call.arguments;
    let mut pins = Pins::new(agent);
    let bytes = pins.left().min(call.result.max(0) as u64);
    if crate::mode() == Mode::InThread
        || bytes == 0
        || !(bytes | offset).is_multiple_of(ENTRY)
        || !is_own(file as i32, "pagemap")
    {
        return;
    }
    pins.pin(to, bytes);
    for number in 0..bytes / ENTRY {
        let page = (offset / ENTRY + number) as usize * PAGE_BYTES;
        if agent.pager.is_out(page) {
            let entry = (to + number * ENTRY) as *mut u64;
            // SAFETY: the kernel has just written there, and the page is pinned.
            unsafe { entry.write_unaligned(entry.read_unaligned() & !SWAPPED_OR_GUARD) };
        }
    }
}

/// True once the program has opened a file of its memory. By such a file, the kernel reads absent
/// pages as zeros in the mode of protection. In other modes it answers `EIO`, or stops before an
/// absent page. So we bring the pages in first.
static IS_MEMORY_OPEN: AtomicBool = AtomicBool::new(false);

/// True if a call may be of a file of the process's memory.
#[inline(always)]
pub fn may_show_memory() -> bool {
    IS_MEMORY_OPEN.load(Relaxed)
}

/// Notes the files that the program has open before it is taken over, by their names.
pub fn note_open(mut names: impl Iterator<Item = PathBuf>) {
    let own = format!("/proc/{}/", std::process::id());
    if names.any(|name| name.starts_with(&own) && name.ends_with(MEMORY)) {
        IS_MEMORY_OPEN.store(true, Relaxed);
    }
}

const MEMORY: &str = "mem";

/// Looks at a call that opens a file.
pub fn before_open(call: &Call) {
    let at = match call.number as c_long {
        libc::SYS_open => call.arguments[0],
        libc::SYS_openat | libc::SYS_openat2 => call.arguments[1],
        _ => return,
    };
    // The kernel's file has a short path.
    let mut path = [0u8; 64];
    let read = peek_bytes(at, &mut path);
    let mut parts = path[..read].split(|byte| *byte == 0);
    if parts.next().is_some_and(|path| path.ends_with(MEMORY.as_bytes())) {
        IS_MEMORY_OPEN.store(true, Relaxed);
    }
}

/// Pins the bytes that a call reads or writes through the file of memory, behind the `done` bytes
/// that were moved already.
pub fn show<'a>(agent: &'a Agent, call: &Call, done: u64, bytes: u64) -> Option<Pins<'a>> {
    let [file, _, _, offset, ..] = call.arguments;
    if !may_show_memory() || !is_own(file as i32, MEMORY) {
        return None;
    }
    let is_at_place = match call.number as c_long {
        libc::SYS_preadv2 | libc::SYS_pwritev2 => offset != u64::MAX,
        libc::SYS_pread64 | libc::SYS_pwrite64 | libc::SYS_preadv | libc::SYS_pwritev => true,
        _ => false,
    };
    let place = match is_at_place {
        true => offset.wrapping_add(done),
        // SAFETY: the call asks for the place only.
        false => unsafe {
            raw(libc::SYS_lseek as u64, [file, 0, libc::SEEK_CUR as u64, 0, 0, 0]) as u64
        },
    };
    let mut pins = Pins::new(agent);
    pins.pin(place, bytes);
    Some(pins)
}

/// As [`show`], for a call with a list of buffers.
pub fn show_to_list<'a>(agent: &'a Agent, call: &Call) -> Option<Pins<'a>> {
    const LISTS: [c_long; 6] = [
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_preadv,
        libc::SYS_pwritev,
        libc::SYS_preadv2,
        libc::SYS_pwritev2,
    ];
    let [_, list, count, ..] = call.arguments;
    if !may_show_memory() || !LISTS.contains(&(call.number as c_long)) {
        return None;
    }
    let buffers = (0..count.min(BUFFERS_MAX)).map_while(|number| buffer_of(list, number));
    show(agent, call, 0, buffers.fold(0u64, |sum, (_, bytes)| sum.saturating_add(bytes)))
}

/// True if a file is the kernel's file of this name about this process. The kernel reports such
/// files as empty.
fn is_own(file: i32, name: &str) -> bool {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [file as u64, status.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the status to the given place; all-zero bytes are a valid status.
    let (told, status) = unsafe { (raw(libc::SYS_fstat as u64, arguments), status.assume_init()) };
    if told != 0 || status.st_size != 0 || status.st_mode & libc::S_IFMT != libc::S_IFREG {
        return false;
    }
    let _inside = inside();
    let own = format!("/proc/{}/", std::process::id());
    let path = std::fs::read_link(format!("/proc/thread-self/fd/{file}"));
    path.is_ok_and(|path| path.starts_with(&own) && path.ends_with(name))
}
