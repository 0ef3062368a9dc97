//! The list of changes to the machine, each written down before it is made, and undoing them.
//!
//! There is one swap device a machine, so there is one such list, in [`FOLDER`]. The holder of the
//! lock beside it is responsible for it: the keeper, and its daemon, which has inherited the lock.
//! When the lock is free and there is a list, both were killed, and the next one undoes it.
//!
//! The lock belongs to open files, not to process numbers: containers that share /run have
//! processes of their own.

use crate::wire::{Place, RunInfo};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_block::transport::{self, Kind, Transport};
use uzswap_sys::cgroup::{Group, Version};
use uzswap_sys::{cpu, fuse, process, swap};

/// The program that this process runs, by whatever name, and whether or not it has been replaced
/// or removed meanwhile.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Where everything is: on a file system that a reboot empties, as it undoes the changes.
pub const FOLDER: &str = "/run/uzswap";

/// Modes of the folder and of its content: only root may look, lock or listen there.
const OWNERS_FOLDER: u32 = 0o700;
const OWNERS_FILE: u32 = 0o600;
const WRITTEN_BY_OTHERS: u32 = 0o022;

const STATE: &str = "state.json";
const LOCK: &str = "lock";
const MOUNT: &str = "mnt";
const DISK: &str = "disk";
const SOCKET: &str = "socket";

/// The kernel's zswap would take pages before they reach any device.
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// How often to ask again while another process switches an area off.
const ANOTHER_IS_AT_IT: Duration = Duration::from_millis(50);

/// How long a process gets to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the control files are mounted.
pub fn mount() -> PathBuf {
    Path::new(FOLDER).join(MOUNT)
}

/// Where the keeper listens.
pub fn socket() -> PathBuf {
    Path::new(FOLDER).join(SOCKET)
}

/// The file that is served, where a transport needs one: not among the control files, which go
/// when the daemon is killed.
pub fn disk() -> PathBuf {
    Path::new(FOLDER).join(DISK)
}

/// Makes the folder that the daemon mounts on.
pub fn make_mount_points() -> io::Result<()> {
    make_folder(&mount())?;
    write(&disk(), b"")
}

/// Makes a folder that its owner alone may look into, whatever the umask; one that is there becomes
/// such. Errors: it is somebody else's, or no folder.
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

/// Opens a file for writing that its owner alone may open, whatever the umask; one that is there
/// becomes such. Errors: it is somebody else's.
fn own_file(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.create(true).truncate(false).write(true).mode(OWNERS_FILE);
    let file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
    check_owner(&file.metadata()?, path)?;
    file.set_permissions(fs::Permissions::from_mode(OWNERS_FILE))?;
    Ok(file)
}

/// Its orders are done as root: nobody else may have written it.
fn check_owner(metadata: &fs::Metadata, path: &Path) -> io::Result<()> {
    match metadata.uid() == rustix::process::geteuid().as_raw() {
        true => Ok(()),
        false => Err(io::Error::other(format!("{} is another user's", path.display()))),
    }
}

/// True if the kernel's zswap takes pages on this machine.
pub fn zswap_is_on() -> bool {
    fs::read_to_string(ZSWAP).is_ok_and(|value| value.trim() == "Y")
}

/// A process, so that another one with its number is not mistaken for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Its number.
    pub pid: i32,
    /// When it started, in clock ticks since boot.
    pub started: u64,
}

impl ProcessId {
    /// The process with this number now.
    pub fn of(pid: u32) -> Option<Self> {
        let pid = pid as i32;
        Some(Self { pid, started: process::start_time(pid)? })
    }

    /// This process.
    pub fn own() -> Option<Self> {
        Self::of(std::process::id())
    }

    /// True if it does nothing any more: no thread of it executes anything, and the kernel writes
    /// nothing into its memory. The rest of it may take for ever to close its files, and nobody
    /// waits for that.
    pub fn is_over(&self) -> bool {
        !process::has_memory(self.pid)
            || process::start_time(self.pid).is_some_and(|started| started != self.started)
    }

