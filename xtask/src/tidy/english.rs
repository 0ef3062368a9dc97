//! Counts sentences that must be read twice: those in comments and documents that break a rule of
//! STYLE.md, section *Sentences*. Each part of the repository has a budget, which may only fall.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// The rules. Budgets and counts have a number for each, in this order.
const RULES: [&str; 3] =
    ["begins with What, Who or Whether", "what or who as a noun", "more than 30 words"];

/// The largest count of each rule that a part of the repository may have.
const BUDGET: &[(&str, [usize; RULES.len()])] = &[];

const WORDS_MAX: usize = 30;

/// Words that *who* may follow.
const PERSONS: [&str; 18] = [
    "anybody",
    "anyone",
    "author",
    "developer",
    "everybody",
    "maintainer",
    "nobody",
    "operator",
    "people",
    "person",
    "programmer",
    "reader",
    "somebody",
    "someone",
    "those",
    "user",
    "users",
    "readers",
];

/// A sentence that breaks a rule.
pub struct Finding {
    pub line: usize,
    pub rule: usize,
    pub sentence: String,
}

/// Counts of each rule, by part of the repository.
#[derive(Default)]
pub struct Counts(BTreeMap<String, [usize; RULES.len()]>);

impl Counts {
    /// Adds a file's findings.
    pub fn add(&mut self, path: &Path, findings: &[Finding]) {
        let counts = self.0.entry(part(path)).or_default();
        findings.iter().for_each(|finding| counts[finding.rule] += 1);
    }

    /// Reports counts above the budget (wrong), and counts below it (the budget is to be lowered).
    pub fn compare(&self, wrong: &mut Vec<String>) {
        for (part, counts) in &self.0 {
            let budget = BUDGET.iter().find(|(name, _)| name == part);
            let budget = budget.map_or([0; RULES.len()], |(_, budget)| *budget);
            for (rule, name) in RULES.iter().enumerate() {
                if counts[rule] > budget[rule] {
                    wrong.push(format!(
                        "{part}: {} sentences where {} may be ({name}): cargo run -p xtask -- words {part}",
                        counts[rule], budget[rule]
                    ));
                }
            }
            if (0..RULES.len()).any(|rule| counts[rule] < budget[rule]) {
                println!("tidy: lower the budget of English to (\"{part}\", {counts:?})");
            }
        }
    }

    /// The counts as a table.
    pub fn table(&self) -> String {
        let mut table = format!("English: {}\n", RULES.join(" / "));
        let mut total = [0; RULES.len()];
        for (part, counts) in &self.0 {
            (0..RULES.len()).for_each(|rule| total[rule] += counts[rule]);
            // Writing to a string does not fail.
            let _ =
                writeln!(table, "{part:>20} {:>5} {:>5} {:>5}", counts[0], counts[1], counts[2]);
        }
        let _ = writeln!(table, "{:>20} {:>5} {:>5} {:>5}", "all", total[0], total[1], total[2]);
        table
    }
}

/// The part of the repository that a file belongs to: a crate, a folder, or the file itself.
fn part(path: &Path) -> String {
    let path = path.to_string_lossy();
    let mut names = path.split('/');
    match (names.next(), names.next()) {
        (Some("crates"), Some(name)) => name.to_owned(),
        (Some("docs"), Some("design")) => "docs/design".to_owned(),
        (Some(name), _) => name.to_owned(),
        _ => String::new(),
    }
}

/// The sentences of a file that break a rule, with the rule.
pub fn list(path: &Path, text: &str) -> Vec<String> {
    let row = |finding: Finding| {
        let (path, Finding { line, rule, sentence }) = (path.display(), finding);
        format!("{path}:{line}: {}: {sentence}", RULES[rule])
    };
    findings(path, text).into_iter().map(row).collect()
}

