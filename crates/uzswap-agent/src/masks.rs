//! Calls that block signals while they run, or wait for signals. Our signals stay unblocked, and no
//! call that waits for signals gets ours.

use crate::pins::{Pins, make, make_once, peek, pin_touched};
use crate::signals::never_blocked;
use crate::{Agent, layout};
use libc::c_long;
use uzswap_calls::{Call, Outcome, older};

/// Bytes of the kernel's signal set.
const SET: u64 = 8;
/// Bytes of one of epoll's events: 12 on x86-64, 16 elsewhere.
pub const EVENT: u64 = size_of::<libc::epoll_event>() as u64;

/// The place of a call's argument that is a set of signals, if it has one.
pub fn argument(number: c_long) -> Option<usize> {
    Some(match number {
        libc::SYS_rt_sigsuspend | libc::SYS_rt_sigtimedwait => 0,
        older::SYS_signalfd | libc::SYS_signalfd4 => 1,
        libc::SYS_ppoll => 3,
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => 4,
        _ => return None,
    })
}

/// Makes a call without our signals in the set at that argument.
pub fn without_ours(agent: &Agent, call: &mut Call, at: usize) -> Outcome {
    layout::await_complete();
    let mut pins = Pins::new(agent);
    pin_others(&mut pins, call);
    pins.pin(call.arguments[at], SET);
    // The kernel refuses memory that cannot be read.
    let set = peek::<u64>(call.arguments[at]).map(|set| set & !never_blocked());
    let given = call.arguments[at];
    if let Some(set) = &set {
        call.arguments[at] = std::ptr::from_ref(set) as u64;
    }
    if call.number as c_long == libc::SYS_rt_sigtimedwait {
        // A call that answers `EFAULT` has already taken the signal.
        make_once(call);
    } else {
        make(agent, call);
    }
    call.arguments[at] = given;
    Outcome::Done
}

/// Pins the memory of these calls other than the mask.
fn pin_others(pins: &mut Pins<'_>, call: &Call) {
    let [first, second, third, ..] = call.arguments;
    match call.number as c_long {
        libc::SYS_rt_sigtimedwait => {
            pin_touched(pins, call, &[1, 2]);
        }
        libc::SYS_ppoll => {
            pins.pin(first, second.saturating_mul(8));
            pin_touched(pins, call, &[2]);
        }
        libc::SYS_epoll_pwait => {
            pins.pin(second, third.saturating_mul(EVENT));
        }
        libc::SYS_epoll_pwait2 => {
            pins.pin(second, third.saturating_mul(EVENT));
            pin_touched(pins, call, &[3]);
        }
        _ => {}
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct MaskArgument {
    set: u64,
    bytes: u64,
}

pub fn select(agent: &Agent, call: &mut Call) -> Outcome {
    layout::await_complete();
    let mut pins = Pins::new(agent);
    pin_touched(&mut pins, call, &[1, 2, 3, 4, 5]);
    let at = call.arguments[5];
    let given = peek::<MaskArgument>(at);
    if let Some(given) = given {
        pins.pin(given.set, SET);
    }
    let set = given.and_then(|given| peek::<u64>(given.set)).map(|set| set & !never_blocked());
    let changed = set.as_ref().map(|set| MaskArgument {
        set: std::ptr::from_ref(set) as u64,
        bytes: given.map_or(SET, |given| given.bytes),
    });
    if let Some(changed) = &changed {
        call.arguments[5] = std::ptr::from_ref(changed) as u64;
    }
    make(agent, call);
    call.arguments[5] = at;
    Outcome::Done
}