    /// True if it is still there.
    pub fn is_alive(&self) -> bool {
        process::start_time(self.pid) == Some(self.started)
    }

    /// True if it has begun to end, or has ended.
    pub fn is_ending(&self) -> bool {
        process::is_ending(self.pid) || !self.is_alive()
    }
}

/// A swap area.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AreaChange {
    /// Its device.
    pub device: PathBuf,
    /// Bytes.
    pub bytes: u64,
}

/// A run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunChange {
    /// The process.
    #[serde(flatten)]
    pub run: RunInfo,
    /// Where its command is.
    pub place: Option<Place>,
}

/// The list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The keeper.
    pub keeper: Option<ProcessId>,
    /// The daemon.
    pub daemon: Option<ProcessId>,
    /// Over which transport.
    pub transport: String,
    /// Another daemon can go on where this one is killed.
    pub outlives_daemon: bool,
    /// The areas, in the order in which they are filled.
    pub areas: Vec<AreaChange>,
    /// A process that makes a further one.
    #[serde(default)]
    pub area_maker: Option<ProcessId>,
    /// The kernel's zswap was on.
    pub zswap_was_on: bool,
    /// The keeper's own group, where it has made one.
    pub group: Option<Place>,
    /// It serves the whole machine until it is told to end, not runs until the last one has left.
    pub is_serving: bool,
    /// Runs.
    pub runs: Vec<RunChange>,
}

/// Answers with errors, until it is dropped.
pub type StandIn = Box<dyn Transport>;

/// Held by the process that is responsible for the list.
#[derive(Debug)]
pub struct Lock(pub File);

impl Lock {
    /// Takes it; `None` while somebody has it. Makes the folder.
    pub fn take() -> io::Result<Option<Self>> {
        loop {
            make_folder(Path::new(FOLDER))?;
            let path = Path::new(FOLDER).join(LOCK);
            // A user who may open it may lock it, and keep everybody from cleaning up.
            let file = own_file(&path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                other => other?,
            }
            // The last holder may have removed the file on leaving: then another file has its name.
            let both = path.metadata().ok().zip(file.metadata().ok());
            if both.is_some_and(|(named, held)| named.ino() == held.ino()) {
                return Ok(Some(Self(file)));
            }
        }
    }

    /// True if a process has it.
    pub fn is_taken() -> bool {
        let Ok(file) = File::open(Path::new(FOLDER).join(LOCK)) else { return false };
        flock(&file, FlockOperation::NonBlockingLockShared).is_err()
    }
}

