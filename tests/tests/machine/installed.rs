//! The wheel and the tarball that `xtask dist` makes, installed by an ordinary user, and an image
//! in a container of Docker. The systems are roots of Debian 11, 12 and 13 without a compiler and a
//! network.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use uzswap_tests::{is_full, program};

const SUITES: [&str; 3] = ["bullseye", "bookworm", "trixie"];
const MIRROR: &str = "http://deb.debian.org/debian";
/// The newest version of the C library that the files may need.
const GLIBC_MAX: (u32, u32) = (2, 28);
/// The newest glibc version that the preloaded library may ask for. A program does not start if its
/// C library, such as that of another root, lacks a version that a preloaded library asks for.
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

/// The root of a Debian release with Python below target/, made once.
fn root_of(suite: &str) -> PathBuf {
    made_once(suite, suite, "python3,python3-venv")
}

fn made_once(name: &str, suite: &str, packages: &str) -> PathBuf {
    let root = target().join("roots").join(name);
    if !root.exists() {
        fs::create_dir_all(root.parent().unwrap()).unwrap();
        // If a run was interrupted, the next run starts anew.
        let fresh = root.with_extension("new");
        let _ = fs::remove_dir_all(&fresh);
        let mut make = Command::new("mmdebstrap");
        make.args(["--quiet", "--variant=minbase", "--include", packages, suite]);
        succeed(make.arg(&fresh).arg(MIRROR));
        fs::rename(fresh, &root).unwrap();
    }
    root
}

/// Runs a script in the root as an ordinary user without a network, in a folder /work with `files`.
/// Only one test at a time may use that folder. The mounts end with the namespace.
fn run_in(root: &Path, files: &[&Path], script: &str) -> Output {
    static WORK: Mutex<()> = Mutex::new(());
    let _one = WORK.lock().unwrap_or_else(PoisonError::into_inner);
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
    let began = Instant::now();
    let output = run_in(root, &files, &script);
    let seconds = began.elapsed().as_secs_f64();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {}\n{said}", root.display(), output.status);
    let printed = String::from_utf8_lossy(&output.stdout);
    let results: Vec<_> = printed.lines().filter(|line| line.len() == MD5_DIGITS).collect();
    assert!(results.len() == 2 && results[0] == results[1], "{printed}\n{said}");
    assert!(said.contains("memory of") && said.contains("was kept small"), "{said}");
    assert!(!said.contains(" 0 processes") && !said.contains("runs without"), "{said}");
    println!("{}: {seconds:.1} s in all\n{}", root.display(), said.trim());
}

/// The version of the C library that a file needs. A weak symbol may be missing, but not its
/// version: one linker marks it as needed.
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

/// Programs and libraries of a wheel: one library has two builds.
const NAMES: [&str; 5] = [
    "_uzswap.abi3.so",
    "libuzswap_agent.so",
    "libuzswap_preload.so",
    "libuzswap_preload.so",
    "uzswap",
];

#[test]
fn the_wheel_asks_for_an_old_c_library() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(unpacked(&wheel(), folder.path(), "objdump"), NAMES);
}

/// The program runs by QEMU's user emulation, with the C library against which it was built.
#[test]
fn the_wheel_for_aarch64_has_a_program_that_runs_and_the_module() {
    if is_skipped() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let wheel = made("uzswap-", "aarch64.whl");
    let found = unpacked(&wheel, folder.path(), "aarch64-linux-gnu-objdump");
    assert_eq!(found, NAMES);
    // pip would make the program executable, but no installer has run here.
    let find = ["-path", "*/scripts/uzswap", "-exec", "chmod", "+x", "{}", ";", "-print"];
    let program = succeed(Command::new("find").arg(folder.path()).args(find)).stdout;
    let sysroot = target().join("sysroot/aarch64/bullseye");
    let mut doctor = Command::new("qemu-aarch64-static");
    doctor.arg("-L").arg(sysroot).args([String::from_utf8_lossy(&program).trim(), "doctor"]);
    let said = String::from_utf8(doctor.output().unwrap().stdout).unwrap();
    assert!(said.contains("in-process (run --in-process): "), "{said}");
}

/// Commands that install a wheel.
fn install(wheel: &Path) -> String {
    let name = wheel.file_name().unwrap().display();
    format!("python3 -m venv v && v/bin/pip install --quiet --no-index ./{name}")
}

