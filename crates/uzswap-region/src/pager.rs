//! A pager: a budget, the cache behind it, and the regions that share both.

use crate::budget::Budget;
use crate::door::Door;
use crate::error::Error;
use crate::fault;
use crate::fork;
use crate::keys::Keys;
use crate::lane::Lanes;
use crate::layers::Layers;
use crate::mode::{Means, Mode};
use crate::on_fork::OnFork;
use crate::reclaim::Hand;
use crate::region::Region;
use crate::registry;
use crate::returns::Returns;
use crate::size::{MemorySize, check_memory, parse_size};
use crate::space::Space;
use crate::staging::{BATCH, Staging};
use crate::stats::Stats;
use crate::steady;
use crate::streams::Ahead;
use crate::vec::RegionVec;
use crossbeam_utils::CachePadded;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering::*, fence,
};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::thread::JoinHandle;
use uzswap_engine::backing::{Backing, BackingSpec, NoBacking, open_backing};
use uzswap_engine::compress::Algorithm;
use uzswap_engine::{Cache, Config, PAGE_BYTES};
use uzswap_remote::{Address, ConnectError, Connected, Tiers};
use uzswap_sys::bus::{self, Blocked};
use uzswap_sys::cpu;
use uzswap_sys::map;
use uzswap_sys::own_threads;
use uzswap_sys::uffd::{Message, Uffd};
use uzswap_trace::Log;

/// `none`, or `PATH[:SIZE]`: a size follows the last colon, unless the whole is a file.
fn parse_backing(text: &str) -> Result<BackingSpec, Error> {
    if text == "none" {
        return Ok(BackingSpec::None);
    }
    let (path, bytes) = match text.rsplit_once(':') {
        Some((path, size)) if !PathBuf::from(text).exists() => {
            (path, Some(parse_size("the size of the backing", size)?))
        }
        _ => (text, None),
    };
    Ok(BackingSpec::Path { path: path.into(), bytes })
}

fn connect(address: &str) -> Result<Connected, Error> {
    Ok(Connected::to(&Address::parse(address).map_err(ConnectError::from)?)?)
}

/// Threads that serve messages, at most: they share one queue in the kernel.
const HANDLERS_MAX: usize = 8;

/// Bytes of a thread's stack.
const STACK: usize = 512 << 10;

/// The options of a new pager.
#[derive(Debug, Clone)]
#[must_use]
pub struct PagerBuilder {
    memory: Option<MemorySize>,
    compressor: String,
    backing: String,
    store: Option<String>,
    unnamed: Option<(PathBuf, u64)>,
    seals_backing: bool,
    mode: Option<Mode>,
    on_fork: OnFork,
    reclaim_threads: usize,
    means: Option<Means>,
    accesses: Option<PathBuf>,
}

impl PagerBuilder {
    /// Memory that all regions together may take: resident pages, staged ones, the pool and all
    /// tables. At least 8 MiB. Must be given.
    pub fn memory(mut self, memory: impl Into<MemorySize>) -> Self {
        self.memory = Some(memory.into());
        self
    }

    /// The compressor of pages: `lz4:0` (the default: LZ4 made for heaps), `lz4`, `zstd`, `zstd:3`,
    /// `wkdm`, …
    pub fn compressor(mut self, name: &str) -> Self {
        self.compressor = name.into();
        self
    }

    /// Where the coldest pages go: `PATH[:SIZE]`, a new file with a size or a block device, or
    /// `none` (the default). Beside it, or instead of it, the address of a store in another
    /// machine's memory, as in `valkey://HOST:PORT/?max=8G&copies=1`. One text may name both, the
    /// file first, with a space between them.
    pub fn backing(mut self, backing: &str) -> Self {
        let (file, store) = Address::split(backing);
        self.store = store.map(str::to_owned).or(self.store);
        self.backing = file.map(str::to_owned).unwrap_or(self.backing);
        self
    }

