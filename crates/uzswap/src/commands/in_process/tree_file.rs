//! The file that the processes of a run share: where a run makes it, where others find it, and when
//! it is stale.

use super::left_alone::has_mapped;
use std::env;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use uzswap_region::Means;
use uzswap_sys::{pid_namespace, process};
use uzswap_tree::{Table, Tree};

/// The folders for shared files, in order of preference. Some containers have no /dev/shm. After
/// `su`, XDG_RUNTIME_DIR may name another user's folder.
fn folders() -> Vec<PathBuf> {
    let own = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    own.into_iter().chain(["/dev/shm", "/tmp"].map(PathBuf::from)).collect()
}

/// The prefix of the files' names; the number of the run follows.
const PREFIX: &str = "uzswap-";

/// The files, with the numbers of their runs.
fn files() -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = folders().into_iter().filter_map(|folder| fs::read_dir(folder).ok());
    entries.flatten().flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix(PREFIX)?.parse().ok()?;
        Some((number, entry.path()))
    })
}

/// The runs whose files this user may read, with their numbers. A killed run counts while one of
/// its processes lives.
pub fn running() -> Vec<(u32, Tree, PathBuf)> {
    let all = files().filter_map(|(run, path)| Some((run, Tree::look(&path).ok()?, path)));
    all.filter(|(_, tree, path)| is_in_use(tree.table()) || is_locked(path)).collect()
}

/// True if the run or one of its processes lives. A zombie counts as ended.
fn is_in_use(table: &Table) -> bool {
    table.is_in_use(|process| process::has_ended(process as i32))
}

/// True for the file of a run in another PID namespace. The numbers of its processes have no
/// meaning here, but its lock is visible.
fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| file.try_lock().is_err())
}

/// Removes the files of killed runs of which no process is left.
fn remove_stale() {
    for (_, path) in files() {
        let is_used = match Tree::look(&path) {
            Ok(tree) => is_in_use(tree.table()),
            Err(_) => !is_abandoned(&path),
        };
        if !is_used && !is_locked(&path) {
            // An error means that the file is another user's, or another process has removed it.
            let _ = fs::remove_file(path);
        }
    }
}

/// A run that is not killed completes its file within moments.
const MOMENTS: Duration = Duration::from_secs(60);

/// True if no process needs a file that this version cannot read. Either a run was killed before it
/// wrote to the file, or the file is of another version and no process of its user has it mapped.
fn is_abandoned(path: &Path) -> bool {
    let Ok(file) = fs::symlink_metadata(path) else { return false };
    let age = file.modified().ok().and_then(|modified| modified.elapsed().ok());
    let is_old = file.is_file() && age.is_some_and(|age| age > MOMENTS);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_unwritten = || fs::read(path).is_ok_and(|bytes| bytes.iter().all(|byte| *byte == 0));
    let is_mapped = || processes_of(file.uid()).any(|process| has_mapped(process, &name));
    is_old && (is_unwritten() || !is_mapped())
}

/// The processes of a user.
fn processes_of(user: u32) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        (entry.metadata().ok()?.uid() == user).then_some(number)
    })
}

/// The file that the processes share; removed at the end.
pub struct TreeFile {
    pub path: PathBuf,
    /// Locked while the run lives, for processes that do not see the run's processes.
    _lock: File,
    pub tree: Tree,
    pub means: Means,
}

impl TreeFile {
    /// Fails if no folder takes a file. The error has each folder's reason.
    pub fn create(memory: u64, means: Means) -> Result<Self, String> {
        remove_stale();
        let mut reasons = Vec::new();
        for folder in folders() {
            let path = folder.join(format!("{PREFIX}{}", std::process::id()));
            let create = || {
                let tree = Tree::create(&path, memory, pid_namespace::own().unwrap_or(0))?;
                let lock = File::open(&path)?;
                lock.lock_shared()?;
                Ok::<_, io::Error>((tree, lock))
            };
            match create() {
                Ok((tree, lock)) => return Ok(Self { path, _lock: lock, tree, means }),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            }
        }
        Err(format!(
            "no folder takes the file that the processes share: {}; make one of them writable",
            reasons.join(", ")
        ))
    }
}

impl Drop for TreeFile {
    fn drop(&mut self) {
        // An error means that the file was removed already.
        let _ = fs::remove_file(&self.path);
    }
}
