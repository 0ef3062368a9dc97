//! A trunk's memory: made whole, reached by pointer, freed when no thread can have it any more.
//!
//! A pointer in the directory comes from [`new`]. It is read only by pinned threads, and
//! [`retire`]d by the one thread that took it out, after which no thread that pins itself finds it.
//! The thread that maintains frees it.

use super::{Entry, TRUNK_ENTRIES};
use crate::table::boxed;
use crossbeam_epoch::{Atomic, Guard, Shared};
use std::collections::TryReserveError;
use std::sync::Arc;
#[cfg(not(feature = "shuttle"))]
use std::sync::atomic::{AtomicU64, Ordering::*};

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

/// Trunks that no thread can have any more, to be freed: linked by their first entries' second
/// words. Any thread that pins itself may find out that one is among them, and a thread that serves
/// is not to free memory: the allocator's lock may be held by who waits for some.
#[cfg(not(feature = "shuttle"))]
#[derive(Default)]
pub(super) struct Retired(AtomicU64);

#[cfg(not(feature = "shuttle"))]
impl Retired {
    fn push(&self, trunk: Box<Trunk>) {
        let trunk = Box::leak(trunk);
        let at = std::ptr::from_mut(trunk).expose_provenance() as u64;
        let link = |first| {
            trunk[0].aux().store(first, Relaxed);
            Some(at)
        };
        // Release: who frees them follows the links. It takes all at once, so no link is stale.
        let _ = self.0.fetch_update(Release, Relaxed, link);
    }

    /// Frees them.
    pub(super) fn free(&self) {
        let mut next = self.0.swap(0, Acquire);
        while next != 0 {
            let at = std::ptr::with_exposed_provenance_mut::<Trunk>(next as usize);
            // SAFETY: `push` made it of a box, and nobody else has taken it off the list.
            let trunk = unsafe { Box::from_raw(at) };
            next = trunk[0].aux().load(Relaxed);
        }
    }
}

#[cfg(not(feature = "shuttle"))]
impl Drop for Retired {
    fn drop(&mut self) {
        self.free();
    }
}

/// Under the model checker no memory is freed.
#[cfg(feature = "shuttle")]
#[derive(Default)]
pub(super) struct Retired;

#[cfg(feature = "shuttle")]
impl Retired {
    pub(super) fn free(&self) {}
}

/// Puts a trunk that the caller, and nobody else, has taken out of the directory among the retired
/// ones, as soon as no thread can have it.
pub(super) fn retire(at: Shared<'_, Trunk>, retired: &Arc<Retired>, pinned: &Guard) {
    #[cfg(not(feature = "shuttle"))]
    {
        let (at, retired) = (at.as_raw().expose_provenance(), retired.clone());
        let push = move || {
            let at = std::ptr::with_exposed_provenance_mut::<Trunk>(at);
            // SAFETY: the directory does not lead to it any more, each entry was made gone, so
            // nobody will put it back; threads that may have it were pinned before it was retired.
            // It was made as a box.
            retired.push(unsafe { Box::from_raw(at) });
        };
        // Three words, so it takes no memory of its own. It owns or shares all that it uses.
        pinned.defer(push);
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
        let _ = retired;
    }
}

/// Frees the trunk of a directory that nobody else has any more.
pub(super) fn drop_in(slot: &mut Atomic<Trunk>) {
    let slot = std::mem::replace(slot, Atomic::null());
    // SAFETY: the directory is being dropped, so no other thread reads it; a trunk in it has not
    // been retired, which takes it out first.
    drop(unsafe { slot.try_into_owned() });
}
