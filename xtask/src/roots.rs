//! Other C libraries: runs tests of in-process in the user spaces of several Debian releases, on
//! this machine's kernel.
//!
//! ```text
//! root      made once by mmdebstrap, below target/roots
//! programs  the tests, built for the oldest root
//! job       their names, run in the root, in namespaces of its own for mounts and processes
//! ```
//! Tests, and all programs that they start, are linked with the C library of the oldest root. So
//! they start in every root, and use its own C library.
//!
//! Mounts are made only in these namespaces, so a killed run leaves none.

use crate::portable::{self, MIRROR};
use crate::vm::job::{self, Ended, Job, Programs, Reader};
use crate::vm::matrix::{DOCUMENT, is_wanted, split, today};
use crate::vm::processor::Processor;
use crate::{Result, output};
use clap::Parser;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

/// `cargo run -p xtask -- roots`.
#[derive(Debug, Parser)]
#[command(name = "xtask roots", about = "Run tests of in-process with other C libraries")]
struct Arguments {
    /// Run everything in every root, and write docs/machines.md; or only rows with these words, as
    /// in debian12,debian13/musl.
    #[arg(long, value_name = "WORDS", num_args = 0..=1, require_equals = true,
          default_missing_value = "debian11,debian12,debian13,sid")]
    matrix: Option<String>,
    /// The root that tests run in: debian11, debian12, debian13 or sid.
    #[arg(long, default_value = "debian13")]
    root: String,
    /// Tests, TARGET or TARGET::NAME as in habits::handlers_may.
    #[arg(value_name = "TEST")]
    tests: Vec<String>,
}

/// The roots and their suites, in the order of the table.
const ROOTS: [(&str, &str); 4] =
    [("debian11", "bullseye"), ("debian12", "bookworm"), ("debian13", "trixie"), ("sid", "sid")];

/// The packages of a root: all programs that tests run in it.
const PACKAGES: &str =
    "gcc,libc6-dev,python3,perl,sqlite3,procps,util-linux,coreutils,make,musl-tools,elfutils";

const IN_PROCESS: [&str; 6] =
    ["taken_over", "in_process", "habits", "unmanaged", "seen", "preload"];
/// The programs of the second test run only in `./check --full`.
const PROGRAMS: [&str; 2] = ["in_process::programs_compute", "in_process::more_programs"];
const MUSL: [&str; 1] = ["musl"];

/// The tests, by their names in the table.
const TESTS: [(&str, &[&str]); 3] =
    [("in-process", &IN_PROCESS), ("programs", &PROGRAMS), ("musl", &MUSL)];

/// A job that takes longer, s, is taken to hang.
const PATIENCE: &str = "3000";

const HEADING: &str = "\n## C libraries\n";
const HEAD: &str = "
The tests of in-process in other user spaces, on one kernel. Written by
`cargo run -p xtask -- roots --matrix`; with `--matrix=debian12,debian13/musl` only the rows that
have these words are run and replaced. A root is made by mmdebstrap, and entered by root in
namespaces of its own; programs run as user 65534 without capabilities. All roots run one build of
this repository, which is linked with the C library of Debian 11 (`xtask/src/portable.rs`). The rows
of Debian 12, 13 and sid of 2026-11-28 ran a build that was linked with glibc 2.36.

*in-process*: `taken_over`, `in_process`, `habits`, `unmanaged`, `seen` and `preload`. *programs*:
Python, Perl, SQLite, `sort`, and gcc under make, in a half and a quarter of their memory.
*musl*: programs that musl-gcc linked, alone and started by programs of glibc.

| system | C library | tests | passed | kernel | date |
|---|---|---|---|---|---|
";

struct Folders {
    repository: PathBuf,
    target: PathBuf,
}

