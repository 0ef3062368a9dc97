//! The control files: a folder with one value in each file, like sysfs.
//!
//! ```text
//! parameters/…    attributes: read and written while running
//! stats/…         statistics, and the table of size classes
//! ```

mod files;

use crate::swapped::Swapped;
use crate::team;
use crate::traffic::Traffic;
use files::{FIGURES, Files};
use fuser::{
    BackgroundSession, Config, Errno, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use uzswap_engine::{ATTRIBUTES, Cache, STATISTICS, SectionState, StateDoc};

/// Folder of attributes.
pub const PARAMETERS: &str = "parameters";
/// Folder of statistics.
pub const STATISTICS_FOLDER: &str = "stats";

/// The table of size classes, and the message after writeback stopped.
const TABLE: &str = "classes";
const FAILURE: &str = "writeback_error";

/// The durations of reads. Each line has a time in ns and the number of reads that took at most
/// that long, and longer than the time of the line above. The line `sum` has the time of all reads.
pub const FAULT_TIMES: &str = "fault_times";

/// The times of reads that the store in another machine's memory answered; empty without a store.
pub const REMOTE_TIMES: &str = "remote_read_times";

/// The pool's sections: one line for adjacent sections in the same state.
pub const SECTIONS: &str = "sections";

/// The reason why the last change of a section failed; empty if it succeeded.
pub const MEMORY_FAILURE: &str = "memory_error";

/// All statistics in one file, for programs that read them often: a line each with name and value.
/// The lines of both files of times follow, each after its file's name.
pub const ALL: &str = "all";

/// Name and meaning of every statistic, the engine's and the server's.
pub fn statistics() -> impl Iterator<Item = (&'static str, &'static str)> {
    STATISTICS
        .iter()
        .map(|statistic| (statistic.name, statistic.doc))
        .chain(FIGURES.iter().map(|figure| (figure.name, figure.doc)))
}

/// True if a statistic counts events, false if it is a present value.
pub fn is_counted(name: &str) -> bool {
    const SO_NOW: [&str; 13] = [
        "backing_sealed",
        "stored_pages",
        "same_filled_pages",
        "pool_idle_pages",
        "stored_incompressible_pages",
        "backing_pages",
        "shared_pages",
        "recompressed_pages",
        "compressed_bytes",
        "dictionaries",
        "writeback_stopped",
        "remote_up",
        "dead_pages",
    ];
    !(SO_NOW.contains(&name)
        || is_quantile(name)
        || name.starts_with("pool_pages")
        || name.ends_with("_size")
        || name.ends_with("_limit"))
}

/// True if a statistic is a quantile of times. Quantiles of several machines do not add up.
pub fn is_quantile(name: &str) -> bool {
    name.starts_with("fault_ns") || name.starts_with("remote_read_ns")
}

/// An extra attribute: true while writeback runs. The engine clears it when a write fails.
const WRITEBACK: &str = "writeback_enabled";

/// An extra attribute: the state of each CPU.
const CPUS: &str = "cpus";

/// An extra attribute: the state of each section of the pool.
pub const MEMORY: &str = "memory";

/// Name, meaning and accepted values of every attribute.
pub fn attributes() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
    let cpus = (
        CPUS,
        "For each possible CPU, the last of its states that is up: contexts of codecs, slots of the \
         backing, a buffer, threads. CPUs come and go with those that the process may use; a CPU \
         that was set by hand stays until these change.",
        "a CPU's number and a state: 1 offline",
    );
    let memory = (
        MEMORY,
        "The state of each section of the pool, 2 MiB of memory: absent until it is needed, online, \
         or offline until it is brought online again. To take a section offline, its pages move to \
         other sections or to the backing. A section that cannot be emptied stays online, and \
         stats/memory_error has the reason. A node that is offline has none of the pool.",
        "a section or a node, and a state: 4 offline, 4 online, node1 offline",
    );
    let writeback = (
        WRITEBACK,
        "Y: pages are written back. It goes off by itself when a write to the backing fails; Y \
         tries again.",
        "Y",
    );
    ATTRIBUTES.iter().map(|a| (a.name, a.doc, a.accepts)).chain([cpus, memory, writeback])
}

/// The states of a CPU in a daemon, in order: name, the CPU's resource, and its fate when the CPU
/// goes.
pub fn cpu_states() -> impl Iterator<Item = (&'static str, StateDoc)> {
    uzswap_engine::cpu_states().into_iter().chain([team::STATE])
}

