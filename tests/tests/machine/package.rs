//! The Debian package, on a virtual machine with systemd: installed, enabled, rebooted,
//! upgraded under load, purged. `cargo run -p xtask -- dist --only deb` makes it, and `cargo
//! run -p xtask -- vm --image debian -- package` runs this; elsewhere the test is skipped.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use uzswap_tests::{FOLDER, Machine, is_swapping, process_of, program, skip, wait_for};

/// This file exists from shortly before the reboot on.
const REBOOTED: &str = "/var/lib/lab-package-rebooted";

fn output(program: &str, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).output().expect("Debian has it")
}

/// The output of a program, which must succeed.
fn succeed(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn log() -> String {
    succeed("journalctl", &["--no-pager", "--unit=uzswap"])
}

fn is_active() -> bool {
    output("systemctl", &["is-active", "uzswap"]).status.success()
}

/// The newest package of `dist`.
fn package() -> PathBuf {
    let target = program("uzswap").ancestors().nth(2).unwrap().to_owned();
    let files = fs::read_dir(target.join("dist")).into_iter().flatten().flatten();
    let is_package = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("uzswap_") && name.ends_with(".deb")
    };
    let newest = files.map(|file| file.path()).filter(is_package).max();
    newest.expect("make it: cargo run -p xtask -- dist --only deb")
}

/// The package with a later version.
fn later(package: &Path, folder: &Path) -> PathBuf {
    let (unpacked, later) = (folder.join("unpacked"), folder.join("later.deb"));
    let [unpacked, later, package] =
        [&unpacked, &later, package].map(|path| path.to_str().unwrap());
    succeed("dpkg-deb", &["--raw-extract", package, unpacked]);
    let control = format!("{unpacked}/DEBIAN/control");
    let text = fs::read_to_string(&control).unwrap();
    let version = text.lines().find(|line| line.starts_with("Version: ")).unwrap();
    fs::write(&control, text.replace(version, &format!("{version}+later"))).unwrap();
    succeed("dpkg-deb", &["--root-owner-group", "--build", unpacked, later]);
    later.into()
}

/// Files and folders of the system with the program's name.
fn traces() -> Vec<String> {
    let found = succeed(
        "find",
        &["/etc", "/usr", "/var/lib", "/run", "-xdev", "-iname", "*uzswap*", "-print"],
    );
    // The lock of these tests is no trace.
    found.lines().filter(|path| !path.contains("uzswap-tests")).map(str::to_owned).collect()
}

#[test]
fn the_package_is_installed_enabled_rebooted_upgraded_and_purged() {
    if !Path::new("/run/systemd/system").exists() || !Path::new("/etc/debian_version").exists() {
        skip("systemd does not run this machine, or it is no Debian");
        return;
    }
    if !Path::new(REBOOTED).exists() {
        let Some(_machine) = Machine::take() else { return };
        install_and_reboot();
    }
    // Since the reboot no command has started a service.
    assert!(wait_for(is_active), "{}", log());
    assert!(is_swapping(), "{}", log());
    upgrade_under_load();
    succeed("dpkg", &["--remove", "uzswap"]);
    assert!(!is_swapping(), "removed is switched off: {}", log());
    assert!(Path::new("/etc/uzswap/uzswap.conf").exists(), "the configuration stays");
    succeed("dpkg", &["--purge", "uzswap"]);
    assert_eq!(traces(), Vec::<String>::new());
}

fn install_and_reboot() {
    succeed("dpkg", &["--install", package().to_str().unwrap()]);
    assert!(!is_swapping() && !is_active(), "installed is not asked for");
    assert!(succeed("/usr/bin/uzswap", &["config", "check"]).is_empty());
    succeed("/usr/bin/uzswap", &["doctor"]);
    // An administrator's own settings: half of this small machine.
    let configuration = "size = \"ram / 2\"\npool = \"ram / 8\"\nbacking = \"none\"\n";
    fs::create_dir_all("/etc/uzswap/uzswap.conf.d").unwrap();
    fs::write("/etc/uzswap/uzswap.conf.d/lab.conf", configuration).unwrap();
    succeed("systemctl", &["enable", "--now", "uzswap"]);
    assert!(is_swapping(), "{}", log());
    fs::write(REBOOTED, "").unwrap();
    succeed("systemctl", &["reboot"]);
    // The reboot ends this process.
    loop {
        std::thread::park();
    }
}

/// A program checks every byte of its swapped memory while another version takes the device over.
fn upgrade_under_load() {
    let folder = tempfile::tempdir().unwrap();
    let later = later(&package(), folder.path());
    let churn = program("churn");
    let load = Command::new("systemd-run")
        .args(["--quiet", "--wait", "--pipe", "--property=MemoryHigh=48M"])
        .args([churn.to_str().unwrap(), "96", "60", "1"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let swapped = || fs::read_to_string("/run/uzswap/mnt/stats/pages_swapped_out");
    let pages = || swapped().map_or(0, |text| text.trim().parse::<u64>().unwrap());
    assert!(wait_for(|| pages() > 5000), "{}", log());
    let daemon = process_of("daemon");
    let said = succeed("dpkg", &["--install", later.to_str().unwrap()]);
    assert!(said.contains("no page was lost"), "{said}\n{}", log());
    assert_ne!(process_of("daemon"), daemon);
    assert!(is_active() && is_swapping(), "{}", log());
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{load:?}\n{}", log());
    assert!(String::from_utf8_lossy(&load.stdout).contains("every byte right"));
    fs::remove_dir_all("/etc/uzswap/uzswap.conf.d").unwrap();
    assert!(Path::new(FOLDER).exists(), "{}", log());
}
