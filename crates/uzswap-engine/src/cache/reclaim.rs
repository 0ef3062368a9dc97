//! Limits of the pool, hysteresis, reserves and compaction.
//!
//! The engine starts no thread. A front end has a maintaining thread, which calls
//! [`Cache::maintain`] whenever [`Cache::wait_for_work`] returns. This thread works ahead of need
//! so that stores do not wait. On a machine with several nodes there may be one more thread for
//! each node. Such a thread only calls [`Cache::maintain_node`]. A store that finds the pool at its
//! limit makes room itself. Such a store writes back the oldest pages first, so that the pool never
//! has older pages than the backing.

use super::{Cache, Reject};
use crate::backing::slots::Slots;
use crate::counters::Counter::PoolLimitHit;
use crate::pool::{CLASSES, SECTION_BYTES};
use crate::sync::Backoff;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst, fence};

/// Free memory on each node, already faulted in, so that stores need none from the kernel. The
/// reserve is a MiB for each of the node's `cpus`, and two at least. CPUs fill it with objects in
/// the few milliseconds that it takes to bring a section on line. The reserve is at most a 32nd of
/// the pool, but at least the 64 incompressible pages that a region stores at a time.
fn reserve_bytes(pool_bytes_max: u64, cpus: usize) -> usize {
    (pool_bytes_max / 32).clamp(256 << 10, (cpus.max(2) as u64) << 20) as usize
}

/// Checks that a store makes for memory from the maintaining thread, each after a longer pause,
/// before the store fails: some 0.4 s. The thread makes a section of the pool in a millisecond, but
/// may wait for a CPU: with ten busy programs on two CPUs, 10 ms were not enough. If the machine
/// has no memory, or there is no maintaining thread, no store waits.
const LOOKS: u32 = 4000;

/// The number of checks for memory on the caller's node while other nodes have memory: some 10 ms.
/// A thread that has a CPU makes a section in 1 ms. A remote page costs less than a longer wait.
const NODE_LOOKS: u32 = 170;

/// Compaction runs when it could free more than this share of the pool, and this many bytes.
const SLACK_DIVISOR: usize = 96;
const SLACK_BYTES: usize = 256 << 10;

/// Free memory kept ahead of need, and the threads that are woken when it is short.
pub(crate) struct Reserve {
    /// The thread that maintains everything that no node's thread maintains.
    maintainer: Maintainer,
    /// For each node, the thread that maintains its memory, if it has one.
    of_nodes: Box<[Maintainer]>,
    pool_bytes_max: u64,
    /// Bytes of the pool kept free on each node.
    reserve_bytes: AtomicUsize,
    /// The pool hit its limit, writeback did not help, and the pool is not yet below
    /// `accept_threshold_percent`.
    refusing: AtomicBool,
}

/// A maintaining thread.
struct Maintainer {
    doorbell: Doorbell,
    /// The machine had no memory for the reserve when last asked.
    starved: AtomicBool,
}

impl Maintainer {
    fn new() -> Self {
        Self { doorbell: Doorbell::new(), starved: AtomicBool::new(false) }
    }

    /// True if a maintaining thread exists.
    fn is_there(&self) -> bool {
        self.doorbell.attended.load(Relaxed)
    }
}

impl Reserve {
    /// For a pool of at most `pool_bytes_max` bytes, on `nodes` nodes.
    pub(crate) fn new(pool_bytes_max: u64, nodes: usize) -> Self {
        Self {
            maintainer: Maintainer::new(),
            of_nodes: (0..nodes).map(|_| Maintainer::new()).collect(),
            pool_bytes_max,
            reserve_bytes: AtomicUsize::new(reserve_bytes(pool_bytes_max, 1)),
            refusing: AtomicBool::new(false),
        }
    }

    /// The thread that maintains the memory of a node.
    fn maintainer_of(&self, node: usize) -> &Maintainer {
        let own = &self.of_nodes[node];
        if own.is_there() { own } else { &self.maintainer }
    }

    /// True if the node has a thread of its own.
    fn has_own_maintainer(&self, node: usize) -> bool {
        self.of_nodes[node].is_there()
    }