/// Runs of alike items, with the numbers of their first and last items.
fn runs<T>(all: &[T], is_alike: impl Fn(&T, &T) -> bool) -> impl Iterator<Item = (String, &[T])> {
    all.chunk_by(is_alike).scan(0, |first, run| {
        let (from, last) = (*first, *first + run.len() - 1);
        *first += run.len();
        Some((if from == last { from.to_string() } else { format!("{from}-{last}") }, run))
    })
}

/// Adjacent CPUs in the same state as one entry: `0-2 online, 3 offline`.
fn show_states(states: &[&str]) -> String {
    let runs = runs(states, |state, next| state == next);
    runs.map(|(numbers, run)| format!("{numbers} {}", run[0])).collect::<Vec<_>>().join(", ")
}

/// The states of a section: name, its contents, and the next states with their conditions.
pub fn section_states() -> impl Iterator<Item = (&'static str, &'static str, String)> {
    SectionState::ALL.into_iter().map(|state| {
        let next = state.next().iter().map(|(next, when)| format!("`{}`: {when}", next.name()));
        (state.name(), state.doc(), next.collect::<Vec<_>>().join("; "))
    })
}

/// The kind of a file or folder. Its index is the number of the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Inode {
    Root,
    Parameters,
    Statistics,
    Parameter(&'static str),
    Statistic(&'static str),
}

const PARAMETER_BASE: u64 = 0x100;
const STATISTIC_BASE: u64 = 0x200;

impl Inode {
    fn parameters() -> impl Iterator<Item = &'static str> {
        attributes().map(|(name, ..)| name)
    }

    fn statistics() -> impl Iterator<Item = &'static str> {
        statistics().map(|(name, _)| name).chain([
            TABLE,
            FAILURE,
            FAULT_TIMES,
            REMOTE_TIMES,
            ALL,
            SECTIONS,
            MEMORY_FAILURE,
        ])
    }

    fn from_inode(inode: u64) -> Option<Self> {
        Some(match inode {
            1 => Self::Root,
            3 => Self::Parameters,
            4 => Self::Statistics,
            STATISTIC_BASE.. => {
                Self::Statistic(Self::statistics().nth((inode - STATISTIC_BASE) as usize)?)
            }
            PARAMETER_BASE.. => {
                Self::Parameter(Self::parameters().nth((inode - PARAMETER_BASE) as usize)?)
            }
            _ => return None,
        })
    }

    fn inode(self) -> u64 {
        match self {
            Self::Root => 1,
            Self::Parameters => 3,
            Self::Statistics => 4,
            Self::Parameter(name) => PARAMETER_BASE + place(Self::parameters(), name),
            Self::Statistic(name) => STATISTIC_BASE + place(Self::statistics(), name),
        }
    }

    fn children(self) -> Vec<(&'static str, Self)> {
        match self {
            Self::Root => {
                vec![(PARAMETERS, Self::Parameters), (STATISTICS_FOLDER, Self::Statistics)]
            }
            Self::Parameters => Self::parameters().map(|n| (n, Self::Parameter(n))).collect(),
            Self::Statistics => Self::statistics().map(|n| (n, Self::Statistic(n))).collect(),
            Self::Parameter(_) | Self::Statistic(_) => Vec::new(),
        }
    }

    fn is_folder(self) -> bool {
        matches!(self, Self::Root | Self::Parameters | Self::Statistics)
    }
}

fn place(mut names: impl Iterator<Item = &'static str>, wanted: &str) -> u64 {
    names.position(|name| name == wanted).unwrap_or(0) as u64
}

/// The mounted folder. It is unmounted when this value is dropped.
pub struct Control {
    session: Option<BackgroundSession>,
}

impl Control {
    /// Mounts the control files of a cache over the folder at `path`. A thread of its own serves
    /// them, apart from the device's requests.
    pub fn mount(
        cache: Arc<Cache>,
        traffic: Arc<Traffic>,
        swapped: Arc<Swapped>,
        path: &Path,
    ) -> io::Result<Self> {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("uzswap".into()),
            MountOption::DefaultPermissions,
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
        ];
        let files = Files { cache, traffic, swapped, memory_failure: Mutex::default() };
        let files = Arc::new(files);
        let (changes, asked) = channel::<Change>();
        let changed = files.clone();
        let change = move || asked.into_iter().for_each(|change| change.make(&changed));
        std::thread::Builder::new().name("uzswap-set".into()).spawn(change)?;
        let session = fuser::spawn_mount(Served { files, changes }, path, &config)?;
        Ok(Self { session: Some(session) })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            // An error means that the folder is not mounted any more.
            let _ = session.umount_and_join();
        }
    }
}

