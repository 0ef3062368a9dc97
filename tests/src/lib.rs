//! Shared by the end-to-end tests: the programs, one test at a time, and a machine that a test must
//! leave as it found it.

use rustix::fs::FlockOperation;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::{Group, Hierarchy, Version};
use uzswap_sys::process;

pub use uzswap_engine::testing::skip;

/// Time limit of a run: some take minutes where builds run beside them.
const PATIENCE: Duration = Duration::from_secs(15 * 60);

/// Time limit of everything else that takes a moment on an idle machine. In emulation, beside
/// builds, two minutes were too few.
const MOMENT: Duration = Duration::from_secs(8 * 60);

/// The longest time that a test may have the machine. A test that has it for longer hangs.
const HANGS: Duration = Duration::from_secs(40 * 60);

/// A program of this workspace, built with the same profile as this test.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let path = folder.join(name);
    assert!(path.exists(), "{} is not built: cargo build --workspace", path.display());
    path
}

/// A command that runs its arguments as an ordinary user, if this is root. `setpriv` finds uzswap,
/// its libraries and programs of these tests in the folder, which every user may write.
pub fn as_nobody(folder: &Path) -> Command {
    place_programs(folder);
    nobody()
}

/// Puts uzswap, its libraries and programs of these tests into a folder with write permission for
/// everybody.
pub fn place_programs(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("a folder of the test's");
    for name in ["uzswap", "libuzswap_preload.so", "libuzswap_agent.so", "absent", "torture"] {
        fs::copy(program(name), folder.join(name)).expect("room for a program");
    }
}

/// Runs its arguments as a command of an ordinary user, if this is root.
pub fn nobody() -> Command {
    let mut command = Command::new("setpriv");
    if rustix::process::geteuid().is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]);
    }
    command.env_remove("XDG_RUNTIME_DIR").env_remove("LD_PRELOAD");
    command
}

/// Runs a command. Returns its output, and the most anonymous memory that it and its descendants
/// had together, in bytes, as sampled every few milliseconds.
pub fn output_and_peak(command: &mut Command) -> (Output, u64) {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let (pid, (ended, end)) = (child.id() as i32, channel::<()>());
    let watcher = std::thread::spawn(move || {
        let mut peak = 0;
        while end.recv_timeout(Duration::from_millis(3)) == Err(RecvTimeoutError::Timeout) {
            let all = process::tree(pid);
            peak = peak.max(all.into_iter().filter_map(process::anonymous_part_bytes).sum());
        }
        peak
    });
    let output = child.wait_with_output().expect("it can be waited for");
    drop(ended);
    (output, watcher.join().expect("it only looks"))
}

/// Compiles a program in C to FOLDER/program.
pub fn compile(folder: &Path, text: &str, options: &[&str]) {
    fs::write(folder.join("program.c"), text).expect("room for a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "program.c", "-o", "program"]).args(options);
    assert!(compiler.current_dir(folder).status().expect("a compiler").success());
}

/// A program in Python with a heap of 70 MB, which forks, threads, files and other programs read.
/// Its argument is a file to write.
pub const FORKING_HEAP: &str = r#"
import ctypes, errno, hashlib, os, subprocess, sys, threading
pages = [bytes([i % 251]) * 600 + str(i).encode() for i in range(110000)]
def digest():
    sums = hashlib.md5()
    for page in pages: sums.update(page)
    return sums.hexdigest()
before = digest()
for turn in range(2):
    child = os.fork()
    if child == 0:
        same = digest() == before
        for i in range(0, len(pages), 3): pages[i] = b'x'
        os._exit(0 if same else 3)
    assert digest() == before
    assert os.waitpid(child, 0)[1] == 0, 'a fork saw other bytes'
path = sys.argv[1]
whole = b''.join(pages[:20000])
with open(path, 'wb') as file: file.write(whole)
with open(path, 'rb') as file: assert file.read() == whole
told = subprocess.run(['md5sum'], input=whole, capture_output=True).stdout.split()[0].decode()
assert told == hashlib.md5(whole).hexdigest(), 'a pipe had other bytes'
class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('bytes', ctypes.c_size_t)]
calls = ctypes.CDLL(None, use_errno=True)
part = Part(ctypes.cast(pages[7], ctypes.c_void_p), 1 << 63)
assert calls.writev(1, ctypes.byref(part), 1) == -1 and ctypes.get_errno() == errno.EINVAL
assert calls.poll(ctypes.c_void_p(4096), ctypes.c_ulong(0xffffffff), 0) == -1, 'too many'
sums = []
def add(first):
    sums.append(sum(sum(page[::50]) for page in pages[first::4]))
threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert digest() == before
print(before, sum(sums))
"#;

/// C with so many functions; `file` makes them differ.
pub fn functions_in_c(file: usize, count: usize) -> String {
    let function = |at: usize| {
        format!(
            "int f{file}_{at}(int a, int b) {{ int s = 0; for (int i = 0; i < a; i++) {{ s += b * i \
             ^ {at}; if (s & {}) s -= a; }} return s; }}\n",
            at + 1
        )
    };
    (0..count).map(function).collect()
}

/// The transport to test, as options of `run` and `serve`: that of the environment (see
/// CONTRIBUTING.md), or the default.
pub fn transport_options() -> Vec<String> {
    match std::env::var("UZSWAP_TEST_TRANSPORT") {
        Ok(transport) => vec!["--transport".into(), transport],
        Err(_) => Vec::new(),
    }
}

/// True if the running cache is served over ublk.
pub fn is_over_ublk() -> bool {
    state().expect("a cache is running")["transport"] == "ublk"
}

/// True if the tests that take minutes were requested (`./check --full`).
pub fn is_full() -> bool {
    std::env::var_os("UZSWAP_FULL").is_some()
}

/// True if this test is skipped, as one of those that take minutes and were not requested.
pub fn is_slow_and_skipped() -> bool {
    if !is_full() {
        skip("it takes minutes, `./check --full` runs it");
    }
    !is_full()
}

/// The seconds that a program works during a test, as its argument. They are more where the
/// environment says that processes start more slowly, as in emulation.
pub fn seconds(count: u32) -> String {
    (count * slowness()).to_string()
}

fn slowness() -> u32 {
    std::env::var("UZSWAP_TEST_SLOWNESS").map_or(1, |text| text.parse().expect("a number"))
}

/// The machine, for one test at a time, which must leave it as it was.
pub struct Machine {
    before: BTreeSet<String>,
    _watchdog: Sender<()>,
    _alone: File,
}

impl Machine {
    /// Takes the machine; `None`, with a message, where it cannot swap. With CI set that is a
    /// failure: the machine of the checks can.
    pub fn take() -> Option<Self> {
        let Ok(alone) = File::create("/run/uzswap-tests.lock") else {
            assert!(std::env::var_os("CI").is_none(), "the checks are run as root");
            skip("only root can swap");
            return None;
        };
        rustix::fs::flock(&alone, FlockOperation::LockExclusive).expect("a lock on a local file");
        let output = |word| Command::new(program("uzswap")).arg(word).output().expect("it runs");
        // A killed test may have left changes; no process is touched.
        output("clean");
        // Another program's run would end in the middle and look like a change of the test.
        let idle = wait_for(|| output("status").stdout.starts_with(b"no cache is running"));
        let status = || String::from_utf8_lossy(&output("status").stdout).into_owned();
        assert!(idle, "uzswap is running on this machine already; end it: {}", status());
        // Only now: it makes a cgroup for a moment, which another test would take for its own.
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

    /// Panics with the differences between the machine now and before.
    pub fn assert_as_before(&self) {
        // The kernel detaches a loop device a moment after its last user.
        let same = wait_for(|| traces() == self.before);
        assert!(same, "before: {:#?}\nnow: {:#?}", self.before, traces());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.assert_as_before();
        }
        // Anything that a failing test left.
        drop(Command::new(program("uzswap")).arg("clean").output());
    }
}

