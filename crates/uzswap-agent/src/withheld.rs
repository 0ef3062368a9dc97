//! Memory that the program may write and execute. No call shows that the program writes code there.
//! So the agent *withholds* the execution of such memory: the first execution of a page raises a
//! fault. Then the agent looks at the code around that page, and permits the execution of the page,
//! and of the written pages behind it. If the code makes system calls itself, the agent leaves the
//! program alone before the code runs ([`crate::written`]).
//!
//! ```text
//! mmap, mprotect → made as asked → the memory loses its execution     (withhold)
//! execution      → SIGSEGV → the code is looked at → some pages get it back (fetch)
//!                                                  → or the program is left alone
//! munmap, mmap over it, mprotect → forgotten
//! mremap, mseal                  → given back before
//! ```
//! The agent withholds only memory that is surely private and of no file, since our own handlers
//! run code of files. One lock guards the ranges. The fault's handler takes that lock, so its
//! holders block all signals. The layout's lock comes before it. Under the lock the handler
//! allocates nothing.

use crate::pins::peek_bytes;
use crate::{inside, is_inside, signals, thread, threads};
use libc::{PROT_EXEC, PROT_READ, PROT_WRITE};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use uzswap_calls::{raw, sites, table};
use uzswap_region::Mode;
use uzswap_sys::fault_signals::is_other_process;
use uzswap_sys::map::{self, PAGE_BYTES};

/// Bytes before and behind an executed page that the agent looks at together with that page. The
/// written pages behind it become executable with it. With a larger range, the agent would miss
/// more code that is written later. With a smaller range, it would split the program's mappings
/// more often.
const NEAR: usize = 32 << 10;
/// At the take-over, unwritten memory is withheld in runs of at least this length, because each run
/// splits a mapping.
const LEAST: usize = 64 << 10;

#[derive(Debug)]
pub struct Withheld {
    /// The ranges whose execution was withheld, by their start. Parts of a range may be executable
    /// again.
    ranges: BTreeMap<usize, usize>,
    /// Room for a copy of the code to look at.
    code: Vec<u8>,
}

static WITHHELD: Mutex<Withheld> =
    Mutex::new(Withheld { ranges: BTreeMap::new(), code: Vec::new() });

/// True once any memory was withheld, in this process or in an ancestor from which it was forked.
static IS_USED: AtomicBool = AtomicBool::new(false);
/// True if memory that has lost its permission to execute might not get it back from the kernel.
static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Takes the lock, as a fork also does. The caller blocks all signals.
pub fn lock() -> MutexGuard<'static, Withheld> {
    WITHHELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// True if memory with this access is withheld.
pub fn is_for(access: i32) -> bool {
    const BOTH: i32 = PROT_WRITE | PROT_EXEC;
    access & BOTH == BOTH && access & !(BOTH | PROT_READ) == 0
}

/// Sets the access of whole pages. True if the kernel permits that.
fn set_access(range: &Range<usize>, access: i32) -> bool {
    let arguments = [range.start as u64, range.len() as u64, access as u64, 0, 0, 0];
    // SAFETY: private memory of the program's, which asked for all access. The memory can be read
    // and written with either access. Without execution no code runs there.
    unsafe { raw(libc::SYS_mprotect as u64, arguments) == 0 }
}

fn permit(range: &Range<usize>) -> bool {
    set_access(range, PROT_READ | PROT_WRITE | PROT_EXEC)
}

impl Withheld {
    fn add(&mut self, mut range: Range<usize>) {
        if self.code.is_empty() {
            self.code = vec![0; 2 * NEAR + PAGE_BYTES];
        }
        let beside = (range.start.saturating_sub(1))..range.end.saturating_add(1);
        for part in self.take(&beside) {
            range = range.start.min(part.start)..range.end.max(part.end);
        }
        self.ranges.insert(range.start, range.end);
    }

    /// The parts of a range that are withheld, each with its whole range.
    fn overlapping(&self, range: &Range<usize>) -> Vec<(Range<usize>, Range<usize>)> {
        let before = self.ranges.range(..range.end).rev();
        let found = before.take_while(|(_, end)| **end > range.start);
        let found = found.map(|(start, end)| {
            let part = (*start).max(range.start)..(*end).min(range.end);
            (part, *start..*end)
        });
        found.collect()
    }

