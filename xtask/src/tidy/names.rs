//! A type name has one meaning in the repository, or two at most.

use super::modules;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A type's name may be defined in this number of files.
const FILES_MAX: usize = 2;

/// Names that more files may define, with the reason.
const EXCEPTED: [(&str, &str); 2] = [
    ("Inner", "the convention for the part of a type that its handles share"),
    ("Pager", "the bindings for C and Python call theirs as Rust does"),
];

/// Reports names that more files define. Tests and examples do not count, since they are read by
/// themselves.
pub fn check(sources: &[(PathBuf, String)], wrong: &mut Vec<String>) {
    let mut defined = BTreeMap::<String, BTreeSet<&Path>>::new();
    for (path, text) in sources.iter().filter(|(path, _)| !is_test(path)) {
        for name in modules::code(text).lines().filter_map(name) {
            defined.entry(name.to_owned()).or_default().insert(path);
        }
    }
    let is_excepted = |name: &str| EXCEPTED.iter().any(|(excepted, _)| *excepted == name);
    for (name, files) in defined.iter().filter(|(name, _)| !is_excepted(name)) {
        if files.len() > FILES_MAX {
            wrong.push(format!(
                "{name}: more than {FILES_MAX} files define a type of this name: {files:?}"
            ));
        }
    }
}

fn is_test(path: &Path) -> bool {
    let folders = ["tests", "testing", "examples"];
    path.iter().any(|name| folders.iter().any(|folder| name == *folder))
        || path
            .file_stem()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.ends_with("tests") || name == "testing")
}

/// The name of the type that a line defines. An indented `type` belongs to a trait.
fn name(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let is_inside = code.len() < line.len();
    let code = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?.1,
        Some(rest) => rest.trim_start(),
        None => code,
    };
    let (keyword, rest) = code.strip_prefix("unsafe ").unwrap_or(code).split_once(' ')?;
    let is_type = match keyword {
        "struct" | "enum" | "union" | "trait" => true,
        "type" => !is_inside,
        _ => false,
    };
    let end = rest.find(|c: char| !c.is_alphanumeric()).unwrap_or(rest.len());
    (is_type && end > 0).then_some(&rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::faults;

    #[test]
    fn the_third_file_that_defines_a_name_is_wrong() {
        let mut sources = vec![
            ("crates/x/src/a.rs", "pub(crate) struct Table(u32);\nstruct Table;"),
            ("crates/x/src/b.rs", "    pub enum Table {"),
        ];
        assert_eq!(faults(check, &sources), [""; 0]);
        sources.push(("crates/y/src/c.rs", "pub unsafe trait Table: Sized {"));
        let wrong = faults(check, &sources);
        assert!(wrong.len() == 1 && wrong[0].starts_with("Table: "), "{wrong:?}");
    }

    #[test]
    fn tests_types_of_traits_and_excepted_names_are_not_counted() {
        let definition = "struct Table;\nstruct Inner;";
        assert_eq!(
            faults(
                check,
                &[
                    ("crates/x/src/a.rs", definition),
                    ("crates/x/src/b.rs", definition),
                    ("crates/x/src/c.rs", "    type Table = u8;\nstruct Inner;"),
                    ("crates/x/src/d.rs", "mod tests {\n    struct Table;\n}"),
                    ("crates/x/tests/e.rs", definition),
                    ("crates/x/src/f/shuttle_tests.rs", definition),
                ]
            ),
            [""; 0]
        );
    }
}
