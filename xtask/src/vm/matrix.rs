//! All machines of the lab, and what was run on each, as docs/machines.md has it.

use super::guest::{self, Outcome};
use super::kernel::output;
use super::{Cgroup, Image, Lab, Machine, Result, job};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

const DOCUMENT: &str = "docs/machines.md";

const HEAD: &str = "# Machines

On which kernels and systems the tests have run, in virtual machines (QEMU, software emulation where
there is no KVM), as root with all capabilities. Written by `cargo run -p xtask -- vm --matrix`.

*Swap device*: the end-to-end tests `run`, `serve`, `control` and `data` over FUSE and loop devices,
or over ublk. *Regions*: the tests `memory`, `process` and `torture` of `uzswap-region`. *systemd*:
the test `systemd`, on Debian 12 with systemd as init.

| kernel | cgroup | system | swap device, FUSE | swap device, ublk | regions | systemd | date |
|---|---|---|---|---|---|---|---|
";

/// The machines, in the order of the table.
const MACHINES: [(&str, Cgroup, Image); 7] = [
    ("6.1", Cgroup::V1, Image::Busybox),
    ("6.1", Cgroup::V2, Image::Busybox),
    ("6.1", Cgroup::V2, Image::Debian),
    ("6.12", Cgroup::V1, Image::Busybox),
    ("6.12", Cgroup::V2, Image::Busybox),
    ("6.12", Cgroup::V2, Image::Debian),
    ("newest", Cgroup::V2, Image::Busybox),
];

const DEVICE: [&str; 4] = ["run", "serve", "control", "data"];
const REGIONS: [&str; 3] = ["region/memory", "region/process", "region/torture"];
const SYSTEMD: [&str; 1] = ["systemd"];

/// Runs the matrix on kernels, by name, and replaces their rows in the document; whether all
/// passed.
pub fn run(lab: &Lab, machine: &Machine, kernels: &str) -> Result<bool> {
    let programs = job::build(lab)?;
    let path = lab.root.join(DOCUMENT);
    let mut rows = read(&fs::read_to_string(&path).unwrap_or_default());
    let mut passed = true;
    for (index, (kernel, cgroup, image)) in MACHINES.into_iter().enumerate() {
        if !kernels.split(',').any(|name| name == kernel) {
            continue;
        }
        let machine = Machine { kernel: kernel.into(), cgroup, image, ..machine.clone() };
        let mut row =
            Row { lab, machine, programs: &programs, release: String::new(), passed: true };
        let cells = match image {
            Image::Busybox => [
                row.cell(&DEVICE, "fuse")?,
                row.cell(&DEVICE, "ublk")?,
                row.cell(&REGIONS, "")?,
                no(),
            ],
            Image::Debian => [row.cell(&DEVICE, "fuse")?, no(), no(), row.cell(&SYSTEMD, "")?],
        };
        passed &= row.passed;
        let date = output(Command::new("date").arg("+%F"))?;
        let (release, cells, date) = (&row.release, cells.join(" | "), date.trim());
        rows.insert(index, format!("| {release} | {cgroup} | {image} | {cells} | {date} |"));
        // After each: a later one may take long, or fail.
        let table: Vec<_> = rows.values().map(String::as_str).collect();
        fs::write(&path, format!("{HEAD}{}\n", table.join("\n")))?;
    }
    Ok(passed)
}

fn no() -> String {
    "–".into()
}

/// The rows of the document as it is, by their places in the table.
fn read(text: &str) -> BTreeMap<usize, String> {
    let of = |line: &&str| {
        let mut fields = line.split('|').map(str::trim).skip(1);
        let (release, cgroup, image) = (fields.next()?, fields.next()?, fields.next()?);
        MACHINES.iter().position(|machine| {
            let is_newest = machine.0 == "newest"
                && MACHINES.iter().all(|(name, ..)| !release.starts_with(&format!("{name}.")));
            let is_kernel = is_newest || release.starts_with(&format!("{}.", machine.0));
            is_kernel && machine.1.to_string() == cgroup && machine.2.to_string() == image
        })
    };
    let rows = text.lines().filter(|line| line.starts_with("| ")).skip(1);
    rows.filter_map(|line| Some((of(&line)?, line.to_owned()))).collect()
}

/// A machine, on which several guests run one after another.
struct Row<'a> {
    lab: &'a Lab,
    machine: Machine,
    programs: &'a job::Programs,
    release: String,
    passed: bool,
}

impl Row<'_> {
    /// Runs tests over a transport; what is to be said of it.
    fn cell(&mut self, tests: &[&str], transport: &str) -> Result<String> {
        let tests: Vec<_> = tests.iter().map(|test| (*test).to_owned()).collect();
        let job = job::Job::new(self.programs, &tests)?;
        let mut machine = self.machine.clone();
        if !transport.is_empty() {
            machine.environment.push(format!("UZSWAP_TEST_TRANSPORT={transport}"));
        }
        let outcome = guest::boot(self.lab, &machine, &job)?;
        println!("vm: {}, {}: {}", machine.describe(), tests.join(" "), outcome.summary());
        self.release.clone_from(&outcome.release);
        self.passed &= outcome.passed();
        Ok(describe(&outcome))
    }
}

/// `21 of 21`, and what failed.
fn describe(outcome: &Outcome) -> String {
    let failed: Vec<_> = outcome.tests.iter().filter(|test| !test.passed).collect();
    let all = outcome.tests.len();
    let mut text = format!("{} of {all}", all - failed.len());
    for test in failed {
        text += &format!("; not `{}`", test.name);
    }
    match outcome.trouble() {
        Some(trouble) => text + "; " + &trouble,
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_other_kernels_stay() {
        let text = format!(
            "{HEAD}| 6.1.0-40-amd64 | v2 | debian | 1 | 2 | 3 | 4 | d |\n\
             | 7.2.13-amd64 | v2 | busybox | 1 | 2 | 3 | 4 | d |\n\
             | 6.12.9 | v1 | busybox | 1 | 2 | 3 | 4 | d |\n"
        );
        assert_eq!(read(&text).into_keys().collect::<Vec<_>>(), [2, 3, 6]);
    }
}