impl State {
    /// Reads it; the default where there is none.
    pub fn read() -> io::Result<Self> {
        let path = Path::new(FOLDER).join(STATE);
        let mut file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            other => other?,
        };
        let metadata = file.metadata()?;
        check_owner(&metadata, &path)?;
        if metadata.mode() & WRITTEN_BY_OTHERS != 0 {
            return Err(io::Error::other("others than its owner may write it"));
        }
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }

    /// True if a keeper is there, or a daemon that will start one.
    pub fn is_attended(&self) -> bool {
        [self.keeper, self.daemon].iter().flatten().any(ProcessId::is_alive)
    }

    /// Replaces it, whole or not at all.
    pub fn write(&self) -> io::Result<()> {
        let fresh = Path::new(FOLDER).join("state.new");
        write(&fresh, &serde_json::to_vec(self)?)?;
        fs::rename(fresh, Path::new(FOLDER).join(STATE))
    }

    /// The process that limits a group, by the group's folder.
    pub fn run_in(&self, folder: &Path) -> Option<&RunChange> {
        self.runs.iter().find(|run| run.place.as_ref().is_some_and(|place| place.folder == folder))
    }

    /// The devices of the areas.
    pub fn devices(&self) -> impl Iterator<Item = &PathBuf> {
        self.areas.iter().map(|area| &area.device)
    }

    fn transport(&self) -> Kind {
        self.transport.parse().unwrap_or(Kind::Fuse)
    }

    /// Areas of ours that the kernel lists, with the bytes that it has there. It lists one until
    /// its last page is read back. Errors: it does not say, so any may be there.
    pub fn areas_on(&self) -> io::Result<Vec<swap::Area>> {
        let is_ours = |area: &swap::Area| {
            self.areas.iter().any(|ours| ours.device == area.path)
                && transport::is_ours(self.transport(), &area.path, Path::new(FOLDER))
        };
        Ok(swap::areas()?.into_iter().filter(is_ours).collect())
    }

    /// True if pages may be on one of them, or on one that a process makes. Then nothing of it may
    /// be ended, killed or removed.
    pub fn is_in_use(&self) -> bool {
        let is_made = self.area_maker.is_some_and(|maker| !maker.is_over());
        is_made || self.areas_on().map_or(true, |areas| !areas.is_empty())
    }

    /// Switches the kernel's zswap off, if it is on.
    pub fn switch_zswap_off(&mut self) -> io::Result<()> {
        if !zswap_is_on() {
            return Ok(());
        }
        self.zswap_was_on = true;
        self.write()?;
        fs::write(ZSWAP, "N")
    }

    /// Has the kernel read back the pages of a killed daemon, as far as it can, and forget the
    /// areas. Ends commands that were killed with their runs. Returns the failures.
    fn empty(&mut self) -> Vec<String> {
        let mut troubles = Vec::new();
        // First of all: a thread that waits for a page may not end before it is answered. Dropped
        // when the areas are off: then nobody waits any more.
        let _stand_in = self.stand_in().unwrap_or_else(|error| {
            troubles.push(error.to_string());
            None
        });
        for run in std::mem::take(&mut self.runs) {
            if let Some(place) = &run.place {
                note(&mut troubles, "end a command", place.end());
            }
        }
        note(&mut troubles, "", self.areas_on().and_then(|on| switch_off_all(&on)));
        troubles
    }

    /// Undoes everything, and removes the folder. Returns the changes that could not be undone.
    /// Steps that are done already are no trouble, so it can be repeated. While the kernel lists an
    /// area, nothing under it is touched, not even the daemon, which `end_daemon` would end.
    pub fn undo(&mut self, end_daemon: Option<&mut dyn FnMut() -> io::Result<()>>) -> Vec<String> {
        let mut troubles = Vec::new();
        let transport = self.transport();
        let in_use = || vec!["the kernel still reads back the swapped pages".into()];
        if self.is_in_use() {
            return in_use();
        }
        for area in &self.areas {
            if transport::is_ours(transport, &area.device, Path::new(FOLDER)) {
                let what = format!("detach {}", area.device.display());
                note(&mut troubles, &what, transport::detach(transport, &area.device));
            }
        }
        // From now on nobody can switch one on again.
        if self.is_in_use() {
            return in_use();
        }
        if let Some(Err(error)) = end_daemon.map(|end| end()) {
            troubles.push(format!("end the daemon: {error}"));
            return troubles;
        }
        for path in [disk(), mount()] {
            if fuse::is_mounted(&path) {
                note(&mut troubles, &format!("unmount {}", path.display()), fuse::unmount(&path));
            }
        }
        if self.zswap_was_on {
            note(&mut troubles, "switch the kernel's zswap on again", fs::write(ZSWAP, "Y"));
        }
        if let Some(place) = &self.group {
            note(&mut troubles, "leave the daemon's group", place.leave());
        }
        if troubles.is_empty() {
            // Kept otherwise, so that the next one tries again. An error: it is not empty, or gone.
            let _ = fs::remove_dir(mount());
            let _ = fs::remove_dir_all(FOLDER);
        }
        troubles
    }

    /// Where the daemon is dead and its devices wait for another, one that answers with errors is
    /// started. So a thread that waits for a page learns that it is lost, and the areas can be
    /// switched off.
    pub fn stand_in(&self) -> io::Result<Option<StandIn>> {
        let devices: Vec<_> = self.areas_on()?.into_iter().map(|area| area.path).collect();
        transport::stand_in(self.transport(), &devices).map_err(|error| {
            io::Error::other(format!("answer for the devices of a dead daemon: {error}"))
        })
    }
}

