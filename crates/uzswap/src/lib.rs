//! The definition of the command line, for xtask to make man pages and completions of; and the
//! names of the metrics.

#![forbid(unsafe_code)]

pub mod address;
pub mod cli;
pub mod metrics;
pub mod size;
