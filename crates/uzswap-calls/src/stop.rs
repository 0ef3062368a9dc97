//! Stopping all other threads of this process for a moment, by a signal whose handler waits.
//!
//! ```text
//! others   a new turn, odd → ask each thread → all of them stay? → work → the next turn, even
//! stay     odd? → put itself on the list of that turn → wait until the turn is over
//! ```
//! A thread may block the signal, or be uninterruptible in the kernel (it waits for a disk, or for
//! the child of a `vfork`). Then that thread does not stop, no work is done, and the caller tries
//! again later. Turn and list are one word, so that a thread that is late for one turn is not on
//! the list of the next.

use rustix::fs::{self, Mode, OFlags};
use rustix::thread::futex;
use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use std::time::{Duration, Instant};
use uzswap_sys::thread_memory::own_block;

/// The time that threads may take to stop.
const PATIENCE: Duration = Duration::from_millis(300);
/// The time after which a thread that has not stopped gets the signal again. At the first signal
/// the thread may have held a lock that other threads need.
const AGAIN: Duration = Duration::from_millis(10);

/// The same turn as in [`STAYING`], in a word on which stopped threads wait.
static TURN: AtomicU32 = AtomicU32::new(0);
/// The stopped threads of this turn: 16 bits are the turn's number, odd while threads must stop; 48
/// are the address of the [`Node`] that came last.
static STAYING: AtomicU64 = AtomicU64::new(0);
const ADDRESS_BITS: u32 = 48;

/// The value that is sent with the signal, by which its handler recognises our signal.
pub const VALUE: usize = 0x757a_7377_6170;

/// A stopped thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staying {
    /// Its number.
    pub thread: i32,
    /// Its stack pointer.
    pub stack: usize,
    /// Its block (`pthread_self`).
    pub block: usize,
}

/// The call in which a thread waited when we asked the thread to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitedCall {
    /// Its number.
    pub number: i64,
    /// Its six arguments.
    pub arguments: [u64; 6],
    /// The stack pointer of the thread.
    pub stack: usize,
    /// The address behind the call.
    pub behind: usize,
}

impl WaitedCall {
    /// Parses `/proc/PID/syscall`; `None` if the thread was in no call.
    fn parse(text: &str) -> Option<Self> {
        let (number, rest) = text.split_once(' ')?;
        let number = number.parse().ok().filter(|number| *number >= 0)?;
        let mut words = rest.split_whitespace().map(|word| {
            word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok())
        });
        let mut arguments = [0; 6];
        for argument in &mut arguments {
            *argument = words.next()??;
        }
        let (stack, behind) = (words.next()?? as usize, words.next()?? as usize);
        Some(Self { number, arguments, stack, behind })
    }
}

/// The call in which a thread of this process waits now.
pub fn waited_call(thread: i32) -> Option<WaitedCall> {
    let path = format!("/proc/self/task/{thread}/syscall");
    let file = fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; 256];
    let bytes = rustix::io::read(&file, &mut text).ok()?;
    WaitedCall::parse(str::from_utf8(&text[..bytes]).ok()?)
}

/// An entry of the list, on the stack of its thread, which stays there until the turn is over.
struct Node {
    staying: Staying,
    /// Written by the thread that stops the others, before it ends the turn.
    call: Cell<Option<WaitedCall>>,
    /// The previous node; 0 if there is none.
    before: u64,
}

const fn turn_of(word: u64) -> u32 {
    (word >> ADDRESS_BITS) as u32
}

/// The signal's handler calls this, if the signal has [`VALUE`], with the thread's stack pointer.
/// Waits until the turn is over. Returns the call in which the thread waited, if that is known.
/// Allocates nothing. The signal may arrive after the turn has ended.
pub fn stay(stack: usize) -> Option<WaitedCall> {
    let turn = turn_of(STAYING.load(SeqCst));
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let block = own_block();
    let staying = Staying { thread, stack, block };
    let mut node = Node { staying, call: Cell::new(None), before: 0 };
    if turn.is_multiple_of(2) || !arrive(turn, &mut node) {
        return None;
    }
    while TURN.load(SeqCst) == turn {
        // In any case the loop checks the turn again.
        let _ = futex::wait(&TURN, futex::Flags::PRIVATE, turn, None);
    }
    node.call.get()
}