/// Has the kernel read everything back and forget the areas, the last first.
fn switch_off_all(on: &[swap::Area]) -> io::Result<()> {
    if on.is_empty() {
        return Ok(());
    }
    let mut child = start_switching_off(on)?;
    switched_off(on, child.wait()?.success())
}

fn note(troubles: &mut Vec<String>, what: &str, result: io::Result<()>) {
    match result {
        Ok(()) => {}
        Err(error) if what.is_empty() => troubles.push(error.to_string()),
        Err(error) => troubles.push(format!("{what}: {error}")),
    }
}

/// Errors: the swapped pages would not fit in memory.
pub fn check_room(areas: &[swap::Area]) -> io::Result<()> {
    let used: u64 = areas.iter().map(|area| area.used).sum();
    let available = cpu::memory_info()?.available;
    if used <= available {
        return Ok(());
    }
    let (used, available) = (crate::size::show(used), crate::size::show(available));
    Err(io::Error::other(format!(
        "cannot switch swapping off: {used} are swapped out and {available} of memory are free; \
         free memory and try again"
    )))
}

/// Starts a process that switches areas off: the kernel ends such a process first when memory runs
/// out.
pub fn start_switching_off(areas: &[swap::Area]) -> io::Result<std::process::Child> {
    Command::new(OWN_PROGRAM)
        .arg("switch-off")
        .args(areas.iter().rev().map(|area| &area.path))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// The outcome.
pub fn switched_off(areas: &[swap::Area], is_done: bool) -> io::Result<()> {
    if is_done {
        return Ok(());
    }
    let devices: Vec<_> = areas.iter().map(|area| area.path.display().to_string()).collect();
    Err(io::Error::other(format!(
        "cannot switch swapping to {} off: memory ran out; free memory and try again",
        devices.join(", ")
    )))
}

/// `uzswap switch-off`: the process for it.
pub fn switch_off(devices: &[PathBuf]) -> io::Result<()> {
    // Marked as its parent is, it would find less memory for the pages that it reads back. An
    // error: the parent was not permitted to mark itself.
    let _ = process::set_io_flusher(false);
    devices.iter().try_for_each(|device| switch_off_one(device))
}

/// Until the kernel does not list the area any more. It returns EINVAL for an area that is off, and
/// for one that another process is switching off. That one is still read back, and is on again if
/// the other process is ended.
fn switch_off_one(device: &Path) -> io::Result<()> {
    loop {
        match swap::off(device) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                if !swap::areas()?.iter().any(|area| area.path == device) {
                    return Ok(());
                }
                std::thread::sleep(ANOTHER_IS_AT_IT);
            }
            other => return other,
        }
    }
}

impl Place {
    /// The group.
    pub fn group(&self) -> Group {
        Group::at(if self.is_v2 { Version::V2 } else { Version::V1 }, self.folder.clone())
    }

    /// Ends all processes in it at once, if they are ours.
    pub fn kill(&self) {
        if self.borrowed.is_none() {
            self.group().kill();
        }
    }

    /// Ends all processes in it, and removes it; or leaves it as it was, if it is somebody else's.
    pub fn end(&self) -> io::Result<()> {
        let group = self.group();
        if let Some(attributes) = &self.borrowed {
            // Gone: there is nothing to put back.
            let mut there = attributes.iter().filter(|(path, _)| path.exists());
            return there.try_for_each(|(path, value)| {
                fs::write(path, value)
                    .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
            });
        }
        let is_empty = wait_for(PATIENCE, || {
            group.kill();
            group.processes().is_empty()
        });
        if !is_empty {
            let what = format!("processes in {} do not end", group.path().display());
            return Err(io::Error::other(what));
        }
        self.remove()
    }

