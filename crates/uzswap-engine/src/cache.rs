//! The cache: **start here**.
//!
//! ```text
//! store       same-filled? → unchanged? → identical? → compress → pool.write
//!             → stored (a transition) → free the old
//! load        index → same-filled | pool.read → decompress | backing.read → decompress; verify
//!             (in `neighbours`, pages that were written together: one read)
//! invalidate  dropped → free
//! writeback   in `writeback`: the oldest → pack compressed, in flight → backing.write → landed
//!             where still the same entry
//! recompress  in `recompress`: the coldest, while idle, in flight → sixteen as one → pieces
//!             → joined where still the same entry
//! ```
//! Every outcome that a caller may expect is a value ([`Store`], [`Load`]). An error means that a
//! stored page cannot be given back now.
//!
//! An entry's lock keeps its object alive while a thread reads it (see `index::entry`). A load does
//! not change the entry, because a block device may read a page again. [`Cache::load_exclusive`]
//! drops the page.

mod attributes;
mod check;
mod fetch;
mod hotplug;
mod identical;
pub(crate) mod layout;
mod memory_hotplug;
mod neighbours;
mod read_back;
mod reclaim;
mod recompress;
mod recover;
mod stats;
mod through;
mod trainer;
mod writeback;

pub use hotplug::{CpuState, StateDoc, cpu_states};
pub use stats::{STATISTICS, Statistic};

use crate::backing::Backing;
use crate::backing::record::Layout;
use crate::backing::seal::Seal;
use crate::backing::slots::Slots;
use crate::compress::{Codec, dictionary_of};
use crate::config::{Attributes, Config, check_backing};
use crate::counters::Counter::*;
use crate::counters::Counters;
use crate::dedup::Candidates;
use crate::durable::Durable;
use crate::error::{Error, SetupError};
use crate::ids::{Area, Handle, SwapEntry};
use crate::index::{Index, State, TRUNK_ENTRIES, UnitMember, Word};
use crate::object::{Form, Object};
use crate::page::{PAGE_BYTES, Page, Pattern, checksum_of, content_hash};
use crate::percpu::PerCpu;
use crate::pool::{COMPRESSED_BYTES_MAX, Header, Pool};
use crate::scratch::Scratch;
use crate::share::Shares;
use crate::sync::Mutex;
use crate::unit::Units;
use fetch::Fetched;
use hotplug::Cpus;
use reclaim::Reserve;
use recompress::Recompression;
use std::io;
use std::sync::Arc;
use trainer::Training;
use uzswap_sys::cpu;
use uzswap_sys::node::Nodes;
use writeback::Writeback;

/// The outcome of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Store {
    /// The cache has the page.
    Stored,
    /// The cache has neither the page nor an older copy: the caller must keep the page elsewhere.
    Rejected(Reject),
}

/// How a page is kept. Sizes are those of its object, without rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The page is not kept, or was dropped just now.
    Nowhere,
    /// One word repeated: the page has no object.
    SameFilled,
    /// The page has its own object.
    Alone {
        /// Its size.
        bytes: u16,
    },
    /// The page shares an object with identical pages.
    Shared {
        /// Its size.
        bytes: u16,
    },
    /// The page is compressed together with others, and has no size of its own.
    InUnit,
}

/// The reason why a page was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// `enabled` is off.
    Disabled,
    /// The page does not compress to `max_compression_ratio`.
    CompressPoor,
    /// No memory for the object or its index entry.
    AllocFail,
    /// The pool is at its limit and nothing could be written back.
    ReclaimFail,
}

/// The outcome of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Load {
    /// The page is the one last stored.
    Hit,
    /// There is no page under this key; `page` is unchanged.
    Absent,
}

/// A compressed swap cache. All methods may be called from any number of threads.
pub struct Cache {
    pages_max: u32,
    /// The memory that outlives the process, if there is such memory.
    pub(crate) durable: Option<Arc<Durable>>,
    pub(crate) attributes: Attributes,
    pub(crate) index: Index,
    pub(crate) pool: Pool,
    pub(crate) units: Units,
    pub(crate) recompression: Recompression,
    pub(crate) shares: Shares,
    pub(crate) candidates: Candidates,
    pub(crate) counters: Arc<Counters>,
    /// State of each CPU, made and freed with the CPU.
    pub(crate) cpus: Mutex<Cpus>,
    pub(crate) scratch: PerCpu<Scratch>,
    pub(crate) training: Training,
    pub(crate) backing: Arc<dyn Backing>,
    /// Seals the writes to the backing, if it is sealed.
    pub(crate) seal: Option<Seal>,
    pub(crate) slots: Slots,
    pub(crate) writeback: Writeback,
    pub(crate) reserve: Reserve,
}

