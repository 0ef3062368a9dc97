//! Programs in C, compiled and linked as a user does, against the library that `xtask install`
//! installs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().and_then(Path::parent).expect("crates/uzswap-c")
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}

/// The installed library, once for all tests of this file: as built for tests, or in the full
/// checks as a user builds it.
fn installed() -> &'static Path {
    static PREFIX: OnceLock<tempfile::TempDir> = OnceLock::new();
    PREFIX
        .get_or_init(|| {
            let prefix = tempfile::tempdir().expect("a folder in /tmp");
            let install = ["install", "--prefix"];
            if std::env::var_os("UZSWAP_FULL").is_some() {
                run(Command::new(env!("CARGO"))
                    .current_dir(repository())
                    .args(["run", "--quiet", "--package", "xtask", "--"])
                    .args(install)
                    .arg(prefix.path()));
            } else {
                let test = std::env::current_exe().expect("the path of this test");
                let built = test.ancestors().nth(2).expect("target/<profile>/deps/<test>");
                let xtask = built.join("xtask");
                assert!(xtask.exists(), "it is not built: cargo build --workspace");
                run(Command::new(xtask).args(install).arg(prefix.path()).arg("--built").arg(built));
            }
            prefix
        })
        .path()
}

/// Compiles a program from these sources, as the documents say.
fn compile(compiler: &str, source: &str, libraries: &[&str], flags: &[&str]) -> PathBuf {
    let prefix = installed();
    let found = run(Command::new("pkg-config")
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))
        .args(["--cflags", "--libs"])
        .args(libraries));
    let found = String::from_utf8(found.stdout).expect("flags are text");
    let name = source.replace(['/', '.'], "-") + &flags.concat();
    let program = prefix.join(name);
    run(Command::new(compiler)
        .arg(repository().join("crates/uzswap-c").join(source))
        .args(["-Wall", "-Wextra", "-Werror", "-O1", "-o"])
        .arg(&program)
        .args(flags)
        .args(found.split_whitespace()));
    program
}

fn start(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", installed().join("lib"));
    command
}

#[test]
fn every_function_does_in_both_modes_as_the_header_says() {
    let program = compile("cc", "tests/api.c", &["uzswap"], &["-std=c99", "-D_XOPEN_SOURCE=700"]);
    let file = tempfile::NamedTempFile::new().expect("a file in /tmp");
    for mode in ["0", "1", "2"] {
        run(start(&program).arg(file.path()).arg(mode));
    }
}

#[test]
fn the_header_is_good_for_cpp() {
    run(&mut start(&compile("c++", "tests/header.cpp", &["uzswap"], &[])));
}

#[test]
fn the_static_library_has_all_it_needs() {
    let prefix = installed();
    let program = prefix.join("static");
    run(Command::new("cc")
        .arg(repository().join("crates/uzswap-c/examples/array.c"))
        .arg(format!("-I{}", prefix.join("include").display()))
        .arg(prefix.join("lib/libuzswap.a"))
        .args(["-lgcc_s", "-lpthread", "-lm", "-ldl", "-lc", "-o"])
        .arg(&program));
    run(&mut Command::new(program));
}

#[test]
fn the_array_is_larger_than_its_memory() {
    let program = compile("cc", "examples/array.c", &["uzswap"], &["-O2"]);
    let output = run(&mut start(&program));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(said, "8388608 squares, 0 wrong, some of them compressed\n");
}

#[test]
fn sqlite_answers_the_same_from_a_region() {
    let program = compile("cc", "examples/sqlite.c", &["uzswap", "sqlite3"], &["-O2"]);
    let ours = run(&mut start(&program));
    let plain = run(start(&program).arg("plain"));
    assert_eq!(ours.stdout, plain.stdout);
    assert!(ours.stdout.ends_with(b"ok\n"));
    let report = String::from_utf8_lossy(&ours.stderr).into_owned();
    let stored = report.rsplit_once(", ").and_then(|(_, rest)| rest.split(' ').next());
    let stored: u64 = stored.expect("a report").parse().expect("a number of pages");
    assert!(stored > 4_000, "{report}");
}
