//! Processes that are forked from a process with regions.
//!
//! A child must not read zeros where its parent has data. With [`OnFork::Absent`] the child
//! inherits nothing: if it touches a region, it gets SIGSEGV and a message with the reason. With
//! [`OnFork::PrivateCopy`] it has ordinary memory in place of regions ([`crate::copy`]), or the
//! same signal if no copy could be made. The child's copies of our handles do nothing.
//!
//! During a fork with copies, no thread evicts pages, maps or unmaps regions: threads that do so
//! hold [`steady::steady`]. Threads still serve faults, and may exceed the budget, so that no
//! thread waits on which the fork may depend.

use crate::copy::{Copy, FOLDER};
use crate::core::Inner;
use crate::core::registry;
use crate::fault::{ErrorNumber, say};
use crate::on_fork::OnFork;
use crate::steady;
use rustix::io::Errno;
use std::cell::Cell;
use std::io;
use std::mem;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, RwLockWriteGuard, Weak};
use uzswap_sys::fault_signals::Blocked;
use uzswap_sys::uffd::Fault;
use uzswap_sys::{fault_signals, process};

/// Pagers whose regions are copied. Locked before [`steady`].
static COPIED: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

/// In a child, the reason why the child has no copy, as an error number, or 0.
static WHY: AtomicI32 = AtomicI32::new(0);

thread_local! {
    /// The locks that the calling thread holds while it forks.
    static HELD: Cell<Option<ForkLocks>> = const { Cell::new(None) };
}

struct ForkLocks {
    copied: MutexGuard<'static, Vec<Weak<Inner>>>,
    steady: RwLockWriteGuard<'static, ()>,
    pagers: Vec<Arc<Inner>>,
    copy: io::Result<Option<Copy>>,
}

/// Registers our handlers of forks.
pub(crate) fn watch() -> io::Result<()> {
    static WATCH: Once = Once::new();
    let mut result = Ok(());
    WATCH.call_once(|| result = process::at_fork(Some(before), Some(in_parent), Some(in_child)));
    result
}

/// Makes children get copies of a pager's regions.
pub(crate) fn copy_regions_of(pager: &Arc<Inner>) {
    let mut copied = COPIED.lock().unwrap_or_else(PoisonError::into_inner);
    copied.retain(|pager| pager.strong_count() > 0);
    copied.push(Arc::downgrade(pager));
}

/// Runs before a fork, in the thread that forks.
extern "C" fn before() {
    steady::about_to_fork();
    let _blocked = Blocked::all();
    let copied = COPIED.lock().unwrap_or_else(PoisonError::into_inner);
    let pagers = copied.iter().filter_map(Weak::upgrade);
    let pagers: Vec<_> = pagers.filter(|pager| pager.check_process().is_ok()).collect();
    if pagers.is_empty() {
        return;
    }
    // A holder of `steady` may wait for a fault, and that fault for room that reclaim would make.
    pagers.iter().for_each(|pager| pager.budget.set_lifted(true));
    let steady = steady::unsteady();
    let copy = Copy::make(&pagers);
    let mut held = Some(ForkLocks { copied, steady, pagers, copy });
    // An error means that the thread is ending, and that its child will have no copy.
    let _ = HELD.try_with(|place| place.set(held.take()));
    held.into_iter().for_each(ForkLocks::end);
}

fn take_held() -> Option<ForkLocks> {
    HELD.try_with(Cell::take).ok().flatten()
}

/// Runs in the parent after `fork`, whether `fork` succeeded or failed.
extern "C" fn in_parent() {
    let _blocked = Blocked::all();
    take_held().into_iter().for_each(ForkLocks::end);
}

impl ForkLocks {
    fn end(self) {
        if let Ok(Some(copy)) = &self.copy {
            copy.keep_apart();
        }
        drop(self.steady);
        self.pagers.iter().for_each(|pager| pager.budget.set_lifted(false));
        // The next fork may begin.
        drop(self.copied);
    }
}

/// Runs in the child before `fork` returns. Allocates nothing, and takes only locks that its thread
/// holds already.
extern "C" fn in_child() {
    steady::forked();
    fault_signals::forked();
    // Without the handler there is no message, but the child dies all the same.
    let _ = fault_signals::on_segv(say_why);
    let Some(ForkLocks { copied, steady, pagers, copy }) = take_held() else {
        return WHY.store(Errno::CANCELED.raw_os_error(), Relaxed);
    };
    let placed = match &copy {
        Ok(Some(copy)) => copy.put_in_place().map_err(|error| number(&error)),
        Ok(None) => Ok(()),
        Err(error) => Err(number(error)),
    };
    WHY.store(placed.err().unwrap_or(0), Relaxed);
    // The pagers are the parent's. The child drops none of their parts.
    mem::forget((pagers, copy));
    drop((steady, copied));
}

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

fn say_why(fault: Fault) -> bool {
    let Some(space) = registry::find(fault.address) else { return false };
    if space.pager.generation() == steady::generation() || space.is_copy() {
        return false;
    }
    match (space.pager.on_fork, WHY.load(Relaxed)) {
        (OnFork::Absent, _) => say(format_args!(
            "this process is a fork and touched a region of its parent, which it does not inherit; \
             start it anew (spawn), copy what it needs before the fork, or have regions copied"
        )),
        // The region was unmapped, which is the program's own error.
        (OnFork::PrivateCopy, 0) | (OnFork::Whole, _) => {}
        (OnFork::PrivateCopy, why) => say(format_args!(
            "this process is a fork and touched a region of its parent, which could not be copied: \
             {}; make room in {FOLDER}, raise the limits (ulimit -a), or start it anew (spawn)",
            ErrorNumber(&io::Error::from_raw_os_error(why))
        )),
    }
    false
}
