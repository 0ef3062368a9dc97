//! Every benchmark at a size that takes seconds, interrupted and killed too.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use uzswap_sys::process;
use uzswap_tests::{Machine, copy_programs, is_full, is_slow_and_skipped, program, wait_for};

fn bench(arguments: &[&str]) -> Output {
    let mut command = Command::new(program("uzswap-bench"));
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn assert_well(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn transport_compares_plain_memory_with_each_compressor() {
    let Some(_machine) = Machine::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let report = format!("--report={}", folder.path().display());
    let small = [
        "transport",
        "--rounds=1",
        "--touches=3000",
        "--limit-mib=16",
        "--compressors=lz4,zstd",
        &report,
    ];
    let text = assert_well(&bench(&small));
    for row in ["| plain memory", "| lz4", "| zstd"] {
        assert!(text.contains(row), "{text}");
    }
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    assert!(read("report.md").contains("| zstd"));
    assert!(read("report.html").contains("<svg"));
    let results: serde_json::Value = serde_json::from_str(&read("results.json")).unwrap();
    let times = results[0]["raw"]["turns"][1]["rounds"][0]["ns"].as_array().unwrap();
    assert!(times.len() > 1000, "{} faults", times.len());
}

#[test]
fn a_compressor_that_fails_is_a_row_with_the_reason() {
    let Some(machine) = Machine::take() else { return };
    let output = bench(&[
        "transport",
        "--rounds=2",
        "--touches=1000",
        "--limit-mib=16",
        "--compressors=lz5,lz4",
    ]);
    assert_eq!(output.status.code(), Some(125));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("uzswap-bench: lz5: "), "{stderr}");
    let text = String::from_utf8_lossy(&output.stdout);
    let row = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(row("| lz5").contains("failed: "), "{text}");
    assert!(!row("| lz4").contains("failed"), "the others are measured: {text}");
    machine.assert_as_before();
}

#[test]
fn numpy_compares_regions_with_plain_arrays_and_memmap() {
    let Some(_machine) = Machine::take() else { return };
    let mut numpy = Command::new(program("uzswap-bench"));
    if !is_full() {
        // The module is compiled with the profile of the other tests. An optimized build would take
        // minutes.
        numpy.env("MATURIN_PEP517_ARGS", "--locked --profile dev");
    }
    let text =
        assert_well(&numpy.args(["numpy", "--smoke"]).stdin(Stdio::null()).output().unwrap());
    let arrays = ["plain numpy, in-process", "numpy.memmap", "region, lz4"];
    for row in arrays.map(|array| format!("prices: {array}")) {
        assert!(text.contains(&row), "{row}: {text}");
    }
    assert!(!text.contains("NaN"), "{text}");
}

#[test]
fn locks_are_counted_and_a_prediction_is_made_of_that() {
    let Some(_machine) = Machine::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("counts.json");
    let file = file.to_str().unwrap();
    let predict = ["locks", "--smoke", "--counts", file];
    fs::write(file, "[]").unwrap();
    let refused = bench(&predict);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125));
    assert!(stderr.contains("--count did not write it"), "{stderr}");
    let text = assert_well(&bench(&["locks", "--smoke", "--threads=5", "--count", file]));
    for row in ["| Entry", "| slots::SlotCache", "| lru::List"] {
        assert!(text.contains(row), "{row}: {text}");
    }
    let counts: serde_json::Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!((counts["threads"].as_u64(), counts["pages"].as_u64()), (Some(5), Some(4095)));
    assert_eq!(counts["settings"].as_array().unwrap().len(), 4);
    let text = assert_well(&bench(&predict));
    assert!(text.contains("5 CPUs with a thread each") && !text.contains("NaN"), "{text}");
    assert_eq!(text.matches("| raw").count() + text.matches("| lz4").count(), 4 + 4 * 3);
}

#[test]
fn every_benchmark_has_its_rows_and_plots() {
    let Some(_machine) = Machine::take() else { return };
    let folder = tempfile::tempdir().unwrap();
    let report = format!("--report={}", folder.path().display());
    let cases: [(&str, &[&str], &str); 12] = [
        ("ranges", &["| skiplist", "| crossbeam-skiplist"], "ranges-fill.svg"),
        ("locks", &["| plain", "| sealed", "| List"], "locks-out-lz4.svg"),
        ("codecs", &["| wkdm", "| lz4:0", "| zstd:3", "choice by page"], "codecs-out.svg"),
        ("density", &["| zram, lz4", "| zswap, lzo", "| uzswap, lz4"], "density-bytes.svg"),
        (
            "fault",
            &["| zram, lz4", "| region, lz4", "| in-process", "| swap device, zstd, recompressed"],
            "fault-cdf.svg",
        ),
        (
            "swapout",
            &["| zram, lz4", "| zswap, lzo", "| swap device, lz4", "| region, lz4"],
            "swapout-cdf.svg",
        ),
        ("recovery", &["| 32 MiB"], "recovery-cdf.svg"),
        ("calls", &["| alone", "| in-process, taken over", "| true", "| git status"], ""),
        ("forks", &["| alone", "| plain swap", "| zram, lz4", "| in-process"], ""),
        ("skew", &["| zram, lz4", "| in-process, lz4", "| in-process, zstd"], ""),
        ("programs", &["| sort "], ""),
        ("redis", &["| zram, lz4", "| in-process"], ""),
    ];
    for (name, rows, plot) in cases {
        let mut arguments = vec![name, "--smoke", &report];
        if name == "skew" {
            arguments.push("--percents=95");
        }
        let text = assert_well(&bench(&arguments));
        for row in rows {
            assert!(text.contains(row), "{row}: {text}");
        }
        assert!(!text.contains("NaN"), "{text}");
        if !plot.is_empty() {
            assert!(fs::read_to_string(folder.path().join(plot)).unwrap().starts_with("<svg"));
        }
    }
    let report = fs::read_to_string(folder.path().join("report.md")).unwrap();
    let sections = report.lines().filter(|line| line.starts_with("## ")).count();
    assert_eq!(sections, cases.len(), "each leaves the others' sections");
}