    pub(crate) fn reserve_bytes(&self) -> usize {
        self.reserve_bytes.load(Relaxed)
    }

    /// Sets the number of CPUs that are up on each node. The maintaining thread fills a reserve
    /// that is too small, and frees one that is too large.
    pub(crate) fn fit(&self, cpus: usize) {
        self.reserve_bytes.store(reserve_bytes(self.pool_bytes_max, cpus), Relaxed);
    }
}

/// Wakes the maintaining thread.
struct Doorbell {
    rung: AtomicBool,
    /// A thread has waited for the bell, so there is a maintaining thread.
    attended: AtomicBool,
    // The standard library's lock, because the condition variable needs it. No simulated thread
    // loses its turn while it holds this lock.
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

    /// Costs a fence and a load if the bell is already rung.
    fn ring(&self) {
        // Pairs with the fence in `wait`: if this thread finds the bell rung, the thread that takes
        // the ring sees this thread's change. Without the fences, a processor could read `rung`
        // before the change is visible, and the maintaining thread would sleep in spite of work.
        fence(SeqCst);
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
        // This comes before the check for work: see `ring`.
        fence(SeqCst);
    }
}

impl Cache {
    /// Waits until there is something to maintain, or for `timeout`. After the first call, a store
    /// that lacks memory waits briefly for the maintaining thread.
    #[cfg(not(feature = "shuttle"))]
    pub fn wait_for_work(&self, timeout: std::time::Duration) {
        self.reserve.maintainer.doorbell.wait(timeout);
    }

    /// Nodes that may each have a maintaining thread, besides the general one: those with
    /// processors, if there are several.
    pub fn nodes_to_keep(&self) -> Vec<usize> {
        let served: Vec<usize> = self.pool.served().collect();
        if served.len() > 1 { served } else { Vec::new() }
    }

    /// Waits until there is something to maintain on a node, or for `timeout`. After the first
    /// call, the caller's thread alone maintains the node's memory, by [`Self::maintain_node`].
    #[cfg(not(feature = "shuttle"))]
    pub fn wait_for_work_on(&self, node: usize, timeout: std::time::Duration) {
        self.reserve.of_nodes[node].doorbell.wait(timeout);
    }

    /// Prepares memory on a node for stores, and gives back a surplus. Fails as [`Self::maintain`]
    /// does.
    pub fn maintain_node(&self, node: usize) -> io::Result<()> {
        let is_it = |other| other == node;
        let provisioned = self.pool.provision(self.reserve.reserve_bytes(), is_it);
        self.reserve.of_nodes[node].starved.store(provisioned.is_err(), Relaxed);
        self.pool.give_back(self.reserve.reserve_bytes(), is_it);
        provisioned
    }

    /// Wakes all maintaining threads.
    pub fn ring(&self) {
        self.reserve.maintainer.doorbell.ring();
        let of_nodes = self.reserve.of_nodes.iter().filter(|maintainer| maintainer.is_there());
        of_nodes.for_each(|maintainer| maintainer.doorbell.ring());
    }

    /// True if another thread has rung the bell for [`Self::wait_for_work`].
    pub(crate) fn is_rung(&self) -> bool {
        self.reserve.maintainer.doorbell.rung.load(Relaxed)
    }

    /// Fills the reserves that stores take from, writes back the pool's surplus above the
    /// threshold, compacts, trains a dictionary when it is time, and gives free memory back.
    /// Fails without memory for the reserve. (Stores use the reserve up, then write back or are
    /// rejected.)
    pub fn maintain(&self) -> io::Result<()> {
        // In this order, because the backing reports its recovery only once.
        if self.writeback.has_failed() && self.backing.has_recovered() {
            self.resume_writeback();
        }
        let provisioned = self.prepare();
        self.tend_dictionary();
        self.pool
            .give_back(self.reserve.reserve_bytes(), |node| !self.reserve.has_own_maintainer(node));
        self.slots.drain_idle();
        // If a discard fails, the device takes these blocks for blocks in use.
        self.slots.discard_empty(|offset, bytes| drop(self.backing.discard(offset, bytes)));
        self.index.reclaim();
        provisioned
    }

