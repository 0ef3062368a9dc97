//! Stopping all other threads of this process for a moment, by a signal whose handler waits.
//!
//! A thread that blocks the signal, or that the kernel does not let go (it waits for a disk, or for the
//! child of a `vfork`), does not stop: then nothing is done, and the caller tries again later.

use rustix::thread::futex;
use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

/// How long threads may take to stop.
const PATIENCE: Duration = Duration::from_millis(100);

/// Counts the times that the others were stopped; odd while they are.
static TURN: AtomicU32 = AtomicU32::new(0);
static ARRIVED: AtomicU32 = AtomicU32::new(0);
static IS_STOPPING: AtomicBool = AtomicBool::new(false);

/// To be called by the signal's handler: stays until the others may go on; `false` if nobody has
/// asked for a stop. Allocates nothing.
pub fn stay() -> bool {
    if !IS_STOPPING.load(SeqCst) {
        return false;
    }
    let turn = TURN.load(SeqCst);
    ARRIVED.fetch_add(1, SeqCst);
    while IS_STOPPING.load(SeqCst) && TURN.load(SeqCst) == turn {
        // Interrupted, or the turn has changed: it looks again.
        let _ = futex::wait(&TURN, futex::Flags::PRIVATE, turn, None);
    }
    true
}

/// Does `work` while all other threads, but for those in `spared`, are in [`stay`]; `None` if they
/// could not be stopped in time. `work` takes no lock and allocates no memory that they may have.
pub fn others<R>(signal: i32, spared: &[i32], work: impl FnOnce() -> R) -> Option<R> {
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    let deadline = Instant::now() + PATIENCE;
    ARRIVED.store(0, SeqCst);
    IS_STOPPING.store(true, SeqCst);
    let mut asked: Vec<i32> = Vec::new();
    let mut arrived = 0;
    let is_stopped = loop {
        let threads = threads();
        asked.retain(|thread| threads.contains(thread));
        let is_new = |thread: &i32| *thread != me && !spared.contains(thread) && !asked.contains(thread);
        let new: Vec<i32> = threads.iter().copied().filter(is_new).collect();
        if new.is_empty() && arrived >= asked.len() {
            break true;
        }
        for thread in new {
            if ask(thread, signal) {
                asked.push(thread);
            }
        }
        if Instant::now() > deadline {
            break false;
        }
        std::thread::sleep(Duration::from_micros(50));
        arrived = ARRIVED.load(SeqCst) as usize;
    };
    let result = is_stopped.then(work);
    IS_STOPPING.store(false, SeqCst);
    TURN.fetch_add(1, SeqCst);
    // There is no error that a valid address could meet.
    let _ = futex::wake(&TURN, futex::Flags::PRIVATE, i32::MAX as u32);
    result
}

/// All threads of this process.
pub fn threads() -> Vec<i32> {
    let listed = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    listed.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Sends the signal; `false` if the thread is gone.
fn ask(thread: i32, signal: i32) -> bool {
    // SAFETY: takes numbers alone.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, signal) == 0 }
}