    /// Removes it, and the groups that were made around it. The kernel may take a moment to forget
    /// its last process.
    pub fn remove(&self) -> io::Result<()> {
        let groups = std::iter::once(self.group());
        let around = self.around.iter().map(|path| Group::at(Version::V2, path.clone()));
        for group in groups.chain(around) {
            let mut last = Ok(());
            wait_for(Duration::from_secs(2), || {
                last = group.remove();
                last.is_ok()
            });
            last.map_err(|error| {
                io::Error::other(format!("remove {}: {error}", group.path().display()))
            })?;
        }
        if let Some((to, from)) = &self.moved {
            let (to, from) =
                (Group::at(Version::V2, to.clone()), Group::at(Version::V2, from.clone()));
            from.keep_memory_back()?;
            for pid in to.processes() {
                // An error: it has just ended.
                let _ = from.enter(pid);
            }
            to.remove()?;
        }
        Ok(())
    }

    /// Removes it, this process and others that it has started being in it.
    fn leave(&self) -> io::Result<()> {
        let group = self.group();
        if let Some(parent) = group.parent() {
            parent.enter(std::process::id() as i32)?;
            for pid in group.processes() {
                // An error: it has just ended.
                let _ = parent.enter(pid);
            }
        }
        self.remove()
    }
}

/// The outcome of [`clean_up`].
#[derive(Debug, Default)]
pub struct CleanedUp {
    /// In words.
    pub done: Vec<String>,
    /// The changes that could not be undone.
    pub left: Vec<String>,
    /// The kernel still lists an area of ours.
    pub is_in_use: bool,
}

/// Undoes the changes of a keeper and a daemon that were killed. The caller has the lock.
pub fn clean_up(_lock: &Lock) -> CleanedUp {
    let mut state = match State::read() {
        Ok(state) if state == State::default() => return CleanedUp::default(),
        Ok(state) => state,
        Err(error) => {
            let left = vec![format!("{FOLDER}/{STATE}: {error}; undo by hand and remove it")];
            return CleanedUp { left, ..CleanedUp::default() };
        }
    };
    let runs: Vec<_> = state.runs.iter().map(|run| run.run.pid.to_string()).collect();
    let mut left = state.empty();
    left.extend(state.undo(None));
    let of = if runs.is_empty() { String::new() } else { format!(" ({})", runs.join(", ")) };
    let done = vec![format!("cleaned up after a killed run{of}")];
    let is_in_use = state.is_in_use();
    CleanedUp { done: if left.is_empty() { done } else { Vec::new() }, left, is_in_use }
}

/// Looks every few milliseconds until `done` or the patience is over; whether it was done.
pub fn wait_for(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    while !done() {
        if begin.elapsed() > patience {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lock that others may open is a lock that others may hold.
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

    #[test]
    fn the_list_comes_back_as_it_was_written() {
        let place = Place {
            folder: "/sys/fs/cgroup/a/uzswap-1".into(),
            is_v2: true,
            around: None,
            moved: Some(("/sys/fs/cgroup/a/rest".into(), "/sys/fs/cgroup/a".into())),
            borrowed: Some(vec![("/sys/fs/cgroup/b/memory.high".into(), "max".into())]),
        };
        let run = RunInfo { pid: 1, command: "make".into(), memory: 1 << 20 };
        let state = State {
            keeper: Some(ProcessId { pid: 2, started: 3 }),
            transport: "fuse".into(),
            areas: vec![AreaChange { device: "/dev/loop7".into(), bytes: 1 << 28 }],
            runs: vec![RunChange { run, place: Some(place) }],
            ..State::default()
        };
        let text = serde_json::to_vec(&state).unwrap();
        assert_eq!(serde_json::from_slice::<State>(&text).unwrap(), state);
    }
}
