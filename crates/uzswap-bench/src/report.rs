//! The report: sections of text, tables and plots, as Markdown, as one HTML file, and as JSON.
//!
//! results.json has all data of the other two files. A benchmark that is run later with the same
//! folder replaces its own section and leaves the others.

use crate::error::{Context, Failure};
use crate::figures::MachineFacts;
use crate::plot::Plot;
use comfy_table::presets::ASCII_MARKDOWN;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// Rows under a header. A row may be shorter than the header.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(header: &[&str], rows: Vec<Vec<String>>) -> Self {
        Self { header: header.iter().map(|name| (*name).to_owned()).collect(), rows }
    }

    fn markdown(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(ASCII_MARKDOWN).set_header(&self.header);
        for row in &self.rows {
            table.add_row(row);
        }
        table.to_string()
    }

    fn html(&self) -> String {
        let cells = |tag: &str, row: &[String]| {
            let cells = row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)));
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        let rows: String = self.rows.iter().map(|row| cells("td", row)).collect();
        format!("<table>\n{}{rows}</table>\n", cells("th", &self.header))
    }
}

/// A part of a section, in order.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Part {
    Text(String),
    Table(Table),
    Plot(Plot),
}

/// The results of one benchmark.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Section {
    bench: String,
    title: String,
    /// The machine with its versions and the time, and the command.
    machine: MachineFacts,
    command: String,
    parts: Vec<Part>,
    /// All values behind the tables.
    raw: serde_json::Value,
}

impl Section {
    /// The empty section of a benchmark.
    pub fn new(bench: &str, title: &str) -> Self {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        Self {
            bench: bench.into(),
            title: title.into(),
            machine: MachineFacts::here(),
            command: format!("sudo uzswap-bench {}", arguments.join(" ")),
            parts: Vec::new(),
            raw: serde_json::Value::Null,
        }
    }

    pub fn text(mut self, text: impl Into<String>) -> Self {
        self.parts.push(Part::Text(text.into()));
        self
    }

    pub fn table(mut self, table: Table) -> Self {
        self.parts.push(Part::Table(table));
        self
    }

    /// Adds a plot. Its file is `BENCH-NAME.svg`.
    pub fn plot(mut self, plot: Plot) -> Self {
        self.parts.push(Part::Plot(plot));
        self
    }

    pub fn raw(mut self, name: &str, values: &impl Serialize) -> Result<Self, Failure> {
        if self.raw.is_null() {
            self.raw = serde_json::json!({});
        }
        self.raw[name] = serde_json::to_value(values).context("results")?;
        Ok(self)
    }

    fn file(&self, plot: &Plot) -> String {
        format!("{}-{}.svg", self.bench, plot.name)
    }

    /// The section as Markdown. If `folder` is given, plots are written to files in it.
    pub fn markdown(&self, folder: Option<&Path>) -> String {
        let mut text = format!("## {}\n\n```\n{}\n```\n\n", self.title, self.command);
        for part in &self.parts {
            let part = match (part, folder) {
                (Part::Text(text), _) => text.clone(),
                (Part::Table(table), _) => table.markdown(),
                (Part::Plot(plot), Some(_)) => format!("![{}]({})", plot.title, self.file(plot)),
                (Part::Plot(_), None) => continue,
            };
            text += &part;
            text += "\n\n";
        }
        text + &self.machine.line() + "\n"
    }

