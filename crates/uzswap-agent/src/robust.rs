//! Robust locks. Each thread keeps a list of the locks that it holds. When the thread ends, the
//! kernel walks the list, outside of any system call, and informs the locks' next owners. At an
//! absent page the kernel stops, and informs no owner. So the agent gives the memory of these locks
//! back to the program first.

use crate::pins::{Pins, peek};
use crate::{Agent, layout, thread};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::fault_signals;

/// The kernel's `robust_list_head`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Head {
    first: u64,
    /// The distance from an entry of the list to its lock.
    distance: i64,
    /// A lock that is being taken or let go.
    pending: u64,
}

/// The kernel's own limit: a list may be a circle.
const LOCKS_MAX: usize = 2048;
/// An entry's first bit says that its lock lends priority.
const KIND: u64 = 1;

/// `set_robust_list`: notes where the calling thread's list begins. The kernel reads the list
/// later.
pub fn set(agent: &Agent, call: &Call) -> Outcome {
    thread::with(|thread| thread.robust.set(call.arguments[0]));
    layout::leave_in(agent, call, call.arguments[1])
}

/// Notes the list of a thread that is older than the take-over, once for each thread.
pub fn note() {
    if thread::with(|thread| thread.robust.get()) != 0 {
        return;
    }
    if let Some(head) = list_of(0) {
        thread::with(|thread| thread.robust.set(head));
    }
}

/// The start of a thread's list, 0 for none. Thread 0 is the calling thread. `None` if the kernel
/// does not report it.
pub fn list_of(thread: i32) -> Option<u64> {
    let (mut head, mut bytes) = (0u64, 0u64);
    let [head_at, bytes_at] = [&raw mut head as u64, &raw mut bytes as u64];
    let arguments = [thread as u64, head_at, bytes_at, 0, 0, 0];
    // SAFETY: the kernel writes both numbers.
    let told = unsafe { raw(libc::SYS_get_robust_list as u64, arguments) };
    (told == 0).then_some(head)
}

/// `exit`: brings the memory of the thread's locks back for good, and notes the status.
pub fn end(agent: &Agent, status: u64) -> Outcome {
    if !fault_signals::is_other_process() {
        crate::front().into_iter().for_each(|front| front.note_end(status));
    }
    let list = thread::with(|thread| thread.robust.get());
    let Some(head) = peek::<Head>(list) else { return Outcome::Bare };
    if head.pending != 0 {
        give_back(agent, head.pending, head.distance);
    }
    let mut entry = head.first;
    for _ in 0..LOCKS_MAX {
        if entry & !KIND == list {
            break;
        }
        give_back(agent, entry, head.distance);
        let Some(next) = peek(entry & !KIND) else { break };
        entry = next;
    }
    Outcome::Bare
}

/// Gives the memory of an entry and its lock back to the program.
fn give_back(agent: &Agent, entry: u64, distance: i64) {
    let entry = entry & !KIND;
    let lock = entry.wrapping_add_signed(distance);
    for (at, bytes) in [(entry, size_of::<u64>()), (lock, size_of::<u32>())] {
        // An entry need not be a valid address.
        let is_there = Pins::new(agent).pin(at, bytes as u64);
        if is_there {
            layout::give_back(agent, at, bytes as u64);
        }
    }
}
