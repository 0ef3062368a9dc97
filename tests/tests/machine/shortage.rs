//! `uzswap serve` while the whole virtual machine runs out of memory: `cargo run -p xtask -- vm
//! --env UZSWAP_TEST_SHORTAGE=20 -- shortage`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Instant;
use uzswap_tests::{Machine, process_of, program, skip, wait_for};

/// Has pages with known content, and checks them when told to.
const KEEPER: &str = "import sys\n\
                      a=[b'page %d ' % i * 400 for i in range(16384)]\n\
                      print('filled', flush=True)\n\
                      for line in sys.stdin:\n\
                      \x20 right=all(a[i] == b'page %d ' % i * 400 for i in range(16384))\n\
                      \x20 print(right, flush=True)";

/// Allocates incompressible pages, all different, until it is killed.
const HUNGRY: &str = "import os\n\
                      noise=os.urandom(1 << 20)\n\
                      a=[]\n\
                      while True:\n\
                      \x20 a.append(bytearray(noise))\n\
                      \x20 for i in range(0, 1 << 20, 4096):\n\
                      \x20   a[-1][i:i+8]=(len(a) << 20 | i).to_bytes(8, 'little')";

/// A process that prints a line for each line of its input.
struct Kept {
    child: Child,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Kept {
    fn start() -> Self {
        let mut child = Command::new("python3")
            .args(["-c", KEEPER])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs");
        let said = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut kept = Self { child, said };
        assert_eq!(kept.line(), "filled");
        // The kernel must choose the process that asks for more memory.
        let path = format!("/proc/{}/oom_score_adj", kept.child.id());
        std::fs::write(path, "-900").expect("root can write it");
        kept
    }

    fn line(&mut self) -> String {
        self.said.next().expect("it goes on").expect("it speaks")
    }

    fn is_right(&mut self) -> bool {
        let stdin = self.child.stdin.as_mut().expect("piped");
        writeln!(stdin, "look").expect("it listens");
        self.line() == "True"
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_daemon_survives_a_machine_without_memory() {
    let Ok(rounds) = std::env::var("UZSWAP_TEST_SHORTAGE") else {
        skip("the memory of this machine is not ours to use up");
        return;
    };
    let Some(machine) = Machine::take() else { return };
    let said = tempfile::NamedTempFile::new().expect("a temporary file");
    let mut serve = Command::new(program("uzswap"))
        .args(["serve", "--size", "1G", "--pool", "192M", "--backing", "none"])
        .stdout(Stdio::null())
        // This output must not appear in the middle of a line, where it would be taken for the
        // test's result.
        .stderr(said.reopen().expect("it is there"))
        .spawn()
        .expect("uzswap runs");
    let is_on = || std::fs::read_to_string("/proc/swaps").is_ok_and(|text| text.contains("32767"));
    assert!(wait_for(is_on), "swapping is not on");
    let daemon = process_of("daemon");
    let mut kept = Kept::start();
    for round in 0..rounds.parse().expect("a number of rounds") {
        let began = Instant::now();
        let hungry = Command::new("python3").args(["-c", HUNGRY]).status().expect("python3 runs");
        // The kernel has killed the process or refused it memory.
        assert!(!hungry.success(), "round {round}");
        assert_eq!(process_of("daemon"), daemon, "round {round}");
        assert!(uzswap_sys::process::start_time(daemon).is_some(), "round {round}: no daemon");
        assert!(kept.is_right(), "round {round}: a page is not as it was");
        println!("round {round}: ended after {} s", began.elapsed().as_secs());
    }
    drop(kept);
    uzswap_sys::process::kill(serve.id() as i32, libc::SIGTERM).unwrap();
    let said = || std::fs::read_to_string(said.path()).unwrap_or_default();
    assert!(serve.wait().unwrap().success(), "{}", said());
    println!("{}", said());
    machine.assert_as_before();
}
