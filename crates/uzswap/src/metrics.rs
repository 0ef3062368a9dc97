//! The metrics: their names by Prometheus' conventions, and the text of a scrape.
//!
//! Each metric is a statistic of the control files under another name, except three: whether a
//! daemon answers, the times of reads, and the start of the daemon.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt;
use uzswap_block::control;

/// The prefix of every name.
const PREFIX: &str = "uzswap";
/// 1 while a daemon answers.
const UP: &str = "up";
/// Times of reads, from the device and from the store in another machine's memory.
const FAULTS: &str = "fault";
const REMOTE_READS: &str = "remote_read";
/// The time of the daemon's start.
const STARTED: &str = "daemon_start_time";

/// Statistics whose names do not end with the unit: the name, and the metric's name without the
/// unit.
const RENAMED: [(&str, &str); 9] = [
    ("backing_bytes_written", "backing_written"),
    ("backing_bytes_read", "backing_read"),
    ("compressed_bytes", "compressed"),
    ("dictionary_trial_bytes", "dictionary_trial"),
    ("dictionary_plain_bytes", "dictionary_plain"),
    ("pool_limit", "pool_limit"),
    ("remote_limit", "remote_limit"),
    ("remote_bytes_read", "remote_read"),
    ("remote_bytes_written", "remote_written"),
];

/// A metric.
pub struct Metric {
    /// The name of the statistic's control file.
    pub statistic: &'static str,
    /// The help text.
    pub help: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: MetricType,
    stem: String,
    unit: Option<Unit>,
}

impl Metric {
    fn of(statistic: &'static str, help: &'static str) -> Self {
        let renamed = RENAMED.iter().find(|(name, _)| *name == statistic);
        let stem = renamed.map(|(_, stem)| *stem).or_else(|| statistic.strip_suffix("_size"));
        let unit = stem.map(|_| Unit::Bytes);
        let kind = match control::is_counted(statistic) {
            true => MetricType::Counter,
            false => MetricType::Gauge,
        };
        Self { statistic, help, kind, stem: stem.unwrap_or(statistic).to_owned(), unit }
    }

    fn own(stem: &str, help: &'static str, kind: MetricType, unit: Option<Unit>) -> Self {
        Self { statistic: "", help, kind, stem: stem.to_owned(), unit }
    }

    /// The name in a scrape. A histogram's name lacks `_bucket`, `_sum` and `_count`.
    pub fn name(&self) -> String {
        let unit = self.unit.as_ref().map(|unit| format!("_{}", unit.as_str()));
        let total = if matches!(self.kind, MetricType::Counter) { "_total" } else { "" };
        format!("{PREFIX}_{}{}{total}", self.stem, unit.unwrap_or_default())
    }
}

/// All metrics. The statistics' percentiles are left out, since the histograms have them.
pub fn metrics() -> Vec<Metric> {
    let up = "1 while a daemon answers; without one there are no other metrics.";
    let faults = "How long reads of the device took, from taking the request to the answer.";
    let reads =
        "How long reads of the store in another machine's memory took, of those that it answered.";
    let started =
        "Time since the epoch at which the daemon started; it changes when another daemon goes on.";
    let own = [
        Metric::own(UP, up, MetricType::Gauge, None),
        Metric::own(FAULTS, faults, MetricType::Histogram, Some(Unit::Seconds)),
        Metric::own(REMOTE_READS, reads, MetricType::Histogram, Some(Unit::Seconds)),
        Metric::own(STARTED, started, MetricType::Gauge, Some(Unit::Seconds)),
    ];
    let statistics = control::statistics().filter(|(name, _)| !control::is_quantile(name));
    own.into_iter().chain(statistics.map(|(name, help)| Metric::of(name, help))).collect()
}

/// Times of reads.
#[derive(Debug, Clone, Default)]
pub struct Times {
    /// Upper bounds in nanoseconds. Each has the count of reads that took at most that, and more
    /// than the last bound.
    buckets: Vec<(u64, u64)>,
    /// Nanoseconds that all reads took.
    pub sum: u64,
}

impl Times {
    /// Adds a line of a file of times: a bound in nanoseconds or `sum`, with its number.
    pub fn add(&mut self, bound: &str, value: u64) {
        match bound.parse() {
            Ok(ns) => self.buckets.push((ns, value)),
            Err(_) => self.sum = value,
        }
    }

    /// The number of all reads.
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    fn encode(&self, metric: &mut MetricEncoder) -> fmt::Result {
        let seconds = |ns: u64| ns as f64 / 1e9;
        let mut buckets: Vec<_> = self.buckets.iter().map(|(ns, n)| (seconds(*ns), *n)).collect();
        buckets.push((f64::INFINITY, 0));
        metric.encode_histogram::<[(String, String); 0]>(
            seconds(self.sum),
            self.count(),
            &buckets,
            None,
        )
    }
}

