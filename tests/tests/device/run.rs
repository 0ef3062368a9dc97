//! `uzswap run` as a person meets it: status, signals, errors, and leftovers.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "run/killed.rs"]
mod killed;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use uzswap_tests::{
    FOLDER, Gate, Machine, Run, Setting, StrictCommit, copy_programs, is_over_ublk, program, skip,
    transport_options, wait_for,
};

const LIMITS: [&str; 6] = ["--memory", "64M", "--backing", "none", "--pool", "256M"];

/// A program that needs 200 MiB, half of it noise.
const HUNGRY: &str = "import os\n\
                      a=[os.urandom(2048)+bytes(2048) for _ in range(50000)]\n\
                      print(sum(len(x) for x in a))";

#[test]
fn a_program_that_needs_three_times_its_memory_finishes() {
    let Some(_machine) = Machine::take() else { return };
    let run = Run::start(&LIMITS, &["python3", "-c", HUNGRY]).finish();
    run.assert_code(0);
    assert_eq!(run.stdout(), "204800000\n");
    let memory = run.report["memory_peak"].as_u64().unwrap();
    // The excess is five times a 64th of the limit: for a moment nothing can be reclaimed.
    assert!(memory <= 69 << 20, "it took {memory} bytes");
    assert!(run.statistic("pages_swapped_out") > 20_000, "{}", run.report);
    let ratio = run.report["ratio"].as_f64().unwrap();
    assert!(ratio > 1.7, "half of each page is zeros: {ratio}");
    for word in ["s in", "swapped", "stored", "pool", "backing", "faults"] {
        assert!(run.stderr().contains(word), "the report says '{word}':\n{}", run.stderr());
    }
}

#[test]
fn a_pool_that_is_included_leaves_the_command_the_rest() {
    let Some(_machine) = Machine::take() else { return };
    const MEMORY: u64 = 192 << 20;
    let options = ["--memory", "192M", "--include-pool", "--pool", "128M", "--backing", "none"];
    // After swapping, the program waits, so that its limit is that of the last check.
    let gate = Gate::new();
    let script = format!("{HUNGRY}\nopen('{}').read()", gate.path().display());
    let run = Run::start(&options, &["python3", "-c", &script]);
    run.wait_until_running();
    let group = run.group().unwrap();
    let is_shared = || {
        let pool = run.statistic("pool_total_size");
        // The kernel does not charge the pool to the group. Together they must keep to the memory.
        pool > 16 << 20 && group.usage().current + pool <= MEMORY
    };
    assert!(wait_for(is_shared), "{} bytes", group.usage().current);
    gate.open();
    run.finish().assert_code(0);
}

/// A process with the mark *serves I/O* may not wait for I/O. A command with that mark could not
/// swap memory out when it needs some.
#[test]
fn the_command_is_not_marked_as_serving_io() {
    const MEMALLOC_NOIO_OR_LOCAL_THROTTLE: u64 = 0x80000 | 0x10_0000;
    let Some(_machine) = Machine::take() else { return };
    let run = Run::start(&LIMITS, &["cat", "/proc/self/stat"]).finish();
    run.assert_code(0);
    let stat = run.stdout();
    let flags: u64 = stat.split_whitespace().nth(8).unwrap().parse().unwrap();
    assert_eq!(flags & MEMALLOC_NOIO_OR_LOCAL_THROTTLE, 0, "{stat}");
}

#[test]
fn the_command_s_status_is_ours() {
    let Some(_machine) = Machine::take() else { return };
    for (script, code) in [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143)]
    {
        Run::start(&LIMITS, &["sh", "-c", script]).finish().assert_code(code);
    }
}

#[test]
fn a_command_goes_on_when_no_process_reads_our_messages() {
    let Some(_machine) = Machine::take() else { return };
    let (reader, nobody) = std::io::pipe().unwrap();
    drop(reader);
    let status = Command::new(program("uzswap"))
        .arg("run")
        .args(transport_options())
        .args(LIMITS)
        .args(["sh", "-c", "exit 3"])
        .stderr(nobody)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(3));
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let status = Command::new(program("uzswap")).arg("status").stdout(full).output().unwrap();
    assert_eq!(status.status.code(), Some(125), "{status:?}");
}

#[test]
fn signals_are_passed_on() {
    let Some(_machine) = Machine::take() else { return };
    let gate = Gate::new();
    let script = format!(
        "trap 'echo got it; exit 7' TERM; echo ready; read line <{}; while :; do sleep 0.05; done",
        gate.path().display()
    );
    let run = Run::start(&LIMITS, &["sh", "-c", &script]);
    gate.open();
    run.signal(libc::SIGTERM);
    let run = run.finish();
    run.assert_code(7);
    assert_eq!(run.stdout(), "ready\ngot it\n");
}

