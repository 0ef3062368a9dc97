//! A trunk's memory: made whole, reached by pointer, freed when no thread can have it any more.
//!
//! A pointer in the directory comes from [`new`]. It is read only by pinned threads, and
//! [`retire`]d by the one thread that took it out, after which no thread that pins itself finds it.

use super::{Entry, TRUNK_ENTRIES};
use crate::table::boxed;
use crossbeam_epoch::{Atomic, Guard, Shared};
use std::collections::TryReserveError;

/// Entries of one trunk.
#[cfg(not(feature = "shuttle"))]
pub(super) type Trunk = [Entry; TRUNK_ENTRIES];

/// Under the model checker the memory stays, and is marked, so that a use of it is seen.
#[cfg(feature = "shuttle")]
pub(super) struct Trunk {
    entries: Box<[Entry]>,
    freed: std::sync::atomic::AtomicBool,
}

/// A trunk of absent entries. Errors: no memory.
pub(super) fn new() -> Result<Box<Trunk>, TryReserveError> {
    let entries = boxed(TRUNK_ENTRIES, Entry::new)?;
    #[cfg(not(feature = "shuttle"))]
    return Ok(entries.try_into().ok().expect("it has as many entries as a trunk"));
    #[cfg(feature = "shuttle")]
    return Ok(Box::new(Trunk { entries, freed: false.into() }));
}

pub(super) fn entries(trunk: &Trunk) -> &[Entry; TRUNK_ENTRIES] {
    #[cfg(not(feature = "shuttle"))]
    return trunk;
    #[cfg(feature = "shuttle")]
    {
        let freed = trunk.freed.load(std::sync::atomic::Ordering::SeqCst);
        assert!(!freed, "a trunk used after its end");
        trunk.entries[..].try_into().expect("it has as many entries as a trunk")
    }
}

/// The trunk that a pointer of the directory leads to.
pub(super) fn get<'g>(at: Shared<'g, Trunk>) -> Option<&'g Trunk> {
    // SAFETY: the pointer was read from the directory by a thread that is pinned for `'g`, and what
    // the directory leads to is freed only by `retire`, not before such threads have let go. A
    // trunk consists of atomics, so shared references are all there ever are.
    unsafe { at.as_ref() }
}

/// Frees a trunk that the caller, and nobody else, has taken out of the directory.
pub(super) fn retire(at: Shared<'_, Trunk>, pinned: &Guard) {
    #[cfg(not(feature = "shuttle"))]
    // SAFETY: the directory does not lead to it any more, each entry was made gone, so nobody will
    // put it back; threads that may have it were pinned before now.
    unsafe {
        pinned.defer_destroy(at);
    }
    #[cfg(feature = "shuttle")]
    {
        let at = at.as_raw() as usize;
        let mark = move || {
            // SAFETY: the memory is never freed.
            let trunk = unsafe { &*(at as *const Trunk) };
            trunk.freed.store(true, std::sync::atomic::Ordering::SeqCst);
        };
        pinned.defer(mark);
    }
}

/// Frees the trunk of a directory that nobody else has any more.
pub(super) fn drop_in(slot: &mut Atomic<Trunk>) {
    let slot = std::mem::replace(slot, Atomic::null());
    // SAFETY: the directory is being dropped, so no other thread reads it; a trunk in it has not
    // been retired, which takes it out first.
    drop(unsafe { slot.try_into_owned() });
}
