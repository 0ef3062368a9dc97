//! The ways in which the kernel's requests reach us, and our answers reach the kernel.
//!
//! A transport makes block devices over parts of the disk, and has threads that serve them. One is
//! for most kernels: a file on FUSE with loop devices over it. The other is for kernels with ublk.

use crate::device::AttachError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use uzswap_engine::{CpuState, PAGE_BYTES};
use uzswap_sys::loopdev::{self, LoopDevice};

/// The kinds of transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// A file on FUSE, with loop devices over it.
    Fuse,
    /// The kernel's driver for block devices that a program serves (Linux 6.1).
    Ublk,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fuse => "fuse",
            Self::Ublk => "ublk",
        })
    }
}

impl FromStr for TransportKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "fuse" => Ok(Self::Fuse),
            "ublk" => Ok(Self::Ublk),
            _ => Err(format!("'{text}' is no transport; use fuse or ublk")),
        }
    }
}

impl TransportKind {
    /// Checks if this machine has all that the transport needs. An error names the missing part.
    pub fn check(self) -> io::Result<()> {
        match self {
            Self::Fuse => uzswap_sys::fuse::open().map(drop).and_then(|()| loopdev::check()),
            Self::Ublk => uzswap_sys::ublk::check(),
        }
    }
}

/// The block device over a part of the disk, or the file over which another process makes it.
///
/// A process that serves a file never opens that file itself. The kernel waits for the answer to an
/// OPEN even if the thread that took the OPEN was killed. So the killed process would wait for its
/// own answer, and any process that waits for its end would wait, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offer {
    /// The device.
    Device(PathBuf),
    /// The file over which [`Device::over`] makes a device.
    File(PathBuf),
}

/// A block device that its maker has open. Dropping this value removes the device, unless the
/// kernel swaps to it.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    _loop: Option<LoopDevice>,
}

impl Device {
    /// Makes a device over a part of the offered space. `part` is in bytes. This waits for answers,
    /// so the caller must serve nothing, and have no connection of a server.
    pub fn over(offer: Offer, part: Range<u64>) -> Result<Self, AttachError> {
        let path = match offer {
            Offer::Device(path) => return Ok(Self { path, _loop: None }),
            Offer::File(path) => path,
        };
        let file = File::options().read(true).write(true).open(path).map_err(AttachError::Loop)?;
        // The loop driver takes the size from the inode, and the kernel has not asked us for that
        // yet (seen on 6.12: a device of 0 bytes).
        file.metadata().map_err(AttachError::Loop)?;
        let device = LoopDevice::attach(file.as_raw_fd(), part, PAGE_BYTES as u32);
        let device = device.map_err(AttachError::Loop)?;
        Ok(Self { path: device.path().to_owned(), _loop: Some(device) })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A transport. When one is dropped, its threads end, and its devices answer with errors.
pub trait Transport: Send {
    /// Its kind.
    fn kind(&self) -> TransportKind;

    /// Makes a block device over a part of the disk, in bytes, or names the file over which another
    /// process is to make the device. A later [`Self::release_unused`] removes the device if it is
    /// still unused.
    fn attach(&mut self, part: Range<u64>) -> Result<Offer, AttachError>;

    /// Removes unused devices. All devices that are wanted must be in use before this call.
    fn release_unused(&mut self);

    /// The threads of each CPU, to be added to the cache's states.
    fn cpu_state(&self) -> CpuState;
}
