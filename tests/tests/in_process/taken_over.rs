//! `uzswap run --in-process`: threads that wait in a system call while their process is taken
//! over.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use uzswap_tests::{OWN_CALL, as_nobody, compile};

/// Runs a command in 64 MiB, as nobody if this is root. It must end well, and be taken over.
fn check_command(folder: &Path, words: &[&str]) {
    let mut command = as_nobody(folder);
    command.arg(folder.join("uzswap")).args(["run", "--in-process", "--memory", "64M", "--"]);
    let output = command.args(words).current_dir(folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    assert!(said.contains("memory of 1 processes was kept small"), "{said}");
}

/// Checks a Python program.
fn check(text: &str) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), text).unwrap();
    check_command(folder.path(), &["/usr/bin/python3", "-I", "program.py"]);
}

/// Checks a C program.
fn check_compiled(text: &str) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    compile(folder.path(), text, &["-pthread"]);
    check_command(folder.path(), &["./program"]);
}

/// A thread fills memory until the program is taken over, and then reads the memory.
const GROW: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
enum { PIECES = 1600, BYTES = 65536 };
static void grow(void) {
    static unsigned char *pieces[PIECES];
    for (int i = 0; i < PIECES; i++) {
        memset(pieces[i] = malloc(BYTES), i, BYTES);
        if (i % 16 == 0) usleep(10000);
    }
    for (int i = 0; i < PIECES; i++)
        for (int at = 0; at < BYTES; at += 512) if (pieces[i][at] != (unsigned char)i) _exit(2);
}
"#;

/// The first thread has ended, and others go on.
const FIRST_ENDED: &str = r#"
static void *run(void *first) {
    pthread_join(*(pthread_t *)first, NULL);
    grow();
    exit(0);
}
int main(void) {
    static pthread_t first;
    pthread_t other;
    first = pthread_self();
    pthread_create(&other, NULL, run, &first);
    pthread_exit(NULL);
}
"#;

#[test]
fn a_program_whose_first_thread_has_ended_is_taken_over() {
    check_compiled(&[GROW, FIRST_ENDED].concat());
}

/// System calls without memory that the kernel does not restart after a signal. One call has its
/// number in the code. Another call has its number in a register, like all waiting calls of glibc
/// since 2.41.
const WAITING: &str = r#"
static volatile int is_done;
static __thread volatile int has_rung;
static void ring(int number) { has_rung = 1; }
static void *wait_for_a_signal(void *is_by_number) {
    for (int i = 0; i < 2; i++) {
        long answer = is_by_number ? syscall(SYS_pause, NULL, 0L, NULL, NULL) : pause();
        if (answer != -1 || errno != EINTR || !has_rung) _exit(is_by_number ? 7 : 3);
        has_rung = 0;
    }
    return NULL;
}
static void *allocate(void *none) {
    int file = memfd_create("file", 0);
    while (!is_done) {
        if (fallocate(file, 0, 0, 64 << 20)) _exit(errno == EINTR ? 4 : 5);
        if (ftruncate(file, 0)) _exit(6);
    }
    return none;
}
int main(void) {
    pthread_t pausing, by_number, allocating;
    signal(SIGUSR1, ring);
    pthread_create(&pausing, NULL, wait_for_a_signal, NULL);
    pthread_create(&by_number, NULL, wait_for_a_signal, ring);
    pthread_create(&allocating, NULL, allocate, NULL);
    grow();
    for (int i = 0; i < 2; i++) {
        pthread_kill(pausing, SIGUSR1);
        pthread_kill(by_number, SIGUSR1);
        usleep(200000);
    }
    is_done = 1;
    pthread_join(pausing, NULL);
    pthread_join(by_number, NULL);
    pthread_join(allocating, NULL);
    return 0;
}
"#;

#[test]
fn a_thread_that_waits_for_a_signal_or_for_room_in_a_file_is_not_interrupted() {
    check_compiled(&[GROW, OWN_CALL, WAITING].concat());
}