/// The data that one scrape reads.
#[derive(Debug, Clone, Default)]
pub struct Scrape {
    /// Values by the names of the statistics.
    pub statistics: BTreeMap<&'static str, u64>,
    /// Times of reads of the device.
    pub faults: Times,
    /// The times of reads of the store; empty without a store.
    pub remote_reads: Times,
    /// When the daemon started, seconds since the epoch.
    pub started: Option<f64>,
}

impl Scrape {
    /// A statistic; 0 if it is unknown.
    pub fn get(&self, name: &str) -> u64 {
        self.statistics.get(name).copied().unwrap_or(0)
    }

    /// The text in the format of OpenMetrics.
    pub fn openmetrics(self) -> String {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut said = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut said, &registry);
        said
    }

    /// The text in Prometheus' own format, version 0.0.4. This format declares a counter by its
    /// whole name, and has no units.
    pub fn plain(self) -> String {
        let mut said = String::new();
        let openmetrics = self.openmetrics();
        let mut help = "";
        for line in openmetrics.lines() {
            if line.starts_with("# HELP ") {
                help = line;
                continue;
            }
            if line.starts_with("# UNIT ") || line == "# EOF" {
                continue;
            }
            match line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
                Some((name, kind)) => {
                    let total = if kind == "counter" { "_total" } else { "" };
                    let help = help.splitn(4, ' ').nth(3).unwrap_or_default();
                    said += &format!("# HELP {name}{total} {help}\n# TYPE {name}{total} {kind}\n");
                }
                None => said = said + line + "\n",
            }
        }
        said
    }

    /// The times of a histogram.
    fn times(&self, stem: &str) -> &Times {
        if stem == FAULTS { &self.faults } else { &self.remote_reads }
    }

    fn encode_one(&self, metric: &Metric, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let Metric { statistic, help, kind, stem, unit } = metric;
        let value = match stem.as_str() {
            UP => Some(u64::from(!self.statistics.is_empty())),
            _ => self.statistics.get(statistic).copied(),
        };
        let is_known = match (stem.as_str(), kind) {
            (stem, MetricType::Histogram) => !self.times(stem).buckets.is_empty(),
            (STARTED, _) => self.started.is_some(),
            _ => value.is_some(),
        };
        if !is_known {
            return Ok(());
        }
        let mut metric = encoder.encode_descriptor(stem, help, unit.as_ref(), *kind)?;
        match (stem.as_str(), kind) {
            (stem, MetricType::Histogram) => self.times(stem).encode(&mut metric),
            (STARTED, _) => ConstGauge::new(self.started.unwrap_or_default()).encode(metric),
            (_, MetricType::Counter) => ConstCounter::new(value.unwrap_or(0)).encode(metric),
            _ => ConstGauge::new(value.unwrap_or(0)).encode(metric),
        }
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        metrics().iter().try_for_each(|metric| self.encode_one(metric, &mut encoder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_has_every_metric_by_its_name() {
        let statistics = control::statistics().map(|(name, _)| (name, 7)).collect();
        let faults = Times { buckets: vec![(1024, 2), (2048, 1)], sum: 3500 };
        let remote_reads = Times { buckets: vec![(65536, 4)], sum: 160_000 };
        let figures = Scrape { statistics, faults, remote_reads, started: Some(1.5) };
        let (plain, open) = (figures.clone().plain(), figures.openmetrics());
        for metric in metrics() {
            let name = metric.name();
            assert!(plain.contains(&format!("# TYPE {name} ")), "{name}: {plain}");
            assert!(open.lines().any(|line| line.starts_with(&name)), "{name}: {open}");
        }
        assert!(plain.contains("uzswap_fault_seconds_bucket{le=\"0.000002048\"} 3\n"), "{plain}");
        assert!(plain.contains("uzswap_fault_seconds_bucket{le=\"+Inf\"} 3\n"), "{plain}");
        assert!(plain.contains("uzswap_remote_read_seconds_count 4\n"), "{plain}");
        assert!(plain.contains("uzswap_remote_read_seconds_bucket{le=\"0.000065536\"} 4\n"));
        assert!(plain.contains("\nuzswap_backing_written_bytes_total 7\n"), "{plain}");
        assert!(open.ends_with("# EOF\n"));
    }

    #[test]
    fn without_a_daemon_uzswap_up_is_0() {
        assert!(Scrape::default().plain().ends_with("\nuzswap_up 0\n"));
    }
}
