//! `uzswap serve`: every page is back before the device goes.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use uzswap_sys::process;
use uzswap_tests::{Limited, Machine, Served, StrictCommit, program, transport_options, wait_for};

/// Has 96 MiB of text with numbers, and checks each page when told to.
const KEEPER: &str = "import sys\n\
                      a=[b'page %d ' % i * 400 for i in range(24576)]\n\
                      print('filled', flush=True)\n\
                      sys.stdin.readline()\n\
                      print(all(a[i] == b'page %d ' % i * 400 for i in range(24576)))";

#[test]
fn sigterm_reads_every_page_back_before_the_device_goes() {
    let Some(_machine) = Machine::take() else { return };
    let mut served = Served::start(&["--size", "1G", "--pool", "400M", "--backing", "none"]);
    assert!(served.is_on());
    let limited = Limited::new(32 << 20);
    let mut keeper = limited.start(&["python3", "-c", KEEPER]);
    let mut said = BufReader::new(keeper.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "filled");
    assert!(wait_for(|| served.swapped_out() > 12_000));
    // Enough to read them back.
    limited.group.set_limit(1 << 30, 0).unwrap();

    // The kernel refuses to switch an area off without enough memory: then it stays served.
    {
        let _strict = StrictCommit::begin();
        served.terminate();
        let refused = || served.said().contains("free memory and try again");
        assert!(wait_for(refused), "{}", served.said());
        assert!(served.is_on(), "its pages have nowhere to go");
    }
    served.terminate();
    assert!(wait_for(|| !served.is_on()));
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
    drop(keeper.stdin.take());
    assert_eq!(said.next().unwrap().unwrap(), "True");
    assert!(keeper.wait().unwrap().success());
}

#[test]
fn systemd_is_told_when_the_kernel_swaps_to_it() {
    let Some(_machine) = Machine::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut served = Command::new(program("uzswap"))
        .args(["serve", "--size", "64M", "--pool", "32M", "--backing", "none"])
        .args(transport_options())
        .env("NOTIFY_SOCKET", &path)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = [0; 256];
    let bytes = socket.recv(&mut said).unwrap();
    let areas = fs::read_to_string("/proc/swaps").unwrap();
    let said = String::from_utf8_lossy(&said[..bytes]);
    let device = said.lines().find_map(|line| line.strip_prefix("STATUS=serving ")).unwrap();
    assert!(
        areas.contains(device) && said.lines().any(|line| line == "READY=1"),
        "{said}, {areas}"
    );
    process::kill(served.id() as i32, libc::SIGTERM).unwrap();
    assert_eq!(served.wait().unwrap().code(), Some(0));
}
