//! Sources and tests that a document names: each must exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A test's name is a sentence. Names with at least this many underscores are taken for tests.
const UNDERSCORES_MIN: usize = 3;

/// The sources, and their long names.
pub struct Known<'a> {
    sources: &'a [(PathBuf, String)],
    names: BTreeSet<&'a str>,
}

impl<'a> Known<'a> {
    pub fn of(sources: &'a [(PathBuf, String)]) -> Self {
        let no_part = |c: char| !c.is_alphanumeric() && c != '_';
        let words = sources.iter().flat_map(|(_, text)| text.split(no_part));
        Self { sources, names: words.filter(|word| is_long(word)).collect() }
    }

    /// Reports names of sources and tests that do not exist.
    pub fn check(&self, path: &Path, text: &str, wrong: &mut Vec<String>) {
        for (number, line) in (1..).zip(text.lines()) {
            let named =
                line.split('`').skip(1).step_by(2).map(|name| name.trim_start_matches("…/"));
            for name in named.filter(|name| !self.has(name)) {
                wrong.push(format!("{}:{number}: there is no {name}", path.display()));
            }
        }
    }

    /// True if the name exists, or is not that of a source or a test.
    fn has(&self, name: &str) -> bool {
        if name.ends_with(".rs") {
            return self.sources.iter().any(|(path, _)| path.ends_with(name));
        }
        // Names of metrics are derived from those of statistics.
        !is_long(name) || name.starts_with("uzswap_") || self.names.contains(name)
    }
}

fn is_long(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.chars().all(is_part) && name.matches('_').count() >= UNDERSCORES_MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_sources_and_tests_are_wrong() {
        let sources = [(PathBuf::from("crates/x/src/a.rs"), "fn no_byte_is_wrong() {}".to_owned())];
        let text = "`a.rs`, `…/src/a.rs`, `no_byte_is_wrong`, `a_b`, `uzswap_a_b_c`, `fn`\n\
                    ```\nb.rs\n```\n`crates/y/src/a.rs`, `no_page_is_lost`";
        let mut wrong = Vec::new();
        Known::of(&sources).check(Path::new("README.md"), text, &mut wrong);
        let expected = ["crates/y/src/a.rs", "no_page_is_lost"];
        assert_eq!(wrong, expected.map(|name| format!("README.md:5: there is no {name}")));
    }
}