    /// The same in a file without a name in a folder, which takes space as it is written, at most
    /// `bytes`. With [`OnFork::Whole`] a child has a copy of it.
    pub fn unnamed_backing(mut self, folder: impl Into<PathBuf>, bytes: u64) -> Self {
        self.unnamed = Some((folder.into(), bytes));
        self
    }

    /// Encrypts and authenticates pages on the backing, as by default. Switch it off for a disk
    /// that is encrypted itself.
    pub fn seals_backing(mut self, seals: bool) -> Self {
        self.seals_backing = seals;
        self
    }

    /// The threads that serve faults. By default, the safest that the process may use:
    /// [`Mode::available`].
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = Some(mode);
        self
    }

    /// A forked process's share; [`OnFork::Absent`] by default.
    pub fn on_fork(mut self, on_fork: OnFork) -> Self {
        self.on_fork = on_fork;
        self
    }

    /// Threads that take pages out, 1 to 64; 1 by default.
    pub fn reclaim_threads(mut self, threads: usize) -> Self {
        self.reclaim_threads = threads;
        self
    }

    /// The means by which pages leave and come back. By default the fastest of the mode.
    pub fn means(mut self, means: Means) -> Self {
        self.means = Some(means);
        self
    }

    /// Writes each touch of a page that is not there to a trace, which was made by [`Log::create`].
    /// The budget is for pages alone then, and the pool is beside it without a limit.
    pub fn accesses(mut self, trace: impl Into<PathBuf>) -> Self {
        self.accesses = Some(trace.into());
        self
    }

    /// Makes the pager and starts its threads.
    pub fn build(self) -> Result<Pager, Error> {
        // Errors in the rest are returned before a file is made.
        check_memory(self.bytes()?)?;
        self.compressor.parse::<Algorithm>()?;
        let connected = self.store.as_deref().map(connect).transpose()?;
        if let Some((folder, bytes)) = &self.unnamed {
            let what = "make a file without a name for the backing";
            let file_bytes = connected.as_ref().map_or(*bytes, |store| store.file_bytes(*bytes));
            let layers = Layers::create(folder, file_bytes);
            let layers = layers.map_err(|source| Error::System { what, source })?;
            let local = Box::new(layers.clone());
            let Some(connected) = connected else {
                return self.build_with(local, Some(layers), None);
            };
            let tiers = connected.over(local, *bytes)?;
            return self.build_with(Box::new(tiers.clone()), Some(layers), Some(tiers));
        }
        let spec = parse_backing(&self.backing)?;
        let Some(connected) = connected else { return self.build_on(open_backing(&spec)?) };
        let local = match spec {
            BackingSpec::None => Box::new(NoBacking),
            spec => open_backing(&spec)?,
        };
        let bytes = local.bytes();
        let tiers = connected.over(local, bytes)?;
        self.build_with(Box::new(tiers.clone()), None, Some(tiers))
    }

    fn bytes(&self) -> Result<u64, Error> {
        let none = MemorySize::from(0);
        self.memory.clone().unwrap_or(none).bytes("the budget")
    }

    /// The same, with a backing of the caller's own instead of [`Self::backing`].
    pub fn build_on(self, backing: Box<dyn Backing>) -> Result<Pager, Error> {
        self.build_with(backing, None, None)
    }

    fn build_with(
        self,
        backing: Box<dyn Backing>,
        layers: Option<Layers>,
        tiers: Option<Tiers>,
    ) -> Result<Pager, Error> {
        let bytes = check_memory(self.bytes()?)?;
        if !(1..=64).contains(&self.reclaim_threads) {
            let must = "from 1 to 64".into();
            let value = self.reclaim_threads as u64;
            return Err(Error::Range { what: "reclaim_threads", value, must });
        }
        let mode = self.mode.map_or_else(Mode::available, Ok)?;
        let door = mode.door(self.means)?;
        let failed = |what| move |source| Error::System { what, source };
        fork::watch().map_err(failed("watch for forks"))?;
        match mode {
            Mode::InThread => bus::on_bus(fault::serve),
            Mode::Protection => bus::on_bus(|_| false).and_then(|()| bus::on_segv(fault::serve)),
            Mode::HandlerThreads => Ok(()),
        }
        .map_err(failed("set a handler of signals"))?;
        let config = cache_config(bytes, self.compressor.parse()?, self.seals_backing);
        let cache = Cache::new(config, backing)?;
        let log = self.accesses.as_deref().map(Log::join).transpose()?;
        let inner = Inner::new(bytes, mode, self.on_fork, door, cache)?.recording(log);
        let inner = Arc::new(Inner { layers, tiers, ..inner });
        match self.on_fork {
            OnFork::Absent => {}
            OnFork::PrivateCopy => fork::copy_regions_of(&inner),
            OnFork::Whole => {
                inner.staging.set_inherited().map_err(failed("let forks inherit memory"))?;
                inner.cache.let_forks_inherit().map_err(failed("let forks inherit a key"))?;
            }
        }
        let handle = Handle { inner, threads: Mutex::default() };
        handle.start(self.reclaim_threads).map_err(failed("start a thread"))?;
        Ok(Pager { handle: Arc::new(handle) })
    }
}

