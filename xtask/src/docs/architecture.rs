//! The tables of ARCHITECTURE.md. Crates are from their manifests. Files with `unsafe` are from the
//! attributes that permit it: the compiler rejects `unsafe` elsewhere. The order of locks is from
//! the engine's `sync`.

use super::fill;
use crate::files;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The document with new tables.
pub fn text(root: &Path) -> String {
    let text = fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap_or_default();
    let read = |path: &Path| fs::read_to_string(root.join(path)).unwrap_or_default();
    let manifests: Vec<String> = files(root, "toml")
        .iter()
        .filter(|path| path.starts_with("crates") && path.ends_with("Cargo.toml"))
        .map(|path| read(path))
        .collect();
    let sources: Vec<(String, String)> = files(root, "rs")
        .iter()
        // Names the attribute itself.
        .filter(|path| !path.ends_with("xtask/src/docs/architecture.rs"))
        .map(|path| (path.to_string_lossy().into_owned(), read(path)))
        .collect();
    let order = lock_order(&read(Path::new("crates/uzswap-engine/src/sync.rs")));
    let text = fill(&text, "crates", &crates(&manifests));
    let text = fill(&text, "order of locks", &order);
    fill(&text, "unsafe code", &unsafe_files(&sources))
}

/// The drawing in a module's head.
fn lock_order(source: &str) -> String {
    let head = source.lines().map_while(|line| line.strip_prefix("//!"));
    let drawing = head.skip_while(|line| !line.contains("```text")).skip(1);
    let lines = drawing.take_while(|line| !line.contains("```"));
    let lines: String =
        lines.map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line))).collect();
    format!("```\n{lines}```\n")
}

/// A row for each crate. A crate comes after those that it uses.
fn crates(manifests: &[String]) -> String {
    let mut rest: Vec<&str> = manifests.iter().map(String::as_str).collect();
    let mut order: Vec<&str> = Vec::new();
    let name = |manifest| value(manifest, "name").unwrap_or_default();
    while !rest.is_empty() {
        let is_next = |manifest: &&str| {
            !rest.iter().any(|other| dependencies(manifest).contains(&name(other)))
        };
        // Cargo itself refuses circles.
        let next = rest.iter().position(is_next).unwrap_or(0);
        order.push(rest.remove(next));
    }
    let mut rows = String::from("| crate | uses | purpose | absent from it |\n|---|---|---|---|\n");
    for manifest in &order {
        let mut uses = dependencies(manifest);
        uses.sort_by_key(|used| order.iter().position(|manifest| name(manifest) == *used));
        let uses: Vec<String> = uses.iter().map(|name| format!("`{name}`")).collect();
        let design = value(manifest, "design")
            .map(|file| format!(" ([{file}](docs/design/{file}))"))
            .unwrap_or_default();
        // Writing to a string does not fail.
        let _ = writeln!(
            rows,
            "| `{}` | {} | {}{design} | {} |",
            name(manifest),
            uses.join(", "),
            value(manifest, "description").unwrap_or_default(),
            value(manifest, "absent").unwrap_or_default()
        );
    }
    rows
}

fn value<'a>(manifest: &'a str, name: &str) -> Option<&'a str> {
    let is_it = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(" = \""));
    manifest.lines().find(is_it)?.split('"').nth(1)
}

/// The dependencies of a manifest that are crates of this repository.
fn dependencies(manifest: &str) -> Vec<&str> {
    let rest = manifest.split("\n[dependencies]\n").nth(1).unwrap_or_default();
    let rest = rest.split("\n[").next().unwrap_or_default();
    let names = rest.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("uzswap")).collect()
}

