//! The wheel and the tarball that `xtask dist` makes, installed by an ordinary user. The systems
//! are roots of Debian 11, 12 and 13 without a compiler and a network.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use uzswap_tests::{is_full, program};

const SUITES: [&str; 3] = ["bullseye", "bookworm", "trixie"];
const MIRROR: &str = "http://deb.debian.org/debian";
/// The newest version of the C library that the files may need.
const GLIBC_MAX: (u32, u32) = (2, 28);
/// That of the library that each program loads. With a C library that lacks a version which a
/// preloaded library asks for, no program starts: one of another root, say.
const PRELOADED_GLIBC_MAX: (u32, u32) = (2, 18);

/// The folder of all builds.
fn target() -> PathBuf {
    program("uzswap").ancestors().nth(2).unwrap().to_owned()
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    output
}

/// The newest file of `dist` whose name begins and ends in this way.
fn made(begin: &str, end: &str) -> PathBuf {
    let files = fs::read_dir(target().join("dist")).into_iter().flatten().flatten();
    let fits = |file: &fs::DirEntry| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with(begin) && name.ends_with(end)
    };
    let newest = files.filter(fits).max_by_key(|file| file.metadata().unwrap().modified().unwrap());
    newest.expect("make it: cargo run -p xtask -- dist --quick --only wheel (and tarball)").path()
}

fn wheel() -> PathBuf {
    made("uzswap-", "x86_64.whl")
}

/// Unpacks a wheel, which may need no newer C library. Returns the names of its programs and
/// libraries.
fn unpacked(wheel: &Path, folder: &Path, objdump: &str) -> Vec<String> {
    assert!(wheel.to_string_lossy().contains("manylinux_2_28"), "{}", wheel.display());
    succeed(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(wheel).arg(folder));
    let find = succeed(Command::new("find").arg(folder).args(["-type", "f", "-size", "+3"]));
    let mut found = Vec::new();
    for path in String::from_utf8_lossy(&find.stdout).lines().map(Path::new) {
        if fs::read(path).unwrap().starts_with(b"\x7fELF") {
            let glibc = glibc_of(path, objdump);
            let is_preloaded = path.ends_with("libuzswap_preload.so");
            let max = if is_preloaded { PRELOADED_GLIBC_MAX } else { GLIBC_MAX };
            assert!(glibc <= max, "{}: {glibc:?}", path.display());
            found.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    found.sort();
    found
}

fn tarball() -> PathBuf {
    made("uzswap-", "-x86_64-linux.tar.gz")
}

/// The root of a Debian release below target/, made once.
fn root_of(suite: &str) -> PathBuf {
    let root = target().join("roots").join(suite);
    if !root.join("usr/bin/python3").exists() {
        fs::create_dir_all(root.parent().unwrap()).unwrap();
        let _ = fs::remove_dir_all(&root);
        let mut make = Command::new("mmdebstrap");
        make.args(["--quiet", "--variant=minbase", "--include=python3,python3-venv", suite]);
        succeed(make.arg(&root).arg(MIRROR));
    }
    root
}

/// Runs a script in the root as an ordinary user without a network, in a folder /work with `files`.
/// The mounts go with the namespace.
fn run_in(root: &Path, files: &[&Path], script: &str) -> Output {
    let home = root.join("work");
    let _ = fs::remove_dir_all(&home);
    fs::create_dir_all(&home).unwrap();
    for file in files {
        fs::copy(file, home.join(file.file_name().unwrap())).unwrap();
    }
    fs::write(home.join("script"), script).unwrap();
    succeed(Command::new("chown").args(["-R", "65534:65534"]).arg(&home));
    let enter = r#"
        mount -t proc proc "$1/proc" && mount -t tmpfs tmpfs "$1/dev/shm" 2>/dev/null ||
            { mkdir -p "$1/dev/shm" && mount -t tmpfs tmpfs "$1/dev/shm"; }
        chmod 1777 "$1/dev/shm"
        exec chroot --userspec=65534:65534 "$1" /usr/bin/env -i HOME=/work \
            PATH=/usr/local/bin:/usr/bin:/bin sh -ec 'cd /work; . ./script'
    "#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--", "sh", "-ec", enter, "sh"]).arg(root);
    command.output().unwrap()
}

/// Keeps 150 MB that compress well, reads all of them twice, and uses forks and threads.
const PROGRAM: &str = r#"
import hashlib, os, threading
pages = [bytes([i % 251]) * 600 + str(i).encode() for i in range(200000)]
def digest():
    sums = hashlib.md5()
    for page in pages: sums.update(page)
    return sums.hexdigest()