#[test]
fn a_command_ignores_and_blocks_the_signals_of_its_caller() {
    let Some(_machine) = Machine::take() else { return };
    let shown = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"];
    let output = |with: &[&str]| {
        let mut command = Command::new("env");
        command.args(["--ignore-signal=HUP,PIPE,CHLD", "--block-signal=USR1,TERM,CHLD"]);
        let output = command.args(with).args(shown).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let uzswap = program("uzswap");
    let run = [uzswap.to_str().unwrap(), "run", "--device", "--memory=64M", "--"];
    assert_eq!(output(&run), output(&[]));
}

#[test]
fn a_second_interrupt_ends_a_command_that_ignores_the_first() {
    let Some(_machine) = Machine::take() else { return };
    let gate = Gate::new();
    let path = gate.path();
    let script =
        format!("trap '' INT; read line <{}; while :; do sleep 0.05; done", path.display());
    let mut run = Run::start(&LIMITS, &["sh", "-c", &script]);
    gate.open();
    // Two signals that arrive close together may be merged into one.
    let ended = wait_for(|| {
        run.signal(libc::SIGINT);
        std::thread::sleep(Duration::from_millis(300));
        run.has_ended()
    });
    assert!(ended);
    run.finish().assert_code(137);
}

#[test]
fn processes_that_the_command_leaves_running_are_ended() {
    let Some(_machine) = Machine::take() else { return };
    let run = Run::start(&LIMITS, &["sh", "-c", "sleep 1234.5 & exit 4"]).finish();
    run.assert_code(4);
    let left = Command::new("pgrep").args(["-f", "sleep 1234.5"]).output().unwrap();
    assert!(left.stdout.is_empty(), "{}", String::from_utf8_lossy(&left.stdout));
}

#[test]
fn bad_input_is_one_line_and_changes_nothing() {
    let Some(machine) = Machine::take() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let data = folder.path().join("data");
    fs::write(&data, vec![1; 4 << 20]).unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "not a program").unwrap();
    let (folder, data, plain) =
        (folder.path().to_str().unwrap(), data.to_str().unwrap(), plain.to_str().unwrap());
    let without_ublk: &[(&[&str], &str, &str, i32)] = match Path::new("/dev/ublk-control").exists()
    {
        true => &[],
        false => &[(&["--memory", "64M", "--transport", "ublk"], "true", "modprobe ublk_drv", 125)],
    };
    let cases: &[(&[&str], &str, &str, i32)] = &[
        (&["--memory", "64M", "--transport", "nbd"], "true", "possible values", 125),
        (&["--memory", "0"], "true", "at least", 125),
        (&["--memory", "10Q"], "true", "'10Q' is not a size", 125),
        (&["--memory", "1000T"], "true", "more than this machine has", 125),
        (&["--memory", "64M", "--compressor", "lz5"], "true", "unknown compressor 'lz5'", 125),
        (&["--memory", "64M", "--compressor", "zstd:99"], "true", "levels are", 125),
        (&["--memory", "64M", "--policy", "fifo"], "true", "give order or clock", 125),
        (&["--memory", "64M", "--policy", "clock"], "true", "add --in-process", 125),
        (&["--memory", "64M", "--pool", "1"], "true", "--pool", 125),
        (&["--memory", "64M", "--size", "1"], "true", "--size", 125),
        (&["--memory", "64M", "--backing", folder], "true", "it is a folder", 125),
        (&["--memory", "64M", "--backing", data], "true", "holds something else", 125),
        (&["--memory", "64M", "--backing", "/no/such/file:1G"], "true", "No such file", 125),
        (&["--memory", "64M", "--backing", "/var/tmp/new-file"], "true", "needs a size", 125),
        (&["--memory", "64M", "--backing", "/var/tmp/new:1M"], "true", "at least 2 MiB", 125),
        (&["--memory", "64M", "--backing", "/proc/version:1G"], "true", "/proc/version", 125),
        (&["--memory", "64M"], "no-such-command-here", "no such command", 127),
        (&["--memory", "64M"], plain, "cannot be run", 126),
        (&["--memory", "64M"], folder, "cannot be run", 126),
    ];
    for (options, command, says, code) in cases.iter().chain(without_ublk) {
        let run = Run::start(options, &[command]).finish();
        let stderr = run.stderr();
        assert!(stderr.contains(says), "{options:?} {command}: '{says}' is not in:\n{stderr}");
        assert_eq!(run.code(), Some(*code), "{options:?} {command}:\n{stderr}");
        let own: Vec<_> = stderr.lines().filter(|line| !line.is_empty()).collect();
        let help = own.iter().any(|line| line.starts_with("For more information"));
        assert!(own.len() == 1 || help, "{options:?} {command}: more than one line:\n{stderr}");
        machine.assert_as_before();
    }
    assert_eq!(fs::read(data).unwrap(), vec![1; 4 << 20], "a user's file is untouched");
}

