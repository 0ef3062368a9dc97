//! `uzswap top`: on a real terminal, and as text.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::process::{Command, Output};
use uzswap_tests::{Machine, Run, program, wait_for};

fn tmux(arguments: &[&str]) -> Output {
    let name = format!("uzswap-test-{}", std::process::id());
    Command::new("tmux").args(["-L", &name]).args(arguments).output().unwrap()
}

/// A terminal of its own, with a program in it; gone with the value.
struct Screen;

impl Screen {
    fn start(command: &str, columns: &str, rows: &str) -> Self {
        let size = ["-x", columns, "-y", rows];
        let arguments = [&["new-session", "-d"][..], &size, &[command]].concat();
        let started = tmux(&arguments);
        assert!(started.status.success(), "{started:?}");
        Self
    }

    fn text() -> String {
        String::from_utf8(tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    fn press(key: &str) {
        assert!(tmux(&["send-keys", key]).status.success());
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // It has ended with its program.
        tmux(&["kill-server"]);
    }
}

#[test]
fn the_screen_shows_the_cache_and_keys_change_it() {
    let Some(machine) = Machine::take() else { return };
    let options = ["--memory", "64M", "--pool", "256M", "--backing", "none"];
    let churn = program("churn");
    let run = Run::start(&options, &[churn.to_str().unwrap(), "128", "100000", "1"]);
    run.wait_until_running();
    assert!(wait_for(|| run.statistic("pages_swapped_out") > 10_000), "nothing was swapped");
    let top = program("uzswap");
    let once = Command::new(&top).args(["top", "--once"]).output().unwrap();
    let once = String::from_utf8(once.stdout).unwrap();
    let shows = |text: &str| {
        let words = [
            "uzswap /dev/",
            "pool ",
            " of 256 MiB",
            "zstd ",
            "pages/s in",
            "idle",
            "churn",
            "q end",
        ];
        words.iter().all(|word| text.contains(word)) && text.lines().count() <= 24
    };
    assert!(shows(&once), "{once}");

    let _screen =
        Screen::start(&format!("{} top; echo ended; sleep 1000", top.display()), "80", "24");
    assert!(wait_for(|| shows(&Screen::text())), "{}", Screen::text());
    let parameter = |name: &str| {
        let path = run.mount().join("parameters").join(name);
        fs::read_to_string(path).unwrap().trim().to_owned()
    };
    // From zstd, the default, to the next one.
    for (key, name, value) in [
        ("c", "compressor", "lzo"),
        ("-", "max_pool_bytes", "234881024"),
        ("+", "max_pool_bytes", "264241152"),
        ("p", "enabled", "N"),
        ("p", "enabled", "Y"),
        ("w", "writeback_enabled", "Y"),
    ] {
        Screen::press(key);
        assert!(wait_for(|| parameter(name) == value), "{key}: {}", Screen::text());
        let message = format!("{name} is now {value}");
        assert!(wait_for(|| Screen::text().contains(&message)), "{}", Screen::text());
    }
    // Another size is drawn anew, whole.
    tmux(&["resize-window", "-x", "100", "-y", "30"]);
    // Any other key has the keys shown again.
    Screen::press("x");
    assert!(wait_for(|| Screen::text()
        .lines()
        .nth(29)
        .is_some_and(|line| line.ends_with("q end"))));

    ask_to_attach();
    Screen::press("q");
    // The terminal is as it was, and the program has ended.
    assert!(wait_for(|| Screen::text().starts_with("ended")), "{}", Screen::text());
    run.signal(libc::SIGTERM);
    run.finish();
    machine.assert_as_before();
}

/// About the first in the list: what it is refused for is said, and it can be let be.
fn ask_to_attach() {
    for (key, shown) in [
        ("a", "memory for churn ("),
        ("1", "300M: 1_"),
        ("Enter", "too little"),
        ("a", "memory for churn ("),
        ("2", "300M: 2_"),
        ("Escape", "q end"),
    ] {
        Screen::press(key);
        assert!(wait_for(|| Screen::text().contains(shown)), "{key}: {}", Screen::text());
    }
}
