//! Memory of this process that the process may not access. It is read and written through
//! `/proc/self/mem`, and access is allowed when its content is complete. This replaces userfaultfd
//! where userfaultfd is denied.

use crate::map::{Mapping, PAGE_BYTES, Pagemap};
use crate::processor;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MprotectFlags, mprotect};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

/// See the module.
#[derive(Debug)]
pub struct OwnMemory(OwnedFd);

impl OwnMemory {
    /// Opens the file. Errors: `/proc` is not mounted; the process may not trace itself
    /// (`prctl(PR_SET_DUMPABLE)`); the kernel does not let the process write inaccessible memory
    /// (`proc_mem.force_override`).
    pub fn open() -> io::Result<Self> {
        let own = Self::opened()?;
        let page = Mapping::reserved(PAGE_BYTES)?;
        let range = page.as_ptr() as usize..page.as_ptr() as usize + PAGE_BYTES;
        // SAFETY: ours, and no code accesses it.
        unsafe { set_access(range.clone(), Access::None) }?;
        // SAFETY: as above.
        unsafe { own.write(range.start, &[1]) }?;
        Ok(own)
    }

    fn opened() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        // By the calling thread's name: `/proc/self` is the folder of the first thread, which may
        // have ended.
        let file = rustix::fs::open(c"/proc/thread-self/mem", flags, Mode::empty())?;
        Ok(Self(crate::process::out_of_the_way(file)?))
    }

    /// Opens the file anew under the same descriptor, in a forked child: the inherited descriptor
    /// is of the parent's memory.
    pub fn renew(&self) -> io::Result<()> {
        let new = Self::opened()?;
        crate::process::take_place(&new.0, &self.0)
    }

    /// Its descriptor.
    pub fn descriptor(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Copies memory, accessible or not; absent pages of a mapping are zeros. Safe in a signal
    /// handler.
    pub fn read(&self, from: usize, to: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < to.len() {
            match rustix::io::pread(&self.0, &mut to[done..], (from + done) as u64)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    /// Writes memory, accessible or not. Safe in a signal handler.
    ///
    /// # Safety
    /// It is private and anonymous, and no code relies on its content.
    pub unsafe fn write(&self, to: usize, from: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < from.len() {
            match rustix::io::pwrite(&self.0, &from[done..], (to + done) as u64)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => done += written,
            }
        }
        Ok(())
    }
}

/// Writes memory without a descriptor. During the write, memory that the process may only read is
/// writable, so the process must have one thread.
///
/// # Safety
/// It is private and anonymous, and no code relies on its content.
pub unsafe fn write_plainly(to: usize, from: &[u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: to as *mut c_void, iov_len: from.len() };
    // The first thread of the process may have ended, and has no memory then.
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    // SAFETY: the call reads `from`, and writes where the caller says; the kernel checks both.
    let write = || unsafe { libc::process_vm_writev(me, &local, 1, &remote, 1, 0) };
    if write() == from.len() as isize {
        return Ok(());
    }
    let range = to..to + from.len();
    // SAFETY: the caller's memory, of whole pages; no other thread exists.
    unsafe { set_access(range.clone(), Access::All) }?;
    if write() != from.len() as isize {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    Ok(unsafe { mprotect(range.start as *mut c_void, range.len(), MprotectFlags::READ) }?)
}

/// The access that a program has to its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// None.
    None,
    /// Reads and writes.
    All,
}

/// Allows or forbids access to a range. Safe in a signal handler. Errors: `ENOMEM` where the
/// process has the most mappings that it may have (`vm.max_map_count`).
///
/// # Safety
/// It is memory of this process, in whole pages, and a thread that accesses forbidden memory
/// handles the SIGSEGV.
pub unsafe fn set_access(range: Range<usize>, access: Access) -> io::Result<()> {
    let access = match access {
        Access::None => MprotectFlags::empty(),
        Access::All => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the caller's promise.
    Ok(unsafe { mprotect(range.start as *mut c_void, range.len(), access) }?)
}

const MADV_GUARD_INSTALL: usize = 102;
const MADV_GUARD_REMOVE: usize = 103;

/// Puts guards in place of pages. The pages' contents are gone, and an access is a SIGSEGV. The
/// mapping is not split. Safe in a signal handler. Errors: `EINVAL` before Linux 6.13, and for
/// locked memory.
///
/// # Safety
/// It is private, anonymous memory of this process, in whole pages. No code relies on its contents,
/// and a thread that accesses it handles the SIGSEGV.
pub unsafe fn guard(range: Range<usize>) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { advise(range, MADV_GUARD_INSTALL) }
}

/// Removes guards. In a guard's place there is then no page, and reads return zeros. Safe in a
/// signal handler.
///
/// # Safety
/// The guards are the caller's.
pub unsafe fn unguard(range: Range<usize>) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { advise(range, MADV_GUARD_REMOVE) }
}

