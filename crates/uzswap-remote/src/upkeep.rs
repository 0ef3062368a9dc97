//! The background thread of a store: all work that no program waits for.

use crate::store::{Keeper, Put, lock};
use crate::table::{LOCAL, REMOTE, number};
use crate::tiers::{Inner, Tiers, UpkeepState};
use std::sync::atomic::Ordering::*;
use std::time::{Duration, Instant};
use uzswap_engine::backing::SEGMENT_BYTES;

/// How often the thread checks its lines when it has no work.
const IDLE: Duration = Duration::from_millis(500);
/// How long the lease lasts. The thread renews it three times in this time.
const LEASE: Duration = Duration::from_secs(60);
/// The pause after a write that the store did not take.
const PAUSE: Duration = Duration::from_millis(500);

impl Tiers {
    /// Works until `is_stopping` returns true. [`Self::ring`] makes it check.
    pub fn run(&self, is_stopping: impl Fn() -> bool) {
        while !is_stopping() {
            if !self.0.work() {
                self.0.store.wait(IDLE);
            }
        }
    }

    /// Removes the segments of a cache when its process ends. From then on, a read of a page that
    /// only the store had never returns: an error could change the process's exit status.
    pub fn clear(&self) {
        if self.0.process.load(Relaxed) != std::process::id() {
            return;
        }
        self.0.is_ending.store(true, SeqCst);
        let mut keeper = self.0.store.keeper();
        if self.0.store.is_up() {
            let mut numbers = std::mem::take(&mut *lock(&self.0.dead));
            numbers.extend(self.0.table.remote_numbers());
            self.0.store.remove(&mut keeper, &numbers);
            self.0.store.end_life(&mut keeper);
        }
    }
}

impl Inner {
    /// One round. True if there may be more to do immediately.
    fn work(&self) -> bool {
        let mut work = lock(&self.work);
        let mut keeper = self.store.keeper();
        self.store.tend(&mut keeper);
        if !self.store.is_up() {
            return false;
        }
        if work.shown.is_none_or(|shown| shown.elapsed() > LEASE / 3) {
            work.shown = Some(Instant::now());
            self.store.show_life(&mut keeper, LEASE);
        }
        self.remove_dead(&mut keeper);
        if work.renewed.elapsed() > self.store.address().ttl / 2
            && self.store.renew(&mut keeper, &self.table.remote_numbers())
        {
            work.renewed = Instant::now();
        }
        let goes_on = self.copy_one(&mut work, &mut keeper);
        if self.has_failed.load(Relaxed)
            && self.store.is_fit()
            && work.paused.is_none()
            && (self.local.bytes() == 0 || self.has_room())
        {
            self.has_failed.store(false, Relaxed);
            self.has_recovered.store(true, Relaxed);
        }
        goes_on
    }

    fn remove_dead(&self, keeper: &mut Keeper) {
        let mut dead = lock(&self.dead);
        if !dead.is_empty() {
            let numbers: Vec<u64> = dead.drain(..).collect();
            drop(dead);
            self.store.remove(keeper, &numbers);
        }
    }

    /// Copies the oldest segment that only the disk has to the store. True if there may be more to
    /// copy.
    fn copy_one(&self, work: &mut UpkeepState, keeper: &mut Keeper) -> bool {
        if work.paused.is_some_and(|paused| paused.elapsed() < PAUSE) || !self.store.is_fit() {
            return false;
        }
        work.paused = None;
        let Some(segment) = self.table.oldest(LOCAL) else { return false };
        let (old, length) = (self.table.get(segment), self.table.length(segment));
        let is_within = self.bytes.load(Relaxed) + length as u64 <= self.bytes_max;
        if !is_within {
            return false;
        }
        let offset = u64::from(self.table.slot(segment)) * SEGMENT_BYTES as u64;
        let read = self.local.read(offset, &mut work.buffer);
        if self.table.get(segment) != old {
            return true;
        }
        if read.is_err() {
            // The error is reported when a page is read.
            work.paused = Some(Instant::now());
            return false;
        }
        match self.store.put(keeper, number(old), &work.buffer[..length], self.copies) {
            Put::Done(copies) if copies >= self.copies => {
                self.bytes.fetch_add(length as u64, Relaxed);
                if !self.table.change(segment, old, old | REMOTE) {
                    self.drop_remote(old | REMOTE, length);
                }
                self.room.notify_one();
                true
            }
            _ => {
                work.paused = Some(Instant::now());
                false
            }
        }
    }
}
