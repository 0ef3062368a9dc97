//! The job of a guest: test programs of this workspace, and a reader of their output.

use super::Result;
use super::processor::Processor;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Test programs. End-to-end tests are named by their targets, others by crate and target, as
/// `region/torture`.
pub type Programs = BTreeMap<String, PathBuf>;

/// Builds the programs for systems with this processor, each time by a command of cargo's. For this
/// machine's processor, builds the workspace and its tests like `./check`.
pub fn build(cargo: impl Fn() -> Result<Command>, processor: Processor) -> Result<Programs> {
    let mut programs = Programs::new();
    for arguments in processor.builds() {
        let output = cargo()?
            .args(*arguments)
            .args(["--quiet", "--message-format=json"])
            .stderr(Stdio::inherit())
            .output()?;
        if !output.status.success() {
            return Err(format!("cargo {}: {}", arguments.join(" "), output.status).into());
        }
        note(&String::from_utf8_lossy(&output.stdout), &mut programs);
    }
    Ok(programs)
}

/// Collects the test programs from cargo's messages.
fn note(messages: &str, programs: &mut Programs) {
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let (kind, is_test) = (&message["target"]["kind"][0], &message["profile"]["test"]);
        let target = message["target"]["name"].as_str();
        let package = message["package_id"].as_str().and_then(package);
        let path = message["executable"].as_str();
        if let (Some(target), Some(package), Some(path)) = (target, package, path) {
            let name = match (package, kind.as_str()) {
                _ if is_test != true => continue,
                ("tests", Some("test")) => target.to_owned(),
                (package, Some("test")) => format!("{package}/{target}"),
                // The unit tests.
                (package, Some("lib")) => format!("{package}/lib"),
                _ => continue,
            };
            programs.insert(name, path.into());
        }
    }
}

/// The name of a package without our prefix, from its identity
/// `path+file:///…/tests#uzswap-tests@0.1.0`.
fn package(identity: &str) -> Option<&str> {
    let (path, rest) = identity.rsplit_once('#')?;
    let name = match rest.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next()?,
    };
    Some(name.strip_prefix("uzswap-").unwrap_or(name))
}

/// The programs to run.
pub struct Job {
    steps: Vec<Step>,
}

/// The first word of a job that is a command and no test.
const COMMAND: &str = "sh";

struct Step {
    name: String,
    words: Vec<String>,
}

impl Job {
    /// Parses `TARGET` or `TARGET::NAME`, or the words of a command.
    pub fn new(programs: &Programs, tests: &[String]) -> Result<Self> {
        if tests.first().is_some_and(|word| word == COMMAND) {
            let step = Step { name: COMMAND.into(), words: tests.to_vec() };
            return Ok(Self { steps: vec![step] });
        }
        if tests.is_empty() {
            let known: Vec<_> = programs.keys().map(String::as_str).collect();
            return Err(format!("no test is named; there are {}", known.join(", ")).into());
        }
        let step = |test: &String| {
            let (target, filter) = match test.split_once("::") {
                Some((target, filter)) => (target, Some(filter)),
                None => (test.as_str(), None),
            };
            let program = programs.get(target).ok_or_else(|| {
                let known: Vec<_> = programs.keys().map(String::as_str).collect();
                format!("there is no test '{target}'; there are {}", known.join(", "))
            })?;
            let mut words = vec![
                program.display().to_string(),
                "--test-threads=1".into(),
                "--color=never".into(),
            ];
            words.extend(filter.map(str::to_owned));
            Ok(Step { name: test.clone(), words })
        };
        Ok(Self { steps: tests.iter().map(step).collect::<Result<_>>()? })
    }

    /// The script of the job in a guest. The script reports over the second serial line. During a
    /// shutdown it starts no program, since the host's files may be gone.
    pub fn script(&self, environment: &[String], line: &str) -> String {
        format!(
            "exec > /dev/{line} 2>&1 < /dev/null\n\
             stty -F /dev/{line} raw -echo 2>/dev/null\n\
             {}\
             sleep 0.2\necho 1 > /proc/sys/kernel/sysrq\necho o > /proc/sysrq-trigger\n\
             while :; do :; done\n",
            self.steps(environment)
        )
    }

