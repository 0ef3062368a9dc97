//! A virtual machine sleeps while pages are swapped out: `cargo run -p xtask -- vm --image debian
//! --env UZSWAP_TEST_SUSPEND=1 -- suspend`; elsewhere the test is skipped.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use uzswap_tests::{Limited, Machine, Served, process_of, program, skip, wait_for};

/// Keeps 40 MiB of text with numbers, and checks each page when told to.
const KEEPER: &str = "import sys\n\
                      a=[b'page %d ' % i * 400 for i in range(10240)]\n\
                      print('filled', flush=True)\n\
                      sys.stdin.readline()\n\
                      print(all(a[i] == b'page %d ' % i * 400 for i in range(10240)))";

/// The machine, if it may sleep.
fn take() -> Option<Machine> {
    if std::env::var_os("UZSWAP_TEST_SUSPEND").is_none() {
        skip("this machine should stay awake");
        return None;
    }
    leave_shared_folder(Path::new("/var/tmp/uzswap-suspend"));
    Machine::take()
}

/// Continues from a copy on the disk: folders that a virtual machine shares are gone after it has
/// slept.
fn leave_shared_folder(folder: &Path) {
    let own = std::env::current_exe().unwrap();
    if own.starts_with(folder) {
        return;
    }
    fs::create_dir_all(folder.join("deps")).unwrap();
    let copy = folder.join("deps/suspend");
    fs::copy(&own, &copy).unwrap();
    fs::copy(program("uzswap"), folder.join("uzswap")).unwrap();
    let arguments = std::env::args_os().skip(1);
    panic!("{}", Command::new(copy).args(arguments).current_dir(folder).exec());
}

/// Puts the machine to sleep until its clock wakes it. True if it slept.
fn sleep() -> bool {
    let count = || {
        let stats = fs::read_to_string("/sys/power/suspend_stats/success").unwrap();
        stats.trim().parse::<u32>().unwrap()
    };
    let before = count();
    let output = Command::new("rtcwake").args(["-u", "-m", "mem", "-s", "40"]).output().unwrap();
    println!("{output:?}");
    assert_eq!(output.status.success(), count() == before + 1);
    output.status.success()
}

#[test]
fn every_page_is_there_when_the_machine_wakes() {
    let Some(_machine) = take() else { return };
    let mut served = Served::start(&["--size", "256M", "--pool", "64M", "--backing", "none"]);
    let limited = Limited::new(16 << 20);
    let mut keeper = limited.start(&["python3", "-c", KEEPER]);
    let mut said = BufReader::new(keeper.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "filled");
    assert!(wait_for(|| served.swapped_out() > 5000));
    let daemon = process_of("daemon");
    // In a version whose keeper read a file of the daemon, the kernel gave up in four of seven
    // attempts.
    assert!((0..4).all(|_| sleep()));
    drop(keeper.stdin.take());
    assert_eq!(said.next().unwrap().unwrap(), "True");
    assert!(keeper.wait().unwrap().success());
    assert_eq!(process_of("daemon"), daemon);
    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
}
