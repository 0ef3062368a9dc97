//! Links in documents: each must lead to an existing file, and to a heading in it.

use std::fs;
use std::path::Path;

/// Reports links that lead nowhere. Web addresses are not looked up.
pub fn check(root: &Path, path: &Path, text: &str, wrong: &mut Vec<String>) {
    let folder = root.join(path.parent().unwrap_or(Path::new("")));
    for (number, line) in (1..).zip(text.lines()) {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.contains("://")) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let found = if file.is_empty() { root.join(path) } else { folder.join(file) };
            if !found.exists() {
                wrong.push(format!("{}:{number}: there is no {file}", path.display()));
            } else if !heading.is_empty()
                && !fs::read_to_string(&found).is_ok_and(|text| has_heading(&text, heading))
            {
                wrong.push(format!("{}:{number}: no heading is #{heading}", path.display()));
            }
        }
    }
}

/// True if a heading of the document has this anchor.
fn has_heading(document: &str, name: &str) -> bool {
    let headings = document.lines().filter(|line| line.starts_with('#'));
    headings.map(|line| line.trim_start_matches('#')).any(|heading| anchor(heading) == name)
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || "-_ ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_to_absent_files_and_headings_are_wrong() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = "# A b, `c`\n[1](STYLE.md#words) [2](#a-b-c) [3](README.md)\n\
                    [4](absent.md) [5](STYLE.md#absent) [6](https://a.b/#c)\n[7](#absent)\n";
        let mut wrong = Vec::new();
        check(root, Path::new("README.md"), "[1](STYLE.md#words) [2](#install)", &mut wrong);
        assert_eq!(wrong, [""; 0]);
        assert!(has_heading(text, "a-b-c"));
        check(root, Path::new("README.md"), text, &mut wrong);
        let places: Vec<&str> =
            wrong.iter().map(|line| &line[..line.find(": ").unwrap()]).collect();
        // The links within the text are checked in README.md itself, which has no heading `a-b-c`.
        assert_eq!(places, ["README.md:2", "README.md:3", "README.md:3", "README.md:4"]);
    }
}
