//! `uzswap serve`: every page is back before the device goes.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Stdio};
use uzswap_sys::process;
use uzswap_tests::{
    Limited, Machine, Served, StrictCommit, is_over_ublk, program, transport_options, wait_for,
};

/// Keeps 96 MiB of text with numbers, and checks each page when told to.
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
    // Enough to read the pages back.
    limited.group.set_limit(1 << 30, 0).unwrap();

    // Without enough memory the kernel refuses to switch an area off. Then the daemon must go on
    // serving the area.
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

/// Keeps 700 MiB of text with numbers. For each line of its input, makes the kernel page the text
/// out. At the end of the input, checks each page. Before each page-out it reads all pages, because
/// the kernel does not page out again a page that was not used since.
const PAGED_OUT: &str = r"
import mmap, sys, time
PAGES, MADV_PAGEOUT = 180000, 21
memory = mmap.mmap(-1, PAGES * 4096)
def page(i): return (b'page %d ' % i * 512)[:4096].ljust(4096)
for i in range(PAGES): memory[i * 4096:(i + 1) * 4096] = page(i)
for line in sys.stdin:
    assert len(memory[::4096]) == PAGES
    for _ in range(20):
        memory.madvise(MADV_PAGEOUT)
        time.sleep(.1)
    print('out', flush=True)
print(all(memory[i * 4096:(i + 1) * 4096] == page(i) for i in range(PAGES)))
";

/// The kernel's areas over loop devices, with the part of the disk under each.
fn areas() -> Vec<(String, Range<u64>)> {
    let listed = uzswap_sys::swap::areas().unwrap();
    let part = |path: &Path| {
        let folder = Path::new("/sys/block").join(path.file_name()?).join("loop");
        let number = |name| fs::read_to_string(folder.join(name)).ok()?.trim().parse().ok();
        let (start, bytes): (u64, u64) = (number("offset")?, number("sizelimit")?);
        Some((path.display().to_string(), start..start + bytes))
    };
    listed.iter().filter_map(|area| part(&area.path)).collect()
}

#[test]
fn no_two_areas_are_over_the_same_part_after_somebody_s_swapoff() {
    let Some(_machine) = Machine::take() else { return };
    let mut served = Served::start(&["--size", "17001M", "--pool", "600M", "--backing", "none"]);
    let mut command = Command::new("python3");
    command.args(["-c", PAGED_OUT]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = command.spawn().unwrap();
    let mut said = BufReader::new(program.stdout.take().unwrap()).lines();
    let mut page_out = || {
        program.stdin.as_ref().unwrap().write_all(b"\n").unwrap();
        assert_eq!(said.next().unwrap().unwrap(), "out");
    };
    page_out();
    let before = areas();
    assert!(is_over_ublk() || before.len() >= 2, "{before:?}");
    let first = &uzswap_sys::swap::areas().unwrap()[0].path;
    assert!(Command::new("swapoff").arg(first).status().unwrap().success());
    page_out();
    page_out();
    let after = areas();
    let parts: Vec<_> = after.iter().map(|(_, part)| part).collect();
    for (at, one) in parts.iter().enumerate() {
        let is_apart = |other: &&Range<u64>| one.end <= other.start || other.end <= one.start;
        assert!(parts[..at].iter().all(is_apart), "{after:?}");
    }
    let is_used = parts.iter().any(|part| part.start == 0);
    assert!(is_over_ublk() || is_used, "its part is used again: {after:?}");
    drop(program.stdin.take());
    assert_eq!(said.next().unwrap().unwrap(), "True");
    assert!(program.wait().unwrap().success());
    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
}
