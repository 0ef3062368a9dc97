//! The threads of this library, among the threads of the program into which it is loaded.
//!
//! A program may give its threads any names, also those of our threads. So each thread of ours
//! enters its number here when it starts. Until then a count says that a thread is coming. The
//! thread also enters the address of its block (`pthread_self`), which marks the end of its stack:
//! the kernel may have joined the stack with memory behind it. Our threads are started on stacks of
//! ours.

mod start;

pub use start::{Started, start};

use rustix::process::getpid;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::*};

/// More threads than this are not known as ours.
const MAX: usize = 256;

/// The process and the thread, each in 32 bits; 0 if the entry is free. A fork has none of its
/// parent's threads, so an entry of another process is free as well.
static ENTERED: [AtomicU64; MAX] = [const { AtomicU64::new(0) }; MAX];
/// The block of each thread, entered after its number and removed before it; 0 if unknown.
static BLOCKS: [AtomicUsize; MAX] = [const { AtomicUsize::new(0) }; MAX];

/// The process, and the number of our threads that were started in it but have not entered yet.
static COMING: AtomicU64 = AtomicU64::new(0);

/// A thread that is about to be started. It is counted until it enters, or until this value is
/// dropped.
#[derive(Debug)]
pub struct Coming(());

/// The calling thread is registered as ours until this value is dropped.
#[derive(Debug)]
pub struct Entered(Option<usize>);

/// The calling thread by its process and its number.
fn own_number() -> u64 {
    of_process() | u64::from(gettid().as_raw_nonzero().get() as u32)
}

fn of_process() -> u64 {
    u64::from(getpid().as_raw_nonzero().get() as u32) << 32
}

/// The thread of such a number, if the thread is of this process.
pub fn of_own_process(number: u64) -> Option<i32> {
    let is_ours = number != 0 && number & !u64::from(u32::MAX) == of_process();
    is_ours.then_some(number as u32 as i32)
}

/// Counts a thread, before it is started.
pub fn announce() -> Coming {
    let add = |now| of_own_process(now).map_or(of_process() | 1, |_| now + 1);
    let _ = COMING.fetch_update(SeqCst, SeqCst, |now| Some(add(now)));
    Coming(())
}

impl Coming {
    /// Enters the calling thread, which was counted.
    pub fn enter(self) -> Entered {
        let own = own_number();
        let at = ENTERED.iter().position(|slot| {
            let take = |now: u64| of_own_process(now).is_none().then_some(own);
            slot.fetch_update(SeqCst, SeqCst, take).is_ok()
        });
        at.into_iter().for_each(|at| BLOCKS[at].store(own_block(), SeqCst));
        Entered(at)
    }
}

impl Drop for Coming {
    fn drop(&mut self) {
        // A forked child counts anew.
        let less = |now| of_own_process(now).filter(|&count| count > 0).map(|_| now - 1);
        let _ = COMING.fetch_update(SeqCst, SeqCst, less);
    }
}

/// True while a thread of ours has been started but has not entered yet.
pub fn are_coming() -> bool {
    of_own_process(COMING.load(SeqCst)).is_some_and(|count| count > 0)
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(at) = self.0 {
            BLOCKS[at].store(0, SeqCst);
            ENTERED[at].store(0, SeqCst);
        }
    }
}

/// The numbers of our threads in this process.
pub fn all() -> impl Iterator<Item = i32> {
    ENTERED.iter().filter_map(|slot| of_own_process(slot.load(SeqCst)))
}

pub use crate::thread_memory::own_block;

/// The known blocks of our threads in this process.
pub fn blocks() -> impl Iterator<Item = usize> {
    let entered = ENTERED.iter().zip(&BLOCKS);
    let ours = entered.filter(|(slot, _)| of_own_process(slot.load(SeqCst)).is_some());
    ours.map(|(_, block)| block.load(SeqCst)).filter(|block| *block != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_by_its_number_until_it_leaves() {
        let number = || gettid().as_raw_nonzero().get();
        let has = |number| all().any(|one| one == number);
        let other = std::thread::Builder::new().name("uzswap-reclaim".into());
        let other = other.spawn(move || assert!(!has(number()))).unwrap();
        other.join().unwrap();
        let coming = announce();
        assert!(are_coming() && !has(number()));
        let entered = coming.enter();
        assert!(!are_coming() && has(number()) && blocks().any(|block| block == own_block()));
        drop(entered);
        assert!(!has(number()) && blocks().all(|block| block != own_block()));
        // Of another process.
        assert_eq!(of_own_process(1 << 32 | 7), None);
    }
}