    /// Forgets the whole ranges that a range overlaps, and returns them.
    fn take(&mut self, range: &Range<usize>) -> Vec<Range<usize>> {
        let found = self.overlapping(range).into_iter().map(|(_, whole)| whole);
        found.inspect(|whole| _ = self.ranges.remove(&whole.start)).collect()
    }

    /// Forgets a range, and returns its parts that were withheld.
    fn forget(&mut self, range: &Range<usize>) -> Vec<Range<usize>> {
        let overlapping = self.overlapping(range);
        for (part, whole) in &overlapping {
            self.ranges.remove(&whole.start);
            if whole.start < part.start {
                self.ranges.insert(whole.start, part.start);
            }
            if part.end < whole.end {
                self.ranges.insert(part.end, whole.end);
            }
        }
        overlapping.into_iter().map(|(part, _)| part).collect()
    }

    /// The range in which an address lies. Allocates nothing.
    fn at(&self, address: usize) -> Option<Range<usize>> {
        let (start, end) = self.ranges.range(..=address).next_back()?;
        (*end > address).then_some(*start..*end)
    }

    /// Looks at the code around a page that is executed, and permits the page's execution if the
    /// code makes no call. Allocates nothing.
    fn execute(&mut self, whole: &Range<usize>, page: usize) -> Fetched {
        let start = page.saturating_sub(NEAR).max(whole.start);
        let end = (page + PAGE_BYTES + NEAR).min(whole.end);
        let before = page - start;
        let code = &mut self.code[..end - start];
        let read = peek_bytes(start as u64, code);
        if sites::makes_call(&code[..read], table::is_looked_at) && !is_other_process() {
            return Fetched::Call;
        }
        let behind = code[..read].get(before + PAGE_BYTES..).unwrap_or_default();
        let pages = behind.chunks_exact(PAGE_BYTES);
        let count = 1 + pages.take_while(|page| page.iter().any(|byte| *byte != 0)).count();
        // If no mappings are left, the whole range is permitted, which takes fewer mappings.
        if permit(&(page..page + count * PAGE_BYTES)) || permit(whole) {
            Fetched::Permitted
        } else {
            Fetched::Foreign
        }
    }
}

/// The result of a fetch of an instruction.
#[derive(Debug)]
pub enum Fetched {
    /// The memory may be executed.
    Permitted,
    /// The code makes a system call, and is not permitted.
    Call,
    /// The memory is not withheld.
    Foreign,
}

/// Prepares the first use. Returns false if a thread of the program blocks SIGSEGV: its first fetch
/// from withheld memory would end the process.
fn begin() -> bool {
    // No thread blocks the signal from now on.
    signals::MAY_RAISE_SEGV.store(true, Relaxed);
    let may_come = crate::mode() == Mode::Protection || !threads::blocks_segv();
    signals::MAY_RAISE_SEGV.store(may_come, Relaxed);
    IS_USED.store(may_come, Relaxed);
    may_come
}

/// Withholds the execution of private memory of no file that the program has just made executable
/// and writable. The layout is locked.
pub fn withhold(range: Range<usize>) {
    if range.is_empty() || IS_OVER.load(Relaxed) {
        return;
    }
    if !IS_USED.load(Relaxed) && !begin() {
        return IS_OVER.store(true, Relaxed);
    }
    let mut withheld = lock();
    match set_access(&range, PROT_READ | PROT_WRITE) {
        true => withheld.add(range),
        // A part of the range may have lost its permission to execute.
        false => _ = permit(&range),
    }
}

/// Withholds, at the take-over, the parts of a writable and executable mapping that have no code
/// yet, except `kept`.
pub fn withhold_unwritten(range: &Range<usize>, kept: &[Range<usize>]) {
    for part in map::cut(range.clone(), kept) {
        let is_zero = |page: usize| {
            let mut bytes = [0u8; PAGE_BYTES];
            peek_bytes(page as u64, &mut bytes) == PAGE_BYTES && bytes.iter().all(|byte| *byte == 0)
        };
        let mut start = part.start;
        for page in part.clone().step_by(PAGE_BYTES).chain([part.end]) {
            if page == part.end || !is_zero(page) {
                if page - start >= LEAST {
                    withhold(start..page);
                }
                start = page + PAGE_BYTES;
            }
        }
    }
}

