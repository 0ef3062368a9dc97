//! Stacks for signal handlers. They are made ahead, and each serves one fault at a time.
//!
//! A handler runs on the stack of the thread that faulted, or on its alternate one (`sigaltstack`).
//! Either may have only a few KiB. The kernel's frame takes up to 3 KiB, and a page from the
//! backing takes 24 more. So a handler works on one of the stacks of this file. They belong to the
//! process, not to threads. So no thread has to register, and the number of stacks that take memory
//! is that of simultaneous faults.

use crate::cpu;
use crate::map::{Mapping, PAGE_BYTES};
use crate::processor::on_stack;
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::*};

/// The maximum number of simultaneous faults on these stacks, including those that wait for memory.
const COUNT: usize = 64;
/// Twice the need of a page from the backing, with a guard page below.
const BYTES: usize = 128 << 10;

/// See the module.
#[derive(Debug)]
pub struct Stacks {
    memory: Mapping,
    taken: [Taken; COUNT],
}

/// True while a stack is in use. The flag has a cache line of its own, since every fault writes it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Taken(AtomicBool);

impl Stacks {
    /// Reserves the stacks, which take memory when they are used.
    pub fn new() -> io::Result<Self> {
        let memory = Mapping::for_pages(COUNT * BYTES, PAGE_BYTES)?;
        // A forked child also serves faults, and inherits the stacks.
        memory.set_inherited(0, memory.len(), true)?;
        (0..COUNT).try_for_each(|at| memory.forbid(at * BYTES, PAGE_BYTES))?;
        Ok(Self { memory, taken: std::array::from_fn(|_| Taken::default()) })
    }

    /// Runs `work` on a free stack, or on the caller's own where all are taken. Allocates nothing
    /// and never waits. All signals are blocked, so that no handler jumps out of `work`.
    pub fn run<F: FnMut()>(&self, mut work: F) {
        let Some(at) = self.take() else { return work() };
        let top = (at + 1) * BYTES - ARGUMENTS;
        // SAFETY: `taken` gives the stack to this call alone, its top is a multiple of 16, and
        // `work` outlives the call, which ends the process if `work` panics.
        unsafe {
            let (top, mut below) = (self.memory.as_ptr().add(top), 0);
            on_stack((&raw mut work).cast(), call::<F>, top, &raw mut below);
        }
        self.taken[at].0.store(false, Release);
    }

    /// True if the caller runs on one of these stacks.
    pub fn is_here(&self) -> bool {
        let here = 0u8;
        let start = self.memory.as_ptr() as usize;
        (start..start + self.memory.len()).contains(&(&raw const here as usize))
    }

    /// Takes most likely the stack that this CPU used last, which is in its caches.
    fn take(&self) -> Option<usize> {
        let here = cpu::current();
        let order = (here..here + COUNT).map(|at| at % COUNT);
        let is_free = |at: &usize| {
            let Taken(taken) = &self.taken[*at];
            !taken.load(Relaxed) && taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        };
        order.into_iter().find(is_free)
    }

    /// Frees all stacks in a fork, where the threads that used them do not exist.
    pub fn give_all(&self) {
        self.taken.iter().for_each(|taken| taken.0.store(false, Relaxed));
    }
}

/// Bytes above its return address that a function may read. There are its arguments on the stack,
/// or there is room for them. A function that is reached by a tail call may read these bytes, too:
/// the C library's `syscall` reads a seventh argument, passed or not.
const ARGUMENTS: usize = 64;

extern "C" fn call<F: FnMut()>(work: *mut c_void) {
    // SAFETY: `run` passes its own closure, which no other code uses.
    unsafe { (*work.cast::<F>())() }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn work_is_done_on_a_stack_of_its_own_and_without_one_where_it_is() {
        let stacks = Stacks::new().unwrap();
        let range =
            stacks.memory.as_ptr() as usize..stacks.memory.as_ptr() as usize + COUNT * BYTES;
        let here = || std::hint::black_box(&mut [0u8; 64]).as_ptr() as usize;
        let mut places = Vec::new();
        fn nest(stacks: &Stacks, depth: usize, places: &mut Vec<usize>, here: &dyn Fn() -> usize) {
            places.push(here());
            if depth > 0 {
                stacks.run(|| nest(stacks, depth - 1, places, here));
            }
        }
        nest(&stacks, COUNT + 1, &mut places, &here);
        let on_ours: Vec<bool> = places.iter().map(|at| range.contains(at)).collect();
        // The first call runs on the caller's stack. The last call found no free stack, and runs on
        // the stack of the call before it.
        assert!(!on_ours[0] && on_ours[1..].iter().all(|is| *is));
        let numbers = places[1..=COUNT].iter().map(|at| (at - range.start) / BYTES);
        assert_eq!(numbers.collect::<std::collections::BTreeSet<_>>().len(), COUNT);
        assert!(stacks.taken.iter().all(|taken| !taken.0.load(Relaxed)));
    }

    #[test]
    fn a_fork_has_all_stacks() {
        let stacks = Stacks::new().unwrap();
        stacks.run(|| {
            assert_eq!(stacks.taken.iter().filter(|taken| taken.0.load(Relaxed)).count(), 1);
            stacks.give_all();
            assert!(stacks.take().is_some());
        });
    }
}