    /// The part of [`Self::maintain`] that stores may wait for, without a scan of every table.
    /// Called by a thread that both stores many pages and maintains.
    pub fn prepare(&self) -> io::Result<()> {
        let provisioned = self.provision();
        let accept = self.attributes.pool_bytes_accept() as usize;
        // Writeback notes a failure, and the next call meets it again.
        self.write_back_to(accept, || drop(self.provision()));
        self.compact();
        provisioned
    }

    /// Writes back until the pool is `bytes` smaller than now, or is empty; returns the bytes
    /// freed. Called when the machine needs memory.
    pub fn shrink(&self, bytes: usize) -> usize {
        let before = self.pool.mapped_bytes();
        // `top_up` makes no memory for the pool, which is to shrink.
        self.write_back_to(self.pool.bytes().saturating_sub(bytes), || self.slots.provision());
        self.compact();
        self.pool.give_back(self.reserve.reserve_bytes(), |_| true);
        before.saturating_sub(self.pool.mapped_bytes())
    }

    /// Bytes for objects in a pool that takes at most `bytes` with its reserve. The pool grows by
    /// sections.
    pub fn pool_bytes_in(&self, bytes: usize) -> usize {
        (bytes / SECTION_BYTES * SECTION_BYTES).saturating_sub(self.reserve.reserve_bytes())
    }

    /// Bytes of the smallest pool with which stores make progress.
    pub fn pool_bytes_least(&self) -> usize {
        SECTION_BYTES
    }

    /// Bytes that objects take in the pool: `pool_total_size`.
    pub fn pool_bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// Allocates everything that stores may need next. After an error no store waits for memory
    /// until a later call succeeds.
    pub(crate) fn provision(&self) -> io::Result<()> {
        let provisioned = self.provision_in_turn();
        self.reserve.maintainer.starved.store(provisioned.is_err(), Relaxed);
        provisioned
    }

    /// The index is first, because no store works without it.
    fn provision_in_turn(&self) -> io::Result<()> {
        self.index.provision()?;
        self.slots.provision();
        self.pool.provision(self.reserve.reserve_bytes(), |node| {
            !self.reserve.has_own_maintainer(node)
        })?;
        self.shares.provision(&self.index)?;
        self.candidates.provision(self.pool.mapped_bytes())?;
        Ok(())
    }

    /// Rings when the reserve is half used or the pool is above its threshold. Costs a few loads.
    pub(crate) fn ring_if_low(&self) {
        let low = self.pool.free_bytes_here() < self.reserve.reserve_bytes() / 2
            && self.pool.mapped_bytes() < self.pool.limit() + SECTION_BYTES
            || !self.pool.has_descriptors(self.reserve.reserve_bytes() / 2);
        let high = self.is_above_threshold() && self.writeback_works();
        if low {
            self.reserve.maintainer_of(self.pool.node_here()).doorbell.ring();
        }
        if high {
            self.reserve.maintainer.doorbell.ring();
        }
    }

    /// True if the pool has hit its limit, and has not fallen to the threshold since.
    pub(crate) fn is_refusing(&self) -> bool {
        if !self.reserve.refusing.load(Relaxed) {
            return false;
        }
        let still = self.is_above_threshold();
        self.reserve.refusing.store(still, Relaxed);
        still
    }

    /// True while writeback has work, and while a pool that was full takes no pages. Both callers
    /// use this condition, so that a full pool never waits in vain for writeback.
    fn is_above_threshold(&self) -> bool {
        self.surplus(self.attributes.pool_bytes_accept() as usize) > 0
    }

    /// Bytes of the pool above a size. Holes do not count, since pages fit into them, and
    /// compaction frees them when there are many.
    fn surplus(&self, bytes: usize) -> usize {
        let above = self.pool.bytes().saturating_sub(bytes);
        if above == 0 { 0 } else { above.saturating_sub(self.pool.slack_bytes()) }
    }

