//! `xtask cross COMMAND …`: runs cargo for aarch64 on a machine with another processor. Programs
//! and tests run under QEMU's user emulation. This emulation has no userfaultfd, so tests that need
//! the kernel run in the lab (`vm`).

use std::path::Path;
use std::process::{Command, ExitCode};

pub const TARGET: &str = "aarch64-unknown-linux-gnu";
/// Defaults of variables for cargo: Debian's cross compiler, and the emulator with that compiler's
/// C library. The C codecs find their compilers by the target.
const VARIABLES: [(&str, &str); 2] = [
    ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", "aarch64-linux-gnu-gcc"),
    (
        "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
        "qemu-aarch64-static -L /usr/aarch64-linux-gnu",
    ),
];
/// All libraries and programs but benchmarks and tools.
const PACKAGES: [&str; 15] = [
    "uzswap-calls",
    "uzswap-preload",
    "uzswap-agent",
    "uzswap-sync",
    "uzswap-ranges",
    "uzswap-sys",
    "uzswap-engine",
    "uzswap-policy",
    "uzswap-trace",
    "uzswap-tree",
    "uzswap-remote",
    "uzswap-block",
    "uzswap-region",
    "uzswap-c",
    "uzswap",
];

/// A cargo command for the target.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    for (name, value) in VARIABLES {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    command
}

/// Runs cargo with these arguments, on all packages above unless the arguments name some.
pub fn run(root: &Path, arguments: impl Iterator<Item = String>) -> ExitCode {
    let (mut before, mut behind) = (Vec::new(), Vec::new());
    for argument in arguments {
        let is_behind = argument == "--" || !behind.is_empty();
        if is_behind { behind.push(argument) } else { before.push(argument) }
    }
    let Some((name, rest)) = before.split_first() else {
        eprintln!("usage: cargo run -p xtask -- cross build|check|test [cargo's arguments]");
        return ExitCode::from(2);
    };
    let mut command = cargo(root);
    command.arg(name).args(["--target", TARGET]).args(rest);
    let is_named = |word: &String| word.starts_with("-p") || word.starts_with("--package");
    if !rest.iter().any(is_named) {
        command.args(PACKAGES.iter().flat_map(|package| ["--package", package]));
    }
    match command.args(behind).status() {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("cross: cargo: {error}; install Rust with rustup");
            ExitCode::FAILURE
        }
    }
}
