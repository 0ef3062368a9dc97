//! Memory that outlives the process that uses it: a file without a name, mapped.
//!
//! The memory exists while any process has the descriptor. Only populated pages take memory, so its
//! size can be that of the largest possible content.

use crate::map::{Mapping, PAGE_BYTES};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountAttrFlags};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// An empty file for [`SharedMemory`]. Only a process with the descriptor can open it.
pub fn create(name: &str) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?)
}

/// Creates shared memory that the kernel never swaps out, even if no process has locked it. This is
/// for a process that serves swapping and may be killed. The memory is on a file system of its own,
/// which is removed with it. Fails before Linux 6.4, and with `PermissionDenied` without
/// CAP_SYS_ADMIN.
pub fn create_unswappable() -> io::Result<OwnedFd> {
    let setup = mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    mount::fsconfig_set_flag(setup.as_fd(), "noswap")?;
    // No limit but the machine's.
    mount::fsconfig_set_string(setup.as_fd(), "size", "0")?;
    mount::fsconfig_set_string(setup.as_fd(), "mode", "700")?;
    // Huge pages on request, for any default of the machine. An error means that this kernel has no
    // huge pages here.
    let _ = mount::fsconfig_set_string(setup.as_fd(), "huge", "advise");
    mount::fsconfig_create(setup.as_fd())?;
    let none = MountAttrFlags::MOUNT_ATTR_NOEXEC | MountAttrFlags::MOUNT_ATTR_NODEV;
    let folder = mount::fsmount(setup.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, none)?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC | OFlags::EXCL;
    Ok(rustix::fs::openat(&folder, ".", flags, Mode::RUSR | Mode::WUSR)?)
}

/// A file without a name, mapped whole for reading and writing.
#[derive(Debug)]
pub struct SharedMemory {
    file: OwnedFd,
    mapping: Mapping,
}

impl SharedMemory {
    /// Maps `bytes` (rounded up to pages) of a file, and makes it that long. The mapping is left
    /// out of core dumps.
    ///
    /// Errors: `ENOMEM`, no space in the address space.
    pub fn map(file: OwnedFd, bytes: usize) -> io::Result<Self> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        if rustix::fs::fstat(&file)?.st_size < bytes as i64 {
            rustix::fs::ftruncate(&file, bytes as u64)?;
        }
        let mapping = Mapping::of_file(file.as_fd(), bytes)?;
        Ok(Self { file, mapping })
    }

    /// Start of the range; valid for reads and writes of [`Self::len`] bytes while `self` lives.
    /// The kernel must find memory for a page that was not populated. If it finds none, the access
    /// is a SIGBUS.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }

    /// Bytes mapped, a multiple of the page.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Always false: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// Populates whole pages that begin at `offset`. New pages are zeros. After `ENOMEM` some pages
    /// may be populated. (Before Linux 5.14 that is a SIGBUS.)
    pub fn populate(&self, offset: usize, bytes: usize) -> io::Result<()> {
        match self.mapping.populate_part(offset, bytes) {
            // The kernel's error where there is no memory for a file's page.
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                Err(io::ErrorKind::OutOfMemory.into())
            }
            other => other,
        }
    }

    /// Asks for huge pages in a part. A file of [`create_unswappable`] has huge pages where the
    /// kernel finds some. A huge page is populated whole.
    pub fn prefer_huge(&self, offset: usize, bytes: usize) {
        self.mapping.prefer_huge(offset, bytes);
    }

    /// Gives whole pages that begin at `offset` back to the kernel, for all processes. They read as
    /// zeros afterwards.
    ///
    /// # Safety
    /// No process relies on their content.
    pub unsafe fn release(&self, offset: usize, bytes: usize) -> io::Result<()> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.len());
        assert!(is_inside && (offset | bytes).is_multiple_of(PAGE_BYTES), "whole pages inside");
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&self.file, hole, offset as u64, bytes as u64)?)
    }

    /// Cuts the mapping into populated parts of `bytes` each, in whole pages. The last part
    /// contains all remaining bytes. Errors: no memory.
    ///
    /// # Safety
    /// No other process uses the file while the parts live, and this process has it mapped once.
    pub unsafe fn into_parts(self, bytes: usize) -> io::Result<Vec<Part>> {
        self.populate(0, self.len())?;
        let memory = Arc::new(self);
        let part = |offset| {
            let bytes = bytes.min(memory.len() - offset);
            Part { memory: memory.clone(), offset, bytes }
        };
        Ok((0..memory.len()).step_by(bytes).map(part).collect())
    }
}

