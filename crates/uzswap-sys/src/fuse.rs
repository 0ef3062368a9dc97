//! Mounting a file system that this process serves. The protocol itself is `uzswap-block`'s.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::io;
use std::path::Path;

const DEVICE: &str = "/dev/fuse";

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, u32)`.
const IOC_CLONE: u32 = 0x8004_e500;

/// Opens a connection that is not mounted yet. Errors: `NotFound` where the kernel has no FUSE or
/// the container no device, `PermissionDenied`.
pub fn open() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// Mounts the connection over `file`, which then is the one regular file of the server. Errors:
/// `PermissionDenied` without CAP_SYS_ADMIN.
pub fn mount_file(connection: &OwnedFd, file: &Path) -> io::Result<()> {
    let fd = connection.as_raw_fd();
    let options = CString::new(format!("fd={fd},rootmode=100600,user_id=0,group_id=0"))?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount("uzswap", file, "fuse", flags, options.as_c_str())?)
}

/// Adds a descriptor from [`open`] to a mounted connection, so that another thread can take
/// requests by it.
pub fn join(other: &OwnedFd, connection: &OwnedFd) -> io::Result<()> {
    let fd = connection.as_raw_fd() as u32;
    // SAFETY: the request reads one u32, which is passed by a pointer that is valid for the call.
    let done = unsafe { libc::ioctl(other.as_raw_fd(), IOC_CLONE as libc::Ioctl, &raw const fd) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Unmounts `path` immediately, even if it is in use or its server is dead.
pub fn unmount(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?)
}

/// True if `path` is a mount point, by `/proc/self/mounts`.
pub fn is_mounted(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1).is_some_and(|at| Path::new(at) == path))
}