#[test]
fn a_backing_in_use_is_refused_and_one_made_for_a_run_is_gone_with_it() {
    let Some(_machine) = Machine::take() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path().join("swap.img");
    let backing = format!("{}:64M", path.display());
    let options = ["--memory", "64M", "--backing", &backing];
    Run::start(&options, &["true"]).finish().assert_code(0);
    assert!(!path.exists(), "it was made for the run");
    // An existing empty file is used and stays. If another process has locked the file, the run
    // fails.
    fs::write(&path, "").unwrap();
    let held = fs::File::open(&path).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let refused = Run::start(&options, &["true"]).finish();
    refused.assert_code(125);
    assert!(refused.stderr().contains("in use by another process"), "{}", refused.stderr());
    drop(held);
    Run::start(&options, &["true"]).finish().assert_code(0);
    assert!(path.exists(), "it was there before");
    fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    let without_size = ["--memory", "64M", "--backing", path.to_str().unwrap()];
    let small = Run::start(&without_size, &["true"]).finish();
    small.assert_code(125);
    assert!(small.stderr().contains("at least 2 MiB"), "{}", small.stderr());
}

#[test]
fn the_kernel_s_zswap_is_off_during_a_run_and_restored() {
    let Some(machine) = Machine::take() else { return };
    const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";
    let Some(_setting) = Setting::set(ZSWAP, "Y") else {
        skip("this kernel has no zswap");
        return;
    };
    let run = Run::start(&LIMITS, &["cat", ZSWAP]).finish();
    run.assert_code(0);
    assert_eq!(run.stdout(), "N\n");
    assert!(run.stderr().contains("zswap is switched off"), "{}", run.stderr());
    assert_eq!(fs::read_to_string(ZSWAP).unwrap(), "Y\n");
    drop(_setting);
    machine.assert_as_before();
}

#[test]
fn two_runs_share_a_device_and_one_that_is_killed_takes_nothing_of_the_other_along() {
    let Some(machine) = Machine::take() else { return };
    let [first, second] = [(); 2].map(|()| Run::churn_with(&LIMITS, "192", "2"));
    let swapped = |run: &Run| run.group().unwrap().usage().swapped;
    assert!(wait_for(|| swapped(&first) > 16 << 20 && swapped(&second) > 16 << 20));
    let areas = fs::read_to_string("/proc/swaps").unwrap().matches("32767").count();
    assert_eq!(areas, 1, "one device has the highest priority");
    let status = Command::new(program("uzswap")).arg("status").output().unwrap();
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert_eq!(status.matches("\n  run ").count(), 2, "{status}");
    let group = first.group().unwrap();
    first.signal(libc::SIGKILL);
    drop(first.finish());
    assert!(wait_for(|| !group.path().exists()), "its command is ended");
    let second = second.finish();
    second.assert_code(0);
    assert_eq!(second.stdout().matches("every byte right").count(), 2, "{}", second.stdout());
    assert!(second.stderr().contains("other runs used the cache too"), "{}", second.stderr());
    machine.assert_as_before();
}

#[test]
fn a_run_that_joins_names_the_options_that_do_not_apply() {
    let Some(_machine) = Machine::take() else { return };
    let gate = Gate::new();
    let first = Run::start(&LIMITS, &["cat", gate.path().to_str().unwrap()]);
    first.wait_until_running();
    let options = ["--memory", "64M", "--backing", "none", "--pool", "128M"];
    let other = [&options[..], &["--compressor", "lz4"]].concat();
    let second = Run::start(&other, &["true"]).finish();
    second.assert_code(0);
    let said = second.stderr();
    assert!(
        said.contains("--pool 128 MiB (it is 256 MiB), --compressor lz4 (it is zstd)"),
        "{said}"
    );
    let same = Run::start(&LIMITS, &["true"]).finish();
    same.assert_code(0);
    assert!(!same.stderr().contains("do not apply"), "{}", same.stderr());
    gate.open();
    first.finish().assert_code(0);
}

/// Starts a run of four processes for each CPU, in a third of their memory. They only use their
/// memory, for this number of seconds.
fn thrash(seconds: &str) -> Run {
    let count = 4 * uzswap_sys::cpu::allowed();
    let [limit, pool] = [8, 32].map(|mib| format!("{}M", mib * count));
    let options = ["--memory", &limit, "--pool", &pool, "--backing", "none", "--load-control"];
    let churn = program("churn").display().to_string();
    Run::start(&options, &[&churn, &(24 * count).to_string(), seconds, &count.to_string()])
}