/// A row for each reason, with its files.
fn unsafe_files(sources: &[(String, String)]) -> String {
    let mut forbidden = Vec::new();
    let mut reasons: Vec<&str> = Vec::new();
    let mut files = BTreeMap::<&str, Vec<&str>>::new();
    for (path, text) in sources {
        if text.contains("#![forbid(unsafe_code)]") {
            let name = path.split("/src/").next().unwrap_or_default();
            forbidden.push(format!("`{}`", name.strip_prefix("crates/").unwrap_or(name)));
        }
        if let Some(reason) = reason(text) {
            if !reasons.contains(&reason) {
                reasons.push(reason);
            }
            files.entry(reason).or_default().push(path);
        }
    }
    forbidden.dedup();
    let mut rows = format!(
        "Forbidden in {}, and denied elsewhere except in these files:\n\n\
         | files | why | why it is sound |\n|---|---|---|\n",
        forbidden.join(", ")
    );
    for reason in reasons {
        let (why, sound) = reason.split_once(": ").unwrap_or((reason, "**not said**"));
        let _ = writeln!(rows, "| {} | {why} | {sound} |", names(&files[reason]));
    }
    rows
}

/// The reason of the attribute that permits `unsafe` in a file.
fn reason(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once("expect(unsafe_code, reason = \"").or_else(|| {
        let (_, rest) = text.split_once("expect(\n    unsafe_code,\n")?;
        rest.split_once("reason = \"")
    })?;
    rest.split('"').next()
}

/// Names of files, as code. A crate's root is named by its folder. The folder is left out if the
/// previous file has the same folder.
fn names(paths: &[&str]) -> String {
    let mut folder = "";
    let mut names = Vec::new();
    for path in paths {
        let path = path.strip_prefix("crates/").unwrap_or(path);
        let (of, name) = path.rsplit_once('/').unwrap_or(("", path));
        names.push(match name {
            "lib.rs" => format!("`{of}/`"),
            _ if of == folder => format!("`{name}`"),
            _ => format!("`{path}`"),
        });
        folder = of;
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crate_comes_after_those_that_it_uses() {
        let manifests = [
            "name = \"uzswap-a\"\ndescription = \"first\"\n\n[dependencies]\nuzswap-b.workspace = true\nlibc = \"1\"\n\n[dev-dependencies]\nuzswap-x = 1\n",
            "name = \"uzswap-b\"\ndescription = \"second\"\nabsent = \"all\"\ndesign = \"b.md\"\n",
        ];
        let rows = crates(&manifests.map(str::to_owned));
        let rows: Vec<&str> = rows.lines().skip(2).collect();
        assert_eq!(
            rows,
            [
                "| `uzswap-b` |  | second ([b.md](docs/design/b.md)) | all |",
                "| `uzswap-a` | `uzswap-b` | first |  |"
            ]
        );
    }

    #[test]
    fn the_drawing_of_a_head_is_copied() {
        let head = "//! Locks.\n//! ```text\n//! a → b\n//!   → c\n//! ```\n//! More.\n\nuse d;\n";
        assert_eq!(lock_order(head), "```\na → b\n  → c\n```\n");
    }

    #[test]
    fn files_with_one_reason_share_a_row() {
        let permit =
            |reason| format!("#![expect(\n    unsafe_code,\n    reason = \"{reason}\"\n)]\n");
        let sources = [
            ("crates/x/src/a.rs", permit("raw: sound")),
            ("crates/x/src/b.rs", permit("raw: sound")),
            ("crates/x/src/c.rs", "#![forbid(unsafe_code)]".to_owned()),
            (
                "crates/y/src/lib.rs",
                "#![expect(unsafe_code, reason = \"calls: typed\")]".to_owned(),
            ),
        ];
        let rows = unsafe_files(&sources.map(|(path, text)| (path.to_owned(), text)));
        let rows: Vec<&str> = rows.lines().collect();
        assert_eq!(rows[0], "Forbidden in `x`, and denied elsewhere except in these files:");
        assert_eq!(
            rows[4..],
            ["| `x/src/a.rs`, `b.rs` | raw | sound |", "| `y/src/` | calls | typed |"]
        );
    }
}
