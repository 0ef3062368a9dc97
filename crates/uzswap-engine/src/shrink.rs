//! How much is held, and what is done about it: limits, hysteresis, reserves, compaction.
//!
//! The engine starts no thread. A front end has one that calls [`Cache::maintain`] whenever
//! [`Cache::wait_for_work`] returns; it does ahead of need what a store would otherwise wait for.
//! On a machine with several nodes there may be one more for each, which keeps that node's memory
//! and is kept waiting by nothing else: [`Cache::maintain_node`]. A store that finds the pool at
//! its limit all the same makes room itself: oldest pages first, so that the pool never holds older
//! pages than the backing.

use crate::backing::slots::Slots;
use crate::cache::{Cache, Reject};
use crate::pool::{CLASSES, SECTION_BYTES};
use crate::stats::Counter::PoolLimitHit;
use crate::sync::Backoff;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Memory kept faulted in and free on a node, so that stores need none from the kernel: a MiB for
/// each of its `cpus`, what they can fill with objects in the few milliseconds that bringing a
/// section on line takes, and two at least. No more than a 32nd of the pool, but the 64
/// incompressible pages that a region hands over at a time.
fn reserve_bytes(pool_bytes_max: u64, cpus: usize) -> usize {
    (pool_bytes_max / 32).clamp(256 << 10, (cpus.max(2) as u64) << 20) as usize
}

/// Looks that a store takes at what the maintaining thread makes ready, each after a longer pause,
/// before it does without: some 0.4 s. A section of the pool takes a millisecond, but the thread
/// that brings it on line may wait for a CPU: with ten busy programs on two, 10 ms were not enough.
/// Where the machine has no memory, or there is no such thread, nobody waits.
const LOOKS: u32 = 4000;

/// Looks for memory on the caller's node, where other nodes have some: some 10 ms. A thread that
/// runs at once makes a section in one. A page that is far away costs less than a longer wait.
const NODE_LOOKS: u32 = 170;

/// Compaction runs when it could free more than this share of the pool, and this many bytes.
const SLACK_DIVISOR: usize = 32;
const SLACK_BYTES: usize = 256 << 10;

/// What is kept free ahead of need, and who is told when it is not.
pub(crate) struct Room {
    /// Who maintains all that nobody else does.
    attendant: Attendant,
    /// By node, who maintains its memory, if that is another thread.
    of_nodes: Box<[Attendant]>,
    pool_bytes_max: u64,
    /// Bytes of the pool kept free ahead of need, on each node.
    reserve_bytes: AtomicUsize,
    /// The pool hit its limit, could not be written back, and is not yet below
    /// `accept_threshold_percent`.
    refusing: AtomicBool,
}

/// A thread that maintains.
struct Attendant {
    doorbell: Doorbell,
    /// The machine had no memory for the reserve when last asked.
    starved: AtomicBool,
}

impl Attendant {
    fn new() -> Self {
        Self { doorbell: Doorbell::new(), starved: AtomicBool::new(false) }
    }

    /// Whether there is one.
    fn is_there(&self) -> bool {
        self.doorbell.attended.load(Relaxed)
    }
}

impl Room {
    /// For a pool of at most `pool_bytes_max`, on so many nodes.
    pub(crate) fn new(pool_bytes_max: u64, nodes: usize) -> Self {
        Self {
            attendant: Attendant::new(),
            of_nodes: (0..nodes).map(|_| Attendant::new()).collect(),
            pool_bytes_max,
            reserve_bytes: AtomicUsize::new(reserve_bytes(pool_bytes_max, 1)),
            refusing: AtomicBool::new(false),
        }
    }

    /// Who maintains the memory of a node.
    fn attendant_of(&self, node: usize) -> &Attendant {
        let own = &self.of_nodes[node];
        if own.is_there() { own } else { &self.attendant }
    }

    /// Whether that is a thread of its own.
    fn has_own_attendant(&self, node: usize) -> bool {
        self.of_nodes[node].is_there()
    }

    pub(crate) fn reserve_bytes(&self) -> usize {
        self.reserve_bytes.load(Relaxed)
    }

