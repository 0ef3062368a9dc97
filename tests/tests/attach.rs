//! `uzswap attach`: a server that runs already, and has clients, in less memory.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use uzswap_tests::{Limited, Machine, program, wait_for};

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
        // It is whichever of Redis' programs it is called by.
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

    /// Text with few repetitions, the same for the same key.
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
        // Without waiting for each answer.
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

    /// Every `step`th value is what was set.
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
        // Errors: it has ended.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn uzswap(arguments: &[&str]) -> Command {
    let mut command = Command::new(program("uzswap"));
    command.args(arguments).stdin(Stdio::null());
    command
}

/// What limits the group, as its file says.
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
        assert!(attach.try_wait().unwrap().is_none(), "it ended");
    }
    redis.check(50);
    let second = uzswap(&["attach", "--cgroup", &group, "--memory", "200M"]).output().unwrap();
    assert_eq!(second.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&second.stderr).contains("attached already"));

    let detached = uzswap(&["detach", "--cgroup", &group]).output().unwrap();
    assert!(detached.status.success(), "{detached:?}");
    assert!(attach.wait().unwrap().success());
    assert_eq!(limit(&folder), before);
    redis.check(7);

    // Killed, its keeper puts the limit back.
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
fn what_cannot_be_attached_to_is_one_line_and_nothing_changes() {
    let Some(machine) = Machine::take() else { return };
    let none = "/no/such/group";
    let own = std::process::id().to_string();
    let cases: [(&[&str], &str); 6] = [
        (&["attach", "--cgroup", none, "--memory", "64M"], "is no group with a memory controller"),
        (&["attach", "--cgroup", "/", "--memory", "64M"], "the whole machine; use serve"),
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