impl Cache {
    /// A cache that writes its coldest pages back to `backing` ([`crate::backing::NoBacking`] for
    /// none).
    pub fn new(config: Config, backing: Box<dyn Backing>) -> Result<Self, SetupError> {
        Self::make(config, backing, None, Nodes::of_machine())
    }

    /// A cache on a machine with these nodes, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn with_nodes(
        config: Config,
        backing: Box<dyn Backing>,
        nodes: Nodes,
    ) -> Result<Self, SetupError> {
        Self::make(config, backing, None, nodes)
    }

    /// Makes a cache, or takes over the one in memory that outlives the process.
    pub(crate) fn make(
        config: Config,
        backing: Box<dyn Backing>,
        durable: Option<&Arc<Durable>>,
        nodes: Nodes,
    ) -> Result<Self, SetupError> {
        check_backing(backing.bytes())?;
        let index = Index::new(config.keys()?, durable);
        let shares = Shares::new(&index, config.pages_max).expect("the keys were counted in");
        let units = Units::new(&index, config.pages_max).expect("the keys were counted in");
        let pool_bytes_max = config.pool_bytes_ever();
        let has_backing = backing.bytes() > 0;
        let seal = (has_backing && config.seals_backing).then(|| Seal::new(durable)).transpose();
        let seal = seal.map_err(SetupError::Key)?;
        let layout = if seal.is_some() { Layout::Sealed } else { Layout::Plain };
        let backing: Arc<dyn Backing> = backing.into();
        let slots = Slots::new(backing.bytes(), layout, durable).with_backing(&backing);
        let cache = Self {
            pages_max: config.pages_max,
            durable: durable.cloned(),
            attributes: Attributes::new(&config),
            counters: index.counters().clone(),
            index,
            reserve: Reserve::new(config.pool_bytes_max, nodes.count()),
            pool: Pool::new(pool_bytes_max, durable, &Arc::new(nodes)),
            units,
            recompression: Recompression::new(),
            shares,
            candidates: Candidates::new(pool_bytes_max),
            cpus: Mutex::new(Cpus::new()),
            scratch: PerCpu::new(config.cpus_apart()),
            training: Training::new(durable)?,
            backing,
            seal,
            slots,
            writeback: Writeback::new(has_backing.then_some(&config))?,
        };
        assert_eq!(cpu::page_bytes(), PAGE_BYTES, "a kernel with other pages than 4 KiB");
        cache.start_cpus()?;
        if let Some(durable) = durable {
            cache.take_over(durable)?;
        }
        cache.apply_attributes();
        cache.provision()?;
        if let Some(durable) = durable {
            durable.set_held();
        }
        Ok(cache)
    }

    /// Lets processes that are forked from now on use a copy of this cache and of its backing: see
    /// [`Self::go_on_in_fork`].
    pub fn let_forks_inherit(&self) -> io::Result<()> {
        self.seal.as_ref().map_or(Ok(()), Seal::let_forks_inherit)
    }

    /// Called in a process that was forked after [`Self::let_forks_inherit`], and has a backing of
    /// its own with the same content. From now on the process's seals differ from its parent's. No
    /// thread may have used the cache at the moment of the fork. Fails without randomness, or
    /// without memory that may be locked.
    pub fn go_on_in_fork(&self) -> io::Result<()> {
        self.seal.as_ref().map_or(Ok(()), Seal::go_on_in_fork)
    }

    /// The maximum number of pages of all areas together.
    pub fn pages_max(&self) -> u32 {
        self.pages_max
    }

    /// Prepares memory for pages of at most `bytes` of address space ahead of stores, instead of
    /// 256 MiB. For a small budget, if the caller calls [`Self::prepare`] after every few stores.
    pub fn keep_ahead(&self, bytes: u64) {
        let trunk_bytes = (TRUNK_ENTRIES * PAGE_BYTES) as u64;
        self.index.set_spare_max((bytes / trunk_bytes).try_into().unwrap_or(usize::MAX));
    }

    /// Takes keys for `pages` pages; `None` when no address space is left.
    pub fn add_area(&self, pages: u32) -> Option<Area> {
        let area = self.index.add_area(pages);
        // The maintaining thread tries again after an error.
        let _ = self.index.provision();
        area
    }

    /// Drops every page of an area and gives its keys back. No other call may use the area from now
    /// on.
    pub fn remove_area(&self, area: Area) {
        area.entries().for_each(|key| self.invalidate(key));
        self.index.remove_area(area);
    }

    /// Stores a page. The older copy under the same key is dropped, even if the page is rejected.
    pub fn store(&self, key: SwapEntry, page: &Page) -> Store {
        self.index.prefetch(key);
        let ensure = || self.index.view().ensure(key).ok();
        if ensure().or_else(|| self.wait_for(ensure)).is_none() {
            return self.reject(key, Reject::AllocFail);
        }
        if !self.attributes.enabled() {
            return self.reject(key, Reject::Disabled);
        }
        let state = match Pattern::of(page) {
            Some(pattern) => {
                self.counters.increment(StoresFilled);
                State::Filled(pattern)
            }
            None => {
                let hash = content_hash(page);
                if self.is_unchanged(key, page, hash) {
                    self.counters.increment(Stores);
                    self.counters.increment(StoresUnchanged);
                    return Store::Stored;
                }
                match self.keep(key, page, hash) {
                    Ok(state) => state,
                    Err(reject) => return self.reject(key, reject),
                }
            }
        };
        let view = self.index.view();
        let made = || view.lock_made(key).ok();
        let Some(locked) = made().or_else(|| self.wait_for(made)) else {
            // The maintaining thread has freed the key's trunk, and there is no spare trunk.
            self.dispose(state);
            return self.reject(key, Reject::AllocFail);
        };
        let old = locked.stored(state);
        self.counters.increment(Stores);
        if old != State::Absent {
            self.counters.increment(DuplicateEntry);
        }
        self.dispose(old);
        Store::Stored
    }

    /// Gives a page back, and keeps it.
    pub fn load(&self, key: SwapEntry, page: &mut Page) -> Result<Load, Error> {
        self.index.prefetch(key);
        let view = self.index.view();
        // No lock is needed if the word alone has the page.
        match view.peek(key).state() {
            State::Absent => return self.give(key, Fetched::Absent, page),
            State::Filled(pattern) => return self.give(key, Fetched::Filled(pattern), page),
            State::Pooled(_) | State::Placed(_) | State::Shared(_) | State::Member(_) => {}
        }
        let Some(mut locked) = view.lock(key) else {
            return self.give(key, Fetched::Absent, page);
        };
        let fetched = self.fetch(key, &mut locked)?;
        drop(locked);
        self.give(key, fetched, page)
    }

    /// Gives a page back and then drops it. After an error the page stays. The entry is locked
    /// until the end, so that no thread can move, write back or replace the page between the two
    /// steps.
    pub fn load_exclusive(&self, key: SwapEntry, page: &mut Page) -> Result<Load, Error> {
        self.index.prefetch(key);
        let view = self.index.view();
        let Some(mut locked) = view.lock(key) else {
            return self.give(key, Fetched::Absent, page);
        };
        let fetched = self.fetch(key, &mut locked)?;
        let load = self.give(key, fetched, page)?;
        self.dispose(locked.dropped());
        Ok(load)
    }

    /// True if there is a page for a key. Only a hint if another thread may store or drop it at the
    /// same time.
    pub fn has(&self, key: SwapEntry) -> bool {
        !matches!(self.index.view().peek(key).state(), State::Absent)
    }

    /// True if a load would wait for the backing. Only a hint: the page may move before the load.
    pub fn is_on_backing(&self, key: SwapEntry) -> bool {
        let view = self.index.view();
        let state = |key| view.peek(key).state();
        let is_placed = |key| matches!(state(key), State::Placed(_));
        let itself = match state(key) {
            State::Shared(record) => state(record),
            other => other,
        };
        match itself {
            State::Member(member) => Units::pieces(member.unit).any(is_placed),
            other => matches!(other, State::Placed(_)),
        }
    }

    /// How a page is kept: for statistics. A hint, as [`Self::has`].
    pub fn kept(&self, key: SwapEntry) -> Placement {
        let view = self.index.view();
        let alone = |state, kept: fn(u16) -> Placement| match state {
            State::Pooled(object) => kept(object.form.bytes),
            State::Placed(extent) => kept(extent.form.bytes),
            _ => Placement::Nowhere,
        };
        match view.peek(key).state() {
            State::Absent => Placement::Nowhere,
            State::Filled(_) => Placement::SameFilled,
            State::Member(_) => Placement::InUnit,
            State::Shared(record) => {
                alone(view.peek(record).state(), |bytes| Placement::Shared { bytes })
            }
            other => alone(other, |bytes| Placement::Alone { bytes }),
        }
    }

    /// Drops a page that is no longer needed.
    pub fn invalidate(&self, key: SwapEntry) {
        let view = self.index.view();
        if view.peek(key) == Word::ABSENT {
            return;
        }
        let Some(locked) = view.lock(key) else { return };
        let old = locked.dropped();
        if old != State::Absent {
            self.counters.increment(Invalidates);
        }
        self.dispose(old);
    }

    fn reject(&self, key: SwapEntry, reason: Reject) -> Store {
        // An older copy must not outlive the newer page: a load would return it.
        self.invalidate(key);
        self.counters.increment(match reason {
            Reject::Disabled => RejectDisabled,
            Reject::CompressPoor => RejectCompressPoor,
            Reject::AllocFail => RejectAlloc,
            Reject::ReclaimFail => RejectReclaim,
        });
        Store::Rejected(reason)
    }

    /// Compresses a page, or finds the object of an identical page.
    fn keep(&self, key: SwapEntry, page: &Page, hash: u64) -> Result<State, Reject> {
        if self.attributes.same_pages_enabled()
            && let Some(record) = self.share(key, page, hash)
        {
            self.counters.increment(DuplicatePages);
            return Ok(State::Shared(record));
        }
        let header = Header { owner: key, checksum: checksum_of(hash) };
        let object = self.make_object(page, header)?;
        self.candidates.insert(hash, key, None);
        Ok(State::Pooled(object))
    }

    /// Compresses a page into the pool, making room where there is none.
    fn make_object(&self, page: &Page, header: Header) -> Result<Object, Reject> {
        if self.is_refusing() {
            return Err(Reject::ReclaimFail);
        }
        let ratio = self.attributes.max_compression_ratio() as usize;
        let bytes_max = COMPRESSED_BYTES_MAX.min(PAGE_BYTES * ratio / 100);
        let mut has_waited = false;
        loop {
            let mut scratch = self.scratch.lock_here();
            let (codec, bytes): (Codec, &[u8]) = match scratch.compress(page, bytes_max) {
                Some(made) => made,
                None if ratio < 100 => return Err(Reject::CompressPoor),
                None => (Codec::Raw, page),
            };
            let only_here = !has_waited && self.pool.comes_here();
            if let Ok(handle) = self.pool.alloc(bytes.len(), only_here) {
                self.pool.write(handle, header, bytes);
                let form = Form { bytes: bytes.len() as u16, codec };
                if codec == Codec::Zstd && dictionary_of(bytes).is_some() {
                    self.counters.increment(StoresDictionary);
                }
                if codec.is_for_numbers() {
                    self.counters.increment(StoresNumbers);
                }
                let trial = scratch.take_trial();
                if let Some(trial) = trial.filter(|_| !codec.is_for_numbers()) {
                    self.note_trial(header.owner, trial);
                }
                self.ring_if_low();
                return Ok(Object { handle, form });
            }
            drop(scratch);
            if only_here {
                self.wait_for_node();
                has_waited = true;
            } else {
                self.make_room()?;
            }
        }
    }

    /// Frees everything that a state refers to. No entry has this state any more.
    pub(crate) fn dispose(&self, old: State) {
        match old {
            State::Absent | State::Filled(_) => {}
            State::Pooled(object) => self.pool.free(object.handle),
            State::Placed(extent) => self.slots.remove(extent),
            State::Shared(record) => self.leave_record(record),
            State::Member(member) => self.leave_unit(member),
        }
    }

    /// Removes a page from its unit; the last page frees the unit.
    pub(crate) fn leave_unit(&self, member: UnitMember) {
        if !self.units.leave(member) {
            return;
        }
        for piece in Units::pieces(member.unit) {
            let view = self.index.view();
            self.dispose(view.lock_existing(piece).dropped());
        }
        self.units.give(member.unit);
    }

    /// Moves an object for the pool, if its owner is not in use: see `pool::moving`.
    pub(crate) fn relocate(
        &self,
        owner: SwapEntry,
        from: Handle,
        to: Handle,
        copy: &dyn Fn(),
    ) -> bool {
        let view = self.index.view();
        let Some(locked) = view.try_lock(owner) else { return false };
        match locked.state() {
            State::Pooled(object) if object.handle == from => {
                copy();
                locked.moved(to);
                true
            }
            _ => false,
        }
    }
}
