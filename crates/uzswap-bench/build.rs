//! Tells the program the commit that it was built from, for reports.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=../../.git/logs/HEAD");
    let head = Command::new("git").args(["rev-parse", "--short=10", "HEAD"]).output();
    let commit = head.ok().filter(|output| output.status.success());
    let commit = commit.and_then(|output| String::from_utf8(output.stdout).ok());
    let commit = commit.unwrap_or_else(|| "unknown commit".into());
    println!("cargo:rustc-env=UZSWAP_COMMIT={}", commit.trim());
}
