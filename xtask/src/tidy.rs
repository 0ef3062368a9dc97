//! House rules that a compiler does not know (STYLE.md gives the reasons).

use crate::docs;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const LINE_MAX: usize = 100;
const FUNCTION_MAX: usize = 70;
const FILE_MAX: usize = 800;

/// Words that hide what a thing does, and marks of work that is not done.
const BANNED: [&str; 7] = ["TODO", "FIXME", "XXX", "Manager", "Helper", "_helper", "_manager"];

/// Crates that each crate may use: edges go one way.
const EDGES: [(&str, &[&str]); 13] = [
    ("uzswap-sys", &[]),
    ("uzswap-sync", &[]),
    ("uzswap-tree", &[]),
    ("uzswap-preload", &["uzswap-tree"]),
    ("uzswap-ranges", &["uzswap-sync"]),
    ("uzswap-engine", &["uzswap-sys", "uzswap-sync", "uzswap-ranges"]),
    ("uzswap-block", &["uzswap-sys", "uzswap-engine"]),
    ("uzswap-region", &["uzswap-sys", "uzswap-engine", "uzswap-tree"]),
    ("uzswap-c", &["uzswap-region"]),
    ("uzswap-calls", &["uzswap-sys"]),
    ("uzswap-agent", &["uzswap-sys", "uzswap-region", "uzswap-calls", "uzswap-tree"]),
    ("uzswap", &["uzswap-sys", "uzswap-engine", "uzswap-block", "uzswap-region", "uzswap-tree"]),
    (
        "uzswap-bench",
        &[
            "uzswap-sys",
            "uzswap-sync",
            "uzswap-ranges",
            "uzswap-engine",
            "uzswap-block",
            "uzswap-region",
        ],
    ),
];

/// Files that may hold `unsafe`, besides those of uzswap-sys.
const UNSAFE: &[&str] = &[
    "crates/uzswap-engine/src/compress/wkdm/avx512.rs",
    "crates/uzswap-engine/src/durable.rs",
    "crates/uzswap-engine/src/index/trunk.rs",
    "crates/uzswap-engine/src/pool/section.rs",
    "crates/uzswap-engine/src/backing/file.rs",
    "crates/uzswap-engine/tests/allocation.rs",
    "crates/uzswap-engine/tests/killed.rs",
    "crates/uzswap-engine/tests/simulator.rs",
    "crates/uzswap-engine/tests/terabyte.rs",
    "crates/uzswap-ranges/src/link.rs",
    "crates/uzswap-ranges/src/list.rs",
    "crates/uzswap-ranges/tests/allocation.rs",
    "crates/uzswap-block/src/kept.rs",
    "crates/uzswap-region/src/space.rs",
    "crates/uzswap-region/src/fault.rs",
    "crates/uzswap-region/src/reclaim.rs",
    "crates/uzswap-region/src/granules.rs",
    "crates/uzswap-region/src/staging.rs",
    "crates/uzswap-region/src/region.rs",
    "crates/uzswap-region/src/registry.rs",
    "crates/uzswap-region/src/vec.rs",
    "crates/uzswap-region/src/window.rs",
    "crates/uzswap-tree/src/lib.rs",
    "crates/uzswap-preload/src/lib.rs",
    "crates/uzswap-preload/src/counted.rs",
    "crates/uzswap-preload/src/interposed.rs",
    "crates/uzswap-preload/src/loading.rs",
    "crates/uzswap-preload/src/room.rs",
    "crates/uzswap-calls/src/entry.rs",
    "crates/uzswap-calls/src/patch.rs",
    "crates/uzswap-calls/src/sites.rs",
    "crates/uzswap-calls/src/stop.rs",
    "crates/uzswap-calls/src/table.rs",
    "crates/uzswap-calls/tests/patching.rs",
    "crates/uzswap-calls/tests/stopping.rs",
    "crates/uzswap-agent/src/calls.rs",
    "crates/uzswap-agent/src/first_look.rs",
    "crates/uzswap-agent/src/hooks.rs",
    "crates/uzswap-agent/src/interrupted.rs",
    "crates/uzswap-agent/src/layout.rs",
    "crates/uzswap-agent/src/lib.rs",
    "crates/uzswap-agent/src/locals.rs",
    "crates/uzswap-agent/src/memory.rs",
    "crates/uzswap-agent/src/processes.rs",
    "crates/uzswap-agent/src/stacks.rs",
    "crates/uzswap-agent/src/takeover.rs",
    "crates/uzswap-region/tests/memory.rs",
    "tests/src/bin/absent/main.rs",
    "tests/src/bin/absent/probes.rs",
    "tests/src/bin/torture.rs",
    "crates/uzswap-c/src/lib.rs",
    "crates/uzswap-c/src/signals.rs",
    "python/src/numpy.rs",
    "crates/uzswap-region/tests/process.rs",
    "crates/uzswap-region/tests/torture.rs",
];

