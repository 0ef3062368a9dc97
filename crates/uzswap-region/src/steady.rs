//! Forks, as the rest of a pager knows them: the generation of this process, and the lock that
//! keeps a pager as it is while the process forks ([`crate::fork`], [`crate::inherit`]).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The number of forks between this process and the first that used a pager.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Locked for writing while this process is forked.
static STEADY: RwLock<()> = RwLock::new(());

pub(crate) fn generation() -> u32 {
    GENERATION.load(Relaxed)
}

/// The fork that made this process was counted right after the system call. The handlers of
/// `pthread_atfork` run later, and those of the program, which run before ours, may use memory.
static IS_COUNTED: AtomicBool = AtomicBool::new(false);

/// Handlers are about to run before a fork.
pub(crate) fn about_to_fork() {
    IS_COUNTED.store(false, Relaxed);
}

/// This process is a child, right after the system call that made it.
pub(crate) fn forked_by_call() {
    GENERATION.fetch_add(1, Relaxed);
    IS_COUNTED.store(true, Relaxed);
}

/// This process is a child, in a handler of `pthread_atfork`.
pub(crate) fn forked() {
    if !IS_COUNTED.swap(false, Relaxed) {
        GENERATION.fetch_add(1, Relaxed);
    }
}

/// Held while a pager whose regions are copied takes pages out, or its regions change. Its holder
/// waits only for threads that serve faults, and for other holders.
pub(crate) fn steady() -> RwLockReadGuard<'static, ()> {
    STEADY.read().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`steady`], for a thread that must not wait. `None` while a fork is under way or about to
/// begin.
pub(crate) fn try_steady() -> Option<RwLockReadGuard<'static, ()>> {
    STEADY.try_read().ok()
}

/// Waits until no thread holds [`steady`], and keeps all threads from it.
pub(crate) fn unsteady() -> RwLockWriteGuard<'static, ()> {
    STEADY.write().unwrap_or_else(PoisonError::into_inner)
}
