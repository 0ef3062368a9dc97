//! The system calls of a mapping, over its whole range or a part of it.

use super::{PAGE_BYTES, place};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

pub fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh anonymous mapping, where nothing is, aliases nothing.
    let base = unsafe { mm::mmap_anonymous(place::next(bytes), bytes, access, flags) }?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

pub fn map_file(file: BorrowedFd<'_>, offset: u64, bytes: usize) -> io::Result<NonNull<u8>> {
    let (at, access) = (place::next(bytes), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a fresh mapping, where nothing is, aliases nothing. The caller knows the changes that
    // other processes make.
    let base = unsafe { mm::mmap(at, bytes, access, MapFlags::SHARED, file, offset) }?;
    // SAFETY: the call changes no contents.
    unsafe { mm::madvise(base, bytes, Advice::LinuxDontDump) }?;
    NonNull::new(base.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Reserves inaccessible addresses: if the program locks new mappings, the kernel would bring in
/// all pages of an accessible mapping.
pub fn map_for_pages(bytes: usize, align: usize) -> io::Result<NonNull<u8>> {
    assert!(align.is_power_of_two() && align >= PAGE_BYTES);
    let (flags, whole) = (MapFlags::PRIVATE | MapFlags::NORESERVE, bytes + align);
    // SAFETY: as above; this unmaps only parts of its own mapping, outside the kept one.
    let start = unsafe {
        let start = mm::mmap_anonymous(place::next(whole), whole, ProtFlags::empty(), flags)?;
        let before = start.addr().next_multiple_of(align) - start.addr();
        let (kept, behind) = (start.byte_add(before), align - before);
        if before > 0 {
            mm::munmap(start, before)?;
        }
        if behind > 0 {
            mm::munmap(kept.byte_add(bytes), behind)?;
        }
        kept
    };
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

pub fn open(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    let access = mm::MprotectFlags::READ | mm::MprotectFlags::WRITE;
    // SAFETY: the range is ours, and only its owner uses it.
    Ok(unsafe { mm::mprotect(base.as_ptr().cast(), bytes, access) }?)
}

pub fn forbid(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    let none = mm::MprotectFlags::empty();
    // SAFETY: the range is ours, and only its owner uses it.
    Ok(unsafe { mm::mprotect(base.as_ptr().cast(), bytes, none) }?)
}

pub fn unlock(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the call changes no contents; the range is ours.
    Ok(unsafe { mm::munlock(base.as_ptr().cast(), bytes) }?)
}

pub fn lock(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the call changes no contents; the range is ours.
    Ok(unsafe { mm::mlock(base.as_ptr().cast(), bytes) }?)
}

pub fn keep_private(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: neither changes contents in this process.
    unsafe {
        mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontDump)?;
        mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxWipeOnFork)?;
    }
    Ok(())
}

pub fn keep_on_fork(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: does not change contents in this process.
    Ok(unsafe { mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxKeepOnFork) }?)
}

pub fn populate(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: populating changes no contents; the range is ours.
    let done = unsafe { mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxPopulateWrite) };
    match done {
        // A kernel before Linux 5.14 lacks this advice, so we touch each page instead.
        Err(rustix::io::Errno::INVAL) => {
            for offset in (0..bytes).step_by(PAGE_BYTES) {
                // SAFETY: the byte is inside the mapping. The mapping was just made, so no other
                // thread writes it, and writing the read value back keeps the content.
                unsafe {
                    let byte = base.as_ptr().add(offset);
                    byte.write_volatile(byte.read_volatile());
                }
            }
            Ok(())
        }
        other => Ok(other?),
    }
}

pub fn prefer_huge(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the call changes no contents. A kernel without huge pages knows no such advice.
    let _ = unsafe { mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
}

pub unsafe fn discard(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    Ok(unsafe { mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontNeed) }?)
}

pub fn keep_apart(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: neither changes contents.
    unsafe {
        mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontFork)?;
        // A kernel without huge pages refuses this advice, and does not need it.
        let _ = mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage);
    }
    Ok(())
}

pub fn set_inherited(base: NonNull<u8>, bytes: usize, is_inherited: bool) -> io::Result<()> {
    let advice = if is_inherited { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: the call changes no contents.
    Ok(unsafe { mm::madvise(base.as_ptr().cast(), bytes, advice) }?)
}

pub fn page_out(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: swapping out changes no contents; the range is ours.
    Ok(unsafe { mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxPageOut) }?)
}

pub fn resident_pages(base: NonNull<u8>, bytes: usize) -> io::Result<usize> {
    let mut resident = vec![0; bytes.div_ceil(PAGE_BYTES)];
    // SAFETY: the range is mapped; `resident` has a byte for each of its pages.
    match unsafe { libc::mincore(base.as_ptr().cast(), bytes, resident.as_mut_ptr()) } {
        0 => Ok(resident.into_iter().filter(|page| page & 1 != 0).count()),
        _ => Err(io::Error::last_os_error()),
    }
}

pub fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the owner is being dropped, so no pointer into the range is used any more.
    let done = unsafe { mm::munmap(base.as_ptr().cast(), bytes) };
    debug_assert!(done.is_ok(), "munmap of our own mapping: {done:?}");
}
