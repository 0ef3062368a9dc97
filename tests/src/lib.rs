//! Shared by the end-to-end tests: the programs, one test at a time, and a machine that each test
//! must leave unchanged.

mod habit;
mod machine;
mod run;
mod served;
mod settings;

pub use habit::{finish_habit, habit_folder, run_habit};
pub use machine::Machine;
pub use run::{Finished, Gate, Run};
pub use served::Served;
pub use settings::{Afterwards, Limited, Setting, StrictCommit};
pub use uzswap_engine::testing::skip;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use uzswap_sys::process;

/// Time limit for actions that are short on an idle machine. In emulation, beside builds, two
/// minutes were too few.
const MOMENT: Duration = Duration::from_secs(8 * 60);

/// A program of this workspace, built with the same profile as this test.
pub fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let path = folder.join(name);
    assert!(path.exists(), "{} is not built: cargo build --workspace", path.display());
    path
}

/// A command that runs its arguments as an ordinary user, if this is root. The folder, which every
/// user may write, contains uzswap, its libraries and programs of these tests.
pub fn as_nobody(folder: &Path) -> Command {
    place_programs(folder);
    nobody()
}

/// Puts uzswap, its libraries and programs of these tests into a folder, and makes it writable for
/// all users.
pub fn place_programs(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).expect("a folder of the test's");
    let names = ["uzswap", "libuzswap_preload.so", "libuzswap_agent.so", "absent", "torture"];
    copy_programs(&names.map(program), folder);
}

/// Copies programs to a folder, or one to a file. This process must not write them: a child that
/// another thread forks meanwhile would hold the file open, and the kernel would execute no program
/// that is open for writing.
pub fn copy_programs(programs: &[PathBuf], to: &Path) {
    let copied = Command::new("cp").args(programs).arg(to).status();
    assert!(copied.expect("cp").success(), "no room for programs in {}", to.display());
}

/// A command that runs its arguments as an ordinary user, if this is root.
pub fn nobody() -> Command {
    nobody_in(&[])
}

/// As [`nobody`], by a command that runs another one, such as `unshare --ipc`.
pub fn nobody_in(outer: &[&str]) -> Command {
    let words = [outer, &["setpriv"]].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    if rustix::process::geteuid().is_root() {
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]);
    }
    command.env_remove("XDG_RUNTIME_DIR").env_remove("LD_PRELOAD");
    command
}

/// Runs a command. Returns its output, and the peak of the anonymous memory of the command and its
/// descendants together, in bytes, sampled every few milliseconds.
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

/// Before glibc 2.34, functions of the C library are in these libraries, too.
pub const OLD_LIBRARIES: [&str; 2] = ["-ldl", "-lrt"];

/// The start of a C program with a system call instruction of its own.
pub const OWN_CALL: &str = include_str!("../processor.h");

/// Compiles a program in C to FOLDER/program.
pub fn compile(folder: &Path, text: &str, options: &[&str]) {
    fs::write(folder.join("program.c"), text).expect("room for a file");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "program.c", "-o", "program"]).args(options).args(OLD_LIBRARIES);
    assert!(compiler.current_dir(folder).status().expect("a compiler").success());
}

/// The start of a Python program. It puts `pages` pieces of 600 bytes on its heap, which two forks
/// read and write.
pub fn forks(pages: usize) -> String {
    const HEAP: &str =
        "import hashlib, os\npages = [bytes([i % 251]) * 600 + str(i).encode() for i in";
    const FORKS: &str = r#"
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
"#;
    format!("{HEAP} range({pages})]{FORKS}")
}

/// A Python program with a heap of 70 MB. Forks, threads, files and other programs read the heap.
/// The program's argument is a file to write.
pub fn forking_heap() -> String {
    const READERS: &str = r#"
import ctypes, errno, subprocess, sys, threading
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
    forks(110_000) + READERS
}

/// C source with `count` functions. `file` makes the functions of several files differ.
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

/// The transport to test, as options of `run` and `serve`: from the environment (see
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

/// True if tests that take minutes are wanted (`./check --full`).
pub fn is_full() -> bool {
    std::env::var_os("UZSWAP_FULL").is_some()
}

/// If this test takes minutes and the caller does not want such tests, prints a message and returns
/// true.
pub fn is_slow_and_skipped() -> bool {
    if !is_full() {
        skip("it takes minutes, `./check --full` runs it");
    }
    !is_full()
}

/// The seconds that a program works during a test, as its argument. The environment has a factor
/// for places where processes start slowly, such as emulation.
pub fn seconds(count: u32) -> String {
    (count * slowness()).to_string()
}

/// The factor.
pub fn slowness() -> u32 {
    std::env::var("UZSWAP_TEST_SLOWNESS").map_or(1, |text| text.parse().expect("a number"))
}

/// Calls `done` every few milliseconds until it is true or the time limit is over. True if it was.
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

/// True if the kernel has any swap area.
pub fn is_swapping() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

/// The folder of the machine's one cache.
pub const FOLDER: &str = "/run/uzswap";

/// The content of its state file; `None` if there is no file.
pub fn state() -> Option<serde_json::Value> {
    serde_json::from_slice(&fs::read(Path::new(FOLDER).join("state.json")).ok()?).ok()
}

/// The process number of the keeper or the daemon.
pub fn process_of(role: &str) -> i32 {
    let state = state().expect("a cache is running");
    state[role]["pid"].as_i64().expect("it has been started") as i32
}