#[test]
fn the_wheel_is_installed_and_runs_on_debian_11_12_and_13() {
    if is_skipped() {
        return;
    }
    let wheel = wheel();
    let install = format!(
        "{}\n\
         v/bin/python -m uzswap --version\n\
         v/bin/python -c 'import uzswap; print(uzswap.Pager(\"8M\").stats()[\"faults\"])'",
        install(&wheel)
    );
    for suite in SUITES {
        check(&root_of(suite), &[&wheel], &install, "v/bin/uzswap");
    }
}

/// Before glibc 2.34 the preloaded library needs libpthread and libdl. Later both are empty, and
/// each start of a program would map them.
#[test]
fn a_program_loads_no_empty_libraries_on_newer_systems() {
    if is_skipped() {
        return;
    }
    let wheel = wheel();
    let run = "v/bin/uzswap run --in-process --memory 80M -- cat /proc/self/maps";
    for suite in SUITES {
        let script = format!("{}\n{run}\nexport LD_BIND_NOW=1\n{run}", install(&wheel));
        let output = run_in(&root_of(suite), &[&wheel], &script);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("runs without"), "{suite}: {said}");
        let maps = String::from_utf8_lossy(&output.stdout);
        let has = |name: &str| maps.contains(name);
        assert!(has("/libuzswap_preload.so"), "{suite}: {maps}");
        let is_new = suite != "bullseye";
        assert_eq!(has("/glibc-2.34/libuzswap_preload.so"), is_new, "{suite}: {maps}");
        assert_eq!(has("/libpthread") || has("/libdl"), !is_new, "{suite}: {maps}");
    }
}

/// Such a program has none of the functions of libpthread and libdl, if it needs neither.
#[test]
fn a_program_that_brings_an_older_c_library_runs_without_on_newer_systems() {
    if is_skipped() {
        return;
    }
    let (wheel, old) = (wheel(), root_of("bullseye"));
    let names = ["bin/cat", "lib/x86_64-linux-gnu/ld-2.31.so", "lib/x86_64-linux-gnu/libc.so.6"];
    let its = names.map(|name| old.join(name));
    let files: Vec<_> = its.iter().chain([&wheel]).map(PathBuf::as_path).collect();
    let run = "v/bin/uzswap run --in-process --memory 80M -- \
               sh -c './ld-2.31.so --library-path . ./cat text'";
    let script = format!(
        "{}\nchmod +x cat ld*; echo content >text\n{run}\nexport LD_BIND_NOW=1\n{run}",
        install(&wheel)
    );
    let output = run_in(&root_of("trixie"), &files, &script);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "content\ncontent\n", "{said}");
    assert!(said.contains("it brings a C library older than glibc 2.34"), "{said}");
}

#[test]
fn the_tarball_is_unpacked_and_runs_on_debian_11_12_and_13() {
    if is_skipped() {
        return;
    }
    let tarball = tarball();
    let name = tarball.file_name().unwrap().to_string_lossy().into_owned();
    // The program runs by a link from another folder, which no user may write.
    let install = format!(
        "mkdir t && tar -xzf {name} -C t && chmod -R a-w t && ln -s t/uzswap-*/bin/uzswap linked"
    );
    for suite in SUITES {
        check(&root_of(suite), &[&tarball], &install, "./linked");
    }
}

/// Docker's engine, in its own root and namespaces, with which its processes, mounts and network
/// end. `/base` is the system of the image, `/work` has the files.
const ENGINE: &str = r#"
    root=$1 base=$2 group=$3
    mount --bind "$root" "$root"
    mkdir -p "$root/base" && mount --bind -o ro "$base" "$root/base"
    mount -t proc proc "$root/proc"
    mkdir -p "$root/var/lib/docker"
    for folder in /run /var/lib/docker; do mount -t tmpfs tmpfs "$root$folder"; done
    for folder in /dev /sys; do mount --rbind "$folder" "$root$folder"; done
    exec chroot "$root" sh -ec '
        export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/work DOCKER_BUILDKIT=0
        cd /work
        dockerd --iptables=false --ip6tables=false --ip-forward=false --bridge=none \
            --storage-driver=vfs --cgroup-parent="/$0" >dockerd.log 2>&1 &
        engine=$!
        for turn in $(seq 120); do docker info >/dev/null 2>&1 && break; sleep 1; done
        sh -e ./script && status=0 || status=$?
        kill $engine
        wait $engine || true
        exit $status' "$group"
"#;

/// The parent of the containers' groups.
const GROUP: &str = "uzswap-test-engine";

