//! The lab: tests in virtual machines with other kernels and systems.
//!
//! ```text
//! kernel   fetched from Debian's packages, unpacked, not installed; it tells the processor
//! image    an initramfs that sees this machine's files read-only, or a small Debian with systemd
//! guest    QEMU: KVM where it works, software emulation elsewhere
//! job      what the guest does: test programs of this workspace, whose output comes over a serial
//!          line
//! ```
//! A guest fails if it hangs, panics, or its kernel complains. The guest's log is kept.

mod guest;
mod image;
pub mod job;
mod kernel;
pub mod matrix;
pub mod processor;

use crate::{Result, cross};
use clap::{Args, Parser, ValueEnum};
use processor::Processor;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// `cargo run -p xtask -- vm`.
#[derive(Debug, Parser)]
#[command(name = "xtask vm", about = "Run tests in a virtual machine")]
struct Arguments {
    #[command(flatten)]
    machine: Machine,
    /// Run everything on every machine, and write docs/machines.md; or only rows with these words,
    /// as in 6.1,6.12/v2/fuse.
    #[arg(long, value_name = "WORDS", num_args = 0..=1, require_equals = true,
          default_missing_value = "5.10,6.1,6.12,6.12-arm64,newest")]
    matrix: Option<String>,
    /// Tests of the workspace, TARGET or TARGET::NAME as in run::signals_are_passed_on; or a
    /// command, after `sh -c`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "TEST")]
    tests: Vec<String>,
}

/// The machine of a guest.
#[derive(Debug, Clone, Args)]
pub struct Machine {
    /// Its kernel: 5.10, 6.1, 6.12 or newest, as Debian has them; or 6.12-arm64.
    #[arg(long, default_value = "6.12")]
    pub kernel: String,
    /// Version of the cgroup interface that the memory controller is on.
    #[arg(long, value_enum, default_value_t = Cgroup::V2)]
    pub cgroup: Cgroup,
    /// The system: this machine's files under a busybox, or Debian with systemd.
    #[arg(long, value_enum, default_value_t = Image::Busybox)]
    pub image: Image,
    #[arg(long, default_value_t = 2)]
    pub cpus: u16,
    /// NUMA nodes, which share CPUs and memory evenly.
    #[arg(long, default_value_t = 1)]
    pub nodes: u16,
    /// Memory, MiB or with a unit of QEMU's.
    #[arg(long, default_value = "1G")]
    pub memory: String,
    /// Memory that can be plugged in while it runs, beyond `--memory`.
    #[arg(long, value_name = "SIZE")]
    pub hot_memory: Option<String>,
    /// Bytes a second that the disk under /var/tmp gives.
    #[arg(long, value_name = "BYTES")]
    pub slow_disk: Option<u64>,
    /// A second disk, /dev/disk/by-id/virtio-bad, of which each write and read beyond its first
    /// MiB fails.
    #[arg(long)]
    pub bad_disk: bool,
    /// A folder that the guest may write to, as /out.
    #[arg(long, value_name = "FOLDER")]
    pub out: Option<PathBuf>,
    /// Seconds after which a guest is taken to hang.
    #[arg(long, default_value_t = 1200)]
    pub timeout: u64,
    /// Environment of the tests, NAME=VALUE.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    pub environment: Vec<String>,
}

impl Machine {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// The processor of the machine's kernel.
    fn processor(&self) -> Result<Processor> {
        Ok(kernel::known(&self.kernel)?.processor)
    }

    /// A short description of the machine.
    fn describe(&self) -> String {
        format!("kernel {}, cgroup {}, {}", self.kernel, self.cgroup, self.image)
    }
}

/// The name of a value on the command line.
fn show(value: &impl ValueEnum, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    f.write_str(value.to_possible_value().ok_or(fmt::Error)?.get_name())
}

impl fmt::Display for Cgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(self, f)
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(self, f)
    }
}

/// See [`Machine::cgroup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Cgroup {
    /// A hierarchy of its own.
    V1,
    /// The unified hierarchy.
    V2,
}

/// See [`Machine::image`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Image {
    /// An initramfs, then this machine's files.
    Busybox,
    /// Debian 12 with systemd.
    Debian,
    /// Debian 13 with systemd.
    Debian13,
}

impl Image {
    /// The Debian suite, if the image is a Debian.
    fn suite(self) -> Option<&'static str> {
        match self {
            Self::Busybox => None,
            Self::Debian => Some("bookworm"),
            Self::Debian13 => Some("trixie"),
        }
    }
}

/// The folders of the lab.
#[derive(Debug, Clone)]
pub struct Lab {
    pub root: PathBuf,
    /// The lab's files.
    pub folder: PathBuf,
}

/// Runs the tests that the arguments name.
pub fn run(root: &Path, arguments: impl Iterator<Item = String>) -> ExitCode {
    let arguments = Arguments::parse_from(std::iter::once("xtask vm".to_owned()).chain(arguments));
    let lab = Lab { root: root.to_owned(), folder: crate::target(root).join("lab") };
    let outcome = match &arguments.matrix {
        Some(kernels) => matrix::run(&lab, &arguments.machine, kernels),
        None => one(&lab, &arguments.machine, &arguments.tests),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("vm: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Builds the test programs for guests with this processor.
fn build(lab: &Lab, processor: Processor) -> Result<job::Programs> {
    job::build(|| Ok(cross::cargo(&lab.root)), processor)
}

/// Runs tests in one guest. True if all passed.
fn one(lab: &Lab, machine: &Machine, tests: &[String]) -> Result<bool> {
    let programs = build(lab, machine.processor()?)?;
    let job = job::Job::new(&programs, tests)?;
    let outcome = guest::boot(lab, machine, &job)?;
    for test in &outcome.tests {
        println!("{:9} {}", if test.passed { "ok" } else { "FAILED" }, test.name);
    }
    for complaint in &outcome.complaints {
        println!("complaint {complaint}");
    }
    println!("{}: {}", machine.describe(), outcome.summary());
    Ok(outcome.passed())
}