fn wait_until_held(run: &Run) {
    run.wait_until_running();
    let freezer = run.group().unwrap().freezer().unwrap();
    let held = || fs::read_to_string(freezer.join("cgroup.procs")).unwrap_or_default();
    assert!(wait_for(|| !held().is_empty()), "nobody was held");
}

#[test]
fn load_control_suspends_processes_and_loses_no_byte() {
    let Some(_machine) = Machine::take() else { return };
    let run = thrash("8").finish();
    run.assert_code(0);
    let held = &run.report["load_control"];
    assert!(
        held["suspensions"].as_u64() > Some(0) && held["seconds"].as_f64() > Some(1.0),
        "{held}"
    );
    assert!(run.stderr().contains("suspended a process"), "{}", run.stderr());
}

#[test]
fn a_signal_reaches_held_processes_and_a_killed_run_leaves_none() {
    let Some(machine) = Machine::take() else { return };
    let run = thrash("600");
    wait_until_held(&run);
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
    machine.assert_as_before();
    let run = thrash("600");
    wait_until_held(&run);
    run.signal(libc::SIGKILL);
    drop(run.finish());
    assert!(wait_for(|| !Path::new(FOLDER).exists()));
    machine.assert_as_before();
}

#[test]
fn without_root_a_program_without_its_libraries_says_how_to_install_them() {
    let Some(_machine) = Machine::take() else { return };
    // A copy that another user may read and run.
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let copy = folder.path().join("uzswap");
    copy_programs(&[program("uzswap")], &copy);
    let open = |path: &std::path::Path| {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(folder.path());
    open(&copy);
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["run", "--memory", "64M", "--", "true"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    // In-process works without root, but its libraries are missing there.
    assert!(stderr.contains("neither beside") && stderr.contains("pip install"), "{stderr}");
}

#[test]
fn a_program_that_fits_nowhere_is_ended_and_the_report_says_why() {
    let Some(_machine) = Machine::take() else { return };
    for backing in ["none", "/var/tmp/uzswap-test.img:16M"] {
        let options = ["--memory", "64M", "--backing", backing, "--pool", "8M"];
        let run = Run::start(&options, &["python3", "-c", HUNGRY]).finish();
        run.assert_code(137);
        assert_eq!(run.report["oom_kills"], 1, "{}", run.report);
        assert!(run.stderr().contains("killed for lack of memory"), "{}", run.stderr());
        // The kernel finds swap space full. If pages were refused instead, it would retry half a
        // million times. The refusals until the keeper's next check depend on the scheduler.
        assert!(run.statistic("request_errors") < 20_000, "{}", run.report);
    }
}

#[test]
fn a_daemon_goes_on_serving_until_the_kernel_can_read_its_pages_back() {
    let Some(machine) = Machine::take() else { return };
    let gate = Gate::new();
    let script = format!("read line <{}; exit 5", gate.path().display());
    let run = Run::start(&LIMITS, &["sh", "-c", &script]);
    run.wait_until_running();
    {
        let _strict = StrictCommit::begin();
        gate.open();
        let run = run.finish();
        run.assert_code(5);
        assert!(run.stderr().contains("goes on serving it, and tries again"), "{}", run.stderr());
        let device = if is_over_ublk() { "/dev/ublkb" } else { "/dev/loop" };
        assert!(fs::read_to_string("/proc/swaps").unwrap().contains(device));
        let figure = Path::new(FOLDER).join("mnt/stats/stored_pages");
        assert!(figure.exists(), "the daemon answers");
    }
    machine.assert_as_before();
}

#[test]
fn doctor_says_the_same_to_programs_as_to_people() {
    let doctor = |arguments: &[&str]| {
        Command::new(program("uzswap")).arg("doctor").args(arguments).output().unwrap()
    };
    let (text, json) = (doctor(&[]), doctor(&["--json"]));
    assert_eq!(text.status.code(), json.status.code());
    let text = String::from_utf8(text.stdout).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    for (part, title) in [("swap_device", "swap device"), ("regions", "regions")] {
        let works = text.lines().any(|l| l.starts_with(title) && l.ends_with(": works here"));
        assert_eq!(json[part]["works"], works, "{text}");
        for finding in json[part]["findings"].as_array().unwrap() {
            let what = format!(" {}: ", finding["what"].as_str().unwrap());
            let line = text.lines().find(|line| line.contains(&what)).unwrap();
            assert_eq!(finding["ok"], line.trim_start().starts_with("ok "), "{line}");
        }
    }
}
