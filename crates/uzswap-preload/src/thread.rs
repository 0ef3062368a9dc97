//! Starts threads of this library.
//!
//! Their stacks lie where neither the kernel nor a program puts a mapping by itself. The C library
//! would map them in the highest hole, where the program may be about to map memory again.

use libc::{c_int, c_void, pthread_t};
use rustix::mm::{self, MapFlags, MprotectFlags, ProtFlags};
use std::mem::MaybeUninit;
use std::ptr;
use uzswap_tree::front::{PLACE, PLACE_UNIT, PLACE_UNITS, STACK};
use uzswap_tree::variables::variables_bytes;

/// The number of times that we may double a stack's size.
const DOUBLINGS: u32 = 6;

/// Bytes of the guard below a stack.
const GUARD: usize = 4 << 10;

/// The work of a thread.
pub type Body = extern "C" fn(*mut c_void) -> *mut c_void;

/// Starts a thread that is never joined. `false` if no thread could be started. The thread's stack
/// is never unmapped.
///
/// # Safety
/// The program's signals are blocked.
pub unsafe fn start_for_good(body: Body) -> bool {
    start(body, libc::PTHREAD_CREATE_DETACHED).is_some()
}

/// Runs a thread, waits for its end, and returns its result; `None` if no thread could be started.
///
/// # Safety
/// The program's signals are blocked.
pub unsafe fn run(body: Body) -> Option<*mut c_void> {
    let Started { thread, stack } = start(body, libc::PTHREAD_CREATE_JOINABLE)?;
    let mut result = ptr::null_mut();
    // SAFETY: started, and joined once.
    unsafe { libc::pthread_join(thread, &raw mut result) };
    stack.into_iter().for_each(GuardedStack::unmap);
    Some(result)
}

struct Started {
    thread: pthread_t,
    /// `None` for a stack of the C library's.
    stack: Option<GuardedStack>,
}

fn start(body: Body, is_detached: c_int) -> Option<Started> {
    let least = (STACK + variables_bytes()).next_multiple_of(GUARD);
    // The C library refuses a stack without space for the variables of all libraries.
    for larger in 0..DOUBLINGS {
        let bytes = least << larger;
        let stack = GuardedStack::map(bytes);
        match create(body, is_detached, stack.as_ref(), bytes) {
            Ok(thread) => return Some(Started { thread, stack }),
            Err(error) => {
                stack.into_iter().for_each(GuardedStack::unmap);
                if error != libc::EINVAL {
                    return None;
                }
            }
        }
    }
    None
}

/// Creates a thread on a stack of ours, or on a stack of the C library's of `bytes` bytes.
fn create(
    body: Body,
    is_detached: c_int,
    stack: Option<&GuardedStack>,
    bytes: usize,
) -> Result<pthread_t, c_int> {
    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::zeroed();
    let mut thread = MaybeUninit::<pthread_t>::zeroed();
    let attributes = attributes.as_mut_ptr();
    // SAFETY: both structures are written before they are used. Only the thread uses the stack
    // above the guard, which outlives it. The body's type gives its form.
    unsafe {
        libc::pthread_attr_init(attributes);
        libc::pthread_attr_setdetachstate(attributes, is_detached);
        match stack {
            Some(stack) => {
                libc::pthread_attr_setstack(attributes, stack.start.byte_add(GUARD), bytes)
            }
            None => libc::pthread_attr_setstacksize(attributes, bytes),
        };
        match libc::pthread_create(thread.as_mut_ptr(), attributes, body, ptr::null_mut()) {
            0 => Ok(thread.assume_init()),
            error => Err(error),
        }
    }
}

/// A guard, and a stack above it.
struct GuardedStack {
    start: *mut c_void,
    bytes: usize,
}

impl GuardedStack {
    /// Maps a stack of `bytes` bytes by the system call, because the program's `mmap` would count
    /// the stack.
    fn map(bytes: usize) -> Option<Self> {
        static CHANCE: u8 = 0;
        // The place is as random as the address of this library.
        let chance = (&raw const CHANCE as usize / GUARD) % PLACE_UNITS;
        let wanted = ptr::without_provenance_mut(PLACE + chance * PLACE_UNIT);
        let bytes = GUARD + bytes;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, where nothing is. Where something is, the kernel chooses.
        let start = unsafe { mm::mmap_anonymous(wanted, bytes, access, flags) }.ok()?;
        let stack = Self { start, bytes };
        // SAFETY: the first page of that mapping, which nothing uses.
        match unsafe { mm::mprotect(start, GUARD, MprotectFlags::empty()) } {
            Ok(()) => Some(stack),
            Err(_) => {
                stack.unmap();
                None
            }
        }
    }

    fn unmap(self) {
        // SAFETY: the stack is one mapping, and no thread runs on it any more. After an error the
        // stack would stay mapped.
        let _ = unsafe { mm::munmap(self.start, self.bytes) };
    }
}
