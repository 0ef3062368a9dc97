//! Other C libraries: runs tests of in-process in the user spaces of several Debian releases, on
//! this machine's kernel.
//!
//! ```text
//! root      made once by mmdebstrap, below target/roots
//! programs  the tests, as they are built here
//! job       their names, run in the root, in namespaces of its own for mounts and processes
//! ```
//! The tests need the C library that they were built with. In a root with an older one, this
//! machine's dynamic linker and libraries start them. The tests then run the published program:
//! that of the newest tarball of `xtask dist` ([`installed`]).
//!
//! Mounts are made only in these namespaces, so a killed run leaves none.

use crate::portable::MIRROR;
use crate::vm::Lab;
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
namespaces of its own; programs run as user 65534 without capabilities. The tests run this
repository's build, but in `debian11`: its C library is older than that of this machine. There this
machine's dynamic linker starts the tests. They run the program and libraries of the newest tarball
(`cargo run -p xtask -- dist --only tarball`), which is built for glibc 2.28.

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
    let outcome = enter(folders, &root, &build(folders)?, tests, Vec::new())?;
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
            let environment = is_full.into_iter().collect();
            let outcome = enter(folders, &root, &programs, &tests, environment)?;
            passed &= outcome.passed();
            let (library, count) = (library(&root, is_musl)?, job::count(&outcome.tests));
            println!("roots: {name}, {tests_name}: {count}");
            let end = if outcome.is_done { "" } else { "; it did not come to its end" };
            let (kernel, date) = (outcome.release.unwrap_or_default(), today()?);
            let row =
                format!("| {name} | {library} | {tests_name} | {count}{end} | {kernel} | {date} |");
            rows.insert((at, index), row);
            // Written after each job: a later one may take long, or fail.
            fs::write(&path, machines.to_owned() + &write(&rows))?;
        }
    }
    Ok(passed)
}

/// Builds the test programs like `./check`. They start in roots whose C library is not older.
fn build(folders: &Folders) -> Result<Programs> {
    let (root, folder) = (folders.repository.clone(), folders.target.join("lab"));
    job::build(&Lab { root, folder }, Processor::X86)
}

/// True for a root whose C library is older than this machine's.
fn is_older(root: &Path) -> Result<bool> {
    let own = output(Command::new("getconf").arg("GNU_LIBC_VERSION"))?;
    Ok(version(&library(root, false)?) < version(&own))
}

/// The installed published program, and the command prefix that starts tests beside it.
struct Installed {
    /// The folder with the program, its libraries, and the programs that tests start.
    folder: PathBuf,
    /// The command that starts a test with this machine's C library.
    linker: Vec<String>,
}

/// Unpacks the newest tarball of `xtask dist`, and copies the libraries that tests need.
fn installed(folders: &Folders, programs: &Programs) -> Result<Installed> {
    let folder = folders.target.join("roots/installed");
    let (unpacked, linker) = (folder.join("unpacked"), folder.join("linker"));
    // Remains of the last run; the folder may not exist.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&unpacked)?;
    fs::create_dir_all(&linker)?;
    let tarball = newest_tarball(&folders.target.join("dist"))?;
    println!("roots: with {}", tarball.display());
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(tarball).arg("--strip-components=1").arg("-C").arg(&unpacked);
    output(&mut tar)?;
    let test = programs.values().next().ok_or("there are no tests")?;
    let built = test.ancestors().nth(2).ok_or("a test in no folder")?;
    let own = TEST_PROGRAMS.iter().map(|name| built.join(name));
    let published = PUBLISHED.iter().map(|name| unpacked.join(name));
    for file in published.chain(own) {
        fs::copy(&file, folder.join(file.file_name().ok_or("a file without a name")?))?;
    }
    // ldd prints each test's name, and below it `NAME => PATH (ADDRESS)`, and the linker's path
    // alone.
    let needed = output(Command::new("ldd").args(programs.values()))?;
    for line in needed.lines().filter(|line| line.starts_with('\t')) {
        let path = line.split_whitespace().find(|word| word.starts_with('/')).map(Path::new);
        if let Some((path, name)) = path.and_then(|path| Some((path, path.file_name()?))) {
            fs::copy(path, linker.join(name))?;
        }
    }
    let (start, folder_of_libraries) = (linker.join(LINKER), linker.display().to_string());
    let linker =
        vec![start.display().to_string(), "--library-path".to_owned(), folder_of_libraries];
    Ok(Installed { folder, linker })
}

/// The dynamic linker's file.
const LINKER: &str = "ld-linux-x86-64.so.2";
/// The used files of the tarball.
const PUBLISHED: [&str; 3] =
    ["bin/uzswap", "lib/uzswap/libuzswap_preload.so", "lib/uzswap/libuzswap_agent.so"];
/// Programs that tests start, beside those.
const TEST_PROGRAMS: [&str; 2] = ["absent", "torture"];

fn newest_tarball(folder: &Path) -> Result<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let tarballs = files.filter(|file| file.to_string_lossy().ends_with("-x86_64-linux.tar.gz"));
    let newest = tarballs.max_by_key(|file| file.metadata().and_then(|it| it.modified()).ok());
    newest.ok_or_else(|| "make it first: cargo run -p xtask -- dist --only tarball".into())
}

/// The numbers of a version such as `glibc 2.31`.
fn version(text: &str) -> Vec<u32> {
    let numbers = text.trim().rsplit(' ').next().unwrap_or_default().split('.');
    numbers.filter_map(|number| number.parse().ok()).collect()
}

/// The root with this name. It is made only once. (The tests of installed files use roots with
/// other packages, which are named after suites.)
fn make(folders: &Folders, name: &str, suite: &str) -> Result<PathBuf> {
    let root = folders.target.join("roots").join(name);
    if !root.exists() {
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
    mut environment: Vec<String>,
) -> Result<RootOutcome> {
    let mut job = Job::new(programs, tests)?;
    if is_older(root)? {
        let Installed { folder, linker } = installed(folders, programs)?;
        environment.push(format!("UZSWAP_TEST_PROGRAMS={}", folder.display()));
        job = job.started_by(&linker);
    }
    // When this process ends, the kernel kills `unshare`, and then `unshare`'s child.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig=KILL", "unshare", "--mount", "--propagation=private", "--pid"]);
    command.args(["--fork", "--kill-child", "sh", "-ec", ENTER, "sh"]);
    command.args([root, &folders.repository, &folders.target]);
    command.arg(PATIENCE).arg(job.steps(&environment));
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