/// Buffers of waiting calls leave unless they are pinned. If a buffer is out, an answer that the
/// kernel has already taken off its list is lost.
const ANSWERS: &str = r#"
import ctypes, os, socket, subprocess, threading, time
calls = ctypes.CDLL(None, use_errno=True)
calls.malloc.restype = ctypes.c_void_p
start = calls.malloc(1 << 20) + 4095 & ~4095
places = [start + 8192 * at for at in range(8)]
for at in places: ctypes.memset(at, 1, 4096)
ctypes.c_uint.from_address(places[1]).value = 16
pointer = ctypes.c_void_p
server = socket.create_server(('127.0.0.1', 0))
shell = ['sh', '-c', 'read line; exit 3']
children = [subprocess.Popen(shell, stdin=subprocess.PIPE) for i in range(2)]
first, second = (child.pid for child in children)
answers = {}
def wait(name, call, *arguments):
    def make():
        answer = call(*arguments)
        answers[name] = (answer, os.strerror(ctypes.get_errno()) if answer < 0 else '')
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    return thread
threads = [
    wait('accept', calls.accept, server.fileno(), pointer(places[0]), pointer(places[1])),
    wait('wait4', calls.wait4, first, pointer(places[2]), 0, pointer(places[3])),
    wait('waitid', calls.waitid, 1, second, pointer(places[4]), 4),
]
time.sleep(0.3)
pages = []
for i in range(60000):
    pages.append(bytes([i % 251]) * 1000)
    if i % 2000 == 0: time.sleep(0.01)
time.sleep(1)
for at in places: calls.madvise(pointer(at), 4096, 21)
client = socket.create_connection(server.getsockname())
for child in children: child.stdin.close()
for thread in threads: thread.join(10)
assert answers['accept'][0] > 0, answers
assert answers['wait4'] == (first, ''), answers
assert answers['waitid'] == (0, ''), answers
assert ctypes.c_ushort.from_address(places[0]).value == socket.AF_INET
assert ctypes.c_int.from_address(places[2]).value == 3 << 8
assert ctypes.c_int.from_address(places[4]).value == 17
"#;

#[test]
fn a_thread_that_waits_for_a_connection_or_a_child_loses_none() {
    check(ANSWERS);
}

/// For seconds, one thread cannot be stopped. Meanwhile uzswap stops another thread again and
/// again, in `read`, which the kernel restarts after our signal, and in `poll`, which it does not.
/// An alarm must end each call, and nothing may end it earlier.
const ALARMS: &str = r#"
import ctypes, errno, os, signal, threading, time
calls = ctypes.CDLL(None, use_errno=True)
SIGMASK = 14 if os.uname().machine == 'x86_64' else 135
BUS = ctypes.c_uint64(1 << signal.SIGBUS - 1)
done, holds = threading.Event(), threading.Event()
def hold_out():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    assert calls.syscall(SIGMASK, signal.SIG_BLOCK, ctypes.byref(BUS), None, 8) == 0
    holds.set()
    while not done.is_set(): time.sleep(0.01)
    assert calls.syscall(SIGMASK, signal.SIG_UNBLOCK, ctypes.byref(BUS), None, 8) == 0
thread = threading.Thread(target=hold_out)
thread.start()
holds.wait()
rung, answers = [], []
signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
pages = [bytes([i % 251]) * 1000 for i in range(56000)]
reader, writer = os.pipe()
byte = ctypes.create_string_buffer(1)
def ring(call, *arguments):
    late = threading.Timer(2, os.write, (writer, b'x'))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    late.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    start = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.45)
    answer = call(*arguments)
    assert time.monotonic() - start > 0.44, 'it was ended by nobody'
    answers.append(errno.errorcode[ctypes.get_errno()] if answer < 0 else answer)
    late.cancel()
for turn in range(4):
    ring(calls.poll, None, 0, 2000)
    ring(calls.read, reader, byte, 1)
done.set()
thread.join()
assert answers == ['EINTR'] * 8 and len(rung) == 8, (answers, rung)
time.sleep(1)
assert sum(map(len, pages)) == 56000 * 1000
"#;