/// The kernel may cache names for ever, since no file is made or removed.
const FOREVER: Duration = Duration::from_secs(86_400);

/// A write to a control file that waits to be done. Doing it may take long: an offline section is
/// emptied first.
struct Change {
    name: &'static str,
    value: String,
    bytes: u32,
    reply: ReplyWrite,
}

impl Change {
    fn make(self, files: &Files) {
        match files.set(self.name, &self.value) {
            Ok(()) => self.reply.written(self.bytes),
            Err(errno) => self.reply.error(errno),
        }
    }
}

/// Answers the kernel. This thread answers reads immediately, and another thread makes the changes
/// one after another. So a read never waits for a change.
struct Served {
    files: Arc<Files>,
    changes: Sender<Change>,
}

impl Filesystem for Served {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let children = Inode::from_inode(parent.0).map(Inode::children).unwrap_or_default();
        match children.into_iter().find(|(child, _)| OsStr::new(child) == name) {
            Some((_, node)) => reply.entry(&FOREVER, &self.files.attributes(node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match Inode::from_inode(ino.0) {
            Some(node) => reply.attr(&FOREVER, &self.files.attributes(node)),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// A shell truncates a file before it writes. Truncating changes nothing.
    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if mode.is_some() || uid.is_some() || gid.is_some() {
            reply.error(Errno::EPERM);
        } else {
            self.getattr(req, ino, fh, reply);
        }
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Direct, since contents change without the kernel's knowledge. No flush, so that close
        // does not wait.
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_NOFLUSH;
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match Inode::from_inode(ino.0).and_then(|node| self.files.content(node)) {
            Some(content) => {
                let start = content.len().min(offset as usize);
                let end = content.len().min(start + size as usize);
                reply.data(&content.as_bytes()[start..end]);
            }
            None => reply.error(Errno::EINVAL),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let value = std::str::from_utf8(data).map(str::trim);
        let (Some(Inode::Parameter(name)), Ok(value), 0) =
            (Inode::from_inode(ino.0), value, offset)
        else {
            return reply.error(Errno::EINVAL);
        };
        let (value, bytes) = (value.to_owned(), data.len() as u32);
        // An error means that the thread that makes changes has ended, because this process is
        // ending.
        let _ = self.changes.send(Change { name, value, bytes, reply });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Some(node) = Inode::from_inode(ino.0).filter(|node| node.is_folder()) else {
            return reply.error(Errno::ENOTDIR);
        };
        let dots = [(".", node), ("..", Inode::Root)];
        let entries = dots.into_iter().chain(node.children());
        for (next, (name, child)) in (1..).zip(entries).skip(offset as usize) {
            let kind = if child.is_folder() { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(child.inode()), next, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_is_found_by_its_inode() {
        let mut seen = std::collections::HashSet::new();
        let mut folders = vec![Inode::Root];
        while let Some(folder) = folders.pop() {
            for (_, node) in folder.children() {
                assert_eq!(Inode::from_inode(node.inode()), Some(node));
                assert!(seen.insert(node.inode()), "{node:?} shares an inode");
                folders.push(node);
            }
        }
        assert_eq!(Inode::from_inode(0), None);
        assert_eq!(Inode::from_inode(5), None);
        assert_eq!(Inode::from_inode(0xfff), None);
        assert!(seen.len() > 40);
    }

    #[test]
    fn neighbouring_cpus_in_the_same_state_are_shown_together() {
        assert_eq!(show_states(&["online"; 2]), "0-1 online");
        let states = ["online", "slots", "offline", "offline"];
        assert_eq!(show_states(&states), "0 online, 1 slots, 2-3 offline");
    }

    #[test]
    fn names_are_unique_and_documented() {
        let mut names: Vec<_> = statistics().map(|(name, _)| name).collect();
        names.extend(attributes().map(|(name, ..)| name));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(statistics().all(|(_, doc)| doc.ends_with('.')));
    }
}
