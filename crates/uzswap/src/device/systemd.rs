//! systemd, over D-Bus: scopes, which are groups for processes that systemd did not start.

use crate::error::Failure;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use uzswap_sys::cgroup::{Group, Hierarchy};
use zbus::Variant;

const BUS_NAME: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const INTERFACE: &str = "org.freedesktop.systemd1.Manager";

/// The scope of the keeper and its daemon.
const DAEMON_SCOPE: &str = "uzswap.scope";

/// The time that systemd may take to move a process.
const PATIENCE: Duration = Duration::from_secs(10);

/// True if systemd runs this system, by the check of sd_booted(3).
pub fn is_here() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// True if a group is our own service's, as with `serve` as a unit. Such a group needs no scope.
pub fn is_own_service(group: &Group) -> bool {
    let name = group.path().file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with("uzswap") && name.ends_with(".service"))
}

/// The folder of a unit's group, relative to the hierarchy.
pub fn group_of(unit: &str) -> Result<PathBuf, Failure> {
    let output = Command::new("systemctl")
        .args(["show", "--value", "--property=ControlGroup", "--", unit])
        .output()
        .map_err(|error| Failure::new(format!("systemctl: {error}; give --cgroup instead")))?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    match text.strip_prefix('/') {
        Some(folder) if !folder.is_empty() => Ok(folder.into()),
        _ => Err(Failure::new(format!("{unit} is not running; see `systemctl status {unit}`"))),
    }
}

type Property<'a> = (&'a str, Variant<'a>);

/// Asks systemd to make a scope in `slice` for a process. systemd delegates the scope to us.
pub fn start_scope(
    unit: &str,
    slice: Option<&str>,
    pid: i32,
    description: &str,
) -> Result<(), Failure> {
    let mut properties: Vec<Property<'_>> = vec![
        ("Description", description.into()),
        ("PIDs", Variant::from(vec![pid as u32])),
        ("Delegate", true.into()),
        ("MemoryAccounting", true.into()),
        ("CollectMode", "inactive-or-failed".into()),
    ];
    properties.extend(slice.map(|slice| ("Slice", slice.into())));
    start(unit, &properties, pid)
}

/// The scope for the daemon. systemd does not stop it before swap is off, nor choose it when memory
/// is short.
pub fn start_daemon_scope(pid: i32) -> Result<(), Failure> {
    let properties: Vec<Property<'_>> = vec![
        ("Description", "uzswap: the compressed swap device".into()),
        ("PIDs", Variant::from(vec![pid as u32])),
        ("Slice", "system.slice".into()),
        ("DefaultDependencies", false.into()),
        ("ManagedOOMPreference", "omit".into()),
        ("CollectMode", "inactive-or-failed".into()),
    ];
    start(DAEMON_SCOPE, &properties, pid)
}

fn start(unit: &str, properties: &[Property<'_>], pid: i32) -> Result<(), Failure> {
    let refused = |error: zbus::Error| {
        Failure::new(format!(
            "systemd does not make {unit}: {error}; see `systemctl status {unit}`"
        ))
    };
    let none: &[(&str, Vec<Property<'_>>)] = &[];
    zbus::block_on(async {
        let bus = zbus::Connection::system().await?;
        let arguments = (unit, "fail", properties, none);
        bus.call_method(Some(BUS_NAME), OBJECT, Some(INTERFACE), "StartTransientUnit", &arguments)
            .await
            .map(drop)
    })
    .map_err(refused)?;
    let is_there = || {
        let group = Hierarchy::find().and_then(|hierarchy| hierarchy.of_process(pid));
        group.is_some_and(|group| group.path().ends_with(unit))
    };
    match crate::device::processes::wait_for(PATIENCE, is_there) {
        true => Ok(()),
        false => Err(Failure::new(format!(
            "systemd has not made {unit} within {} s; see `systemctl status {unit}`",
            PATIENCE.as_secs()
        ))),
    }
}
