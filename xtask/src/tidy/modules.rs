//! Edges between the modules of a crate, by the paths in them, and circles of edges.
//!
//! A module may use its parent and its children, so such edges are not counted. An edge leads from
//! one child of a module to another. A use between their descendants counts as an edge between
//! these children. A name that a module re-exports stands for the module that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The names of a module and its parents, from the crate's root.
type Name = Vec<String>;

/// The modules of one crate.
#[derive(Default)]
struct Modules {
    /// The code of each module, without tests and comments.
    code: BTreeMap<Name, String>,
    /// Re-exports: the module and the name, and the path that it stands for.
    exports: BTreeMap<(Name, String), Name>,
}

pub fn check(sources: &[(PathBuf, String)], wrong: &mut Vec<String>) {
    let mut crates = BTreeMap::<String, Modules>::new();
    for (path, text) in sources {
        if let Some((name, module)) = module(path) {
            let modules = crates.entry(name).or_default();
            modules.code.entry(module).or_default().push_str(&code(text));
        }
    }
    for (name, modules) in &mut crates {
        modules.find_exports();
        for circle in circles(&modules.edges()) {
            wrong.push(format!("{name}: modules use each other in a circle: {circle:?}"));
        }
    }
}

/// The crate and the module of a source file.
fn module(path: &Path) -> Option<(String, Name)> {
    let names: Vec<&str> = path.iter().filter_map(|name| name.to_str()).collect();
    let src = names.iter().position(|name| *name == "src")?;
    let name = names.get(src.checked_sub(1)?)?;
    let file = names.last()?.strip_suffix(".rs")?;
    let is_bin = names.get(src + 1) == Some(&"bin");
    if is_bin || file.ends_with("tests") || file == "testing" {
        return None;
    }
    let mut module: Name =
        names[src + 1..names.len() - 1].iter().map(ToString::to_string).collect();
    if !["mod", "lib", "main"].contains(&file) {
        module.push(file.to_owned());
    }
    Some(((*name).to_owned(), module))
}

/// The code without tests and comments.
pub fn code(text: &str) -> String {
    let mut code = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim_start().starts_with("mod tests {") {
            let end = line.replace("mod tests {", "}");
            lines.by_ref().find(|line| *line == end);
        } else if !line.trim_start().starts_with("//") {
            code += line;
            code.push('\n');
        }
    }
    code
}

impl Modules {
    fn find_exports(&mut self) {
        for (module, code) in &self.code {
            for (at, _) in code.match_indices("use ").filter(|(at, _)| is_public(&code[..*at])) {
                for path in tree(&code[at + 4..]) {
                    let Some(last) = path.last().cloned() else { continue };
                    let path = self.absolute(module, path);
                    self.exports.insert((module.clone(), last), path);
                }
            }
        }
    }

    /// A path that a module names, made absolute.
    fn absolute(&self, module: &Name, path: Name) -> Name {
        let mut base = module.clone();
        let mut rest = &path[..];
        if rest.first().is_some_and(|first| first == "crate") {
            (base, rest) = (Name::new(), &rest[1..]);
        }
        while let Some(first) =
            rest.first().filter(|first| ["super", "self"].contains(&first.as_str()))
        {
            if first == "super" {
                base.pop();
            }
            rest = &rest[1..];
        }
        [base, rest.to_vec()].concat()
    }

    /// The module that a path leads to.
    fn resolve(&self, path: &[String], depth: usize) -> Name {
        let mut module = Name::new();
        for (index, name) in path.iter().enumerate() {
            let child = [module.clone(), vec![name.clone()]].concat();
            if self.code.contains_key(&child) {
                module = child;
            } else if let Some(target) = self.exports.get(&(module.clone(), name.clone()))
                && depth < 4
            {
                return self.resolve(&[target, &path[index + 1..]].concat(), depth + 1);
            } else {
                break;
            }
        }
        module
    }

    /// All edges between children of a module.
    fn edges(&self) -> BTreeSet<(String, String)> {
        let mut edges = BTreeSet::new();
        for (module, code) in &self.code {
            let starts = ["crate::", "super::"].iter().flat_map(|start| code.match_indices(start));
            let is_start = |at: usize| {
                !code[..at].ends_with(|c: char| c.is_alphanumeric() || "_:$".contains(c))
            };
            for (at, _) in starts.filter(|(at, _)| is_start(*at)) {
                for path in tree(&code[at..]) {
                    let used = self.resolve(&self.absolute(module, path), 0);
                    let common = module.iter().zip(&used).take_while(|(a, b)| a == b).count();
                    if common < module.len().min(used.len()) {
                        edges.insert((module[..=common].join("::"), used[..=common].join("::")));
                    }
                }
            }
        }
        edges
    }
}

