//! `uzswap run --in-process` in a container: the budget follows from the container's limit, and
//! beyond that limit the kernel kills. A memory cgroup stands for the container.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use uzswap_tests::{Limited, as_nobody, forks, is_full, skip};

const MIB: u64 = 1 << 20;

/// A heap of blocks, and workers that each write to all of it. No block is allocated in a worker.
const POOL: &str = r#"
import multiprocessing, sys
blocks = []
def work(seed):
    for block in blocks:
        for at in range(0, len(block), 4096): block[at] = seed
    for i, block in enumerate(blocks):
        if block[4096] != seed or block[50] != i % 251: raise SystemExit('wrong bytes')
    return len(blocks)
if __name__ == '__main__':
    mib, workers = int(sys.argv[1]), int(sys.argv[2])
    for i in range(16 * mib):
        block = bytearray((b'%08d' % i) * 8192)
        block[50] = i % 251
        blocks.append(block)
    multiprocessing.set_start_method('fork')
    with multiprocessing.Pool(workers) as pool:
        assert sum(pool.map(work, range(2 * workers), chunksize=1)) == 32 * mib * workers
"#;

/// A server that loads its objects before it forks, as gunicorn does. Each request changes a part
/// of the objects.
const SERVER: &str = r#"
import os, random, signal, socket, sys, threading
mib, workers, requests = (int(word) for word in sys.argv[1:])
objects = [[i, str(i) * 4, [i] * 4] for i in range(2500 * mib)]
listener = socket.create_server(('127.0.0.1', 0), backlog=64)
def serve(seed):
    chance = random.Random(seed)
    while True:
        peer, _ = listener.accept()
        first = chance.randrange(len(objects))
        for i in range(first, first + len(objects) // 10):
            one = objects[i % len(objects)]
            if one[0] != i % len(objects): os._exit(2)
            one[2][0] += 1
        peer.sendall(b'done')
        peer.close()
children = []
for seed in range(workers):
    child = os.fork()
    if child == 0: serve(seed)
    children.append(child)
served = []
def ask():
    for _ in range(requests // 4):
        with socket.create_connection(listener.getsockname()) as peer: served.append(peer.recv(9))
clients = [threading.Thread(target=ask) for _ in range(4)]
for client in clients: client.start()
for client in clients: client.join()
assert served == [b'done'] * requests
for child in children:
    assert os.waitpid(child, os.WNOHANG) == (0, 0), 'a worker died'
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"#;

/// A program that fills its memory and reads all of it again, twice.
const ALONE: &str = r#"
import sys
blocks = [bytearray((b'%08d' % i) * 8192) for i in range(16 * int(sys.argv[1]))]
for turn in range(2):
    for i, block in enumerate(blocks):
        if block[:8] != b'%08d' % i: raise SystemExit('wrong bytes')
"#;

/// Runs a Python program with the budget that the limit gives. Returns the report. The kernel must
/// not have killed a process. `None`, with a message, if no group can be made.
fn run(limit: u64, text: &str, words: &[&str]) -> Option<String> {
    let Some(limited) = Limited::beside(limit) else {
        skip("only root can limit memory");
        return None;
    };
    // An error means that there is no such switch. Then there is no swap, either.
    let _ = fs::write(limited.group.path().join("memory.swappiness"), "0");
    let _ = fs::write(limited.group.path().join("memory.swap.max"), "0");
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    fs::write(folder.path().join("program.py"), text).unwrap();
    let nobody = as_nobody(folder.path());
    let file = |name: &str| folder.path().join(name).display().to_string();
    let report = file("report");
    let mut command = vec!["env", "-u", "XDG_RUNTIME_DIR", "-u", "LD_PRELOAD", "setpriv"];
    let privileges: Vec<_> = nobody.get_args().map(|word| word.to_str().unwrap()).collect();
    command.extend(&privileges);
    let (uzswap, program) = (file("uzswap"), file("program.py"));
    let options = ["run", "--in-process", "--report", &report, "--", "python3", "-I", &program];
    command.push(&uzswap);
    command.extend(options);
    command.extend(words);
    let output = limited.start(&command).wait_with_output().unwrap();
    let (usage, report) = (limited.group.usage(), fs::read_to_string(&report).unwrap_or_default());
    println!("{words:?} in {} MiB: {usage:?} {report}", limit / MIB);
    assert_eq!(usage.oom_kills, 0, "{report}");
    assert!(output.status.success(), "{}: {report}", output.status);
    Some(report)
}

/// A worker copies its parent's memory as it writes, faster than any thread could look.
#[test]
fn the_kernel_kills_no_worker_of_a_program_that_forks() {
    for (limit, mib) in [(100, "60"), (200, "60"), (200, "120")] {
        let limit = limit * MIB;
        if run(limit, POOL, &[mib, "3"]).is_none() {
            return;
        }
        run(limit, &forks(if mib == "60" { 60_000 } else { 150_000 }), &[]);
        if is_full() {
            run(limit, POOL, &[mib, "4"]);
            run(limit, SERVER, &["40", "3", "80"]);
        }
    }
}

#[test]
fn a_program_alone_has_seven_eighths_of_the_limit() {
    let Some(report) = run(100 * MIB, ALONE, &["150"]) else { return };
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["memory_limit"], 100 * MIB - 100 * MIB / 8);
    assert_eq!(report["margin_learnt"], 0, "{report}");
    assert!(report["memory_peak"].as_u64().unwrap() > 80 * MIB, "{report}");
}
