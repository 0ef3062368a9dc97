//! Stacks for the handlers of signals: made ahead, taken for the time of a fault.
//!
//! A handler runs on the stack of the thread that faulted, or on its alternate one (`sigaltstack`).
//! Either may be of a few KiB, of which the kernel's frame takes up to three; a page that comes
//! from the backing takes 24 more. So what a handler has to do is done on one of these. They are of
//! the process, not of threads: no thread need say that it exists, and memory is taken by as many
//! as serve faults at once.

use crate::cpu;
use crate::map::{Mapping, PAGE_BYTES};
use std::ffi::c_void;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::*};

/// How many faults are served on them at once, those that wait for memory included.
const COUNT: usize = 64;
/// Twice what a page from the backing takes, with the page below that nobody may touch.
const BYTES: usize = 128 << 10;

/// See the module.
#[derive(Debug)]
pub struct Stacks {
    memory: Mapping,
    taken: [Taken; COUNT],
}

/// Whether somebody is on a stack: a line of the caches each, since every fault writes one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Taken(AtomicBool);

impl Stacks {
    /// Reserves them; they take memory once they are used.
    pub fn new() -> io::Result<Self> {
        let memory = Mapping::for_pages(COUNT * BYTES, PAGE_BYTES)?;
        // A fork has faults too.
        memory.set_inherited(0, memory.len(), true)?;
        (0..COUNT).try_for_each(|at| memory.forbid(at * BYTES, PAGE_BYTES))?;
        Ok(Self { memory, taken: std::array::from_fn(|_| Taken::default()) })
    }

    /// Does `work` on a stack that nobody else is on; on the caller's own where all are taken.
    /// Allocates nothing and waits for nobody. All signals are blocked, so that `work` ends here.
    pub fn run<F: FnMut()>(&self, mut work: F) {
        let Some(at) = self.take() else { return work() };
        let top = (at + 1) * BYTES - ARGUMENTS;
        // SAFETY: the stack is this call's own, as `taken` says, its top is a multiple of 16, and
        // `work` outlives the call, which ends it if it panics.
        unsafe {
            let top = self.memory.as_ptr().add(top);
            on_stack((&raw mut work).cast(), call::<F>, top);
        }
        self.taken[at].0.store(false, Release);
    }

    /// Whether the caller is on one of them.
    pub fn is_here(&self) -> bool {
        let here = 0u8;
        let start = self.memory.as_ptr() as usize;
        (start..start + self.memory.len()).contains(&(&raw const here as usize))
    }

    /// The one that this CPU used last, most likely, and whose memory is in its caches.
    fn take(&self) -> Option<usize> {
        let here = cpu::current();
        let order = (here..here + COUNT).map(|at| at % COUNT);
        let is_free = |at: &usize| {
            let Taken(taken) = &self.taken[*at];
            !taken.load(Relaxed) && taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        };
        order.into_iter().find(is_free)
    }

    /// In a fork: the threads that had some are not here.
    pub fn give_all(&self) {
        self.taken.iter().for_each(|taken| taken.0.store(false, Relaxed));
    }
}

/// What a function may read above its return address: those of its arguments that are not in
/// registers, or places for them. Who is called last, in place of the function that was called
/// here, is such a one, too: the C library's `syscall` reads its seventh, given or not.
const ARGUMENTS: usize = 64;

extern "C" fn call<F: FnMut()>(work: *mut c_void) {
    // SAFETY: `run` passes its own, which nobody else uses meanwhile.
    unsafe { (*work.cast::<F>())() }
}

/// Calls `call(work)` with another stack. The frame pointer remembers ours, for unwinders too.
///
/// # Safety
/// `top` is the end of a stack that is free, a multiple of 16.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn on_stack(work: *mut c_void, call: extern "C" fn(*mut c_void), top: *mut u8) {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "push rbp",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset rbp, -16",
        "mov rbp, rsp",
        ".cfi_def_cfa_register rbp",
        "mov rsp, rdx",
        "call rsi",
        "mov rsp, rbp",
        "pop rbp",
        ".cfi_def_cfa rsp, 8",
        "ret",
        ".cfi_endproc",
    )
}

/// As above.
///
/// # Safety
/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn on_stack(work: *mut c_void, call: extern "C" fn(*mut c_void), top: *mut u8) {
    std::arch::naked_asm!(
        ".cfi_startproc",
        "stp x29, x30, [sp, #-16]!",
        ".cfi_def_cfa_offset 16",
        ".cfi_offset x29, -16",
        ".cfi_offset x30, -8",
        "mov x29, sp",
        ".cfi_def_cfa_register x29",
        "mov sp, x2",
        "blr x1",
        "mov sp, x29",
        "ldp x29, x30, [sp], #16",
        ".cfi_def_cfa sp, 0",
        "ret",
        ".cfi_endproc",
    )
}

/// Where nobody has written it: on the stack of the caller.
///
/// # Safety
/// None is needed.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe extern "C" fn on_stack(work: *mut c_void, call: extern "C" fn(*mut c_void), _: *mut u8) {
    call(work);
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
        // The first is the caller's; the last found none free, and is where the one before it is.
        assert!(!on_ours[0] && on_ours[1..].iter().all(|is| *is));
        let numbers = places[1..=COUNT].iter().map(|at| (at - range.start) / BYTES);
        assert_eq!(numbers.collect::<std::collections::BTreeSet<_>>().len(), COUNT);
        assert!(stacks.taken.iter().all(|taken| !taken.0.load(Relaxed)));
    }

    #[test]
    fn a_fork_has_all_of_them() {
        let stacks = Stacks::new().unwrap();
        stacks.run(|| {
            assert_eq!(stacks.taken.iter().filter(|taken| taken.0.load(Relaxed)).count(), 1);
            stacks.give_all();
            assert!(stacks.take().is_some());
        });
    }
}
