//! Unneeded pages, swapped out to take the slots of an area.
//!
//! The kernel looks only at an area's free slots. If an area has free slots but cannot take more
//! pages, each write to it fails, and the kernel tries for ever with other pages and slots. So the
//! ballast takes the free slots. Its pages are of one repeated word, which the area's server stores
//! in almost no memory.
//!
//! The pages belong to a file in memory, not to a process, so the OOM killer has no process to end
//! for them.

use crate::map::PAGE_BYTES;
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// The size of the pages that are made at a time: the most that the ballast keeps in memory.
const WINDOW_BYTES: usize = 2 << 20;

/// The pages' content. It differs from zeros, since some kernels (6.12) do not write a page of
/// zeros.
const WORD: u64 = 0x7a75_7377_6170_2121;

/// See the module.
#[derive(Debug)]
pub struct Ballast {
    file: OwnedFd,
    bytes: u64,
}

impl Ballast {
    /// The new ballast takes no slot yet. Errors: `Unsupported` before Linux 3.17.
    pub fn new() -> io::Result<Self> {
        let file = rustix::fs::memfd_create("uzswap-ballast", MemfdFlags::CLOEXEC)?;
        Ok(Self { file, bytes: 0 })
    }

    /// Bytes of the slots taken.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes up to `bytes` more, or fewer once there is no free slot. Returns the bytes taken.
    pub fn grow(&mut self, bytes: u64) -> io::Result<u64> {
        let mut grown = 0;
        while grown < bytes {
            let window =
                (bytes - grown).min(WINDOW_BYTES as u64) as usize / PAGE_BYTES * PAGE_BYTES;
            if window == 0 || !self.push(window)? {
                break;
            }
            grown += window as u64;
        }
        Ok(grown)
    }

    /// Makes pages at the end, and asks the kernel to swap them out. `false` if the kernel did not
    /// swap them out; then they are removed.
    fn push(&mut self, bytes: usize) -> io::Result<bool> {
        rustix::fs::ftruncate(&self.file, self.bytes + bytes as u64)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing.
        let window = unsafe {
            mm::mmap(std::ptr::null_mut(), bytes, protection, flags, self.file.as_fd(), self.bytes)
        }?;
        // SAFETY: the window is ours, mapped for `bytes`, aligned for words, and only used here
        // until it is unmapped below.
        let is_out = unsafe {
            std::slice::from_raw_parts_mut(window.cast::<u64>(), bytes / size_of::<u64>())
                .fill(WORD);
            let is_out = swap_out(window, bytes);
            mm::munmap(window, bytes)?;
            is_out
        };
        if is_out {
            self.bytes += bytes as u64;
        } else {
            rustix::fs::ftruncate(&self.file, self.bytes)?;
        }
        Ok(is_out)
    }

    /// Gives slots back until it takes `bytes`.
    pub fn shrink_to(&mut self, bytes: u64) -> io::Result<()> {
        if bytes >= self.bytes {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, bytes, self.bytes - bytes)?;
        rustix::fs::ftruncate(&self.file, bytes)?;
        self.bytes = bytes;
        Ok(())
    }
}

/// True if the pages of a window are out, after a few attempts.
///
/// # Safety
/// The window is mapped for `bytes`.
unsafe fn swap_out(window: *mut c_void, bytes: usize) -> bool {
    // While a device has not answered, the kernel keeps the pages in memory.
    const TRIES: u32 = 6;
    (0..TRIES).any(|tried| {
        if tried > 0 {
            std::thread::sleep(Duration::from_millis(1 << tried));
        }
        // SAFETY: the caller's promise. An error leaves the pages in memory, which the next lines
        // find.
        let _ = unsafe { mm::madvise(window, bytes, Advice::LinuxPageOut) };
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        swapped(&maps, window.addr()) >= bytes as u64
    })
}

/// Bytes with slots of the mapping that begins at an address, by the text of `/proc/PID/smaps`.
/// The call `mincore` would not do: a page that was written to its slot also stays in memory, until
/// the kernel needs that memory.
fn swapped(maps: &str, address: usize) -> u64 {
    let begin = format!("{address:x}-");
    let lines = maps.lines().skip_while(|line| !line.starts_with(&begin)).skip(1);
    let kib = lines.take_while(|line| line.starts_with(|letter: char| letter.is_ascii_uppercase()));
    let kib = kib.filter_map(|line| line.strip_prefix("Swap:")).next();
    let kib = kib.and_then(|text| text.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn the_swapped_bytes_of_the_right_mapping_are_read() {
        let maps = "7f00-7f10 rw-s 00 00:01 5 /memfd:x (deleted)\nSize: 64 kB\nSwap: 12 kB\n\
                    7f100-7f200 rw-s 00 00:01 5 /memfd:x (deleted)\nSize: 64 kB\nSwap:   8 kB\n";
        assert_eq!((swapped(maps, 0x7f00), swapped(maps, 0x7f100)), (12 << 10, 8 << 10));
        assert_eq!(swapped(maps, 0x7f10), 0);
    }

    #[test]
    fn without_room_it_takes_nothing_and_leaves_nothing() {
        let mut ballast = Ballast::new().unwrap();
        // This machine may have a swap area, perhaps of another test, which takes all of the
        // ballast.
        let grown = ballast.grow(WINDOW_BYTES as u64).unwrap();
        assert_eq!((ballast.bytes(), grown % WINDOW_BYTES as u64), (grown, 0));
        ballast.shrink_to(0).unwrap();
        assert_eq!(ballast.bytes(), 0);
    }
}
