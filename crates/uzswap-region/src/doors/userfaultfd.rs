//! By userfaultfd: a touch of an absent page is a SIGBUS, or a message to a handler thread.
//!
//! ```text
//! out  moved to its frame (UFFDIO_MOVE, Linux 6.8), or: may not be written → copied → given back
//! in   copied in (UFFDIO_COPY), or moved back from its frame
//! ```

#![expect(
    unsafe_code,
    reason = "pages leave while a program runs: the thread that moves them made their words `Busy`; a thread that touches such a page waits"
)]

use crate::core::Inner;
use crate::core::door::Door;
use crate::core::space::{Space, Taken, neighbours, range_of};
use crate::fault::{Refused, is_busy};
use crate::on_fork::OnFork;
use crate::page::word::Word;
use crate::staging::BATCH;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::{self, LOCKS_MAX, Pagemap};
use uzswap_sys::uffd::Uffd;

pub(crate) struct Userfaultfd(pub(crate) Uffd);

impl Door for Userfaultfd {
    fn uffd(&self) -> Option<&Uffd> {
        Some(&self.0)
    }

    fn descriptors(&self) -> Vec<i32> {
        self.0.descriptors()
    }

    fn renew(&self) -> io::Result<()> {
        self.0.renew()
    }

    fn pagemap(&self) -> &Pagemap {
        self.0.pagemap()
    }

    fn may_be_absent(&self) -> bool {
        false
    }

    fn watch(&self, range: Range<usize>) -> io::Result<()> {
        self.0.register(range)
    }

    fn let_go(&self, range: Range<usize>) {
        // Other pages of the mapping keep their registration. An error means that this range had
        // already lost its registration.
        let _ = self.0.unregister(range);
    }

    fn copy_in(&self, at: usize, pages: &[Page], guard: bool) -> io::Result<()> {
        self.0.copy(at, pages.as_flattened(), guard)
    }

    fn let_zeros_in(&self, range: Range<usize>, is_made: bool) -> bool {
        !is_made && self.0.zero(range).is_ok()
    }

    fn move_out(&self, pager: &Inner, victims: &[Taken], frame: usize) -> (usize, bool) {
        let run = &victims[..neighbours(victims)];
        let (moved, is_whole) = match self.0.can_move() {
            true => self.move_run(pager, run, frame),
            false => self.copy_out(pager, run, frame),
        };
        if let Some(stays) = run.get(moved).filter(|_| !is_whole) {
            pager.check_present(&stays.space, stays.page);
        }
        (moved, is_whole)
    }

    fn move_back(&self, pager: &Inner, space: &Space, page: u32, frame: usize) -> bool {
        if !self.0.can_move() {
            return false;
        }
        let places = (space.address(page), pager.staging.address(frame));
        // SAFETY: the caller has made the page's word `Busy`, so no other thread uses the frame.
        match unsafe { move_pages(pager, space, &self.0, places, PAGE_BYTES) }.1 {
            Ok(()) => true,
            // Something else refers to the frame. The frame's memory stays, for the batch to give
            // back.
            Err(error) if is_busy(&error) => false,
            // The program has taken away the right to write to the page.
            Err(_) if space.is_window() => false,
            Err(error) => pager.die(space, page, &Refused("move", &error)),
        }
    }

    fn close_dropped(&self, _: Range<usize>) -> bool {
        // Dropped pages are absent, so touches of them are faults.
        true
    }
}

