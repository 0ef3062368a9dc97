//! Benchmarks: uzswap and the alternatives, measured in turns in one run.
//!
//! This is a separate program, so that the serving program does not contain its code. Every
//! configuration is measured once a round, and rounds are repeated, so that other load on the
//! machine affects all of them. Figures are medians. All raw values are kept.

#![forbid(unsafe_code)]

mod bench;
mod calls;
mod codecs;
mod corpus;
mod density;
mod error;
mod fault;
mod faults;
mod figures;
mod floor;
mod forks;
mod hold;
mod install;
mod java;
mod kernel_build;
mod locks;
mod machine;
mod means;
mod numpy;
mod peer;
mod plot;
mod programs;
mod ram;
mod ranges;
mod recovery;
mod redis;
mod report;
mod sharing;
mod skew;
mod starts;
mod timed_memory;
mod touch;
mod transport;

use bench::{Bench, Options};
use clap::{Parser, Subcommand};
use error::Failure;
use report::Section;
use std::process::ExitCode;

/// Measure uzswap beside the kernel's own swap, zswap and zram.
#[derive(Debug, Parser)]
#[command(name = "uzswap-bench", bin_name = "uzswap-bench", version, about)]
struct Cli {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Subcommand)]
enum What {
    /// All other benchmarks, one after another.
    All,
    /// The size and speed of each compressor on real pages.
    Codecs(codecs::CodecsArguments),
    /// Memory for a stored page, beside zram and zswap.
    Density(density::DensityArguments),
    /// The time of paging in, beside zswap and zram.
    Fault(fault::FaultArguments),
    /// The time of paging out, beside zswap and zram.
    Swapout(fault::FaultArguments),
    /// numpy on an array four times its memory, beside numpy.memmap.
    Numpy(numpy::NumpyArguments),
    /// Threads that swap out at the same time, and the cost of their locks.
    Locks(locks::LocksArguments),
    /// The range index beside other ordered maps.
    Ranges,
    /// A fault without a cache behind the device, and the cost of our cache.
    Transport(transport::TransportArguments),
    /// The pause of programs when the daemon is killed.
    Recovery(recovery::RecoveryArguments),
    /// Compile a small kernel with many jobs in little memory.
    KernelBuild(kernel_build::BuildArguments),
    /// A Redis with more data than memory, in-process beside zram.
    Redis(redis::RedisArguments),
    /// Transactions in Java on a heap that grows beyond its memory, in-process beside zram.
    Java(java::JavaArguments),
    /// System calls and programs with memory to spare, in-process and alone.
    Calls(calls::CallsArguments),
    /// A touch of an evicted page in-process, by each means of eviction.
    Means(means::MeansArguments),
    /// A working set beside colder pages at equal memory in total, in-process beside zram.
    Skew(skew::SkewArguments),
    /// Programs in a part of their memory, in-process beside zram.
    Programs(programs::ProgramsArguments),
    /// The memory that one pool for all processes of a command would save.
    Sharing(sharing::SharingArguments),
    /// The time of a fork of a program with more data than memory, beside the kernel's swap.
    Forks(forks::ForksArguments),
    /// The program that touches; started by means and skew.
    #[command(hide = true)]
    TouchFiles(means::TouchArguments),
    /// The measured server; started by redis.
    #[command(hide = true)]
    ServeRedis(redis::ServeArguments),
    /// The program that makes calls; started by calls.
    #[command(hide = true)]
    MakeCalls(calls::MakeArguments),
    /// The program that starts others; started by calls.
    #[command(hide = true)]
    MakeStarts(starts::MakeArguments),
    /// The program that kills the daemon and waits; started by recovery.
    #[command(hide = true)]
    Pauses(recovery::PausesArguments),
    /// The program whose faults are timed; started by the others.
    #[command(hide = true)]
    Faults(faults::FaultArguments),
    /// The program whose page-outs and faults are timed; started by fault and swapout.
    #[command(hide = true)]
    Touch(touch::TouchArguments),
    /// The program whose memory zswap holds; started by density.
    #[command(hide = true)]
    Hold(hold::HoldArguments),
}

