//! State of each CPU.
//!
//! All state per CPU in the engine uses this type, and is made and freed with the CPU
//! (`cache::hotplug`). The CPU is a hint and excludes no other thread. A thread may migrate after
//! it has read the CPU's number, and may run on a CPU that is not up yet. Each thread therefore
//! locks its slot, nearly always without waiting. On a CPU that is not up, it uses another CPU's
//! slot.

use crate::sync::atomic::{AtomicUsize, Ordering::*};
use crate::sync::{Mutex, MutexGuard, lock, try_lock};
use crossbeam_utils::CachePadded;
use std::ops::{Deref, DerefMut};
use uzswap_sys::cpu;

/// One `T` for each CPU that is up.
pub(crate) struct PerCpu<T> {
    slots: Box<[CpuSlot<T>]>,
    /// For each possible CPU, the slot that threads on it use.
    route: Box<[AtomicUsize]>,
    /// Locked while a CPU comes up or goes.
    up: Mutex<Up>,
}

/// For each CPU, true if it is up.
struct Up(Box<[bool]>);

/// Each slot has cache lines of its own. It is empty while none of its CPUs is up.
struct CpuSlot<T>(CachePadded<Mutex<Option<Box<T>>>>);

/// The slot of this CPU or of another, locked for the caller.
pub(crate) struct Here<'a, T>(MutexGuard<'a, Option<Box<T>>>);

impl<T> Deref for Here<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_deref().expect("made of a slot that is in use")
    }
}

impl<T> DerefMut for Here<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_deref_mut().expect("made of a slot that is in use")
    }
}

impl<T> PerCpu<T> {
    /// No CPU is up. With fewer `slots` than possible CPUs, CPUs share them.
    pub(crate) fn new(slots: usize) -> Self {
        let cpus = cpu::possible();
        let slot = || CpuSlot(CachePadded::new(Mutex::new(None)));
        Self {
            slots: (0..slots.min(cpus)).map(|_| slot()).collect(),
            route: (0..cpus).map(|_| AtomicUsize::new(0)).collect(),
            up: Mutex::new(Up(vec![false; cpus].into())),
        }
    }

    /// Brings a CPU up: threads on it use its slot. `make` fills the slot, unless another CPU has.
    pub(crate) fn start<E>(
        &self,
        cpu: usize,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<(), E> {
        if self.slots.is_empty() {
            return Ok(());
        }
        let Up(up) = &mut *lock(&self.up);
        let slot = cpu % self.slots.len();
        if !self.is_in_use(up, slot) {
            let made = Box::new(make()?);
            *lock(&self.slots[slot].0) = Some(made);
        }
        up[cpu] = true;
        self.set_routes(up);
        Ok(())
    }

    /// Takes a CPU down: threads on it use the slot of another CPU. If no other CPU uses this slot,
    /// `drain` empties it under its lock, and its value is dropped.
    pub(crate) fn stop(&self, cpu: usize, drain: impl FnOnce(&mut T)) {
        if self.slots.is_empty() {
            return;
        }
        let Up(up) = &mut *lock(&self.up);
        up[cpu] = false;
        self.set_routes(up);
        let slot = cpu % self.slots.len();
        if !self.is_in_use(up, slot) {
            let mut held = lock(&self.slots[slot].0);
            if let Some(value) = &mut *held {
                drain(value);
            }
            let value = held.take();
            drop(held);
            drop(value);
        }
    }

    /// True if a CPU of the slot is up.
    fn is_in_use(&self, up: &[bool], slot: usize) -> bool {
        up.iter().skip(slot).step_by(self.slots.len()).any(|up| *up)
    }

    /// Routes each CPU to its own slot if that is in use, otherwise to the next slot in use.
    fn set_routes(&self, up: &[bool]) {
        let count = self.slots.len();
        for (cpu, route) in self.route.iter().enumerate() {
            let in_use = (0..count).map(|step| (cpu + step) % count);
            if let Some(slot) = in_use.into_iter().find(|slot| self.is_in_use(up, *slot)) {
                route.store(slot, Release);
            }
        }
    }

    /// The number of slots in use.
    pub(crate) fn count(&self) -> usize {
        let Up(up) = &*lock(&self.up);
        (0..self.slots.len()).filter(|slot| self.is_in_use(up, *slot)).count()
    }

    /// This CPU's slot, or any free slot while a preempted thread holds this CPU's. At least one
    /// CPU must be up.
    pub(crate) fn lock_here(&self) -> Here<'_, T> {
        loop {
            let here = self.route[self.number()].load(Acquire);
            // A slot is in use if the CPU of its number uses it.
            let in_use = |slot: &usize| self.route[*slot].load(Relaxed) == *slot;
            let slots = (0..self.slots.len()).map(|step| (here + step) % self.slots.len());
            if let Some(free) = slots.filter(in_use).find_map(|slot| self.slots[slot].try_here()) {
                return free;
            }
            if let Some(held) = self.slots[here].here() {
                return held;
            }
            // The slot's CPU has left, so there is another route now.
        }
    }

