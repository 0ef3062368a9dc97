//! The backing of a pager whose process may be forked: a file without a name.
//!
//! A child goes on with its parent's index, which says where on the backing pages are, and writes
//! there itself. So it needs a file of its own with the same content. The parent makes it before
//! the fork ([`Unnamed::copy`]), and in the child it takes the place of the parent's
//! ([`Unnamed::go_on_with`]). It takes as long as copying the content.
//!
//! Writes are not made by io_uring: parent and child would have one ring in common.

use rustix::fs::{self, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uzswap_engine::backing::{Backing, Completion, FileBacking, Write};
use uzswap_sys::process;

/// See the module. Clones are the same file.
#[derive(Clone)]
pub(crate) struct Unnamed {
    inner: Arc<FileBacking>,
    folder: Arc<PathBuf>,
}

impl Unnamed {
    /// A file in a folder that takes space as it is written, at most `bytes`.
    pub(crate) fn create(folder: &Path, bytes: u64) -> io::Result<Self> {
        let file = open(folder)?;
        file.set_len(bytes)?;
        let inner = FileBacking::new(file, bytes)?.without_io_uring().with_discard();
        Ok(Self { inner: Arc::new(inner), folder: Arc::new(folder.into()) })
    }

    /// The descriptors that must stay open.
    pub(crate) fn descriptor(&self) -> i32 {
        self.inner.file().as_raw_fd()
    }

    /// Another file with the same content. Nobody writes meanwhile.
    pub(crate) fn copy(&self) -> io::Result<OwnedFd> {
        let (from, to) = (self.inner.file(), open(&self.folder)?);
        let bytes = self.inner.bytes();
        to.set_len(bytes)?;
        let mut at = 0;
        while let Some(start) = seek(from, SeekFrom::Data(at))? {
            at = seek(from, SeekFrom::Hole(start))?.unwrap_or(bytes);
            copy_part(from, &to, start, at)?;
        }
        let flags = fs::fcntl_getfl(&to)?;
        fs::fcntl_setfl(&to, flags | OFlags::DIRECT)?;
        Ok(to.into())
    }

    /// In a child: that copy is its file from now on.
    pub(crate) fn go_on_with(&self, copy: &OwnedFd) -> io::Result<()> {
        process::take_place(copy, self.inner.file())
    }
}

fn open(folder: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(process::out_of_the_way(file).into())
}

/// `None`: there is nothing more.
fn seek(file: &File, to: SeekFrom) -> io::Result<Option<u64>> {
    match fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn copy_part(from: &File, to: &File, start: u64, end: u64) -> io::Result<()> {
    let (mut read, mut written) = (start, start);
    while read < end {
        let left = (end - read) as usize;
        if fs::copy_file_range(from, Some(&mut read), to, Some(&mut written), left)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

impl Backing for Unnamed {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn block_bytes(&self) -> usize {
        self.inner.block_bytes()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.inner.read(offset, out)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.inner.write(offset, bytes)
    }

    fn submit(&self, write: Write) {
        self.inner.submit(write);
    }

    fn discard(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.inner.discard(offset, bytes)
    }

    fn complete(&self, wait: bool) -> Option<Completion> {
        self.inner.complete(wait)
    }
}
