//! All machines of the lab with the tests that ran on each, for docs/machines.md.

use super::guest::{self, GuestOutcome};
use super::{Cgroup, Image, Lab, Machine, Result, build, job};
use crate::output;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs;
use std::process::Command;

/// The document with the rows of machines, and below a heading the rows of `xtask roots`.
pub const DOCUMENT: &str = "docs/machines.md";

const HEAD: &str = "# Machines

On which kernels and systems the tests have run, in virtual machines (QEMU, software emulation where
there is no KVM), as root with all capabilities. Written by `cargo run -p xtask -- vm --matrix`;
with `--matrix=6.12/v2/fuse` only the rows that have these words are run and replaced.

*fuse*, *ublk*: the tests of the swap device that are listed below, over FUSE and loop devices, or
over ublk; the others take many minutes each in emulation. *regions*: `memory`, `process` and
`torture` of `uzswap-region`. *in-process*: the tests of in-process that are listed below, whose
programs run as user 65534 without capabilities; *denied*: the test of this name, the same where a
filter denies userfaultfd. *systemd*, *package*: the tests of these names; the second needs the
package, `cargo run -p xtask -- dist --only deb`. *hotplug*: the test of this name, with 16 CPUs,
four nodes, and 512 MiB that are plugged in and out. *suspend*: the test of this name, which puts
the machine to sleep (`mem`, ACPI S3). *debian* and *debian13* are Debian 12 and 13 with systemd as
init, *busybox* the files of another Debian 12 without.

There is no row of ublk on 5.10, which is older than ublk. Nor is there one on 6.1, which Debian
builds without it (`CONFIG_BLK_DEV_UBLK is not set`). cgroup v1 has no row: the machine of
[benchmarks.md](benchmarks.md), Linux 6.18, has it, and `./check` runs there.

*arm64*: aarch64, always emulated. Its programs are cross-built on x86-64, and *busybox* is a folder
of Debian's arm64 packages there. *engine*: the unit tests of engine and range index. *small*: the
listed tests with one CPU and 512 MiB. *habits*, *histories*: the tests of these names; *denied*:
the tests of that name that begin with *without_userfaultfd_a*. The emulator runs on x86-64 and
orders memory as x86-64 does, so it shows no reordering.

| kernel | cgroup | system | tests | passed | date |
|---|---|---|---|---|---|
";

/// The machines, in the order of the table.
const MACHINES: [(&str, Cgroup, Image); 10] = [
    ("5.10", Cgroup::V2, Image::Busybox),
    ("6.1", Cgroup::V1, Image::Busybox),
    ("6.1", Cgroup::V2, Image::Busybox),
    ("6.1", Cgroup::V2, Image::Debian),
    ("6.12", Cgroup::V1, Image::Busybox),
    ("6.12", Cgroup::V2, Image::Busybox),
    ("6.12", Cgroup::V2, Image::Debian),
    ("6.12", Cgroup::V2, Image::Debian13),
    ("newest", Cgroup::V2, Image::Busybox),
    ("6.12-arm64", Cgroup::V2, Image::Busybox),
];
/// The suffix of names of aarch64 kernels, and of their releases.
const ARM: &str = "-arm64";

/// Tests, by targets and parts of names. Long tests are left out: pools that fill up, every codec,
/// load control.
const DEVICE: [&str; 15] = [
    "run::a_daemon_goes_on",
    "run::a_killed_daemon",
    "run::a_killed_keeper",
    "run::a_killed_run_is",
    "run::a_program_that_needs",
    "run::a_run_and_keeper",
    "run::a_second_interrupt",
    "run::bad_input",
    "run::signals_are_passed_on",
    "run::the_command",
    "run::two_runs",
    "serve",
    "control",
    "data::no_wrong_byte_while_the_compressor_changes",
    "data::no_wrong_byte_with_a_pool",
];
/// Tests for aarch64, where all of a guest is emulated, and slower yet.
const ARM_DEVICE: [&str; 5] = [
    "run::a_killed_daemon",
    "run::a_program_that_needs",
    "run::bad_input",
    "run::signals_are_passed_on",
    "run::the_command",
];
const ARM_IN_PROCESS: [&str; 9] = [
    "calls/patching",
    "calls/stopping",
    "in_process::a_call_whose_memory_is_out",
    "in_process::an_ordinary_user",
    "executed",
    "preload",
    "seen",
    "taken_over",
    "unmanaged",
];
/// Whole programs under a filter take more than an hour there.
const ARM_DENIED: [&str; 1] = ["denied::without_userfaultfd_a"];
const HABITS: [&str; 1] = ["habits"];
const HISTORIES: [&str; 1] = ["histories"];
const ARM_ENGINE: [&str; 2] = ["engine/lib", "ranges/lib"];
/// Tests with one CPU and 512 MiB.
const ARM_SMALL: [&str; 3] = ["region/memory", "run::a_program_that_needs", "run::the_command"];
const REGIONS: [&str; 3] = ["region/memory", "region/process", "region/torture"];
/// Tests that take more than a few seconds on a real processor are left out.
const IN_PROCESS: [&str; 5] = [
    "in_process::a_call_whose_memory_is_out",
    "in_process::an_ordinary_user",
    "in_process::pages_that_do_not_fit",
    "seen",
    "unmanaged",
];
const DENIED: [&str; 1] = ["denied"];
const SYSTEMD: [&str; 1] = ["systemd"];
const PACKAGE: [&str; 1] = ["package"];
const HOTPLUG: [&str; 1] = ["hotplug"];
const SUSPEND: [&str; 1] = ["suspend"];

