//! A `uzswap run` of a test, and its end.

use crate::{FOLDER, program, slowness, state, transport_options, wait_for};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use uzswap_sys::cgroup::{Group, Version};
use uzswap_sys::process;

/// Time limit of a run. Beside builds, some take minutes.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// A running `uzswap run`.
pub struct Run {
    /// The process; `None` after it was waited for.
    child: Option<Child>,
    report: tempfile::NamedTempFile,
    /// The command runs while this file exists.
    goes_on: Option<tempfile::TempPath>,
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed test kills the run.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Run {
    /// Starts a run. `options` precede the command.
    pub fn start(options: &[&str], command: &[&str]) -> Self {
        let report = tempfile::NamedTempFile::new().expect("a temporary file");
        // The run passes no signal on that it was started to ignore, as where a script starts the
        // tests in the background.
        let child = Command::new("env")
            .arg("--default-signal=INT,HUP,QUIT,CHLD")
            .arg(program("uzswap"))
            .arg("run")
            .args(if options.contains(&"--transport") { Vec::new() } else { transport_options() })
            .args(options)
            .arg("--report")
            .arg(report.path())
            .arg("--")
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("uzswap runs");
        Self { child: Some(child), report, goes_on: None }
    }

    /// Starts four programs that rewrite and check three times their memory, with a pool of this
    /// size. Waits until they run. They run until [`Self::finish`]. In emulation the programs are
    /// smaller, since a page takes twenty times as long.
    pub fn churn(pool: &str) -> Self {
        let backing = "/var/tmp/uzswap-test.img:256M";
        let (memory, mib) = if slowness() == 1 { ("64M", "192") } else { ("24M", "72") };
        Self::churn_with(&["--memory", memory, "--pool", pool, "--backing", backing], mib, "4")
    }

    /// As [`Self::churn`], with these options, memory of all programs together in MiB, and number
    /// of programs.
    pub fn churn_with(options: &[&str], mib: &str, count: &str) -> Self {
        let churn = program("churn");
        let goes_on = tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path();
        let [churn, until] = [&*churn, &*goes_on].map(|path| path.to_str().expect("text"));
        let mut run = Self::start(options, &[churn, mib, until, count]);
        run.goes_on = Some(goes_on);
        run.wait_until_running();
        run
    }

    /// Its process number.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().expect("it is not waited for").id() as i32
    }

    /// True if the run has ended.
    pub fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut().expect("it is not waited for");
        child.try_wait().expect("it is ours").is_some()
    }

    /// The control files.
    pub fn mount(&self) -> PathBuf {
        Path::new(FOLDER).join("mnt")
    }

    /// The group of its command, if it was made.
    pub fn group(&self) -> Option<Group> {
        let pid = self.pid();
        let state = state()?;
        let runs = state["runs"].as_array()?;
        let place = &runs.iter().find(|run| run["pid"] == pid)?["place"];
        let version = if place["is_v2"].as_bool()? { Version::V2 } else { Version::V1 };
        Some(Group::at(version, place["folder"].as_str()?.into()))
    }

    /// Waits until its command runs.
    pub fn wait_until_running(&self) {
        // Before that, the process runs uzswap.
        let own = program("uzswap");
        let is_command = |pid: i32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| program != own)
        };
        let has_command =
            || self.group().is_some_and(|group| group.processes().into_iter().any(is_command));
        assert!(wait_for(has_command), "the command did not start");
    }

    /// A statistic, from its file.
    pub fn statistic(&self, name: &str) -> u64 {
        let path = self.mount().join("stats").join(name);
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    }

    /// Sends the run a signal.
    pub fn signal(&self, signal: i32) {
        process::kill(self.pid(), signal).expect("it is running");
    }

    /// Lets the command end, and waits for the run's end. Returns output and report. After a
    /// quarter of an hour, kills the run and panics.
    pub fn finish(mut self) -> Finished {
        drop(self.goes_on.take());
        let pid = self.pid();
        let (ended, end) = channel::<()>();
        let watchdog = std::thread::spawn(move || {
            let is_late = end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            if is_late {
                // An error means that the run has just ended, perhaps without its command.
                let _ = process::kill(pid, libc::SIGKILL);
            }
            is_late
        });
        let child = self.child.take().expect("it is waited for once");
        let output = child.wait_with_output().expect("it ends");
        drop(ended);
        let is_late = watchdog.join().expect("the watchdog does not panic");
        assert!(!is_late, "it did not end: {}", String::from_utf8_lossy(&output.stderr));
        let report = fs::read(self.report.path()).unwrap_or_default();
        let report = serde_json::from_slice(&report).unwrap_or(serde_json::Value::Null);
        Finished { output, report }
    }
}

/// A run that has ended.
pub struct Finished {
    /// Status, standard output and error.
    pub output: Output,
    /// The report, if it was written.
    pub report: serde_json::Value,
}

impl Finished {
    /// The exit status.
    pub fn code(&self) -> Option<i32> {
        self.output.status.code()
    }

    /// Standard error.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    /// Standard output.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&self.output.stdout).into_owned()
    }

    /// A statistic of the report.
    pub fn statistic(&self, name: &str) -> u64 {
        self.report["stats"][name].as_u64().unwrap_or_default()
    }

    /// Panics with the output unless the run ended with `code`.
    pub fn assert_code(&self, code: i32) {
        let (stdout, stderr) = (self.stdout(), self.stderr());
        assert_eq!(self.code(), Some(code), "stdout:\n{stdout}\nstderr:\n{stderr}");
    }

    /// Panics unless this number of `churn` processes found every byte right, and no page was
    /// refused.
    pub fn assert_whole(&self, processes: usize) {
        self.assert_code(0);
        let stdout = self.stdout();
        assert_eq!(stdout.matches("every byte right").count(), processes, "{stdout}");
        for lost in ["decompress_fail", "read_fail", "request_errors"] {
            assert_eq!(self.statistic(lost), 0, "{lost}: {}", self.report);
        }
    }
}

/// A gate at which a command waits until a test opens it. It is a named pipe that the command opens
/// for reading.
pub struct Gate {
    folder: tempfile::TempDir,
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        let gate = Self { folder: tempfile::tempdir().expect("a temporary folder") };
        let made = Command::new("mkfifo").arg(gate.path()).status().expect("mkfifo runs");
        assert!(made.success());
        gate
    }

    /// Its path.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("gate")
    }

    /// Waits until a command is at the gate, and lets it through.
    pub fn open(&self) {
        // This open fails while the pipe has no reader.
        let open = || {
            let flags = libc::O_NONBLOCK;
            fs::File::options().write(true).custom_flags(flags).open(self.path()).is_ok()
        };
        assert!(wait_for(open), "nobody came to the gate");
    }
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}
