//! By protection, where userfaultfd is denied and there are no guards: absent pages *may not* be
//! accessed, and a touch is a SIGSEGV.
//!
//! ```text
//! out  may not be accessed → copied to its frame → its memory given back
//! in   written by /proc/self/mem → may be accessed
//! ```
//! At each change of access the kernel splits a mapping in two, and a process may have some 65 000
//! mappings. While there are mappings to spare, pages leave and come in one by one. When mappings
//! get scarce, several pages come in together, and pages leave only beside absent pages. So absent
//! pages gather in runs, as do present pages.

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
use rustix::fs::{Mode, OFlags};
use std::fs;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_sys::map::{self, Pagemap};
use uzswap_sys::proc_mem::Access;

/// The maximum number of mappings of a process, where the kernel does not report it.
const MAPPINGS: i64 = 65_530;

/// Changes of access, after which mappings may be counted again.
const CHANGES: i64 = 2048;

/// The number of attempts to open pages if the mappings are used up, a millisecond apart.
const TRIES: usize = 5000;

pub(crate) struct Protection {
    own: ProcessMemory,
    mappings: Mappings,
}

/// The number of mappings.
struct Mappings {
    most: i64,
    /// The number of mappings at the last count.
    counted: AtomicI64,
    /// The changes of access since the last count. Each has made two mappings at most.
    changes: AtomicI64,
}

impl Mappings {
    fn new(most: i64) -> Self {
        Self { most: most.max(64), counted: AtomicI64::new(0), changes: AtomicI64::new(0) }
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Relaxed);
    }

    /// An upper bound of the present number of mappings, in 16ths of the limit.
    fn filled(&self) -> i64 {
        (self.counted.load(Relaxed) + 2 * self.changes.load(Relaxed)) * 16 / self.most
    }

    /// Counts the mappings, if there may be many.
    fn count_again(&self) {
        if self.changes.load(Relaxed) < CHANGES.min(self.most / 16) || self.filled() < 6 {
            return;
        }
        self.changes.store(0, Relaxed);
        // If the mappings cannot be counted, we assume many.
        self.counted.store(count().unwrap_or(self.most), Relaxed);
    }
}

fn count() -> io::Result<i64> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/thread-self/maps", flags, Mode::empty())?;
    let mut buffer = [0; 16 << 10];
    let mut lines = 0;
    loop {
        match rustix::io::read(&file, &mut buffer)? {
            0 => return Ok(lines),
            read => lines += buffer[..read].iter().filter(|byte| **byte == b'\n').count() as i64,
        }
    }
}

impl Protection {
    pub(crate) fn open() -> io::Result<Self> {
        let most = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
        let most = most.and_then(|number| number.trim().parse().ok()).unwrap_or(MAPPINGS);
        Ok(Self { own: ProcessMemory::open()?, mappings: Mappings::new(most) })
    }

    fn forbid(&self, range: Range<usize>) -> io::Result<()> {
        self.mappings.changed();
        allow(range, Access::None)
    }

    /// Opens pages that are complete. Pages that stayed closed would be lost, so this tries for
    /// seconds. Pages that leave in this time may free mappings.
    fn open_pages(&self, range: &Range<usize>) -> io::Result<()> {
        self.mappings.changed();
        allow_patiently(range, Access::All, TRIES)
    }
}

impl Door for Protection {
    fn descriptors(&self) -> Vec<i32> {
        self.own.descriptors()
    }

    fn renew(&self) -> io::Result<()> {
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

    fn close(&self, at: usize, there: &mut [bool], _: bool) {
        // This may also close a page that the program has used since it was listed. Such a page
        // leaves and comes in unchanged.
        let mut from = 0;
        while let Some(gap) = gap(there, from) {
            from = gap.end;
            let range = at + gap.start * PAGE_BYTES..at + gap.end * PAGE_BYTES;
            there[gap].fill(self.forbid(range).is_err());
        }
    }

    fn close_unused(&self, range: Range<usize>) -> io::Result<()> {
        self.forbid(range)
    }

    fn open_unused(&self, range: Range<usize>) {
        // An error would mean that the mapping is no longer the program's.
        let _ = self.open_pages(&range);
    }

    fn let_go(&self, _: Range<usize>) {}

    fn copy_in(&self, at: usize, pages: &[Page], _: bool) -> io::Result<()> {
        self.own.write(at, pages)?;
        self.open_pages(&(at..at + pages.len() * PAGE_BYTES))
    }

    fn let_zeros_in(&self, range: Range<usize>, _: bool) -> bool {
        self.open_pages(&range).is_ok()
    }

    fn move_out(&self, pager: &Inner, victims: &[Taken], frame: usize) -> (usize, bool) {
        let run = &victims[..neighbours(victims)];
        let range = range_of(run);
        if self.forbid(range.clone()).is_err() {
            return (0, false);
        }
        let done = self.own.read_run(pager, run, frame).and_then(|()| {
            // SAFETY: adopted memory whose words are `Busy` by the caller, and which has been
            // copied.
            unsafe { map::discard_range(range.clone()) }
        });
        if done.is_ok() {
            return (run.len(), true);
        }
        // An error would mean that the mapping is no longer the program's.
        let _ = self.open_pages(&range);
        (0, false)
    }

    fn close_dropped(&self, range: Range<usize>) -> bool {
        self.mappings.filled() < 12 && self.forbid(range).is_ok()
    }

    fn may_leave(&self, space: &Space, page: u32) -> bool {
        let is_out = |page: u32| {
            let is_page = page < space.pages();
            is_page && matches!(space.load(page).kind(), Kind::Stored | Kind::Staged | Kind::Empty)
        };
        match self.mappings.filled() {
            ..12 => true,
            // From now on absent pages gather at multiples of a batch.
            12..15 if page.is_multiple_of(BATCH as u32) => true,
            _ => is_out(page.wrapping_sub(1)) || is_out(page + 1),
        }
    }

    fn least_window(&self) -> usize {
        match self.mappings.filled() {
            ..10 => 1,
            10..13 => 16,
            _ => BATCH,
        }
    }

    fn tend(&self) {
        self.mappings.count_again();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_counted_when_they_may_be_many() {
        let lines = fs::read_to_string("/proc/self/maps").unwrap().lines().count() as i64;
        assert!((count().unwrap() - lines).abs() < 20);
        let mappings = Mappings::new(1 << 16);
        (0..10_000).for_each(|_| mappings.changed());
        assert_eq!(mappings.filled(), 4);
        mappings.count_again();
        assert_eq!(mappings.filled(), 4, "they are not many");
        (0..6_000).for_each(|_| mappings.changed());
        assert_eq!(mappings.filled(), 7);
        mappings.count_again();
        assert_eq!(mappings.filled(), 0);
    }
}
