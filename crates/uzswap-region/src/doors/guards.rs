//! By guards (Linux 6.15), where userfaultfd is denied: a guard (`MADV_GUARD_INSTALL`) stands in
//! the place of a page that is out, and a touch of it is a SIGSEGV.
//!
//! ```text
//! out  may not be accessed → copied to its frame → guard in its place → may be accessed
//! in   may not be accessed → guard away → written by /proc/self/mem → may be accessed
//! ```
//! A guard takes memory, in the kernel's page tables. So a long mapping stays open until its pages
//! are used. [`crate::Pager::find_used`] finds the used pages, and closes the pages around them.
//!
//! Pages that leave and lie near each other are closed together. A guard splits no mapping, so any
//! page may be out by itself. After a guard is removed, other threads would find zeros. So the page
//! is closed while it is written, and is a mapping of its own for that moment. The only thread of a
//! program brings pages in without closing them, since no other thread can read them.

#![expect(
    unsafe_code,
    reason = "pages leave while a program runs: the thread that moves them made their words `Busy`; a thread that touches such a page waits"
)]

use super::process_memory::{ProcessMemory, allow, allow_patiently, gap};
use crate::core::Inner;
use crate::core::door::Door;
use crate::core::space::{Space, Taken, neighbours, range_of};
use crate::page::word::Kind;
use crate::staging::BATCH;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::Pagemap;
use uzswap_sys::proc_mem::{self, Access};

/// The number of attempts to close a page if the mappings are used up, a millisecond apart.
const TRIES: usize = 2000;

pub(crate) struct Guards {
    own: ProcessMemory,
    /// The program's only thread, or 0.
    only: AtomicI32,
}

impl Guards {
    /// Fails if the kernel has no guards, or does not list them.
    pub(crate) fn open() -> io::Result<Self> {
        proc_mem::check_guards()?;
        Ok(Self { own: ProcessMemory::open()?, only: AtomicI32::new(0) })
    }

    fn is_alone(&self) -> bool {
        let only = self.only.load(Relaxed);
        only != 0 && only == rustix::thread::gettid().as_raw_nonzero().get()
    }
}

fn guard(range: Range<usize>) -> io::Result<()> {
    // SAFETY: adopted memory whose words are `Busy` by the caller, which has its contents. A thread
    // that touches it waits for the words.
    unsafe { proc_mem::guard(range) }
}

fn unguard(range: Range<usize>) -> io::Result<()> {
    // SAFETY: guards in adopted memory are ours.
    unsafe { proc_mem::unguard(range) }
}

/// Opens pages that were closed for a moment. The kernel merges their mapping with its neighbours,
/// so no further mapping is needed.
fn open(range: Range<usize>) -> io::Result<()> {
    allow(range, Access::All)
}

/// Closes pages for a moment, which needs two mappings. Other threads may have taken the last
/// mappings.
fn close(range: &Range<usize>) -> io::Result<()> {
    allow_patiently(range, Access::None, TRIES)
}

impl Door for Guards {
    fn descriptors(&self) -> Vec<i32> {
        self.own.descriptors()
    }

    fn renew(&self) -> io::Result<()> {
        // The child has one thread.
        self.set_only_thread(rustix::thread::gettid().as_raw_nonzero().get());
        self.own.renew()
    }

    fn pagemap(&self) -> &Pagemap {
        &self.own.pagemap
    }

    fn may_be_absent(&self) -> bool {
        true
    }