impl Userfaultfd {
    /// Moves pages to frames. Returns their number, and true if all were moved.
    fn move_run(&self, pager: &Inner, run: &[Taken], frame: usize) -> (usize, bool) {
        let (space, pages) = (&run[0].space, run.len());
        let (to, from) = (pager.staging.address(frame), range_of(run).start);
        let mut moved = 0;
        let mut unshared = None;
        let mut at_once = pages * PAGE_BYTES;
        loop {
            let done = moved * PAGE_BYTES;
            let left = ((pages - moved) * PAGE_BYTES).min(at_once);
            if left == 0 {
                return (moved, true);
            }
            let places = (to + done, from + done);
            // SAFETY: a thread that touches a page finds it absent and waits for its word.
            let (bytes, result) =
                unsafe { move_pages(pager, space, pager.staging.uffd(), places, left) };
            moved += bytes / PAGE_BYTES;
            let Err(error) = result else { continue };
            let stays = from + moved * PAGE_BYTES;
            // A fork may have inherited the page. Then we make it private to this process, and try
            // once more.
            let may_be_shared = pager.on_fork != OnFork::Absent && is_busy(&error);
            if may_be_shared && unshared != Some(stays) && map::unshare(stays).is_ok() {
                unshared = Some(stays);
                continue;
            }
            // A program's range may be several mappings, and one call is for one mapping.
            if space.is_window() && at_once > PAGE_BYTES {
                at_once = PAGE_BYTES;
                continue;
            }
            // The kernel moves only pages that may be written.
            if space.is_window() && is_invalid(&error) {
                let (copied, is_whole) = self.copy_out(pager, &run[moved..], frame + moved);
                return (moved + copied, is_whole);
            }
            return (moved, false);
        }
    }

    /// Copies pages out, for kernels that cannot move them. Returns their number, and true if all
    /// were copied. Threads that write to them wait during the copy.
    fn copy_out(&self, pager: &Inner, run: &[Taken], frame: usize) -> (usize, bool) {
        let from = range_of(run).start;
        // At an absent page the kernel would wait, and this thread would have to bring that page
        // in.
        let mut there = [false; BATCH];
        let known = self.pagemap().have_pages(from, &mut there[..run.len()]).unwrap_or(0);
        let count = there[..known].iter().take_while(|is_there| **is_there).count();
        if count > 1 && self.copy_present(pager, &run[..count], frame) {
            return (count, true);
        }
        // A program's range may be several mappings, and one call is for one mapping.
        match count > 0 && self.copy_present(pager, &run[..1], frame) {
            true => (1, true),
            false => (0, false),
        }
    }

    /// Copies all pages if all are present, otherwise none.
    fn copy_present(&self, pager: &Inner, run: &[Taken], frame: usize) -> bool {
        let (space, range) = (&run[0].space, range_of(run));
        let to = pager.staging.address(frame);
        let copy = || {
            self.0.protect(range.clone(), true)?;
            // SAFETY: the region is mapped while its words are `Busy`. Only the kernel reads the
            // bytes, and answers with an error if a page is absent.
            let pages =
                unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) };
            pager.staging.uffd().copy(to, pages, false)
        };
        if copy().is_ok() {
            space.discard(run[0].page..run[0].page + run.len() as u32);
            return true;
        }
        // Some pages may have been copied, and some protected.
        // SAFETY: frames of a batch that the caller has in hand, which no word names.
        let _ = unsafe { map::discard_range(to..to + range.len()) };
        for victim in run.iter().filter(|victim| !victim.was.has(Word::GUARDED)) {
            let at = victim.space.address(victim.page);
            // Wakes writers; an error would mean that the range is not registered.
            let _ = self.0.protect(at..at + PAGE_BYTES, false);
        }
        false
    }
}

fn is_invalid(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::INVAL.raw_os_error())
}

/// [`Uffd::move_pages`] between a region and the staging area. The program may have locked all of
/// its memory after one was mapped, and before the other was. Then only one of them is locked, and
/// the kernel refuses the move. So this unlocks both.
///
/// # Safety
/// See [`Uffd::move_pages`].
unsafe fn move_pages(
    pager: &Inner,
    space: &Space,
    uffd: &Uffd,
    (to, from): (usize, usize),
    bytes: usize,
) -> (usize, io::Result<()>) {
    let mut done = 0;
    for _ in 0..LOCKS_MAX {
        // SAFETY: the caller's promise.
        let (moved, result) = unsafe { uffd.move_pages(to + done, from + done, bytes - done) };
        done += moved;
        match result {
            // Locked memory is the reason only in a region, because we adopt no locked memory.
            Err(error) if is_invalid(&error) && !space.is_window() => {}
            result => return (done, result),
        }
        space.unlock();
        pager.staging.unlock();
    }
    (done, Err(Errno::INVAL.into()))
}