    /// The shell commands that run the programs one after another.
    pub fn steps(&self, environment: &[String]) -> String {
        let mut text = String::from(
            "export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root\n\
             export CI=true RUST_BACKTRACE=0\n\
             echo \"::ready $(uname -r)\"\n\
             step() { name=$1; shift; echo \"::test $name\"; \"$@\"; code=$?; echo; echo \"::end $name $code\"; }\n",
        );
        for variable in environment {
            text += &format!("export {}\n", quoted(variable));
        }
        for step in &self.steps {
            let words: Vec<_> = step.words.iter().map(|word| quoted(word)).collect();
            text += &format!("step {} {}\n", quoted(&step.name), words.join(" "));
        }
        text + "echo ::done\n"
    }
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The end of the line by which a slow test says that it does nothing (`is_slow_and_skipped`).
/// Other such lines are about a part of a test.
const SLOW: &str = "`./check --full` runs it";

/// The end of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// `TARGET::NAME`.
    pub name: String,
    pub passed: bool,
}

/// `21 of 21`, and the failed tests.
pub fn count(tests: &[Ended]) -> String {
    let failed: Vec<_> = tests.iter().filter(|test| !test.passed).collect();
    let mut text = format!("{} of {}", tests.len() - failed.len(), tests.len());
    for test in failed {
        text += &format!("; not `{}`", test.name);
    }
    text
}

/// The state of a job's output, as far as it was read.
#[derive(Debug, Default)]
pub struct Reader {
    /// The kernel's release, once the guest has reported it.
    pub release: Option<String>,
    pub tests: Vec<Ended>,
    /// True if the job was completed.
    pub is_done: bool,
    step: String,
    /// The test whose result comes next.
    test: String,
    failed: bool,
    /// Tests of the current step that have ended.
    ran: usize,
}

impl Reader {
    pub fn line(&mut self, line: &str) {
        if let Some(release) = line.strip_prefix("::ready ") {
            self.release = Some(release.to_owned());
        } else if let Some(name) = line.strip_prefix("::test ") {
            name.clone_into(&mut self.step);
            (self.failed, self.ran) = (false, 0);
            self.test.clear();
        } else if let Some(rest) = line.strip_prefix("::end ") {
            let passed = rest.ends_with(" 0");
            let is_program = self.step != COMMAND;
            if !is_program || self.ran == 0 {
                // No test has this name, which is a failure.
                self.tests.push(Ended { name: self.step.clone(), passed: passed && !is_program });
            } else if !passed && !self.failed {
                self.tests.push(Ended { name: self.step.clone(), passed });
            }
        } else if line == "::done" {
            self.is_done = true;
        } else if let Some((name, result)) =
            line.strip_prefix("test ").and_then(|test| test.split_once(" ... "))
        {
            name.clone_into(&mut self.test);
            if result.starts_with("skipped: ") && result.ends_with(SLOW) {
                self.test.clear();
            }
            self.result(result);
        } else if ["ok", "FAILED"].contains(&line) {
            // A program that the test started has printed lines before the result.
            self.result(line);
        }
    }

    /// Notes the current test's result, if the text ends with one.
    fn result(&mut self, text: &str) {
        let passed = text.ends_with("ok");
        if (passed || text.ends_with("FAILED")) && !self.test.is_empty() {
            self.failed |= !passed;
            self.ran += 1;
            let name = format!("{}{}", self.target(), std::mem::take(&mut self.test));
            self.tests.push(Ended { name, passed });
        }
    }

    fn target(&self) -> String {
        let target = self.step.split("::").next().unwrap_or_default();
        format!("{target}::")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_read_test_by_test() {
        let mut reader = Reader::default();
        let text = "::ready 6.12\n::test run::a\nrunning 2 tests\ntest a ... ok\n\
                    test b ... FAILED\n\n::end run::a 101\n::test sh\nhello\n::end sh 0\n\
                    ::test data\ntest c ... killed\n::end data 137\n::done\n";
        text.lines().for_each(|line| reader.line(line));
        let tests: Vec<_> =
            reader.tests.iter().map(|test| (test.name.as_str(), test.passed)).collect();
        assert_eq!(tests, [("run::a", true), ("run::b", false), ("sh", true), ("data", false)]);
        assert!(reader.is_done && reader.release.as_deref() == Some("6.12"));
    }

    #[test]
    fn lines_before_a_result_do_not_hide_it_and_a_skipped_test_is_not_counted() {
        let mut reader = Reader::default();
        let text = "::test data\ntest a ... a warning\n  of two lines\nok\ntest b ... \nFAILED\n\
                    test c ... skipped: c: it takes minutes, `./check --full` runs it\nok\n\
                    test d ... skipped: d: node is not installed: node -e 1\nok\n::end data 101\n";
        text.lines().for_each(|line| reader.line(line));
        assert_eq!(count(&reader.tests), "2 of 3; not `data::b`");
    }

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
