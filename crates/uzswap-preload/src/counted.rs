//! How much the process has.
//!
//! The kernel says it by a file, of which the first look in a process costs 30 to 40 microseconds:
//! as much as all else of this library. Most programs that have asked for 4 MiB have given most of
//! it back; that the C library's heap is small says so for nothing.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use uzswap_tree::front::{Front, QUEUED_LEAST};

/// What the C library does not take from its heap at first.
pub const LARGE: usize = 128 << 10;

/// Looks that may be left out in a row: memory may come from elsewhere, if the heap cannot grow.
const LEFT_OUT_MAX: u32 = 3;

/// Where the heap ended at first.
static HEAP_END: AtomicUsize = AtomicUsize::new(0);
/// What was asked for in large blocks, bytes.
static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);
static LEFT_OUT: AtomicU32 = AtomicU32::new(0);

/// Before anything is counted.
pub fn begin() {
    HEAP_END.store(heap_end(), Relaxed);
}

fn heap_end() -> usize {
    // SAFETY: asks only; the C library knows, and does not ask the kernel.
    unsafe { libc::sbrk(0) as usize }
}

/// Counts a large block.
pub fn add_large(bytes: usize) {
    LARGE_BYTES.fetch_add(bytes, Relaxed);
}

/// Whether the process surely has too little to look how much. Other threads have heaps of their
/// own.
pub fn is_small(front: &Front) -> bool {
    // SAFETY: takes nothing.
    let is_first = unsafe { libc::pthread_self() } as usize == front.first_thread;
    let heap = heap_end().saturating_sub(HEAP_END.load(Relaxed));
    let bytes = heap.saturating_add(LARGE_BYTES.load(Relaxed)) as u64;
    let is_small =
        is_first && bytes < QUEUED_LEAST && LEFT_OUT.fetch_add(1, Relaxed) < LEFT_OUT_MAX;
    if !is_small {
        LEFT_OUT.store(0, Relaxed);
    }
    is_small
}

/// Anonymous memory of this process, bytes.
pub fn anonymous_bytes() -> u64 {
    const PAGE_BYTES: u64 = 4096;
    let mut text = [0_u8; 128];
    // SAFETY: a name; what is read fits where it is written.
    let read = unsafe {
        let flags = libc::O_RDONLY | libc::O_CLOEXEC;
        let file = libc::open(c"/proc/thread-self/statm".as_ptr(), flags);
        let read = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        read
    };
    let text = text.get(..read.max(0) as usize).unwrap_or_default();
    // The second number is what is resident, the third what of it is shared.
    let mut numbers = text.split(|byte| *byte == b' ').skip(1).map(|digits| {
        let value = |sum: u64, digit: &u8| {
            sum.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0')))
        };
        digits.iter().fold(0, value)
    });
    let mut next = || numbers.next().unwrap_or(0);
    let (resident, shared) = (next(), next());
    resident.saturating_sub(shared).wrapping_mul(PAGE_BYTES)
}
