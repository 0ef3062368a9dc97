//! The folder of the swap device on this machine, with its lock. Only root may read it.
//!
//! The lock belongs to open files, not to process numbers: containers that share /run number their
//! processes separately.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The folder of all our files. A reboot empties this file system, and also undoes the changes to
/// the machine.
pub const FOLDER: &str = "/run/uzswap";

/// Modes of the folder and of its content: only root may read, lock or connect.
const OWNERS_FOLDER: u32 = 0o700;
const OWNERS_FILE: u32 = 0o600;

const LOCK: &str = "lock";
const MOUNT: &str = "mnt";
const DISK: &str = "disk";
const SOCKET: &str = "socket";

/// The mount point of the control files.
pub fn mount() -> PathBuf {
    Path::new(FOLDER).join(MOUNT)
}

/// The socket of the keeper.
pub fn socket() -> PathBuf {
    Path::new(FOLDER).join(SOCKET)
}

/// The file that is served, if the transport needs one. It is not among the control files, which
/// disappear when the daemon is killed.
pub fn disk() -> PathBuf {
    Path::new(FOLDER).join(DISK)
}

/// Makes the folder that the daemon mounts on.
pub fn make_mount_points() -> io::Result<()> {
    make_folder(&mount())?;
    write(&disk(), b"")
}

/// Makes a folder that only its owner may read, whatever the umask. An existing folder gets that
/// mode. Fails if it is another user's, or not a folder.
fn make_folder(path: &Path) -> io::Result<()> {
    match fs::DirBuilder::new().mode(OWNERS_FOLDER).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    check_owner(&folder.metadata()?, path)?;
    folder.set_permissions(fs::Permissions::from_mode(OWNERS_FOLDER))
}

/// Writes a file that its owner alone may read.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = own_file(path)?;
    file.set_len(0)?;
    file.write_all(bytes)
}

/// Removes a folder. Its lock goes last: the next holder may make the file anew and use the folder,
/// which then stays.
pub fn remove(folder: &Path) -> io::Result<()> {
    let lock = folder.join(LOCK);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.path() {
            path if path == lock => {}
            path if entry.file_type()?.is_dir() => fs::remove_dir_all(path)?,
            path => fs::remove_file(path)?,
        }
    }
    let _ = fs::remove_file(lock);
    fs::remove_dir(folder)
}

/// Opens a file for writing that only its owner may open, whatever the umask. An existing file gets
/// that mode. Fails if the file is another user's.
fn own_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(OWNERS_FILE);
    let file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
    check_owner(&file.metadata()?, path)?;
    file.set_permissions(fs::Permissions::from_mode(OWNERS_FILE))?;
    Ok(file)
}

/// Refuses a file of another user: root obeys its content.
pub fn check_owner(metadata: &fs::Metadata, path: &Path) -> io::Result<()> {
    match metadata.uid() == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{} belongs to another user", path.display()))),
    }
}

/// The lock of the process that is responsible for the list of changes.
#[derive(Debug)]
pub struct Lock(pub File);

impl Lock {
    /// Takes the lock; `None` if another process has it. Makes the folder.
    pub fn take() -> io::Result<Option<Self>> {
        loop {
            make_folder(Path::new(FOLDER))?;
            let path = Path::new(FOLDER).join(LOCK);
            // A user who could open the file could lock it, and prevent all cleaning up.
            let file = match own_file(&path) {
                // The last holder has just removed the folder.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other?,
            };
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                other => other?,
            }
            // The last holder may have removed the file on leaving. The path then names another
            // file.
            let both = path.metadata().ok().zip(file.metadata().ok());
            if both.is_some_and(|(named, held)| named.ino() == held.ino()) {
                return Ok(Some(Self(file)));
            }
        }
    }

    /// True if a process has the lock.
    pub fn is_taken() -> bool {
        let Ok(file) = File::open(Path::new(FOLDER).join(LOCK)) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_with_all_its_files_and_its_lock() {
        let outer = tempfile::tempdir().unwrap();
        let folder = outer.path().join("uzswap");
        make_folder(&folder).unwrap();
        make_folder(&folder.join(MOUNT)).unwrap();
        [LOCK, DISK].iter().for_each(|name| write(&folder.join(name), b"text").unwrap());
        remove(&folder).unwrap();
        assert!(!folder.exists() && remove(&folder).is_err());
    }

    /// A lock file that others may open can be locked by others.
    #[test]
    fn folders_and_files_are_their_owner_s_alone_also_where_they_were_there() {
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        let (inner, file) = (folder.path().join("uzswap"), folder.path().join("uzswap/lock"));
        for loosen in [false, true] {
            make_folder(&inner).unwrap();
            own_file(&file).unwrap();
            assert_eq!((mode(&inner), mode(&file)), (OWNERS_FOLDER, OWNERS_FILE), "{loosen}");
            fs::set_permissions(&inner, fs::Permissions::from_mode(0o777)).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        }
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(own_file(&link).is_err() && make_folder(&link).is_err());
        write(&file, b"new").unwrap();
        write(&file, b"").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"", "nothing of before is left");
    }
}
