//! Tries in a child process to load the agent with the program's own allocator, while the program
//! is being loaded.
//!
//! The dynamic linker allocates and frees by that allocator, which may work only after some point
//! in `main`: GCL's counts blocks in tables that `main` makes. Without uzswap nothing calls the
//! allocator earlier, and our early call would end such a program. So a child loads the agent
//! first. The child has the same memory, and this process has one thread. So loading the agent has
//! the same outcome here as in the child.
//!
//! The kernel reports such a child to a tracer as a thread. A debugger then takes both memories for
//! one, and the child runs into breakpoints. So no tracer gets the child, and a traced program is
//! not tried: the agent would leave it alone.

use crate::{counted, loading};
use libc::{c_int, c_long, pid_t};
use std::ptr;

/// Milliseconds after which we assume that a child waits for ever.
const PATIENCE: u32 = 3000;

unsafe extern "C" {
    // The C library's `sigaction`, by a name that no library overrides.
    fn __sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int;
}

/// Loads the agent, and starts a thread, in a child. The error is the reason not to load the agent
/// in this process.
pub fn load() -> Result<(), &'static [u8]> {
    if counted::is_traced() {
        return Err(b"a debugger traces it, which would see our faults as its own");
    }
    // The child's end raises no signal, and only a wait that asks for such children (`__WALL`)
    // reaps it. The system call is made directly, since the C library would run its fork handlers.
    let without_signal = c_long::from(libc::CLONE_UNTRACED);
    // SAFETY: the call takes numbers and no addresses: the child continues right here.
    let child = unsafe { libc::syscall(libc::SYS_clone, without_signal, 0, 0, 0, 0) } as pid_t;
    match child {
        0 => be_child(),
        1.. if has_ended_well(child) => Ok(()),
        1.. => Err(b"its allocator does not work before the program begins"),
        _ => Err(b"no process can be started to try its allocator"),
    }
}

fn be_child() -> ! {
    // SAFETY: the child has memory and descriptors of its own, and no other thread. It ends by
    // `_exit` or by a signal with its default action, so no handler of the program's runs.
    unsafe {
        // No dump, no message.
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
        // The default action is zero, as is each other part of the description.
        let default: libc::sigaction = std::mem::zeroed();
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT] {
            __sigaction(signal, &raw const default, ptr::null_mut());
        }
        loading::try_out();
        libc::_exit(0)
    }
}

/// Waits for the child, and ends it if it takes too long.
fn has_ended_well(child: pid_t) -> bool {
    let mut status: c_int = 0;
    let mut wait = |how: c_int| {
        let no_usage = ptr::null_mut::<libc::rusage>();
        // SAFETY: the status is written; the child is this process's.
        match unsafe { libc::syscall(libc::SYS_wait4, child, &raw mut status, how, no_usage) } {
            0 => None,
            reaped => Some(reaped == c_long::from(child) && status == 0),
        }
    };
    for _ in 0..PATIENCE {
        if let Some(is_well) = wait(libc::WNOHANG | libc::__WALL) {
            return is_well;
        }
        loading::pause();
    }
    // SAFETY: the child is not reaped, so no other process has its number.
    unsafe { libc::syscall(libc::SYS_kill, child, libc::SIGKILL) };
    // The killed child ends now, however long that takes. A signal handler may end the wait early:
    // the child then stays a zombie.
    wait(libc::__WALL);
    false
}
