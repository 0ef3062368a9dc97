//! A lock that ends the process when it is poisoned, and can be profiled.

use crate::profile::{HeldLock, Waiting};
use std::any::type_name;
use std::ops::{Deref, DerefMut};

#[cfg(feature = "shuttle")]
use shuttle::sync as imp;
#[cfg(not(feature = "shuttle"))]
use std::sync as imp;

/// A lock, taken with [`lock`] or [`try_lock`]. A profile names it after the type that it protects.
#[derive(Debug, Default)]
pub struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    /// An unlocked lock.
    pub fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }
}

/// Access to the value of a lock. Dropping the guard unlocks.
#[derive(Debug)]
pub struct MutexGuard<'a, T> {
    guard: imp::MutexGuard<'a, T>,
    // Dropped after the guard, so that the hold time includes unlocking.
    _held: HeldLock,
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

const POISONED: &str = "a thread panicked while it held this lock; its data cannot be trusted";

/// Locks. A poisoned lock is a bug that ends the process: a thread panicked half way through a
/// change, and the process could hand out wrong bytes.
#[cfg_attr(feature = "simulation", track_caller)]
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    if crate::turns::number().is_some() {
        return lock_in_turn(mutex);
    }
    if crate::profile::is_on()
        && let Some(guard) = try_lock(mutex)
    {
        return guard;
    }
    let waiting = Waiting::start(type_name::<T>());
    let guard = mutex.0.lock().expect(POISONED);
    waiting.end();
    held(mutex, guard)
}

/// In a simulation a thread must not block: it would keep the turn that the lock's holder needs.
#[cfg_attr(feature = "simulation", track_caller)]
fn lock_in_turn<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    crate::turns::step();
    loop {
        match try_lock(mutex) {
            Some(guard) => return guard,
            None => crate::turns::wait_for_lock(),
        }
    }
}

/// Locks if the lock is free; `None` if not.
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.0.try_lock() {
        Ok(guard) => Some(held(mutex, guard)),
        Err(imp::TryLockError::WouldBlock) => None,
        Err(imp::TryLockError::Poisoned(_)) => panic!("{POISONED}"),
    }
}

fn held<'a, T>(mutex: &Mutex<T>, guard: imp::MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    let at = std::ptr::from_ref(mutex).addr();
    MutexGuard { guard, _held: HeldLock::start(type_name::<T>(), at) }
}