/// Debian kernels without ublk: 5.10 is too old, and Debian's 6.1 is built without it.
const WITHOUT_UBLK: [&str; 2] = ["5.10", "6.1"];

/// With sixteen emulated CPUs on two real ones, which were busy, this took more than twenty
/// minutes. In-process in emulated aarch64 takes as long.
const LONG_SECONDS: u64 = 3600;

/// The machines for which tests are meant.
enum For {
    X86(&'static [Image]),
    Arm,
}

impl For {
    fn has(&self, kernel: &str, image: Image) -> bool {
        match self {
            Self::X86(images) => !kernel.ends_with(ARM) && images.contains(&image),
            Self::Arm => kernel.ends_with(ARM),
        }
    }
}

/// Tests of a guest: their name in the table, the tests, and their machines.
const TESTS: [(&str, &[&str], For); 17] = [
    ("fuse", &DEVICE, For::X86(&[Image::Busybox, Image::Debian])),
    ("ublk", &DEVICE, For::X86(&[Image::Busybox])),
    ("regions", &REGIONS, For::X86(&[Image::Busybox])),
    ("in-process", &IN_PROCESS, For::X86(&[Image::Busybox])),
    ("denied", &DENIED, For::X86(&[Image::Busybox])),
    ("systemd", &SYSTEMD, For::X86(&[Image::Debian])),
    ("package", &PACKAGE, For::X86(&[Image::Debian, Image::Debian13])),
    ("hotplug", &HOTPLUG, For::X86(&[Image::Busybox])),
    ("arm64 engine", &ARM_ENGINE, For::Arm),
    ("arm64 regions", &REGIONS, For::Arm),
    ("arm64 fuse", &ARM_DEVICE, For::Arm),
    ("arm64 small", &ARM_SMALL, For::Arm),
    ("arm64 in-process", &ARM_IN_PROCESS, For::Arm),
    ("arm64 denied", &ARM_DENIED, For::Arm),
    ("arm64 histories", &HISTORIES, For::Arm),
    ("arm64 habits", &HABITS, For::Arm),
    ("suspend", &SUSPEND, For::X86(&[Image::Debian])),
];

/// Runs the tests that `wanted` names, as in `6.1,6.12/v2/fuse`. Replaces their rows in the
/// document. True if all passed.
pub fn run(lab: &Lab, machine: &Machine, wanted: &str) -> Result<bool> {
    let mut built: BTreeMap<bool, job::Programs> = BTreeMap::new();
    let path = lab.root.join(DOCUMENT);
    let document = fs::read_to_string(&path).unwrap_or_default();
    let (machines, libraries) = split(&document);
    let mut rows = read(machines);
    let mut passed = true;
    for (place, (kernel, cgroup, image)) in MACHINES.into_iter().enumerate() {
        for (index, (name, tests, machines)) in TESTS.into_iter().enumerate() {
            let words = [kernel, &cgroup.to_string(), &image.to_string(), name].map(str::to_owned);
            let is_there = name != "ublk" || !WITHOUT_UBLK.contains(&kernel);
            if !is_there || !machines.has(kernel, image) || !is_wanted(wanted, &words) {
                continue;
            }
            let machine = Machine { kernel: kernel.into(), cgroup, image, ..machine.clone() };
            let programs = match built.entry(kernel.ends_with(ARM)) {
                Entry::Occupied(programs) => programs.into_mut(),
                Entry::Vacant(none) => none.insert(build(lab, machine.processor()?)?),
            };
            let outcome = boot(lab, machine, programs, name, tests)?;
            passed &= outcome.passed();
            let date = today()?;
            let (release, text) = (&outcome.release, describe(&outcome));
            let row = format!("| {release} | {cgroup} | {image} | {name} | {text} | {date} |");
            rows.insert((place, index), row);
            // Written after each guest: a later guest may take long, or fail.
            fs::write(&path, write(&rows) + libraries)?;
        }
    }
    Ok(passed)
}

/// The part of the document about machines, and the rest.
pub fn split(document: &str) -> (&str, &str) {
    document.split_at(document.find("\n## ").unwrap_or(document.len()))
}

/// Today's date, as in the tables.
pub fn today() -> Result<String> {
    Ok(output(Command::new("date").arg("+%F"))?.trim().to_owned())
}

/// True if all words of one alternative are in the row.
pub fn is_wanted(wanted: &str, row: &[String]) -> bool {
    let is_here = |word: &str| row.iter().any(|own| own == word);
    wanted.split(',').any(|words| words.split('/').all(is_here))
}

fn boot(
    lab: &Lab,
    mut machine: Machine,
    programs: &job::Programs,
    name: &str,
    tests: &[&str],
) -> Result<GuestOutcome> {
    if tests == DEVICE {
        machine.environment.push(format!("UZSWAP_TEST_TRANSPORT={name}"));
    }
    if tests == SUSPEND {
        machine.environment.push("UZSWAP_TEST_SUSPEND=1".into());
    }
    if tests == HOTPLUG {
        let [memory, hot] = ["2G", "512M"].map(str::to_owned);
        let timeout = machine.timeout.max(LONG_SECONDS);
        machine = Machine { cpus: 16, nodes: 4, memory, hot_memory: Some(hot), timeout, ..machine };
    }
    if [&ARM_IN_PROCESS[..], &ARM_DENIED, &HISTORIES, &HABITS].contains(&tests) {
        let timeout = machine.timeout.max(LONG_SECONDS);
        machine = Machine { memory: "3G".into(), timeout, ..machine };
    }
    if tests == ARM_SMALL {
        machine = Machine { cpus: 1, memory: "512M".into(), ..machine };
    }
    let tests: Vec<_> = tests.iter().map(|test| (*test).to_owned()).collect();
    let outcome = guest::boot(lab, &machine, &job::Job::new(programs, &tests)?)?;
    println!("vm: {}, {name}: {}", machine.describe(), outcome.summary());
    Ok(outcome)
}

/// Rows by their place in the table: the index of the machine, and of the tests.
type Rows = BTreeMap<(usize, usize), String>;

fn write(rows: &Rows) -> String {
    let rows: String = rows.values().map(|row| format!("{row}\n")).collect();
    let list =
        |tests: &[&str]| tests.iter().map(|test| format!("- `{test}`\n")).collect::<String>();
    let (device, in_process) = (list(&DEVICE), list(&IN_PROCESS));
    let (arm_device, arm_small) = (list(&ARM_DEVICE), list(&ARM_SMALL));
    let arm_in_process = list(&ARM_IN_PROCESS);
    format!(
        "{HEAD}{rows}\nThe tests of the swap device, by parts of their names:\n\n{device}\n\
         Those of in-process:\n\n{in_process}\n\
         Those of the swap device on arm64:\n\n{arm_device}\n\
         Those of a small arm64 machine:\n\n{arm_small}\n\
         Those of in-process on arm64:\n\n{arm_in_process}"
    )
}

/// The rows in a document.
fn read(text: &str) -> Rows {
    let place = |line: &str| {
        let mut fields = line.split('|').map(str::trim).skip(1);
        let (release, cgroup, image) = (fields.next()?, fields.next()?, fields.next()?);
        let name = fields.next()?;
        let machine = MACHINES.iter().position(|machine| {
            let of_arm = machine.0.strip_suffix(ARM);
            let is_version = |name: &str| release.starts_with(&format!("{name}."));
            let is_newest =
                machine.0 == "newest" && !MACHINES.iter().any(|(name, ..)| is_version(name));
            let is_kernel = is_newest || is_version(of_arm.unwrap_or(machine.0));
            is_kernel
                && of_arm.is_some() == release.ends_with(ARM)
                && machine.1.to_string() == cgroup
                && machine.2.to_string() == image
        });
        Some((machine?, TESTS.iter().position(|tests| tests.0 == name)?))
    };
    let rows = text.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.filter_map(|line| Some((place(line)?, line.to_owned()))).collect()
}

/// `21 of 21`, and the failed tests.
fn describe(outcome: &GuestOutcome) -> String {
    let text = job::count(&outcome.tests);
    match outcome.trouble() {
        Some(trouble) => text + "; " + &trouble,
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_other_machines_and_tests_stay() {
        let text = format!(
            "{HEAD}| 6.1.0-40-amd64 | v2 | debian | systemd | 4 of 4 | d |\n\
             | 7.2.13-amd64 | v2 | busybox | fuse | 1 of 2; not `a` | d |\n\
             | 6.12.9 | v1 | busybox | regions | 3 of 3 | d |\n\
             | 6.12.9-arm64 | v2 | busybox | arm64 regions | 3 of 3 | d |\n"
        );
        let rows = read(&text);
        assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [(3, 5), (4, 2), (8, 0), (9, 9)]);
        assert_eq!(read(&write(&rows)), rows);
    }

    #[test]
    fn words_choose_rows() {
        let row = ["6.12", "v2", "busybox", "fuse"].map(str::to_owned);
        for (wanted, is) in [("6.1,6.12", true), ("6.12/fuse", true), ("6.12/ublk,v1", false)] {
            assert_eq!(is_wanted(wanted, &row), is, "{wanted}");
        }
    }
}
