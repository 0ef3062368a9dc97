//! The machine, which only one test uses at a time and must leave unchanged.

use crate::{FOLDER, program, skip, wait_for};
use rustix::fs::FlockOperation;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;
use uzswap_sys::cgroup::Hierarchy;
use uzswap_sys::process;

/// The longest time of a test with the machine. A longer test hangs.
const HANGS: Duration = Duration::from_secs(40 * 60);

/// The machine, for one test at a time. The test must leave it unchanged.
pub struct Machine {
    before: BTreeSet<String>,
    _watchdog: Sender<()>,
    _alone: File,
}

impl Machine {
    /// Takes the machine. `None`, with a message, if the machine cannot swap. If CI is set, that is
    /// a failure, because the machine of the checks can swap.
    pub fn take() -> Option<Self> {
        let Ok(alone) = File::create("/run/uzswap-tests.lock") else {
            assert!(std::env::var_os("CI").is_none(), "the checks are run as root");
            skip("only root can swap");
            return None;
        };
        rustix::fs::flock(&alone, FlockOperation::LockExclusive).expect("a lock on a local file");
        let output = |word| Command::new(program("uzswap")).arg(word).output().expect("it runs");
        // Removes changes that a killed test has left. `clean` touches no process.
        output("clean");
        // A run of another program could end during the test, and look like a change by the test.
        // Runs in-process may go on in other tests meanwhile: they change nothing of the machine.
        let idle = wait_for(|| !Path::new(FOLDER).exists());
        let status = || String::from_utf8_lossy(&output("status").stdout).into_owned();
        assert!(idle, "uzswap is running on this machine already; end it: {}", status());
        // This comes after the lock: doctor makes a cgroup for a moment, which another test would
        // take for a trace.
        let doctor = Command::new(program("uzswap")).arg("doctor").output().expect("doctor runs");
        if !doctor.status.success() {
            let why = String::from_utf8_lossy(&doctor.stdout).into_owned();
            assert!(
                std::env::var_os("CI").is_none(),
                "this machine should be able to swap:\n{why}"
            );
            skip(why);
            return None;
        }
        Some(Self { before: traces(), _watchdog: watch_for_hangs(), _alone: alone })
    }

    /// Panics if the machine is not as before, with the differences.
    pub fn assert_as_before(&self) {
        // The kernel detaches a loop device a moment after its last use.
        let same = wait_for(|| traces() == self.before);
        assert!(same, "before: {:#?}\nnow: {:#?}", self.before, traces());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_as_before();
        }
        // Removes all that a failing test has left.
        drop(Command::new(program("uzswap")).arg("clean").output());
    }
}

/// Unless the caller drops the result in time, prints the state of uzswap's processes, and kills
/// these and this process: a hanging test would stop the other checks.
fn watch_for_hangs() -> Sender<()> {
    let (ended, end) = channel();
    std::thread::spawn(move || {
        if end.recv_timeout(HANGS) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let processes = own_processes();
        // No printing macro is used, since its output appears only after the test.
        let mut said = format!("a test has had the machine for {} minutes\n", HANGS.as_secs() / 60);
        processes.iter().for_each(|pid| said += &stand(*pid));
        let _ = std::io::stderr().write_all(said.as_bytes());
        // An error means that the process has just ended.
        processes.iter().for_each(|pid| _ = process::kill(*pid, libc::SIGKILL));
        std::process::abort();
    });
    ended
}

/// All processes that run uzswap.
fn own_processes() -> Vec<i32> {
    let own = program("uzswap");
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == own))
        .collect()
}

/// The name of a process, and the kernel function in which each of its threads is.
fn stand(pid: i32) -> String {
    let text = |path: PathBuf| fs::read_to_string(path).unwrap_or_default();
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let mut said = format!("{pid}: {}", text(folder.join("cmdline")).replace('\0', " "));
    for thread in fs::read_dir(folder.join("task")).into_iter().flatten().flatten() {
        let path = thread.path();
        said += &format!("\n  {}{}", text(path.join("comm")), text(path.join("stack")));
    }
    said
}

/// Everything that uzswap could leave on a machine.
fn traces() -> BTreeSet<String> {
    let mut traces = BTreeSet::new();
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let names = |folder: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path().display().to_string()).collect::<Vec<_>>()
    };
    for line in text("/proc/swaps").lines().skip(1) {
        traces.insert(format!("swap {}", line.split_whitespace().next().unwrap_or_default()));
    }
    for line in text("/proc/self/mounts").lines().filter(|line| line.contains("uzswap")) {
        traces.insert(format!("mount {line}"));
    }
    for folder in names("/sys/block").iter().filter(|name| name.contains("loop")) {
        let file = text(&format!("{folder}/loop/backing_file"));
        if !file.is_empty() {
            traces.insert(format!("loop {folder} {file}"));
        }
    }
    traces.extend(names("/sys/class/ublk-char"));
    traces.extend(names("/run/uzswap"));
    let own = Hierarchy::find().map(|hierarchy| hierarchy.own().path().display().to_string());
    let folders = ["/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"];
    for folder in folders.into_iter().map(str::to_owned).chain(own) {
        traces.extend(names(&folder).into_iter().filter(|name| name.contains("uzswap")));
    }
    for setting in [
        "/sys/module/zswap/parameters/enabled",
        "/sys/module/zswap/parameters/compressor",
        "/sys/module/zswap/parameters/max_pool_percent",
        "/sys/block/zram0/disksize",
        "/proc/sys/vm/page-cluster",
        "/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device",
        "/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device",
    ] {
        traces.insert(format!("{setting} {}", text(setting)));
    }
    traces
}