    fn html(&self) -> Result<String, Failure> {
        let (title, command) = (escape(&self.title), escape(&self.command));
        let mut html = format!("<h2>{title}</h2>\n<pre>{command}</pre>\n");
        for part in &self.parts {
            html += &match part {
                Part::Text(text) => format!("<p>{}</p>\n", escape(text)),
                Part::Table(table) => table.html(),
                Part::Plot(plot) => format!("<figure>{}</figure>\n", plot.svg()?),
            };
        }
        // Writing to a string cannot fail.
        let _ = writeln!(html, "<p><small>{}</small></p>", escape(&self.machine.line()));
        Ok(html)
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

const STYLE: &str = "
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f4f4f4; padding: .5rem 1rem; overflow-x: auto; }
figure { margin: 1rem 0; } svg { max-width: 100%; height: auto; }
";

/// The sections in a folder.
#[derive(Debug)]
pub struct Report {
    folder: Option<PathBuf>,
    sections: Vec<Section>,
}

impl Report {
    /// The report in `folder`, with the sections that it has. Checks before any measurement that
    /// the report can be written.
    pub fn open(folder: Option<&Path>) -> Result<Self, Failure> {
        let Some(folder) = folder else { return Ok(Self { folder: None, sections: Vec::new() }) };
        let what = format!("cannot write the report to {}", folder.display());
        fs::create_dir_all(folder).context(&what)?;
        tempfile::NamedTempFile::new_in(folder).context(&what)?;
        let results = folder.join("results.json");
        let sections = match fs::read(&results) {
            Ok(text) => serde_json::from_slice(&text).context(&format!(
                "{} is no report of this version; name another folder",
                results.display()
            ))?,
            Err(_) => Vec::new(),
        };
        Ok(Self { folder: Some(folder.into()), sections })
    }

    /// Replaces or appends the section of a benchmark, and writes all files.
    pub fn add(&mut self, section: Section) -> Result<(), Failure> {
        let Some(folder) = &self.folder else { return Ok(()) };
        match self.sections.iter_mut().find(|old| old.bench == section.bench) {
            Some(old) => *old = section,
            None => self.sections.push(section),
        }
        let mut markdown = "# uzswap-bench\n".to_owned();
        let mut html = format!(
            "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
             <title>uzswap-bench</title><style>{STYLE}</style>\n<h1>uzswap-bench</h1>\n"
        );
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            fs::write(&path, bytes).context(&path.display().to_string())
        };
        for section in &self.sections {
            markdown = markdown + "\n" + &section.markdown(Some(folder));
            html += &section.html()?;
            for part in &section.parts {
                if let Part::Plot(plot) = part {
                    write(&section.file(plot), plot.svg()?.as_bytes())?;
                }
            }
        }
        write("report.md", markdown.as_bytes())?;
        write("report.html", (html + "</html>\n").as_bytes())?;
        let json = serde_json::to_vec(&self.sections).context("results")?;
        write("results.json", &json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_replaces_its_own_and_leaves_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let section = |bench: &str, cell: &str| {
            let table = Table::new(&["a", "b"], vec![vec![cell.into(), "<&>".into()]]);
            let plot = Plot::new("line", "A line", "x", "y").series("one", vec![[1.0, 2.0]]);
            Section::new(bench, "Title").table(table).plot(plot).raw("n", &7).unwrap()
        };
        for (bench, cell) in [("one", "first"), ("two", "other"), ("one", "second")] {
            let mut report = Report::open(Some(folder.path())).unwrap();
            report.add(section(bench, cell)).unwrap();
        }
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        let markdown = read("report.md");
        assert!(markdown.contains("| second |") && markdown.contains("| other"), "{markdown}");
        assert!(!markdown.contains("first"));
        assert!(markdown.contains("![A line](one-line.svg)"));
        assert!(read("one-line.svg").starts_with("<svg"));
        let html = read("report.html");
        assert!(html.contains("<td>&lt;&amp;&gt;</td>") && html.contains("<svg"));
        let results: serde_json::Value = serde_json::from_str(&read("results.json")).unwrap();
        assert_eq!(results[0]["raw"]["n"], 7);
    }

    #[test]
    fn a_foreign_file_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("results.json"), "{}").unwrap();
        let error = Report::open(Some(folder.path())).unwrap_err().to_string();
        assert!(error.contains("name another folder"), "{error}");
    }
}
