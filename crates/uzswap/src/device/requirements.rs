//! The needs of the swap device, each checked before anything is changed.

use crate::error::Failure;
use std::fs;
use std::io;
use uzswap_block::TransportKind;
use uzswap_sys::cgroup::{Group, Hierarchy, Version};
use uzswap_sys::process::Capability;
use uzswap_sys::{cgroup, cpu, fuse, loopdev, process, swap};

/// The result of one check.
pub struct Finding {
    /// The name of the checked part.
    pub what: &'static str,
    /// The part that was found, or the reason why it is missing and the remedy.
    pub state: Result<String, String>,
    /// True if the front end needs the part.
    pub required: bool,
}

/// A part that the front end needs.
pub fn finding(what: &'static str, state: Result<String, String>) -> Finding {
    Finding { what, state, required: true }
}

/// A part that the front end can do without.
pub fn optional(what: &'static str, state: Result<String, String>) -> Finding {
    Finding { what, state, required: false }
}

/// The needs of the swap device.
pub fn swap_device() -> Vec<Finding> {
    let root = match process::is_root() {
        true => Ok("yes".into()),
        false => Err("no; run it with sudo".into()),
    };
    let ublk = ublk();
    let loops = Finding { required: ublk.is_err(), ..finding("loop devices", loops()) };
    let ublk = ublk.map_err(|text| format!("{text}; loop devices serve as well"));
    let pages = cpu::check_pages().map(|()| "4 KiB".into()).map_err(|error| error.to_string());
    vec![
        finding("root", root),
        finding("page size", pages),
        finding("FUSE", fuse()),
        optional("ublk", ublk),
        loops,
        finding("swap", swapping()),
        finding("memory cgroup (for run)", memory_group()),
        optional("freezer (for run --load-control)", freezer()),
        optional("daemon never waits for its own device", io_flusher()),
        optional("kernel's zswap", zswap()),
    ]
}

/// The reason why a device cannot be opened, and the remedy.
fn reason(error: &io::Error, device: &str, remedy: &str) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => format!("no {device}; {remedy}"),
        _ => format!("{device}: {error}; run as root, or pass the device into the container"),
    }
}

fn found(check: io::Result<()>, device: &str, remedy: &str) -> Result<String, String> {
    check.map(|()| device.to_owned()).map_err(|error| reason(&error, device, remedy))
}

fn fuse() -> Result<String, String> {
    let remedy = "modprobe fuse, or give the container --device /dev/fuse";
    found(fuse::open().map(drop), "/dev/fuse", remedy)
}

fn loops() -> Result<String, String> {
    let remedy = "modprobe loop, or a kernel with CONFIG_BLK_DEV_LOOP";
    found(loopdev::check(), "/dev/loop-control", remedy)
}

fn ublk() -> Result<String, String> {
    let remedy = "modprobe ublk_drv (Linux 6.1)";
    found(TransportKind::Ublk.check(), "/dev/ublk-control", remedy)
}

/// Checks the needs of a transport. The error names the missing parts and the remedy.
pub fn transport(kind: TransportKind) -> Result<(), String> {
    match kind {
        TransportKind::Fuse => fuse().and_then(|_| loops()).map(drop),
        TransportKind::Ublk => ublk().map(drop),
    }
}

/// Checks if areas may be switched on.
fn swapping() -> Result<String, String> {
    let areas = swap::areas().map_err(|_| "this kernel has none (CONFIG_SWAP)".to_owned())?;
    match swap::may_switch_on() {
        Ok(()) => Ok(format!("{} areas on now", areas.len())),
        Err(error) if !process::has_capability(Capability::SysAdmin) => {
            Err(format!("swapon: {error}; it needs CAP_SYS_ADMIN"))
        }
        Err(error) => Err(format!(
            "swapon: {error}; a seccomp filter forbids it (in Docker: --security-opt \
             seccomp=unconfined, or a profile that allows swapon and swapoff)"
        )),
    }
}

/// Checks if a command can be limited: returns the place, or the obstacle.
fn memory_group() -> Result<String, String> {
    let none = "none is mounted; boot with the memory controller (cgroup_enable=memory)";
    let hierarchy = Hierarchy::find().ok_or(none)?;
    let version = match hierarchy.version {
        Version::V1 => "v1",
        Version::V2 => "v2",
    };
    let own = hierarchy.own();
    if let Some((0, file)) = own.swap_limit() {
        return Err(format!("{} is 0, so nothing can be swapped; raise it", file.display()));
    }
    if hierarchy.version == Version::V2 && crate::device::systemd::is_here() {
        return Ok(format!("{version} at {}; systemd makes a scope", hierarchy.root.display()));
    }
    may_make(&own).map_err(|error| {
        format!(
            "{}: {error}; mount it so that it may be written (in a container: --privileged)",
            own.path().display()
        )
    })?;
    Ok(format!("{version} at {}, in {}", hierarchy.root.display(), own.path().display()))
}

/// Tries to make a group, and removes it.
fn may_make(parent: &Group) -> io::Result<()> {
    let name = format!("uzswap-doctor-{}", std::process::id());
    parent.make_plain_child(&name)?.remove()
}

/// The place where load control would suspend processes.
pub fn freezer() -> Result<String, String> {
    let missing = "cgroup version 2 is not mounted; mount -t cgroup2 none DIR";
    Ok(format!("at {}", cgroup::unified_root().ok_or(missing)?.display()))
}

/// Only the permission is checked: a command would inherit the setting, and then not swap.
fn io_flusher() -> Result<String, String> {
    match process::has_capability(Capability::SysResource) {
        true => Ok("PR_SET_IO_FLUSHER is permitted".into()),
        false => Err("PR_SET_IO_FLUSHER needs CAP_SYS_RESOURCE; the device works without it, but \
                      give it if you can"
            .into()),
    }
}

fn zswap() -> Result<String, String> {
    match fs::read_to_string("/sys/module/zswap/parameters/enabled").as_deref().map(str::trim) {
        Ok("Y") => {
            Err("is on and would take pages first; uzswap switches it off while it runs".into())
        }
        Ok(_) => Ok("is off".into()),
        Err(_) => Ok("is not there".into()),
    }
}

/// Checks the requirements of the swap device.
pub fn require() -> Result<(), Failure> {
    for finding in swap_device() {
        if let (true, Err(reason)) = (finding.required, &finding.state) {
            return Err(Failure::new(format!("{}: {reason}", finding.what)));
        }
    }
    Ok(())
}
