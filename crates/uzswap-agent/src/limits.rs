//! Limits that the program sets. A fork needs descriptors and a file as large as the backing, and
//! raises the soft limits to the hard ones for that ([`uzswap_sys::process::Lifted`]). If the
//! program could lower such a hard limit, its forks would fail. So the kernel keeps the old hard
//! limit, and this file notes the program's. The agent sets the program's limit in the kernel
//! before the program executes another one, when the program is left alone, and when a privileged
//! program raises the limit.
//!
//! The notes change only under the layout's lock, which a fork holds.

use crate::pins::{Pins, make_until_it_sees, peek, pin_touched, poke};
use crate::{Agent, inside, layout};
use libc::{c_long, rlimit64};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use uzswap_calls::{Call, Outcome, raw};
use uzswap_sys::fault_signals;
use uzswap_sys::process::{Capability, has_capability};

/// A hard limit of the program's that the kernel does not have.
struct HardLimit {
    resource: u32,
    /// [`NONE`] if the kernel has the program's limit.
    noted: AtomicU64,
}

const NONE: u64 = libc::RLIM64_INFINITY;

const fn hard_limit(resource: u32) -> HardLimit {
    HardLimit { resource, noted: AtomicU64::new(NONE) }
}

static NOTED: [HardLimit; 2] = [hard_limit(libc::RLIMIT_FSIZE), hard_limit(libc::RLIMIT_NOFILE)];

/// `getrlimit`, `setrlimit`, `prlimit64`. They wait while a fork has raised limits for its child.
pub fn limit(agent: &Agent, call: &mut Call) -> Outcome {
    layout::await_complete();
    let _inside = inside();
    let _no_fork = layout::lock();
    let [first, second, third, fourth, ..] = call.arguments;
    let process = u64::from(std::process::id());
    let (process, resource, new, old) = match call.number as c_long {
        libc::SYS_getrlimit => (process, first, 0, second),
        libc::SYS_setrlimit => (process, first, second, 0),
        _ => (if first == 0 { process } else { first }, second, third, fourth),
    };
    let mut pins = Pins::new(agent);
    let arguments: &[usize] = match call.number as c_long {
        libc::SYS_prlimit64 => &[2, 3],
        _ => &[1],
    };
    pin_touched(&mut pins, call, arguments);
    // A child that borrows this memory has limits of its own.
    let is_own = process == u64::from(std::process::id()) && !fault_signals::is_other_process();
    match NOTED.iter().find(|one| is_own && one.resource == resource as u32) {
        Some(noted) => noted.answer(call, new, old),
        None => make_until_it_sees(agent, call, arguments),
    }
    drop(pins);
    Outcome::Done
}

impl HardLimit {
    /// The program's limit.
    fn now(&self) -> Option<rlimit64> {
        let kernels = kernels(self.resource)?;
        let hard = kernels.rlim_max.min(self.noted.load(Relaxed));
        Some(rlimit64 { rlim_cur: kernels.rlim_cur.min(hard), rlim_max: hard })
    }

    /// Answers a call of the program's.
    fn answer(&self, call: &mut Call, new: u64, old: u64) {
        let fault = -i64::from(libc::EFAULT);
        let Some(before) = self.now() else { return make(call) };
        call.result = 0;
        if new != 0 {
            call.result = match peek::<rlimit64>(new) {
                Some(wanted) => self.set(&before, wanted),
                None => fault,
            };
        }
        if call.result == 0 && old != 0 && !poke(old, &before) {
            call.result = fault;
        }
    }

    fn set(&self, before: &rlimit64, wanted: rlimit64) -> i64 {
        let Some(kernels) = kernels(self.resource) else { return -i64::from(libc::EPERM) };
        if wanted.rlim_cur > wanted.rlim_max {
            return -i64::from(libc::EINVAL);
        }
        if wanted.rlim_max > before.rlim_max {
            if !has_capability(Capability::SysResource) {
                return -i64::from(libc::EPERM);
            }
            // The kernel decides if the program may raise the limit.
            self.tell_kernel();
            let result = set_kernels(self.resource, wanted);
            if result == 0 {
                self.noted.store(NONE, Relaxed);
            }
            return result;
        }
        let result = set_kernels(self.resource, rlimit64 { rlim_max: kernels.rlim_max, ..wanted });
        if result == 0 {
            let is_kernels = wanted.rlim_max == kernels.rlim_max;
            self.noted.store(if is_kernels { NONE } else { wanted.rlim_max }, Relaxed);
        }
        result
    }

    /// Sets the kernel's hard limit to the program's.
    fn tell_kernel(&self) {
        if self.noted.load(Relaxed) != NONE
            && let Some(limit) = self.now()
        {
            set_kernels(self.resource, limit);
        }
    }
}

/// Gives the kernel the program's hard limits, in this process.
pub fn tell_kernel() {
    NOTED.iter().for_each(HardLimit::tell_kernel);
}

fn make(call: &mut Call) {
    // SAFETY: the program's own call.
    call.result = unsafe { raw(call.number, call.arguments) };
}

fn kernels(resource: u32) -> Option<rlimit64> {
    let mut limit = rlimit64 { rlim_cur: 0, rlim_max: 0 };
    let arguments = [0, resource.into(), 0, &raw mut limit as u64, 0, 0];
    // SAFETY: the kernel writes the limit.
    (unsafe { raw(libc::SYS_prlimit64 as u64, arguments) } == 0).then_some(limit)
}

fn set_kernels(resource: u32, limit: rlimit64) -> i64 {
    let arguments = [0, resource.into(), &raw const limit as u64, 0, 0, 0];
    // SAFETY: given the address of a limit.
    unsafe { raw(libc::SYS_prlimit64 as u64, arguments) }
}
