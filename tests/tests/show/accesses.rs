//! `uzswap record --accesses`, `trace` and `simulate`: a recorded program computes the same, each
//! fork is a separate process in the trace, and bad input changes nothing.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::Output;
use uzswap_tests::{as_nobody, forks};

/// Runs uzswap in a folder that every user may write.
fn uzswap(folder: &Path, words: &[&str]) -> Output {
    let mut command = as_nobody(folder);
    command.current_dir(folder).arg(folder.join("uzswap")).args(words).output().unwrap()
}

/// Standard output of a command that succeeds.
fn shown(folder: &Path, words: &[&str]) -> String {
    let output = uzswap(folder, words);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {text} {error}");
    text
}

fn numbers(text: &str) -> Vec<u64> {
    text.split(|one: char| !one.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect()
}

/// Objects, a fifth of which gets nine of ten reads.
const SKEWED: &str = "
import random
random.seed(5)
texts = [bytearray(bytes(random.randrange(256) for _ in range(60)) * 68) for _ in range(14000)]
total = 0
for at in range(300000):
    chosen = random.randrange(2800) * 5 if random.random() < 0.93 else random.randrange(14000)
    total += texts[chosen][at % 4000]
print(total)
";

#[test]
fn the_policy_that_run_is_given_decides_which_page_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("skewed.py"), SKEWED).unwrap();
    let [order, clock] = ["order", "clock"].map(|policy| {
        let options = ["run", "--in-process", "--memory", "34M", "--report", policy];
        let command = ["--policy", policy, "--", "/usr/bin/python3", "-I", "skewed.py"];
        let total = shown(folder, &[&options[..], &command[..]].concat());
        let report = fs::read_to_string(folder.join(policy)).unwrap();
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        (total, report["faults"].as_u64().unwrap())
    });
    assert_eq!(order.0, clock.0);
    assert!(order.1 * 10 < clock.1 * 9, "{order:?} by levels, {clock:?} in the order of coming");
}

#[test]
fn a_recorded_program_computes_the_same_and_its_forks_are_recorded_too() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("program.py"), forks(40_000) + "print(digest())").unwrap();
    let program = ["/usr/bin/python3", "-I", "program.py", "file"];
    let record = ["record", "--accesses", "heap.trace", "--"];
    let recorded = uzswap(folder, &[&record[..], &program[..]].concat());
    let said = String::from_utf8_lossy(&recorded.stderr);
    assert!(recorded.status.success(), "{said}");
    assert!(
        said.contains("of 3 processes are in heap.trace") && !said.contains("no room"),
        "{said}"
    );
    let mut plain = as_nobody(folder);
    let plain = plain.current_dir(folder).args(program).output().unwrap();
    assert_eq!(recorded.stdout, plain.stdout);
    assert!(!folder.join("heap.trace.part").exists());
    let summary = shown(folder, &["trace", "heap.trace"]);
    assert!(summary.starts_with("python3: recorded with 16.0 MiB for pages, sizes of lz4"));
    // The program reads 26 MB seven times, and 16 MiB of them are in memory.
    let touches = numbers(summary.lines().nth(1).unwrap())[0];
    assert!(touches > 5_000, "{summary}");
    let printed = shown(folder, &["trace", "heap.trace", "--print", "--from", "10", "--to", "20"]);
    assert_eq!(printed.lines().count(), 11, "{printed}");
    shown(folder, &["trace", "heap.trace", "--export", "heap.oracle"]);
    let bytes = fs::metadata(folder.join("heap.oracle")).unwrap().len();
    assert!(bytes.is_multiple_of(24) && bytes / 24 >= touches, "{bytes}");
    // With more memory there are fewer faults. No policy that brings in one page at a time has
    // fewer faults than the optimum.
    let words = ["simulate", "heap.trace", "--memory", "24M,48M", "--policy", "order,lru,belady"];
    let table = shown(folder, &words);
    let faults = |memory: &str, policy: &str| {
        let row = table.lines().find(|row| row.contains(memory) && row.contains(policy));
        let cells: Vec<_> = row.unwrap_or_else(|| panic!("{table}")).split_whitespace().collect();
        cells[2].parse::<u64>().unwrap()
    };
    for policy in ["order", "lru", "belady"] {
        assert!(faults("48.0MiB", policy) < faults("24.0MiB", policy), "{table}");
    }
    assert!(faults("24.0MiB", "belady") <= faults("24.0MiB", "lru"), "{table}");
    let fleet = shown(folder, &["simulate", "heap.trace", "--fleet", "heap.trace"]);
    assert!(fleet.contains("a fleet of 1000 machines saves"), "{fleet}");
    let plot = shown(folder, &["simulate", "heap.trace", "--plot", "--policy", "order,lru"]);
    assert!(plot.contains("─ order") && plot.contains("• lru") && plot.contains("⠉"), "{plot}");
    assert!(plot.lines().last().unwrap().starts_with("16.0 MiB"), "{plot}");
    assert!(shown(folder, &["simulate", "heap.trace", "--fit"]).contains("order: "));
    let words = ["simulate", "heap.trace", "--memory", "20M", "--policy", "order", "--backing"];
    let [none, slow] = ["none", "8ms"].map(|time| shown(folder, &[&words[..], &[time]].concat()));
    assert!(none.contains(" order ") && !slow.contains("without a backing"), "{none} {slow}");
}

#[test]
fn a_trace_that_is_full_says_how_many_events_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("program.py"), "text = [bytes(900) for i in range(60000)]").unwrap();
    let words =
        ["record", "--accesses", "t", "--max", "100K", "--", "/usr/bin/python3", "program.py"];
    let output = uzswap(folder, &words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("more events had no room"), "{said}");
    assert!(said.contains("larger --max"), "{said}");
    let events = numbers(shown(folder, &["trace", "t"]).lines().nth(1).unwrap());
    assert!(events.contains(&(100 * 1024 / 24)), "{events:?}");
}

#[test]
fn bad_input_is_named_in_one_line_and_nothing_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("foreign"), "some text").unwrap();
    for (words, says) in [
        (&["trace", "foreign"][..], "foreign: no trace of accesses"),
        (&["simulate", "foreign", "--memory", "64M"], "foreign: no trace of accesses"),
        (&["trace", "missing"], "missing: No such file or directory"),
        (
            &["simulate", "foreign", "--memory", "64M", "--policy", "lfu"],
            "one of order, clock, fifo",
        ),
        (
            &["simulate", "foreign", "--memory", "64M", "--backing", "fast"],
            "'fast' is no time of a read",
        ),
        (&["trace", "foreign", "--cut", "9..3", "--out", "out"], "'9..3' is not a range of events"),
        (&["record", "--accesses", "foreign", "--", "true"], "foreign: the file exists"),
        (&["record", "--accesses", "out", "--memory", "1M", "--", "true"], "a pager needs 8M"),
        (&["record", "--accesses", "out", "--max", "1K", "--", "true"], "too small for a trace"),
        (&["record", "--accesses", "out", "--", "no-such-command"], "no such command"),
        (&["record", "--accesses", "missing/out", "--", "true"], "name a file that is not there"),
    ] {
        let output = uzswap(folder, words);
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().find(|line| line.contains(says));
        assert!(!output.status.success() && line.is_some(), "{words:?}: {said}");
    }
    assert_eq!(fs::read(folder.join("foreign")).unwrap(), b"some text");
    assert!(!folder.join("out").exists() && !folder.join("out.part").exists());
}
