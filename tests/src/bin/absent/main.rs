//! Makes each system call with memory twice, with this memory present and paged out, and compares
//! results and effects. It runs in-process, in less memory than it uses.
//!
//! `absent DIRECTORY`: prints the number of compared calls. Ends with 1 and a line for each call
//! that differs, or that is neither compared nor listed as exempt.

mod compared;

use std::process::ExitCode;

fn main() -> ExitCode {
    compared::run()
}
