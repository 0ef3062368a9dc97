//! The command line by itself: what the man pages and the completions are made from as well.

#![forbid(unsafe_code)]

pub mod cli;
pub mod size;
