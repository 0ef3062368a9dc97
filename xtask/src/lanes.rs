//! `xtask tests [COMMAND…]`: builds the test programs of the workspace, and runs two programs or
//! commands at a time. Many tests wait longer than they compute, and tests that swap wait for each
//! other.
//!
//! ```text
//! swapping   end-to-end tests with swap devices: a lock gives one test the machine at a time
//! commands   the arguments, for the shell, which change nothing that a test reads; and the tests
//!            in documents
//! beside     programs that change nothing of the machine
//! alone      tests that change the machine for every process, or measure peaks of memory, which
//!            depend on how soon our threads run: after all others
//! ```
//! The first lane runs the swapping programs and then helps the second lane. That one runs the
//! commands and then the programs beside. After the first failure no program is started.

use crate::{Result, cross};
use std::collections::VecDeque;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::time::Instant;

/// Tests under strict accounting of memory, where other programs get no memory.
const ALONE: [(&str, &str); 2] = [
    ("run", "a_daemon_goes_on_serving_until_the_kernel_can_read_its_pages_back"),
    ("serve", "sigterm_reads_every_page_back_before_the_device_goes"),
];
/// If this variable is set, other tests run at the same time. A test that needs to be in `ALONE`
/// fails then.
const BESIDE: &str = "UZSWAP_TEST_BESIDE";

/// The programs that take longest begin first, so that the lanes end at nearly the same time.
const LONGEST: [&str; 9] = [
    "bench",
    "habits",
    "run",
    "uzswap-remote/store",
    "remote",
    "data",
    "in_process",
    "histories",
    "processes",
];

/// The program whose tests wait more than half of their time, and how many of them run at a time
/// where there are fewer CPUs.
const WAITING: (&str, usize) = ("habits", 4);

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// The tests in documents.
const DOCUMENTS: &str = "cargo test --workspace --doc --quiet";

/// The beginning of a summary without tests.
const NONE_PASSED: &str = "test result: ok. 0 passed";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    Swapping,
    Commands,
    Beside,
    Alone,
}

/// A test program, one of its tests, or a command.
#[derive(Clone)]
struct TestProgram {
    /// The target's name, or `CRATE/TARGET` outside of the end-to-end tests.
    name: String,
    path: PathBuf,
    /// The package's folder, in which cargo runs tests.
    folder: PathBuf,
    arguments: Vec<String>,
    lane: Lane,
}

/// The lane of a program, by its source: a folder of `tests/tests` is a subject.
fn lane(source: &str) -> Lane {
    let is_in = |folder: &str| source.contains(&format!("/tests/tests/{folder}/"));
    match () {
        () if is_in("machine") || source.ends_with("/in_process/budget.rs") => Lane::Alone,
        () if is_in("device") || is_in("show") => Lane::Swapping,
        () => Lane::Beside,
    }
}

/// The program of a message of cargo; `None` for all other messages.
fn program(message: &serde_json::Value) -> Option<TestProgram> {
    let path = message["executable"].as_str()?;
    let target = &message["target"];
    let (name, source) = (target["name"].as_str()?, target["src_path"].as_str()?);
    if message["profile"]["test"] != true {
        return None;
    }
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let of_crate = folder.file_name()?.to_string_lossy();
    let name = if of_crate == "tests" { name.to_owned() } else { format!("{of_crate}/{name}") };
    Some(TestProgram {
        name,
        path: path.into(),
        folder: folder.to_owned(),
        arguments: Vec::new(),
        lane: lane(source),
    })
}

/// Cuts the tests of `ALONE` out of their programs.
fn cut(programs: &mut Vec<TestProgram>) -> Result<()> {
    for (name, test) in ALONE {
        let Some(program) = programs.iter_mut().find(|program| program.name == name) else {
            return Err(format!("there is no test program '{name}'").into());
        };
        program.arguments.extend(["--skip".into(), test.into()]);
        let (path, folder) = (program.path.clone(), program.folder.clone());
        let arguments = vec!["--exact".into(), test.into()];
        let name = format!("{name}::{test}");
        programs.push(TestProgram { name, path, folder, arguments, lane: Lane::Alone });
    }
    Ok(())
}

