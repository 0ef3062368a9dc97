//! `uzswap` on a system with systemd: scopes, units, and how they stop. The command is `cargo
//! run -p xtask -- vm --image debian -- systemd`; elsewhere the tests are skipped.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use uzswap_tests::{FOLDER, Machine, Run, is_swapping, process_of, program, skip, wait_for};

const LIMITS: [&str; 6] = ["--memory", "64M", "--backing", "none", "--pool", "256M"];

/// A shell command that keeps 128 MiB of text until it is ended.
const KEEP: &str = "(seq 20000000; sleep 1000) | tail -c 128M";

/// The machine, if systemd runs it.
fn take() -> Option<Machine> {
    if !Path::new("/run/systemd/system").exists() {
        skip("systemd does not run this machine");
        return None;
    }
    Machine::take()
}

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().expect("systemd has it");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn state(unit: &str) -> String {
    output("systemctl", &["is-active", unit]).trim().to_owned()
}

fn scopes() -> String {
    output("systemctl", &["list-units", "--all", "--plain", "--no-legend", "uzswap*.scope"])
}

fn stop(unit: &str) {
    let status = Command::new("systemctl").args(["stop", unit]).status().expect("systemd has it");
    assert!(status.success(), "systemctl stop {unit}: {status}");
}

/// Starts a program as a transient unit.
fn start_unit(unit: &str, arguments: &[&str]) -> Child {
    Command::new("systemd-run")
        .args(["--quiet", "--wait", "--collect", &format!("--unit={unit}")])
        .arg(program("uzswap"))
        .args(arguments)
        .spawn()
        .expect("systemd has it")
}

#[test]
fn a_command_has_a_scope_that_people_see() {
    let Some(machine) = take() else { return };
    let run = Run::start(&LIMITS, &["sleep", "1000"]);
    run.wait_until_running();
    let scope = format!("uzswap-{}.scope", run.pid());
    let tree = output("systemd-cgls", &["--no-pager"]);
    assert!(tree.contains(&scope) && tree.contains("sleep 1000"), "{tree}");
    assert!(tree.contains("uzswap.scope") && tree.contains("@uzswap daemon"), "{tree}");
    let limit = run.group().unwrap().path().join("memory.high");
    assert_eq!(fs::read_to_string(limit).unwrap().trim(), (64 << 20).to_string());
    // A user who knows only units stops it like this.
    stop(&scope);
    let run = run.finish();
    run.assert_code(128 + libc::SIGTERM);
    assert!(wait_for(|| scopes().is_empty()), "{}", scopes());
    machine.assert_as_before();
}

#[test]
fn stopping_the_unit_of_a_run_leaves_nothing() {
    let Some(machine) = take() else { return };
    let churn = program("churn");
    let command = [churn.to_str().unwrap(), "192", "100000", "2"];
    let mut unit = start_unit("lab-run", &[&["run"], &LIMITS[..], &["--"], &command].concat());
    assert!(wait_for(|| is_swapping() && scopes().contains("uzswap-")), "{}", scopes());
    stop("lab-run");
    unit.wait().unwrap();
    assert!(wait_for(|| !is_swapping() && scopes().is_empty()), "{}", scopes());
    assert!(!Path::new(FOLDER).exists());
    machine.assert_as_before();
}

#[test]
fn stopping_the_unit_of_serve_switches_swapping_off() {
    let Some(machine) = take() else { return };
    let options = ["serve", "--size", "256M", "--pool", "64M", "--backing", "none"];
    let mut unit = start_unit("uzswap", &options);
    assert!(wait_for(is_swapping), "{}", state("uzswap"));
    assert!(wait_for(|| state("uzswap") == "active"));
    stop("uzswap");
    assert!(!is_swapping(), "when the unit has stopped, so has swapping");
    assert!(unit.wait().unwrap().success());
    assert!(!Path::new(FOLDER).exists());
    machine.assert_as_before();
}

#[test]
fn stopping_the_daemon_s_scope_ends_the_commands_first() {
    let Some(machine) = take() else { return };
    let run = Run::start(&LIMITS, &["sleep", "1000"]);
    run.wait_until_running();
    stop("uzswap.scope");
    run.finish().assert_code(128 + libc::SIGTERM);
    assert!(wait_for(|| !is_swapping() && scopes().is_empty()), "{}", scopes());
    machine.assert_as_before();
}

/// A service with the package's example drop-in. Both are removed when the value is dropped.
struct Budgeted;

impl Budgeted {
    const FOLDER: &str = "/run/systemd/system/lab-budget.service.d";
    const SERVICE: &str = "/run/systemd/system/lab-budget.service";