/// Adds a thread to the list of a turn; `false` if the turn is over, or if the address does not
/// fit.
fn arrive(turn: u32, node: &mut Node) -> bool {
    let address = &raw const *node as u64;
    if address >> ADDRESS_BITS != 0 {
        return false;
    }
    let add = |word: u64| {
        node.before = word & ((1 << ADDRESS_BITS) - 1);
        (turn_of(word) == turn).then_some(u64::from(turn) << ADDRESS_BITS | address)
    };
    STAYING.fetch_update(SeqCst, SeqCst, add).is_ok()
}

/// Begins the next turn, with an empty list.
fn next_turn() -> u32 {
    // Even and odd still alternate where the number wraps around.
    let turn = (turn_of(STAYING.load(SeqCst)) + 1) & 0xffff;
    let begin = || STAYING.store(u64::from(turn) << ADDRESS_BITS, SeqCst);
    // A thread on the list must see its turn in both words.
    match turn.is_multiple_of(2) {
        true => (begin(), TURN.store(turn, SeqCst)),
        false => (TURN.store(turn, SeqCst), begin()),
    };
    turn
}

/// The nodes of the turn that the caller has begun, and ends after it has dropped this.
fn nodes<'a>() -> impl Iterator<Item = &'a Node> {
    let mut at = STAYING.load(SeqCst) & ((1 << ADDRESS_BITS) - 1);
    std::iter::from_fn(move || {
        // SAFETY: `arrive` put it there in this turn, and its thread does not leave it, or look at
        // it, before the turn ends; only the caller ends the turn.
        let node = (at != 0).then(|| unsafe { &*(at as *const Node) })?;
        at = node.before;
        Some(node)
    })
}

/// The stopped threads of the turn that the caller has begun.
fn staying() -> Vec<Staying> {
    nodes().map(|node| node.staying).collect()
}

struct Asked {
    thread: i32,
    when: Instant,
    call: Option<WaitedCall>,
}

/// Does `work` while all other threads, except those in `spared`, are in [`stay`]; `None` if they
/// could not be stopped in time. `list` lists all threads, as [`threads`] does. `call` returns the
/// call of one thread, as [`waited_call`] does. `work` takes no lock that a stopped thread may
/// have, an allocator's included. Called by one thread at a time.
pub fn others<R>(
    signal: i32,
    spared: &[i32],
    list: impl Fn() -> io::Result<Vec<i32>>,
    call: impl Fn(i32) -> Option<WaitedCall>,
    work: impl FnOnce(&[Staying]) -> R,
) -> Option<R> {
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    let deadline = Instant::now() + PATIENCE;
    next_turn();
    let mut asked: Vec<Asked> = Vec::new();
    let stopped = loop {
        // The list of stopped threads comes before the list of all threads: a thread that is not
        // stopped could make new threads.
        let staying = staying();
        let is_staying = |thread: i32| staying.iter().any(|one| one.thread == thread);
        let is_missing = |thread: &i32| {
            let is_other = *thread != me && !spared.contains(thread) && !is_staying(*thread);
            is_other && !has_ended(*thread)
        };
        let missing = list().map(|all| all.into_iter().filter(is_missing).collect::<Vec<_>>());
        if missing.as_ref().is_ok_and(Vec::is_empty) {
            break Some(staying);
        }
        let now = Instant::now();
        if now > deadline {
            break None;
        }
        for thread in missing.into_iter().flatten() {
            let before = asked.iter().position(|asked| asked.thread == thread);
            if before.is_some_and(|at| now.duration_since(asked[at].when) < AGAIN) {
                continue;
            }
            // A thread that has our signal, but no processor yet, is in no call any more.
            let known = before.and_then(|at| asked[at].call);
            let this = Asked { thread, when: now, call: call(thread).or(known) };
            match before {
                Some(at) => asked[at] = this,
                None => asked.push(this),
            }
            ask(thread, signal);
        }
        std::thread::sleep(Duration::from_micros(50));
    };
    for node in nodes() {
        let asked = asked.iter().find(|asked| asked.thread == node.staying.thread);
        node.call.set(asked.and_then(|asked| asked.call));
    }
    let result = stopped.map(|staying| work(&staying));
    next_turn();
    // With a valid address this cannot fail.
    let _ = futex::wake(&TURN, futex::Flags::PRIVATE, i32::MAX as u32);
    result
}

