//! The options of a pager, and its making.

use crate::core::Inner;
use crate::doors;
use crate::error::Error;
use crate::fault;
use crate::fork;
use crate::layers::Layers;
use crate::mode::{Means, Mode};
use crate::on_fork::OnFork;
use crate::pager::Pager;
use crate::size::{MemorySize, check_memory, parse_size};
use crate::threads::Handle;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use uzswap_engine::backing::{Backing, BackingSpec, NoBacking, open_backing};
use uzswap_engine::compress::Algorithm;
use uzswap_engine::{Cache, Config, PAGE_BYTES};
use uzswap_policy::order::{Order, PagerPolicy};
use uzswap_remote::{Address, ConnectError, Connected, Tiers};
use uzswap_sys::cpu;
use uzswap_sys::fault_signals;
use uzswap_trace::Log;

/// The options of a new pager.
#[derive(Debug, Clone)]
#[must_use]
pub struct PagerBuilder {
    memory: Option<MemorySize>,
    memory_max: Option<u64>,
    compressor: String,
    backing: String,
    store: Option<String>,
    unnamed: Option<(PathBuf, u64)>,
    seals_backing: bool,
    mode: Option<Mode>,
    on_fork: OnFork,
    reclaim_threads: usize,
    means: Option<Means>,
    policy: PagerPolicy,
    accesses: Option<PathBuf>,
}

impl PagerBuilder {
    /// Memory that all regions together may take: resident pages, staged ones, the pool and all
    /// tables. At least 8 MiB. Must be given.
    pub fn memory(mut self, memory: impl Into<MemorySize>) -> Self {
        self.memory = Some(memory.into());
        self
    }

    /// The most bytes that the pool may ever need if the budget grows; by default the machine's
    /// memory. Tables take 64 bytes for each 2 MiB.
    pub fn memory_max(mut self, bytes: u64) -> Self {
        self.memory_max = Some(bytes);
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

    /// A backing in a file without a name in `folder`, which takes space as it is written, at most
    /// `bytes`. With [`OnFork::Whole`] a child has a copy of it.
    pub fn unnamed_backing(mut self, folder: impl Into<PathBuf>, bytes: u64) -> Self {
        self.unnamed = Some((folder.into(), bytes));
        self
    }

    /// Encrypts and authenticates pages on the backing, as by default. Switch this off for a disk
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

    /// The share of a forked child in the regions; [`OnFork::Absent`] by default.
    pub fn on_fork(mut self, on_fork: OnFork) -> Self {
        self.on_fork = on_fork;
        self
    }

    /// Threads that take pages out, 1 to 64; 1 by default.
    pub fn reclaim_threads(mut self, threads: usize) -> Self {
        self.reclaim_threads = threads;
        self
    }

    /// The means by which pages leave and come back. The default is the fastest means of the mode.
    pub fn means(mut self, means: Means) -> Self {
        self.means = Some(means);
        self
    }

    /// The policy that decides which page leaves.
    pub fn policy(mut self, policy: PagerPolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Writes each touch of an absent page to a trace that [`Log::create`] has made. The budget is
    /// then for pages alone, and the pool has no limit.
    pub fn accesses(mut self, trace: impl Into<PathBuf>) -> Self {
        self.accesses = Some(trace.into());
        self
    }

    /// Makes the pager and starts its threads.
    pub fn build(self) -> Result<Pager, Error> {
        // Errors in other options are returned before a file is made.
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

    /// Makes the pager with a backing of the caller's own, instead of [`Self::backing`].
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
        let door = doors::open(mode, self.means)?;
        let failed = |what| move |source| Error::System { what, source };
        fork::watch().map_err(failed("watch for forks"))?;
        match mode {
            Mode::InThread => fault_signals::on_bus(fault::serve),
            Mode::Protection => {
                fault_signals::on_bus(|_| false).and_then(|()| fault_signals::on_segv(fault::serve))
            }
            Mode::HandlerThreads => Ok(()),
        }
        .map_err(failed("set a handler of signals"))?;
        let ever = self.memory_max.unwrap_or(u64::MAX);
        let config = cache_config((bytes, ever), self.compressor.parse()?, self.seals_backing);
        let cache = Cache::new(config, backing)?;
        let log = self.accesses.as_deref().map(Log::join).transpose()?;
        let inner = Inner::new(bytes, mode, self.on_fork, door, cache)?;
        inner.keep_ahead();
        inner.tend();
        let mut inner = inner.recording(log);
        inner.hand.get_mut().unwrap_or_else(PoisonError::into_inner).order = Order::by(self.policy);
        (inner.layers, inner.tiers) = (layers, tiers);
        let inner = Arc::new(inner);
        match self.on_fork {
            OnFork::Absent => {}
            OnFork::PrivateCopy => fork::copy_regions_of(&inner),
            OnFork::Whole => {
                inner.staging.set_inherited().map_err(failed("let forks inherit memory"))?;
                inner.cache.let_forks_inherit().map_err(failed("let forks inherit a key"))?;
            }
        }
        let handle = Handle::new(inner);
        handle.start(self.reclaim_threads).map_err(failed("start a thread"))?;
        Ok(Pager::new(handle))
    }
}

/// The cache's directory takes 32 bytes for each 16 MiB of addresses. For addresses of 2048 times
/// the budget, it takes a 250th of the budget.
fn cache_config((memory, ever): (u64, u64), algorithm: Algorithm, seals_backing: bool) -> Config {
    const GIB: u64 = 1 << 30;
    let addresses = memory.saturating_mul(2048).clamp(64 * GIB, 8192 * GIB);
    let machine = cpu::memory_info().map_or(memory, |info| info.total);
    let ram_bytes = machine.min(ever).max(memory);
    Config {
        pages_max: (addresses / PAGE_BYTES as u64) as u32,
        ram_bytes,
        ram_bytes_max: ram_bytes,
        pool_bytes_max: memory / 2,
        algorithm,
        seals_backing,
    }
}

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

impl Pager {
    /// The options of a new pager.
    pub fn builder() -> PagerBuilder {
        PagerBuilder {
            memory: None,
            memory_max: None,
            compressor: "lz4:0".into(),
            backing: "none".into(),
            store: None,
            unnamed: None,
            mode: None,
            on_fork: OnFork::default(),
            reclaim_threads: 1,
            seals_backing: true,
            means: None,
            policy: PagerPolicy::default(),
            accesses: None,
        }
    }

    /// Checks if [`PagerBuilder::unnamed_backing`] may be in a folder; the error has the reason.
    pub fn check_unnamed_backing(folder: &Path) -> std::io::Result<()> {
        Layers::create(folder, 2 << 20).map(drop)
    }
}