/// The cache's directory takes 32 bytes for each 16 MiB of addresses: 2048 times the budget costs
/// it a 250th.
fn cache_config(memory: u64, algorithm: Algorithm, seals_backing: bool) -> Config {
    const GIB: u64 = 1 << 30;
    let addresses = memory.saturating_mul(2048).clamp(64 * GIB, 8192 * GIB);
    let ram_bytes = cpu::memory_info().map_or(memory, |info| info.total.max(memory));
    Config {
        pages_max: (addresses / PAGE_BYTES as u64) as u32,
        ram_bytes,
        ram_bytes_max: ram_bytes,
        pool_bytes_max: memory / 2,
        algorithm,
        seals_backing,
    }
}

/// The state that all parts of a pager share.
pub(crate) struct Inner {
    pub(crate) door: Box<dyn Door>,
    pub(crate) cache: Cache,
    pub(crate) budget: Budget,
    pub(crate) staging: Staging,
    pub(crate) lanes: Lanes,
    pub(crate) ahead: Ahead,
    pub(crate) hand: Mutex<Hand>,
    pub(crate) returns: Returns,
    /// Of the process whose pager it is: see [`steady::generation`].
    generation: AtomicU32,
    pub(crate) on_fork: OnFork,
    /// The trace that touches are written to: see [`crate::accesses`].
    pub(crate) log: Option<Log>,
    regions: RwLock<BTreeMap<u32, Arc<Space>>>,
    /// The backing, if it is files that children go on with.
    pub(crate) layers: Option<Layers>,
    /// The backing, if a part of it is at a store.
    pub(crate) tiers: Option<Tiers>,
    /// Of windows.
    pub(crate) keys: Keys,
    mode: Mode,
    next_region: AtomicU32,
    staging_batches: usize,
    table_bytes: AtomicI64,
    pinned: AtomicI64,
    pool_limit: AtomicI64,
    stopping: AtomicBool,
    /// Of each handler thread, how often it began to serve a fault and how often it was done: odd
    /// while it serves one.
    handlers: [CachePadded<AtomicU64>; HANDLERS_MAX],
    handlers_begun: AtomicUsize,
}