/// A part of shared memory, owned.
///
/// Invariant: it is inside the memory, populated, and no other code uses it.
#[derive(Debug)]
pub struct Part {
    memory: Arc<SharedMemory>,
    offset: usize,
    bytes: usize,
}

impl Part {
    /// Writes 64 bits at `at`, a multiple of 8, in one store: a killed process has written all or
    /// nothing.
    pub fn set_word(&mut self, at: usize, value: u64) {
        assert!(at.is_multiple_of(size_of::<u64>()) && at + size_of::<u64>() <= self.bytes);
        // SAFETY: by the assertion, the address is aligned and inside the part. `&mut self`
        // excludes other users.
        unsafe { self.memory.as_ptr().add(self.offset + at).cast::<u64>().write_volatile(value) };
    }

    /// Reads 64 bits.
    pub fn word(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(size_of::<u64>()) && at + size_of::<u64>() <= self.bytes);
        // SAFETY: by the assertion, the address is aligned and inside the part. `&self` excludes
        // writers.
        unsafe { self.memory.as_ptr().add(self.offset + at).cast::<u64>().read_volatile() }
    }
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the invariant.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().add(self.offset), self.bytes) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: the invariant, and `&mut self` excludes other users of this handle.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(self.offset), self.bytes) }
    }
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_never_swapped_has_no_name_and_no_limit() {
        let file = match create_unswappable() {
            Ok(file) => file,
            // The test does not run as root, or the kernel is older than Linux 6.4.
            Err(_) => return,
        };
        let memory = SharedMemory::map(file, 1 << 40).unwrap();
        memory.populate(1 << 35, 4 * PAGE_BYTES).unwrap();
        assert_eq!(rustix::fs::fstat(&memory.file).unwrap().st_nlink, 0);
        // SAFETY: no code relies on its content.
        unsafe { memory.release(1 << 35, 4 * PAGE_BYTES) }.unwrap();
    }

    #[test]
    fn bytes_written_through_one_mapping_are_read_through_another_of_the_file() {
        let file = create("uzswap-test").unwrap();
        let again = file.try_clone().unwrap();
        let memory = SharedMemory::map(file, 1 << 40).unwrap();
        memory.populate(1 << 30, 2 * PAGE_BYTES).unwrap();
        let at = |memory: &SharedMemory, offset: usize| {
            // SAFETY: the address is inside the mapping, and no other thread writes.
            unsafe { memory.as_ptr().add(offset) }
        };
        // SAFETY: as above.
        unsafe { at(&memory, (1 << 30) + PAGE_BYTES).write(7) };
        drop(memory);
        let memory = SharedMemory::map(again, 1 << 40).unwrap();
        // The reads are volatile, because the compiler is told that the call changes no memory.
        // SAFETY: as above; no code relies on the released content.
        unsafe {
            assert_eq!(at(&memory, (1 << 30) + PAGE_BYTES).read_volatile(), 7);
            memory.release(1 << 30, 2 * PAGE_BYTES).unwrap();
            assert_eq!(at(&memory, (1 << 30) + PAGE_BYTES).read_volatile(), 0);
        }
        assert!(rustix::fs::fstat(&memory.file).unwrap().st_blocks <= 16);
    }
}
