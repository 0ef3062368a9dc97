//! The memory of the process.
//!
//! The kernel shows it in `/proc/thread-self/statm`. The first read of that file in a process costs
//! 30 to 40 microseconds, as much as the rest of this library. Most programs that have asked for 4
//! MiB have freed most of it. The size of the C library's heap shows that without a system call.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use uzswap_tree::front::{Front, QUEUED_LEAST};

/// At the start the C library does not take larger blocks from its heap.
pub const LARGE: usize = 128 << 10;

/// Consecutive measurements that may be omitted because the heap is small. The heap may also be
/// small because it cannot grow and memory comes from elsewhere.
const LEFT_OUT_MAX: u32 = 3;

/// The end of the heap at the start.
static HEAP_END: AtomicUsize = AtomicUsize::new(0);
/// Bytes asked for in large blocks.
static LARGE_BYTES: AtomicUsize = AtomicUsize::new(0);
static LEFT_OUT: AtomicU32 = AtomicU32::new(0);

/// Notes the heap's end. Called before the first count.
pub fn begin() {
    HEAP_END.store(heap_end(), Relaxed);
}

fn heap_end() -> usize {
    // SAFETY: the call only asks; the C library answers without the kernel.
    unsafe { libc::sbrk(0) as usize }
}

pub fn add_large(bytes: usize) {
    LARGE_BYTES.fetch_add(bytes, Relaxed);
}

/// True if the process is certainly too small to measure. Only the first thread is judged: other
/// threads have heaps of their own.
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

/// The memory of this process, bytes.
pub struct MemoryUse {
    /// Anonymous memory that it has.
    pub used: u64,
    /// Memory that it may write without a further request.
    pub usable: u64,
}

pub fn memory() -> MemoryUse {
    const PAGE_BYTES: u64 = 4096;
    let mut text = [0_u8; 128];
    let text = read(c"/proc/thread-self/statm", &mut text);
    // The second number is the resident memory, the third the shared part of it, the sixth all
    // private memory that may be written.
    let mut numbers = text.split(|byte| *byte == b' ').skip(1).map(|digits| {
        let value = |sum: u64, digit: &u8| {
            sum.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0')))
        };
        digits.iter().fold(0, value)
    });
    let mut next = || numbers.next().unwrap_or(0);
    let (resident, shared, _, _, usable) = (next(), next(), next(), next(), next());
    let used = resident.saturating_sub(shared).wrapping_mul(PAGE_BYTES);
    MemoryUse { used, usable: usable.wrapping_mul(PAGE_BYTES) }
}

/// True if another process traces this thread.
pub fn is_traced() -> bool {
    const NAME: &[u8] = b"TracerPid:\t";
    let mut text = [0_u8; 512];
    let text = read(c"/proc/thread-self/status", &mut text);
    let number = text.windows(NAME.len() + 1).find_map(|bytes| bytes.strip_prefix(NAME));
    number.is_some_and(|first| first != b"0")
}

/// The start of a file of the kernel's; nothing if it cannot be read.
fn read<'a>(name: &CStr, text: &'a mut [u8]) -> &'a [u8] {
    // SAFETY: a name; the content and the description fit in the given places. Another thread of
    // the program may close all descriptors at this moment, and open a file of its own under this
    // number. `pread` does not move that file's position, and `fstatfs` keeps us from closing it.
    let read = unsafe {
        let file = libc::open(name.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        let read = libc::pread(file, text.as_mut_ptr().cast(), text.len(), 0);
        let mut system = MaybeUninit::<libc::statfs>::zeroed();
        if libc::fstatfs(file, system.as_mut_ptr()) == 0
            && system.assume_init().f_type == libc::PROC_SUPER_MAGIC
        {
            libc::close(file);
        }
        read
    };
    text.get(..read.max(0) as usize).unwrap_or_default()
}
