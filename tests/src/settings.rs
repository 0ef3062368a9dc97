//! Changes of the machine that are undone at the end, even if the test fails.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use uzswap_sys::cgroup::{Group, Hierarchy};

/// A shell script that runs when this value is dropped, or when this process ends in any way.
pub struct Afterwards {
    shell: Child,
}

impl Afterwards {
    /// Makes `script` run at the end, with `arguments` as `$1` and so on.
    pub fn run(script: &str, arguments: &[&str]) -> Self {
        // The shell's standard input ends with this process. The shell has its own process group,
        // so that keys of the terminal do not end it.
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

/// A value under /proc/sys or /sys that is restored at the end, even if the test fails.
pub struct Setting {
    _restore: Afterwards,
}

impl Setting {
    /// Writes `value`; `None` if there is no such file.
    pub fn set(path: &str, value: &str) -> Option<Self> {
        let before = fs::read_to_string(path).ok()?;
        let restore = Afterwards::run("echo \"$2\" > \"$1\"", &[path, before.trim_end()]);
        fs::write(path, value).expect("root can write it");
        Some(Self { _restore: restore })
    }
}

/// Strict accounting of memory: the kernel promises no more memory than it has promised now, plus
/// the swap space. So it refuses to read swapped pages back, but processes may still ask for as
/// much memory as the swap space has.
pub struct StrictCommit {
    _strict: Setting,
    _limit: Setting,
    // Dropped last: writing the limit sets the ratio, too.
    _ratio: Setting,
}

impl StrictCommit {
    /// Begins strict accounting, which ends when the value is dropped.
    pub fn begin() -> Self {
        let is_beside = std::env::var_os("UZSWAP_TEST_BESIDE").is_some();
        assert!(!is_beside, "other tests would get no memory: name this in xtask/src/lanes.rs");
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
    /// Makes a group limited to `bytes`.
    pub fn new(bytes: u64) -> Self {
        let hierarchy = Hierarchy::find().expect("doctor found one");
        let group = hierarchy.top().make_child("uzswap-tests").expect("root can make a group");
        Self::of(group, bytes)
    }

    /// Makes a group limited to `bytes` that tests with the machine do not take for a trace. `None`
    /// if this process may make no group.
    pub fn beside(bytes: u64) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("limited-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let group = Hierarchy::find()?.top().make_child(&name).ok()?;
        Some(Self::of(group, bytes))
    }

    fn of(group: Group, bytes: u64) -> Self {
        let script = "while ! rmdir \"$1\"; do \
                      kill -9 $(cat \"$1/cgroup.procs\"); sleep 0.1; done 2>/dev/null";
        let remove = Afterwards::run(script, &[&group.path().display().to_string()]);
        group.set_limit(bytes, 0).expect("the group is ours");
        Self { group, _remove: remove }
    }

    /// Starts a command in the group.
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