#[test]
fn java_is_measured_with_two_collectors() {
    // The test needs a Java compiler.
    if is_slow_and_skipped() {
        return;
    }
    let Some(_machine) = Machine::take() else { return };
    let text = assert_well(&bench(&["java", "--smoke"]));
    for row in ["| G1: zram, lz4", "| G1: in-process", "| parallel: in-process"] {
        assert!(text.contains(row), "{row}: {text}");
    }
    assert!(!text.contains("NaN"), "{text}");
}

#[test]
fn a_kernel_is_built_with_every_kind_of_swap_on_both_disks() {
    // The test installs the kernel's sources.
    if is_slow_and_skipped() {
        return;
    }
    let Some(machine) = Machine::take() else { return };
    let text = assert_well(&bench(&["kernel-build", "--smoke", "--memory=96M"]));
    for row in ["| plain swap", "| zswap, lzo", "| zram, lz4", "| uzswap, lz4", "| uzswap, zstd"] {
        assert!(text.matches(row).count() >= 2, "{text}");
    }
    machine.assert_as_before();

    // This benchmark is killed while the disk is throttled. The next benchmark removes the limit.
    let throttled = || {
        let path = "/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device";
        fs::read_to_string(path).is_ok_and(|text| !text.is_empty())
    };
    let mut child = Command::new(program("uzswap-bench"))
        .args(["kernel-build", "--smoke", "--memory=96M", "--disks=slow"])
        .args(["--peers=plain", "--rounds=50"])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    assert!(wait_for(throttled), "it did not start");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(throttled());
    assert_well(&bench(&["codecs", "--smoke"]));
    machine.assert_as_before();
}

#[test]
fn wrong_use_is_one_line() {
    let Some(_machine) = Machine::take() else { return };
    let cases: [(&[&str], &str); 4] = [
        (&["no-such-bench"], "unrecognized subcommand 'no-such-bench'"),
        (&["transport", "--report=/proc/here"], "cannot write the report to /proc/here"),
        (&["kernel-build", "--peers=zcache"], "unknown configuration 'zcache'"),
        (&["kernel-build", "--memory=10Q"], "10Q"),
    ];
    for (arguments, says) in cases {
        let output = bench(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {stderr}");
        assert!(stderr.lines().next().unwrap().contains(says), "{arguments:?}: {stderr}");
    }
}

#[test]
fn without_root_the_benchmark_asks_for_root() {
    let Some(_machine) = Machine::take() else { return };
    // Copies the program to a folder where every user can execute it.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("uzswap-bench");
    copy_programs(&[program("uzswap-bench")], &copy);
    let output = Command::new(copy).arg("codecs").uid(65534).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(125), "{stderr}");
    assert_eq!(stderr.trim(), "uzswap-bench: benchmarks swap, which needs root; run it with sudo");
}

#[test]
fn an_interrupted_benchmark_leaves_the_machine_as_it_was() {
    let Some(machine) = Machine::take() else { return };
    let swaps = || fs::read_to_string("/proc/swaps").unwrap().contains("/dev/loop");
    let start = || {
        let child = Command::new(program("uzswap-bench"))
            .args(["transport", "--rounds=50", "--limit-mib=16"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        assert!(wait_for(swaps), "it did not start");
        child
    };
    let mut child = start();
    process::kill(child.id() as i32, libc::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(125));
    machine.assert_as_before();

    // A killed benchmark undoes nothing. The next benchmark does.
    let mut child = start();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(Path::new("/run/uzswap-bench.json").exists());
    // The measured command runs until its output has no reader, or until its end.
    assert!(wait_for(|| !swaps()), "the run goes on");
    assert_well(&bench(&[
        "transport",
        "--rounds=1",
        "--touches=500",
        "--limit-mib=8",
        "--compressors=lz4",
    ]));
    machine.assert_as_before();
}

#[test]
fn recorded_pages_are_those_of_the_program() {
    let Some(_machine) = Machine::take() else { return };
    let script = "import sys\n\
                  kept=[b'recorded %06d' % i * 300 for i in range(2000)]\n\
                  print('ready', flush=True)\n\
                  sys.stdin.read()";
    let mut keeper = Command::new("python3")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    std::io::Read::read_exact(keeper.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("pages");
    let record = |pid: &str| {
        let mut command = Command::new(program("uzswap"));
        command.args(["record", "--pid", pid, "--out"]).arg(&out).output().unwrap()
    };
    let recorded = record(&keeper.id().to_string());
    assert!(recorded.status.success(), "{}", String::from_utf8_lossy(&recorded.stderr));
    assert!(String::from_utf8_lossy(&recorded.stderr).contains("every secret"));
    let again = record(&keeper.id().to_string());
    assert_eq!(again.status.code(), Some(125), "a file that is there is not overwritten");
    drop(keeper.stdin.take());
    keeper.wait().unwrap();
    let pages = fs::read(&out).unwrap();
    assert_eq!(pages.len() % 4096, 0);
    let text = String::from_utf8_lossy(&pages);
    for i in [0, 777, 1999] {
        assert!(text.contains(&format!("recorded {i:06}")), "page {i}");
    }
}
