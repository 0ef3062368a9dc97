//! A thread with its own table of descriptors, for all work that opens files briefly.
//!
//! In the program's table a file of ours would have the lowest free number. A program that closes
//! all its descriptors would close that file. A program that opens a file of its own at that moment
//! would get another number than it expects.

use crate::thread;
use rustix::thread::futex;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};
use uzswap_sys::own_threads;
use uzswap_tree::front::STACK;
use uzswap_tree::variables::variables_bytes;

/// The thread's orders: none, to do [`WORK`], to end.
const NONE: u32 = 0;
const DO: u32 = 1;
const END: u32 = 2;
/// A thread is about to give an order.
const TAKEN: u32 = 3;
/// The order is done, but its giver has not seen that yet.
const DONE: u32 = 4;
/// The present order. A thread that finds none takes the turn, gives its order, waits until the
/// order is done, and gives the turn back.
static ORDER: AtomicU32 = AtomicU32::new(NONE);
/// The work of the thread that gave the order.
static WORK: AtomicPtr<Work<'static>> = AtomicPtr::new(ptr::null_mut());
type Work<'a> = &'a mut (dyn FnMut() + Send);
/// The process of the thread; 0 if it has not been started, which may fail in any stage of the
/// program. A fork has no such thread yet.
static PROCESS: AtomicU32 = AtomicU32::new(0);

fn is_there() -> bool {
    PROCESS.load(SeqCst) == std::process::id()
}

/// Starts the thread. Where that fails, the caller does the work itself.
pub fn start() {
    ORDER.store(NONE, SeqCst);
    let coming = own_threads::announce();
    let bytes = STACK + variables_bytes();
    let started = own_threads::start(c"uzswap-look", bytes, || run(coming));
    PROCESS.store(if started.is_ok() { std::process::id() } else { 0 }, SeqCst);
    started.into_iter().for_each(own_threads::Started::leave);
}

/// Does work in the looker's thread, and waits for its end. `/proc/self` is the caller's there, but
/// `/proc/thread-self` is not. The work must touch no memory that may be evicted, since the thread
/// has no descriptor for bringing pages in. For the same reason the work must not allocate from the
/// C library, whose allocator would keep a cache for the thread.
pub fn apart<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    if !is_there() {
        return work();
    }
    take_turn();
    if !is_there() {
        give_turn();
        return work();
    }
    let (mut work, mut result) = (Some(work), None);
    let mut once = || result = work.take().map(|work| work());
    let mut given: Work<'_> = &mut once;
    WORK.store((&raw mut given).cast(), SeqCst);
    order(DO);
    result.expect("the thread does each work once")
}

pub fn end() {
    if is_there() {
        take_turn();
        PROCESS.store(0, SeqCst);
        order(END);
    }
}

fn take_turn() {
    while let Err(order) = ORDER.compare_exchange(NONE, TAKEN, SeqCst, SeqCst) {
        wait_while(order);
    }
}

fn give_turn() {
    ORDER.store(NONE, SeqCst);
    wake();
}

/// Gives an order, waits until it is done, and gives the turn back.
fn order(order: u32) {
    ORDER.store(order, SeqCst);
    wake();
    while ORDER.load(SeqCst) == order {
        wait_while(order);
    }
    give_turn();
}

fn wait_while(order: u32) {
    // If the wait is interrupted or over, the caller checks again.
    let _ = futex::wait(&ORDER, futex::Flags::PRIVATE, order, None);
}

fn wake() {
    // With a valid address this cannot fail.
    let _ = futex::wake(&ORDER, futex::Flags::PRIVATE, i32::MAX as u32);
}

fn run(coming: own_threads::Coming) {
    let _entered = coming.enter();
    thread::with(|thread| thread.is_inside.set(true));
    // If the kernel refuses, the thread does its work with the program's table.
    let _ = leave_programs_table();
    loop {
        let order = ORDER.load(SeqCst);
        match order {
            // SAFETY: the thread that gave the order put its work there, and waits until it is
            // done.
            DO => unsafe { (*WORK.load(SeqCst))() },
            END => {}
            _ => {
                wait_while(order);
                continue;
            }
        }
        ORDER.store(DONE, SeqCst);
        wake();
        if order == END {
            return;
        }
    }
}

/// Gives the calling thread an empty table of descriptors of its own.
fn leave_programs_table() -> io::Result<()> {
    const UNSHARE: u64 = 2;
    let arguments = [0, u64::from(u32::MAX), UNSHARE, 0, 0, 0];
    // SAFETY: the call takes numbers; it empties a new table, which only this thread uses.
    match unsafe { uzswap_calls::raw(libc::SYS_close_range as u64, arguments) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(-error as i32)),
    }
}
