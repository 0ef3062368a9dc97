//! Manifests: each must have the workspace's lints, and the manifest of the end-to-end tests must
//! name each file.

use std::fs;
use std::path::Path;

/// Each file of end-to-end tests is a program, and cargo ignores files that the manifest does not
/// name.
pub fn check_tests(files: &[String], manifest: &str, wrong: &mut Vec<String>) {
    for file in files.iter().filter_map(|file| file.strip_prefix("tests/")) {
        if !manifest.contains(&format!("\npath = \"{file}\"\n")) {
            wrong.push(format!("tests/{file}: tests/Cargo.toml has no [[test]] with this path"));
        }
    }
}

/// A crate without these two lines could have `unsafe` anywhere. The fuzzers are outside of the
/// workspace.
pub fn check_lints(root: &Path, wrong: &mut Vec<String>) {
    let manifests = crate::files(root, "toml").into_iter();
    let crates = manifests.filter(|path| path.ends_with("Cargo.toml") && !path.starts_with("fuzz"));
    for path in crates.filter(|path| path.parent() != Some(Path::new(""))) {
        let text = fs::read_to_string(root.join(&path)).unwrap_or_default();
        if !text.contains("\n[lints]\nworkspace = true\n") {
            wrong.push(format!("{}: add [lints] workspace = true", path.display()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_tests_that_the_manifest_does_not_name_is_wrong() {
        let files = ["crates/x/tests/a.rs", "tests/tests/device/b.rs", "tests/tests/device/c.rs"];
        let manifest = "[[test]]\nname = \"b\"\npath = \"tests/device/b.rs\"\n";
        let mut wrong = Vec::new();
        check_tests(&files.map(str::to_owned), manifest, &mut wrong);
        assert!(wrong.len() == 1 && wrong[0].starts_with("tests/tests/device/c.rs: "), "{wrong:?}");
    }
}
