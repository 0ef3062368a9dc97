//! The state that all parts of a pager share, and its regions, which know their pager.
//!
//! This module uses none of the modules that change the state: the passes ([`crate::fault`],
//! [`crate::reclaim`], [`crate::ahead`]), the doors ([`crate::doors`]), and the public ones
//! ([`crate::pager`], [`crate::region`], [`crate::window`]).

pub(crate) mod door;
pub(crate) mod keys;
pub(crate) mod registry;
pub(crate) mod space;

use crate::ahead_request::AheadRequest;
use crate::budget::Budget;
use crate::error::Error;
use crate::handlers::Handlers;
use crate::lane::Lanes;
use crate::layers::Layers;
use crate::mode::Mode;
use crate::on_fork::OnFork;
use crate::returns::Returns;
use crate::staging::{BATCH, Staging};
use crate::steady;
use door::Door;
use keys::Keys;
use space::Space;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering::*};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use uzswap_engine::{Cache, PAGE_BYTES};
use uzswap_policy::costs::BACKING;
use uzswap_policy::order::Order;
use uzswap_policy::pool_share::{self, Loaded, PoolShare};
use uzswap_remote::Tiers;
use uzswap_sys::uffd::Uffd;
use uzswap_trace::Log;

/// Where the hand is, and the decisions on the pages that it passes: see [`crate::reclaim`].
#[derive(Default)]
pub(crate) struct Hand {
    pub(crate) region: u32,
    pub(crate) page: u32,
    pub(crate) order: Order,
    pub(crate) pool: PoolShare,
}

/// Moving pages in the least budget: two batches for the staging area, and as many pages in use.
const MOVING: i64 = 4 * BATCH as i64;

/// Bytes of a pool that is not made smaller: two sections.
const POOL_LEAST: i64 = 4 << 20;

/// The state that all parts of a pager share.
pub(crate) struct Inner {
    pub(crate) door: Box<dyn Door>,
    pub(crate) cache: Cache,
    pub(crate) budget: Budget,
    pub(crate) staging: Staging,
    pub(crate) lanes: Lanes,
    pub(crate) ahead: AheadRequest,
    pub(crate) hand: Mutex<Hand>,
    pub(crate) returns: Returns,
    /// The generation of the process to which the pager belongs: see [`steady::generation`].
    generation: AtomicU32,
    pub(crate) on_fork: OnFork,
    /// The trace that touches are written to: see [`crate::accesses`].
    pub(crate) log: Option<Log>,
    regions: RwLock<BTreeMap<u32, Arc<Space>>>,
    /// The backing, if it is files that children continue to use.
    pub(crate) layers: Option<Layers>,
    /// The backing, if a part of it is at a store.
    pub(crate) tiers: Option<Tiers>,
    /// The keys of windows' pages.
    pub(crate) keys: Keys,
    pub(crate) mode: Mode,
    next_region: AtomicU32,
    staging_batches: usize,
    table_bytes: AtomicI64,
    pinned: AtomicI64,
    pool_limit: AtomicI64,
    /// The decision of [`PoolShare`] that is in force.
    pool_steps: AtomicU32,
    stopping: AtomicBool,
    pub(crate) handlers: Handlers,
}

impl Inner {
    pub(crate) fn new(
        bytes: u64,
        mode: Mode,
        on_fork: OnFork,
        door: Box<dyn Door>,
        cache: Cache,
    ) -> Result<Self, Error> {
        let failed = |source| Error::Map { bytes: bytes as usize, source };
        // Frames for a 16th of the budget, from 1 MiB to 64.
        let batch_bytes = BATCH * PAGE_BYTES;
        let staging_batches = (bytes as usize / 16 / batch_bytes).clamp(4, 256);
        let lanes = Lanes::new();
        let keys = Keys::new(&cache, on_fork == OnFork::Whole);
        let staging = Staging::new(staging_batches, door.uffd().is_some()).map_err(failed)?;
        let inner = Self {
            table_bytes: AtomicI64::new(staging.table_bytes() as i64),
            door,
            cache,
            budget: Budget::new(bytes),
            staging,
            lanes,
            ahead: AheadRequest::default(),
            hand: Mutex::new(Hand::default()),
            returns: Returns::new(),
            generation: AtomicU32::new(steady::generation()),
            on_fork,
            log: None,
            regions: RwLock::new(BTreeMap::new()),
            layers: None,
            tiers: None,
            keys,
            mode,
            next_region: AtomicU32::new(1),
            staging_batches,
            pinned: AtomicI64::new(0),
            pool_limit: AtomicI64::new(0),
            pool_steps: AtomicU32::new(0),
            stopping: AtomicBool::new(false),
            handlers: Handlers::default(),
        };
        // Without a backing the pool's limit is hard. With a backing, writeback begins below the
        // limit.
        if inner.cache.statistic("backing_total_size") == Some(0) {
            let set = inner.cache.set_attribute("accept_threshold_percent", "100");
            set.expect("100 percent is a value of it");
        }
        Ok(inner)
    }

    /// The userfaultfd, where absent pages are faults.
    pub(crate) fn uffd(&self) -> &Uffd {
        self.door.uffd().expect("asked for where faults are at absent pages")
    }