/// All threads of this process. Fails if they cannot be listed: no descriptor is left, or threads
/// begin and end too fast.
pub fn threads() -> io::Result<Vec<i32>> {
    // This does without the C library's `opendir`, which allocates: a stopped thread may have the
    // allocator's lock.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = fs::open(c"/proc/self/task", flags, Mode::empty())?;
    let mut buffer = [MaybeUninit::<u8>::uninit(); 4096];
    let mut listed = fs::RawDir::new(&folder, &mut buffer);
    let mut threads = Vec::new();
    while let Some(entry) = listed.next() {
        let name = entry?.file_name().to_str().ok().and_then(|name| name.parse::<i32>().ok());
        threads.extend(name);
    }
    // If threads end during the listing, the kernel may leave others out. A folder has two links,
    // and one for each entry.
    match fs::fstat(&folder)?.st_nlink as usize == threads.len() + 2 {
        true => Ok(threads),
        false => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// True if a thread has ended but is still listed. The kernel lists the first thread until the last
/// thread ends.
fn has_ended(thread: i32) -> bool {
    if thread != rustix::process::getpid().as_raw_nonzero().get() {
        return false;
    }
    // Allocates nothing. `/proc/self/stat` has the state of the first thread.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let mut text = [0; 128];
    let file = fs::open(c"/proc/self/stat", flags, Mode::empty());
    let bytes = file.and_then(|file| rustix::io::read(&file, &mut text)).unwrap_or(0);
    // The thread's number, its name in parentheses, and its state. The name may contain
    // parentheses, too.
    let name_end = text[..bytes].iter().rposition(|byte| *byte == b')');
    name_end.is_some_and(|end| matches!(text.get(end + 2), Some(b'Z' | b'X')))
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

/// True while threads are asked to stop. Where a user may queue no more signals, the kernel drops a
/// signal's value.
pub fn is_asking() -> bool {
    !turn_of(STAYING.load(SeqCst)).is_multiple_of(2)
}

/// Sends the signal. An error means that the thread is gone, which the next list shows.
fn ask(thread: i32, signal: i32) {
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
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, signal, &raw const info);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only this test of this program stops threads.
    #[test]
    fn a_thread_that_comes_late_for_one_turn_is_not_on_the_list_of_the_next() {
        let of = |thread| {
            let staying = Staying { thread, stack: 1, block: 2 };
            Node { staying, call: Cell::new(None), before: 7 }
        };
        let (mut late, mut first, mut second) = (of(1), of(2), of(3));
        let missed = next_turn();
        assert_eq!((missed % 2, next_turn()), (1, missed + 1));
        let turn = next_turn();
        assert!(!arrive(missed, &mut late));
        assert_eq!(staying(), []);
        assert!(
            arrive(turn, &mut first) && !arrive(missed, &mut late) && arrive(turn, &mut second)
        );
        assert_eq!(staying(), [second.staying, first.staying]);
        next_turn();
        assert!(!arrive(turn, &mut late));
        assert_eq!(staying(), []);
        // No turn asks threads to stop now.
        assert_eq!(stay(1), None);
    }

    #[test]
    fn the_call_of_a_thread_is_read_as_the_kernel_writes_it() {
        let text = "34 0x1 0x0 0x3 0x4 0x5 0xffffffffffffffff 0x7ffe1d269064 0x7fbcff5281dc\n";
        let arguments = [1, 0, 3, 4, 5, u64::MAX];
        let call =
            WaitedCall { number: 34, arguments, stack: 0x7ffe_1d26_9064, behind: 0x7fbc_ff52_81dc };
        assert_eq!(WaitedCall::parse(text), Some(call));
        for none in ["running\n", "-1 0x7ffe 0x7fbc\n", "34 0x1\n", ""] {
            assert_eq!(WaitedCall::parse(none), None, "{none}");
        }
    }
}
