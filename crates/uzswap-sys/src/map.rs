//! Anonymous memory, mapped and unmapped as a whole.
//!
//! The allocator's sections and the buffers of direct I/O are made of such memory: page-aligned,
//! zeroed, given back to the kernel when dropped. [`Mapping::populated`] faults everything in
//! before it returns, because a kernel that needs memory may wait for the threads that use it.

#[cfg_attr(miri, path = "map/miri.rs")]
mod calls;
mod pagemap;
pub mod place;

pub use pagemap::{Pagemap, Scanned};

use crate::thread_memory;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The page of every machine this runs on; asserted against the kernel's at start
/// (`cpu::page_bytes`).
pub const PAGE_BYTES: usize = 4096;

/// The number of times that we unlock memory and repeat an operation that the kernel refuses for
/// locked memory.
pub const LOCKS_MAX: usize = 4;

const EINVAL: i32 = rustix::io::Errno::INVAL.raw_os_error();

/// A page-aligned range of memory, owned: private and anonymous, unless it is of a file.
///
/// Invariant: `base` is the start of a mapping of `bytes` bytes that nothing else unmaps.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory; it has no tie to the thread that made it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives out only a raw pointer and a length.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` (rounded up to pages) and faults every page in.
    ///
    /// Errors: `ENOMEM` when the machine or a limit (`RLIMIT_AS`, `RLIMIT_MEMLOCK` under
    /// `mlockall`) cannot give that much; nothing is kept then.
    pub fn populated(bytes: usize) -> io::Result<Self> {
        let mapping = Self::reserved(bytes)?;
        mapping.populate()?;
        Ok(mapping)
    }

    /// Maps `bytes` (rounded up to pages) without touching them.
    pub fn reserved(bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let base = calls::map(bytes)?;
        remember(base, bytes);
        Ok(Self { base, bytes })
    }

    /// Maps `bytes` (rounded up to pages) of a file of that length, without touching them; other
    /// processes that map it see all writes. Left out of core dumps.
    pub fn of_file(file: BorrowedFd<'_>, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let base = calls::map_file(file, 0, bytes)?;
        remember(base, bytes);
        Ok(Self { base, bytes })
    }

    /// As [`Self::of_file`], for the part of a file from `offset` on, which is a multiple of the
    /// page.
    pub fn of_part(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let base = calls::map_file(file, offset, bytes)?;
        remember(base, bytes);
        Ok(Self { base, bytes })
    }

    /// Maps `bytes` (rounded up to pages), at a multiple of `align`, for pages that move in and out
    /// one by one (see [`crate::uffd`]). No page is present. Processes that are forked from now on
    /// do not get the mapping, and its pages have the common size only. The mapping is not locked,
    /// even if the program locks all future memory (`MCL_FUTURE`).
    pub fn for_pages(bytes: usize, align: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let mapping = Self { base: calls::map_for_pages(bytes, align)?, bytes };
        remember(mapping.base, bytes);
        mapping.unlock()?;
        calls::open(mapping.base, mapping.bytes)?;
        mapping.keep_apart()?;
        Ok(mapping)
    }

    /// Unlocks the pages after the program has locked all of its memory (`MCL_CURRENT`).
    pub fn unlock(&self) -> io::Result<()> {
        calls::unlock(self.base, self.bytes)
    }

    /// Locks the pages in memory: they are never swapped out. Errors: `ENOMEM` or `EPERM` where
    /// `RLIMIT_MEMLOCK` does not allow it.
    pub fn lock(&self) -> io::Result<()> {
        calls::lock(self.base, self.bytes)
    }

    /// Leaves the mapping out of core dumps. Forked processes read zeros from it.
    pub fn keep_private(&self) -> io::Result<()> {
        calls::keep_private(self.base, self.bytes)
    }

    /// Undoes the second half of [`Self::keep_private`]: forked processes find a copy.
    pub fn keep_on_fork(&self) -> io::Result<()> {
        calls::keep_on_fork(self.base, self.bytes)
    }

    /// Faults every page in, for writing. Fails with `ENOMEM` as [`Self::populated`] does; then
    /// some pages may be present.
    pub fn populate(&self) -> io::Result<()> {
        calls::populate(self.base, self.bytes)
    }

    /// Faults the pages of a part in, for writing. `ENOMEM` as of [`Self::populate`].
    pub fn populate_part(&self, offset: usize, bytes: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(PAGE_BYTES) && offset + bytes <= self.bytes);
        // SAFETY: by the assertion, the address is inside the mapping.
        calls::populate(unsafe { self.base.add(offset) }, bytes)
    }

    /// Asks for huge pages in a part, where that is allowed. A file's part has them only if its
    /// file system provides them.
    pub fn prefer_huge(&self, offset: usize, bytes: usize) {
        assert!(offset.is_multiple_of(PAGE_BYTES) && offset + bytes <= self.bytes);
        // SAFETY: by the assertion, the address is inside the mapping.
        calls::prefer_huge(unsafe { self.base.add(offset) }, bytes);
    }

    /// Gives the memory of a part back to the kernel; it reads as zeros afterwards. Unlocks the
    /// mapping if it is locked.
    ///
    /// # Safety
    /// No code relies on the content of that part.
    pub unsafe fn discard_part(&self, offset: usize, bytes: usize) -> io::Result<()> {
        assert!(offset.is_multiple_of(PAGE_BYTES) && offset + bytes <= self.bytes);
        // SAFETY: by the assertion, the part is inside the mapping. The caller answers for its
        // contents.
        let discard = || unsafe { calls::discard(self.base.add(offset), bytes) };
        // This loops because the program may lock its memory more than once.
        for _ in 0..LOCKS_MAX {
            match discard() {
                Err(error) if error.raw_os_error() == Some(EINVAL) => self.unlock()?,
                done => return done,
            }
        }
        discard()
    }

    /// Keeps the mapping from processes that are forked from now on, and restricts it to pages of
    /// the common size. Moves of single pages (see [`crate::uffd`]) need both.
    pub fn keep_apart(&self) -> io::Result<()> {
        calls::keep_apart(self.base, self.bytes)
    }

    /// Sets whether processes that are forked from now on have a part.
    pub fn set_inherited(&self, offset: usize, bytes: usize, is_inherited: bool) -> io::Result<()> {
        calls::set_inherited(self.part(offset, bytes)?, bytes, is_inherited)
    }

    /// Asks the kernel to swap out whole pages, beginning at `offset`, while there is swap. Writes
    /// to the swap device may still be under way when this returns.
    ///
    /// Errors: `EINVAL` before Linux 5.4, and for a range that does not consist of whole pages of
    /// the mapping.
    pub fn page_out(&self, offset: usize, bytes: usize) -> io::Result<()> {
        calls::page_out(self.part(offset, bytes)?, bytes)
    }

    /// Pages in memory, including the swap cache.
    pub fn resident_pages(&self) -> io::Result<usize> {
        calls::resident_pages(self.base, self.bytes)
    }

    /// Gives the memory of a range back to the kernel; it reads as zeros afterwards.
    pub fn discard(&mut self, offset: usize, bytes: usize) -> io::Result<()> {
        let start = self.part(offset, bytes)?;
        // SAFETY: the part is inside the mapping. `&mut self` excludes other users of this handle,
        // as in `as_mut_slice`.
        unsafe { calls::discard(start, bytes) }
    }

    fn part(&self, offset: usize, bytes: usize) -> io::Result<NonNull<u8>> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        if !is_inside || !(offset | bytes).is_multiple_of(PAGE_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the address is inside the mapping.
        Ok(unsafe { self.base.add(offset) })
    }

    /// Makes every access to a part a fault from now on.
    pub fn forbid(&self, offset: usize, bytes: usize) -> io::Result<()> {
        calls::forbid(self.part(offset, bytes)?, bytes)
    }

    /// Start of the range; valid for reads and writes of [`Self::len`] bytes while `self` lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped, a multiple of the page.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Always false: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bytes, exclusively.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the range is mapped (struct invariant) and `&mut self` excludes other users of
        // this handle; a caller that also uses `as_ptr` answers for keeping the two apart.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// The bytes, shared.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: as above; a writer through `as_ptr` must keep clear of such borrows.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        forget(self.base);
        calls::unmap(self.base, self.bytes);
    }
}

