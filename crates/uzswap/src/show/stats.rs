//! Reading the control files.

use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use uzswap_block::control::{self, PARAMETERS, STATISTICS_FOLDER};

/// All that the control files contain.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    pub parameters: BTreeMap<String, String>,
    /// Statistics that are numbers.
    pub stats: BTreeMap<String, u64>,
    /// The reason why writeback stopped; empty while it works.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub writeback_error: String,
}

impl Stats {
    /// Reads the files mounted at `mount`; empty if no daemon serves them.
    pub fn read(mount: &Path) -> Self {
        let files = |folder: &str| {
            let entries = fs::read_dir(mount.join(folder)).into_iter().flatten().flatten();
            entries.filter_map(|entry| {
                let text = fs::read_to_string(entry.path()).ok()?;
                Some((entry.file_name().into_string().ok()?, text.trim_end().to_owned()))
            })
        };
        let mut read = Self { parameters: files(PARAMETERS).collect(), ..Self::default() };
        for (name, text) in files(STATISTICS_FOLDER) {
            match text.parse() {
                Ok(number) => drop(read.stats.insert(name, number)),
                Err(_) if name == "writeback_error" => read.writeback_error = text,
                Err(_) => {}
            }
        }
        read
    }

    /// The counts since `before`. Values that are not counts are unchanged.
    pub fn since(mut self, before: &Self) -> Self {
        for (name, value) in self.stats.iter_mut().filter(|(name, _)| control::is_counted(name)) {
            *value = value.saturating_sub(before.get(name));
        }
        self
    }

    /// A statistic; 0 if it is unknown.
    pub fn get(&self, name: &str) -> u64 {
        self.stats.get(name).copied().unwrap_or(0)
    }

    /// Bytes of the pages whose objects are in the pool, before compression.
    pub fn original_bytes(&self) -> u64 {
        self.get("pool_pages") * 4096
    }

    /// Bytes of pages for one byte of pool; `None` while the pool is empty.
    pub fn ratio(&self) -> Option<f64> {
        let pool = self.get("pool_total_size");
        (pool > 0).then(|| self.original_bytes() as f64 / pool as f64)
    }
}
