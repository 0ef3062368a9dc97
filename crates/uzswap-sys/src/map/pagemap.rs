//! The kernel's information about this process's pages: which are present, and which are guards.

use super::PAGE_BYTES;
use linux_raw_sys::general as raw;
use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{Opcode, opcode};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
/// Since Linux 6.15: a guard, which is no page and keeps pages away (`MADV_GUARD_INSTALL`).
const GUARD: u64 = 1 << 58;

fn is_page(word: u64) -> bool {
    word & PRESENT_OR_SWAPPED != 0 && word & GUARD == 0
}

/// The kernel's information about pages of this process. The file is opened by the calling thread's
/// name: `/proc/self` is the first thread's folder, and shows no memory once that thread has ended.
#[derive(Debug)]
pub struct Pagemap(OwnedFd);

impl Pagemap {
    /// Opens the file. Safe in a signal handler. Errors: `NotFound` where `/proc` is not mounted.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = rustix::fs::open(c"/proc/thread-self/pagemap", flags, Mode::empty())?;
        Ok(Self(crate::process::out_of_the_way(file)?))
    }

    /// Opens the file anew under the same descriptor, in a forked child: the inherited descriptor
    /// shows the parent's memory.
    pub fn renew(&self) -> io::Result<()> {
        let new = Self::open()?;
        crate::process::take_place(&new.0, &self.0)
    }

    /// Its descriptor.
    pub fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Fills `to` for up to 512 pages that begin at an address, as [`Self::has_page`] does for one.
    /// Safe in a signal handler.
    pub fn have_pages(&self, address: usize, to: &mut [bool]) -> io::Result<usize> {
        self.look_at(address, to, is_page)
    }

    /// Fills `to` for guards instead of pages.
    pub fn have_guards(&self, address: usize, to: &mut [bool]) -> io::Result<usize> {
        self.look_at(address, to, |word| word & GUARD != 0)
    }

    fn look_at(
        &self,
        address: usize,
        to: &mut [bool],
        is_it: impl Fn(u64) -> bool,
    ) -> io::Result<usize> {
        const AT_ONCE: usize = 512;
        let mut words = [0u64; AT_ONCE];
        let count = to.len().min(AT_ONCE);
        let offset = (address / PAGE_BYTES * 8) as u64;
        // SAFETY: numbers may be written as the bytes that they are.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), count * 8) };
        let read = rustix::io::pread(&self.0, bytes, offset)? / 8;
        for (to, word) in to.iter_mut().zip(&words[..read]) {
            *to = is_it(*word);
        }
        match read {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => Ok(read),
        }
    }

    /// True if the kernel lists the pages of any range in one call ([`Scanned`]).
    pub fn can_scan(&self, page: usize) -> bool {
        Scanned::all().next(self, page..page + PAGE_BYTES).is_ok()
    }

    /// True if there is a page at an address, in memory or swapped out by the kernel. Safe in a
    /// signal handler.
    pub fn has_page(&self, address: usize) -> io::Result<bool> {
        let mut word = [0; 8];
        let offset = (address / PAGE_BYTES * word.len()) as u64;
        match rustix::io::pread(&self.0, &mut word, offset)? {
            8 => Ok(is_page(u64::from_ne_bytes(word))),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// Runs of neighbouring pages that the kernel lists in one call.
const RUNS: usize = 64;

/// A walk through memory of this process, from page to page (`PAGEMAP_SCAN`, Linux 6.7): the kernel
/// passes over holes, however large they are. Safe in a signal handler.
#[derive(Debug)]
pub struct Scanned {
    runs: [raw::page_region; RUNS],
    /// The runs that were found but not passed yet.
    found: Range<usize>,
    /// All pages before this address are among the found ones, or were passed.
    walked: usize,
    excluded: u32,
}

impl Scanned {
    /// A walk over pages, guards among them.
    pub fn all() -> Self {
        let none = raw::page_region { start: 0, end: 0, categories: 0 };
        Self { runs: [none; RUNS], found: 0..0, walked: 0, excluded: 0 }
    }

    /// A walk over all pages but the kernel's page of zeros.
    pub fn but_zeros() -> Self {
        Self { excluded: raw::PAGE_IS_PFNZERO, ..Self::all() }
    }

    /// The address of the first page in a range, or the range's end. No range begins before the
    /// previous one.
    ///
    /// Errors: `ENOTTY` before Linux 6.7.
    pub fn next(&mut self, pagemap: &Pagemap, range: Range<usize>) -> io::Result<usize> {
        loop {
            for run in &self.runs[self.found.clone()] {
                if run.end as usize > range.start {
                    return Ok((run.start as usize).clamp(range.start, range.end));
                }
                self.found.start += 1;
            }
            self.walked = self.walked.max(range.start);
            if self.walked >= range.end {
                return Ok(range.end);
            }
            self.walk(pagemap, range.end)?;
        }
    }

    fn walk(&mut self, pagemap: &Pagemap, end: usize) -> io::Result<()> {
        let is_there = u64::from(raw::PAGE_IS_PRESENT | raw::PAGE_IS_SWAPPED);
        let mut scan = raw::pm_scan_arg {
            size: size_of::<raw::pm_scan_arg>() as u64,
            flags: 0,
            start: self.walked as u64,
            end: end as u64,
            walk_end: 0,
            vec: self.runs.as_mut_ptr() as u64,
            vec_len: RUNS as u64,
            max_pages: 0,
            category_inverted: self.excluded.into(),
            category_mask: self.excluded.into(),
            category_anyof_mask: is_there,
            return_mask: is_there,
        };
        const SCAN: Opcode = opcode::read_write::<raw::pm_scan_arg>(b'f', 16);
        // SAFETY: the argument is of the request's type, and its vector has room for that many
        // runs.
        let found =
            unsafe { libc::ioctl(pagemap.0.as_raw_fd(), SCAN as libc::Ioctl, &raw mut scan) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        self.found = 0..found as usize;
        self.walked = scan.walk_end as usize;
        Ok(())
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::map::{Mapping, unshare};

    #[test]
    fn a_page_is_there_once_it_was_written() {
        let mut m = Mapping::reserved(2 * PAGE_BYTES).unwrap();
        let (first, second) = (m.as_ptr() as usize, m.as_ptr() as usize + PAGE_BYTES);
        let pagemap = Pagemap::open().unwrap();
        assert!(!pagemap.has_page(first).unwrap());
        m.as_mut_slice()[7] = 1;
        assert!(pagemap.has_page(first).unwrap() && !pagemap.has_page(second).unwrap());
        assert_eq!(m.resident_pages().unwrap(), 1);
        unshare(first).unwrap();
        assert_eq!(m.as_slice()[7], 1);
    }
}
