//! `uzswap doctor`: what works on this machine; and what `run` and `serve` need, checked
//! beforehand.

use crate::error::Failure;
use crate::leftovers;
use crate::size;
use std::fs;
use std::io;
use std::process::ExitCode;
use uzswap_region::Mode;
use uzswap_sys::cgroup::{Hierarchy, Version};
use uzswap_sys::process::Capability;
use uzswap_sys::{cgroup, cpu, fuse, loopdev, process, swap};

/// One thing that was looked at.
struct Finding {
    what: &'static str,
    state: Result<String, String>,
    /// Without it, the front end does not work.
    required: bool,
}

fn finding(what: &'static str, state: Result<String, String>) -> Finding {
    Finding { what, state, required: true }
}

fn optional(what: &'static str, state: Result<String, String>) -> Finding {
    Finding { what, state, required: false }
}

/// What the swap device needs.
fn swap_device() -> Vec<Finding> {
    let root = match process::is_root() {
        true => Ok("yes".into()),
        false => Err("no; run it with sudo".into()),
    };
    let reason = |error: io::Error, device: &str, remedy: &str| match error.kind() {
        io::ErrorKind::NotFound => format!("no {device}; {remedy}"),
        _ => format!("{device}: {error}; run as root, or pass the device into the container"),
    };
    let fuse = fuse::open().map(|_| "/dev/fuse".to_owned()).map_err(|error| {
        reason(error, "/dev/fuse", "modprobe fuse, or give the container --device /dev/fuse")
    });
    let loops = loopdev::check().map(|()| "/dev/loop-control".to_owned()).map_err(|error| {
        reason(error, "/dev/loop-control", "modprobe loop, or a kernel with CONFIG_BLK_DEV_LOOP")
    });
    let swaps = swap::areas().map(|areas| format!("{} areas on now", areas.len()));
    let swaps = swaps.map_err(|_| "this kernel has none (CONFIG_SWAP)".to_owned());
    let group = match Hierarchy::find() {
        Some(Hierarchy { version: Version::V1, root }) => Ok(format!("v1 at {}", root.display())),
        Some(Hierarchy { version: Version::V2, root }) => Ok(format!("v2 at {}", root.display())),
        None => {
            Err("none is mounted; boot with the memory controller (cgroup_enable=memory)".into())
        }
    };
    vec![
        finding("root", root),
        finding("FUSE", fuse),
        finding("loop devices", loops),
        finding("swap", swaps),
        finding("memory cgroup (for run)", group),
        optional("freezer (for run --load-control)", freezer()),
        optional("exempt from waiting for itself", io_flusher()),
        optional("kernel's zswap", zswap()),
    ]
}

/// Where load control would hold processes.
pub fn freezer() -> Result<String, String> {
    let missing = "cgroup version 2 is not mounted; mount -t cgroup2 none DIR";
    Ok(format!("at {}", cgroup::unified_root().ok_or(missing)?.display()))
}

/// Not tried: what is set here a command would inherit, and then not swap.
fn io_flusher() -> Result<String, String> {
    match process::has_capability(Capability::SysResource) {
        true => Ok("PR_SET_IO_FLUSHER is permitted".into()),
        false => Err("PR_SET_IO_FLUSHER needs CAP_SYS_RESOURCE; it works without, but give it if \
                      you can"
            .into()),
    }
}

fn zswap() -> Result<String, String> {
    match fs::read_to_string("/sys/module/zswap/parameters/enabled").as_deref().map(str::trim) {
        Ok("Y") => Err("is on and would take pages first; it is switched off while we run".into()),
        Ok(_) => Ok("is off".into()),
        Err(_) => Ok("is not there".into()),
    }
}

/// Who may serve the faults of regions.
fn regions() -> Vec<Finding> {
    let check = |mode: Mode| match mode.check() {
        Ok(()) => Ok("permitted".into()),
        Err(error) => Err(error.to_string()),
    };
    let default = match Mode::available() {
        Ok(mode) => Ok(mode.to_string()),
        Err(error) => Err(error.to_string()),
    };
    vec![
        finding("in-thread (SIGBUS; system calls need pinned memory)", check(Mode::InThread)),
        optional("handler-threads (any system call works)", check(Mode::HandlerThreads)),
        finding("used unless asked otherwise", default),
    ]
}

/// Checks what the swap device cannot do without.
pub fn require() -> Result<(), Failure> {
    for finding in swap_device() {
        if let (true, Err(reason)) = (finding.required, &finding.state) {
            return Err(Failure::new(format!("{}: {reason}", finding.what)));
        }
    }
    Ok(())
}

/// Prints it; status 1 when no front end works.
pub fn doctor() -> ExitCode {
    let device = print("swap device (run, serve)", &swap_device());
    let regions = print("regions (the library)", &regions());
    if let Ok(memory) = cpu::memory_info() {
        let (total, available) = (size::show(memory.total), size::show(memory.available));
        println!("memory: {total}, {available} available; {} CPUs", cpu::allowed());
    }
    for folder in crate::stats::sessions() {
        println!("{}", leftovers::describe(&folder));
    }
    if device || regions { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints what was found of a front end; whether it works.
fn print(what: &str, findings: &[Finding]) -> bool {
    let works = findings.iter().all(|finding| !finding.required || finding.state.is_ok());
    println!("{what}: {}", if works { "works here" } else { "does not work here" });
    for finding in findings {
        let (mark, text) = match (&finding.state, finding.required) {
            (Ok(text), _) => ("ok", text),
            (Err(text), true) => ("MISSING", text),
            (Err(text), false) => ("note", text),
        };
        println!("  {mark:8} {}: {text}", finding.what);
    }
    works
}