/// Removes the groups of containers, also those of a run that was killed.
struct Groups;

impl Drop for Groups {
    fn drop(&mut self) {
        let script = format!(
            "find /sys/fs/cgroup -depth -type d -path '*/{GROUP}*' -exec rmdir {{}} + 2>/dev/null"
        );
        // There may be none, which the next test checks.
        let _ = Command::new("sh").args(["-c", &script]).status();
    }
}

/// The commands of docs/containers.md. The last three lines are the program's time, in ms: without
/// a limit, under Docker's profile, and under the profile that permits userfaultfd.
const CONTAINERS: &str = r#"
mkdir -p context
cp uzswap-*.tar.gz context
tar -C /base --one-file-system --exclude=./var/cache --exclude=./var/lib/apt --exclude=./work \
    --exclude=./usr/share/doc --exclude=./usr/share/locale -c . | docker import - base >/dev/null
version=$(ls uzswap-*-x86_64-linux.tar.gz | sed 's/uzswap-//; s/-x86_64.*//')
docker build --quiet --network none --tag uzswap --build-arg BASE=base \
    --build-arg VERSION=$version -f Dockerfile context >&2
in_container() {
    docker run --rm --network none -v /work:/work:ro -w /work "$@"
}
timed() {
    began=$(date +%s%N)
    "$@"
    echo "ms $((($(date +%s%N) - began) / 1000000))" >>times
}
rm -f times
limit="-m 110m --memory-swap 110m"
timed in_container --entrypoint python3 uzswap program.py
in_container $limit --entrypoint python3 uzswap program.py || echo "killed $?"
timed in_container $limit uzswap run -- python3 program.py
echo "the profile with userfaultfd:" >&2
timed in_container $limit --security-opt seccomp=uzswap.json uzswap run -- python3 program.py
cat times
"#;

#[test]
fn an_image_runs_in_a_container_of_docker_with_its_default_profile() {
    if is_skipped() {
        return;
    }
    let packages = "docker.io,docker-cli,golang-github-containers-common";
    let (root, base) = (made_once("engine", "trixie", packages), root_of("bookworm"));
    let work = root.join("work");
    let _ = fs::remove_dir_all(&work);
    fs::create_dir_all(&work).unwrap();
    // The program here must not fork. Pages that are copied because a fork writes to them do not
    // wait for memory, and may take more than an eighth of the limit.
    let has_fork = |line: &&str| line.contains("os.fork") || line.contains("os.wait");
    let lines: Vec<_> = PROGRAM.lines().filter(|line| !has_fork(line)).collect();
    fs::write(work.join("program.py"), lines.join("\n")).unwrap();
    fs::write(work.join("script"), CONTAINERS).unwrap();
    let docker = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/docker");
    for file in [tarball(), docker.join("Dockerfile")] {
        fs::copy(&file, work.join(file.file_name().unwrap())).unwrap();
    }
    let own = root.join("usr/share/containers/seccomp.json");
    let profile = succeed(Command::new("python3").arg(docker.join("seccomp.py")).arg(own)).stdout;
    fs::write(work.join("uzswap.json"), profile).unwrap();
    let groups = Groups;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig=KILL", "unshare", "--mount", "--net", "--pid", "--fork"]);
    command.args(["--kill-child", "sh", "-ec", ENGINE, "sh"]).arg(&root).arg(&base).arg(GROUP);
    let output = command.output().unwrap();
    drop(groups);
    let (printed, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let log = fs::read_to_string(work.join("dockerd.log")).unwrap_or_default();
    assert!(output.status.success(), "{}: {printed}\n{said}\n{log}", output.status);
    let results: Vec<_> = printed.lines().filter(|line| line.len() == MD5_DIGITS).collect();
    assert!(
        results.len() == 3 && results.iter().all(|one| *one == results[0]),
        "{printed}\n{said}"
    );
    assert!(printed.contains("killed 137"), "the program fits in the limit: {printed}");
    let (denied, permitted) = said.split_once("the profile with userfaultfd:").unwrap();
    assert!(denied.contains("was kept small") && denied.contains("slower"), "{denied}");
    assert!(permitted.contains("was kept small") && !permitted.contains("slower"), "{permitted}");
    println!("{printed}\n{said}");
    let left = Command::new("find").args(["/sys/fs/cgroup", "-name", GROUP]).output().unwrap();
    assert!(left.stdout.is_empty(), "groups are left: {}", String::from_utf8_lossy(&left.stdout));
}
