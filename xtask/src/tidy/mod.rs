//! House rules that the compiler does not check (STYLE.md gives the reasons).

mod english;
mod links;
mod manifests;
mod modules;
mod names;
mod sources;

use crate::{docs, files};
use english::Counts;
use std::fs;
use std::path::Path;
#[cfg(test)]
use std::path::PathBuf;
use std::process::ExitCode;

const LINE_MAX: usize = 100;
const FUNCTION_MAX: usize = 70;
const FILE_MAX: usize = 600;

/// Words that hide the purpose of a thing, and marks of unfinished work.
const BANNED: [&str; 7] = ["TODO", "FIXME", "XXX", "Manager", "Helper", "_helper", "_manager"];

/// Names that must be absent from the engine's sources.
const ENGINE_ABSENCES: [&str; 6] =
    ["userfaultfd", "cgroup", "SystemTime", "Instant::", "thread::spawn", "serde"];

/// Checks everything and prints all faults.
pub fn check(root: &Path) -> ExitCode {
    let mut wrong = Vec::new();
    for (path, text) in docs::all(root) {
        if fs::read_to_string(root.join(&path)).ok().as_ref() != Some(&text) {
            wrong.push(format!("{path} is stale: cargo run -p xtask -- docs"));
        }
    }
    let mut counts = Counts::default();
    let mut sources = Vec::new();
    for path in files(root, "rs") {
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        check_file(&path.display().to_string(), &text, &mut wrong);
        counts.add(&path, &english::findings(&path, &text));
        sources.push((path, text));
    }
    for path in [files(root, "py"), files(root, "sh")].concat() {
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        counts.add(&path, &english::findings(&path, &text));
    }
    let known = sources::Known::of(&sources);
    for path in files(root, "md") {
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        links::check(root, &path, &text, &mut wrong);
        known.check(&path, &text, &mut wrong);
        counts.add(&path, &english::findings(&path, &text));
    }
    let manifest = fs::read_to_string(root.join("tests/Cargo.toml")).unwrap_or_default();
    manifests::check_tests(&docs::tests(root), &manifest, &mut wrong);
    manifests::check_lints(root, &mut wrong);
    modules::check(&sources, &mut wrong);
    names::check(&sources, &mut wrong);
    print!("{}", counts.table());
    counts.compare(&mut wrong);
    wrong.iter().for_each(|line| eprintln!("tidy: {line}"));
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints each sentence that breaks a rule, in files whose path contains one of `wanted`.
pub fn words(root: &Path, wanted: impl Iterator<Item = String>) -> ExitCode {
    let wanted: Vec<String> = wanted.collect();
    for path in ["rs", "py", "sh", "md"].into_iter().flat_map(|kind| files(root, kind)) {
        let name = path.to_string_lossy();
        if wanted.is_empty() || wanted.iter().any(|wanted| name.contains(wanted.as_str())) {
            let text = fs::read_to_string(root.join(&path)).unwrap_or_default();
            english::list(&path, &text).iter().for_each(|row| println!("{row}"));
        }
    }
    ExitCode::SUCCESS
}

fn check_file(path: &str, text: &str, wrong: &mut Vec<String>) {
    let ours = path.starts_with("xtask/src/tidy/");
    for (number, line) in (1..).zip(text.lines()) {
        // Messages and rows of documentation are not cut in two for a rule.
        let is_text = line.matches('"').count() > 1 || line.ends_with('\\');
        if line.chars().count() > LINE_MAX && !is_text {
            wrong.push(format!("{path}:{number}: longer than {LINE_MAX} columns"));
        }
        // Names that others have defined are permitted.
        let is_ours_to_name = !ours && !line.contains("org.freedesktop.");
        for word in BANNED.iter().filter(|word| line.contains(**word) && is_ours_to_name) {
            wrong.push(format!("{path}:{number}: '{word}' (see STYLE.md)"));
        }
    }
    let code = text.split("#[cfg(test)]").next().unwrap_or(text);
    if text.lines().count() > FILE_MAX {
        wrong.push(format!("{path}: more than {FILE_MAX} lines: split it"));
    }
    check_functions(path, code, wrong);
    let is_test = path.ends_with("testing.rs") || path.ends_with("tests.rs");
    let engine = path.starts_with("crates/uzswap-engine/src/") && !is_test;
    if engine {
        for name in ENGINE_ABSENCES {
            let named = |line: &str| !is_comment(line) && line.contains(name);
            if code.lines().any(named) {
                wrong.push(format!("{path}: the engine does not know {name}"));
            }
        }
    }
}

fn is_comment(line: &str) -> bool {
    line.trim_start().starts_with("//")
}

/// A function ends with a closing brace of its own indentation: rustfmt guarantees that.
fn check_functions(path: &str, code: &str, wrong: &mut Vec<String>) {
    let mut open: Vec<(usize, usize, String)> = Vec::new();
    for (number, line) in (1..).zip(code.lines()) {
        let indent = line.len() - line.trim_start().len();
        let start = line.trim_start();
        let is_function = ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn ", "const fn "]
            .iter()
            .any(|prefix| start.starts_with(prefix));
        if is_function && !line.trim_end().ends_with(';') {
            open.push((number, indent, start.to_owned()));
        }
        while start == "}" && open.last().is_some_and(|(_, at, _)| *at >= indent) {
            let Some((first, at, name)) = open.pop() else { break };
            if at == indent && number - first + 1 > FUNCTION_MAX {
                wrong.push(format!("{path}:{first}: longer than {FUNCTION_MAX} lines: {name}"));
            }
        }
    }
}

/// The faults that a check finds in sources, given as paths and texts.
#[cfg(test)]
fn faults(
    check: impl Fn(&[(PathBuf, String)], &mut Vec<String>),
    sources: &[(&str, &str)],
) -> Vec<String> {
    let sources: Vec<_> =
        sources.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
    let mut wrong = Vec::new();
    check(&sources, &mut wrong);
    wrong
}
