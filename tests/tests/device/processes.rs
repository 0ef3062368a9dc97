//! Keeper and daemon are killed or slow while another process or the kernel waits for them.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_sys::process::kill;
use uzswap_tests::{
    FOLDER, Limited, Machine, Run, Served, is_over_ublk, process_of, program, seconds, state,
    wait_for,
};

/// Keeps 96 MiB of text with numbers, and checks each page when told to.
const HOLDER: &str = "import sys\n\
                      a=[b'page %d ' % i * 400 for i in range(24576)]\n\
                      print('filled', flush=True)\n\
                      sys.stdin.readline()\n\
                      print(all(a[i] == b'page %d ' % i * 400 for i in range(24576)), flush=True)";

/// A program in little memory. Most of its pages are swapped out.
struct Holder {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
    limited: Limited,
}

impl Holder {
    fn start(served: &Served) -> Self {
        let limited = Limited::new(32 << 20);
        let mut child = limited.start(&["python3", "-c", HOLDER]);
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(said.next().unwrap().unwrap(), "filled");
        assert!(wait_for(|| served.swapped_out() > 12_000));
        // Room to read the pages back.
        limited.group.set_limit(1 << 30, 0).unwrap();
        Self { child, said, limited }
    }

    /// Panics if a page has changed.
    fn assert_whole(mut self) {
        writeln!(self.child.stdin.as_mut().unwrap(), "look").unwrap();
        let said = self.said.next().map(Result::unwrap);
        assert_eq!(said.as_deref(), Some("True"), "{:?}", self.child.wait());
        assert!(self.child.wait().unwrap().success());
        drop(self.limited);
    }
}

/// Lets a process run only some milliseconds a second, until dropped.
struct Slowed {
    pid: i32,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Slowed {
    fn begin(pid: i32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = stop.clone();
        let thread = std::thread::spawn(move || {
            while !of_thread.load(Relaxed) {
                // An error means that the process has ended.
                let _ = kill(pid, libc::SIGSTOP);
                std::thread::sleep(Duration::from_millis(250));
                let _ = kill(pid, libc::SIGCONT);
                std::thread::sleep(Duration::from_millis(4));
            }
        });
        Self { pid, stop, thread: Some(thread) }
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.thread.take().unwrap().join().unwrap();
        let _ = kill(self.pid, libc::SIGCONT);
    }
}

fn listed() -> String {
    fs::read_to_string("/proc/swaps").unwrap()
}

/// A `serve` that has a program's pages, with a slow daemon.
fn served() -> (Served, Holder, Slowed) {
    let served = Served::start(&["--size", "256M", "--pool", "200M", "--backing", "none"]);
    let holder = Holder::start(&served);
    let slowed = Slowed::begin(process_of("daemon"));
    (served, holder, slowed)
}

/// Panics if the daemon ends while the kernel lists an area. Returns when the kernel lists no area.
fn watch_until_off(daemon: i32) {
    let is_off = || {
        let has_daemon = uzswap_sys::process::has_memory(daemon);
        let areas = listed();
        assert!(has_daemon || !areas.contains("/dev/"), "the daemon has ended before:\n{areas}");
        !areas.contains("/dev/")
    };
    assert!(wait_for(is_off), "{}", listed());
}

#[test]
fn a_keeper_killed_while_everything_is_read_back_takes_no_page_along() {
    let Some(machine) = Machine::take() else { return };
    let (mut served, holder, slowed) = served();
    served.terminate();
    std::thread::sleep(Duration::from_millis(800));
    assert!(served.is_on(), "it was too fast for this test");
    // Kills the keeper as systemd does after TimeoutStopSec. The process that takes over from it is
    // killed as well.
    let daemon = process_of("daemon");
    served.child.kill().unwrap();
    served.child.wait().unwrap();
    assert!(wait_for(|| process_of("keeper") != served.child.id() as i32));
    std::thread::sleep(Duration::from_millis(500));
    let _ = kill(process_of("keeper"), libc::SIGKILL);
    std::thread::sleep(Duration::from_secs(1));
    drop(slowed);
    watch_until_off(daemon);
    holder.assert_whole();
    assert!(wait_for(|| state().is_none()), "it is cleaned up");
    machine.assert_as_before();
}

#[test]
fn a_swapoff_by_somebody_else_that_is_under_way_is_waited_for() {
    let Some(machine) = Machine::take() else { return };
    let (mut served, holder, slowed) = served();
    let daemon = process_of("daemon");
    let mut other = Command::new("swapoff").arg("-a").spawn().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    assert!(served.is_on() && other.try_wait().unwrap().is_none(), "it was too fast");
    served.terminate();
    std::thread::sleep(Duration::from_secs(2));
    // This swapoff is killed before it is done. Our swapoff must continue.
    other.kill().unwrap();
    drop(slowed);
    watch_until_off(daemon);
    other.wait().unwrap();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
    holder.assert_whole();
    machine.assert_as_before();
}

#[test]
fn a_daemon_killed_while_the_last_run_s_pages_are_read_back_is_replaced() {
    let Some(machine) = Machine::take() else { return };
    let served = Served::start(&["--size", "256M", "--pool", "200M", "--backing", "none"]);
    if state().unwrap()["outlives_daemon"] == false {
        return;
    }
    let holder = Holder::start(&served);
    let daemon = process_of("daemon");
    let _slowed = Slowed::begin(daemon);
    served.terminate();
    std::thread::sleep(Duration::from_millis(800));
    assert!(served.is_on(), "it was too fast for this test");
    kill(daemon, libc::SIGKILL).unwrap();
    let mut served = served;
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
    holder.assert_whole();
    machine.assert_as_before();
}

/// The files below our mounted folder that a process has open, without the folder itself.
fn own_files(pid: i32) -> Vec<PathBuf> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    let disk = format!("{FOLDER}/disk");
    files.filter(|file| file.to_str().is_some_and(|file| file.starts_with(&disk))).collect()
}