    fn start() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let budget = fs::read_to_string(root.join("packaging/examples/budget.conf")).unwrap();
        let small = budget.replace("512M", "64M");
        assert_ne!(small, budget);
        fs::create_dir_all(Self::FOLDER).unwrap();
        fs::write(Path::new(Self::FOLDER).join("budget.conf"), small).unwrap();
        fs::write(Self::SERVICE, format!("[Service]\nExecStart=sh -c '{KEEP}'\n")).unwrap();
        output("systemctl", &["daemon-reload"]);
        output("systemctl", &["start", "lab-budget"]);
        Self
    }
}

impl Drop for Budgeted {
    fn drop(&mut self) {
        output("systemctl", &["stop", "lab-budget"]);
        // The removal fails if the files do not exist.
        let _ = fs::remove_file(Self::SERVICE);
        let _ = fs::remove_dir_all(Self::FOLDER);
        output("systemctl", &["daemon-reload"]);
    }
}

#[test]
fn a_service_with_a_budget_keeps_to_it() {
    let Some(machine) = take() else { return };
    let options = ["serve", "--size", "256M", "--pool", "128M", "--backing", "none"];
    let mut unit = start_unit("uzswap", &options);
    assert!(wait_for(|| state("uzswap") == "active"));
    let budgeted = Budgeted::start();
    let folder = Path::new("/sys/fs/cgroup/system.slice/lab-budget.service");
    let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
    let bytes = |name: &str| read(name).trim().parse::<u64>().unwrap_or(0);
    assert!(wait_for(|| bytes("memory.swap.current") > 60 << 20), "{}", read("memory.stat"));
    assert!(wait_for(|| bytes("memory.current") <= 66 << 20), "{}", read("memory.stat"));
    assert!(read("memory.events").contains("oom_kill 0\n"), "{}", read("memory.events"));
    assert_eq!(state("lab-budget"), "active");
    drop(budgeted);
    stop("uzswap");
    assert!(unit.wait().unwrap().success());
    machine.assert_as_before();
}

#[test]
fn a_unit_is_attached_to_and_let_go() {
    let Some(machine) = take() else { return };
    let mut unit = Command::new("systemd-run")
        .args(["--quiet", "--wait", "--collect", "--unit=lab-keep", "sh", "-c", KEEP])
        .spawn()
        .expect("systemd has it");
    let folder = Path::new("/sys/fs/cgroup/system.slice/lab-keep.service");
    let current = || fs::read_to_string(folder.join("memory.current")).unwrap_or_default();
    let is_full = || current().trim().parse::<u64>().is_ok_and(|bytes| bytes > 100 << 20);
    assert!(wait_for(is_full), "{}", current());
    let high = || fs::read_to_string(folder.join("memory.high")).unwrap().trim().to_owned();
    assert_eq!(high(), "max");
    let target = ["--unit", "lab-keep.service"];
    let mut attach = Command::new(program("uzswap"))
        .args(["attach", "--quiet", "--memory", "64M", "--backing", "none", "--pool", "256M"])
        .args(target)
        .spawn()
        .unwrap();
    assert!(wait_for(|| high() == (64 << 20).to_string()), "{}", high());
    assert!(wait_for(is_swapping));
    let detach = Command::new(program("uzswap")).arg("detach").args(target).output().unwrap();
    assert!(detach.status.success(), "{detach:?}");
    assert!(attach.wait().unwrap().success());
    assert_eq!(high(), "max");
    stop("lab-keep");
    unit.wait().unwrap();
    assert!(wait_for(|| !is_swapping() && !Path::new(FOLDER).exists()));
    machine.assert_as_before();
}

/// The package's unit, with the built program and its own configuration. It is removed when the
/// value is dropped.
struct Unit {
    folder: tempfile::TempDir,
}

impl Unit {
    const PATH: &str = "/run/systemd/system/uzswap.service";

    fn install() -> Self {
        let unit = Self { folder: tempfile::tempdir().unwrap() };
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = fs::read_to_string(root.join("packaging/uzswap.service")).unwrap();
        let (program, file) = (program("uzswap"), unit.file());
        let (program, file) = (program.display(), file.display());
        let text = text
            .replace("/usr/bin/uzswap serve", &format!("{program} serve --config {file}"))
            .replace("/usr/bin/uzswap config check", &format!("{program} config check {file}"));
        assert_eq!(text.matches(&file.to_string()).count(), 2);
        unit.configure("N");
        fs::create_dir_all("/run/systemd/system").unwrap();
        fs::write(Self::PATH, text).unwrap();
        output("systemctl", &["daemon-reload"]);
        unit
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("uzswap.conf")
    }

    fn configure(&self, same_pages: &str) {
        let text = "size = \"256M\"\npool = \"64M\"\nbacking = \"none\"\n[parameters]\n";
        let text = format!("{text}same_pages_enabled = \"{same_pages}\"\n");
        fs::write(self.file(), text).unwrap();
    }

