//! Memory of this process that it may not access: it is read and written through `/proc/self/mem`,
//! and access is allowed when it is complete. This replaces userfaultfd where that is denied.

use crate::map::{Mapping, PAGE_BYTES};
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
    /// Opens it. Errors: `/proc` is not mounted; the process may not trace itself
    /// (`prctl(PR_SET_DUMPABLE)`); the kernel does not let it write inaccessible memory
    /// (`proc_mem.force_override`).
    pub fn open() -> io::Result<Self> {
        let own = Self::opened()?;
        let page = Mapping::reserved(PAGE_BYTES)?;
        let range = page.as_ptr() as usize..page.as_ptr() as usize + PAGE_BYTES;
        // SAFETY: ours, and no code accesses it.
        unsafe { set_access(range.clone(), false) }?;
        // SAFETY: as above.
        unsafe { own.write(range.start, &[1]) }?;
        Ok(own)
    }

    fn opened() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        // By the thread's name: `/proc/self` is the first thread's, which may have ended.
        let file = rustix::fs::open(c"/proc/thread-self/mem", flags, Mode::empty())?;
        Ok(Self(crate::process::out_of_the_way(file)))
    }

    /// Opens it anew under the same descriptor: in a fork, whose descriptor is of its parent's
    /// memory.
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

/// Allows or forbids access to a range. Safe in a signal handler. Errors: `ENOMEM` where the
/// process has the most mappings that it may have (`vm.max_map_count`).
///
/// # Safety
/// It is memory of this process, in whole pages, and a thread that accesses forbidden memory
/// handles the SIGSEGV.
pub unsafe fn set_access(range: Range<usize>, is_allowed: bool) -> io::Result<()> {
    let access = match is_allowed {
        true => MprotectFlags::READ | MprotectFlags::WRITE,
        false => MprotectFlags::empty(),
    };
    // SAFETY: the caller's promise.
    Ok(unsafe { mprotect(range.start as *mut c_void, range.len(), access) }?)
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn what_may_not_be_accessed_is_written_read_and_opened() {
        let own = OwnMemory::open().unwrap();
        let mut memory = Mapping::reserved(2 * PAGE_BYTES).unwrap();
        memory.as_mut_slice()[0] = 7;
        let at = memory.as_ptr() as usize;
        let mut page = [1; PAGE_BYTES];
        // SAFETY: ours, and no code accesses it until access is allowed.
        unsafe {
            set_access(at..at + 2 * PAGE_BYTES, false).unwrap();
            own.read(at, &mut page).unwrap();
            assert_eq!((page[0], page[1]), (7, 0));
            own.write(at + PAGE_BYTES, &[9; PAGE_BYTES]).unwrap();
            set_access(at..at + 2 * PAGE_BYTES, true).unwrap();
        }
        assert_eq!((memory.as_slice()[0], memory.as_slice()[PAGE_BYTES]), (7, 9));
        assert!(own.read(4096, &mut page).is_err(), "nothing is mapped there");
    }
}