/// True if the code before a `use` makes it a re-export.
fn is_public(before: &str) -> bool {
    let before = before.rsplit('\n').next().unwrap_or_default().trim();
    before == "pub" || before.starts_with("pub(") && before.ends_with(')')
}

/// The paths in the tree of a `use`, or a plain path, up to the first name that ends it.
fn tree(code: &str) -> Vec<Name> {
    let mut paths = Vec::new();
    // The names before each open brace, and those of the current path.
    let mut open: Vec<Name> = Vec::new();
    let mut path = Name::new();
    let mut rest = code;
    loop {
        rest = rest.trim_start();
        let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let word = &rest[..length];
        if word == "as" {
            let after = rest[length..].trim_start();
            rest = after.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
            continue;
        }
        if length > 0 {
            path.push(word.to_owned());
        }
        rest = &rest[length..];
        if let Some(after) = rest.strip_prefix("::") {
            rest = after;
        } else if let Some(after) = rest.strip_prefix('{') {
            open.push(path.clone());
            rest = after;
        } else if let (Some(before), Some(after)) = (open.last(), rest.strip_prefix(',')) {
            paths.push(std::mem::replace(&mut path, before.clone()));
            rest = after;
        } else if let (Some(_), Some(after)) = (open.last(), rest.strip_prefix('}')) {
            paths.push(std::mem::take(&mut path));
            open.pop();
            path = open.last().cloned().unwrap_or_default();
            rest = after;
            if open.is_empty() {
                return paths;
            }
        } else {
            paths.push(path);
            return paths;
        }
    }
}

/// Sets of modules that reach each other.
fn circles(edges: &BTreeSet<(String, String)>) -> Vec<Vec<String>> {
    let reach = |from: &String| {
        let mut reached = BTreeSet::new();
        let mut next = vec![from];
        while let Some(from) = next.pop() {
            let targets = edges.iter().filter(|(start, _)| start == from).map(|(_, target)| target);
            next.extend(targets.filter(|target| reached.insert((*target).clone())));
        }
        reached
    };
    let modules: BTreeSet<&String> = edges.iter().map(|(from, _)| from).collect();
    let reached: BTreeMap<&String, BTreeSet<String>> =
        modules.into_iter().map(|module| (module, reach(module))).collect();
    let mut circles = BTreeSet::new();
    for (module, targets) in &reached {
        let back =
            |target: &&String| reached.get(target).is_some_and(|back| back.contains(*module));
        let circle: Vec<String> = targets.iter().filter(back).cloned().collect();
        if !circle.is_empty() {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::faults;

    #[test]
    fn trees_of_use_are_read() {
        let join = |code: &str| tree(code).iter().map(|path| path.join("::")).collect::<Vec<_>>();
        assert_eq!(
            join("crate::a::{b, c::{d, E as F}};"),
            ["crate::a::b", "crate::a::c::d", "crate::a::c::E"]
        );
        assert_eq!(join("crate::a::f(x)"), ["crate::a::f"]);
    }

    #[test]
    fn a_circle_is_found_also_through_exports_and_folders() {
        let wrong = faults(
            check,
            &[
                ("crates/x/src/lib.rs", "pub use b::Thing;"),
                ("crates/x/src/a.rs", "fn f() { crate::Thing::new() }"),
                ("crates/x/src/b/mod.rs", "mod c;"),
                ("crates/x/src/b/c.rs", "use super::super::a;"),
            ],
        );
        assert_eq!(wrong, ["x: modules use each other in a circle: [\"a\", \"b\"]"]);
    }

    #[test]
    fn parents_tests_and_comments_make_none() {
        let wrong = faults(
            check,
            &[
                (
                    "crates/x/src/a/mod.rs",
                    "use crate::a::b;\n// crate::d\n#[cfg(test)]\nmod tests { use crate::d; }",
                ),
                ("crates/x/src/a/b.rs", "use super::A;"),
                ("crates/x/src/d.rs", "use crate::a;"),
            ],
        );
        assert_eq!(wrong, [""; 0]);
    }
}
