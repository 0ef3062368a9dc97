//! Programs of this machine that know nothing of the library, with it preloaded: their answers are
//! the same, and what they hold is compressed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let folder = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
    let path = folder.join("libuzswap_malloc.so");
    assert!(path.exists(), "{} is not built: cargo build", path.display());
    path
}

/// The program in `memory`, with the library and a backing in `folder`.
fn within(memory: &str, folder: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    let backing = format!("{}:256M", folder.join("pages").display());
    command
        .env("LD_PRELOAD", library())
        .env("UZSWAP_MEMORY", memory)
        .env("UZSWAP_BACKING", backing);
    command
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").expect("a folder in /var/tmp")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

/// Whether the whole of a program's memory can be served; without CI a machine may not.
fn is_skipped(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    let skipped = said.contains("running without");
    assert!(!skipped || std::env::var_os("CI").is_none(), "{said}");
    if skipped {
        println!("skipped: {said}");
    }
    skipped
}

/// Lines in eight ascending parts whose numbers interleave: sorting moves all of them, and goes
/// through memory in eight streams.
fn lines(count: u64) -> String {
    let mut text = String::new();
    let part = count / 8;
    for i in 0..count {
        let number = i % part * 8 + (7 - i / part) % 8;
        writeln!(text, "{number:014} the line of {} and {}", number * 7919 % 977, i % 31)
            .expect("a string takes all");
    }
    text
}

#[test]
fn sort_sorts_four_times_its_memory() {
    let folder = folder();
    let input = folder.path().join("lines");
    let text = lines(800_000);
    std::fs::write(&input, &text).expect("a file of 32 MB");
    let arguments = ["--buffer-size=120M", "--parallel=2"];
    let sort = |command: &mut Command| run(command.env("LC_ALL", "C").args(arguments).arg(&input));
    let plain = sort(&mut Command::new("sort"));
    // zstd trains a dictionary meanwhile, and allocates for it.
    for compressor in ["lz4", "zstd"] {
        let mut command = within("24M", folder.path(), "sort");
        let ours = sort(command.env("UZSWAP_COMPRESSOR", compressor));
        assert!(ours.stdout == plain.stdout, "sort printed something else with {compressor}");
        if !is_skipped(&ours) {
            assert!(ours.stderr.is_empty(), "{}", String::from_utf8_lossy(&ours.stderr));
        }
    }
}

const SCRIPT: &str = "
CREATE TABLE word (number INTEGER PRIMARY KEY, length INTEGER, text TEXT);
WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM counted WHERE n < 80000)
  INSERT INTO word SELECT n, n * 7919 % 1000, printf('%08x the same words', n * 2654435761
    & 4294967295) || substr(hex(n * n), 1, 30) || '----------------------------' FROM counted;
CREATE INDEX by_length ON word (length, text);
UPDATE word SET text = text || ' again' WHERE number % 97 = 0;
DELETE FROM word WHERE number % 89 = 0;
SELECT count(*), sum(length), sum(length(text)) FROM word;
SELECT * FROM word ORDER BY text DESC LIMIT 500;
PRAGMA integrity_check;
";

/// The shell takes its page cache from `malloc` in one block when it is told how many pages.
#[test]
fn the_sqlite_shell_keeps_a_database_in_a_region() {
    let folder = folder();
    let script = folder.path().join("script.sql");
    std::fs::write(&script, SCRIPT).expect("a small file");
    let shell = |command: &mut Command| {
        command.args(["-batch", "-pagecache", "4400", "5000", ":memory:"]);
        let read = std::fs::File::open(&script).expect("it was just written");
        run(command.stdin(Stdio::from(read)))
    };
    let ours = shell(&mut within("8M", folder.path(), "sqlite3"));
    let plain = shell(&mut Command::new("sqlite3"));
    assert!(ours.stdout == plain.stdout, "sqlite3 printed something else");
    assert!(ours.stdout.ends_with(b"ok\n"));
    is_skipped(&ours);
}

#[test]
fn blocks_move_between_the_two_allocators() {
    let folder = folder();
    let program = folder.path().join("blocks");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/blocks.c");
    run(Command::new("cc").args(["-Wall", "-Wextra", "-O1", "-o"]).arg(&program).arg(source));
    let program = program.to_str().expect("a path of ours");
    run(&mut Command::new(program));
    let ours = run(within("16M", folder.path(), program).env("UZSWAP_FORK", "copy"));
    if !is_skipped(&ours) {
        // It asks for half of all addresses, and is told why there are not so many.
        let said = String::from_utf8_lossy(&ours.stderr);
        assert!(said.starts_with("uzswap: cannot map 9223372036854775807 bytes"), "{said}");
        assert_eq!(said.trim_end().lines().count(), 1, "{said}");
    }
}

#[test]
fn a_program_may_set_handlers_of_bus_errors() {
    let folder = folder();
    let program = folder.path().join("signals");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/signals.c");
    run(Command::new("cc").args(["-Wall", "-Wextra", "-O1", "-o"]).arg(&program).arg(source));
    let program = program.to_str().expect("a path of ours");
    run(&mut Command::new(program));
    let ours = run(within("8M", folder.path(), program).env("UZSWAP_MODE", "in-thread"));
    assert!(ours.stderr.is_empty(), "{}", String::from_utf8_lossy(&ours.stderr));
}

#[test]
fn what_cannot_be_done_is_said_and_the_program_runs_without() {
    let arguments = ["--buffer-size=64M", "/dev/null"];
    let cases = [
        ("UZSWAP_MEMORY", "", "UZSWAP_MEMORY is not set"),
        ("UZSWAP_MEMORY", "much", "'much' is not a size"),
        ("UZSWAP_MODE", "fast", "fast"),
        ("UZSWAP_FORK", "maybe", "absent, copy"),
        ("UZSWAP_BACKING", "/no/such/folder/pages:8M", "/no/such/folder"),
    ];
    let folder = folder();
    for (name, value, said) in cases {
        let output = run(within("16M", folder.path(), "sort").args(arguments).env(name, value));
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.starts_with("uzswap: ") && text.contains(said), "{name}={value}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn a_program_without_large_blocks_makes_no_pager() {
    let output = run(within("nonsense", Path::new("/"), "true").args(["of", "no", "consequence"]));
    assert!(output.stderr.is_empty());
}