/// Runs the tests that the arguments name.
pub fn run(root: &Path, arguments: impl Iterator<Item = String>) -> ExitCode {
    let name = std::iter::once("xtask roots".to_owned());
    let arguments = Arguments::parse_from(name.chain(arguments));
    let folders = Folders { repository: root.to_owned(), target: crate::target(root) };
    let outcome = match &arguments.matrix {
        Some(wanted) => matrix(&folders, wanted),
        None => one(&folders, &arguments.root, &arguments.tests),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("roots: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs tests in one root. True if all passed.
fn one(folders: &Folders, name: &str, tests: &[String]) -> Result<bool> {
    let suite = ROOTS.iter().find(|root| root.0 == name).map(|root| root.1);
    let suite = suite.ok_or_else(|| format!("there is no root '{name}'; see --help"))?;
    let root = make(folders, name, suite)?;
    let outcome = enter(folders, &root, &build(folders)?, tests, &[])?;
    println!("roots: {name}: {}", job::count(&outcome.tests));
    Ok(outcome.passed())
}

/// Runs the tests that `wanted` names, and replaces their rows. True if all passed.
fn matrix(folders: &Folders, wanted: &str) -> Result<bool> {
    let path = folders.repository.join(DOCUMENT);
    let document = fs::read_to_string(&path)?;
    let (machines, libraries) = split(&document);
    let mut rows = read(libraries);
    let programs = build(folders)?;
    let mut passed = true;
    for (at, (name, suite)) in ROOTS.into_iter().enumerate() {
        for (index, (tests_name, tests)) in TESTS.into_iter().enumerate() {
            if !is_wanted(wanted, &[name, tests_name].map(str::to_owned)) {
                continue;
            }
            let root = make(folders, name, suite)?;
            let is_musl = tests == MUSL;
            // Without this, the second test would leave its programs out.
            let is_full = (tests == PROGRAMS).then(|| "UZSWAP_FULL=1".to_owned());
            let tests: Vec<_> = tests.iter().map(|test| (*test).to_owned()).collect();
            let environment: Vec<_> = is_full.into_iter().collect();
            let outcome = enter(folders, &root, &programs, &tests, &environment)?;
            passed &= outcome.passed();
            let (library, count) = (library(&root, is_musl)?, job::count(&outcome.tests));
            println!("roots: {name}, {tests_name}: {count}");
            let end = if outcome.is_done { "" } else { "; it did not come to its end" };
            let (kernel, date) = (outcome.release.unwrap_or_default(), today()?);
            let row =
                format!("| {name} | {library} | {tests_name} | {count}{end} | {kernel} | {date} |");
            rows.insert((at, index), row);
            // Written after each job: a later job may take long, or fail.
            fs::write(&path, machines.to_owned() + &write(&rows))?;
        }
    }
    Ok(passed)
}

/// Builds the workspace and its tests against the C library of the oldest root, so that they start
/// in every root.
fn build(folders: &Folders) -> Result<Programs> {
    job::build(|| portable::cargo(&folders.repository, &folders.target), Processor::X86)
}

/// The file of a root that lists its packages.
const LIST: &str = "etc/uzswap-packages";

/// True if the root exists and has all packages. A test whose program is missing would fail there.
fn is_complete(root: &Path) -> bool {
    fs::read_to_string(root.join(LIST)).is_ok_and(|list| list == PACKAGES)
}

/// The root with this name. It is made once for a list of packages. (The tests of installed files
/// use roots with other packages, which are named after suites.)
fn make(folders: &Folders, name: &str, suite: &str) -> Result<PathBuf> {
    let root = folders.target.join("roots").join(name);
    if !is_complete(&root) {
        println!("roots: making {name}, Debian's {suite}");
        let fresh = root.with_extension("new");
        // An interrupted run begins again. The folder may not exist.
        let _ = fs::remove_dir_all(&fresh);
        fs::create_dir_all(folders.target.join("roots"))?;
        let mut make = Command::new("mmdebstrap");
        make.args(["--quiet", "--variant=minbase", "--include", PACKAGES]);
        // A mirror's copy of sid may be older than the week for which its signature is valid.
        make.args(["--aptopt=Acquire::Check-Valid-Until \"false\"", suite]);
        output(make.arg(&fresh).arg(MIRROR)).map_err(|error| {
            format!("{error}; it needs root, mmdebstrap, and a way to Debian's packages")
        })?;
        fs::write(fresh.join(LIST), PACKAGES)?;
        // There may be an older root, with other packages.
        let _ = fs::remove_dir_all(&root);
        fs::rename(fresh, &root)?;
    }
    Ok(root)
}

/// The C library of a root's programs, or its musl.
fn library(root: &Path, is_musl: bool) -> Result<String> {
    let mut command = Command::new("chroot");
    command.arg(root);
    if is_musl {
        command.args([
            "dpkg-query",
            "--show",
            "--showformat=musl ${source:Upstream-Version}",
            "musl",
        ]);
    } else {
        command.args(["getconf", "GNU_LIBC_VERSION"]);
    }
    Ok(output(&mut command)?.trim().to_owned())
}

/// Enters a root that has this machine's devices. The repository and its builds are read-only. The
/// script is the first process of a PID namespace, so that all others end with it.
const ENTER: &str = r#"
root=$1 repository=$2 target=$3
rm -rf "$root"/var/tmp/*
mkdir -p "$root$repository" "$root$target"
mount --bind "$root" "$root"
mount --bind -o ro "$repository" "$root$repository"
mount --bind -o ro "$target" "$root$target"
mount -t proc proc "$root/proc"
for folder in /dev /sys /tmp; do mount --rbind "$folder" "$root$folder"; done
timeout --signal=KILL "$4" chroot "$root" /bin/sh -c "$5"
"#;

/// The result of a job.
struct RootOutcome {
    tests: Vec<Ended>,
    release: Option<String>,
    /// True if the job was completed.
    is_done: bool,
}

impl RootOutcome {
    fn passed(&self) -> bool {
        self.is_done && self.tests.iter().all(|test| test.passed)
    }
}

/// Runs tests in a root. Keeps their output beside the root.
fn enter(
    folders: &Folders,
    root: &Path,
    programs: &Programs,
    tests: &[String],
    environment: &[String],
) -> Result<RootOutcome> {
    let job = Job::new(programs, tests)?;
    // When this process ends, the kernel kills `unshare`, and then `unshare`'s child.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig=KILL", "unshare", "--mount", "--propagation=private", "--pid"]);
    command.args(["--fork", "--kill-child", "sh", "-ec", ENTER, "sh"]);
    command.args([root, &folders.repository, &folders.target]);
    command.arg(PATIENCE).arg(job.steps(environment));
    command.env_remove("XDG_RUNTIME_DIR").stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("setpriv: {error}"))?;
    let output = child.stdout.take().ok_or("no output of the job")?;
    let log = root.with_extension("log");
    let mut file = fs::File::create(&log)?;
    let mut reader = Reader::default();
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        writeln!(file, "{line}")?;
        reader.line(&line);
    }
    child.wait()?;
    let outcome =
        RootOutcome { tests: reader.tests, release: reader.release, is_done: reader.is_done };
    if !outcome.passed() {
        println!("roots: the output is in {}", log.display());
    }
    Ok(outcome)
}

/// Rows by their place in the table: the index of the root, and of the tests.
type Rows = BTreeMap<(usize, usize), String>;

fn write(rows: &Rows) -> String {
    let rows: String = rows.values().map(|row| format!("{row}\n")).collect();
    format!("{HEADING}{HEAD}{rows}")
}

fn read(text: &str) -> Rows {
    let place = |line: &str| {
        let fields: Vec<_> = line.split('|').map(str::trim).collect();
        let root = ROOTS.iter().position(|root| Some(&root.0) == fields.get(1))?;
        Some((root, TESTS.iter().position(|tests| Some(&tests.0) == fields.get(3))?))
    };
    text.lines().filter_map(|line| Some((place(line)?, line.to_owned()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_with_an_earlier_list_of_packages_is_made_again() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_complete(root.path()));
        fs::create_dir(root.path().join("etc")).unwrap();
        for (list, expected) in [(PACKAGES, true), ("gcc,libc6-dev", false)] {
            fs::write(root.path().join(LIST), list).unwrap();
            assert_eq!(is_complete(root.path()), expected);
        }
    }

    #[test]
    fn the_two_tables_of_the_document_are_kept_apart() {
        let rows = "| debian12 | glibc 2.36 | programs | 2 of 2 | 6.18 | d |\n\
                    | sid | musl 1.2.5 | musl | 1 of 1 | 6.18 | d |\n";
        let document =
            format!("# Machines\n| 6.1 | v2 | debian | fuse | 1 of 1 | d |\n{HEADING}{HEAD}{rows}");
        let (machines, libraries) = split(&document);
        assert!(machines.ends_with("| d |\n"));
        let read = read(libraries);
        assert_eq!(read.keys().copied().collect::<Vec<_>>(), [(1, 1), (3, 2)]);
        assert_eq!(write(&read), libraries);
        assert_eq!(split(machines), (machines, ""));
    }
}