/// Makes a call of the program's that unmaps a range or sets its access, and forgets the range if
/// the call succeeds. The layout is locked.
pub fn change(range: &Range<usize>, call: impl FnOnce() -> bool) -> bool {
    if !IS_USED.load(Relaxed) || range.is_empty() {
        return call();
    }
    // A thread that executes the range during the call waits.
    let mut withheld = lock();
    let done = call();
    if done {
        withheld.forget(range);
    }
    done
}

/// The parts of a range that are withheld.
pub fn parts(range: &Range<usize>) -> Vec<Range<usize>> {
    if !IS_USED.load(Relaxed) {
        return Vec::new();
    }
    let _inside = inside();
    lock().overlapping(range).into_iter().map(|(part, _)| part).collect()
}

/// Permits the execution of a range, and forgets the range, which is then one mapping to the
/// kernel. Returns the parts that were withheld. The layout is locked.
pub fn give_back(range: &Range<usize>) -> Vec<Range<usize>> {
    if !IS_USED.load(Relaxed) {
        return Vec::new();
    }
    let mut withheld = lock();
    withheld.forget(range).into_iter().filter(permit).collect()
}

/// As [`give_back`], for all memory. The layout is locked.
pub fn give_all_back() {
    give_back(&(0..usize::MAX));
}

/// Gives all memory its execution back, and withholds none from now on, because the kernel will
/// soon refuse to permit execution. The layout is locked.
pub fn end() {
    IS_OVER.store(true, Relaxed);
    give_all_back();
}

/// Serves a fault at the fetch of an instruction. Allocates nothing, and waits only for calls that
/// change such memory.
pub fn fetch(address: usize) -> Fetched {
    if !IS_USED.load(Relaxed) {
        return Fetched::Foreign;
    }
    let page = address / PAGE_BYTES * PAGE_BYTES;
    // Our own code may hold the lock. But it executes no memory of the program's.
    if !is_inside() {
        let mut withheld = lock();
        let executed = withheld.at(page).map(|whole| withheld.execute(&whole, page));
        if let Some(executed @ (Fetched::Permitted | Fetched::Call)) = executed {
            return executed;
        }
    }
    // A call of another thread may have made the page executable since the fault.
    match thread::with(|thread| thread.fetched.replace(address)) == address {
        true => {
            thread::with(|thread| thread.fetched.set(0));
            Fetched::Foreign
        }
        false => Fetched::Permitted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn withheld(ranges: &[Range<usize>]) -> Withheld {
        let mut all = Withheld { ranges: BTreeMap::new(), code: Vec::new() };
        ranges.iter().for_each(|range| all.add(range.clone()));
        all
    }

    fn ranges(all: &Withheld) -> Vec<Range<usize>> {
        all.ranges.iter().map(|(start, end)| *start..*end).collect()
    }

    #[test]
    fn ranges_join_where_they_meet_and_part_where_one_is_forgotten() {
        let mut all = withheld(&[10..20, 30..40, 20..30, 50..60]);
        assert_eq!(ranges(&all), [10..40, 50..60]);
        assert_eq!(all.forget(&(35..55)), [50..55, 35..40]);
        assert_eq!(ranges(&all), [10..35, 55..60]);
        assert_eq!(all.forget(&(15..20)).first(), Some(&(15..20)));
        assert_eq!(ranges(&all), [10..15, 20..35, 55..60]);
        assert_eq!((all.at(14), all.at(15), all.at(20)), (Some(10..15), None, Some(20..35)));
        assert_eq!(all.forget(&(0..usize::MAX)).len(), 3);
        assert!(ranges(&all).is_empty());
    }

    #[test]
    fn memory_is_withheld_that_may_be_written_and_executed() {
        let access = [PROT_READ, PROT_WRITE, PROT_EXEC];
        assert!(is_for(access.iter().sum()) && is_for(PROT_WRITE | PROT_EXEC));
        assert!(!is_for(PROT_READ | PROT_WRITE) && !is_for(PROT_READ | PROT_EXEC));
        assert!(!is_for(PROT_WRITE | PROT_EXEC | libc::PROT_GROWSDOWN));
    }
}