/// Maps part of a file privately over a range of addresses, in place of the present mappings. Safe
/// in a signal handler.
///
/// # Safety
/// The range is the caller's, in whole pages, and no code relies on its content.
pub unsafe fn map_file_over(
    range: Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
) -> io::Result<()> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let start = range.start as *mut c_void;
    // SAFETY: the caller's promise.
    unsafe { mm::mmap(start, range.len(), protection, flags, file, offset) }?;
    Ok(())
}

/// Unmaps a range of addresses. Safe in a signal handler.
///
/// # Safety
/// The range is the caller's, in whole pages, and no code uses it any more.
pub unsafe fn unmap_range(range: Range<usize>) -> io::Result<()> {
    // SAFETY: the caller's promise.
    Ok(unsafe { mm::munmap(range.start as *mut c_void, range.len()) }?)
}

/// Our own mappings; `None` before [`remember_own`].
static OWN: Mutex<Option<BTreeMap<usize, usize>>> = Mutex::new(None);

/// Records mappings that are made from now on: see [`own`].
pub fn remember_own() {
    OWN.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
}

/// The mappings made since [`remember_own`]: each [`Mapping`], and recorded stacks of threads.
pub fn own() -> Vec<Range<usize>> {
    let own = OWN.lock().unwrap_or_else(PoisonError::into_inner);
    own.iter().flatten().map(|(start, bytes)| *start..start + bytes).collect()
}