    /// Makes room for at least one object, or returns the reason why there is none.
    pub(crate) fn make_room(&self) -> Result<(), Reject> {
        let at_limit = self.pool.bytes() + SECTION_BYTES / 64 > self.pool.limit();
        if at_limit {
            self.counters.increment(PoolLimitHit);
            self.reserve.maintainer.doorbell.ring();
        }
        // Frames or descriptors may be short: one descriptor can stand for eight frames, but eight
        // incompressible pages need eight descriptors.
        let enough = self.reserve.reserve_bytes() / 4;
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
        // The maintaining thread may have filled the reserve while this thread waited for the lock.
        if !at_limit && topped_up().is_some() {
            return Ok(());
        }
        if at_limit {
            self.reserve.refusing.store(true, Relaxed);
            Err(Reject::ReclaimFail)
        } else {
            Err(Reject::AllocFail)
        }
    }

    /// Wakes the maintaining threads, and waits briefly until `take` succeeds.
    pub(crate) fn wait_for<T>(&self, take: impl Fn() -> Option<T>) -> Option<T> {
        let maintainers =
            [&self.reserve.maintainer, self.reserve.maintainer_of(self.pool.node_here())];
        maintainers.iter().for_each(|maintainer| maintainer.doorbell.ring());
        if !maintainers[0].is_there() {
            return None;
        }
        let mut backoff = Backoff::new();
        let is_starved = || maintainers.iter().any(|maintainer| maintainer.starved.load(Relaxed));
        let mut looks = (0..LOOKS).take_while(|_| !is_starved());
        looks.find_map(|_| {
            backoff.wait();
            take()
        })
    }

    /// Waits briefly for memory on the node of the caller's processor, if there is none but some is
    /// about to come. If none comes, other stores do not wait until the node has memory again.
    pub(crate) fn wait_for_node(&self) {
        let maintainer = self.reserve.maintainer_of(self.pool.node_here());
        maintainer.doorbell.ring();
        let mut backoff = Backoff::new();
        let has_come = maintainer.is_there()
            && (0..NODE_LOOKS).any(|_| {
                backoff.wait();
                self.pool.free_bytes_here() >= SECTION_BYTES / 4 || !self.pool.comes_here()
            });
        if !has_come {
            self.pool.note_late();
        }
    }

    /// Takes space on the backing. Where taking it would allocate, waits for the maintaining
    /// thread, which allocates.
    pub(crate) fn take_space<T>(&self, take: impl Fn(&Slots) -> Option<T>) -> Option<T> {
        let none_left = || self.slots.is_short().then_some(None);
        let look = || take(&self.slots).map(Some).or_else(none_left);
        look().or_else(|| self.wait_for(look)).flatten()
    }

    /// Writes back the pool's surplus above `bytes`, but no more than the present surplus.
    /// Otherwise stores could keep this thread busy here, while they wait for its other work.
    pub(crate) fn write_back_to(&self, bytes: usize, top_up: impl Fn()) {
        if !self.writeback_works() || self.pool.bytes() <= bytes {
            return;
        }
        let above = |in_flight| self.surplus(bytes).saturating_sub(in_flight);
        self.write_back(above(0), |in_flight| above(in_flight) == 0, top_up);
    }

    /// Compacts while it is worth it; returns the number of moved objects.
    pub(crate) fn compact(&self) -> usize {
        let worth = SLACK_BYTES.min(self.pool.bytes() / 4).max(self.pool.bytes() / SLACK_DIVISOR);
        if self.pool.slack_bytes() <= worth {
            return 0;
        }
        self.compact_all()
    }

    /// Moves the objects of each class together; returns their number.
    pub(crate) fn compact_all(&self) -> usize {
        let relocate = |owner, from, to, copy: &dyn Fn()| self.relocate(owner, from, to, copy);
        // The largest classes first: they free the most bytes for each moved object.
        (0..CLASSES)
            .rev()
            .map(|class| std::iter::from_fn(|| self.pool.compact(class, &relocate)).sum::<usize>())
            .sum()
    }
}