/// The benchmarks of `all`, the shortest first.
const ALL: [&str; 18] = [
    "ranges",
    "calls",
    "codecs",
    "locks",
    "density",
    "means",
    "fault",
    "swapout",
    "numpy",
    "forks",
    "sharing",
    "transport",
    "recovery",
    "skew",
    "programs",
    "redis",
    "java",
    "kernel-build",
];

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no failures.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { 125 } else { 0 });
        }
    };
    let done = match &cli.what {
        What::Faults(arguments) => faults::run(arguments),
        What::Hold(arguments) => hold::run(arguments),
        What::ServeRedis(arguments) => redis::serve(arguments),
        What::MakeCalls(arguments) => calls::make(arguments),
        What::MakeStarts(arguments) => starts::make(arguments),
        What::Pauses(arguments) => recovery::pauses(arguments),
        What::Touch(arguments) => touch::run(arguments),
        What::TouchFiles(arguments) => means::touch(arguments),
        What::All => begin(&cli.options).and_then(|bench| all(&bench)),
        what => begin(&cli.options).and_then(|bench| bench.publish(section(&bench, what)?)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("uzswap-bench: {failure}");
            ExitCode::from(125)
        }
    }
}

/// Checks the needs of every benchmark.
fn begin(options: &Options) -> Result<Bench, Failure> {
    match uzswap_sys::process::is_root() {
        true => Bench::begin(options),
        false => Err(Failure::new("benchmarks swap, which needs root; run it with sudo")),
    }
}

fn section(bench: &Bench, what: &What) -> Result<Section, Failure> {
    match what {
        What::Codecs(arguments) => codecs::run(bench, arguments),
        What::Locks(arguments) => locks::run(bench, arguments),
        What::Ranges => ranges::run(bench),
        What::Density(arguments) => density::run(bench, arguments),
        What::Fault(arguments) => fault::fault(bench, arguments),
        What::Swapout(arguments) => fault::swapout(bench, arguments),
        What::Numpy(arguments) => numpy::run(bench, arguments),
        What::Transport(arguments) => transport::run(bench, arguments),
        What::Recovery(arguments) => recovery::run(bench, arguments),
        What::KernelBuild(arguments) => kernel_build::run(bench, arguments),
        What::Redis(arguments) => redis::run(bench, arguments),
        What::Java(arguments) => java::run(bench, arguments),
        What::Calls(arguments) => calls::run(bench, arguments),
        What::Means(arguments) => means::run(bench, arguments),
        What::Skew(arguments) => skew::run(bench, arguments),
        What::Sharing(arguments) => sharing::run(bench, arguments),
        What::Forks(arguments) => forks::run(bench, arguments),
        What::Programs(arguments) => programs::run(bench, arguments),
        What::ServeRedis(_) | What::MakeCalls(_) | What::MakeStarts(_) | What::TouchFiles(_) => {
            Err(Failure::new("not a benchmark by itself"))
        }
        What::All | What::Faults(_) | What::Hold(_) | What::Pauses(_) | What::Touch(_) => {
            Err(Failure::new("not a benchmark by itself"))
        }
    }
}

/// Runs each as if it alone were named. A failure does not stop the others.
fn all(bench: &Bench) -> Result<(), Failure> {
    let mut failed = Vec::new();
    for (number, name) in (1..).zip(ALL) {
        bench.label(&format!("{name} ({number} of {})", ALL.len()));
        let cli = Cli::try_parse_from(["uzswap-bench", name]);
        let cli = cli.map_err(|error| Failure::new(format!("{name}: {error}")))?;
        let done = section(bench, &cli.what).and_then(|section| bench.publish(section));
        bench.interrupt.check()?;
        if let Err(failure) = done {
            eprintln!("uzswap-bench: {name}: {failure}");
            failed.push(name);
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!("not measured: {}; see above", failed.join(", ")))),
    }
}
