//! A mapping for Miri, which has the allocator but not `madvise`.

use super::PAGE_BYTES;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, PAGE_BYTES).expect("a page-aligned, non-zero size")
}

pub fn map(bytes: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: the layout is not of size zero.
    NonNull::new(unsafe { alloc_zeroed(layout(bytes)) })
        .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

pub fn map_file(_file: BorrowedFd<'_>, _offset: u64, _bytes: usize) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

pub fn map_for_pages(bytes: usize, align: usize) -> io::Result<NonNull<u8>> {
    assert_eq!(align, PAGE_BYTES, "Miri makes no regions");
    map(bytes)
}

pub fn open(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn forbid(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn unlock(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn lock(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn keep_private(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn keep_on_fork(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn populate(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn prefer_huge(_base: NonNull<u8>, _bytes: usize) {}

pub unsafe fn discard(base: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { base.as_ptr().write_bytes(0, bytes) };
    Ok(())
}

pub fn keep_apart(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn set_inherited(_: NonNull<u8>, _: usize, _: bool) -> io::Result<()> {
    Ok(())
}

pub fn page_out(_base: NonNull<u8>, _bytes: usize) -> io::Result<()> {
    Ok(())
}

pub fn resident_pages(_base: NonNull<u8>, bytes: usize) -> io::Result<usize> {
    Ok(bytes / PAGE_BYTES)
}

pub fn unmap(base: NonNull<u8>, bytes: usize) {
    // SAFETY: allocated by `map` with the same layout.
    unsafe { dealloc(base.as_ptr(), layout(bytes)) }
}
