//! Programs that people use, in a half and a quarter of their memory.

use super::compare;
use std::fs;
use std::path::Path;
use std::process::Command;
use uzswap_engine::testing::Noise;
use uzswap_tests::{forking_heap, functions_in_c, is_slow_and_skipped, skip};

/// A thread waits in `write` during the takeover, and writes again immediately. The bytes must stay
/// in the thread's buffer until they are read.
const PIPE: &str = r#"
import os, threading, time
reader, writer = os.pipe()
whole, got = b'some bytes' * (3 << 20), []
def read():
    time.sleep(1)
    while sum(map(len, got)) < len(whole): got.append(os.read(reader, 1 << 16))
thread = threading.Thread(target=read)
thread.start()
at = 0
while at < len(whole): at += os.write(writer, memoryview(whole)[at:])
thread.join()
print(b''.join(got) == whole)
"#;

/// A program that must have the same results when only a part of its memory is present.
struct Row {
    /// The shell command, which runs in a writable folder of its own.
    command: &'static str,
    /// The memory of all its processes together. The test runs the command once with each amount.
    memories: &'static [&'static str],
    /// Required programs.
    needs: &'static [&'static str],
    /// True if `./check` runs it even without `--full`.
    is_quick: bool,
}

const fn quick(memories: &'static [&'static str], command: &'static str) -> Row {
    Row { command, memories, needs: &[], is_quick: true }
}

const fn slow(
    memories: &'static [&'static str],
    needs: &'static [&'static str],
    command: &'static str,
) -> Row {
    Row { command, memories, needs, is_quick: false }
}

const PYTHON: &str = "/usr/bin/python3 -I program.py file";
const SORT: &str = "sort --buffer-size=400M numbers | md5sum";

/// About half and a quarter of each program's own memory; `docs/design/in-process.md` has the
/// figures.
const PROGRAMS: &[Row] = &[
    quick(&["64M"], PYTHON),
    quick(&["40M"], "/usr/bin/python3 -I pipe.py"),
    quick(&["40M"], SORT),
    quick(
        &["32M"],
        "sqlite3 :memory: \"create table t(a integer, b text); with recursive n(i) as (select 1 \
         union all select i + 1 from n where i < 400000) insert into t select (i * 7919) % 400009, \
         'row ' || i || ' of the table' from n; create index x on t(b); select count(*), sum(a), \
         max(b) from t; select sum(a) from t where b like 'row 1%'\"",
    ),
    slow(&["27M"], &[], PYTHON),
    slow(&["30M"], &[], SORT),
    slow(
        &["80M", "40M"],
        &["gcc", "make"],
        "rm -f part*.o && make -s -j4 -f makefile && cat part*.o | md5sum",
    ),
    slow(
        &["36M"],
        &["perl"],
        "perl -e 'my %h; while (<>) { chomp; $h{$_} = length; last if $. > 200000 } my $s = 0; \
         for my $k (sort keys %h) { $s = ($s * 31 + $k) % 1000003 } print \"$s\\n\"' numbers",
    ),
    slow(
        &["72M", "36M"],
        &["node"],
        "node -e 'const a = []; for (let i = 0; i < 600000; i++) a.push({id: i, name: \"item \" + \
         i, v: [i, i * 2]}); let s = 0; for (let r = 0; r < 3; r++) for (let i = 0; i < a.length; \
         i += 7) s = (s * 31 + a[(i * 7919) % a.length].id + a[i].name.length) % 1000003; \
         console.log(s)'",
    ),
];

const MAKEFILE: &str =
    "all: $(patsubst %.c,%.o,$(wildcard *.c))\n%.o: %.c\n\tgcc -O1 -c $< -o $@\n";

/// The input of several programs: numbers, and C sources.
pub fn make_input(folder: &Path) {
    let mut noise = Noise::new(1);
    let numbers: String = (0..600_000).map(|_| format!("{}\n", noise.word() >> 4)).collect();
    fs::write(folder.join("numbers"), numbers).unwrap();
    for file in 0..6 {
        let text = functions_in_c(file, 700);
        fs::write(folder.join(format!("part{file}.c")), text).unwrap();
    }
    fs::write(folder.join("program.py"), forking_heap()).unwrap();
    fs::write(folder.join("pipe.py"), PIPE).unwrap();
    fs::write(folder.join("makefile"), MAKEFILE).unwrap();
}

