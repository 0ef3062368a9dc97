//! Stopping all other threads of this process for a moment, by a signal whose handler waits.
//!
//! A thread that blocks the signal, or that the kernel does not let go (it waits for a disk, or for
//! the child of a `vfork`), does not stop: then nothing is done, and the caller tries again later.

use rustix::fs::{self, Mode, OFlags};
use rustix::thread::futex;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::*};
use std::time::{Duration, Instant};

/// How long threads may take to stop.
const PATIENCE: Duration = Duration::from_millis(300);

/// Counts the times that the others were stopped; odd while they are.
static TURN: AtomicU32 = AtomicU32::new(0);
static ARRIVED: AtomicU32 = AtomicU32::new(0);
static IS_STOPPING: AtomicBool = AtomicBool::new(false);

/// What the signal carries, so that its handler knows it from others'.
pub const VALUE: usize = 0x757a_7377_6170;

/// To be called by the signal's handler, if [`VALUE`] came with it: stays until the others may go
/// on. Allocates nothing. The signal may come late, when nobody waits for it any more.
pub fn stay() {
    if !IS_STOPPING.load(SeqCst) {
        return;
    }
    let turn = TURN.load(SeqCst);
    ARRIVED.fetch_add(1, SeqCst);
    while IS_STOPPING.load(SeqCst) && TURN.load(SeqCst) == turn {
        // Interrupted, or the turn has changed: it looks again.
        let _ = futex::wait(&TURN, futex::Flags::PRIVATE, turn, None);
    }
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
        let is_new =
            |thread: &i32| *thread != me && !spared.contains(thread) && !asked.contains(thread);
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
    // Not by the C library, whose allocator a stopped thread may have.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = fs::open(c"/proc/self/task", flags, Mode::empty()) else { return Vec::new() };
    let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
    let mut listed = fs::RawDir::new(&folder, &mut buffer);
    let mut threads = Vec::new();
    while let Some(Ok(entry)) = listed.next() {
        threads.extend(entry.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok()));
    }
    threads
}

/// `siginfo_t` of a signal with a value.
#[repr(C)]
struct Info {
    signal: i32,
    error: i32,
    code: i32,
    gap: i32,
    /// Process, and user.
    sender: u64,
    value: usize,
    rest: [u64; 12],
}

const _: () = assert!(size_of::<Info>() == 128);

/// Sends the signal; `false` if the thread is gone.
fn ask(thread: i32, signal: i32) -> bool {
    let mut info = Info {
        signal,
        error: 0,
        code: libc::SI_QUEUE,
        gap: 0,
        sender: 0,
        value: VALUE,
        rest: [0; 12],
    };
    // SAFETY: takes nothing.
    let process = unsafe { libc::getpid() };
    info.sender = process as u64;
    // SAFETY: the description is as long as the kernel's, which copies it.
    unsafe {
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, &raw const info) == 0
    }
}
