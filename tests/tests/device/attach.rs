//! `uzswap attach`: a running server with clients gets less memory, and its old limits at the
//! end.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use uzswap_sys::process;
use uzswap_tests::{Limited, Machine, is_slow_and_skipped, program, wait_for};

const MIB: u64 = 1 << 20;
const KEYS: usize = 520_000;
const BYTES: usize = 1000;

/// A Redis in a group, with one client.
struct Redis {
    _folder: tempfile::TempDir,
    server: Child,
    client: BufReader<UnixStream>,
}

impl Redis {
    fn start(limited: &Limited) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (server, socket) = (folder.path().join("redis-server"), folder.path().join("socket"));
        // The Redis tool acts as a server if it is called by this name.
        symlink("/usr/bin/redis-check-rdb", &server).unwrap();
        let [server, socket] = [&server, &socket].map(|path| path.to_str().unwrap());
        let server = limited.start(&[server, "--save", "", "--port", "0", "--unixsocket", socket]);
        let mut client = None;
        assert!(wait_for(|| {
            client = UnixStream::connect(socket).ok();
            client.is_some()
        }));
        Self { _folder: folder, server, client: BufReader::new(client.unwrap()) }
    }

    /// Sends a command and reads an answer of one line.
    fn ask(&mut self, command: &str) -> String {
        self.client.get_mut().write_all(format!("{command}\r\n").as_bytes()).unwrap();
        let mut line = String::new();
        self.client.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Text with few repetitions, which depends only on the key.
    fn value(key: usize) -> String {
        let mut text = String::with_capacity(BYTES + 16);
        let mut noise = key as u64 + 1;
        while text.len() < BYTES {
            noise = noise.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            text += &format!("field-{:x},", noise >> 44);
        }
        text.truncate(BYTES);
        text
    }

    fn fill(&mut self) {
        // Commands are pipelined, without waiting for each answer.
        for keys in (0..KEYS).collect::<Vec<_>>().chunks(500) {
            let commands: String =
                keys.iter().map(|key| format!("SET k{key} {}\r\n", Self::value(*key))).collect();
            self.client.get_mut().write_all(commands.as_bytes()).unwrap();
            for _ in keys {
                let mut line = String::new();
                self.client.read_line(&mut line).unwrap();
                assert_eq!(line, "+OK\r\n");
            }
        }
    }

    /// Checks every `step`th value.
    fn check(&mut self, step: usize) {
        for key in (0..KEYS).step_by(step) {
            assert_eq!(self.ask(&format!("GET k{key}")), format!("${BYTES}"));
            let mut value = String::new();
            self.client.read_line(&mut value).unwrap();
            assert_eq!(value.trim_end(), Self::value(key), "key {key}");
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        // The kill fails if the process has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn uzswap(arguments: &[&str]) -> Command {
    let mut command = Command::new(program("uzswap"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// The limit of the group, in its file.
fn limit(folder: &Path) -> String {
    let names = ["memory.high", "memory.limit_in_bytes"];
    let text = names.iter().find_map(|name| fs::read_to_string(folder.join(name)).ok());
    text.unwrap().trim().to_owned()
}

#[test]
fn a_server_goes_on_in_half_of_its_memory_and_gets_it_back() {
    let Some(machine) = Machine::take() else { return };
    let limited = Limited::new(2 << 30);
    let folder = limited.group.path().to_owned();
    let before = limit(&folder);
    let mut redis = Redis::start(&limited);
    redis.fill();
    let full = limited.group.usage().current;
    assert!(full > 550 * MIB, "{full}");

    let group = folder.display().to_string();
    let options = ["--memory", "300M", "--pool", "400M", "--backing", "none", "--quiet"];
    let start = || {
        let arguments = [&["attach", "--cgroup", &group][..], &options].concat();
        uzswap(&arguments).spawn().unwrap()
    };
    let mut attach = start();
    let is_small = || limited.group.usage().current < 305 * MIB;
    while !is_small() {
        redis.check(10_000);
        // Without a pause the program would wait for memory more than half of the time, and get
        // more memory.
        std::thread::sleep(Duration::from_millis(100));
        assert!(attach.try_wait().unwrap().is_none(), "it ended");
    }
    redis.check(50);
    let second = uzswap(&["attach", "--cgroup", &group, "--memory", "200M"]).output().unwrap();
    assert_eq!(second.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&second.stderr).contains(" limits "), "{second:?}");

    let detached = uzswap(&["detach", "--cgroup", &group]).output().unwrap();
    assert!(detached.status.success(), "{detached:?}");
    assert!(attach.wait().unwrap().success());
    assert_eq!(limit(&folder), before);
    redis.check(7);

    // After `attach` is killed, its keeper restores the limit.
    let mut attach = start();
    assert!(wait_for(|| limit(&folder) != before));
    attach.kill().unwrap();
    attach.wait().unwrap();
    assert!(wait_for(|| limit(&folder) == before), "{}", limit(&folder));
    redis.check(7);
    drop(redis);
    drop(limited);
    machine.assert_as_before();
}

#[test]
fn the_limit_of_a_program_that_waits_most_of_the_time_goes_up_again() {
    // On version 1 the kernel may take minutes to set a limit below a program's memory. The time
    // depends on the program's CPUs.
    if is_slow_and_skipped() {
        return;
    }
    let Some(machine) = Machine::take() else { return };
    let limited = Limited::new(1 << 30);
    let folder = limited.group.path().to_owned();
    // There are many processes, so that one of them waits at most times, even on slow CPUs.
    let mut program = limited.start(&[program("churn").to_str().unwrap(), "300", "1000", "16"]);
    assert!(wait_for(|| limited.group.usage().current > 290 * MIB));
    let group = folder.display().to_string();
    // An error means that the value is "max".
    let bytes = || limit(&folder).parse::<u64>().unwrap_or(u64::MAX);
    let before = bytes();
    let mut attach = uzswap(&["attach", "--cgroup", &group, "--memory", "48M", "--quiet"])
        .args(["--pool", "400M", "--backing", "none"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(attach.stderr.take().unwrap());
    let said = std::thread::spawn(move || {
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        (line, stderr)
    });
    let mut lowest = before;
    assert!(wait_for(|| {
        lowest = lowest.min(bytes());
        said.is_finished()
    }));
    let (line, _stderr) = said.join().unwrap();
    assert!(line.contains("it gets more for now"), "{line}");
    assert!(wait_for(|| bytes() > lowest), "{lowest} {}", bytes());
    let detached = uzswap(&["detach", "--cgroup", &group]).output().unwrap();
    assert!(detached.status.success() && attach.wait().unwrap().success(), "{detached:?}");
    assert_eq!(bytes(), before);
    program.kill().unwrap();
    program.wait().unwrap();
    drop(limited);
    machine.assert_as_before();
}

#[test]
fn a_process_among_others_is_paged_out_and_comes_back_whole() {
    let Some(machine) = Machine::take() else { return };
    // The last program of the pipe keeps its data until the input ends.
    let script = "(seq 20000000; cat) | tail -c 150000000 | md5sum";
    let mut shell = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let tree = || process::tree(shell.id() as i32);
    let resident = || tree().into_iter().filter_map(process::anonymous_bytes).sum::<u64>();
    assert!(wait_for(|| resident() > 140 * MIB), "{}", resident());
    let pid = shell.id().to_string();
    let mut attach = uzswap(&["attach", "--pid", &pid, "--memory", "32M", "--quiet"])
        .args(["--pool", "200M", "--backing", "none"])
        .spawn()
        .unwrap();
    assert!(wait_for(|| resident() < 34 * MIB), "{}", resident());
    let detached = uzswap(&["detach", "--pid", &pid]).output().unwrap();
    assert!(detached.status.success() && attach.wait().unwrap().success(), "{detached:?}");
    drop(shell.stdin.take());
    let sum = String::from_utf8(shell.wait_with_output().unwrap().stdout).unwrap();
    let expected = Command::new("sh").args(["-c", script]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(sum, String::from_utf8(expected.stdout).unwrap());
    machine.assert_as_before();
}

#[test]
fn no_limit_is_raised() {
    let Some(machine) = Machine::take() else { return };
    let limited = Limited::new(200 << 20);
    let group = limited.group.path().display().to_string();
    let refused = |output: Output, why: &str| {
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert_eq!(output.status.code(), Some(125), "{said}");
        assert!(said.lines().count() == 1 && said.contains(why), "{said}");
    };
    let arguments = ["attach", "--cgroup", &group, "--memory"];
    refused(uzswap(&arguments).arg("1G").output().unwrap(), "limited to 200 MiB already");
    let uzswap = program("uzswap");
    let shell = ["sh", "-c", "exec \"$0\" \"$@\" 2>&1", uzswap.to_str().unwrap()];
    let inside = [&shell, &arguments[..], &["64M"]].concat();
    refused(limited.start(&inside).wait_with_output().unwrap(), "own group");
    drop(limited);
    machine.assert_as_before();
}

#[test]
fn an_attach_that_is_refused_prints_one_line_and_changes_nothing() {
    let Some(machine) = Machine::take() else { return };
    let none = "/no/such/group";
    let own = std::process::id().to_string();
    let cases: [(&[&str], &str); 6] = [
        (&["attach", "--cgroup", none, "--memory", "64M"], "is no group with a memory controller"),
        (&["attach", "--cgroup", "/", "--memory", "64M"], "the whole machine; use `uzswap serve`"),
        (&["attach", "--pid", "999999999", "--memory", "64M"], "there is no process 999999999"),
        (&["attach", "--pid", &own, "--memory", "1"], "too little"),
        (&["detach", "--cgroup", none], "is no group with a memory controller"),
        (
            &["attach", "--unit", "no-such.service", "--memory", "64M"],
            "no-such.service is not running",
        ),
    ];
    for (arguments, why) in cases {
        let output = uzswap(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {said}");
        let is_missing = said.contains("systemctl:") && arguments.contains(&"--unit");
        assert!(said.lines().count() == 1 && (said.contains(why) || is_missing), "{said}");
    }
    machine.assert_as_before();
}