fn check_programs(is_quick: bool) {
    for row in PROGRAMS.iter().filter(|row| row.is_quick == is_quick) {
        let is_missing = |name: &&&str| {
            !Command::new("which").arg(name).output().is_ok_and(|o| o.status.success())
        };
        if let Some(missing) = row.needs.iter().find(is_missing) {
            skip(format!("{missing} is not installed: {}", row.command));
            continue;
        }
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        make_input(folder.path());
        println!("{} in {:?}", row.command, row.memories);
        let command = format!("cd HERE && export HOME=HERE LC_ALL=C && {}", row.command);
        compare(folder.path(), row.memories, &["sh", "-c", &command]);
    }
}

#[test]
fn programs_compute_the_same_in_a_part_of_their_memory() {
    check_programs(true);
}

#[test]
fn more_programs_give_the_same_results_in_a_part_of_their_memory() {
    if !is_slow_and_skipped() {
        check_programs(false);
    }
}

/// Runs one of `tests/programs` alone and in each of these memories, if `./check --full` requests
/// it and the shell command `is_there` succeeds. `prepare` fills its folder.
fn check_prepared(name: &str, memories: &[&str], is_there: &str, prepare: impl FnOnce(&Path)) {
    if is_slow_and_skipped() {
        return;
    }
    if !Command::new("sh").args(["-c", is_there]).output().unwrap().status.success() {
        assert!(std::env::var_os("CI").is_none(), "`./setup slow` installs what {name} needs");
        skip(format!("its program is not installed: {name}"));
        return;
    }
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    make_input(folder.path());
    prepare(folder.path());
    copy_program(name, folder.path());
    let shell = if name.ends_with(".py") { "/usr/bin/python3 -I" } else { "sh" };
    let command = format!("cd HERE && export HOME=HERE LC_ALL=C && {shell} {name}");
    let command = ["sh", "-c", &command];
    println!("{name}");
    compare(folder.path(), memories, &command);
}

/// Checks a program that needs only its own file.
fn check_file(name: &str, memories: &[&str], is_there: &str) {
    check_prepared(name, memories, is_there, |_| ());
}

fn copy_program(name: &str, folder: &Path) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(name);
    fs::copy(file, folder.join(name)).unwrap();
}

#[test]
fn postgres_finds_its_sums_right_in_a_half_and_a_quarter() {
    check_file("postgres.sh", &["100M", "50M"], "ls /usr/lib/postgresql/*/bin/initdb");
}

#[test]
fn ffmpeg_makes_the_same_film_in_a_half_and_a_quarter() {
    check_file("film.sh", &["70M", "35M"], "command -v ffmpeg");
}

#[test]
fn redis_saves_from_a_fork_in_a_half_and_a_quarter() {
    check_file("redis.py", &["56M", "28M"], "command -v redis-check-rdb");
}

#[test]
fn pandas_computes_the_same_in_a_half() {
    check_file("frames.py", &["73M"], "/usr/bin/python3 -c 'import pandas'");
}

#[test]
fn numpy_computes_the_same_in_a_half_and_a_quarter() {
    check_file("arrays.py", &["54M", "27M"], "/usr/bin/python3 -c 'import numpy'");
}

#[test]
fn stressors_verify_their_memory_in_a_half_and_a_quarter() {
    check_file("stress.sh", &["80M", "40M"], "command -v stress-ng");
}

#[test]
fn git_packs_and_checks_a_repository_in_a_half() {
    check_file("git.sh", &["38M"], "command -v git");
}

#[test]
fn eight_compilers_side_by_side_make_the_same_code_in_a_half_and_a_quarter() {
    check_file("compile.sh", &["229M", "115M"], "command -v g++ && command -v make");
}

/// The test brings the toolchain to its own folder, because the original may be in a folder that
/// only its owner can read.
#[test]
fn cargo_builds_the_same_crate_in_a_half_and_a_quarter() {
    check_prepared("crate.sh", &["91M", "46M"], "cargo --version", |folder| {
        let link = "from=$(rustc --print sysroot) && to=$0/toolchain/lib && mkdir -p $to/rustlib \
            && copy() { cp -al \"$@\" 2>/dev/null || cp -a \"$@\"; } \
            && copy $from/bin $0/toolchain && copy $from/lib/*.so* $to \
            && copy $from/lib/rustlib/*-linux-gnu $to/rustlib";
        assert!(Command::new("sh").args(["-c", link]).arg(folder).status().unwrap().success());
    });
}

#[test]
fn a_collected_heap_is_the_same_in_a_half() {
    check_prepared("java.sh", &["60M"], "command -v javac", |folder| {
        copy_program("Heap.java", folder);
    });
}

#[test]
fn pythons_own_tests_succeed_in_a_half() {
    check_file("cpython.sh", &["26M"], "/usr/bin/python3 -c 'import test.test_list'");
}
