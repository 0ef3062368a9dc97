//! Faults at fetches of instructions from memory that is not executable.

use libc::c_int;
use std::sync::OnceLock;

/// Runs as a handler of the program's (SA_SIGINFO).
pub type RunsFirst = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// How a thread continues after such a fault.
#[derive(Debug, Clone, Copy)]
pub enum OnFetch {
    /// The fault is the program's.
    Pass,
    /// The thread fetches the instruction again.
    Again,
    /// The thread first runs this function, which may allocate and wait, and then fetches the
    /// instruction again.
    Run(RunsFirst),
}

static FETCH: OnceLock<fn(usize) -> OnFetch> = OnceLock::new();

/// Calls `fetch` with the address of each fetch of an instruction that raises SIGSEGV. Called once
/// in a process, after [`super::on_segv`] and [`super::deliver_by`].
pub fn on_fetch(fetch: fn(usize) -> OnFetch) {
    // Only the first call has an effect.
    let _ = FETCH.set(fetch);
}

/// Returns true if the thread is to fetch the instruction again, and the function that it runs
/// before that.
pub(super) fn serve(signal: c_int, address: usize) -> (bool, Option<RunsFirst>) {
    match FETCH.get().filter(|_| signal == libc::SIGSEGV).map(|fetch| fetch(address)) {
        None | Some(OnFetch::Pass) => (false, None),
        Some(OnFetch::Again) => (true, None),
        Some(OnFetch::Run(first)) => (true, Some(first)),
    }
}
