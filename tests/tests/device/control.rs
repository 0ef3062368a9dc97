//! The control files and `uzswap status`, under load.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::Command;
use uzswap_tests::{FOLDER, Machine, Run, is_over_ublk, program, wait_for};

/// Two programs that use three times their memory until they are killed.
fn churning() -> Run {
    let churn = program("churn");
    let options = ["--memory", "32M", "--pool", "64M", "--backing", "none"];
    let run = Run::start(&options, &[churn.to_str().unwrap(), "96", "600", "2"]);
    run.wait_until_running();
    let swapped = || run.statistic("stored_pages") > 5000;
    assert!(wait_for(swapped), "nothing was swapped");
    run
}

fn end(run: Run) {
    run.signal(libc::SIGTERM);
    run.finish().assert_code(128 + libc::SIGTERM);
}

#[test]
fn attributes_are_read_and_written_and_rubbish_is_refused() {
    let Some(_machine) = Machine::take() else { return };
    let run = churning();
    let path = |name: &str| run.mount().join("parameters").join(name);
    let read = |name: &str| fs::read_to_string(path(name)).unwrap();
    assert_eq!(read("compressor"), "zstd\n");
    fs::write(path("compressor"), "lz4\n").unwrap();
    assert_eq!(read("compressor"), "lz4\n");
    for (name, value) in [
        ("compressor", "lz5"),
        ("compressor", ""),
        ("max_pool_percent", "0"),
        ("max_pool_percent", "101"),
        ("max_pool_bytes", "12"),
        ("accept_threshold_percent", "-1"),
        ("max_compression_ratio", "x"),
        ("enabled", "maybe"),
        ("shrinker_enabled", "\u{fffd}"),
        ("writeback_enabled", "N"),
        ("cpus", "1"),
        ("cpus", "65536 offline"),
        ("cpus", "0 asleep"),
        ("memory", "0"),
        ("memory", "99999999 offline"),
        ("memory", "0 absent"),
    ] {
        // Meanwhile the pool may add sections. So this compares only the first section and offline
        // sections, whose state a write could have changed.
        let kept = || match (name, read(name)) {
            ("memory", text) => {
                let first = text.split([' ', ',', '\n']).nth(1).map(str::to_owned);
                let offline = text.trim().split(", ").filter(|run| run.ends_with("offline"));
                (first, offline.map(str::to_owned).collect())
            }
            (_, text) => (None, vec![text]),
        };
        let before = kept();
        let error = fs::write(path(name), value);
        if value.is_empty() {
            continue; // An empty write reaches no file.
        }
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EINVAL), "{name} = {value}");
        assert_eq!(kept(), before, "{name} keeps its value");
    }
    if !is_over_ublk() {
        let disk = Path::new(FOLDER).join("disk");
        let disk = fs::File::options().read(true).write(true).open(disk).unwrap();
        use std::os::unix::fs::FileExt;
        assert!(disk.write_at(b"part of a page", 4096 * 1000).is_err());
    }
    assert!(fs::write(run.mount().join("stats/stored_pages"), "5").is_err());
    end(run);
}

#[test]
fn sections_are_taken_off_and_put_back_under_load() {
    let Some(_machine) = Machine::take() else { return };
    let run = churning();
    let memory = |arguments: &[&str]| {
        Command::new(program("uzswap")).arg("memory").args(arguments).output().unwrap()
    };
    let states = || fs::read_to_string(run.mount().join("parameters/memory")).unwrap();
    for turn in 0..10 {
        let section = ["0", "1", "2"][turn % 3];
        let offline = memory(&["offline", section]);
        assert!(offline.status.success(), "{}", String::from_utf8_lossy(&offline.stderr));
        assert!(states().contains(&format!("{section} offline")), "{}", states());
        let shown = String::from_utf8(memory(&[]).stdout).unwrap();
        assert!(shown.contains("offline") && shown.contains("online"), "{shown}");
        assert!(memory(&["online", section]).status.success());
        // An empty section may be `going-offline` at this moment, while its memory is given back.
        assert!(!states().contains(" offline"), "{}", states());
    }
    let refused = memory(&["offline", "99999999"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("there is no section 99999999") && said.lines().count() == 1, "{said}");
    assert_eq!(run.statistic("decompress_fail") + run.statistic("request_errors"), 0);
    end(run);
}

#[test]
fn status_shows_the_pages_that_are_held() {
    let Some(_machine) = Machine::take() else { return };
    let run = churning();
    let status = |arguments: &[&str]| {
        let output =
            Command::new(program("uzswap")).arg("status").args(arguments).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    let text = status(&[]);
    let devices = if is_over_ublk() { ["/dev/ublkb", "(ublk)"] } else { ["/dev/loop", "(fuse)"] };
    for word in ["pool", "pages", "backing", "rejected", "traffic"].into_iter().chain(devices) {
        assert!(text.contains(word), "'{word}' is not in:\n{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&status(&["--json"])).unwrap();
    let session = &json[0];
    assert_eq!(session["alive"], true);
    assert!(session["stats"]["stored_pages"].as_u64().unwrap() > 1000);
    assert_eq!(session["parameters"]["enabled"], "Y");
    // The first pages that leave are nearly empty, and all of one class.
    let table = || fs::read_to_string(run.mount().join("stats/classes")).unwrap();
    assert!(wait_for(|| table().lines().count() > 10), "{}", table());
    end(run);
    let text = status(&[]);
    // Other tests may have runs in-process.
    assert!(text.contains("no cache is running") || text.starts_with("run --in-process"), "{text}");
}
