//! Reads the kernel's files about this process, in a thread with a table of descriptors of its own.
//!
//! In the program's table a file of ours would have the lowest free number for a moment. A program
//! that closes all its descriptors would close ours, and one that opens a file at that moment would
//! get another number than it expects.

use crate::thread;
use rustix::thread::futex;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use uzswap_sys::{own_threads, process};
use uzswap_tree::front::STACK;

/// A question to the thread.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Question {
    /// Anonymous memory of this process, bytes.
    Anonymous = 1,
    /// The part of it that others count, too.
    Shared = 2,
    /// The thread ends.
    End = 3,
}

/// No question is open.
const NONE: u32 = 0;
/// The open question. One thread asks at a time.
static ASKED: AtomicU32 = AtomicU32::new(NONE);
static ANSWER: AtomicU64 = AtomicU64::new(0);
/// The thread has been started. It may fail in any stage of the program.
static IS_THERE: AtomicBool = AtomicBool::new(false);

/// Starts the thread. Where that fails, the caller reads the files itself.
pub fn start() {
    ASKED.store(NONE, SeqCst);
    let coming = own_threads::announce();
    let thread = std::thread::Builder::new().name("uzswap-look".into()).stack_size(STACK);
    IS_THERE.store(thread.spawn(|| run(coming)).is_ok(), SeqCst);
}

/// Asks, and waits for the answer.
pub fn ask(question: Question) -> u64 {
    if !IS_THERE.load(SeqCst) {
        return answer(question);
    }
    ASKED.store(question as u32, SeqCst);
    wake();
    while ASKED.load(SeqCst) == question as u32 {
        // Interrupted, or answered: it looks again.
        let _ = futex::wait(&ASKED, futex::Flags::PRIVATE, question as u32, None);
    }
    ANSWER.load(SeqCst)
}

/// Ends the thread.
pub fn end() {
    ask(Question::End);
    IS_THERE.store(false, SeqCst);
}

fn wake() {
    // There is no error that a valid address could meet.
    let _ = futex::wake(&ASKED, futex::Flags::PRIVATE, i32::MAX as u32);
}

fn run(coming: own_threads::Coming) {
    let _entered = coming.enter();
    thread::with(|thread| thread.is_inside.set(true));
    // Where it is refused, the thread does its work with the program's table.
    let _ = leave_programs_table();
    loop {
        let asked = ASKED.load(SeqCst);
        let question = match asked {
            1 => Question::Anonymous,
            2 => Question::Shared,
            3 => Question::End,
            _ => {
                let _ = futex::wait(&ASKED, futex::Flags::PRIVATE, asked, None);
                continue;
            }
        };
        ANSWER.store(answer(question), SeqCst);
        ASKED.store(NONE, SeqCst);
        wake();
        if question == Question::End {
            return;
        }
    }
}

fn answer(question: Question) -> u64 {
    match question {
        Question::Anonymous => process::own_anonymous_bytes().unwrap_or(0),
        Question::Shared => process::own_shared_bytes().unwrap_or(0),
        Question::End => 0,
    }
}

/// Gives the calling thread an empty table of descriptors of its own.
fn leave_programs_table() -> io::Result<()> {
    const UNSHARE: u64 = 2;
    let arguments = [0, u64::from(u32::MAX), UNSHARE, 0, 0, 0];
    // SAFETY: takes numbers; the table that it empties is a new one of this thread's alone.
    match unsafe { uzswap_calls::raw(libc::SYS_close_range as u64, arguments) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}
