//! The command line by itself, from which the man pages and the completions are made as well; and
//! the names of the metrics.

#![forbid(unsafe_code)]

pub mod address;
pub mod cli;
pub mod metrics;
pub mod size;