/// Unless its result is dropped in time, prints the state of uzswap's processes, and kills them and
/// this process: a hanging test would stop the other checks.
fn watch_for_hangs() -> Sender<()> {
    let (ended, end) = channel();
    std::thread::spawn(move || {
        if end.recv_timeout(HANGS) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        let processes = own_processes();
        // Without a macro, whose output is kept until the test has ended.
        let mut said = format!("a test has had the machine for {} minutes\n", HANGS.as_secs() / 60);
        processes.iter().for_each(|pid| said += &stand(*pid));
        let _ = std::io::stderr().write_all(said.as_bytes());
        // An error: it has just ended.
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

/// A process's name, and the kernel function of each of its threads.
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

/// Checks every few milliseconds until `done` or until the time limit; true if it was done.
pub fn wait_for(mut done: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !done() {
        if began.elapsed() > MOMENT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// A shell script that runs when this is dropped, or when this process ends in any way.
pub struct Afterwards {
    shell: Child,
}

impl Afterwards {
    /// Runs `script` at the end, with `arguments` as `$1` and so on.
    pub fn run(script: &str, arguments: &[&str]) -> Self {
        // Its standard input ends with this process. It has a process group of its own, so that no
        // key ends it.
        let shell = Command::new("sh")
            .args(["-c", &format!("cat >/dev/null; {script}"), "afterwards"])
            .args(arguments)
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("a shell");
        Self { shell }
    }
}

impl Drop for Afterwards {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// A value under /proc/sys or /sys that is restored at the end, also when the test fails.
pub struct Setting {
    _restore: Afterwards,
}

impl Setting {
    /// Writes `value`; `None` where there is no such file.
    pub fn set(path: &str, value: &str) -> Option<Self> {
        let before = fs::read_to_string(path).ok()?;
        let restore = Afterwards::run("echo \"$2\" > \"$1\"", &[path, before.trim_end()]);
        fs::write(path, value).expect("root can write it");
        Some(Self { _restore: restore })
    }
}

/// The machine promises no more memory than before, except for swap space: pages that are swapped
/// out cannot be read back. Processes may still ask for as much as there is swap space.
pub struct StrictCommit {
    _strict: Setting,
    _limit: Setting,
    // Last: writing the limit sets it, too.
    _ratio: Setting,
}

impl StrictCommit {
    /// From now until it is dropped.
    pub fn begin() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
        let committed = meminfo.lines().find_map(|line| line.strip_prefix("Committed_AS:"));
        let committed = committed.and_then(|text| text.trim().strip_suffix(" kB"));
        let committed: u64 = committed.expect("Linux has it").parse().expect("a number");
        let set = |name: &str, value: &str| {
            Setting::set(&format!("/proc/sys/vm/overcommit_{name}"), value).expect("Linux has it")
        };
        let limit = committed.saturating_sub(64 << 10).to_string();
        let (_ratio, _limit) = (set("ratio", "0"), set("kbytes", &limit));
        Self { _strict: set("memory", "2"), _limit, _ratio }
    }
}

/// A memory cgroup that is removed at the end, with its processes.
pub struct Limited {
    /// The group.
    pub group: Group,
    _remove: Afterwards,
}

impl Limited {
    /// Makes one of `bytes`.
    pub fn new(bytes: u64) -> Self {
        let hierarchy = Hierarchy::find().expect("doctor found one");
        let group = hierarchy.top().make_child("uzswap-tests").expect("root can make a group");
        let script = "while ! rmdir \"$1\"; do \
                      kill -9 $(cat \"$1/cgroup.procs\"); sleep 0.1; done 2>/dev/null";
        let remove = Afterwards::run(script, &[&group.path().display().to_string()]);
        group.set_limit(bytes, 0).expect("the group is ours");
        Self { group, _remove: remove }
    }

    /// Starts a command in it.
    pub fn start(&self, command: &[&str]) -> Child {
        Command::new("sh")
            .args(["-c", "echo 0 > \"$0\" && exec \"$@\""])
            .arg(self.group.entrance())
            .args(command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell")
    }
}

/// A command waits at it until a test opens it: a named pipe that the command opens for reading.
pub struct Gate {
    folder: tempfile::TempDir,
}

impl Gate {
    /// A closed one.
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

    /// Waits until a command waits at it, and lets the command through.
    pub fn open(&self) {
        // Without a reader it cannot be opened in this way.
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

/// `uzswap run` with arguments, started and not waited for.
pub struct Run {
    /// The process; `None` once it is waited for.
    child: Option<Child>,
    report: tempfile::NamedTempFile,
    /// While it exists, the command goes on.
    goes_on: Option<tempfile::TempPath>,
}

impl Drop for Run {
    fn drop(&mut self) {
        // A failed test does not wait for it.
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Run {
    /// Starts it. `options` come before the command.
    pub fn start(options: &[&str], command: &[&str]) -> Self {
        let report = tempfile::NamedTempFile::new().expect("a temporary file");
        let child = Command::new(program("uzswap"))
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

    /// Starts four programs that rewrite and check three times their memory, with so large a pool,
    /// and waits until they run. They run until [`Self::finish`], and are smaller in emulation,
    /// where a page takes twenty times as long.
    pub fn churn(pool: &str) -> Self {
        let backing = "/var/tmp/uzswap-test.img:256M";
        let (memory, mib) = if slowness() == 1 { ("64M", "192") } else { ("24M", "72") };
        let options = ["--memory", memory, "--pool", pool, "--backing", backing];
        let churn = program("churn");
        let goes_on = tempfile::NamedTempFile::new().expect("a temporary file").into_temp_path();
        let [churn, until] = [&*churn, &*goes_on].map(|path| path.to_str().expect("text"));
        let mut run = Self::start(&options, &[churn, mib, until, "4"]);
        run.goes_on = Some(goes_on);
        run.wait_until_running();
        run
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().expect("it is not waited for").id() as i32
    }

    /// True if it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut().expect("it is not waited for");
        child.try_wait().expect("it is ours").is_some()
    }

    /// The control files.
    pub fn mount(&self) -> PathBuf {
        Path::new(FOLDER).join("mnt")
    }

    /// The group of its command, once there is one.
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
        // Until then there is a process of uzswap's own.
        let own = program("uzswap");
        let is_command = |pid: i32| {
            fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|program| program != own)
        };
        let has_command =
            || self.group().is_some_and(|group| group.processes().into_iter().any(is_command));
        assert!(wait_for(has_command), "the command did not start");
    }

    /// A statistic, by its file.
    pub fn statistic(&self, name: &str) -> u64 {
        let path = self.mount().join("stats").join(name);
        let text = fs::read_to_string(path).unwrap_or_default();
        text.trim().parse().unwrap_or_default()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: i32) {
        process::kill(self.pid(), signal).expect("it is running");
    }

    /// Ends it, if it would go on, and waits for its end: output, and the report if it wrote one.
    /// Panics, after killing it, when it takes more than a quarter of an hour.
    pub fn finish(mut self) -> Finished {
        drop(self.goes_on.take());
        let pid = self.pid();
        let (ended, end) = channel::<()>();
        let watchdog = std::thread::spawn(move || {
            let is_late = end.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            if is_late {
                // An error: it ended just now, or only its command did not.
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

/// True if the kernel has any swap area.
pub fn is_swapping() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

/// The folder of the machine's one cache.
pub const FOLDER: &str = "/run/uzswap";

/// Its state file; `None` where there is none.
pub fn state() -> Option<serde_json::Value> {
    serde_json::from_slice(&fs::read(Path::new(FOLDER).join("state.json")).ok()?).ok()
}

/// The process number of the keeper or the daemon.
pub fn process_of(role: &str) -> i32 {
    let state = state().expect("a cache is running");
    state[role]["pid"].as_i64().expect("it has been started") as i32
}

/// A `serve` of this test.
pub struct Served {
    /// Its process.
    pub child: Child,
    /// Its output.
    said: tempfile::NamedTempFile,
    device: String,
}

impl Served {
    /// Starts it with options, and waits until it serves.
    pub fn start(options: &[&str]) -> Self {
        let said = tempfile::NamedTempFile::new().expect("a file of ours");
        let mut child = Command::new(program("uzswap"))
            .arg("serve")
            .args(options)
            .args(transport_options())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(said.reopen().expect("a file of ours"))
            .spawn()
            .expect("the program is built");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("its output is text");
        let device = line.strip_prefix("serving ").and_then(|rest| rest.split(',').next());
        let device = device.map(str::to_owned);
        let said_so_far = || fs::read_to_string(said.path()).unwrap_or_default();
        let device = device.unwrap_or_else(|| panic!("it does not serve: {}", said_so_far()));
        Self { child, said, device }
    }

    /// True if the kernel swaps to it.
    pub fn is_on(&self) -> bool {
        fs::read_to_string("/proc/swaps").expect("the kernel's table").contains(&self.device)
    }

    /// Tells it to end.
    pub fn terminate(&self) {
        process::kill(self.child.id() as i32, libc::SIGTERM).expect("it is running");
    }

    /// Its output on standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(self.said.path()).expect("a file of ours")
    }

    /// Pages that were swapped out to it.
    pub fn swapped_out(&self) -> u64 {
        let status = Command::new(program("uzswap")).args(["status", "--json"]).output();
        let status = status.expect("the program is built").stdout;
        let status: serde_json::Value = serde_json::from_slice(&status).expect("it is JSON");
        assert_eq!(status[0]["keeper"]["pid"], self.child.id());
        status[0]["stats"]["pages_swapped_out"].as_u64().expect("a number")
    }
}

/// A run that ended.
pub struct Finished {
    /// Status, standard output and error.
    pub output: Output,
    /// The report.
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

    /// Panics with its output unless it ended with `code`.
    pub fn assert_code(&self, code: i32) {
        let (stdout, stderr) = (self.stdout(), self.stderr());
        assert_eq!(self.code(), Some(code), "stdout:\n{stdout}\nstderr:\n{stderr}");
    }

    /// Panics unless as many `processes` of `churn` found every byte right, and none was refused.
    pub fn assert_whole(&self, processes: usize) {
        self.assert_code(0);
        let stdout = self.stdout();
        assert_eq!(stdout.matches("every byte right").count(), processes, "{stdout}");
        for lost in ["decompress_fail", "read_fail", "request_errors"] {
            assert_eq!(self.statistic(lost), 0, "{lost}: {}", self.report);
        }
    }
}