/// Kills the daemons of a run while they make areas. Returns the number of kills, or `None` where
/// the device's transport makes areas otherwise.
fn kill_at_new_areas() -> Option<u64> {
    let churn = program("churn");
    let options = ["--memory", "64M", "--backing", "none", "--pool", "400M", "--size", "1G"];
    let run = Run::start(&options, &[churn.to_str().unwrap(), "300", &seconds(14), "2"]);
    // After nine consecutive kills in too short a time, the pages count as lost.
    let (mut kills, mut last_maker, mut of_maker) = (0, 0, 0);
    let began = Instant::now();
    let mut run = run;
    while !run.has_ended() && began.elapsed() < Duration::from_secs(60) {
        let Some(seen) = state().filter(|state| state["daemon"].is_object()) else { continue };
        let pid = |role: &str| seen[role]["pid"].as_i64().unwrap_or_default() as i32;
        let (daemon, maker) = (pid("daemon"), pid("area_maker"));
        // Neither a serving daemon nor a process with the connections has the daemon's file open.
        let open = [own_files(daemon), own_files(pid("keeper"))].concat();
        assert_eq!(open, Vec::<PathBuf>::new());
        of_maker = if maker == last_maker { of_maker } else { 0 };
        last_maker = maker;
        let is_made = maker > 0 && uzswap_sys::process::has_memory(maker);
        if seen["outlives_daemon"] == true && is_made && kills < 12 && of_maker < 3 {
            std::thread::sleep(Duration::from_micros(700 * kills));
            // The call fails if the daemon was killed already.
            let _ = kill(daemon, libc::SIGKILL);
            (kills, of_maker) = (kills + 1, of_maker + 1);
            let is_replaced = |state: serde_json::Value| state["daemon"]["pid"] != daemon;
            assert!(wait_for(|| state().is_none_or(is_replaced)), "no other was started");
        }
    }
    let over_ublk = state().is_some() && is_over_ublk();
    run.finish().assert_code(0);
    (!over_ublk).then_some(kills)
}

#[test]
fn a_daemon_killed_at_any_moment_of_a_new_area_keeps_nobody_waiting() {
    let Some(machine) = Machine::take() else { return };
    // Beside other work, a run may have made its areas before we look.
    let is_met = || kill_at_new_areas().is_none_or(|kills| kills > 0);
    assert!((0..5).any(|_| is_met()), "no area was met while it was made");
    machine.assert_as_before();
}

