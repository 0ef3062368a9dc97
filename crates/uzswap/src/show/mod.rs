//! The figures for people: lines, reports, metrics, a page.

pub mod exporter;
pub mod live;
pub mod page;
pub mod report;
pub mod stats;
