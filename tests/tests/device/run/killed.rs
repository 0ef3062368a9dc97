//! Runs, keepers and daemons that are killed, or replaced by another version.

use super::{HUNGRY, LIMITS};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use uzswap_engine::testing::Noise;
use uzswap_tests::{
    FOLDER, Machine, Run, copy_programs, is_over_ublk, process_of, program, seconds, state,
    wait_for,
};

/// A run whose command has pages on the device and uses them all the time.
fn busy_run() -> Run {
    let script = format!("{HUNGRY}\nwhile True:\n  for x in a: x[0]");
    let run = Run::start(&LIMITS, &["python3", "-c", &script]);
    run.wait_until_running();
    let swapped = || run.statistic("pages_swapped_out") > 20_000;
    assert!(wait_for(swapped), "nothing was swapped");
    run
}

/// A run of two programs that rewrite and check three times their memory, partly on the device,
/// until the run is finished.
fn churning(options: &[&str]) -> Run {
    let run = Run::churn_with(options, "192", "2");
    assert!(wait_for(|| run.statistic("pages_swapped_out") > 5000), "nothing was swapped");
    run
}

/// Starts a run whose pages outlive a killed daemon. `None` before Linux 6.4, where pages do not
/// outlive the daemon.
fn outliving(options: &[&str]) -> Option<Run> {
    let run = churning(options);
    if state().unwrap()["outlives_daemon"] == false {
        println!("before Linux 6.4 a killed daemon's pages are lost: nothing was tried");
        drop(run.finish());
        return None;
    }
    Some(run)
}

