//! The kernel's files that show this process's memory: `/proc/self/pagemap` lists the pages,
//! `/proc/self/mem` reads and writes them. Others list its threads and descriptors, from which
//! [`crate::unlisted`] takes ours.

use crate::pins::{BUFFERS_MAX, Pins, buffer_of, peek_bytes};
use crate::{Agent, inside, threads};
use libc::c_long;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_calls::{Call, older, raw};
use uzswap_region::Mode;
use uzswap_sys::fault_signals;
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

/// True once the program has opened a file or folder that lists its threads or descriptors.
static IS_LIST_OPEN: AtomicBool = AtomicBool::new(false);

/// True if a call may be of one of these files.
#[inline(always)]
pub fn may_be_of_process() -> bool {
    may_show_memory() || IS_LIST_OPEN.load(Relaxed)
}

/// Notes the files that the program has open before it is taken over, by their names.
pub fn note_open(names: impl Iterator<Item = PathBuf>) {
    let own = format!("/proc/{}/", std::process::id());
    for name in names.filter(|name| name.starts_with(&own)) {
        note(name.as_os_str().as_bytes());
    }
}

const MEMORY: &str = "mem";
/// The files with the number of threads.
const TEXTS: [&str; 2] = ["stat", "status"];
const THREADS: &str = "task";
const DESCRIPTORS: [&str; 2] = ["fd", "fdinfo"];

/// Notes a file that the program opens, by a name that may be one of these.
fn note(name: &[u8]) {
    let name = name.strip_suffix(b"/").unwrap_or(name);
    let is = |end: &&str| name.ends_with(end.as_bytes());
    if is(&MEMORY) {
        IS_MEMORY_OPEN.store(true, Relaxed);
    }
    if TEXTS.iter().chain(&DESCRIPTORS).chain([&THREADS]).any(is) {
        IS_LIST_OPEN.store(true, Relaxed);
        threads::await_all();
    }
}

/// Looks at a call that opens a file.
pub fn before_open(call: &Call) {
    let at = match call.number as c_long {
        older::SYS_open => call.arguments[0],
        libc::SYS_openat | libc::SYS_openat2 => call.arguments[1],
        _ => return,
    };
    // The kernel's file has a short path.
    let mut path = [0u8; 64];
    let read = peek_bytes(at, &mut path);
    path[..read].split(|byte| *byte == 0).next().into_iter().for_each(note);
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
    own_name(file, libc::S_IFREG).is_some_and(|path| path.ends_with(name))
}

/// The name of the kernel's file or folder about this process; `None` for any other file.
pub fn own_name(file: i32, kind: libc::mode_t) -> Option<PathBuf> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::zeroed();
    let arguments = [file as u64, status.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the status to the given place; all-zero bytes are a valid status.
    let (told, status) = unsafe { (raw(libc::SYS_fstat as u64, arguments), status.assume_init()) };
    // The size of a folder of descriptors is their number.
    let is_empty = status.st_size == 0 || kind == libc::S_IFDIR;
    if told != 0 || !is_empty || status.st_mode & libc::S_IFMT != kind {
        return None;
    }
    let _inside = inside();
    let own = format!("/proc/{}/", std::process::id());
    let path = std::fs::read_link(format!("/proc/thread-self/fd/{file}")).ok()?;
    path.starts_with(&own).then_some(path)
}

/// The list that a call has read, if the program may have one open.
pub fn list_of(call: &Call, kind: libc::mode_t) -> Option<Listing> {
    if !IS_LIST_OPEN.load(Relaxed) || call.result <= 0 || fault_signals::is_other_process() {
        return None;
    }
    let path = own_name(call.arguments[0] as i32, kind)?;
    let is = |name: &&str| path.ends_with(name);
    match kind {
        libc::S_IFREG => TEXTS.iter().position(&is).map(Listing::Text),
        _ if is(&THREADS) => Some(Listing::Threads),
        _ => DESCRIPTORS.iter().any(is).then_some(Listing::Descriptors),
    }
}

/// A list of the process's threads or descriptors, ours among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// A text with the number of threads, by its place in [`TEXTS`].
    Text(usize),
    /// A folder with an entry for each thread.
    Threads,
    /// A folder with an entry for each descriptor.
    Descriptors,
}
