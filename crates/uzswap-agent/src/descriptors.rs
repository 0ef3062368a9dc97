//! Calls that give the calling thread its own table of descriptors (`unshare`, `close_range`).
//!
//! A fork replaces files of ours under their numbers, in the table of the thread that forks.
//! Another thread with its own table would then read and write the old files. So the agent leaves a
//! program with several threads alone before such a call. If the program has only one thread, that
//! thread keeps its table, which it shares only with our threads.

use crate::{AGENT, alone, processes, seccomp, stage};
use libc::c_long;
use std::time::{Duration, Instant};
use uzswap_calls::{Call, Outcome};
use uzswap_sys::fault_signals;

const APART: &str = "a thread of it has descriptors of its own (unshare, close_range)";
/// The time that threads of ours may take to begin or end, on a busy machine.
const PATIENCE: Duration = Duration::from_millis(500);

/// True if the calling thread, which asks for a table of its own, may keep its present table.
fn is_kept() -> bool {
    let is_taken_over = stage::is_taken_over();
    // A child of `vfork` has its own table already.
    if is_taken_over && (stage::is_left() || fault_signals::is_other_process()) {
        return false;
    }
    let deadline = Instant::now() + PATIENCE;
    let is_alone = loop {
        let is_alone = alone::count_by_list() == 1;
        if is_alone || Instant::now() >= deadline {
            break is_alone;
        }
    };
    if !is_alone && is_taken_over {
        AGENT.get().into_iter().for_each(|agent| seccomp::leave(agent, APART));
    }
    is_alone
}

/// `unshare`, `setns`: the kernel's answer.
pub extern "C" fn unshare(number: c_long, first: u64, second: u64) -> c_long {
    const FILES: u64 = libc::CLONE_FILES as u64;
    let is_kept = number == libc::SYS_unshare && first & FILES != 0 && is_kept();
    alone::call(number, if is_kept { first & !FILES } else { first }, second)
}

/// Prepares a replaced `unshare` or `setns`.
pub fn on_unshare(call: &mut Call) -> Outcome {
    let [first, second, ..] = call.arguments;
    call.result = unshare(call.number as c_long, first, second);
    Outcome::Done
}

/// `close_range`.
pub fn on_close_range(call: &mut Call) -> Outcome {
    const UNSHARE: u64 = 2;
    let given = call.arguments;
    if given[2] & UNSHARE != 0 && is_kept() {
        call.arguments[2] &= !UNSHARE;
    }
    let outcome = if stage::is_left() { Outcome::Bare } else { processes::close_range(call) };
    call.arguments = given;
    outcome
}
