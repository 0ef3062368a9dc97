//! The cache: **start here**.
//!
//! ```text
//! store       same-filled? → identical? → compress → pool.write → publish → free the old
//!             (publish: into the index, onto the LRU)
//! load        index → same-filled | pool.read → decompress | backing.read → decompress; verify
//!             (of neighbours on the backing in `run`: one read → decompress each)
//! invalidate  index → free
//! writeback   in `writeback`: the oldest → pack → write → commit where still the same entry
//! recompress  in `recompress`: the coldest → sixteen as one → commit where still the same entry
//! ```
//! Every outcome that a caller may expect is a value ([`Store`], [`Load`]); an error means that a
//! page which is held cannot be given back now.
//!
//! What keeps an object alive while it is read is its entry's lock (see `index::entry`). A load
//! leaves the entry as it was: a block device's reader may come again. [`Cache::load_exclusive`]
//! drops it.

use crate::backing::Backing;
use crate::backing::record::Layout;
use crate::backing::seal::Seal;
use crate::backing::slots::Slots;
use crate::compress::{
    Codec, Dictionaries, UNIT_BYTES_MAX, Undecodable, UnitDecoder, dictionary_of,
};
use crate::config::{Attributes, Config, check_backing};
use crate::dedup::Candidates;
use crate::durable::Durable;
use crate::error::{Error, SetupError};
use crate::hotplug::Cpus;
use crate::ids::{Area, Handle, SwapEntry};
use crate::index::{Form, Index, Locked, Member, Object, State, Word};
use crate::page::{PAGE_BYTES, Page, Pattern, checksum_of, content_hash};
use crate::percpu::{Here, PerCpu};
use crate::pool::{COMPRESSED_BYTES_MAX, Header, Pool};
use crate::recompress::Recompressor;
use crate::scratch::Scratch;
use crate::share::Shares;
use crate::shrink::{Doorbell, reserve_bytes};
use crate::stats::Counter::*;
use crate::stats::Counters;
use crate::sync::Mutex;
use crate::sync::atomic::Ordering;
use crate::trainer::{Recent, Trainer};
use crate::unit::Units;
use crate::writeback::{Failure, StoreBuffer, Writer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use uzswap_sys::cpu;

/// What became of a page to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Store {
    /// It is held.
    Stored,
    /// It is not, and neither is an older copy: the caller must keep it elsewhere.
    Rejected(Reject),
}

/// Why a page was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// `enabled` is off.
    Disabled,
    /// It does not compress to `max_compression_ratio`.
    CompressPoor,
    /// No memory for the object or its index entry.
    AllocFail,
    /// The pool is at its limit and nothing could be written back.
    ReclaimFail,
}

/// What became of a page to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Load {
    /// The page is the one last stored.
    Hit,
    /// Nothing is held under this key; the page was not touched.
    Absent,
}

/// A compressed swap cache. All methods may be called from any number of threads.
pub struct Cache {
    pages_max: u32,
    /// Where what says where a page is outlives the process, if it does.
    pub(crate) durable: Option<Arc<Durable>>,
    pub(crate) attributes: Attributes,
    pub(crate) index: Index,
    pub(crate) pool: Pool,
    pub(crate) units: Units,
    pub(crate) recompressor: Mutex<Recompressor>,
    /// Objects in the pool that were not used for long, at the last look.
    pub(crate) idle_pages: AtomicUsize,
    pub(crate) shares: Shares,
    pub(crate) candidates: Candidates,
    pub(crate) counters: Arc<Counters>,
    /// What CPUs have of their own comes and goes with them.
    pub(crate) cpus: Mutex<Cpus>,
    pub(crate) scratch: PerCpu<Scratch>,
    pub(crate) dictionaries: Arc<Dictionaries>,
    pub(crate) trainer: Mutex<Trainer>,
    /// Pages that a dictionary may be trained on.
    pub(crate) recent: Recent,
    /// Bytes of what the newest dictionary is prepared with.
    pub(crate) encoder_bytes: AtomicUsize,
    pub(crate) backing: Box<dyn Backing>,
    /// What is written there is sealed with it, if it is.
    pub(crate) seal: Option<Seal>,
    pub(crate) slots: Slots,
    pub(crate) writer: Mutex<Writer>,
    /// Bytes of its buffers.
    pub(crate) writer_bytes: usize,
    /// What stores write segments from.
    pub(crate) buffers: PerCpu<StoreBuffer>,
    /// Why writeback stopped, if it did.
    pub(crate) failure: Mutex<Option<Failure>>,
    /// A write to the backing failed: nothing more is written until someone says so.
    pub(crate) writeback_failed: AtomicBool,
    pub(crate) doorbell: Doorbell,
    /// Bytes of the pool kept free ahead of need.
    pub(crate) reserve_bytes: usize,
    /// The pool hit its limit, could not be written back, and is not yet below
    /// `accept_threshold_percent`.
    pub(crate) refusing: AtomicBool,
    /// The machine had no memory for the reserve when last asked.
    pub(crate) starved: AtomicBool,
}