    /// So many CPUs are up for each node. What is lacking then, or too much, is made ready or given
    /// back by who maintains.
    pub(crate) fn fit(&self, cpus: usize) {
        self.reserve_bytes.store(reserve_bytes(self.pool_bytes_max, cpus), Relaxed);
    }
}

/// Wakes the thread that maintains.
struct Doorbell {
    rung: AtomicBool,
    /// Somebody has waited for it: there is a thread that maintains.
    attended: AtomicBool,
    // The standard library's, because a condition needs one. Nothing is switched while it is held.
    lock: std::sync::Mutex<()>,
    #[cfg(not(feature = "shuttle"))]
    condition: std::sync::Condvar,
}

impl Doorbell {
    const UNPOISONED: &str = "nothing panics while holding it";

    fn new() -> Self {
        Self {
            rung: AtomicBool::new(false),
            attended: AtomicBool::new(false),
            lock: std::sync::Mutex::new(()),
            #[cfg(not(feature = "shuttle"))]
            condition: std::sync::Condvar::new(),
        }
    }

    /// Costs one load when it rings already.
    fn ring(&self) {
        if !self.rung.load(Relaxed) && !self.rung.swap(true, Relaxed) {
            let _held = self.lock.lock().expect(Self::UNPOISONED);
            #[cfg(not(feature = "shuttle"))]
            self.condition.notify_one();
        }
    }

    #[cfg(not(feature = "shuttle"))]
    fn wait(&self, timeout: std::time::Duration) {
        self.attended.store(true, Relaxed);
        let held = self.lock.lock().expect(Self::UNPOISONED);
        let wait = self.condition.wait_timeout_while(held, timeout, |()| !self.rung.load(Relaxed));
        drop(wait.expect(Self::UNPOISONED));
        self.rung.store(false, Relaxed);
    }
}

impl Cache {
    /// Waits until there is something to maintain, or for `timeout`. From the first call on a store
    /// that lacks what [`Self::maintain`] makes ready waits a moment for who calls both.
    #[cfg(not(feature = "shuttle"))]
    pub fn wait_for_work(&self, timeout: std::time::Duration) {
        self.room.attendant.doorbell.wait(timeout);
    }

    /// Nodes that a thread each may maintain, beside the one that maintains all else: those with
    /// processors, if there are several.
    pub fn nodes_to_keep(&self) -> Vec<usize> {
        let served: Vec<usize> = self.pool.served().collect();
        if served.len() > 1 { served } else { Vec::new() }
    }

    /// Waits until there is something to maintain on a node, or for `timeout`. From the first call
    /// on the node's memory is left to who calls this and [`Self::maintain_node`].
    #[cfg(not(feature = "shuttle"))]
    pub fn wait_for_work_on(&self, node: usize, timeout: std::time::Duration) {
        self.room.of_nodes[node].doorbell.wait(timeout);
    }

    /// Makes a node's memory ready that stores take from, and gives back what is too much. Errors:
    /// as those of [`Self::maintain`].
    pub fn maintain_node(&self, node: usize) -> io::Result<()> {
        let is_it = |other| other == node;
        let provisioned = self.pool.provision(self.room.reserve_bytes(), is_it);
        self.room.of_nodes[node].starved.store(provisioned.is_err(), Relaxed);
        self.pool.give_back(self.room.reserve_bytes(), is_it);
        provisioned
    }

    /// Rings for all threads that maintain.
    pub fn ring(&self) {
        self.room.attendant.doorbell.ring();
        let of_nodes = self.room.of_nodes.iter().filter(|attendant| attendant.is_there());
        of_nodes.for_each(|attendant| attendant.doorbell.ring());
    }

    /// Whether the thread that waits in [`Self::wait_for_work`] is wanted: somebody has rung since.
    pub(crate) fn is_rung(&self) -> bool {
        self.room.attendant.doorbell.rung.load(Relaxed)
    }