impl Inner {
    fn new(
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
            ahead: Ahead::default(),
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
            stopping: AtomicBool::new(false),
            handlers: Default::default(),
            handlers_begun: AtomicUsize::new(0),
        };
        // The pool's limit is hard without a backing; with one, writeback begins below it.
        if inner.cache.statistic("backing_total_size") == Some(0) {
            let set = inner.cache.set_attribute("accept_threshold_percent", "100");
            set.expect("100 percent is a value of it");
        }
        inner.tend();
        Ok(inner)
    }

    /// Where absent pages are faults.
    pub(crate) fn uffd(&self) -> &Uffd {
        self.door.uffd().expect("asked for where faults are at absent pages")
    }

    pub(crate) fn regions(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Space>>> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn staging_batches(&self) -> usize {
        self.staging_batches
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }

    pub(crate) fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Tells the budget the size of the cache, and the cache the limit of its pool. The limit is
    /// the budget less an eighth, which stays for pages, and less the cache's memory beside the
    /// pool.
    pub(crate) fn account(&self) {
        if self.log.is_some() {
            return self.budget.set_cache_bytes(0);
        }
        let tables = self.table_bytes.load(Relaxed).max(0) as usize;
        self.budget.set_cache_bytes(self.cache.memory_bytes() + tables);
        let bytes = self.budget.bytes() as i64;
        let for_pool = bytes - bytes / 8 - (self.cache.bytes_besides_pool() + tables) as i64;
        let limit = self.cache.pool_bytes_in(for_pool.max(0) as usize).max(1 << 20) as i64;
        if (limit - self.pool_limit.load(Relaxed)).abs() > bytes / 128 {
            self.pool_limit.store(limit, Relaxed);
            let set = self.cache.set_attribute("max_pool_bytes", &limit.to_string());
            set.expect("at least 1 MiB is a value of it");
        }
    }

    /// The work of a handler thread.
    fn run_handler(&self) {
        let turns = &self.handlers[self.handlers_begun.fetch_add(1, Relaxed)];
        loop {
            match self.uffd().next() {
                Ok(Message::Fault(fault)) => {
                    // Ordered before the look for the region: see `wait_for_handlers`.
                    turns.fetch_add(1, Relaxed);
                    fence(SeqCst);
                    fault::serve(fault);
                    turns.fetch_add(1, Release);
                    let page = fault.address & !(PAGE_BYTES - 1);
                    // An error would mean that the region has been unmapped meanwhile.
                    let _ = self.uffd().wake(page..page + PAGE_BYTES);
                }
                Ok(Message::Other) => {}
                Ok(Message::Stop) => return,
                // A thread that waits for a page would wait for ever.
                Err(error) => panic!("cannot read from userfaultfd: {error}"),
            }
        }
    }

    /// Waits until no handler thread serves a fault that it began to before. A thread that waited
    /// for a page may go on before its own message is served, when another thread has brought the
    /// page in. Then it may unmap the region.
    fn wait_for_handlers(&self) {
        fence(SeqCst);
        for turns in &self.handlers {
            let seen = turns.load(Acquire);
            while !seen.is_multiple_of(2) && turns.load(Acquire) == seen {
                std::thread::yield_now();
            }
        }
    }

    /// The work of the thread that tends the store.
    fn run_store(&self) {
        self.tiers.iter().for_each(|tiers| tiers.run(|| self.is_stopping()));
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

    /// In a fork that has all of its parent's pager: it is this process's own.
    pub(crate) fn adopt_process(&self) {
        self.generation.store(steady::generation(), Relaxed);
    }

    pub(crate) fn next_region(&self) -> u32 {
        self.next_region.fetch_add(1, Relaxed)
    }

    /// Counts bytes of a table that was made.
    pub(crate) fn count_table(&self, bytes: i64) {
        self.table_bytes.fetch_add(bytes, Relaxed);
    }
}

thread_local! {
    static IS_PAGERS: Cell<bool> = const { Cell::new(false) };
}

/// True if the calling thread is one of a pager's own. An allocator that gives out memory of
/// regions must not give it any: it may be the one that others wait for at a fault.
pub fn is_pager_thread() -> bool {
    IS_PAGERS.get()
}

/// Owns the threads.
pub(crate) struct Handle {
    pub(crate) inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Handle {
    fn start(&self, reclaim_threads: usize) -> std::io::Result<()> {
        // Threads inherit the mask: no signal of the program's is handled in ours.
        let _blocked = Blocked::all();
        let start = |name: &str, run: fn(&Inner)| {
            let inner = self.inner.clone();
            let thread = std::thread::Builder::new().name(name.into()).stack_size(STACK);
            let coming = own_threads::Coming::new();
            let run = move || {
                let _entered = coming.enter();
                IS_PAGERS.set(true);
                map::remember_stack(STACK);
                run(&inner);
            };
            let thread = thread.spawn(run)?;
            self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
            Ok::<_, std::io::Error>(())
        };
        for _ in 0..reclaim_threads {
            start("uzswap-reclaim", Inner::run_reclaim)?;
        }
        start("uzswap-ahead", Inner::run_ahead)?;
        if self.inner.tiers.is_some() {
            start("uzswap-remote", Inner::run_store)?;
        }
        if self.inner.mode == Mode::HandlerThreads {
            for _ in 0..cpu::allowed().min(HANDLERS_MAX) {
                start("uzswap-fault", Inner::run_handler)?;
            }
        }
        Ok(())
    }
}

impl Handle {
    /// Ends the threads.
    fn stop(&self) {
        self.inner.stop_reclaim();
        self.inner.ahead.bell().ring();
        self.inner.tiers.iter().for_each(Tiers::ring);
        self.inner.door.uffd().into_iter().for_each(Uffd::stop);
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            drop(thread.join());
        }
        self.inner.stopping.store(false, Relaxed);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.inner.check_process().is_err() {
            // The threads and the memory are the parent's; its addresses may be others' here.
            std::mem::forget(self.inner.clone());
            return;
        }
        self.stop();
        self.inner.tiers.iter().for_each(Tiers::clear);
    }
}

/// A budget of memory, shared by the regions that are made with it. Cheap to clone.
#[derive(Clone)]
pub struct Pager {
    handle: Arc<Handle>,
}

impl fmt::Debug for Pager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pager").field("memory", &self.memory()).field("mode", &self.mode()).finish()
    }
}

