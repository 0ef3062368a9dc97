//! `uzswap bench`: the benchmarks are a program of their own.

use crate::cli::BenchArguments;
use crate::error::Failure;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Becomes the program `uzswap-bench` that lies beside this one.
pub fn bench(arguments: &BenchArguments) -> Failure {
    let own = match std::env::current_exe() {
        Ok(path) => path,
        Err(error) => return Failure::new(format!("/proc/self/exe: {error}")),
    };
    let program = own.with_file_name("uzswap-bench");
    let error = Command::new(&program).args(&arguments.arguments).exec();
    Failure::new(format!(
        "{}: {error}; build it with cargo build --release --package uzswap-bench",
        program.display()
    ))
}
