//! Pointers to leaves, and the rule that keeps them valid.
//!
//! A leaf is made in a `Box` and passed to [`LeafRef::publish`]. The thread that marked it dead
//! passes it to [`LeafRef::retire`] when no level links to it any more. The leaf then stays in
//! memory until each thread that was pinned has unpinned. So a [`LeafRef`] lives as long as a pin.

#![expect(
    unsafe_code,
    reason = "links that other threads may follow: a leaf is freed two epochs after the last link to it went"
)]

use crate::leaf::Leaf;
use crossbeam_epoch::Guard;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};
use uzswap_sync::atomic::{AtomicPtr, Ordering::*};

/// A link from leaf to leaf: written under the lock of its leaf, read by any thread.
pub(crate) struct Link(AtomicPtr<Leaf>);

impl Link {
    pub(crate) fn none() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn get<'g>(&self, _pinned: &'g Guard) -> Option<LeafRef<'g>> {
        NonNull::new(self.0.load(Acquire)).map(|leaf| LeafRef { leaf, pinned: PhantomData })
    }

    pub(crate) fn set(&self, to: Option<LeafRef<'_>>) {
        self.0.store(to.map_or(ptr::null_mut(), |to| to.leaf.as_ptr()), Release);
    }

    pub(crate) fn copy(&self, from: &Link) {
        self.0.store(from.0.load(Acquire), Release);
    }
}

/// A leaf that stays in memory for `'g`, while the thread is pinned.
#[derive(Clone, Copy)]
pub(crate) struct LeafRef<'g> {
    leaf: NonNull<Leaf>,
    pinned: PhantomData<&'g Leaf>,
}

impl<'g> LeafRef<'g> {
    pub(crate) fn publish(leaf: Box<Leaf>, _pinned: &'g Guard) -> Self {
        Self { leaf: NonNull::from(Box::leak(leaf)), pinned: PhantomData }
    }

    /// Frees the leaf when no thread can use it any more.
    ///
    /// # Safety
    /// No reachable link points to the leaf any more, none ever will again, and this is called
    /// once.
    pub(crate) unsafe fn retire(self, pinned: &Guard) {
        let leaf = self.leaf;
        // SAFETY: the caller promises that no thread can reach the leaf from now on. So all threads
        // that may use it were pinned before, and the epochs run this after they have unpinned.
        unsafe { pinned.defer_unchecked(move || free(leaf)) };
    }
}

#[cfg(not(feature = "shuttle"))]
fn free(leaf: NonNull<Leaf>) {
    // SAFETY: the leaf came from a `Box` in `publish`, and `retire` is called once for each leaf.
    drop(unsafe { Box::from_raw(leaf.as_ptr()) });
}

/// Under the model checker the memory stays and is marked: `deref` detects a use after free.
#[cfg(feature = "shuttle")]
fn free(leaf: NonNull<Leaf>) {
    // SAFETY: the memory is never freed.
    unsafe { leaf.as_ref() }.freed.store(true, std::sync::atomic::Ordering::SeqCst);
}

impl Deref for LeafRef<'_> {
    type Target = Leaf;

    fn deref(&self) -> &Leaf {
        // SAFETY: the pointer came from `publish`, or from a link while the thread was pinned, as
        // it still is. A leaf is freed only after `retire`, and then not before the thread is
        // unpinned.
        let leaf = unsafe { self.leaf.as_ref() };
        #[cfg(feature = "shuttle")]
        assert!(!leaf.freed.load(std::sync::atomic::Ordering::SeqCst), "a leaf used after its end");
        leaf
    }
}

impl PartialEq for LeafRef<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.leaf == other.leaf
    }
}

/// The first leaf of a list, which always exists. Dropping this frees all leaves of the list.
pub(crate) struct Head(NonNull<Leaf>);

// SAFETY: a leaf consists of atomics, and any thread may free it.
unsafe impl Send for Head {}
// SAFETY: as above.
unsafe impl Sync for Head {}

impl Head {
    pub(crate) fn new(leaf: Box<Leaf>) -> Self {
        Self(NonNull::from(Box::leak(leaf)))
    }

    pub(crate) fn get<'g>(&'g self, _pinned: &'g Guard) -> LeafRef<'g> {
        LeafRef { leaf: self.0, pinned: PhantomData }
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        let mut next = self.0.as_ptr();
        while !next.is_null() {
            // SAFETY: no other thread has the list any more, so all of its leaves are on the lowest
            // level, each once, and none was retired. Each came from a `Box`.
            let leaf = unsafe { Box::from_raw(next) };
            next = leaf.next.0.load(Relaxed);
        }
    }
}