    fn watch(&self, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn close(&self, at: usize, there: &mut [bool], has_pages: bool) {
        let mut from = 0;
        while let Some(gap) = gap(there, from) {
            from = gap.end;
            let range = at + gap.start * PAGE_BYTES..at + gap.end * PAGE_BYTES;
            if !has_pages {
                there[gap].fill(guard(range).is_err());
            } else if allow(range.clone(), Access::None).is_err() {
                there[gap].fill(true);
            } else {
                self.close_absent(range.start, &mut there[gap]);
                // An error would mean that the mapping is no longer the program's.
                let _ = open(range);
            }
        }
    }

    fn leaves_open(&self) -> bool {
        true
    }

    fn open_unused(&self, range: Range<usize>) {
        // An error would mean that the mapping is no longer the program's.
        let _ = unguard(range);
    }

    fn let_go(&self, _: Range<usize>) {}

    fn copy_in(&self, at: usize, pages: &[Page], _: bool) -> io::Result<()> {
        let range = at..at + pages.len() * PAGE_BYTES;
        if self.is_alone() {
            unguard(range)?;
            return self.own.write(at, pages);
        }
        close(&range)?;
        unguard(range.clone())?;
        self.own.write(at, pages)?;
        open(range)
    }

    fn let_zeros_in(&self, range: Range<usize>, _: bool) -> bool {
        unguard(range).is_ok()
    }

    fn move_out(&self, pager: &Inner, victims: &[Taken], frame: usize) -> (usize, bool) {
        let near = Near::of(victims);
        let victims = &victims[..near.victims];
        // Reading is forbidden, too, because the kernel removes the page before it installs the
        // guard. A thread that reads between these steps would find zeros.
        if allow(near.range.clone(), Access::None).is_err() {
            return (0, false);
        }
        let mut moved = 0;
        let mut done = Ok(());
        while moved < victims.len() && done.is_ok() {
            let left = &victims[moved..];
            let run = &left[..neighbours(left)];
            done = self.own.read_run(pager, run, frame + moved);
            done = done.and_then(|()| guard(range_of(run)));
            moved += if done.is_ok() { run.len() } else { 0 };
        }
        // An error would mean that the mapping is no longer the program's.
        let _ = open(near.range.clone());
        (moved, done.is_ok())
    }

    fn set_only_thread(&self, thread: i32) {
        self.only.store(thread, Relaxed);
    }

    fn close_dropped(&self, range: Range<usize>) -> bool {
        guard(range).is_ok()
    }
}

/// Pages that leave and lie near each other. They are closed together with the pages between them,
/// whose words are `Busy` until this is dropped.
struct Near {
    range: Range<usize>,
    /// The number of victims, beginning with the first.
    victims: usize,
    between: Vec<Taken>,
}

impl Near {
    fn of(victims: &[Taken]) -> Self {
        let first = &victims[0];
        let mut near = Self { range: range_of(&victims[..1]), victims: 1, between: Vec::new() };
        for pair in victims.windows(2) {
            let (from, next) = (pair[0].page + 1, pair[1].page);
            let is_near = Arc::ptr_eq(&first.space, &pair[1].space)
                && next.wrapping_sub(first.page) < BATCH as u32;
            if !is_near || !near.take_between(&first.space, from..next) {
                break;
            }
            near.victims += 1;
            near.range.end = first.space.address(next + 1);
        }
        near
    }

    /// Makes pages `Busy`, or none if a call of the program or another thread has one of them.
    fn take_between(&mut self, space: &Arc<Space>, pages: Range<u32>) -> bool {
        let before = self.between.len();
        for page in pages {
            let was = space.load(page);
            let may = match was.kind() {
                Kind::Busy | Kind::Untouched => false,
                Kind::Resident => was.pins() == 0,
                Kind::Staged | Kind::Stored | Kind::Empty => true,
            };
            if !may || !space.take(page, was) {
                self.between.drain(before..).for_each(Taken::put_back);
                return false;
            }
            self.between.push(Taken { space: space.clone(), page, was });
        }
        true
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        self.between.drain(..).for_each(Taken::put_back);
    }
}

impl Guards {
    /// Puts guards where a range that may not be accessed has no page.
    fn close_absent(&self, at: usize, there: &mut [bool]) {
        let known = self.own.pagemap.have_pages(at, there).unwrap_or(0);
        // We assume that a page is present if the kernel does not describe it.
        there[known..].fill(true);
        let mut from = 0;
        while let Some(gap) = gap(there, from) {
            from = gap.end;
            let range = at + gap.start * PAGE_BYTES..at + gap.end * PAGE_BYTES;
            there[gap].fill(guard(range).is_err());
        }
    }
}