    #[cfg(not(feature = "shuttle"))]
    fn number(&self) -> usize {
        uzswap_sync::turns::number().unwrap_or_else(cpu::current) % self.route.len()
    }

    /// Under the model checker each thread has a CPU of its own, while there are any.
    #[cfg(feature = "shuttle")]
    fn number(&self) -> usize {
        usize::from(shuttle::current::me()) % self.route.len()
    }

    /// Every slot in use, locked in turn.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Here<'_, T>> {
        self.slots.iter().filter_map(CpuSlot::here)
    }

    /// The slots that are not locked.
    pub(crate) fn iter_free(&self) -> impl Iterator<Item = Here<'_, T>> {
        self.slots.iter().filter_map(CpuSlot::try_here)
    }

    /// True if one slot satisfies `is`, or may satisfy it because it is locked.
    pub(crate) fn any_may(&self, is: impl Fn(&T) -> bool) -> bool {
        self.slots
            .iter()
            .any(|slot| try_lock(&slot.0).is_none_or(|held| held.as_deref().is_some_and(&is)))
    }

    /// Gives a value made by `make` to every slot that `lacks` it, by `give`. Storing and loading
    /// threads wait for the slot's lock. So this makes the value, and drops the value that `give`
    /// leaves, without the lock. `None` if a value could not be made.
    pub(crate) fn provide<M>(
        &self,
        lacks: impl Fn(&T) -> bool,
        mut make: impl FnMut() -> Option<M>,
        give: impl Fn(&mut T, &mut M),
    ) -> Option<()> {
        for slot in &self.slots {
            if slot.here().is_some_and(|here| lacks(&here)) {
                let mut made = make()?;
                if let Some(mut here) = slot.here() {
                    give(&mut here, &mut made);
                }
            }
        }
        Some(())
    }
}

impl<T> CpuSlot<T> {
    fn here(&self) -> Option<Here<'_, T>> {
        Some(lock(&self.0)).filter(|held| held.is_some()).map(Here)
    }

    fn try_here(&self) -> Option<Here<'_, T>> {
        try_lock(&self.0).filter(|held| held.is_some()).map(Here)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::convert::Infallible;

    /// For four CPUs, all down.
    fn of_four<T>(slots: usize) -> PerCpu<T> {
        let slot = || CpuSlot(CachePadded::new(Mutex::new(None)));
        PerCpu {
            slots: (0..slots).map(|_| slot()).collect(),
            route: (0..4).map(|_| AtomicUsize::new(0)).collect(),
            up: Mutex::new(Up(vec![false; 4].into())),
        }
    }

    fn routes<T>(cpus: &PerCpu<T>) -> Vec<usize> {
        cpus.route.iter().map(|route| route.load(Relaxed)).collect()
    }

    #[test]
    fn lock_here_takes_another_slot_when_this_one_is_held() {
        let cpus = of_four(4);
        (0..4).for_each(|cpu| cpus.start(cpu, || Ok::<_, Infallible>(cpu)).unwrap());
        let held: Vec<_> = (0..4).map(|_| cpus.lock_here()).collect();
        let mut numbers: Vec<usize> = held.iter().map(|here| **here).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3]);
    }

    #[test]
    fn threads_of_a_cpu_that_is_down_use_the_next_that_is_up() {
        let cpus = of_four(4);
        for cpu in [1, 3] {
            cpus.start(cpu, || Ok::<_, Infallible>(cpu)).unwrap();
        }
        assert_eq!((routes(&cpus), cpus.count()), (vec![1, 1, 3, 3], 2));
        let mut drained = Vec::new();
        cpus.stop(3, |value| drained.push(*value));
        assert_eq!((routes(&cpus), cpus.count(), drained), (vec![1; 4], 1, vec![3]));
        let failed = cpus.start(0, || Err("no memory"));
        assert_eq!((failed, routes(&cpus)), (Err("no memory"), vec![1; 4]), "nothing changed");
    }

    #[test]
    fn a_slot_that_cpus_share_is_kept_until_the_last_of_them_goes() {
        let cpus = of_four(2);
        for cpu in [0, 1, 2] {
            cpus.start(cpu, || Ok::<_, Infallible>(cpu)).unwrap();
        }
        assert_eq!((routes(&cpus), cpus.count()), (vec![0, 1, 0, 1], 2));
        cpus.stop(0, |_| panic!("CPU 2 uses it"));
        cpus.stop(2, |value| assert_eq!(*value, 0));
        assert_eq!((routes(&cpus), cpus.count()), (vec![1; 4], 1));
    }
}
