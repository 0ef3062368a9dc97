//! `uzswap run --in-process`: core dumps, and readers and debuggers that ask for it (`uzswap status
//! --bring-in`), see all of a program's memory. Suspended processes can be resumed.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;
use uzswap_tests::{as_nobody, compile, nobody, skip, wait_for};
use uzswap_tree::{Table, Tree};

/// Fills 60 MiB with records, most of which leave. Then dies, or waits for the end of its input.
const PROGRAM: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
enum { RECORDS = 15000, BYTES = 4000 };
static char *record[RECORDS];
__attribute__((noinline)) int wait_for_input(void) { return getchar() & 0; }
int main(int arguments, char **argument) {
    for (uint32_t i = 0; i < RECORDS; i++) {
        record[i] = malloc(BYTES);
        memset(record[i], 'a' + i % 23, BYTES);
        memcpy(record[i], "RECORD", 6);
        memcpy(record[i] + 6, &i, 4);
        if (i % 250 == 0) usleep(4000);
    }
    if (!strcmp(argument[1], "abort")) abort();
    if (!strcmp(argument[1], "fault")) *(volatile char *)8 = 1;
    printf("%d\n", getpid());
    for (int i = 0; i < RECORDS; i++) printf("%p\n", record[i]);
    fflush(stdout);
    return wait_for_input();
}
"#;
const RECORDS: u32 = 15_000;
const BYTES: usize = 4000;

fn is_record(bytes: &[u8], number: u32) -> bool {
    bytes.starts_with(&[b"RECORD", &number.to_le_bytes()[..]].concat())
        && bytes[10..BYTES].iter().all(|byte| *byte == b'a' + (number % 23) as u8)
}

/// A command that runs the program in 32 MiB.
fn run(folder: &Path, word: &str) -> Command {
    run_program(folder, PROGRAM, &format!("ulimit -c unlimited; {RUN} {word}"))
}

const RUN: &str = "exec ./uzswap run --in-process --memory 32M --no-load-control -- ./program";

/// Compiles a program, and runs it by a shell's command.
fn run_program(folder: &Path, program: &str, run: &str) -> Command {
    compile(folder, program, &["-pthread"]);
    let mut command = as_nobody(folder);
    command.args(["sh", "-c", run]).current_dir(folder);
    command
}

#[test]
fn a_core_dump_has_all_pages() {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    if pattern.starts_with(['|', '/']) {
        return skip("core dumps go elsewhere here (/proc/sys/kernel/core_pattern)");
    }
    for (word, status) in [("abort", 128 + libc::SIGABRT), ("fault", 128 + libc::SIGSEGV)] {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let output = run(folder.path(), word).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{said}");
        let files = fs::read_dir(folder.path()).unwrap().flatten().map(|entry| entry.path());
        let is_core =
            |path: &Path| path.file_name().unwrap().as_encoded_bytes().starts_with(b"core");
        let core = fs::read(files.into_iter().find(|path| is_core(path)).unwrap()).unwrap();
        let places = core.windows(6).enumerate().filter(|(_, bytes)| *bytes == b"RECORD");
        let whole = places.filter_map(|(at, _)| {
            let number = u32::from_le_bytes(core.get(at + 6..at + 10)?.try_into().ok()?);
            is_record(core.get(at..at + BYTES)?, number).then_some(number)
        });
        let whole: std::collections::BTreeSet<_> = whole.collect();
        assert_eq!(whole.len(), RECORDS as usize, "{word}: {said}");
    }
}

/// Ends a program by closing its input.
struct Waiting(Child);

impl Drop for Waiting {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Suspends a process of a run until dropped, like load control.
struct Suspended(u32, &'static Table, Option<Sender<()>>);

impl Suspended {
    fn new(run: u32, process: u32) -> Self {
        let path = format!("/dev/shm/uzswap-{run}");
        let table = Tree::look(Path::new(&path)).unwrap().table();
        let (end, ended) = channel::<()>();
        // A process stays suspended only while the run keeps it suspended.
        let interval = Duration::from_millis(200);
        std::thread::spawn(move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                table.set_taking_turns(false);
            }
        });
        assert!(table.suspend(process, true));
        Self(process, table, Some(end))
    }
}

impl Drop for Suspended {
    fn drop(&mut self) {
        self.1.suspend(self.0, false);
        drop(self.2.take());
    }
}