/// Records the calling thread's stack, of at most `bytes` bytes, as a mapping of ours. The recorded
/// range includes the thread's own memory, which the C library has at the stack's end, with at most
/// `variables` bytes of variables.
pub fn remember_stack(bytes: usize, variables: usize) {
    let own = thread_memory::around(thread_memory::own_block(), variables);
    let start = own.start.saturating_sub(bytes);
    let base = NonNull::new(start as *mut u8);
    base.into_iter().for_each(|base| remember(base, own.end - start));
}

fn remember(base: NonNull<u8>, bytes: usize) {
    if let Some(own) = &mut *OWN.lock().unwrap_or_else(PoisonError::into_inner) {
        own.insert(base.as_ptr() as usize, bytes);
    }
}

fn forget(base: NonNull<u8>) {
    if let Some(own) = &mut *OWN.lock().unwrap_or_else(PoisonError::into_inner) {
        own.remove(&(base.as_ptr() as usize));
    }
}

/// True if two ranges overlap.
pub fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The whole pages of a range that overlap none of `kept`.
pub fn cut(range: Range<usize>, kept: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut kept: Vec<_> = kept.iter().filter(|kept| overlap(kept, &range)).collect();
    kept.sort_unstable_by_key(|kept| kept.start);
    let mut start = range.start;
    let end = range.end..range.end;
    let mut parts = Vec::new();
    for kept in kept.into_iter().chain([&end]) {
        let part = start.next_multiple_of(PAGE_BYTES)..kept.start / PAGE_BYTES * PAGE_BYTES;
        if part.start < part.end {
            parts.push(part);
        }
        start = start.max(kept.end);
    }
    parts
}

/// Gives the memory of a range of addresses back to the kernel. Safe in a signal handler.
///
/// # Safety
/// The range is of whole mapped pages, and no code relies on their content.
pub unsafe fn discard_range(range: Range<usize>) -> io::Result<()> {
    // SAFETY: the caller's promise.
    let done =
        unsafe { mm::madvise(range.start as *mut c_void, range.len(), Advice::LinuxDontNeed) };
    Ok(done?)
}

/// Makes a present page private to this process: copies the page if a fork shares it and still has
/// it. Errors: `EINVAL` before Linux 5.14.
pub fn unshare(page: usize) -> io::Result<()> {
    // SAFETY: the call changes no contents.
    let done = unsafe { mm::madvise(page as *mut c_void, PAGE_BYTES, Advice::LinuxPopulateWrite) };
    Ok(done?)
}

/// Decides if the kernel may join a range of anonymous memory with its neighbours to one mapping.
/// Fails if the range has holes.
pub fn set_joined(range: Range<usize>, is_joined: bool) -> io::Result<()> {
    // For anonymous memory the kernel only notes this advice, and does not merge mappings that
    // differ in it.
    let advice = if is_joined { Advice::Normal } else { Advice::Random };
    // SAFETY: the call changes no contents.
    let done = unsafe { mm::madvise(range.start as *mut c_void, range.len(), advice) };
    Ok(done?)
}

