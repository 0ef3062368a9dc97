//! How the kernel's requests come to us and our answers go back.
//!
//! A transport makes block devices over parts of the disk and has threads that serve them. There is
//! one for most kernels, a file on FUSE with loop devices over it, and one for those that have
//! ublk.

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

/// Which transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    /// A file on FUSE, with loop devices over it.
    Fuse,
    /// The kernel's own driver for block devices that are served by a program (Linux 6.1).
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
    /// The means of this machine for it; an error names the missing part.
    pub fn check(self) -> io::Result<()> {
        match self {
            Self::Fuse => uzswap_sys::fuse::open().map(drop).and_then(|()| loopdev::check()),
            Self::Ublk => uzswap_sys::ublk::check(),
        }
    }
}

/// Where a block device over a part of the disk is.
///
/// A process that serves a file never has that file open itself. If it were killed meanwhile it
/// would wait for its own answers, and so would a process that waits for its end. The kernel waits
/// for the answer to an OPEN that a thread of that process has taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offer {
    /// Here.
    Device(PathBuf),
    /// To be made over this file, by [`Device::over`].
    File(PathBuf),
}

/// A block device that its maker has open. It goes when this is dropped, unless the kernel swaps to
/// it by then.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    _loop: Option<LoopDevice>,
}

impl Device {
    /// Makes a device over a part of the offered space, bytes. For a process that serves nothing,
    /// and has no connection of one that does: it waits for answers.
    pub fn over(offer: Offer, part: Range<u64>) -> Result<Self, AttachError> {
        let path = match offer {
            Offer::Device(path) => return Ok(Self { path, _loop: None }),
            Offer::File(path) => path,
        };
        let file = File::options().read(true).write(true).open(path).map_err(AttachError::Loop)?;
        // The loop driver takes the size from the inode, of which the kernel has not asked us yet
        // (seen on 6.12: a device of 0 bytes).
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

/// See the module. Dropped, its threads end, and its devices answer with errors.
pub trait Transport: Send {
    /// Which one it is.
    fn kind(&self) -> TransportKind;

    /// Makes a block device over a part of the disk, bytes, or says over which file somebody else
    /// makes one. A device goes by itself if it is not in use when [`Self::release_unused`] is
    /// called.
    fn attach(&mut self, part: Range<u64>) -> Result<Offer, AttachError>;

    /// All devices that are wanted are in use: nothing is kept for others any more.
    fn release_unused(&mut self);

    /// Each CPU's part of it, threads, to be added to the cache's states.
    fn cpu_state(&self) -> CpuState;
}
