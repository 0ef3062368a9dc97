//! CPUs are taken offline and brought back, and cpusets change, while programs swap.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use uzswap_tests::{
    Afterwards, Finished, Machine, Run, Setting, is_full, process_of, skip, wait_for,
};

/// The CPU that comes and goes.
const ONLINE: &str = "/sys/devices/system/cpu/cpu1/online";

/// The number of threads that always exist, and of threads for each CPU.
const THREADS_ALWAYS: usize = 6;
const THREADS_PER_CPU: usize = 2;

/// The pool is so small that most pages are written back.
fn churn() -> Run {
    Run::churn("16M")
}

fn check(run: &Finished) {
    run.assert_whole(4);
    assert!(run.statistic("written_back_pages") > 1000, "{}", run.report);
}

fn cpus(run: &Run) -> String {
    fs::read_to_string(run.mount().join("parameters/cpus")).unwrap_or_default()
}

/// Number of the daemon's threads that serve.
fn threads() -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", process_of("daemon"))).unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    names.filter(|n| n.trim().strip_prefix("uzswap-").is_some_and(is_number)).count()
}

/// Waits for this state of the cache, with threads for this number of CPUs.
fn expect(run: &Run, states: &str, cpus_up: usize) {
    let wanted = THREADS_ALWAYS + THREADS_PER_CPU * cpus_up;
    let is_so = || cpus(run).trim() == states && threads() == wanted;
    assert!(wait_for(is_so), "{}, {} threads; not {states}, {wanted}", cpus(run), threads());
}

/// A setting for the second CPU, if the machine has two and the second can go offline.
fn two_cpus() -> Option<Setting> {
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let setting = (online.trim() == "0-1").then(|| Setting::set(ONLINE, "1")).flatten();
    if setting.is_none() {
        skip(format!("CPUs {} are online, not two of which one can go", online.trim()));
    }
    setting
}

#[test]
fn no_wrong_byte_while_a_cpu_comes_and_goes() {
    let Some(_machine) = Machine::take() else { return };
    let Some(_setting) = two_cpus() else { return };
    let run = churn();
    expect(&run, "0-1 online", 2);
    let began = Instant::now();
    let times = if is_full() { 200 } else { 20 };
    for _ in 0..times {
        fs::write(ONLINE, "0").unwrap();
        expect(&run, "0 online, 1 offline", 1);
        fs::write(ONLINE, "1").unwrap();
        expect(&run, "0-1 online", 2);
    }
    println!("CPU 1 went {times} times in {} s", began.elapsed().as_secs());
    check(&run.finish());
}

#[test]
fn the_cpus_that_the_daemon_may_use_are_followed() {
    let Some(_machine) = Machine::take() else { return };
    let Some(_setting) = two_cpus() else { return };
    let run = churn();
    let daemon = process_of("daemon").to_string();
    for (cpus, states, up) in
        [("0", "0 online, 1 offline", 1), ("1", "0 offline, 1 online", 1), ("0,1", "0-1 online", 2)]
    {
        let set = ["--all-tasks", "--cpu-list", "--pid", cpus, &daemon];
        // taskset fails if a thread ends during its work.
        let is_set = || Command::new("taskset").args(set).output().unwrap().status.success();
        assert!(wait_for(is_set), "taskset {cpus}");
        expect(&run, states, up);
    }
    // Made here, so that the group is removed after the daemon's end.
    let group = Cpuset::make();
    if let Some(group) = &group {
        for (cpus, states, up) in [("1", "0 offline, 1 online", 1), ("0-1", "0-1 online", 2)] {
            fs::write(group.0.join("cpuset.cpus"), cpus).unwrap();
            fs::write(group.0.join("cgroup.procs"), &daemon).unwrap();
            expect(&run, states, up);
        }
    }
    check(&run.finish());
}

/// A cpuset of version 1, if that is mounted.
struct Cpuset(PathBuf, #[expect(dead_code, reason = "dropped")] Afterwards);

impl Cpuset {
    fn make() -> Option<Self> {
        let root = PathBuf::from("/sys/fs/cgroup/cpuset");
        let memory = fs::read_to_string(root.join("cpuset.mems")).ok()?;
        let group = root.join(format!("uzswap-test-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        let script = "until rmdir \"$1\" 2>/dev/null; do sleep 0.1; done";
        let afterwards = Afterwards::run(script, &[group.to_str().unwrap()]);
        fs::write(group.join("cpuset.mems"), memory.trim()).unwrap();
        Some(Self(group, afterwards))
    }
}

#[test]
fn a_cpu_can_be_set_to_any_state_and_the_last_one_stays() {
    let Some(_machine) = Machine::take() else { return };
    let Some(_setting) = two_cpus() else { return };
    let run = churn();
    expect(&run, "0-1 online", 2);
    let file = run.mount().join("parameters/cpus");
    let set = |value: &str| fs::write(&file, value);
    for state in ["offline", "codecs", "slots", "buffer", "online", "codecs", "offline"] {
        set(&format!("1 {state}")).unwrap();
        let (states, up) = match state {
            "online" => ("0-1 online".to_owned(), 2),
            state => (format!("0 online, 1 {state}"), 1),
        };
        expect(&run, &states, up);
    }
    // The CPU must keep the state that was set.
    std::thread::sleep(Duration::from_millis(300));
    expect(&run, "0 online, 1 offline", 1);
    assert_eq!(set("0 offline").unwrap_err().raw_os_error(), Some(libc::EBUSY));
    assert_eq!(set("0 asleep").unwrap_err().raw_os_error(), Some(libc::EINVAL));
    expect(&run, "0 online, 1 offline", 1);
    set("1 online").unwrap();
    expect(&run, "0-1 online", 2);
    check(&run.finish());
}