/// A program's place in its lane.
fn place(name: &str) -> usize {
    LONGEST.iter().position(|long| *long == name).unwrap_or(LONGEST.len())
}

/// A command for the shell.
fn command(text: &str, root: &Path) -> TestProgram {
    TestProgram {
        name: text.into(),
        path: "/bin/sh".into(),
        folder: root.to_owned(),
        arguments: vec!["-c".into(), text.into()],
        lane: Lane::Commands,
    }
}

/// Builds all programs, with the features that `cargo build --workspace` has.
fn build(root: &Path) -> Result<Vec<TestProgram>> {
    let output = cross::cargo(root)
        .args(["build", "--workspace", "--lib", "--bins", "--examples", "--tests"])
        .args(["--quiet", "--message-format=json"])
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo build: {}", output.status).into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut programs: Vec<_> = messages.filter_map(|message| program(&message)).collect();
    programs.sort_by_key(|program| place(&program.name));
    cut(&mut programs)?;
    Ok(programs)
}

impl TestProgram {
    /// Runs it. Returns the line about it, or its output if a test failed.
    fn run(&self) -> std::result::Result<String, String> {
        // Names a program that hangs.
        println!("        {} begins", self.name);
        let began = Instant::now();
        let mut command = Command::new(&self.path);
        command.args(&self.arguments).current_dir(&self.folder).stdin(Stdio::null());
        if self.lane != Lane::Alone {
            command.env(BESIDE, "1");
        }
        let (waiting, threads) = WAITING;
        if self.name == waiting {
            command.env("RUST_TEST_THREADS", threads.max(cpus()).to_string());
        }
        let output = command.output().map_err(|error| format!("{}: {error}", self.name))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let summary = match self.lane {
            Lane::Commands => Some("ok"),
            _ => summary(&text),
        };
        if let (true, Some(summary)) = (output.status.success(), summary) {
            // A test of ALONE that has another name now would not run.
            if !(self.name.contains("::") && summary.starts_with(NONE_PASSED)) {
                let time = began.elapsed().as_secs();
                return Ok(format!("{time:4} s  {}: {summary}", self.name));
            }
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("{}: {}\n{text}{said}", self.name, output.status))
    }
}

/// The last line of a program's output that counts its tests; `None` if one failed.
fn summary(text: &str) -> Option<&str> {
    text.lines().rfind(|line| line.starts_with("test result: ok. "))
}

/// Programs that are still to be run, and the outcome so far.
struct Backlog {
    swapping: VecDeque<TestProgram>,
    beside: VecDeque<TestProgram>,
    has_failed: bool,
}

/// Runs programs until none is left for this lane, or one has failed.
fn work(backlog: &Mutex<Backlog>, lane: Lane) {
    let lock = || backlog.lock().expect("no lane panics");
    loop {
        let mut waiting = lock();
        if waiting.has_failed {
            return;
        }
        let first = if lane == Lane::Swapping { waiting.swapping.pop_front() } else { None };
        let Some(program) = first.or_else(|| waiting.beside.pop_front()) else { return };
        drop(waiting);
        let outcome = program.run();
        say(&mut lock(), &outcome);
    }
}

/// Prints the outcome of a program. The backlog's lock keeps the lines of two lanes apart.
fn say(backlog: &mut Backlog, outcome: &std::result::Result<String, String>) {
    match outcome {
        Ok(line) => println!("{line}"),
        Err(text) => {
            println!("{text}");
            backlog.has_failed = true;
        }
    }
}

/// Runs programs in two lanes, and then those that are run alone. True if all passed.
fn run_all(programs: Vec<TestProgram>) -> Result<bool> {
    let of = |lane| programs.iter().filter(move |program| program.lane == lane).cloned();
    let backlog = Mutex::new(Backlog {
        swapping: of(Lane::Swapping).collect(),
        beside: of(Lane::Commands).chain(of(Lane::Beside)).collect(),
        has_failed: false,
    });
    std::thread::scope(|scope| {
        for lane in [Lane::Swapping, Lane::Beside] {
            let backlog = &backlog;
            scope.spawn(move || work(backlog, lane));
        }
    });
    let mut backlog = backlog.into_inner()?;
    for program in of(Lane::Alone) {
        if backlog.has_failed {
            break;
        }
        say(&mut backlog, &program.run());
    }
    Ok(!backlog.has_failed)
}