#[test]
fn a_killed_daemon_is_replaced_and_no_page_is_lost() {
    let Some(machine) = Machine::take() else { return };
    let options =
        ["--memory", "64M", "--backing", "/var/tmp/uzswap-test.img:256M", "--pool", "24M"];
    let kills: u32 = std::env::var("UZSWAP_KILLS").map_or(12, |text| text.parse().unwrap());
    let Some(run) = outliving(&options) else { return };
    let mut noise = Noise::new(11);
    for kill in 0..kills {
        let daemon = process_of("daemon");
        uzswap_sys::process::kill(daemon, libc::SIGKILL).unwrap();
        assert!(wait_for(|| process_of("daemon") != daemon), "no other was started");
        // The next kill comes while the new daemon starts, or while it serves. Every eighth time
        // the keeper is killed without a pause.
        if kill % 8 != 7 {
            std::thread::sleep(Duration::from_millis(noise.below(400)));
        }
        if kill % 4 == 3 {
            let keeper = process_of("keeper");
            uzswap_sys::process::kill(keeper, libc::SIGKILL).unwrap();
            assert!(wait_for(|| process_of("keeper") != keeper), "the daemon started no other");
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    let run = run.finish();
    run.assert_code(0);
    assert_eq!(run.stdout().matches("every byte right").count(), 2, "{}", run.stdout());
    assert_eq!(run.statistic("decompress_fail") + run.statistic("read_fail"), 0, "{}", run.report);
    assert!(run.report["daemons_replaced"].as_u64().unwrap() > 0, "{}", run.report);
    machine.assert_as_before();
}

#[test]
fn a_daemon_that_cannot_start_is_tried_again_by_whichever_keeper() {
    let Some(machine) = Machine::take() else { return };
    let Some(run) = outliving(&LIMITS) else { return };
    // From now on no daemon can get the memory that it needs.
    let limit = |role: &str, bytes: &str| {
        let (pid, bytes) = (process_of(role).to_string(), format!("--as={bytes}"));
        // An error means that the process has just ended.
        let _ = Command::new("prlimit").args(["--pid", &pid, &bytes]).status().unwrap();
    };
    limit("keeper", "200000000:");
    let daemon = process_of("daemon");
    uzswap_sys::process::kill(daemon, libc::SIGKILL).unwrap();
    assert!(wait_for(|| process_of("daemon") != daemon), "no other was started");
    // Long enough for a few attempts. Then keepers are killed at random moments.
    std::thread::sleep(Duration::from_millis(700));
    let mut noise = Noise::new(17);
    for _ in 0..4 {
        let keeper = process_of("keeper");
        uzswap_sys::process::kill(keeper, libc::SIGKILL).unwrap();
        assert!(wait_for(|| process_of("keeper") != keeper), "the daemon started no other");
        std::thread::sleep(Duration::from_millis(noise.below(100)));
    }
    // Each process may just have started another process.
    for _ in 0..20 {
        limit("keeper", "unlimited:");
        limit("daemon", "unlimited:");
        std::thread::sleep(Duration::from_millis(50));
    }
    run.finish().assert_whole(2);
    machine.assert_as_before();
}

#[test]
fn a_daemon_goes_on_without_control_files_and_without_room_to_write_its_number_down() {
    let Some(machine) = Machine::take() else { return };
    let Some(run) = outliving(&LIMITS) else { return };
    let folder = run.mount();
    let unmounted = Command::new("umount").arg("--lazy").arg(&folder).status().unwrap();
    assert!(unmounted.success());
    fs::remove_dir(&folder).unwrap();
    // A folder in its place makes the write fail, as if there were no space.
    let fresh = Path::new(FOLDER).join("state.new");
    fs::create_dir(&fresh).unwrap();
    let daemon = process_of("daemon");
    uzswap_sys::process::kill(daemon, libc::SIGKILL).unwrap();
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(process_of("daemon"), daemon, "it was written down");
    let status = Command::new(program("uzswap")).arg("status").output().unwrap();
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("figures   none, as the control files are not mounted"), "{status}");
    fs::remove_dir(fresh).unwrap();
    fs::create_dir(folder).unwrap();
    run.finish().assert_whole(2);
    machine.assert_as_before();
}

#[test]
fn a_daemon_killed_while_its_area_is_switched_on_keeps_nobody_waiting() {
    let Some(machine) = Machine::take() else { return };
    let is_on = || fs::read_to_string("/proc/swaps").unwrap().contains("/dev/");
    // The keeper may be faster than this test.
    for _ in 0..20 {
        let run = Run::start(&LIMITS, &["sleep", &seconds(1)]);
        // The area is written down before it is switched on.
        let has_area = |state: serde_json::Value| state["areas"][0].is_object();
        while !state().is_some_and(has_area) && !is_on() {
            std::hint::spin_loop();
        }
        let (daemon, lasts) = (process_of("daemon"), state().unwrap()["outlives_daemon"] == true);
        uzswap_sys::process::kill(daemon, libc::SIGSTOP).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let waits = lasts && !is_on();
        let signal = if waits { libc::SIGKILL } else { libc::SIGCONT };
        uzswap_sys::process::kill(daemon, signal).unwrap();
        run.finish().assert_code(0);
        if waits || !lasts {
            return machine.assert_as_before();
        }
    }
    panic!("the daemon was never met before its area was on");
}

#[test]
fn another_version_goes_on_and_no_request_fails() {
    let Some(machine) = Machine::take() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let copy = folder.path().join("uzswap");
    copy_programs(&[program("uzswap")], &copy);
    let upgrade = |to: &Path| Command::new(to).arg("upgrade").output().unwrap();
    let none = upgrade(&copy);
    assert_eq!(none.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&none.stderr).contains("none is running"), "{none:?}");
    let Some(run) = outliving(&LIMITS) else { return };
    let mut descriptors = Vec::new();
    // Several upgrades in both directions: keeper and daemon notice each other's end in varying
    // order.
    for to in [&copy, &program("uzswap")].into_iter().cycle().take(9) {
        let upgraded = upgrade(to);
        assert!(upgraded.status.success(), "{upgraded:?}");
        let runs_it = |role| {
            let exe = fs::read_link(format!("/proc/{}/exe", process_of(role)));
            exe.is_ok_and(|exe| exe == *to)
        };
        assert!(runs_it("daemon") && wait_for(|| runs_it("keeper")));
        let folder = format!("/proc/{}/fd", process_of("daemon"));
        descriptors.push(fs::read_dir(folder).unwrap().count());
    }
    // The next daemon must not have descriptors that the last daemon opened. (A few vary.)
    assert!(descriptors[8] < descriptors[0] + 5, "{descriptors:?}");
    run.finish().assert_whole(2);
    machine.assert_as_before();
}

