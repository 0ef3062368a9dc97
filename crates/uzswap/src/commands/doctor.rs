//! `uzswap doctor`: the abilities of this machine.

use crate::cli::DoctorArguments;
use crate::commands::{in_process, status};
use crate::device::requirements::{Finding, finding, optional, swap_device};
use crate::error::Failure;
use crate::size;
use crate::stdio::show;
use serde_json::{Value, json};
use std::process::ExitCode;
use uzswap_region::{Means, Mode};
use uzswap_sys::cpu;

/// The means by which the faults of regions can be served.
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
        finding("default mode", default),
    ]
}

/// The needs of `run --in-process`.
fn in_process() -> Vec<Finding> {
    let faults = Mode::InThread.check().map(|()| "permitted".into());
    let faults = faults.map_err(|error| error.to_string());
    let by = in_process::check().map(|means| {
        let text = match means {
            Means::Moves => "userfaultfd",
            Means::Copies => "userfaultfd, as copies: moves need Linux 6.8",
            Means::Guards => "guard pages (Linux 6.15), slower than by userfaultfd",
            Means::Protection => "protection (mprotect), which is slower yet",
        };
        text.to_owned()
    });
    vec![
        Finding { what: "userfaultfd with SIGBUS", state: faults, required: false },
        finding("pages leave by", by),
        finding(
            "library",
            in_process::libraries::preloaded().map(|path| path.display().to_string()),
        ),
    ]
}

/// Prints the findings. Status 1 when no front end works.
pub fn doctor(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let (device, regions, in_process) = (swap_device(), regions(), in_process());
    let works = works(&device) || works(&regions) || works(&in_process);
    if arguments.json {
        let json = json!({
            "swap_device": to_json(&device),
            "regions": to_json(&regions),
            "in_process": to_json(&in_process),
        });
        show!("{json:#}");
    } else {
        print("swap device (run, serve)", &device);
        print("regions (the library)", &regions);
        print("in-process (run --in-process)", &in_process);
        if let Ok(memory) = cpu::memory_info() {
            let (total, available) = (size::show(memory.total), size::show(memory.available));
            show!("memory: {total}, {available} available; {} CPUs", cpu::allowed());
        }
        status::describe().into_iter().for_each(|line| show!("{line}"));
    }
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// True if the checked front end works.
fn works(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| !finding.required || finding.state.is_ok())
}

/// The findings as JSON, and true if the front end works. A finding's text names the thing that
/// works, or the missing one.
fn to_json(findings: &[Finding]) -> Value {
    let each = findings.iter().map(|finding| {
        let (Ok(text) | Err(text)) = &finding.state;
        json!({ "what": finding.what, "ok": finding.state.is_ok(),
            "required": finding.required, "text": text })
    });
    json!({ "works": works(findings), "findings": each.collect::<Vec<_>>() })
}

/// Prints the findings of a front end.
fn print(what: &str, findings: &[Finding]) {
    let works = works(findings);
    show!("{what}: {}", if works { "works here" } else { "does not work here" });
    for finding in findings {
        let (mark, text) = match (&finding.state, finding.required) {
            (Ok(text), _) => ("ok", text),
            (Err(text), true) => ("MISSING", text),
            (Err(text), false) => ("note", text),
        };
        show!("  {mark:8} {}: {text}", finding.what);
    }
}
