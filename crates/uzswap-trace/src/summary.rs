//! The figures of a trace.

use crate::event::Event;
use crate::read::Trace;
use std::collections::{BTreeMap, BTreeSet};

/// Figures of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Touches.
    pub touches: u64,
    /// Touches that wrote.
    pub writes: u64,
    /// Processes with events.
    pub processes: usize,
    /// Pages of all processes, counted by address.
    pub pages: usize,
    /// Smallest, quartiles and largest of the compressed sizes; `None` if no page was compressed.
    pub sizes: Option<[u16; 5]>,
    /// Pages that came back and were same-filled.
    pub same_filled: u64,
    /// Pages that came back and were identical to another.
    pub identical: u64,
    /// The call sites with the most touches, and their numbers of touches.
    pub sites: Vec<(u32, u64)>,
}

/// Number of listed call sites.
const SITES: usize = 8;

impl Summary {
    /// Sums a trace up.
    pub fn of(trace: &Trace) -> Self {
        let touches = || trace.events.iter().filter(|event| event.what.is_touch());
        let count = |is_it: fn(&Event) -> bool| touches().filter(|one| is_it(one)).count() as u64;
        let mut sizes: Vec<u16> = trace.events.iter().map(|event| event.bytes).collect();
        sizes.retain(|bytes| *bytes > 0);
        sizes.sort_unstable();
        let last = sizes.len().saturating_sub(1);
        let quartile = |part: usize| sizes[last * part / 4];
        let mut of_site: BTreeMap<u32, u64> = BTreeMap::new();
        touches().for_each(|event| *of_site.entry(event.site).or_default() += 1);
        let mut sites: Vec<_> = of_site.into_iter().collect();
        sites.sort_by_key(|(_, touches)| std::cmp::Reverse(*touches));
        sites.truncate(SITES);
        let pages: BTreeSet<_> = trace.events.iter().map(|one| (one.process, one.page)).collect();
        let processes: BTreeSet<_> = trace.events.iter().map(|one| one.process).collect();
        Self {
            touches: count(|_| true),
            writes: count(|event| event.is_write),
            processes: processes.len(),
            pages: pages.len(),
            sizes: (!sizes.is_empty()).then(|| std::array::from_fn(quartile)),
            same_filled: count(|event| event.is_same_filled),
            identical: count(|event| event.is_identical),
            sites,
        }
    }
}