/// `madvise` with advice that the bindings do not name.
///
/// # Safety
/// As of the advice.
unsafe fn advise(range: Range<usize>, advice: usize) -> io::Result<()> {
    loop {
        // SAFETY: the caller's promise.
        let done = unsafe { processor::advise(range.start, range.len(), advice) };
        match -done as i32 {
            0 => return Ok(()),
            // A signal is pending, and only a part is done.
            libc::EINTR => {}
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Checks that this kernel has guards and reports their places (Linux 6.15).
pub fn check_guards() -> io::Result<()> {
    let page = Mapping::reserved(PAGE_BYTES)?;
    let range = page.as_ptr() as usize..page.as_ptr() as usize + PAGE_BYTES;
    let mut guards = [false];
    // SAFETY: our memory, which no other code accesses.
    unsafe { guard(range.clone()) }?;
    Pagemap::open()?.have_guards(range.start, &mut guards)?;
    // SAFETY: put there above.
    unsafe { unguard(range) }?;
    if guards[0] { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn memory_without_access_is_written_read_and_opened() {
        let own = OwnMemory::open().unwrap();
        let mut memory = Mapping::reserved(2 * PAGE_BYTES).unwrap();
        memory.as_mut_slice()[0] = 7;
        let at = memory.as_ptr() as usize;
        let mut page = [1; PAGE_BYTES];
        // SAFETY: ours, and no code accesses it until access is allowed.
        unsafe {
            set_access(at..at + 2 * PAGE_BYTES, Access::None).unwrap();
            own.read(at, &mut page).unwrap();
            assert_eq!((page[0], page[1]), (7, 0));
            own.write(at + PAGE_BYTES, &[9; PAGE_BYTES]).unwrap();
            set_access(at..at + 2 * PAGE_BYTES, Access::All).unwrap();
        }
        assert_eq!((memory.as_slice()[0], memory.as_slice()[PAGE_BYTES]), (7, 9));
        assert!(own.read(4096, &mut page).is_err(), "nothing is mapped there");
    }

    #[test]
    fn guards_are_told_from_pages_and_leave_zeros() {
        let Ok(()) = check_guards() else { return };
        let mut memory = Mapping::reserved(3 * PAGE_BYTES).unwrap();
        memory.as_mut_slice().fill(7);
        let at = memory.as_ptr() as usize;
        let pagemap = Pagemap::open().unwrap();
        let (mut guards, mut pages) = ([false; 3], [false; 3]);
        // SAFETY: our memory, which no other code accesses.
        unsafe {
            guard(at + PAGE_BYTES..at + 2 * PAGE_BYTES).unwrap();
            pagemap.have_guards(at, &mut guards).unwrap();
            pagemap.have_pages(at, &mut pages).unwrap();
            unguard(at..at + 3 * PAGE_BYTES).unwrap();
        }
        assert_eq!((guards, pages), ([false, true, false], [true, false, true]));
        assert_eq!([0, 1, 2].map(|page| memory.as_slice()[page * PAGE_BYTES]), [7, 0, 7]);
    }
}
