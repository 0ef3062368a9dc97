//! Figures of a pager, by name.

use crate::core::Inner;
use crate::lane::COUNTS;
use std::fmt;
use uzswap_engine::STATISTICS;

/// Figures of a pager at one moment: those of the engine, by the names of its control files
/// (`stored_pages`, `pool_total_size`, …), and:
///
/// | name | meaning |
/// |---|---|
/// | `memory_budget` | bytes that everything may take together |
/// | `memory_used` | bytes that everything takes, or has set aside |
/// | `charged_pages` | pages in regions and on their way, and those set aside for faults |
/// | `staged_pages` | pages taken out and not compressed yet, at most |
/// | `faults` | faults served |
/// | `faults_staged` | of these, pages that came back before they were compressed |
/// | `faults_untouched` | of these, pages that were never written before |
/// | `faults_waited_for_memory` | of these, those that waited for pages to be taken out |
/// | `faults_guarded` | of these, first writes to pages that had come from the backing to be read |
/// | `fault_around_pages` | pages brought in beside the one that faulted |
/// | `read_ahead_pages` | pages brought in ahead of a program that goes on in order |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    values: Vec<(&'static str, u64)>,
}

impl Stats {
    pub(crate) fn of(inner: &Inner) -> Self {
        let budget = &inner.budget;
        let charged = budget.charged().max(0) as u64;
        let staged = (inner.staging.queued() * crate::staging::BATCH) as u64;
        let mut values = vec![
            ("memory_budget", budget.bytes()),
            ("memory_used", budget.used()),
            ("charged_pages", charged),
            ("staged_pages", staged),
        ];
        values.extend(COUNTS.into_iter().zip(inner.lanes.counts()));
        values.extend(STATISTICS.iter().map(|one| (one.name, one.value(&inner.cache))));
        Self { values }
    }

    /// Names and values.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.values.iter().copied()
    }

    /// The value of a name; `None` if there is no such name.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }
}

impl fmt::Display for Stats {
    /// A line for each, as `name value`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.iter().try_for_each(|(name, value)| writeln!(f, "{name} {value}"))
    }
}
