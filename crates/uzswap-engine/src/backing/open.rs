//! Opens the backing: `none`, or a path with a size.

use super::{Backing, FileBacking, NoBacking};
use crate::ids::Place;
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use std::fmt;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The backing as the command line gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackingSpec {
    /// Keep everything in memory.
    None,
    /// A file or block device.
    Path {
        /// The path.
        path: PathBuf,
        /// Size in bytes; `None` for all of a block device or of an existing file.
        bytes: Option<u64>,
    },
    /// A file without a name in a folder, removed with the process.
    Unnamed {
        /// The folder.
        folder: PathBuf,
        /// Bytes.
        bytes: u64,
    },
}

/// The backing cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("backing {path}: {reason}")]
pub struct BackingError {
    path: String,
    reason: Reason,
}

#[derive(Debug, thiserror::Error)]
enum Reason {
    #[error("it is a folder; name a file in it, as in {0}/swap.img:4G")]
    Folder(String),
    #[error("it has {0} bytes, and at least 2 MiB are needed; give a size, as in :4G")]
    Small(u64),
    #[error("it has {0} bytes, and at most 16 TiB can be used; give a size, as in :16T")]
    Large(u64),
    #[error("it has {has} bytes and not {wanted}; give a smaller size, or none for all of it")]
    Beyond { has: u64, wanted: u64 },
    #[error("it is a symbolic link; name the file itself")]
    Link,
    #[error("it belongs to another user; name a file of your own, or one that is not there")]
    Foreign,
    #[error("other users may write to it; take that away (chmod go-w), or name another file")]
    Shared,
    #[error("it is neither a file nor a block device; name one")]
    Kind,
    #[error("it is in use by another process; choose another or end that process")]
    InUse,
    #[error(
        "it holds something else than swapped pages; remove it, or name a file that is not there"
    )]
    Occupied,
    #[error("a new file needs a size; write it behind the path, as in :4G")]
    NoSize,
    #[error("its file system does no direct I/O; choose a folder on a disk, such as /var/tmp")]
    NoDirectIo,
    #[error("no room for {0} bytes on its file system; make it smaller or free some")]
    NoRoom(u64),
    #[error("{0}; choose one that can be written")]
    Io(io::Error),
}

/// The least useful size.
const BYTES_MIN: u64 = 2 << 20;

/// The most that places can address.
pub(crate) const BYTES_MAX: u64 = Place::UNIT << Place::BITS;

const _: () = assert!(BYTES_MAX == 16 << 40, "as messages say");

/// The start of the last block of a file that has been a backing, so it may be used again.
const MARK: &[u8; 16] = b"uzswap backing 1";

/// Bytes at the end that are reserved for the mark.
const MARK_BLOCK: u64 = 4096;

/// An opened backing, as another process needs it to take over.
#[derive(Debug)]
pub struct BackingFile {
    /// The file or device.
    pub file: File,
    /// Bytes that are used.
    pub bytes: u64,
    /// True if the engine discards the device's unused space.
    pub discards: bool,
}

impl BackingFile {
    /// The backing on a file, or without one.
    pub fn backing(opened: Option<Self>) -> io::Result<Box<dyn Backing>> {
        let Some(Self { file, bytes, discards }) = opened else { return Ok(Box::new(NoBacking)) };
        let backing = FileBacking::new(file, bytes)?;
        Ok(Box::new(if discards { backing.with_discard() } else { backing }))
    }
}

/// Opens a backing exclusively. A new file is unlinked, so that the process never leaves it behind.
pub fn open_backing(spec: &BackingSpec) -> Result<Box<dyn Backing>, BackingError> {
    BackingFile::backing(open_backing_file(spec)?)
        .map_err(|error| BackingError { path: spec.to_string(), reason: Reason::of_direct(error) })
}

/// Opens the file of a backing; `None` for none.
pub fn open_backing_file(spec: &BackingSpec) -> Result<Option<BackingFile>, BackingError> {
    let (path, result) = match spec {
        BackingSpec::None => return Ok(None),
        BackingSpec::Path { path, bytes } => (path, open_path(path, *bytes)),
        BackingSpec::Unnamed { folder, bytes } => (folder, open_unnamed(folder, *bytes)),
    };
    let file = result.map_err(|reason| BackingError { path: path.display().to_string(), reason });
    Ok(Some(file?))
}

impl Reason {
    fn of_direct(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::Unsupported => Self::NoDirectIo,
            _ => Self::Io(error),
        }
    }
}

