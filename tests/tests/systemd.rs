//! `uzswap` on a system that systemd runs: scopes, units, and what stopping them does. Elsewhere
//! there is nothing to test: `cargo run -p xtask -- vm --image debian -- systemd`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use uzswap_tests::{FOLDER, Machine, Run, program, wait_for};

const LIMITS: [&str; 6] = ["--memory", "64M", "--backing", "none", "--pool", "256M"];

/// The machine, if systemd runs it.
fn take() -> Option<Machine> {
    if !Path::new("/run/systemd/system").exists() {
        println!("skipped: systemd does not run this machine");
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

fn is_swapping() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

/// Starts a program as a unit; gone with its end.
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
    // As somebody would who knows units only.
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
