//! Cold pages in a store: unchanged programs in a part of their memory, and a store that fails
//! under them.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use uzswap_remote::testing::{Server, has_server};
use uzswap_tests::{
    Machine, Run, as_nobody, forking_heap, is_full, is_over_ublk, program, skip, wait_for,
};

/// A heap with this number of pages, each half noise. It waits for a line, and then compares all
/// pages.
const HEAP: &str = r"
import hashlib, random, sys
count = int(sys.argv[1])
def content():
    noise = random.Random(7)
    return (noise.randbytes(1900) + bytes(2100) for _ in range(count))
def digest(pages):
    sums = hashlib.md5()
    for page in pages: sums.update(page)
    return sums.hexdigest()
pages = list(content())
print('filled', flush=True)
sys.stdin.readline()
print(digest(pages) == digest(content()), flush=True)
";

/// The number of the heap's pages, and the memory of the run, which is a quarter of the heap.
fn sizes() -> (&'static str, &'static str) {
    if is_full() { ("250000", "256M") } else { ("60000", "64M") }
}

/// True if this machine has a server. Otherwise prints a message.
fn is_ready() -> bool {
    if !has_server() {
        skip("no server: ./setup tests installs it");
    }
    has_server()
}

/// A command in a folder with uzswap, as nobody if this is root.
fn command(folder: &Path, options: &[&str], program: &[&str]) -> Command {
    let mut command = as_nobody(folder);
    command.arg(folder.join("uzswap")).args(["run", "--in-process", "--memory", sizes().1]);
    command.args(options).arg("--").args(program);
    command.current_dir(folder).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The program, after it has filled its heap.
struct Heap {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Heap {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        if line != "filled\n" {
            let output = child.wait_with_output().unwrap();
            panic!("{line}{}", String::from_utf8_lossy(&output.stderr));
        }
        Self { child, out }
    }

    /// Lets the program compare all pages. Returns its lines, and its output at the end.
    fn compare(mut self) -> (String, Output) {
        self.child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let mut text = String::new();
        self.out.read_line(&mut text).unwrap();
        (text, self.child.wait_with_output().unwrap())
    }

    /// Panics if a page was wrong. Returns the report.
    fn assert_right(self) -> String {
        let (text, output) = self.compare();
        assert!(output.status.success() && text == "True\n", "{text}{output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

#[test]
fn a_heap_of_four_times_its_memory_beside_a_disk_and_a_store() {
    if !is_ready() {
        return;
    }
    let (server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let store = server.backing("max=2G&client=heap");
    let file = folder.path().join("report");
    let options = ["--backing", &store, "--report", file.to_str().unwrap()];
    let heap = Heap::start(command(folder.path(), &options, &["python3", "-c", HEAP, sizes().0]));
    assert!(server.keys("uz:heap:*").len() > 50, "{:?}", server.keys("uz:heap:*"));
    let said = heap.assert_right();
    assert!(said.contains("  remote    ") && said.contains("0 segments lost"), "{said}");
    let report = std::fs::read_to_string(file).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    let figure = |name: &str| report["remote"][name].as_u64().unwrap();
    assert!(figure("peak") > 16 << 20 && figure("written") >= figure("peak"), "{report}");
    assert!(figure("reads") > 1000 && figure("read_ns_p50") > 1000, "{report}");
    assert!(figure("read_ns_p99") >= figure("read_ns_p50"), "{report}");
    assert_eq!((figure("errors"), figure("lost")), (0, 0), "{report}");
    // A run that ends removes its segments.
    assert_eq!(server.keys("uz:*"), [""; 0]);
}

#[test]
fn a_heap_that_its_disk_has_no_room_for_is_at_the_store_alone() {
    if !is_ready() {
        return;
    }
    let (server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let _replica = Server::replica_of(&server);
    let store = server.backing("max=2G");
    let disk = "/var/tmp:8M";
    let options = ["--backing", disk, "--backing", &store, "--remote-copies", "1"];
    let heap = Heap::start(command(folder.path(), &options, &["python3", "-c", HEAP, sizes().0]));
    assert!(server.value_bytes() > 16 << 20, "{}", server.value_bytes());
    heap.assert_right();
}

#[test]
fn a_store_that_is_killed_costs_a_program_time_alone() {
    if !is_ready() {
        return;
    }
    let (mut server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let store = server.backing("");
    let options = ["--backing", &store];
    let heap = Heap::start(command(folder.path(), &options, &["python3", "-c", HEAP, sizes().0]));
    server.kill();
    heap.assert_right();
}

#[test]
fn a_page_that_the_store_has_lost_ends_its_program_with_the_reason() {
    if !is_ready() {
        return;
    }
    let (server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let _replica = Server::replica_of(&server);
    let store = server.backing("max=2G&copies=1&timeout=2");
    let options = ["--backing", "/var/tmp:8M", "--backing", &store];
    let heap = Heap::start(command(folder.path(), &options, &["python3", "-c", HEAP, sizes().0]));
    server.ask(&["FLUSHALL"]);
    let (text, output) = heap.compare();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((text.as_str(), output.status.code()), ("", Some(128 + 6)), "{said}");
    assert!(said.contains("check the disk, or the store of --backing"), "{said}");
}

#[test]
fn forked_processes_have_the_pages_that_only_the_store_had() {
    if !is_ready() {
        return;
    }
    let (server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let _replica = Server::replica_of(&server);
    let store = server.backing("max=2G&copies=1");
    let mut command = as_nobody(folder.path());
    command.arg(folder.path().join("uzswap")).args(["run", "--in-process", "--memory", "40M"]);
    command.args(["--compressor", "lz4", "--backing", "/var/tmp:4M", "--backing", &store, "--"]);
    let file = folder.path().join("file");
    command.args(["python3", "-c", &forking_heap()]).arg(&file).current_dir(folder.path());
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn a_store_that_is_not_suitable_is_refused_before_the_command_starts() {
    if !is_ready() {
        return;
    }
    let (server, folder) = (Server::start(&[]), tempfile::tempdir_in("/var/tmp").unwrap());
    let refused = |options: &[&str], part: &str| {
        let output = command(folder.path(), options, &["echo", "started"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.stdout.is_empty() && !output.status.success(), "{options:?}: {said}");
        assert!(said.contains(part) && said.trim_end().lines().count() == 1, "{options:?}: {said}");
    };
    let store = server.backing("");
    refused(&["--backing", "valkey://127.0.0.1:1"], "check that the server runs");
    refused(&["--backing", "valkey://me:word@127.0.0.1"], "--remote-password-file");
    refused(&["--backing", "none", "--backing", &store], "name a folder and a size, too");
    refused(&["--remote-copies", "1"], "--remote-copies is for a store");
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    refused(&["--backing", &store], "set it to noeviction");
    assert_eq!(server.keys("*"), [""; 0], "nothing is left at the store");
}

/// The device: the daemon is killed while the store alone has some pages.
#[test]
fn the_device_goes_on_with_its_segments_when_its_daemon_is_killed() {
    let Some(_machine) = Machine::take() else { return };
    if !is_ready() {
        return;
    }
    let server = Server::start(&[]);
    let _replica = Server::replica_of(&server);
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let disk = format!("{}:8M", folder.path().join("disk").display());
    let store = server.backing("max=2G&copies=1&timeout=30");
    let metrics = folder.path().join("metrics").display().to_string();
    let places = ["--backing", &disk, "--backing", &store, "--metrics", &metrics];
    let options = [&["--memory", "64M", "--pool", "8M"][..], &places].concat();
    let run = Run::start(&options, &["python3", "-c", SWAPPING]);
    assert!(wait_for(|| run.statistic("remote_size") > 24 << 20), "{:?}", run.pid());
    figures_are_shown(&metrics);
    let daemon = uzswap_tests::process_of("daemon");
    if !is_over_ublk() {
        uzswap_sys::process::kill(daemon, 9).unwrap();
    }
    let finished = run.finish();
    finished.assert_code(0);
    assert_eq!(finished.stdout(), "True\n");
    assert!(finished.statistic("remote_reads") > 0, "{}", finished.report);
    assert!(wait_for(|| server.keys("uz:*").is_empty()), "it takes its segments along");
}

/// The store's figures on the screen and in a scrape. Prometheus' own program checks the scrape.
fn figures_are_shown(metrics: &str) {
    let top = Command::new(program("uzswap")).args(["top", "--once"]).output().unwrap();
    let top = String::from_utf8(top.stdout).unwrap();
    let is_line = |line: &str| line.starts_with("remote ") && line.contains(" there, up; ");
    assert!(top.lines().any(is_line) && top.lines().count() <= 24, "{top}");
    let mut stream = UnixStream::connect(metrics).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").unwrap();
    let scraped = std::io::read_to_string(stream).unwrap();
    let (_, text) = scraped.split_once("\r\n\r\n").unwrap();
    for part in ["uzswap_remote_read_seconds_bucket{le=", "\nuzswap_remote_bytes "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut promtool = promtool.spawn().expect("prometheus is installed by ./setup tests");
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let checked = promtool.wait_with_output().unwrap();
    assert!(checked.status.success() && checked.stderr.is_empty(), "{checked:?}");
}

/// Fills a heap of 200 MB, waits, and compares it.
const SWAPPING: &str = r"
import hashlib, random, time
def content():
    noise = random.Random(7)
    return (noise.randbytes(1900) + bytes(2100) for _ in range(50000))
def digest(pages):
    sums = hashlib.md5()
    for page in pages: sums.update(page)
    return sums.hexdigest()
pages = list(content())
time.sleep(5)
print(digest(pages) == digest(content()))
";