fn open_unnamed(folder: &Path, bytes: u64) -> Result<BackingFile, Reason> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR);
    let file = File::from(file.map_err(|error| Reason::Io(error.into()))?);
    reserve(&file, bytes)?;
    direct(file, bytes)
}

fn open_path(path: &Path, bytes: Option<u64>) -> Result<BackingFile, Reason> {
    let metadata = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let bytes = bytes.ok_or(Reason::NoSize)?;
            return create(path, bytes);
        }
        other => other.map_err(Reason::Io)?,
    };
    let is_link = metadata.is_symlink();
    let metadata = if is_link { target(path, &metadata)? } else { metadata };
    if metadata.is_dir() {
        return Err(Reason::Folder(path.display().to_string()));
    }
    let is_device = metadata.file_type().is_block_device();
    // For a block device, O_EXCL fails when it is mounted or otherwise in use.
    let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
    let follow = if is_link { OFlags::empty() } else { OFlags::NOFOLLOW };
    // Opening a pipe would wait for another process.
    let flags = (exclusive | follow | OFlags::NONBLOCK).bits() as i32;
    let file = File::options().read(true).write(true).custom_flags(flags).open(path);
    let mut file = file.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::BUSY.raw_os_error() => Reason::InUse,
        Some(code) if code == rustix::io::Errno::LOOP.raw_os_error() => Reason::Link,
        _ => Reason::Io(error),
    })?;
    check_owner(&file, is_device)?;
    lock(&file)?;
    let size = io::Seek::seek(&mut file, io::SeekFrom::End(0)).map_err(Reason::Io)?;
    let bytes = bytes.unwrap_or(size);
    if is_device {
        if bytes > size {
            return Err(Reason::Beyond { has: size, wanted: bytes });
        }
        // A disk may reuse unused blocks. A file keeps its blocks: they were reserved so that a
        // write cannot fail for lack of space.
        return direct(file, bytes).map(|file| BackingFile { discards: true, ..file });
    }
    check_mark(&file, size)?;
    reserve(&file, bytes)?;
    let end = file.metadata().map_err(Reason::Io)?.len() - MARK_BLOCK;
    file.write_all_at(MARK, end).and_then(|()| file.sync_all()).map_err(Reason::Io)?;
    direct(file, bytes.min(end))
}

/// Follows a symbolic link, but only to a block device, as in /dev/disk and /dev/mapper, and only
/// if root or this user made the link.
fn target(path: &Path, link: &Metadata) -> Result<Metadata, Reason> {
    let is_trusted = [0, rustix::process::geteuid().as_raw()].contains(&link.uid());
    let Ok(target) = path.metadata() else { return Err(Reason::Link) };
    if target.is_dir() || is_trusted && target.file_type().is_block_device() {
        return Ok(target);
    }
    Err(Reason::Link)
}

/// Checks the opened file: since the check of its path, another file may have taken its place. A
/// file must belong to this user, so that no other user has it open or writes to it.
fn check_owner(file: &File, is_device: bool) -> Result<(), Reason> {
    let metadata = file.metadata().map_err(Reason::Io)?;
    if metadata.file_type().is_block_device() == is_device && is_device {
        return Ok(());
    }
    match () {
        () if is_device || !metadata.is_file() => Err(Reason::Kind),
        () if metadata.uid() != rustix::process::geteuid().as_raw() => Err(Reason::Foreign),
        () if metadata.mode() & 0o022 != 0 => Err(Reason::Shared),
        () => Ok(()),
    }
}

/// Makes a file and unlinks it.
fn create(path: &Path, bytes: u64) -> Result<BackingFile, Reason> {
    let mut options = File::options();
    options.read(true).write(true).create_new(true).mode(0o600);
    options.custom_flags(OFlags::NOFOLLOW.bits() as i32);
    let file = options.open(path).map_err(Reason::Io)?;
    std::fs::remove_file(path).map_err(Reason::Io)?;
    reserve(&file, bytes)?;
    direct(file, bytes)
}

fn lock(file: &File) -> Result<(), Reason> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Reason::InUse),
        other => other.map_err(|error| Reason::Io(error.into())),
    }
}

/// Accepts an existing file only if it is empty or was a backing: any other file may be a user's
/// data.
fn check_mark(file: &File, size: u64) -> Result<(), Reason> {
    let mut start = [0; MARK.len()];
    if size == 0 {
        return Ok(());
    }
    match file.read_exact_at(&mut start, size.saturating_sub(MARK_BLOCK)) {
        Ok(()) if &start == MARK => Ok(()),
        _ => Err(Reason::Occupied),
    }
}

