//! Parts of the disk as swap areas: header, swapon.

use std::io;
use std::path::Path;
use std::time::Duration;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::{swap, ublk};

/// A swap area could not be made.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The loop device.
    #[error("cannot attach a loop device: {0}; `uzswap doctor` names the missing part")]
    Loop(io::Error),
    /// The ublk device.
    #[error("cannot make a ublk device: {0}; `uzswap doctor` names the missing part")]
    Ublk(io::Error),
    /// The file or the header on it.
    #[error("cannot write the swap header: {0}; is the daemon running?")]
    Header(io::Error),
    /// The system call.
    #[error(
        "cannot switch swapping on: {0}; it needs root, in a container also CAP_SYS_ADMIN and a seccomp profile that allows swapon (Docker's does not)"
    )]
    SwapOn(io::Error),
}

/// The interval at which the kernel checks if a request's ublk server is dead. If all requests of a
/// device were under way, the kernel notices the death only by this check.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Writes a header to a device of `bytes` and has the kernel swap to it, at `priority` (the kernel
/// fills the highest first). Waits for the daemon that serves the device. If the daemon is killed,
/// waits for the next daemon.
pub fn switch_on(device: &Path, bytes: u64, priority: u16) -> Result<(), AttachError> {
    let pages = (bytes / PAGE_BYTES as u64) as u32;
    if let Some(id) = ublk::id(device) {
        // After an error the next server only takes over later.
        let _ = ublk::set_timeout(id, TIMEOUT);
    }
    swap::write_header(device, pages, "uzswap").map_err(AttachError::Header)?;
    swap::on(device, priority).map_err(AttachError::SwapOn)
}