impl Pager {
    /// The options of a new one.
    pub fn builder() -> PagerBuilder {
        PagerBuilder {
            memory: None,
            compressor: "lz4:0".into(),
            backing: "none".into(),
            store: None,
            unnamed: None,
            mode: None,
            on_fork: OnFork::default(),
            reclaim_threads: 1,
            seals_backing: true,
            means: None,
            accesses: None,
        }
    }

    /// Checks if [`PagerBuilder::unnamed_backing`] may be in a folder; the error has the reason.
    pub fn check_unnamed_backing(folder: &Path) -> std::io::Result<()> {
        Layers::create(folder, 2 << 20).map(drop)
    }

    /// Makes a region: `bytes` of zeros (rounded up to pages), of which as much is in memory as
    /// the budget allows.
    pub fn map(&self, bytes: usize) -> Result<Region, Error> {
        let inner = self.inner();
        inner.check_process()?;
        let _blocked = Blocked::all();
        if bytes == 0 {
            let must = "at least 1".into();
            return Err(Error::Range { what: "the size of a region", value: 0, must });
        }
        if inner.door.uffd().is_none() {
            let (text, known) = (inner.mode.to_string(), "in-thread, handler-threads");
            return Err(Error::Choice { what: "mode for regions", text, known });
        }
        let _steady = inner.steady();
        let max = inner.cache.pages_max() as u64 * PAGE_BYTES as u64;
        let pages = u32::try_from(bytes.div_ceil(PAGE_BYTES));
        let area = pages.ok().and_then(|pages| inner.cache.add_area(pages));
        let area = area.ok_or(Error::Addresses { bytes, max })?;
        let id = inner.next_region();
        let space = match Space::new(id, inner.clone(), bytes, area) {
            Ok(space) => Arc::new(space),
            Err(error) => {
                inner.cache.remove_area(area);
                return Err(error);
            }
        };
        inner.table_bytes.fetch_add(space.table_bytes() as i64, Relaxed);
        inner.regions.write().unwrap_or_else(PoisonError::into_inner).insert(id, space.clone());
        registry::add(&space);
        inner.account();
        Ok(Region::new(space, self.clone()))
    }