/// The findings in a file: in its comments, or in all of a document.
pub fn findings(path: &Path, text: &str) -> Vec<Finding> {
    let mut quoted = Quoted::No;
    let lines = text.lines().map(|line| match path.extension().and_then(|name| name.to_str()) {
        Some("rs") => comment(line),
        Some("py" | "sh") => script_comment(line, &mut quoted),
        _ => Some(line),
    });
    sentences(lines).iter().flat_map(check).collect()
}

/// If a line of Python is inside a string of several lines, and of which kind.
#[derive(Clone, Copy, PartialEq)]
enum Quoted {
    No,
    Docstring,
    Other,
}

/// The text of a line's comment, or of a line in a docstring of Python.
fn script_comment<'a>(line: &'a str, quoted: &mut Quoted) -> Option<&'a str> {
    const MARK: &str = "\"\"\"";
    let (text, was) = (line.trim(), *quoted);
    let begins = text.starts_with(MARK);
    if !text.matches(MARK).count().is_multiple_of(2) {
        *quoted = match was {
            Quoted::No if begins => Quoted::Docstring,
            Quoted::No => Quoted::Other,
            Quoted::Docstring | Quoted::Other => Quoted::No,
        };
    }
    match was {
        Quoted::Docstring => Some(text.trim_matches('"')),
        Quoted::No if begins => Some(text.trim_matches('"')),
        Quoted::No => text.strip_prefix('#').map(str::trim),
        Quoted::Other => None,
    }
}

/// The text of a line's comment. If code stands before it, the slashes are included.
fn comment(line: &str) -> Option<&str> {
    if let Some(text) = line.trim_start().strip_prefix("//") {
        return Some(text.trim_start_matches(['/', '!']).trim());
    }
    let (code, _) = line.split_once(" // ")?;
    code.matches('"').count().is_multiple_of(2).then(|| &line[code.len() + 1..])
}

/// The words of a sentence, with their lines. A piece of inline code is one word.
type Sentence<'a> = Vec<(usize, &'a str)>;

/// Cuts lines into sentences. A sentence ends at a line of code, an empty line, a row of a table,
/// an item of a list, and a comment behind code.
fn sentences<'a>(lines: impl Iterator<Item = Option<&'a str>>) -> Vec<Sentence<'a>> {
    let mut sentences = vec![Vec::new()];
    let mut is_code = false;
    for (number, line) in (1..).zip(lines) {
        let text = line.unwrap_or_default().trim();
        let is_fence = text.starts_with("```");
        is_code = is_code != is_fence && line.is_some();
        if is_code || is_fence || text.is_empty() {
            sentences.push(Vec::new());
            continue;
        }
        if starts_item(text) {
            sentences.push(Vec::new());
        }
        for cell in text.split('|').filter(|cell| !cell.trim().is_empty()) {
            if text.starts_with('|') {
                sentences.push(Vec::new());
            }
            for word in words(cell) {
                add(&mut sentences, number, word);
            }
        }
    }
    sentences.retain(|sentence| !sentence.is_empty());
    sentences
}

/// True if a list item begins here, or a parameter in a docstring.
fn starts_item(text: &str) -> bool {
    let is_numbered = text.split_once(". ").is_some_and(|(item, _)| item.parse::<u8>().is_ok());
    let is_name = |name: &str| name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    is_numbered
        || text.split_once(": ").is_some_and(|(name, _)| is_name(name))
        || ["- ", "* ", "#", "> ", "// "].iter().any(|item| text.starts_with(item))
}

/// Adds a word to the last sentence, or begins a new one.
fn add<'a>(sentences: &mut Vec<Sentence<'a>>, line: usize, word: &'a str) {
    let is_end =
        |word: &str| word.trim_end_matches([')', '"', '*', '_']).ends_with(['.', '!', '?']);
    let last = sentences.last().and_then(|sentence| sentence.last());
    let is_start = !word.starts_with(|c: char| c.is_lowercase());
    if last.is_some_and(|(_, last)| is_end(last)) && is_start {
        sentences.push(Vec::new());
    }
    if let Some(sentence) = sentences.last_mut() {
        sentence.push((line, word));
    }
}