/// Runs all tests of the workspace, and these commands. Succeeds if all passed.
pub fn run(root: &Path, commands: impl Iterator<Item = String>) -> ExitCode {
    let commands = commands.chain([DOCUMENTS.to_owned()]).map(|text| command(&text, root));
    let all = build(root).map(|programs| programs.into_iter().chain(commands).collect());
    match all.and_then(run_all) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("tests: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_s_lane_is_that_of_its_folder() {
        let lanes = ["tests/tests/device/run.rs", "tests/tests/in_process/habits.rs"]
            .map(|source| lane(&format!("/home/me/{source}")));
        assert_eq!(lanes, [Lane::Swapping, Lane::Beside]);
        let alone = ["machine/cpus.rs", "in_process/budget.rs"];
        assert!(alone.iter().all(|file| lane(&format!("/w/tests/tests/{file}")) == Lane::Alone));
        assert_eq!(lane("/home/me/crates/uzswap-engine/tests/model.rs"), Lane::Beside);
    }

    #[test]
    fn tests_that_are_run_alone_are_cut_out() {
        let message = |name: &str| {
            let text = format!(
                r#"{{"executable":"/t/{name}-1","manifest_path":"/w/tests/Cargo.toml",
                "target":{{"name":"{name}","src_path":"/w/tests/tests/device/{name}.rs"}},
                "profile":{{"test":true}}}}"#
            );
            program(&serde_json::from_str(&text).expect("JSON")).expect("a test program")
        };
        let mut programs = vec![message("run"), message("serve"), message("data")];
        cut(&mut programs).expect("both are there");
        let alone: Vec<_> = programs.iter().filter(|program| program.lane == Lane::Alone).collect();
        assert_eq!(alone.len(), ALONE.len());
        assert!(alone.iter().all(|program| program.arguments[0] == "--exact"));
        assert_eq!(programs[0].arguments, ["--skip", ALONE[0].1]);
        assert_eq!(programs[2].arguments, [""; 0]);
    }

    /// A shell script as a program, in a folder.
    fn script(text: &str, folder: &Path, lane: Lane) -> TestProgram {
        let arguments = vec!["-c".into(), text.into()];
        TestProgram {
            name: format!("{lane:?}"),
            path: "/bin/sh".into(),
            folder: folder.to_owned(),
            arguments,
            lane,
        }
    }

    #[test]
    fn the_longest_programs_begin_first() {
        let mut names = ["accesses", "habits", "zeal", "bench"];
        names.sort_by_key(|name| place(name));
        assert_eq!(names, ["bench", "habits", "accesses", "zeal"]);
    }

    #[test]
    fn two_programs_run_at_a_time_and_a_failure_is_the_last() {
        let folder = std::env::temp_dir().join(format!("xtask-lanes-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a new folder");
        let done = "echo 'test result: ok. 1 passed'";
        // Each waits for the other.
        let one = format!("mkfifo pipe && timeout 60 cat pipe && {done}");
        let other = "until [ -e pipe ]; do sleep 0.1; done; echo > pipe";
        let both = || vec![script(&one, &folder, Lane::Swapping), command(other, &folder)];
        let last = |text: &str| script(text, &folder, Lane::Alone);
        assert!(
            run_all([both(), vec![last("rm pipe; echo test result: ok. 1 passed")]].concat())
                .expect("no lane panics")
        );
        assert!(
            !run_all([both(), vec![last("false"), last("touch late")]].concat())
                .expect("no lane panics")
        );
        assert!(!folder.join("late").exists());
        assert!(!run_all(vec![command("false", &folder)]).expect("no lane panics"));
        std::fs::remove_dir_all(&folder).expect("it is ours");
    }

    #[test]
    fn only_tests_that_passed_count() {
        let ok = "test result: ok. 12 passed; 0 failed";
        assert_eq!(summary(&format!("\n{ok}\n\n")), Some(ok));
        assert_eq!(summary("\ntest result: FAILED. 12 passed; 1 failed"), None);
    }
}