    /// Tops up what stores take from, writes back what is above the threshold, compacts, trains a
    /// dictionary when it is time, and gives free memory back. Errors: no memory for the reserve
    /// (stores go on while it lasts, then write back or are rejected).
    pub fn maintain(&self) -> io::Result<()> {
        let provisioned = self.prepare();
        self.tend_dictionary();
        self.pool.give_back(self.room.reserve_bytes(), |node| !self.room.has_own_attendant(node));
        self.slots.drain_idle();
        // A device that cannot be told goes on as if every block were in use.
        self.slots.discard_empty(|offset, bytes| drop(self.backing.discard(offset, bytes)));
        self.index.reclaim();
        provisioned
    }

    /// The part of [`Self::maintain`] that stores may come to wait for, without a look at every
    /// table: for who stores many pages and is itself the thread that maintains.
    pub fn prepare(&self) -> io::Result<()> {
        let provisioned = self.provision();
        let accept = self.attributes.pool_bytes_accept() as usize;
        // What fails is noted, and met again.
        self.write_back_to(accept, || drop(self.provision()));
        self.compact();
        provisioned
    }

    /// Writes back until the pool is `bytes` smaller than now, or nothing is left to write; the
    /// bytes won. For when the machine needs memory.
    pub fn shrink(&self, bytes: usize) -> usize {
        let before = self.pool.mapped_bytes();
        // No memory for the pool, which is to become smaller.
        self.write_back_to(self.pool.bytes().saturating_sub(bytes), || self.slots.provision());
        self.compact();
        self.pool.give_back(self.room.reserve_bytes(), |_| true);
        before.saturating_sub(self.pool.mapped_bytes())
    }

    /// Bytes that objects may take in a pool that, with its reserve, takes at most `bytes`: it
    /// grows by sections.
    pub fn pool_bytes_in(&self, bytes: usize) -> usize {
        (bytes / SECTION_BYTES * SECTION_BYTES).saturating_sub(self.room.reserve_bytes())
    }

    /// Bytes that objects take in the pool: `pool_total_size`.
    pub fn pool_bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// Allocates whatever stores may need next. Errors: not all of it could be had; nobody waits
    /// for it until it can.
    pub(crate) fn provision(&self) -> io::Result<()> {
        let provisioned = self.provision_in_turn();
        self.room.attendant.starved.store(provisioned.is_err(), Relaxed);
        provisioned
    }

    /// What no store does without comes first.
    fn provision_in_turn(&self) -> io::Result<()> {
        self.index.provision()?;
        self.slots.provision();
        self.pool
            .provision(self.room.reserve_bytes(), |node| !self.room.has_own_attendant(node))?;
        self.shares.provision(&self.index)?;
        self.candidates.provision(self.pool.mapped_bytes())?;
        Ok(())
    }

    /// Rings when the reserve is half used or the pool is above its threshold. A few loads.
    pub(crate) fn ring_if_low(&self) {
        let low = self.pool.free_bytes_here() < self.room.reserve_bytes() / 2
            && self.pool.mapped_bytes() < self.pool.limit() + SECTION_BYTES
            || !self.pool.has_descriptors(self.room.reserve_bytes() / 2);
        let high = self.pool.bytes() as u64 > self.attributes.pool_bytes_accept()
            && self.writeback_works();
        if low {
            self.room.attendant_of(self.pool.node_here()).doorbell.ring();
        }
        if high {
            self.room.attendant.doorbell.ring();
        }
    }

    /// Whether the pool hit its limit and has not come down to the threshold since.
    pub(crate) fn is_refusing(&self) -> bool {
        if !self.room.refusing.load(Relaxed) {
            return false;
        }
        let still = self.pool.bytes() as u64 > self.attributes.pool_bytes_accept();
        self.room.refusing.store(still, Relaxed);
        still
    }