    fn main_process() -> i32 {
        output("systemctl", &["show", "--value", "-p", "MainPID", "uzswap"]).trim().parse().unwrap()
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let _ = fs::remove_file(Self::PATH);
        output("systemctl", &["daemon-reload"]);
    }
}

#[test]
fn the_unit_of_the_package_serves_reloads_and_survives_its_main_process() {
    let Some(machine) = take() else { return };
    let unit = Unit::install();
    let systemctl = |arguments: &[&str]| {
        Command::new("systemctl").args(arguments).output().expect("systemd has it").status.success()
    };
    let log = || output("journalctl", &["--no-pager", "--unit=uzswap"]);
    assert!(systemctl(&["start", "uzswap"]), "{}", log());
    assert!(is_swapping(), "started is ready: {}", log());
    let parameter = || fs::read_to_string("/run/uzswap/mnt/parameters/same_pages_enabled").unwrap();
    assert_eq!(parameter().trim(), "N", "everybody sees the control files: {}", log());

    unit.configure("perhaps");
    assert!(!systemctl(&["reload", "uzswap"]), "{}", log());
    assert_eq!((parameter().trim(), state("uzswap").as_str()), ("N", "active"));
    unit.configure("Y");
    assert!(systemctl(&["reload", "uzswap"]), "{}", log());
    assert!(wait_for(|| parameter().trim() == "Y"), "{}", log());

    // The daemon continues, the kernel reads everything back, and then the next service starts.
    let before = Unit::main_process();
    uzswap_sys::process::kill(before, libc::SIGKILL).unwrap();
    let is_new = || Unit::main_process() != before && state("uzswap") == "active";
    assert!(wait_for(|| is_new() && is_swapping()), "{}", log());
    stop("uzswap");
    assert!(!is_swapping() && !Path::new(FOLDER).exists(), "{}", log());
    drop(unit);
    machine.assert_as_before();
}

/// A slice that systemd-oomd watches, with uzswap.service in it. It is removed when the value is
/// dropped.
struct Watched;

impl Watched {
    const FILES: [(&str, &str); 3] = [
        (
            "/run/systemd/system/lab.slice",
            "[Slice]\nManagedOOMMemoryPressure=kill\nManagedOOMMemoryPressureLimit=1%\n",
        ),
        ("/run/systemd/system/uzswap.service.d/lab.conf", "[Service]\nSlice=lab.slice\n"),
        ("/run/systemd/oomd.conf.d/lab.conf", "[OOM]\nDefaultMemoryPressureDurationSec=2s\n"),
    ];

    fn begin() -> Self {
        for (path, text) in Self::FILES {
            fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        output("systemctl", &["daemon-reload"]);
        output("systemctl", &["restart", "systemd-oomd"]);
        assert_eq!(state("systemd-oomd"), "active");
        Self
    }

    /// Starts a command as a unit in the slice.
    fn start(unit: &str, properties: &[&str], command: &[&str]) -> Child {
        Command::new("systemd-run")
            .args(["--quiet", "--wait", "--collect", "--slice=lab", &format!("--unit={unit}")])
            .args(properties)
            .args(command)
            .spawn()
            .expect("systemd has it")
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        output("systemctl", &["stop", "systemd-oomd"]);
        // The removal fails if the files do not exist.
        Self::FILES.iter().for_each(|(path, _)| _ = fs::remove_file(path));
        output("systemctl", &["daemon-reload"]);
    }
}

#[test]
fn systemd_oomd_ends_a_smaller_unit_and_not_ours() {
    let Some(machine) = take() else { return };
    let unit = Unit::install();
    let watched = Watched::begin();
    output("systemctl", &["start", "uzswap"]);
    let daemon = process_of("daemon");
    // systemd-oomd would end lab-busy first, which reclaims most but is exempt. The next is the
    // largest unit, uzswap.service, if that is not exempt.
    let mut other = Watched::start("lab-other", &[], &["sleep", "100000"]);
    let churn = program("churn");
    let churn = [churn.to_str().unwrap(), "96", "100000", "1"];
    let exempt = ["-p", "MemoryHigh=32M", "-p", "ManagedOOMPreference=omit"];
    let mut busy = Watched::start("lab-busy", &exempt, &churn);
    let log = || output("journalctl", &["--no-pager", "--unit=systemd-oomd"]);
    assert!(wait_for(|| log().contains("Killed /lab.slice")), "{}", log());
    assert!(log().contains("Killed /lab.slice/lab-other.service"), "{}", log());
    assert!(!log().contains("Killed /lab.slice/uzswap.service"), "{}", log());
    assert!(!other.wait().unwrap().success());
    assert_eq!(state("uzswap"), "active");
    assert_eq!(process_of("daemon"), daemon);
    stop("lab-busy");
    busy.wait().unwrap();
    stop("uzswap");
    drop((watched, unit));
    machine.assert_as_before();
}
