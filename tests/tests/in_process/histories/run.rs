//! Runs a history alone and in-process in two ways, and kills runs that hang.

use rustix::process::{Pid, Signal, kill_process_group};
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uzswap_tests::{nobody_in, place_programs, slowness};

/// The budget of a run: less than a history grows by.
const MEMORY: &str = "32M";
/// The longest run. Alone, a history takes one or two seconds.
const PATIENCE: Duration = Duration::from_secs(25);

/// Runs a command in a new namespace of queues.
const UNSHARE: [&str; 2] = ["unshare", "--ipc"];

/// A way to run a history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    Alone,
    /// In-process, by userfaultfd.
    Uffd,
    /// In-process by protection, with userfaultfd denied.
    Denied,
}

/// The outcome of a run.
#[derive(Debug, Clone)]
pub struct Transcript {
    /// The transcript, which ends with the status.
    pub told: String,
    /// Standard error of the history and of uzswap.
    pub said: String,
    /// True if pages left memory.
    pub has_left: bool,
}

/// The programs, in a folder that all users may write.
pub struct Rig {
    folder: TempDir,
    /// The number of processors that uzswap assumes; `None` for the real number.
    cpus: Option<u32>,
    /// True if each run has its own namespace of queues, as a container has. Their numbers begin at
    /// 0 there, and are those of files, too.
    has_own_queues: bool,
}

impl Rig {
    pub fn new() -> Self {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        place_programs(folder.path());
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("history");
        let compile = |output: &str, names: &[&str], options: &[&str]| {
            let mut compiler = Command::new("cc");
            compiler.args(["-O1", "-pthread", "-Wall", "-Werror", "-o"]);
            compiler.arg(folder.path().join(output)).args(options);
            compiler.args(names.iter().map(|name| source.join(format!("{name}.c"))));
            assert!(compiler.status().expect("a compiler").success(), "{output}");
        };
        let parts = ["main", "memory", "processes", "signals", "threads", "files", "calls"];
        compile("history", &parts, &[]);
        compile("deny", &["deny"], &[]);
        compile("library.so", &["library"], &["-shared", "-fPIC"]);
        let [program, option] = UNSHARE;
        let tried = Command::new(program).args([option, "true"]).stderr(Stdio::null()).status();
        let has_own_queues = tried.is_ok_and(|status| status.success());
        Self { folder, cpus: None, has_own_queues }
    }

    /// Sets the number of processors.
    pub fn with_cpus(cpus: u32) -> Self {
        Self { cpus: Some(cpus), ..Self::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a history in a folder of its own.
    pub fn run(&self, history: &str, way: Setup) -> Transcript {
        let work = tempfile::tempdir_in(self.folder.path()).unwrap();
        fs::set_permissions(work.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::copy(self.path("library.so"), work.path().join("library.so")).unwrap();
        fs::write(work.path().join("history"), history).unwrap();
        let outer: &[&str] = if self.has_own_queues { &UNSHARE } else { &[] };
        let mut command = nobody_in(outer);
        if way == Setup::Denied {
            command.arg(self.path("deny"));
        }
        if way != Setup::Alone {
            command.arg(self.path("uzswap"));
            command.args(["run", "--in-process", "--memory", MEMORY, "--"]);
            command.env("HISTORY_LEAVES", "1");
            command.envs(self.cpus.map(|cpus| ("UZSWAP_TEST_CPUS", cpus.to_string())));
        }
        command.arg(self.path("history")).arg("history").current_dir(work.path());
        self.watch(command.process_group(0))
    }

    /// Runs a command. Kills all its processes at its end or after the time limit.
    fn watch(&self, command: &mut Command) -> Transcript {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let group = Pid::from_child(&child);
        let (mut out, mut error) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let read = |from: &mut dyn Read| {
            let mut bytes = Vec::new();
            from.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        std::thread::scope(|scope| {
            let told = scope.spawn(move || read(&mut out));
            let said = scope.spawn(move || read(&mut error));
            let began = Instant::now();
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break Some(status),
                    None if began.elapsed() > PATIENCE * slowness() => break None,
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            // An error means that no process of the group is left.
            let _ = kill_process_group(group, Signal::KILL);
            if status.is_none() {
                child.wait().unwrap();
            }
            let (mut told, said) = (told.join().unwrap(), said.join().unwrap());
            told += &match status {
                None => format!("hangs: not done after {} s\n", PATIENCE.as_secs()),
                // `uzswap run` and shells report a signal in this way.
                Some(status) => match status.signal() {
                    Some(signal) => format!("status {}\n", 128 + signal),
                    None => format!("status {}\n", status.code().unwrap()),
                },
            };
            let has_left = said.contains("leaves\n");
            Transcript { told, said, has_left }
        })
    }
}

/// The first line at which two transcripts differ, from both.
pub fn first_difference(alone: &str, with: &str) -> String {
    let pairs = alone.lines().zip(with.lines());
    let same = pairs.take_while(|(one, other)| one == other).count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("(nothing)").to_owned();
    format!("alone: {}; in-process: {}", line(alone), line(with))
}
