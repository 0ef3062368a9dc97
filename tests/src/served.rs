//! A `uzswap serve` of a test.

use crate::{program, transport_options};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use uzswap_sys::process;

/// A running `serve`.
pub struct Served {
    /// Its process.
    pub child: Child,
    /// Its output.
    said: tempfile::NamedTempFile,
    device: String,
}

impl Served {
    /// Starts `serve` with options, and waits until it serves.
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

    /// True if the kernel swaps to its device.
    pub fn is_on(&self) -> bool {
        fs::read_to_string("/proc/swaps").expect("the kernel's table").contains(&self.device)
    }

    /// Sends SIGTERM to `serve`.
    pub fn terminate(&self) {
        process::kill(self.child.id() as i32, libc::SIGTERM).expect("it is running");
    }

    /// Its output on standard error.
    pub fn said(&self) -> String {
        fs::read_to_string(self.said.path()).expect("a file of ours")
    }

    /// Pages that the kernel has swapped out to it.
    pub fn swapped_out(&self) -> u64 {
        let status = Command::new(program("uzswap")).args(["status", "--json"]).output();
        let status = status.expect("the program is built").stdout;
        let status: serde_json::Value = serde_json::from_slice(&status).expect("it is JSON");
        assert_eq!(status[0]["keeper"]["pid"], self.child.id());
        status[0]["stats"]["pages_swapped_out"].as_u64().expect("a number")
    }
}