    /// A vector of `len` zeros in a region of its own.
    ///
    /// A type that must be dropped is refused when the program is compiled.
    pub fn vec_zeroed<T: bytemuck::Zeroable>(&self, len: usize) -> Result<RegionVec<T>, Error> {
        RegionVec::zeroed(self, len)
    }

    /// Changes the budget. Takes effect at once; pages above a smaller one are evicted within
    /// moments.
    pub fn set_memory(&self, memory: impl Into<MemorySize>) -> Result<(), Error> {
        let inner = self.inner();
        inner.check_process()?;
        let bytes = check_memory(memory.into().bytes("the budget")?)?;
        let _blocked = Blocked::all();
        inner.budget.set_bytes(bytes);
        inner.account();
        inner.budget.changed();
        inner.budget.ring();
        Ok(())
    }

    /// Decides if a thread without room waits for a larger budget; if not, that ends the process.
    /// It does not by itself.
    pub fn set_patient(&self, is_patient: bool) {
        self.inner().budget.set_patient(is_patient);
    }

    /// True if a thread waits for a larger budget: no page can be evicted any more.
    pub fn is_starved(&self) -> bool {
        self.inner().budget.is_starved()
    }

    /// The budget, bytes.
    pub fn memory(&self) -> u64 {
        self.inner().budget.bytes()
    }

    /// The threads that serve faults.
    pub fn mode(&self) -> Mode {
        self.inner().mode
    }

    /// Figures, by the names of the engine's control files, and the region's own.
    pub fn stats(&self) -> Stats {
        let _blocked = Blocked::all();
        Stats::of(self.inner())
    }

    /// Start and bytes of the region of this pager that an address lies in.
    pub fn region_of(&self, address: usize) -> Option<(usize, usize)> {
        let space = registry::find(address)?;
        let is_ours = Arc::ptr_eq(&space.pager, self.inner());
        is_ours.then_some((space.base(), space.bytes()))
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    /// Does `work` without any thread of the pager's. Faults are served meanwhile, and a thread
    /// that finds no room evicts pages itself.
    pub fn without_threads<R>(&self, work: impl FnOnce() -> R) -> std::io::Result<R> {
        self.handle.stop();
        let result = work();
        self.handle.start(1).map(|()| result)
    }

    /// Ends the pager's threads. Faults are served all the same.
    pub fn stop_threads(&self) {
        self.handle.stop();
    }

    /// In a fork, which has none of its parent's threads.
    pub(crate) fn restart_threads(&self) -> std::io::Result<()> {
        let mut threads = self.handle.threads.lock().unwrap_or_else(PoisonError::into_inner);
        // Of threads that are not here; they are not waited for.
        threads.drain(..).for_each(std::mem::forget);
        drop(threads);
        self.handle.start(1)
    }
}

impl Inner {
    /// Takes a region apart.
    pub(crate) fn unmap(&self, space: &Space) {
        let _blocked = Blocked::all();
        registry::remove(space);
        // Before anything is held that a handler may come to wait for.
        self.wait_for_handlers();
        let _steady = self.steady();
        self.regions_mut().remove(&space.id);
        let pages = space.close();
        self.cache.remove_area(space.area);
        self.table_bytes.fetch_sub(space.table_bytes() as i64, Relaxed);
        self.account();
        self.budget.give_back(pages);
    }

    pub(crate) fn regions_mut(&self) -> std::sync::RwLockWriteGuard<'_, BTreeMap<u32, Arc<Space>>> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }
}
