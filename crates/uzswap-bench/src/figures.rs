//! Medians, tables, and the folder that a report goes to.

use crate::error::{Context, Failure};
use comfy_table::{Table, presets::ASCII_MARKDOWN};
use serde::Serialize;
use std::fs;
use std::path::Path;

/// The middle of the values; of two middles, their mean. NaN for none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// A table in Markdown.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    table.to_string()
}

/// Where it was measured.
#[derive(Debug, Serialize)]
pub struct Machine {
    kernel: String,
    processor: String,
    cpus: usize,
    memory_bytes: u64,
    version: &'static str,
}

impl Machine {
    /// This one.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown".into(), |(_, name)| name.to_owned());
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            processor,
            cpus: uzswap_sys::cpu::allowed(),
            memory_bytes: uzswap_sys::cpu::memory_info().unwrap_or_default().total,
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// In one line.
    pub fn line(&self) -> String {
        format!(
            "Linux {}, {} x {}, {} GiB, uzswap {}",
            self.kernel,
            self.cpus,
            self.processor,
            self.memory_bytes >> 30,
            self.version
        )
    }
}

/// Checks, before anything is measured, that a report can be written to `folder`.
pub fn prepare(folder: Option<&Path>) -> Result<(), Failure> {
    let Some(folder) = folder else { return Ok(()) };
    let what = format!("cannot write the report to {}", folder.display());
    fs::create_dir_all(folder).context(&what)?;
    let probe = folder.join("results.json");
    fs::write(&probe, "").context(&what)?;
    fs::remove_file(probe).context(&what)
}

/// Prints a report, and writes it with all raw values to `folder`.
pub fn publish(
    folder: Option<&Path>,
    name: &str,
    text: &str,
    raw: &impl Serialize,
) -> Result<(), Failure> {
    let machine = Machine::here();
    let text = format!("{text}\n{}\n", machine.line());
    println!("{text}");
    let Some(folder) = folder else { return Ok(()) };
    let results = serde_json::json!({ "machine": machine, "bench": name, "results": raw });
    let json = serde_json::to_vec_pretty(&results).context("results")?;
    let what = folder.display().to_string();
    fs::write(folder.join(format!("{name}.json")), json).context(&what)?;
    fs::write(folder.join(format!("{name}.md")), text).context(&what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median([]).is_nan());
    }
}