/// A thread changes the access of memory that is out. With guards, all of that memory comes in
/// first. Another thread forks. The program prints its number, and then a line for each fork.
const FORKS: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
enum { MIB = 1 << 20 };
static char *map(long bytes) {
    return mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
static void *change(void *memory) {
    for (;;) {
        madvise(memory, 4 * MIB, MADV_PAGEOUT);
        mprotect(memory, 4 * MIB, PROT_READ);
        mprotect(memory, 4 * MIB, PROT_READ | PROT_WRITE);
    }
}
int main(void) {
    char *memory = map(4 * MIB);
    pthread_t thread;
    memset(memory, 5, 4 * MIB);
    for (int i = 0; i < 60; i++) {
        memset(map(MIB), i, MIB);
        usleep(4000);
    }
    sleep(1);
    printf("%d\n", getpid());
    pthread_create(&thread, 0, change, memory);
    for (;;) {
        pid_t child = fork();
        if (child == 0) _exit(0);
        waitpid(child, 0, 0);
        if (printf("forked\n") < 0 || fflush(stdout)) return 0;
    }
}
"#;

/// A suspended process gets no room. One of its threads waits for room while it has the layout
/// locked, and another thread forks.
#[test]
fn a_suspended_process_that_forks_goes_on_when_it_is_resumed() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let run = format!("export UZSWAP_MEANS=guards; {RUN}");
    let mut child = run_program(folder.path(), FORKS, &run).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let (tell, told) = channel();
    std::thread::spawn(move || lines.map(|line| tell.send(line)).all(|sent| sent.is_ok()));
    let patience = Duration::from_secs(60);
    let process = told.recv_timeout(patience).unwrap().parse().unwrap();
    for _ in 0..12 {
        let suspended = Suspended::new(child.id(), process);
        std::thread::sleep(Duration::from_millis(600));
        drop(suspended);
        told.try_iter().for_each(drop);
        let next = told.recv_timeout(patience);
        if next.is_err() {
            child.kill().unwrap();
        }
        assert_eq!(next.as_deref(), Ok("forked"));
    }
    let number = rustix::process::Pid::from_raw(process as i32).unwrap();
    rustix::process::kill_process(number, rustix::process::Signal::KILL).unwrap();
    child.wait().unwrap();
}

#[test]
fn a_reader_that_asks_for_it_sees_all_pages() {
    a_reader_sees_all_pages(false);
}

/// A suspended process brings no page in by itself.
#[test]
fn a_reader_of_a_suspended_process_sees_all_pages() {
    a_reader_sees_all_pages(true);
}

fn a_reader_sees_all_pages(is_suspended: bool) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let mut command = run(folder.path(), "wait");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let run_number = child.id();
    let _waiting = Waiting(child);
    let process = lines.next().unwrap();
    let address = |line: String| u64::from_str_radix(line.trim_start_matches("0x"), 16).unwrap();
    let places: Vec<u64> = lines.by_ref().take(RECORDS as usize).map(address).collect();
    let memory = File::open(format!("/proc/{process}/mem")).unwrap();
    let seen = || {
        let mut bytes = vec![0; BYTES];
        let mut is_seen = |(number, at): (usize, &u64)| {
            memory.read_exact_at(&mut bytes, *at).is_ok() && is_record(&bytes, number as u32)
        };
        places.iter().enumerate().filter(|one| is_seen(*one)).count() as u32
    };
    assert!(seen() < RECORDS, "in 32 MiB some are out");
    let suspended = is_suspended.then(|| Suspended::new(run_number, process.parse().unwrap()));
    assert!(!is_suspended || wait_for(|| seen() < RECORDS / 5), "nearly all leave");
    let ask = |process: &str| {
        let mut command = nobody();
        command.arg(folder.path().join("uzswap")).args(["status", "--bring-in", process]);
        command
    };
    let mut asking = ask(&process).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = String::new();
    BufReader::new(asking.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.starts_with(&format!("all pages of process {process} are in")), "{said}");
    assert_eq!(seen(), RECORDS);
    if !is_suspended {
        let output = Command::new("eu-stack").args(["-p", &process]).output().unwrap();
        let stack = String::from_utf8_lossy(&output.stdout).into_owned();
        for function in ["wait_for_input", "main"] {
            assert!(stack.contains(&format!(" {function}\n")), "{stack}{output:?}");
        }
    }
    drop(suspended);
    asking.kill().unwrap();
    asking.wait().unwrap();
    assert!(wait_for(|| seen() < RECORDS), "they leave again once nobody asks");
    let output = ask("1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("no process of an in-process run"), "{said}");
}
