//! Processes forked from one with regions.
//!
//! A region is not inherited: its pages would be zeros in the child, silently. The child gets
//! SIGSEGV where it touches one, with a message that says why. Its copies of our handles do
//! nothing.

use crate::registry;
use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use uzswap_sys::uffd::Fault;
use uzswap_sys::{bus, process};

/// How many forks away this process is from the first that used a pager.
static GENERATION: AtomicU32 = AtomicU32::new(0);

pub(crate) fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

/// Has children know that they are.
pub(crate) fn watch() -> io::Result<()> {
    static WATCH: Once = Once::new();
    let mut result = Ok(());
    WATCH.call_once(|| result = process::at_fork(None, None, Some(in_child)));
    result
}

/// Runs in the child before `fork` returns: allocates nothing and takes no lock.
extern "C" fn in_child() {
    GENERATION.fetch_add(1, Relaxed);
    // Without the handler there is no message; the child dies all the same.
    let _ = bus::on_segv(say_why);
}

fn say_why(fault: Fault) -> bool {
    if let Some(space) = registry::find(fault.address)
        && space.pager.generation != generation()
    {
        let text = b"uzswap: this process is a fork and touched a region of its parent, which it \
            does not inherit; start it anew (spawn) or copy what it needs before the fork\n";
        // There is nobody else to tell.
        let _ = rustix::io::write(rustix::stdio::stderr(), text);
    }
    false
}
