//! Loop devices: a block device over a file.

use linux_raw_sys::loop_device::{
    LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE,
    loop_config,
};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

const CONTROL: &str = "/dev/loop-control";

/// An attached loop device. The device detaches its file by itself when it is no longer open. A
/// swap area on the device keeps the device open.
#[derive(Debug)]
pub struct LoopDevice {
    path: PathBuf,
    _open: File,
}

fn ioctl(file: &File, request: u32, argument: usize) -> io::Result<i32> {
    // SAFETY: the callers below pass the argument of the request: a number, or the address of a
    // structure of the request's type that outlives the call.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, argument) };
    if done >= 0 { Ok(done) } else { Err(io::Error::last_os_error()) }
}

impl LoopDevice {
    /// Attaches a free device to `part` of `file` (in bytes; open for reading and writing), with
    /// direct I/O and blocks of `block_bytes`. Errors: `NotFound` or `PermissionDenied` where there
    /// is no loop control device; the kernel's own errors.
    pub fn attach(file: RawFd, part: Range<u64>, block_bytes: u32) -> io::Result<Self> {
        let control = open(Path::new(CONTROL))?;
        loop {
            let number = ioctl(&control, LOOP_CTL_GET_FREE, 0)?;
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            // SAFETY: the structure is plain numbers, for which zeros are a value.
            let mut config: loop_config = unsafe { std::mem::zeroed() };
            config.fd = file as u32;
            config.block_size = block_bytes;
            config.info.lo_offset = part.start;
            config.info.lo_sizelimit = part.end - part.start;
            config.info.lo_flags = LO_FLAGS_DIRECT_IO as u32 | LO_FLAGS_AUTOCLEAR as u32;
            match ioctl(&device, LOOP_CONFIGURE, &raw const config as usize) {
                Ok(_) => return Ok(Self { path, _open: device }),
                // Another process took the number between the two calls.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Its path, `/dev/loopN`.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).open(path)
}

/// Asks the kernel to detach a device, by its path, when it is no longer open. This is for the
/// device of a dead process.
pub fn detach(path: &Path) -> io::Result<()> {
    ioctl(&open(path)?, LOOP_CLR_FD, 0).map(drop)
}

/// The file of the device, if it is attached.
pub fn backing_file(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let text = std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    Some(PathBuf::from(text.trim_end()))
}

/// Checks that this process may attach a loop device. The error has the reason if not.
pub fn check() -> io::Result<()> {
    open(Path::new(CONTROL)).map(drop)
}