/// What an entry referred to, copied out from under its lock.
pub(crate) enum Fetched<'a> {
    Absent,
    Filled(Pattern),
    /// In `scratch.object`.
    Object {
        scratch: Here<'a, Scratch>,
        form: Form,
        checksum: u32,
    },
    /// In the unit that `scratch` keeps, as much as is needed of it.
    Member {
        scratch: Here<'a, Scratch>,
        bytes: usize,
        position: u8,
        checksum: u32,
    },
}

/// Whether a decoded page is the one that was stored; else what is wrong with it.
pub(crate) fn verify(
    decoded: Result<(), Undecodable>,
    checksum: u32,
    page: &Page,
) -> Result<(), &'static str> {
    decoded.map_err(|Undecodable| "it does not decompress")?;
    if checksum_of(content_hash(page)) != checksum {
        return Err("its checksum does not match");
    }
    Ok(())
}

impl Cache {
    /// A cache that writes its coldest pages back to `backing` ([`crate::backing::NoBacking`] for
    /// none).
    pub fn new(config: Config, backing: Box<dyn Backing>) -> Result<Self, SetupError> {
        Self::make(config, backing, None)
    }

    /// The same, taking over what is in memory that outlives the process, if there is a cache.
    pub(crate) fn make(
        config: Config,
        backing: Box<dyn Backing>,
        durable: Option<&Arc<Durable>>,
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
        let slots = Slots::new(backing.bytes(), layout, durable);
        let writer = if has_backing { Writer::new(config.pool_bytes_max)? } else { Writer::idle() };
        let writer_bytes = writer.bytes();
        let buffers = if has_backing { StoreBuffer::COUNT } else { 0 };
        let dictionaries = Arc::new(Dictionaries::kept_in(durable)?);
        let cache = Self {
            pages_max: config.pages_max,
            durable: durable.cloned(),
            attributes: Attributes::new(&config),
            counters: index.counters().clone(),
            index,
            pool: Pool::new(pool_bytes_max, durable),
            units,
            recompressor: Mutex::new(Recompressor::new()),
            idle_pages: AtomicUsize::new(0),
            shares,
            candidates: Candidates::new(pool_bytes_max),
            cpus: Mutex::new(Cpus::new()),
            scratch: PerCpu::new(usize::MAX),
            dictionaries,
            trainer: Mutex::new(Trainer::new()),
            recent: Recent::new(),
            encoder_bytes: AtomicUsize::new(0),
            backing,
            seal,
            slots,
            writer: Mutex::new(writer),
            writer_bytes,
            buffers: PerCpu::new(buffers),
            failure: Mutex::new(None),
            writeback_failed: AtomicBool::new(false),
            doorbell: Doorbell::new(),
            reserve_bytes: reserve_bytes(config.pool_bytes_max),
            refusing: AtomicBool::new(false),
            starved: AtomicBool::new(false),
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

    /// Pages of address space that areas may have together.
    pub fn pages_max(&self) -> u32 {
        self.pages_max
    }

    /// Takes keys for `pages` pages; `None` when the address space is used up.
    pub fn add_area(&self, pages: u32) -> Option<Area> {
        let area = self.index.add_area(pages);
        // What cannot be had now is asked for again by who maintains.
        let _ = self.index.provision();
        area
    }

    /// Drops everything in an area and gives its keys back. No other call may use the area from now
    /// on.
    pub fn remove_area(&self, area: Area) {
        area.entries().for_each(|key| self.invalidate(key));
        self.index.remove_area(area);
    }

    /// Takes a page. A copy held under the same key is replaced, and dropped if the page is
    /// rejected.
    pub fn store(&self, key: SwapEntry, page: &Page) -> Store {
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
            // Its trunk was freed meanwhile, and none is left.
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
        let view = self.index.view();
        // Without the lock where the word says it all.
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

    /// Gives a page back and drops it, unless it could not be given back. The entry stays locked
    /// until then, so that a page that is moved or written back meanwhile is dropped too, and a
    /// newer one is not.
    pub fn load_exclusive(&self, key: SwapEntry, page: &mut Page) -> Result<Load, Error> {
        let view = self.index.view();
        let Some(mut locked) = view.lock(key) else {
            return self.give(key, Fetched::Absent, page);
        };
        let fetched = self.fetch(key, &mut locked)?;
        let load = self.give(key, fetched, page)?;
        self.dispose(locked.dropped());
        Ok(load)
    }

    /// Whether there is a page for a key. A hint, unless nothing is stored or dropped meanwhile.
    pub fn has(&self, key: SwapEntry) -> bool {
        !matches!(self.index.view().peek(key).state(), State::Absent)
    }

    /// Whether loading a page would wait for the backing. A hint: it may have moved by then.
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

    /// Drops a page that nobody needs any more.
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
        // An older copy must not outlive the newer page: written back later, it would win.
        self.invalidate(key);
        self.counters.increment(match reason {
            Reject::Disabled => RejectDisabled,
            Reject::CompressPoor => RejectCompressPoor,
            Reject::AllocFail => RejectAlloc,
            Reject::ReclaimFail => RejectReclaim,
        });
        Store::Rejected(reason)
    }

    /// Whether the pool already holds this page for this entry. If so, the page only becomes the
    /// newest of the LRU. A different page costs one read of the header; the same page costs a
    /// decompression, which takes about a quarter of the time of a compression.
    fn is_unchanged(&self, key: SwapEntry, page: &Page, hash: u64) -> bool {
        let view = self.index.view();
        let State::Pooled(object) = view.peek(key).state() else { return false };
        let ratio = self.attributes.max_compression_ratio() as usize;
        let Some(locked) = view.lock(key) else { return false };
        let is_same = usize::from(object.form.bytes) <= PAGE_BYTES * ratio / 100
            && locked.state() == State::Pooled(object)
            && self.pool.header(object.handle).checksum == checksum_of(hash)
            && self.holds(object, page);
        if is_same && !locked.word().is_in_flight() {
            locked.renewed();
        }
        is_same
    }

    /// Makes an object of a page, or finds the one of an identical page.
    fn keep(&self, key: SwapEntry, page: &Page, hash: u64) -> Result<State, Reject> {
        if self.attributes.same_pages_enabled()
            && let Some(record) = self.share(key, page, hash)
        {
            self.counters.increment(DuplicatePages);
            return Ok(State::Shared(record));
        }
        let header = Header { owner: key, checksum: checksum_of(hash) };
        let object = self.place(page, header)?;
        self.candidates.insert(hash, key, None);
        Ok(State::Pooled(object))
    }

    /// Compresses a page into the pool, making room where there is none.
    fn place(&self, page: &Page, header: Header) -> Result<Object, Reject> {
        if self.is_refusing() {
            return Err(Reject::ReclaimFail);
        }
        let ratio = self.attributes.max_compression_ratio() as usize;
        let bytes_max = COMPRESSED_BYTES_MAX.min(PAGE_BYTES * ratio / 100);
        loop {
            let mut scratch = self.scratch.lock_here();
            let (codec, bytes): (Codec, &[u8]) = match scratch.compress(page, bytes_max) {
                Some(made) => made,
                None if ratio < 100 => return Err(Reject::CompressPoor),
                None => (Codec::Raw, page),
            };
            if let Ok(handle) = self.pool.alloc(bytes.len()) {
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
            self.make_room()?;
        }
    }

    /// Finds an entry that holds the same page and shares its object; the record's key.
    fn share(&self, key: SwapEntry, page: &Page, hash: u64) -> Option<SwapEntry> {
        let view = self.index.view();
        self.candidates.find(hash).filter(|candidate| *candidate != key).find_map(|candidate| {
            let locked = view.try_lock(candidate)?;
            let State::Pooled(object) = locked.state() else { return None };
            let looks_same = self.pool.header(object.handle).checksum == checksum_of(hash);
            (looks_same && self.holds(object, page))
                .then(|| self.join(candidate, locked, object, hash))?
        })
    }

    /// Whether an object, its entry locked, is this very page.
    fn holds(&self, object: Object, page: &Page) -> bool {
        let mut scratch = self.scratch.lock_here();
        let bytes = usize::from(object.form.bytes);
        self.pool.read(object.handle, &mut scratch.object[..bytes]);
        scratch.decompress_here(object.form.codec, bytes).is_ok() && scratch.page == *page
    }

    /// Adds one more to those that share `holder`'s object, making a record of it if it is none.
    fn join(
        &self,
        holder: SwapEntry,
        locked: Locked<'_>,
        object: Object,
        hash: u64,
    ) -> Option<SwapEntry> {
        if self.shares.contains(holder) {
            self.shares.count(holder).fetch_add(1, Ordering::Relaxed);
            return Some(holder);
        }
        if locked.word().is_in_flight() {
            return None; // Its record on the backing will name the holder.
        }
        let record = self.shares.take()?;
        let view = self.index.view();
        let locked_record = view.lock_existing(record);
        self.shares.count(record).store(2, Ordering::Relaxed);
        self.pool.set_header(object.handle, Header { owner: record, checksum: checksum_of(hash) });
        locked.shared(locked_record);
        self.candidates.insert(hash, record, Some(holder));
        Some(record)
    }

    /// One less shares a record's object; the last one frees it.
    fn leave(&self, record: SwapEntry) {
        let view = self.index.view();
        let locked = view.lock_existing(record);
        if self.shares.count(record).fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        self.dispose(locked.dropped());
        self.shares.give(record);
    }

    /// Frees what a state refers to that is no longer in any entry.
    pub(crate) fn dispose(&self, old: State) {
        match old {
            State::Absent | State::Filled(_) => {}
            State::Pooled(object) => self.pool.free(object.handle),
            State::Placed(extent) => self.slots.remove(extent),
            State::Shared(record) => self.leave(record),
            State::Member(member) => self.leave_unit(member),
        }
    }

    /// One page less is in a unit; the last one frees it.
    pub(crate) fn leave_unit(&self, member: Member) {
        if !self.units.leave(member) {
            return;
        }
        for piece in Units::pieces(member.unit) {
            let view = self.index.view();
            self.dispose(view.lock_existing(piece).dropped());
        }
        self.units.give(member.unit);
    }

    /// Copies out what a locked entry refers to; it may be unlocked then.
    fn fetch(&self, key: SwapEntry, locked: &mut Locked<'_>) -> Result<Fetched<'_>, Error> {
        match locked.state() {
            State::Absent => Ok(Fetched::Absent),
            State::Filled(pattern) => Ok(Fetched::Filled(pattern)),
            State::Pooled(object) => {
                let mut scratch = self.scratch.lock_here();
                let bytes = usize::from(object.form.bytes);
                let Header { checksum, .. } =
                    self.pool.read(object.handle, &mut scratch.object[..bytes]);
                locked.touched();
                Ok(Fetched::Object { scratch, form: object.form, checksum })
            }
            State::Placed(extent) => self.fetch_placed(key, locked.proof(), extent),
            State::Member(member) => self.fetch_member(key, locked.proof() as u32, member),
            // The record stays while this entry, which shares it, is locked.
            State::Shared(record) => {
                self.fetch(record, &mut self.index.view().lock_existing(record))
            }
        }
    }

    /// Copies out as much of a unit as a page in it needs. The page's entry is locked, so the unit
    /// stays.
    fn fetch_member(
        &self,
        key: SwapEntry,
        checksum: u32,
        member: Member,
    ) -> Result<Fetched<'_>, Error> {
        let mut unit = [0; UNIT_BYTES_MAX];
        let (mut there, mut needed) = (0, 1);
        for piece in Units::pieces(member.unit) {
            if there >= needed {
                break;
            }
            let read = self.fetch_piece(piece, &mut unit[there..])?;
            there += read.ok_or_else(|| self.damaged(key, "a piece of its unit is missing"))?;
            needed = UnitDecoder::bytes_for(&unit[..there], member.position.into())
                .ok_or_else(|| self.damaged(key, "it is not in its unit"))?;
        }
        if there < needed {
            return Err(self.damaged(key, "its unit is too short"));
        }
        let mut scratch = self.scratch.lock_here();
        scratch.keep_unit(&unit[..needed]);
        Ok(Fetched::Member { scratch, bytes: needed, position: member.position, checksum })
    }

    /// Makes the page of what was fetched, and verifies it.
    fn give(&self, key: SwapEntry, fetched: Fetched<'_>, page: &mut Page) -> Result<Load, Error> {
        match fetched {
            Fetched::Absent => {
                self.counters.increment(Absent);
                return Ok(Load::Absent);
            }
            Fetched::Filled(pattern) => {
                self.counters.increment(LoadsFilled);
                pattern.fill(page);
            }
            Fetched::Object { mut scratch, form, checksum } => {
                let decoded = scratch.decompress(form.codec, form.bytes.into(), page);
                drop(scratch);
                self.verify(key, decoded, checksum, page)?;
            }
            Fetched::Member { mut scratch, bytes, position, checksum } => {
                let decoded = scratch.decompress_member(bytes, position, page);
                drop(scratch);
                self.verify(key, decoded, checksum, page)?;
                self.counters.increment(LoadsRecompressed);
            }
        }
        self.counters.increment(Loads);
        Ok(Load::Hit)
    }

    fn verify(
        &self,
        key: SwapEntry,
        decoded: Result<(), Undecodable>,
        checksum: u32,
        page: &Page,
    ) -> Result<(), Error> {
        verify(decoded, checksum, page).map_err(|what| self.damaged(key, what))
    }

    pub(crate) fn damaged(&self, key: SwapEntry, what: &'static str) -> Error {
        self.counters.increment(DecompressFail);
        Error::Damaged { entry: key.0, what }
    }

    /// Moves an object for the pool, if its owner is not in use: see `pool::Relocate`.
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