/// True if the page at an address is in memory; false if the kernel has swapped it out. Needs no
/// descriptor.
pub fn is_in_core(address: usize) -> io::Result<bool> {
    let mut is_there = 0u8;
    let page = address / PAGE_BYTES * PAGE_BYTES;
    // SAFETY: the call writes one byte for one page, to a valid place.
    match unsafe { libc::mincore(page as *mut c_void, PAGE_BYTES, &mut is_there) } {
        0 => Ok(is_there & 1 != 0),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The bytes of a range that are in memory, in whole pages; 0 if a part of it is not mapped.
pub fn bytes_in_core(range: Range<usize>) -> u64 {
    let pages = NonNull::new(range.start as *mut u8)
        .and_then(|base| calls::resident_pages(base, range.len()).ok());
    (pages.unwrap_or(0) * PAGE_BYTES) as u64
}

/// True if all pages of a range are mapped. Needs no descriptor.
pub fn is_mapped(range: Range<usize>) -> bool {
    let at = range.start as *mut c_void;
    // SAFETY: this flag changes nothing, and asks only.
    unsafe { mm::msync(at, range.len(), mm::MsyncFlags::ASYNC) }.is_ok()
}

/// A line of `/proc/PID/maps`: a range of addresses and its mapping.
#[derive(Debug, PartialEq, Eq)]
pub struct Mapped<'a> {
    /// Its addresses.
    pub range: Range<usize>,
    /// `rwxp`, with a `-` for a missing right; the last is `s` if it is shared.
    pub access: [u8; 4],
    /// True if it maps a file.
    pub has_file: bool,
    /// The file, or the kernel's name (`[heap]`), or empty.
    pub name: &'a str,
}

impl<'a> Mapped<'a> {
    /// Parses a line; `None` if the line is not the kernel's.
    pub fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let hex = |text| usize::from_str_radix(text, 16).ok();
        let access = fields.next()?.as_bytes().first_chunk().copied()?;
        let has_file = fields.nth(2)? != "0";
        let name = fields.next().unwrap_or_default();
        Some(Self { range: hex(start)?..hex(end)?, access, has_file, name })
    }

    /// True if it is private, writable memory of no file, and not the stack.
    pub fn is_heap(&self) -> bool {
        let is_stack = self.name.starts_with("[s") || self.name == "[vvar]";
        let is_private = self.access.starts_with(b"rw") && self.access.ends_with(b"p");
        is_private && !self.has_file && !is_stack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kept_ranges_are_cut_out_of_the_mapping_that_the_kernel_joined_them_to() {
        const PAGE: usize = PAGE_BYTES;
        let range = 10 * PAGE..30 * PAGE;
        let (before, behind) = (9 * PAGE..10 * PAGE, 30 * PAGE..31 * PAGE);
        assert_eq!(cut(range.clone(), &[behind, before.clone()]), std::slice::from_ref(&range));
        assert_eq!(cut(range.clone(), &[before.start..range.end, before.clone()]), []);
        // Two ranges that overlap, and one with partial pages at both ends.
        let kept = [14 * PAGE..20 * PAGE, 12 * PAGE..15 * PAGE, 25 * PAGE - 1..26 * PAGE + 1];
        let parts = [10 * PAGE..12 * PAGE, 20 * PAGE..24 * PAGE, 27 * PAGE..30 * PAGE];
        assert_eq!(cut(range, &kept), parts);
    }

    #[test]
    fn populated_memory_is_zero_aligned_and_writable() {
        let mut m = Mapping::populated(PAGE_BYTES + 1).unwrap();
        assert_eq!(m.len(), 2 * PAGE_BYTES);
        assert_eq!(m.as_ptr() as usize % PAGE_BYTES, 0);
        assert!(m.as_slice().iter().all(|&b| b == 0));
        m.as_mut_slice().fill(7);
        assert_eq!(m.as_slice()[PAGE_BYTES], 7);
    }

    #[test]
    fn ranges_are_of_whole_pages_inside() {
        let mut m = Mapping::populated(4 * PAGE_BYTES).unwrap();
        m.as_mut_slice().fill(7);
        m.page_out(PAGE_BYTES, PAGE_BYTES).unwrap();
        m.discard(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!([0, 1, 2, 3].map(|page| m.as_slice()[page * PAGE_BYTES]), [7, 7, 0, 7]);
        for (offset, bytes) in [(4 * PAGE_BYTES, PAGE_BYTES), (1, PAGE_BYTES), (0, 7)] {
            assert!(m.discard(offset, bytes).is_err());
            assert!(m.page_out(offset, bytes).is_err());
        }
        assert!(m.discard(usize::MAX & !(PAGE_BYTES - 1), PAGE_BYTES).is_err());
    }
}