before = digest()
if os.fork() == 0: os._exit(digest() != before)
assert os.wait()[1] == 0, 'a fork saw other bytes'
sums = []
threads = [threading.Thread(target=lambda: sums.append(digest())) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sums == [before, before]
print(before)
"#;

/// Half of the memory that the program needs.
const MEMORY: &str = "80M";
const MD5_DIGITS: usize = 32;

fn check(root: &Path, files: &[&Path], install: &str, command: &str) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("program.py");
    fs::write(&file, PROGRAM).unwrap();
    let files = [files, &[&file]].concat();
    let script = format!(
        "{install}\npython3 program.py\n{command} run --memory {MEMORY} -- python3 program.py\n"
    );
    let output = run_in(root, &files, &script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}\n{said}", root.display(), output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let results: Vec<_> = printed.lines().filter(|line| line.len() == MD5_DIGITS).collect();
    assert!(results.len() == 2 && results[0] == results[1], "{printed}\n{said}");
    assert!(said.contains("memory of") && said.contains("was kept small"), "{said}");
    assert!(!said.contains(" 0 processes") && !said.contains("runs without"), "{said}");
    println!("{}: {}", root.display(), said.trim());
}

/// The version of the C library that a file needs. A weak symbol may be missing, but not its version:
/// one linker marks it as needed.
fn glibc_of(file: &Path, objdump: &str) -> (u32, u32) {
    let output = succeed(Command::new(objdump).arg("-p").arg(file));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // `0x06969191 0x00 04 GLIBC_2.14`, the second is 0x02 where it may be missing.
    let needed = text.lines().filter(|line| line.contains(" 0x00 "));
    let versions = needed.filter_map(|line| line.split_once("GLIBC_")).filter_map(|(_, rest)| {
        let version = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
        let mut numbers = version.split('.').map_while(|number| number.parse().ok());
        Some((numbers.next()?, numbers.next()?))
    });
    versions.max().expect("it uses the C library")
}

fn is_skipped() -> bool {
    let is_skipped = !is_full() || !rustix::process::geteuid().is_root();
    if is_skipped {
        println!("skipped: UZSWAP_FULL=1 as root runs it, after dist --only wheel and tarball");
    }
    is_skipped
}

#[test]
fn the_wheel_asks_for_an_old_c_library() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let names = ["_uzswap.abi3.so", "libuzswap_agent.so", "libuzswap_preload.so", "uzswap"];
    assert_eq!(unpacked(&wheel(), folder.path(), "objdump"), names);
}

/// Runs by QEMU's user emulation, with the C library that it was built against.
#[test]
fn the_wheel_for_aarch64_has_a_program_that_runs_and_the_module() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let wheel = made("uzswap-", "aarch64.whl");
    let found = unpacked(&wheel, folder.path(), "aarch64-linux-gnu-objdump");
    assert_eq!(found, ["_uzswap.abi3.so", "uzswap"]);
    // pip would make the program executable. No installer has run here.
    let find = ["-path", "*/scripts/uzswap", "-exec", "chmod", "+x", "{}", ";", "-print"];
    let program = succeed(Command::new("find").arg(folder.path()).args(find)).stdout;
    let sysroot = target().join("sysroot/aarch64/bullseye");
    let mut doctor = Command::new("qemu-aarch64-static");
    doctor.arg("-L").arg(sysroot).args([String::from_utf8_lossy(&program).trim(), "doctor"]);
    let said = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    assert!(said.contains("this processor is aarch64"), "{said}");
}

#[test]
fn the_wheel_is_installed_and_runs_on_debian_11_12_and_13() {
    if is_skipped() {
        return;
    }
    let wheel = wheel();
    let name = wheel.file_name().unwrap().to_string_lossy().into_owned();
    let install = format!(
        "python3 -m venv v && v/bin/pip install --quiet --no-index ./{name}\n\
         v/bin/python -m uzswap --version\n\
         v/bin/python -c 'import uzswap; print(uzswap.Pager(\"8M\").stats()[\"faults\"])'"
    );
    for suite in SUITES {
        check(&root_of(suite), &[&wheel], &install, "v/bin/uzswap");
    }
}

#[test]
fn the_tarball_is_unpacked_and_runs_on_debian_11_12_and_13() {
    if is_skipped() {
        return;
    }
    let tarball = tarball();
    let name = tarball.file_name().unwrap().to_string_lossy().into_owned();
    // From another folder that no user may write, by a link.
    let install = format!(
        "mkdir t && tar -xzf {name} -C t && chmod -R a-w t && ln -s t/uzswap-*/bin/uzswap linked"
    );
    for suite in SUITES {
        check(&root_of(suite), &[&tarball], &install, "./linked");
    }
}
