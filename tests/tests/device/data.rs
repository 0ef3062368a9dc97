//! No wrong byte: programs that rewrite and check three times their memory, in every configuration.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;
use uzswap_tests::{Finished, Machine, Run, Setting, is_full, program, wait_for};

const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";

/// Limit of the group and memory of the program, MiB.
const LIMIT: &str = "64M";
const MEMORY: &str = "192";

/// Short in the quick checks; in the full ones, ten minutes over all configurations.
fn seconds() -> &'static str {
    if is_full() { "66" } else { "3" }
}

fn churn(options: &[&str], processes: &str) -> Run {
    let churn = program("churn");
    let mut all = vec!["--memory", LIMIT];
    all.extend(options);
    Run::start(&all, &[churn.to_str().unwrap(), MEMORY, seconds(), processes])
}

fn check(run: &Finished, processes: usize) {
    run.assert_whole(processes);
    assert!(run.statistic("pages_swapped_in") > 1000, "it hardly swapped: {}", run.report);
}

#[test]
fn no_wrong_byte_with_each_codec() {
    let Some(_machine) = Machine::take() else { return };
    for compressor in ["lz4", "lz4:0", "zstd", "lzo", "deflate", "wkdm", "raw"] {
        let options = ["--backing", "none", "--pool", "400M", "--compressor", compressor];
        check(&churn(&options, "8").finish(), 8);
    }
}

#[test]
fn no_wrong_byte_with_a_pool_so_small_that_most_is_written_back() {
    let Some(_machine) = Machine::take() else { return };
    let options = ["--pool", "8M", "--backing", "/var/tmp/uzswap-test.img:256M"];
    let run = churn(&options, "8").finish();
    check(&run, 8);
    let (written, read) = (run.statistic("written_back_pages"), run.statistic("loads_backing"));
    assert!(written > 5000 && read > 1000, "{written} written back, {read} read: {}", run.report);
    assert!(run.report["pool_peak"].as_u64().unwrap() <= 8 << 20);
}

#[test]
fn no_wrong_byte_while_the_compressor_changes() {
    let Some(_machine) = Machine::take() else { return };
    let run = churn(&["--pool", "24M", "--backing", "/var/tmp/uzswap-test.img:256M"], "8");
    run.wait_until_running();
    let compressor = run.mount().join("parameters/compressor");
    let mut changes = 0;
    for name in ["lz4", "zstd:3", "lzo", "deflate", "wkdm", "zstd", "raw"].iter().cycle() {
        // The file is gone after the run.
        if std::fs::write(&compressor, name).is_err() {
            break;
        }
        changes += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    check(&run.finish(), 8);
    assert!(changes > 20, "{changes} changes");
}

#[test]
fn no_wrong_byte_with_and_without_read_ahead() {
    let Some(_machine) = Machine::take() else { return };
    for cluster in ["0", "3"] {
        let _setting = Setting::set(PAGE_CLUSTER, cluster).expect("the kernel swaps");
        let options = ["--pool", "24M", "--backing", "/var/tmp/uzswap-test.img:256M"];
        check(&churn(&options, "8").finish(), 8);
    }
}

#[test]
fn no_wrong_byte_while_pages_that_compress_badly_go_straight_to_the_backing() {
    let Some(_machine) = Machine::take() else { return };
    let run = churn(&["--pool", "64M", "--backing", "/var/tmp/uzswap-test.img:512M"], "4");
    run.wait_until_running();
    let parameter = |name: &str| run.mount().join("parameters").join(name);
    std::fs::write(parameter("max_compression_ratio"), "50").unwrap();
    assert!(wait_for(|| run.statistic("written_through_pages") > 100));
    // Switches the cache off and on again: stored pages must stay readable.
    std::fs::write(parameter("enabled"), "N").unwrap();
    assert!(wait_for(|| run.statistic("reject_disabled") > 100));
    std::fs::write(parameter("enabled"), "Y").unwrap();
    let run = run.finish();
    check(&run, 4);
}
