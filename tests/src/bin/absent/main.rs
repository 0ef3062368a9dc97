//! Makes each system call with memory twice, with this memory present and paged out, and compares
//! results and effects. It runs in-process, in less memory than it uses.
//!
//! `absent DIRECTORY`: prints the number of compared calls. Ends with 1 and a line for each call
//! that differs, or that is neither compared nor listed as exempt.

#[cfg(target_arch = "x86_64")]
mod compared;

use std::process::ExitCode;

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    compared::run()
}

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    eprintln!("absent: it compares calls of x86-64; run it there");
    ExitCode::FAILURE
}