    /// Makes room for at least one object, or says why there is none.
    pub(crate) fn make_room(&self) -> Result<(), Reject> {
        let at_limit = self.pool.bytes() + SECTION_BYTES / 64 > self.pool.limit();
        if at_limit {
            self.counters.increment(PoolLimitHit);
            self.room.attendant.doorbell.ring();
        }
        // Either may be what lacks: where one descriptor stood for eight frames, eight pages that
        // nothing compresses need eight.
        let enough = self.room.reserve_bytes() / 4;
        let topped_up = || {
            let is_ready = self.pool.free_bytes() >= enough && self.pool.has_descriptors(enough);
            is_ready.then_some(())
        };
        if !at_limit && self.wait_for(topped_up).is_some() {
            return Ok(());
        }
        let before = self.pool.bytes();
        if self.compact() > 0 && self.pool.bytes() < before {
            return Ok(());
        }
        if self.write_back_one() {
            self.compact();
            return Ok(());
        }
        // It may have come since the last look: the writer's lock may have been waited for.
        if !at_limit && topped_up().is_some() {
            return Ok(());
        }
        if at_limit {
            self.room.refusing.store(true, Relaxed);
            Err(Reject::ReclaimFail)
        } else {
            Err(Reject::AllocFail)
        }
    }

    /// Rings for the threads that maintain, and waits a moment for them to make ready what `take`
    /// takes.
    pub(crate) fn wait_for<T>(&self, take: impl Fn() -> Option<T>) -> Option<T> {
        let attendants = [&self.room.attendant, self.room.attendant_of(self.pool.node_here())];
        attendants.iter().for_each(|attendant| attendant.doorbell.ring());
        if !attendants[0].is_there() {
            return None;
        }
        let mut backoff = Backoff::new();
        let is_starved = || attendants.iter().any(|attendant| attendant.starved.load(Relaxed));
        let mut looks = (0..LOOKS).take_while(|_| !is_starved());
        looks.find_map(|_| {
            backoff.wait();
            take()
        })
    }

    /// Waits a moment for memory on the node of the caller's processor, which has none ready, and
    /// for which more is to come. If none has come, nobody else waits for it before it does.
    pub(crate) fn wait_for_node(&self) {
        let attendant = self.room.attendant_of(self.pool.node_here());
        attendant.doorbell.ring();
        let mut backoff = Backoff::new();
        let has_come = attendant.is_there()
            && (0..NODE_LOOKS).any(|_| {
                backoff.wait();
                self.pool.free_bytes_here() >= SECTION_BYTES / 4 || !self.pool.comes_here()
            });
        if !has_come {
            self.pool.note_late();
        }
    }

    /// Takes space on the backing. Where there is some, and it cannot be taken without allocating,
    /// waits for the thread that maintains, which does that.
    pub(crate) fn take_space<T>(&self, take: impl Fn(&Slots) -> Option<T>) -> Option<T> {
        let none_left = || self.slots.is_short().then_some(None);
        let look = || take(&self.slots).map(Some).or_else(none_left);
        look().or_else(|| self.wait_for(look)).flatten()
    }

    /// Writes back what the pool has above `bytes`, and no more than it has now: stores may keep it
    /// there, and wait for other things that this thread does.
    pub(crate) fn write_back_to(&self, bytes: usize, top_up: impl Fn()) {
        if !self.writeback_works() || self.pool.bytes() <= bytes {
            return;
        }
        let above = |in_flight| {
            let gone = self.pool.slack_bytes() + in_flight;
            self.pool.bytes().saturating_sub(gone).saturating_sub(bytes)
        };
        self.write_back(above(0), |in_flight| above(in_flight) == 0, top_up);
    }

    /// Compacts while it is worth it; the objects moved.
    pub(crate) fn compact(&self) -> usize {
        let worth = SLACK_BYTES.min(self.pool.bytes() / 4).max(self.pool.bytes() / SLACK_DIVISOR);
        if self.pool.slack_bytes() <= worth {
            return 0;
        }
        self.compact_all()
    }

    /// Moves the objects of each class together; how many.
    pub(crate) fn compact_all(&self) -> usize {
        let relocate = |owner, from, to, copy: &dyn Fn()| self.relocate(owner, from, to, copy);
        // The largest classes first: most bytes won for an object moved.
        (0..CLASSES)
            .rev()
            .map(|class| std::iter::from_fn(|| self.pool.compact(class, &relocate)).sum::<usize>())
            .sum()
    }

    /// Makes changed attributes take effect.
    pub(crate) fn apply_attributes(&self) {
        self.pool.set_limit(self.attributes.pool_bytes_max() as usize);
        self.equip_all();
        self.ring();
    }
}