/// The words of a text, without markup.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    let split = text.split(move |c: char| {
        is_code ^= c == '`';
        c.is_whitespace() && !is_code
    });
    split.filter(|word| word.contains(|c: char| c.is_alphanumeric() || "`.!?".contains(c)))
}

/// True if a word stands alone in emphasis, so that it is mentioned and not used.
fn is_mention(word: &str) -> bool {
    let word = word.trim_end_matches([',', '.', ':']);
    word.len() > 1 && word.starts_with('*') && word.ends_with('*')
}

fn check(sentence: &Sentence) -> Vec<Finding> {
    let mut rules = Vec::new();
    let bare: Vec<String> = sentence
        .iter()
        .map(|(_, word)| {
            word.trim_matches(|c: char| !c.is_alphanumeric() && c != '`').to_lowercase()
        })
        .collect();
    let is_question = sentence.last().is_some_and(|(_, word)| word.contains('?'));
    for (index, word) in bare.iter().enumerate().filter(|_| !is_question) {
        if is_mention(sentence[index].1) {
            continue;
        }
        let after_person = index > 0 && PERSONS.contains(&bare[index - 1].as_str());
        match word.as_str() {
            "what" | "who" | "whatever" | "whoever" | "whether" if index == 0 => rules.push((0, 0)),
            "what" | "whoever" => rules.push((index, 1)),
            "who" | "whom" if !after_person => rules.push((index, 1)),
            _ => {}
        }
    }
    if sentence.len() > WORDS_MAX {
        rules.push((0, 2));
    }
    let text = || sentence.iter().map(|(_, word)| *word).collect::<Vec<_>>().join(" ");
    let finding =
        |(at, rule): (usize, usize)| Finding { line: sentence[at].0, rule, sentence: text() };
    rules.into_iter().map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Vec<(usize, usize)> {
        let findings = findings(Path::new("a.rs"), text);
        findings.iter().map(|finding| (finding.line, finding.rule)).collect()
    }

    #[test]
    fn comments_that_must_be_read_twice_are_found_with_their_line() {
        assert_eq!(rules("/// What a page\n/// takes. A thread waits."), [(1, 0)]);
        assert_eq!(rules("// A page.\n// Frees what is out, for\n// who waits."), [(2, 1), (3, 1)]);
        assert_eq!(rules("let a = 1; // whoever waits\nlet b = \"// who\";"), [(1, 0)]);
        assert_eq!(rules(&format!("// {}a.\n", "word ".repeat(30))), [(1, 2)]);
    }

    #[test]
    fn plain_sentences_code_and_questions_are_not() {
        assert_eq!(rules("/// A user who waits. Somewhat.\nlet what = who;"), []);
        assert_eq!(rules("//! ```\n//! what who\n//! ```\n//! Uses `what it is`. What is it?"), []);
        assert_eq!(rules(&format!("// {0}a. {0}b.", "Word ".repeat(29))), []);
        assert_eq!(rules(&format!("//! {0}\n//! - {0}\n", "word ".repeat(29))), []);
        assert_eq!(rules(&format!("a; // {0}\nb; // {0}\n", "word ".repeat(29))), []);
    }

    #[test]
    fn comments_and_docstrings_of_scripts_are_read() {
        let text = "\"\"\"What it is.\n\nWho waits.\n\"\"\"\nwhat = 1\n# What runs.\n\"\"\"Fine.\"\"\"\nA = \"\"\"\nwho\n\"\"\"\nwho()\n";
        let found = findings(Path::new("a.py"), text);
        assert_eq!(found.iter().map(|found| found.line).collect::<Vec<_>>(), [1, 3, 6]);
    }

    #[test]
    fn each_cell_of_a_table_is_a_sentence() {
        let text = format!("| {0} | {0} |\n| what | who |", "word ".repeat(29));
        let found = findings(Path::new("a.md"), &text);
        assert_eq!(found.iter().map(|found| found.rule).collect::<Vec<_>>(), [0, 0]);
    }
}