    pub(crate) fn regions(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Space>>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn regions_mut(&self) -> RwLockWriteGuard<'_, BTreeMap<u32, Arc<Space>>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn staging_batches(&self) -> usize {
        self.staging_batches
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn set_stopping(&self, is_stopping: bool) {
        self.stopping.store(is_stopping, Relaxed);
    }

    /// Tells the budget how large the cache is, and tells the cache the limit of its pool. The
    /// limit is the part of the budget that the pool may have, less the cache's memory beside the
    /// pool.
    pub(crate) fn account(&self) {
        if self.log.is_some() {
            return self.budget.set_cache_bytes(0, 0);
        }
        let tables = self.table_bytes.load(Relaxed).max(0) as usize;
        let ahead = self.cache.memory_bytes_ahead();
        self.budget.set_cache_bytes(self.cache.memory_bytes() + tables, ahead);
        let bytes = self.budget.bytes() as i64;
        let besides = (self.cache.bytes_besides_pool() + tables) as i64;
        let limit_after = |steps| {
            let for_pool = pool_share::bytes_for_pool(bytes as u64, steps) as i64 - besides;
            self.cache.pool_bytes_in(for_pool.max(0) as usize).max(1 << 20) as i64
        };
        let least = limit_after(0).min(POOL_LEAST);
        let limit = limit_after(self.pool_steps.load(Relaxed)).max(least);
        if (limit - self.pool_limit.load(Relaxed)).abs() > bytes / 128 {
            self.pool_limit.store(limit, Relaxed);
            let set = self.cache.set_attribute("max_pool_bytes", &limit.to_string());
            set.expect("at least 1 MiB is a value of it");
        }
    }

    /// Makes the pool smaller or larger, by the faults that the pool served, and by the time that
    /// reads of the backing took.
    pub(crate) fn tend_pool(&self) {
        let count = |name| self.cache.statistic(name).unwrap_or(0);
        if count("backing_total_size") == 0 {
            return;
        }
        let reads = count("backing_reads");
        let pool = self.returns.loads().saturating_sub(reads);
        let loaded = Loaded { pool, reads, read_nanos: self.read_nanos(reads) };
        let mut hand = self.hand.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.pool_steps.load(Relaxed);
        let steps = hand.pool.tend(before, loaded);
        // If another thread has just given the pool all of its memory, this decision is dropped.
        let _ = self.pool_steps.compare_exchange(before, steps, Relaxed, Relaxed);
    }

    /// The time of all reads of the backing, from the disk or a store, ns. The reads of a backing
    /// that measures none take as long as a solid-state disk's.
    fn read_nanos(&self, reads: u64) -> u64 {
        let Some(layers) = &self.layers else { return reads * (BACKING * 1e3) as u64 };
        let remote = self.cache.remote_read_times().map_or(0, |times| times.by_power().sum_ns);
        layers.read_nanos() + remote
    }

    /// Gives the pool all memory that it may ever have, because the backing takes no page. `false`:
    /// it had that already.
    pub(crate) fn give_pool_all(&self) -> bool {
        self.pool_steps.swap(0, Relaxed) > 0
    }

    /// Adjusts the memory that the cache reserves for further pages, by the size of the budget.
    pub(crate) fn keep_ahead(&self) {
        // Two trunks of the index at least: the keys of a batch mostly lie in two.
        self.cache.keep_ahead(self.budget.bytes().max(32 << 20));
    }

    /// See [`crate::Pager::least_memory`].
    pub(crate) fn least_bytes(&self) -> u64 {
        let tables = self.table_bytes.load(Relaxed).max(0) as usize;
        let cache = self.cache.bytes_besides_pool() + self.cache.pool_bytes_least() + tables;
        cache as u64 + (self.budget.stuck() + MOVING) as u64 * PAGE_BYTES as u64
    }

    /// Counts pins; `false` beyond half of the budget.
    pub(crate) fn count_pins(&self, pages: i64) -> bool {
        let pinned = self.pinned.fetch_add(pages, Relaxed) + pages;
        let is_allowed = pages < 0 || pinned * 2 * PAGE_BYTES as i64 <= self.budget.bytes() as i64;
        if !is_allowed {
            self.pinned.fetch_sub(pages, Relaxed);
        }
        is_allowed
    }

    /// Held while pages go out or regions change: see [`steady::steady`].
    pub(crate) fn steady(&self) -> Option<RwLockReadGuard<'static, ()>> {
        (self.on_fork != OnFork::Absent).then(steady::steady)
    }

    pub(crate) fn check_process(&self) -> Result<(), Error> {
        let is_ours = self.generation() == steady::generation();
        if is_ours { Ok(()) } else { Err(Error::Forked) }
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Relaxed)
    }

    /// Makes the pager this process's own, in a forked child that has all of its parent's pager.
    pub(crate) fn adopt_process(&self) {
        self.generation.store(steady::generation(), Relaxed);
    }

    pub(crate) fn next_region(&self) -> u32 {
        self.next_region.fetch_add(1, Relaxed)
    }

    pub(crate) fn count_table(&self, bytes: i64) {
        self.table_bytes.fetch_add(bytes, Relaxed);
    }
}