/// What the engine's sources may not name.
const ENGINE_ABSENCES: [&str; 6] =
    ["userfaultfd", "cgroup", "SystemTime", "Instant::", "thread::spawn", "serde"];

/// Checks everything; prints what is wrong.
pub fn check(root: &Path) -> ExitCode {
    let mut wrong = Vec::new();
    for (path, text) in docs::all(root) {
        if fs::read_to_string(root.join(&path)).ok().as_ref() != Some(&text) {
            wrong.push(format!("{path} is stale: cargo run -p xtask -- docs"));
        }
    }
    for path in files(root, "rs") {
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        check_file(&path.display().to_string(), &text, &mut wrong);
    }
    for path in files(root, "md") {
        let Ok(text) = fs::read_to_string(root.join(&path)) else { continue };
        check_links(root, &path, &text, &mut wrong);
    }
    check_edges(root, &mut wrong);
    wrong.iter().for_each(|line| eprintln!("tidy: {line}"));
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Files of the repository with an extension, relative to its root.
fn files(root: &Path, wanted: &str) -> Vec<PathBuf> {
    let mut folders = vec![root.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let is_ours = name != "target" && !name.as_encoded_bytes().starts_with(b".");
            if path.is_dir() && is_ours {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == wanted) {
                files.push(path.strip_prefix(root).unwrap_or(&path).to_owned());
            }
        }
    }
    files.sort();
    files
}

/// A document names only files that are there. Addresses on the web are not looked up.
fn check_links(root: &Path, path: &Path, text: &str, wrong: &mut Vec<String>) {
    let folder = root.join(path.parent().unwrap_or(Path::new("")));
    for (number, line) in (1..).zip(text.lines()) {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let files = targets.filter_map(|target| target.split('#').next());
        for file in files.filter(|file| !file.is_empty() && !file.contains("://")) {
            if !folder.join(file).exists() {
                wrong.push(format!("{}:{number}: there is no {file}", path.display()));
            }
        }
    }
}

fn check_file(path: &str, text: &str, wrong: &mut Vec<String>) {
    let ours = path == "xtask/src/tidy.rs";
    for (number, line) in (1..).zip(text.lines()) {
        // A message or a row of documentation is not cut in two for a rule.
        let is_text = line.matches('"').count() > 1 || line.ends_with('\\');
        if line.chars().count() > LINE_MAX && !is_text {
            wrong.push(format!("{path}:{number}: longer than {LINE_MAX} columns"));
        }
        // What others named is called by its name.
        let is_ours_to_name = !ours && !line.contains("org.freedesktop.");
        for word in BANNED.iter().filter(|word| line.contains(**word) && is_ours_to_name) {
            wrong.push(format!("{path}:{number}: '{word}' (see STYLE.md)"));
        }
    }
    let code = text.split("#[cfg(test)]").next().unwrap_or(text);
    if code.lines().count() > FILE_MAX && !path.ends_with("tests.rs") {
        wrong.push(format!("{path}: more than {FILE_MAX} lines: split it"));
    }
    check_functions(path, code, wrong);
    let has_unsafe = code.lines().any(|line| !is_comment(line) && line.contains("unsafe {"));
    let may = path.starts_with("crates/uzswap-sys/") || UNSAFE.contains(&path) || ours;
    if has_unsafe && !may {
        wrong.push(format!("{path}: unsafe outside of the modules listed in ARCHITECTURE.md"));
    }
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

/// Functions end with a closing brace as far in as they began: rustfmt sees to it.
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

fn check_edges(root: &Path, wrong: &mut Vec<String>) {
    for (name, allowed) in EDGES {
        let manifest = root.join("crates").join(name).join("Cargo.toml");
        let Ok(text) = fs::read_to_string(manifest) else { continue };
        let dependencies = text.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        let names = dependencies.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
        for used in names.filter(|used| used.starts_with("uzswap") && !allowed.contains(used)) {
            wrong.push(format!("{name} uses {used}: edges go one way (ARCHITECTURE.md)"));
        }
    }
}
