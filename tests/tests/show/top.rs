//! `uzswap top`: on a real terminal, and as text.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use uzswap_tests::{Limited, Machine, Run, program, wait_for};

const MIB: u64 = 1 << 20;

/// Number of screens so far. Each screen has its own server, since a server that is about to end
/// accepts no screen.
static SCREENS: AtomicU32 = AtomicU32::new(0);

fn tmux(arguments: &[&str]) -> Output {
    let name = format!("uzswap-test-{}-{}", std::process::id(), SCREENS.load(Relaxed));
    Command::new("tmux").args(["-L", &name]).args(arguments).output().unwrap()
}

/// A terminal with a program in it. It is closed when the value is dropped.
struct Screen;

impl Screen {
    fn start(command: &str, columns: &str, rows: &str) -> Self {
        SCREENS.fetch_add(1, Relaxed);
        let size = ["-x", columns, "-y", rows];
        let arguments = [&["new-session", "-d"][..], &size, &[command]].concat();
        let started = tmux(&arguments);
        assert!(started.status.success(), "{started:?}");
        Self
    }

    fn text() -> String {
        String::from_utf8(tmux(&["capture-pane", "-p"]).stdout).unwrap()
    }

    /// The process that draws on the screen.
    fn program() -> i32 {
        let pane = tmux(&["display-message", "-p", "#{pane_pid}"]).stdout;
        let mut process = String::from_utf8(pane).unwrap().trim().to_owned();
        // The program is a descendant of the shells.
        loop {
            let children = format!("/proc/{process}/task/{process}/children");
            let children = fs::read_to_string(children).unwrap();
            let Some(child) = children.split_whitespace().next() else { break };
            process = child.to_owned();
        }
        process.parse().unwrap()
    }

    fn press(key: &str) {
        assert!(tmux(&["send-keys", key]).status.success());
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The server has usually ended with its program.
        tmux(&["kill-server"]);
    }
}

/// A command that runs `top`, and then prints if the terminal has its former modes.
fn command(modes: &Path) -> String {
    let script = "stty -g >\"$0\"; \"$1\" top; echo ended; test $(stty -g) = $(cat \"$0\") && \
                  echo as before; sleep 1000";
    format!("sh -c '{script}' {} {}", modes.display(), program("uzswap").display())
}

#[test]
fn top_shows_the_cache_and_keys_change_it() {
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

    let modes = tempfile::NamedTempFile::new().unwrap();
    let _screen = Screen::start(&command(modes.path()), "80", "24");
    assert!(wait_for(|| shows(&Screen::text())), "{}", Screen::text());
    let parameter = |name: &str| {
        let path = run.mount().join("parameters").join(name);
        fs::read_to_string(path).unwrap().trim().to_owned()
    };
    // From zstd, the default, to the next compressor.
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
    // After a resize, the whole screen is drawn again.
    tmux(&["resize-window", "-x", "100", "-y", "30"]);
    // Any other key shows the list of keys again.
    Screen::press("x");
    assert!(wait_for(|| Screen::text()
        .lines()
        .nth(29)
        .is_some_and(|line| line.ends_with("q end"))));

    ask_to_attach();
    let most = Most::start();
    let limit = most.limit();
    most.attach();
    Screen::press("q");
    assert_the_terminal_is_as_before();
    assert_eq!(most.limit(), limit);
    drop(most);
    run.signal(libc::SIGTERM);
    run.finish();
    machine.assert_as_before();
}

/// The former screen is back, keys are echoed, and the program has ended.
fn assert_the_terminal_is_as_before() {
    // After a resize, tmux may show lines of the former screen above.
    let is_as_before = || Screen::text().contains("ended\nas before\n");
    assert!(wait_for(is_as_before), "{}", Screen::text());
}

#[test]
fn a_signal_and_a_closed_terminal_end_top() {
    let Some(_machine) = Machine::take() else { return };
    let modes = tempfile::NamedTempFile::new().unwrap();
    let start = || {
        let screen = Screen::start(&command(modes.path()), "80", "24");
        assert!(wait_for(|| Screen::text().contains("no cache is running")), "{}", Screen::text());
        screen
    };
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let _screen = start();
        uzswap_sys::process::kill(Screen::program(), signal).unwrap();
        assert_the_terminal_is_as_before();
    }
    let screen = start();
    let program = Screen::program();
    drop(screen);
    assert!(wait_for(|| uzswap_sys::process::is_gone(program)), "process {program} goes on");
}

/// A process with more swapped memory than any other, in a group of its own.
struct Most {
    limited: Limited,
    // The process ends when its standard input ends.
    process: Child,
}

impl Most {
    fn start() -> Self {
        let limited = Limited::new(100 * MIB);
        let script =
            "import sys; a=[b'page %d ' % i * 400 for i in range(60000)]; sys.stdin.read()";
        let process = limited.start(&["python3", "-c", script]);
        Self { limited, process }
    }

    /// The limit of its group, bytes.
    fn limit(&self) -> u64 {
        let names = ["memory.high", "memory.limit_in_bytes"];
        let files = names.map(|name| self.limited.group.path().join(name));
        let text = files.iter().find_map(|file| fs::read_to_string(file).ok()).unwrap();
        text.trim().parse().unwrap_or(u64::MAX)
    }

    /// Limits this process by keys: it is the first in the list.
    fn attach(&self) {
        let first = format!("{} ", self.process.id());
        let is_first =
            || Screen::text().lines().nth(15).is_some_and(|line| line.starts_with(&first));
        assert!(wait_for(is_first), "{}", Screen::text());
        for key in ["a", "8", "0", "M", "Enter"] {
            Screen::press(key);
        }
        assert!(wait_for(|| Screen::text().contains("is limited to 80M")), "{}", Screen::text());
        assert!(wait_for(|| self.limit() == 80 * MIB), "{} {}", self.limit(), Screen::text());
    }
}

/// Tries to attach the first process of the list. The screen shows the reason of a refusal, and the
/// question can be cancelled.
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
