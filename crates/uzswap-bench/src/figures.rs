//! Medians, quantiles, and the machine of a measurement.

use serde::{Deserialize, Serialize};
use std::fs;

/// The middle value, or the mean of the two middle values; NaN for no values.
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

/// The value that `share` of the values do not exceed; 0 for none.
pub fn quantile(values: &[u64], share: f64) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(0)
}

/// The machine of a measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MachineFacts {
    kernel: String,
    processor: String,
    cpus: usize,
    memory_bytes: u64,
    cgroup: String,
    version: String,
    commit: String,
    /// Seconds since 1970.
    when: u64,
}

impl MachineFacts {
    /// This machine, now.
    pub fn here() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown".into(), |(_, name)| name.to_owned());
        let hierarchy = uzswap_sys::cgroup::Hierarchy::find();
        let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
        Self {
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            processor,
            cpus: uzswap_sys::cpu::allowed(),
            memory_bytes: uzswap_sys::cpu::memory_info().unwrap_or_default().total,
            cgroup: hierarchy.map_or("none".into(), |found| format!("{:?}", found.version)),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: env!("UZSWAP_COMMIT").into(),
            when: since.map_or(0, |since| since.as_secs()),
        }
    }

    pub fn line(&self) -> String {
        format!(
            "Linux {}, {} x {}, {} GiB, memory cgroup {}, uzswap {} ({})",
            self.kernel,
            self.cpus,
            self.processor,
            self.memory_bytes >> 30,
            self.cgroup.to_lowercase(),
            self.version,
            self.commit
        )
    }
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

    #[test]
    fn quantiles_are_values() {
        let values: Vec<u64> = (0..=100).rev().collect();
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.99)), (50, 99));
        assert_eq!(quantile(&[], 0.5), 0);
    }
}
