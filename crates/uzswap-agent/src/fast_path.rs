//! The fast path of a replaced call. It handles most calls of a server, since their buffers are
//! present. The processor's whole state is not saved for it ([`uzswap_calls::Looks`]), which makes
//! it fast. So the code here, and all code that it calls, may use neither the C library nor vector
//! registers that an x86-64 may lack. `tests/tests/in_process/fast_path.rs` checks the machine
//! code.

use crate::masks::EVENT;
use crate::pins::used_of_futex;
use crate::{own_files, stage, thread};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use uzswap_calls::{Call, CallFrame, Outcome, older, raw};
use uzswap_region::{Pager, is_pager_thread};
use uzswap_sys::fault_signals;

/// A longer buffer is left to the slow path.
const BYTES_MAX: u64 = 64 << 10;

/// An absent page may have a guard in its place: see [`crate::own_files::read_pagemap`].
pub static HAS_GUARDS: AtomicBool = AtomicBool::new(false);

/// Makes the call if all of its memory is present.
pub fn on_call(call: &mut Call) -> Outcome {
    let Some([one, other]) = buffers(call) else { return Outcome::Undecided };
    if stage::is_left() {
        // Threads may share one block.
        return Outcome::Bare;
    }
    if is_pager_thread() || fault_signals::is_on_own_stack() || !stage::is_complete() {
        return Outcome::Undecided;
    }
    thread::with(|thread| {
        if thread.is_inside.get() || !thread.is_armed.get() {
            return Outcome::Undecided;
        }
        let Some(one) = Pager::pin_present(one) else { return Outcome::Undecided };
        let Some(other) = Pager::pin_present(other) else {
            Pager::unpin(one);
            return Outcome::Undecided;
        };
        // The call is made as by the program, so that it can begin again after a signal of ours.
        if call.number as libc::c_long == libc::SYS_futex && one.is_empty() && other.is_empty() {
            return Outcome::Bare;
        }
        let frame = CallFrame::of(call);
        // Another call of this thread's is not over yet, or a handler has jumped out of it.
        if !thread.pin(frame as usize, &one, &other) {
            Pager::unpin(other);
            Pager::unpin(one);
            return Outcome::Undecided;
        }
        let before = thread.call.replace(frame);
        // SAFETY: the program's own call.
        call.result = unsafe { raw(call.number, call.arguments) };
        thread.call.set(before);
        thread.unpin(frame as usize);
        if call.result == -i64::from(libc::EFAULT) {
            // Another thread may have changed the mapping, or a handler has made calls on another
            // stack, which unpinned the pages. The slow path may make the call again.
            return Outcome::Undecided;
        }
        Outcome::Done
    })
}

/// The buffers of a call, if the call is frequent and its buffers are small.
fn buffers(call: &Call) -> Option<[Range<usize>; 2]> {
    let [a, b, c, d, e, _] = call.arguments;
    let (one, other) = match call.number as libc::c_long {
        // The call may read the kernel's list of pages.
        libc::SYS_pread64 if (c | d) % 8 == 0 && HAS_GUARDS.load(Relaxed) => return None,
        libc::SYS_read | libc::SYS_write | libc::SYS_pread64 | libc::SYS_pwrite64 => {
            if own_files::may_be_of_process() {
                return None;
            }
            ((b, c), (0, 0))
        }
        libc::SYS_recvfrom | libc::SYS_sendto if e == 0 => ((b, c), (0, 0)),
        older::SYS_epoll_wait => ((b, c.checked_mul(EVENT)?), (0, 0)),
        libc::SYS_epoll_pwait if e == 0 => ((b, c.checked_mul(EVENT)?), (0, 0)),
        libc::SYS_ppoll if d == 0 => ((a, b.checked_mul(8)?), (c, if c == 0 { 0 } else { 16 })),
        older::SYS_poll => ((a, b.checked_mul(8)?), (0, 0)),
        libc::SYS_futex => match used_of_futex(b) {
            [0] => ((a, 4), (0, 0)),
            [0, 3] => ((a, 4), (d, if d == 0 { 0 } else { 16 })),
            _ => return None,
        },
        _ => return None,
    };
    Some([range(one)?, range(other)?])
}

fn range((at, bytes): (u64, u64)) -> Option<Range<usize>> {
    let end = at.checked_add(bytes)?;
    (bytes <= BYTES_MAX).then_some(at as usize..end as usize)
}
