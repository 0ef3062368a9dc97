//! Tables that the code must agree with: edges between crates and files with `unsafe` in
//! ARCHITECTURE.md, files of end-to-end tests in their manifest.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The rows of the tables in a section of a document: the pieces of code in the first two cells.
fn rows<'a>(document: &'a str, section: &str) -> Vec<[Vec<&'a str>; 2]> {
    let text = document.split(&format!("\n## {section}\n")).nth(1).unwrap_or_default();
    let text = text.split("\n## ").next().unwrap_or_default();
    let code = |cell: &'a str| cell.split('`').skip(1).step_by(2).collect::<Vec<_>>();
    let row = |line: &'a str| {
        let mut cells = line.strip_prefix('|')?.split('|').map(code);
        let row = [cells.next()?, cells.next()?];
        (!row[0].is_empty()).then_some(row)
    };
    text.lines().filter_map(row).collect()
}

/// Each crate uses those that its row names, and no others.
pub fn check_edges(root: &Path, architecture: &str, wrong: &mut Vec<String>) {
    let rows = rows(architecture, "Crates");
    let mut folders: Vec<_> =
        fs::read_dir(root.join("crates")).into_iter().flatten().flatten().collect();
    folders.sort_by_key(fs::DirEntry::file_name);
    for folder in folders {
        let name = folder.file_name().to_string_lossy().into_owned();
        let Ok(manifest) = fs::read_to_string(folder.path().join("Cargo.toml")) else { continue };
        let Some([_, allowed]) = rows.iter().find(|[crates, _]| crates.contains(&name.as_str()))
        else {
            wrong.push(format!("{name} has no row in the table of crates of ARCHITECTURE.md"));
            continue;
        };
        let used = dependencies(&manifest);
        let allowed: BTreeSet<&str> = allowed.iter().copied().collect();
        if used != allowed {
            wrong.push(format!("{name} uses {used:?}; ARCHITECTURE.md says {allowed:?}"));
        }
    }
}

/// The crates of this repository that a manifest names as dependencies.
fn dependencies(manifest: &str) -> BTreeSet<&str> {
    let rest = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let rest = rest.split("\n[").next().unwrap_or_default();
    let names = rest.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("uzswap")).collect()
}

/// Each file of end-to-end tests is a program. Cargo passes over one that the manifest does not
/// name.
pub fn check_tests(files: &[String], manifest: &str, wrong: &mut Vec<String>) {
    for file in files.iter().filter_map(|file| file.strip_prefix("tests/")) {
        if !manifest.contains(&format!("\npath = \"{file}\"\n")) {
            wrong.push(format!("tests/{file}: tests/Cargo.toml has no [[test]] with this path"));
        }
    }
}

/// Files with `unsafe` are those that the table lists: each has a row, and each row has files.
pub fn check_unsafe(architecture: &str, sources: &[(PathBuf, String)], wrong: &mut Vec<String>) {
    let listed: Vec<String> =
        rows(architecture, "Unsafe").iter().flat_map(|[files, _]| full(files)).collect();
    let mut found = BTreeSet::new();
    for (path, _) in sources.iter().filter(|(_, text)| has_unsafe(text)) {
        let path = path.to_string_lossy();
        match listed.iter().find(|listed| matches(&path, listed)) {
            Some(listed) => _ = found.insert(listed),
            None => {
                wrong.push(format!("{path}: unsafe in a file that ARCHITECTURE.md does not list"))
            }
        }
    }
    for path in listed.iter().filter(|path| !found.contains(path)) {
        wrong.push(format!("{path}: ARCHITECTURE.md lists it, but nothing in it is unsafe"));
    }
}

/// True if a row names a file: the file itself, or its folder.
fn matches(path: &str, listed: &str) -> bool {
    path == listed || listed.ends_with('/') && path.starts_with(listed)
}

/// Paths from the root. A name without a folder is in that of the one before.
fn full(files: &[&str]) -> Vec<String> {
    let mut folder = String::new();
    let mut paths = Vec::new();
    for file in files.iter().filter(|file| file.ends_with(".rs") || file.ends_with('/')) {
        let path = match file.split_once('/') {
            None => format!("{folder}{file}"),
            Some(("tests" | "python" | "fuzz", _)) => (*file).to_owned(),
            Some(_) => format!("crates/{file}"),
        };
        folder = path.rsplit_once('/').map(|(folder, _)| format!("{folder}/")).unwrap_or_default();
        paths.push(path);
    }
    paths
}

fn has_unsafe(text: &str) -> bool {
    let code = text.split("#[cfg(test)]").next().unwrap_or(text);
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    // The second half of the word is apart, so that this file has none of it.
    code.lines().filter(is_code).any(|line| line.contains(concat!("unsafe", " {")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &str = "\n## Crates\n\n| crate | uses |\n|---|---|\n| `a` | `b`, `c` |\n\n## Unsafe\n\
                            | `x/src/a.rs`, `b.rs`, `y/src/` | why |\n";

    #[test]
    fn rows_are_read_by_their_section() {
        assert_eq!(rows(DOCUMENT, "Crates"), [[vec!["a"], vec!["b", "c"]]]);
        assert_eq!(
            full(&rows(DOCUMENT, "Unsafe")[0][0]),
            ["crates/x/src/a.rs", "crates/x/src/b.rs", "crates/y/src/"]
        );
    }

    #[test]
    fn a_file_without_a_row_and_a_row_without_a_file_are_wrong() {
        let text = concat!("unsafe", " {}").to_owned();
        let sources = ["crates/x/src/a.rs", "crates/y/src/c.rs", "crates/z/src/d.rs"];
        let sources = sources.map(|path| (PathBuf::from(path), text.clone()));
        let mut wrong = Vec::new();
        check_unsafe(DOCUMENT, &sources, &mut wrong);
        assert_eq!(wrong.len(), 2);
        assert!(
            wrong[0].starts_with("crates/z/src/d.rs") && wrong[1].starts_with("crates/x/src/b.rs")
        );
    }

    #[test]
    fn a_file_of_tests_that_the_manifest_does_not_name_is_wrong() {
        let files = ["crates/x/tests/a.rs", "tests/tests/device/b.rs", "tests/tests/device/c.rs"];
        let manifest = "[[test]]\nname = \"b\"\npath = \"tests/device/b.rs\"\n";
        let mut wrong = Vec::new();
        check_tests(&files.map(str::to_owned), manifest, &mut wrong);
        assert!(wrong.len() == 1 && wrong[0].starts_with("tests/tests/device/c.rs: "), "{wrong:?}");
    }

    #[test]
    fn dependencies_are_those_of_this_repository() {
        let manifest = "\n[dependencies]\nuzswap-sys.workspace = true\nlibc = \"1\"\n\n[dev-dependencies]\nuzswap-x = 1\n";
        assert_eq!(dependencies(manifest), BTreeSet::from(["uzswap-sys"]));
    }
}