/// A run that waits until it is ended.
fn idle_run() -> Run {
    let options = ["--memory", "64M", "--backing", "none", "--pool", "64M", "--size", "64M"];
    let run = Run::start(&options, &["sleep", "600"]);
    run.wait_until_running();
    run
}

/// Joins the keeper like a run, and leaves.
fn take_part_and_leave() {
    let ask = format!(
        "{{\"Join\":{{\"run\":{{\"pid\":{},\"command\":\"x\",\"memory\":1}},\"options\":null}}}}\n",
        std::process::id()
    );
    let mut stream = std::os::unix::net::UnixStream::connect(format!("{FOLDER}/socket")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(ask.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().starts_with("{\"Joined\""));
    stream.write_all(b"\"Leave\"\n").unwrap();
    while !lines.next().unwrap().unwrap().contains("Left") {}
}

/// In an earlier version the keeper read a file that the daemon serves. While the daemon was
/// stopped, the kernel could not stop the keeper, and the machine could not sleep.
#[test]
fn a_keeper_does_not_wait_for_a_daemon_that_is_stopped() {
    let Some(machine) = Machine::take() else { return };
    let run = idle_run();
    let daemon = process_of("daemon");
    kill(daemon, libc::SIGSTOP).unwrap();
    // By now the keeper has asked the daemon for its room.
    std::thread::sleep(Duration::from_secs(1));
    take_part_and_leave();
    kill(daemon, libc::SIGCONT).unwrap();
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
    machine.assert_as_before();
}

#[test]
fn a_run_that_is_stopped_keeps_neither_others_nor_the_next_daemon_waiting() {
    let Some(machine) = Machine::take() else { return };
    let run = idle_run();
    run.signal(libc::SIGSTOP);
    // So often that the messages about it fill the run's socket.
    for _ in 0..600 {
        take_part_and_leave();
    }
    if state().unwrap()["outlives_daemon"] == true {
        let daemon = process_of("daemon");
        kill(daemon, libc::SIGKILL).unwrap();
        assert!(wait_for(|| process_of("daemon") != daemon), "no other was started");
    }
    run.signal(libc::SIGCONT);
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
    machine.assert_as_before();
}

#[test]
fn without_much_room_the_kernel_is_left_few_slots() {
    let Some(machine) = Machine::take() else { return };
    // Slots must be few from the start, before any program is short of memory.
    let options = ["--memory", "64M", "--pool", "24M", "--backing", "none", "--size", "1G"];
    let run = Run::start(&options, &["sleep", "600"]);
    run.wait_until_running();
    let free = || {
        let areas = uzswap_sys::swap::areas().unwrap();
        areas.iter().map(|area| area.bytes - area.used).sum::<u64>()
    };
    let is_kept = || free() <= run.statistic("room_size") / 2 + (4 << 20);
    assert!(wait_for(is_kept), "{} free, {} room", free(), run.statistic("room_size"));
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
    machine.assert_as_before();
}

#[test]
fn another_user_cannot_take_the_lock() {
    let Some(machine) = Machine::take() else { return };
    let run = idle_run();
    for name in ["lock", "state.json", "socket"] {
        let stranger = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups", "cat"])
            .arg(format!("{FOLDER}/{name}"))
            .output()
            .unwrap();
        assert!(!stranger.status.success(), "{name}");
    }
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
    machine.assert_as_before();
}

#[test]
fn pages_are_not_shared_unless_asked_for_and_a_new_daemon_keeps_the_choice() {
    let Some(machine) = Machine::take() else { return };
    let mut served = Served::start(&["--size", "256M", "--pool", "200M", "--backing", "none"]);
    let parameter = format!("{FOLDER}/mnt/parameters/same_pages_enabled");
    assert_eq!(fs::read_to_string(&parameter).unwrap(), "N\n");
    fs::write(&parameter, "Y").unwrap();
    if state().unwrap()["outlives_daemon"] == true {
        let daemon = process_of("daemon");
        kill(daemon, libc::SIGKILL).unwrap();
        assert!(wait_for(|| process_of("daemon") != daemon), "no other was started");
        assert!(wait_for(|| fs::read_to_string(&parameter).is_ok_and(|value| value == "Y\n")));
    }
    served.terminate();
    assert_eq!(served.child.wait().unwrap().code(), Some(0), "{}", served.said());
    machine.assert_as_before();
}
