//! Numbers in memory that outlives the process, and the points where a crash matters.
//!
//! Every store to such a number goes through [`DurableAtomic`]; a call of [`store`] precedes any
//! other store to that memory. With the feature `simulation`, which only tests switch on, a thread
//! can have a function called at each of these points. The function sees the memory exactly as a
//! process killed there would leave it, so a test tries all points.

use crate::sync::atomic::Ordering;

#[cfg(feature = "simulation")]
pub use on::*;

/// Marks the point before a store to this memory.
#[cfg(not(feature = "simulation"))]
#[inline(always)]
pub(crate) fn store() {}

/// An atomic number. Each store to it is such a point.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct DurableAtomic<A>(A);

/// The atomic types for [`DurableAtomic`].
pub(crate) trait AtomicNumber {
    type Value: Copy;
    fn of(value: Self::Value) -> Self;
    fn load(&self, order: Ordering) -> Self::Value;
    fn store(&self, value: Self::Value, order: Ordering);
    fn swap(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn fetch_add(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn fetch_sub(&self, value: Self::Value, order: Ordering) -> Self::Value;
    fn compare_exchange(
        &self,
        current: Self::Value,
        new: Self::Value,
        success: Ordering,
        failure: Ordering,
    ) -> Result<Self::Value, Self::Value>;
}

macro_rules! numbers {
    ($($atomic:ty: $value:ty),*) => {$(
        impl AtomicNumber for $atomic {
            type Value = $value;

            fn of(value: $value) -> Self {
                Self::new(value)
            }

            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }

            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }

            #[inline(always)]
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }

            #[inline(always)]
            fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                self.fetch_add(value, order)
            }

            #[inline(always)]
            fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                self.fetch_sub(value, order)
            }

            #[inline(always)]
            fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }
        }
    )*};
}

numbers! {
    std::sync::atomic::AtomicU8: u8,
    std::sync::atomic::AtomicU16: u16,
    std::sync::atomic::AtomicU32: u32,
    std::sync::atomic::AtomicU64: u64
}
#[cfg(feature = "shuttle")]
numbers! { crate::sync::atomic::AtomicU32: u32, crate::sync::atomic::AtomicU64: u64 }

impl<A: AtomicNumber> DurableAtomic<A> {
    pub(crate) fn new(value: A::Value) -> Self {
        Self(A::of(value))
    }

    #[inline(always)]
    pub(crate) fn load(&self, order: Ordering) -> A::Value {
        self.0.load(order)
    }

    #[inline(always)]
    pub(crate) fn store(&self, value: A::Value, order: Ordering) {
        store();
        self.0.store(value, order);
    }

    #[inline(always)]
    pub(crate) fn swap(&self, value: A::Value, order: Ordering) -> A::Value {
        store();
        self.0.swap(value, order)
    }

    #[inline(always)]
    pub(crate) fn fetch_add(&self, value: A::Value, order: Ordering) -> A::Value {
        store();
        self.0.fetch_add(value, order)
    }

    #[inline(always)]
    pub(crate) fn fetch_sub(&self, value: A::Value, order: Ordering) -> A::Value {
        store();
        self.0.fetch_sub(value, order)
    }

    #[inline(always)]
    pub(crate) fn compare_exchange(
        &self,
        current: A::Value,
        new: A::Value,
        success: Ordering,
        failure: Ordering,
    ) -> Result<A::Value, A::Value> {
        store();
        self.0.compare_exchange(current, new, success, failure)
    }

    /// Stores the result of `next` for the number. Tries again if another thread has changed the
    /// number. Stops when `next` returns `None`.
    pub(crate) fn fetch_update(
        &self,
        success: Ordering,
        failure: Ordering,
        next: impl Fn(A::Value) -> Option<A::Value>,
    ) -> Result<A::Value, A::Value> {
        let mut current = self.load(failure);
        while let Some(new) = next(current) {
            match self.compare_exchange(current, new, success, failure) {
                Ok(before) => return Ok(before),
                Err(now) => current = now,
            }
        }
        Err(current)
    }
}

#[cfg(feature = "simulation")]
mod on {
    use std::cell::Cell;

    thread_local! {
        // Allocators may read these, so they have no destructors.
        static STORE: Cell<Option<fn()>> = const { Cell::new(None) };
        static TRANSITION: Cell<Option<fn(&'static str)>> = const { Cell::new(None) };
    }

    /// Sets functions for the calling thread. `stores` is called before each store, `transitions`
    /// with the name of each transition of an entry.
    pub fn watch(stores: Option<fn()>, transitions: Option<fn(&'static str)>) {
        STORE.set(stores);
        TRANSITION.set(transitions);
    }

    pub(crate) fn store() {
        if let Some(call) = STORE.get() {
            call();
        }
    }

    pub(crate) fn note(transition: &'static str) {
        if let Some(call) = TRANSITION.get() {
            call(transition);
        }
    }
}
