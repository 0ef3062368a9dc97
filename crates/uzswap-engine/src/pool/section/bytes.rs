//! The bytes of frames: **the one place** where the pool's memory is read and written.

#![expect(
    unsafe_code,
    reason = "frames are raw memory: an object's owner holds its entry's lock; a section with a frame in use stays mapped; headers are atomics"
)]

use super::{Frame, SECTION_FRAMES, Sections};
use crate::page::PAGE_BYTES;
use std::sync::atomic::{AtomicU64, Ordering};

impl Sections {
    /// A pointer `offset` bytes into a frame of a section that is on line.
    ///
    /// The section stays on line while the frame is in use. The pointer is thus valid, up to the
    /// end of the frame, while the caller keeps the frame's zspage alive.
    fn pointer(&self, frame: Frame, offset: usize) -> *mut u8 {
        let base = self.bases[frame.section()].load(Ordering::Acquire);
        assert!(!base.is_null() && offset < PAGE_BYTES, "{frame:?} of a section that is off line");
        let within = frame.0 as usize % SECTION_FRAMES * PAGE_BYTES + offset;
        // SAFETY: a section is SECTION_BYTES long and `within` is below that.
        unsafe { base.add(within) }
    }

    /// The header word at `offset` (a multiple of 8) of a frame.
    ///
    /// Compaction reads headers while other threads write theirs, so all accesses are atomic.
    pub(in crate::pool) fn header(&self, frame: Frame, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(size_of::<u64>()));
        // SAFETY: aligned (sections are page-aligned, the offset was checked) and inside the frame,
        // which stays mapped while its zspage is in use, as `pointer` says. Callers reach a header
        // only through a zspage in use. No plain access ever overlaps it: payloads and headers of a
        // class never change places while the zspage lives.
        unsafe { AtomicU64::from_ptr(self.pointer(frame, offset).cast()) }
    }

    /// Copies `bytes` into a frame.
    ///
    /// The caller owns the object in these bytes: it has just allocated the object and not
    /// published it, or has the lock of its entry.
    pub(in crate::pool) fn write(&self, frame: Frame, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= PAGE_BYTES);
        // SAFETY: by the assertion, the destination is inside the frame. `bytes` does not overlap,
        // because no borrow of pool memory is ever made. There is no race, because the caller owns
        // the object.
        unsafe {
            let to = self.pointer(frame, offset);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// Copies out of a frame. The caller owns the object in these bytes, as for [`Self::write`].
    pub(in crate::pool) fn read(&self, frame: Frame, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= PAGE_BYTES);
        // SAFETY: as in `write`, in the other direction.
        unsafe {
            let from = self.pointer(frame, offset);
            std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len());
        }
    }
}
