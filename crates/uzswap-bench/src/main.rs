//! Benchmarks: ours beside what a person would use otherwise, in one run, in turns.
//!
//! Started by `uzswap bench`, and a program of its own so that the one which serves carries none of
//! this. Every configuration is measured once a round, and the rounds are repeated, so that what
//! else the machine did meets them all. Figures are medians; all raw values are kept.

#![forbid(unsafe_code)]

mod corpus;
mod error;
mod faults;
mod figures;
mod kernel_build;
mod machine;
mod peer;
mod transport;

use clap::{Parser, Subcommand};
use error::Failure;
use std::process::ExitCode;

/// Measure uzswap beside the kernel's own swap, zswap and zram.
#[derive(Debug, Parser)]
#[command(name = "uzswap bench", bin_name = "uzswap bench", version, about)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// A fault without a cache behind the device, and what ours adds to it.
    Transport(transport::TransportArguments),
    /// Compile a small kernel with many jobs in little memory.
    KernelBuild(kernel_build::BuildArguments),
    /// The program whose faults are timed; started by the others.
    #[command(hide = true)]
    Faults(faults::FaultArguments),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no failures.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 125 } else { 0 });
        }
    };
    let done = match &cli.bench {
        Bench::Faults(arguments) => faults::run(arguments),
        bench => require().and_then(|()| match bench {
            Bench::Transport(arguments) => transport::run(arguments),
            Bench::KernelBuild(arguments) => kernel_build::run(arguments),
            Bench::Faults(_) => Ok(()),
        }),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("uzswap bench: {failure}");
            ExitCode::from(125)
        }
    }
}

/// What every benchmark needs.
fn require() -> Result<(), Failure> {
    match uzswap_sys::process::is_root() {
        true => Ok(()),
        false => Err(Failure::new("benchmarks swap, which needs root; run it with sudo")),
    }
}
