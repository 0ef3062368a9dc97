//! The figures, as a person sees them: lines, reports, metrics, a page.

pub mod exporter;
pub mod live;
pub mod page;
pub mod report;
pub mod stats;