#[test]
fn a_keeper_killed_while_another_version_is_to_go_on_loses_nothing() {
    let Some(machine) = Machine::take() else { return };
    let Some(run) = outliving(&LIMITS) else { return };
    let mut noise = Noise::new(5);
    for _ in 0..16 {
        let keeper = process_of("keeper");
        let mut upgrade = Command::new(program("uzswap"))
            .arg("upgrade")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(noise.below(60)));
        // An error means that the keeper has ended, as it does after an upgrade.
        let _ = uzswap_sys::process::kill(keeper, libc::SIGKILL);
        assert!(wait_for(|| process_of("keeper") != keeper), "the daemon started no other");
        // The upgrade may succeed or fail here.
        upgrade.wait().unwrap();
    }
    run.finish().assert_whole(2);
    machine.assert_as_before();
}

#[test]
fn a_daemon_that_nothing_outlives_takes_its_command_and_nothing_else() {
    let Some(_machine) = Machine::take() else { return };
    let run = busy_run();
    // Each new daemon is killed as soon as it has started.
    let stop = AtomicBool::new(false);
    let run = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                let daemon = state().map(|state| state["daemon"].clone()).unwrap_or_default();
                let pid = daemon["pid"].as_i64().unwrap_or_default() as i32;
                // Another process may have this number by now.
                if uzswap_sys::process::start_time(pid) == daemon["started"].as_u64() && pid > 0 {
                    let _ = uzswap_sys::process::kill(pid, libc::SIGKILL);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let run = run.finish();
        stop.store(true, Relaxed);
        run
    });
    assert!(run.stderr().contains("the daemon died"), "{}", run.stderr());
    let code = run.code().unwrap();
    assert!(code == 137 || code == 128 + libc::SIGBUS, "status {code}");
}

#[test]
fn a_killed_run_is_cleaned_up_by_the_keeper() {
    let Some(machine) = Machine::take() else { return };
    let run = busy_run();
    run.signal(libc::SIGKILL);
    drop(run.finish());
    assert!(wait_for(|| !Path::new(FOLDER).exists()));
    machine.assert_as_before();
}

#[test]
fn a_killed_keeper_is_replaced_and_nobody_notices() {
    let Some(machine) = Machine::take() else { return };
    let run = churning(&LIMITS);
    // Stops a run for longer than a keeper waits for a run to reconnect.
    run.signal(libc::SIGSTOP);
    for _ in 0..3 {
        let keeper = process_of("keeper");
        uzswap_sys::process::kill(keeper, libc::SIGKILL).unwrap();
        assert!(wait_for(|| process_of("keeper") != keeper), "the daemon started no other");
    }
    std::thread::sleep(Duration::from_secs(11));
    run.signal(libc::SIGCONT);
    let run = run.finish();
    run.assert_code(0);
    assert_eq!(run.stdout().matches("every byte right").count(), 2, "{}", run.stdout());
    machine.assert_as_before();
}

#[test]
fn a_run_and_keeper_and_daemon_that_were_killed_are_cleaned_up_by_the_next_run() {
    let Some(_machine) = Machine::take() else { return };
    let run = busy_run();
    let (keeper, daemon) = (process_of("keeper"), process_of("daemon"));
    // A stopped daemon starts no other keeper.
    uzswap_sys::process::kill(daemon, libc::SIGSTOP).unwrap();
    for pid in [keeper, daemon] {
        uzswap_sys::process::kill(pid, libc::SIGKILL).unwrap();
    }
    let (group, over_ublk) = (run.group().unwrap(), is_over_ublk());
    run.signal(libc::SIGKILL);
    drop(run.finish());
    assert!(Path::new(FOLDER).exists(), "something is left to be cleaned up");
    let ended = || group.processes().is_empty();
    // Over ublk, a thread that waits for a page waits until a server answers for the device.
    assert!(over_ublk || wait_for(ended), "it outlived its run: {:?}", group.processes());
    let next = Run::start(&LIMITS, &["echo", "works"]).finish();
    next.assert_code(0);
    assert!(ended(), "it outlived the next run: {:?}", group.processes());
    assert!(next.stderr().contains("cleaned up after a killed run"), "{}", next.stderr());
    assert!(!Path::new(FOLDER).exists());
}
