//! From a served file to a swap device: loop device, header, swapon.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::loopdev::LoopDevice;
use uzswap_sys::swap;

/// The swap device could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The loop device.
    #[error("cannot attach a loop device: {0}; `uzswap doctor` tells what is missing")]
    Loop(io::Error),
    /// The file or the header on it.
    #[error("cannot write the swap header: {0}; is the daemon running?")]
    Header(io::Error),
    /// The system call.
    #[error("cannot switch swapping on: {0}; it needs root outside of a container")]
    SwapOn(io::Error),
}

/// A file that the kernel swaps to. Dropped, it is *not* switched off: pages may be on it, and
/// reading them back may fail, which the caller must hear of ([`Self::switch_off`]).
#[derive(Debug)]
pub struct SwapDevice {
    device: LoopDevice,
}

impl SwapDevice {
    /// Puts a loop device with direct I/O over `disk`. It lets go of the file when this is dropped,
    /// or, once swapped on, when it is switched off.
    pub fn attach(disk: &Path) -> Result<Self, AttachError> {
        let file = File::options().read(true).write(true).open(disk);
        let file = file.map_err(AttachError::Header)?;
        // The loop driver takes the size from the inode, of which the kernel has not asked us yet
        // (seen on 6.12: a device of 0 bytes).
        file.metadata().map_err(AttachError::Header)?;
        let device = LoopDevice::attach(file.as_raw_fd(), PAGE_BYTES as u32);
        Ok(Self { device: device.map_err(AttachError::Loop)? })
    }

    /// Writes the header of an area of `pages` and has the kernel swap to it before any other.
    pub fn switch_on(&self, pages: u32, label: &str) -> Result<(), AttachError> {
        let header = swap::header(pages, label);
        self.device.write_start(&header[..]).map_err(AttachError::Header)?;
        swap::on(self.device.path(), swap::PRIORITY_MAX).map_err(AttachError::SwapOn)
    }

    /// Has the kernel read everything back and forget the device.
    pub fn switch_off(&self) -> io::Result<()> {
        swap::off(self.device.path())
    }

    /// Its path, `/dev/loopN`.
    pub fn path(&self) -> &Path {
        self.device.path()
    }
}