#[test]
fn an_alarm_that_rings_while_a_thread_is_stopped_ends_its_call() {
    check(ALARMS);
}

/// A call pins the page behind its structure. During the call another thread unmaps that page, or
/// maps it anew, and writes to it.
const GIVEN_BACK: &str = r#"
import ctypes, mmap, threading, time
calls = ctypes.CDLL(None)
pages = [bytes([i % 251]) * 1000 for i in range(70000)]
time.sleep(1)
memory = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.write(b"x" * (8 << 20))
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
pointer = ctypes.c_void_p
def sleep_beside(page, change):
    at = start + 4096 * page - 16
    ctypes.c_long.from_address(at).value = 0
    ctypes.c_long.from_address(at + 8).value = 500_000_000
    thread = threading.Thread(target=calls.nanosleep, args=(pointer(at), None), daemon=True)
    thread.start()
    time.sleep(0.2)
    change(pointer(start + 4096 * page))
    thread.join(20)
    assert not thread.is_alive(), page
def given_back(page):
    assert calls.madvise(page, 4096, 4) == 0
    assert ctypes.string_at(page, 4096) == bytes(4096)
    ctypes.memset(page, 2, 4096)
def mapped_anew(page):
    calls.mmap.restype = pointer
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    assert calls.mmap(page, 2 << 20, 3, flags, -1, 0) == page.value
    ctypes.memset(page, 1, 4096)
sleep_beside(2, given_back)
assert memory[4096 * 2] == 2 and memory[4096 * 3] == ord('x')
sleep_beside(4, mapped_anew)
assert memory[4096 * 4] == 1 and memory[4096 * 5] == 0
assert all(page == bytes([i % 251]) * 1000 for i, page in enumerate(pages))
"#;

#[test]
fn memory_of_a_waiting_call_may_be_given_back_meanwhile() {
    check(GIVEN_BACK);
}

/// A page was locked for a while, and uzswap has given it back to the program. To the kernel, the
/// mapping around that page is several mappings, and the kernel moves only one at a time.
const MOVED: &str = r#"
import ctypes, os, time
calls = ctypes.CDLL(None, use_errno=True)
calls.mmap.restype = calls.mremap.restype = ctypes.c_void_p
pages = [bytes([i % 251]) * 1000 for i in range(60000)]
time.sleep(0.5)
size = ctypes.c_size_t
at = calls.mmap(None, size(8 << 20), 3, 0x22, -1, size(0))
ctypes.memset(at, 7, 8 << 20)
page = ctypes.c_void_p(at + (4 << 20))
assert calls.mlock(page, size(4096)) == 0 and calls.munlock(page, size(4096)) == 0
at = calls.mremap(ctypes.c_void_p(at), size(8 << 20), size(16 << 20), 1)
assert at != 2**64 - 1, os.strerror(ctypes.get_errno())
reader, writer = os.pipe()
assert calls.write(writer, ctypes.c_void_p(at + (2 << 20)), size(4096)) == 4096
assert os.read(reader, 4096) == b'\7' * 4096
calls.madvise(ctypes.c_void_p(at), size(16 << 20), 21)
assert ctypes.string_at(at, 8 << 20) == b'\7' * (8 << 20)
assert ctypes.string_at(at + (8 << 20), 8 << 20) == bytes(8 << 20)
"#;

#[test]
fn a_mapping_of_which_a_page_was_given_back_moves_as_one() {
    check(MOVED);
}

/// A fault of the program itself, without a handler, in a child: at a page beyond the end of a
/// file.
const BEYOND: &str = r#"
#include <sys/wait.h>
int main(void) {
    grow();
    int file = memfd_create("file", 0), status;
    if (ftruncate(file, 4096)) return 3;
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED || ftruncate(file, 0)) return 4;
    int child = fork();
    if (child == 0) {
        alarm(20);
        page[0] = 1;
        return 5;
    }
    if (waitpid(child, &status, 0) != child) return 6;
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS ? 0 : 7;
}
"#;

#[test]
fn a_fault_of_the_programs_own_ends_it() {
    check_compiled(&[GROW, BEYOND].concat());
}
