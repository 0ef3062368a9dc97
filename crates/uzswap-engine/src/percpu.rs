//! State that each CPU has a copy of.
//!
//! Everything per-CPU in the engine goes through this type, so that a CPU that comes or goes can be
//! handled in one place. The CPU is a hint, not an exclusion: a thread may be moved between asking
//! and using, so slots are shared data (atomics, or a lock that is nearly always free).

use crate::sync::{Mutex, MutexGuard, lock, try_lock};
use crossbeam_utils::CachePadded;
use uzswap_sys::cpu;

/// One `T` for each possible CPU, each on cache lines of its own.
pub(crate) struct PerCpu<T> {
    slots: Box<[CachePadded<T>]>,
}

impl<T> PerCpu<T> {
    pub(crate) fn new(mut make: impl FnMut() -> T) -> Self {
        Self { slots: (0..cpu::possible()).map(|_| CachePadded::new(make())).collect() }
    }

    /// At most `slots` of them, where one is large: CPUs share them then. Errors: the first that
    /// could not be made.
    pub(crate) fn try_at_most<E>(
        slots: usize,
        make: impl FnMut(usize) -> Result<T, E>,
    ) -> Result<Self, E> {
        let made: Result<Vec<T>, E> = (0..cpu::possible().min(slots)).map(make).collect();
        Ok(Self { slots: made?.into_iter().map(CachePadded::new).collect() })
    }

    /// The slot of the CPU that runs the caller.
    pub(crate) fn here(&self) -> &T {
        &self.slots[self.index()]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.slots.iter().map(|slot| &**slot)
    }

    #[cfg(not(feature = "shuttle"))]
    fn index(&self) -> usize {
        let cpu = uzswap_sync::turns::number().unwrap_or_else(cpu::current);
        if cpu < self.slots.len() { cpu } else { cpu % self.slots.len() }
    }

    /// Under the model checker each thread has a CPU of its own, as far as there are any.
    #[cfg(feature = "shuttle")]
    fn index(&self) -> usize {
        usize::from(shuttle::current::me()) % self.slots.len()
    }
}

impl<T> PerCpu<Mutex<T>> {
    /// This CPU's slot, or any that is free when another thread was preempted in this one.
    pub(crate) fn lock_here(&self) -> MutexGuard<'_, T> {
        let here = self.index();
        (0..self.slots.len())
            .find_map(|step| try_lock(&self.slots[(here + step) % self.slots.len()]))
            .unwrap_or_else(|| lock(&self.slots[here]))
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn lock_here_takes_another_slot_when_this_one_is_held() {
        let slots = PerCpu { slots: (0..4).map(|_| CachePadded::new(Mutex::new(0))).collect() };
        let held: Vec<_> = (0..4).map(|_| slots.lock_here()).collect();
        assert_eq!(held.len(), 4);
    }
}