/// Reserves the space now, so that a full file system is found before pages are on it.
fn reserve(file: &File, bytes: u64) -> Result<(), Reason> {
    check_size(bytes)?;
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NOSPC | rustix::io::Errno::FBIG) => Err(Reason::NoRoom(bytes)),
        // A file system that cannot reserve may run out of space later, and writeback survives
        // that.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(bytes).map_err(Reason::Io),
        Err(error) => Err(Reason::Io(error.into())),
    }
}

fn check_size(bytes: u64) -> Result<(), Reason> {
    match bytes {
        ..BYTES_MIN => Err(Reason::Small(bytes)),
        BYTES_MIN..=BYTES_MAX => Ok(()),
        _ => Err(Reason::Large(bytes)),
    }
}

/// The opened file, if it supports direct I/O.
fn direct(file: File, bytes: u64) -> Result<BackingFile, Reason> {
    check_size(bytes)?;
    let tried = file.try_clone().and_then(|file| FileBacking::new(file, bytes));
    tried.map(|_| BackingFile { file, bytes, discards: false }).map_err(Reason::of_direct)
}

impl fmt::Display for BackingSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Path { path, .. } => write!(f, "{}", path.display()),
            Self::Unnamed { folder, bytes } => {
                write!(f, "an unnamed file of {} MiB in {}", bytes >> 20, folder.display())
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/var/tmp").unwrap()
    }

    fn open(path: &Path, bytes: Option<u64>) -> Result<Box<dyn Backing>, String> {
        let spec = BackingSpec::Path { path: path.into(), bytes };
        open_backing(&spec).map_err(|error| error.to_string())
    }

    #[test]
    fn a_new_file_leaves_no_name_behind() {
        let folder = folder();
        let path = folder.path().join("swap.img");
        let backing = open(&path, Some(4 << 20)).unwrap();
        assert_eq!(backing.bytes(), 4 << 20);
        assert!(!path.exists());
    }

    #[test]
    fn a_backing_that_cannot_be_used_is_refused_and_untouched() {
        let folder = folder();
        let path = folder.path().join("precious");
        std::fs::write(&path, vec![7; 8 << 20]).unwrap();
        let error = |path: &Path, bytes| open(path, bytes).err().unwrap();
        assert!(error(&path, None).contains("holds something else"));
        assert_eq!(std::fs::read(&path).unwrap(), vec![7; 8 << 20]);
        assert!(error(folder.path(), Some(4 << 20)).contains("name a file in it"));
        assert!(error(&folder.path().join("new"), None).contains("needs a size"));
        assert!(error(&folder.path().join("new"), Some(4096)).contains("at least 2 MiB"));
        assert!(error(&folder.path().join("no/such"), Some(4 << 20)).contains("No such file"));
        assert!(error(&folder.path().join("new"), Some(16 << 40)).contains("no room for"));
        assert!(error(&folder.path().join("new"), Some(1 << 50)).contains("at most 16 TiB"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
    }

    #[test]
    fn a_backing_that_other_users_could_have_made_or_could_write_is_refused() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let folder = folder();
        let (path, link) = (folder.path().join("swap.img"), folder.path().join("link"));
        let error = |path: &Path| open(path, Some(4 << 20)).err().unwrap();
        symlink(&path, &link).unwrap();
        assert!(error(&link).contains("symbolic link"));
        assert!(!path.exists(), "a link is not followed to make a file");
        File::create(&path).unwrap();
        assert!(error(&link).contains("symbolic link"));
        for mode in [0o620, 0o602, 0o666] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            assert!(error(&path).contains("chmod go-w"), "{mode:o}");
        }
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
        // Only root can give a file away.
        if chown(&path, Some(65534), None).is_ok() {
            assert!(error(&path).contains("another user"));
            chown(&path, Some(0), None).unwrap();
        }
        let pipe = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::RUSR | Mode::WUSR).unwrap();
        assert!(error(&pipe).contains("neither a file"));
        assert_eq!(path.metadata().unwrap().len(), 0, "untouched");
        drop(open(&path, Some(4 << 20)).unwrap());
        let twice = create(&path, 4 << 20).err().unwrap().to_string();
        assert!(twice.contains("exists"), "{twice}");
    }

    #[test]
    fn a_file_that_was_a_backing_is_used_again_by_one_at_a_time() {
        let folder = folder();
        let path = folder.path().join("swap.img");
        File::create(&path).unwrap();
        let first = open(&path, Some(4 << 20)).unwrap();
        assert!(open(&path, None).err().unwrap().contains("in use"));
        drop(first);
        assert_eq!(open(&path, None).unwrap().bytes(), (4 << 20) - MARK_BLOCK);
    }
}
