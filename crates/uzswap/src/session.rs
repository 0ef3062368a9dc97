//! A swap device while it lasts: the daemon, the device over its file, and everything that was
//! changed on the machine for it.
//!
//! Each change is written down in the session's folder before it is made, so that whoever finds the
//! folder can undo it: this process at the end, the daemon when this process was killed, or the
//! next `uzswap` when both were ([`crate::leftovers`]).

use crate::error::Failure;
use crate::options::DaemonOptions;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use uzswap_block::{SwapDevice, control};
use uzswap_sys::process;

/// Folder of all sessions; on a file system that a reboot empties, as it empties what they changed.
pub const SESSIONS: &str = "/run/uzswap";

const STATE: &str = "state.json";
const MOUNT: &str = "mnt";

/// The kernel's zswap would take pages before they reach any device.
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

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

    /// Whether it is still there.
    pub fn is_alive(&self) -> bool {
        process::start_time(self.pid) == Some(self.started)
    }
}

/// What a session has changed; kept in its folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Who answers for it.
    pub owner: Option<ProcessId>,
    /// Who serves the device.
    pub daemon: Option<ProcessId>,
    /// The loop device.
    pub device: Option<PathBuf>,
    /// The command's cgroup.
    pub cgroup: Option<String>,
    /// The kernel's zswap was on.
    pub zswap_was_on: bool,
}

impl State {
    /// Reads the state of the session in `folder`.
    pub fn read(folder: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&fs::read(folder.join(STATE))?)?)
    }

    /// Replaces it, whole or not at all.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        let fresh = folder.join("state.new");
        fs::write(&fresh, serde_json::to_vec(self)?)?;
        fs::rename(fresh, folder.join(STATE))
    }
}

/// Where a session's control files are mounted.
pub fn mount_of(folder: &Path) -> PathBuf {
    folder.join(MOUNT)
}

/// See the module.
pub struct Session {
    folder: PathBuf,
    state: State,
    daemon: Option<Daemon>,
    device: Option<SwapDevice>,
}

/// The daemon process. It ends itself, and cleans up, when its standard input closes.
pub struct Daemon {
    /// The process.
    pub child: Child,
    _lifeline: ChildStdin,
    /// What it could not do, and goes on without.
    pub notes: Vec<String>,
}

/// What the daemon says when it is ready, or why it is not.
#[derive(Debug, Serialize, Deserialize)]
pub enum Greeting {
    /// The file is served.
    Ready {
        /// What it goes on without.
        notes: Vec<String>,
    },
    /// It gave up.
    Failed {
        /// Why.
        message: String,
    },
}

impl Session {
    /// Makes the session's folder.
    pub fn create() -> Result<Self, Failure> {
        let folder = Path::new(SESSIONS).join(std::process::id().to_string());
        let make = || {
            fs::create_dir_all(mount_of(&folder))?;
            let state = State { owner: ProcessId::of(std::process::id()), ..State::default() };
            state.write(&folder)?;
            Ok(state)
        };
        let state = make().map_err(|error: io::Error| {
            Failure::new(format!("cannot make {}: {error}; it needs root", folder.display()))
        })?;
        Ok(Self { folder, state, daemon: None, device: None })
    }

    /// Where the control files are.
    pub fn mount(&self) -> PathBuf {
        mount_of(&self.folder)
    }

    /// The daemon.
    pub fn daemon(&mut self) -> Option<&mut Daemon> {
        self.daemon.as_mut()
    }

    /// Starts the daemon and waits until it serves.
    pub fn start_daemon(&mut self, options: &DaemonOptions) -> Result<(), Failure> {
        let cannot = |error: io::Error| Failure::new(format!("cannot start the daemon: {error}"));
        let program = std::env::current_exe().map_err(cannot)?;
        let mut child = Command::new(program)
            .arg("daemon")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(cannot)?;
        self.state.daemon = ProcessId::of(child.id());
        self.save()?;
        let (Some(mut stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new("cannot start the daemon: no pipe to it"));
        };
        let mut request = serde_json::to_vec(options).map_err(|e| cannot(e.into()))?;
        request.push(b'\n');
        stdin.write_all(&request).map_err(cannot)?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).map_err(cannot)?;
        let notes = match serde_json::from_str(&line) {
            Ok(Greeting::Ready { notes }) => notes,
            Ok(Greeting::Failed { message }) => return Err(Failure::new(message)),
            Err(_) => return Err(Failure::new("the daemon ended before it was ready")),
        };
        self.daemon = Some(Daemon { child, _lifeline: stdin, notes });
        Ok(())
    }

    /// Switches the kernel's zswap off until the end; whether it was on.
    pub fn switch_zswap_off(&mut self) -> Result<bool, Failure> {
        if fs::read_to_string(ZSWAP).is_ok_and(|value| value.trim() == "Y") {
            self.state.zswap_was_on = true;
            self.save()?;
            fs::write(ZSWAP, "N").map_err(|error| {
                Failure::new(format!("cannot switch the kernel's zswap off: {error}"))
            })?;
        }
        Ok(self.state.zswap_was_on)
    }

    /// Has the kernel swap to the daemon's file.
    pub fn attach(&mut self, pages: u32) -> Result<(), Failure> {
        let device = SwapDevice::attach(&self.mount().join(control::DISK))?;
        self.state.device = Some(device.path().to_owned());
        self.save()?;
        device.switch_on(pages, "uzswap")?;
        self.device = Some(device);
        Ok(())
    }

    /// The swap device's path.
    pub fn device(&self) -> Option<&Path> {
        self.device.as_ref().map(SwapDevice::path)
    }

    /// Writes down that a cgroup of this name is about to be made.
    pub fn note_cgroup(&mut self, name: &str) -> Result<(), Failure> {
        self.state.cgroup = Some(name.into());
        self.save()
    }

    fn save(&self) -> Result<(), Failure> {
        self.state.write(&self.folder).map_err(|error| {
            Failure::new(format!("cannot write in {}: {error}", self.folder.display()))
        })
    }

    /// Has the kernel read everything back from the device. On failure it stays on.
    pub fn switch_off(&mut self) -> Result<(), Failure> {
        let Some(device) = &self.device else { return Ok(()) };
        loop {
            match device.switch_off() {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(Failure::new(format!(
                        "cannot switch swapping to {} off: {error}; free memory and send SIGTERM \
                         again",
                        device.path().display()
                    )));
                }
            }
        }
        self.device = None;
        Ok(())
    }

    /// Undoes whatever is left; what could not be undone. Pages that cannot be read back now stay
    /// with the daemon.
    pub fn end(mut self) -> Vec<String> {
        self.device = None;
        let mut troubles = crate::leftovers::undo(&self.folder, &self.state);
        if let Some(mut daemon) = self.daemon.take() {
            if crate::leftovers::is_in_use(&self.state) {
                let pid = daemon.child.id();
                troubles.push(format!("the daemon ({pid}) goes on serving it, and tries again"));
            } else {
                let _ = daemon.child.wait();
            }
        }
        troubles
    }
}

/// Switches the kernel's zswap on again.
pub fn restore_zswap() -> io::Result<()> {
    fs::write(ZSWAP, "Y")
}
