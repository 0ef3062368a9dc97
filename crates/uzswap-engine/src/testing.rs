//! Shared by tests, fuzzers and benchmarks: pages to store, operations, the model of a cache, and a
//! backing that fails on command.

mod backing;
mod content;

pub use backing::{Faults, TestBacking};
pub use content::{Content, Noise, make_page, page_of};

use crate::backing::Backing;
use crate::compress::{Algorithm, Codec, Codecs};
use crate::index::State;
use crate::{Area, Cache, Config, Error, Load, PAGE_BYTES, Page, SectionState, Store, SwapEntry};
use std::collections::HashMap;
use std::convert::Infallible;
use std::env;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write as _};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

/// Says that the calling test does not run, and the reason.
///
/// The test harness hides the output of tests that pass, so this writes to standard error itself,
/// and adds a line to the file named in `UZSWAP_SKIPPED`, which `./check` counts.
pub fn skip(reason: impl Display) {
    let thread = thread::current();
    let line = format!("skipped: {}: {reason}\n", thread.name().unwrap_or("a test"));
    // A test need not fail because its message is lost.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(path) = env::var_os("UZSWAP_SKIPPED") {
        let list = File::options().append(true).create(true).open(path);
        let _ = list.and_then(|mut list| list.write_all(line.as_bytes()));
    }
}

/// Keeps the calling thread on its CPU, because a test looks at that CPU's own slots or objects.
pub fn stay_on_a_cpu() {
    let mut set = rustix::thread::CpuSet::new();
    set.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &set).expect("it may stay where it is");
}

/// An operation on a cache.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    /// Store a page; a rejected one is written through if `through`.
    Store {
        /// Its offset in the area.
        offset: u32,
        /// Its content.
        content: Content,
        /// Its seed.
        seed: u64,
        /// True if a rejected page is written through.
        through: bool,
    },
    /// Load a page.
    Load(u32),
    /// Load neighbours: the first, and their number.
    LoadMany(u32, u32),
    /// Load a page and drop it.
    LoadExclusive(u32),
    /// Drop a page.
    Invalidate(u32),
    /// Drop a run of pages.
    Discard(u32, u32),
    /// Do the work of the front end's maintaining thread.
    Maintain,
    /// Recompress the oldest pages into at most this many units.
    Recompress(usize),
    /// Train a dictionary on the stored pages.
    Train,
    /// Write back this many bytes.
    Shrink(usize),
    /// Empty a section of the pool.
    EmptySection(usize),
    /// Take a section of the pool off, or bring it online.
    Section(usize, bool),
    /// Set the memory of the machine.
    Memory(u64),
    /// Set an attribute.
    Set(&'static str, &'static str),
    /// Make writes to the backing fail, or succeed again.
    FailWrites(bool),
    /// Make reads from the backing fail, or succeed again.
    FailReads(bool),
    /// Try writeback again.
    Resume,
    /// Bring a CPU to a state, both by number; the third says that the next step fails.
    Cpu(usize, usize, bool),
}

const SETTINGS: [(&str, &str); 20] = [
    ("compressor", "lz4"),
    ("compressor", "lz4:0"),
    ("compressor", "lz4:-1"),
    ("compressor", "zstd"),
    ("compressor", "zstd:3"),
    ("compressor", "lzo"),
    ("compressor", "deflate"),
    ("compressor", "wkdm"),
    ("compressor", "raw"),
    ("max_compression_ratio", "40"),
    ("max_compression_ratio", "100"),
    ("max_pool_bytes", "1048576"),
    ("max_pool_bytes", "3000000"),
    ("accept_threshold_percent", "50"),
    ("accept_threshold_percent", "100"),
    ("same_pages_enabled", "N"),
    ("same_pages_enabled", "Y"),
    ("enabled", "Y"),
    ("dictionary_enabled", "N"),
    ("dictionary_enabled", "Y"),
];

/// Decodes operations from any bytes: proptest shrinks them and a fuzzer mutates them.
pub fn decode_ops(bytes: &[u8], pages: u32) -> impl Iterator<Item = Op> {
    bytes.as_chunks::<4>().0.iter().map(move |[kind, a, b, c]| {
        let offset = (u32::from(*a) << 8 | u32::from(*b)) % pages;
        match kind % 64 {
            0..26 => Op::Store {
                offset,
                content: Content::pick(u64::from(*c)),
                seed: u64::from(*c) / Content::ALL.len() as u64,
                through: kind % 2 == 0,
            },
            26..38 => Op::Load(offset),
            38..42 => Op::LoadMany(offset, u32::from(c % 100)),
            42..45 => Op::LoadExclusive(offset),
            45..50 => Op::Invalidate(offset),
            50 => Op::Discard(offset, u32::from(*c)),
            51..53 => Op::Maintain,
            53 => Op::Recompress(usize::from(c % 4)),
            54..56 => Op::Shrink(usize::from(*c) << 12),
            56 => match c % 8 {
                0..4 => Op::EmptySection(usize::from(c % 4)),
                4 => Op::Memory(u64::from(*b) << 18),
                _ => Op::Section(usize::from(*a % 4), c % 8 > 5),
            },
            57..60 => {
                let (name, value) = SETTINGS[usize::from(*c) % SETTINGS.len()];
                Op::Set(name, value)
            }
            60 => Op::FailWrites(c % 2 == 0),
            61 => Op::FailReads(c % 2 == 0),
            62 => Op::Train,
            _ if c % 2 == 0 => Op::Resume,
            _ => Op::Cpu(usize::from(*a), usize::from(*b), c % 4 == 1),
        }
    })
}

/// Parameters of a cache for a test.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    /// Pages of the area.
    pub pages: u32,
    /// Memory of the machine, bytes.
    pub ram_bytes: u64,
    /// Limit of the pool, bytes.
    pub pool_bytes: u64,
    /// Bytes of the backing; 0 for none.
    pub backing_bytes: usize,
    /// Its blocks, bytes.
    pub block_bytes: usize,
    /// The compressor.
    pub compressor: &'static str,
    /// True if the backing is sealed.
    pub seals_backing: bool,
}

impl Default for Setup {
    /// 3000 pages, a pool of 8 MiB and no backing.
    fn default() -> Self {
        Self {
            pages: 3000,
            ram_bytes: 64 << 20,
            pool_bytes: 8 << 20,
            backing_bytes: 0,
            block_bytes: 512,
            compressor: "lz4",
            seals_backing: true,
        }
    }
}

impl Setup {
    /// The cache, its one area, and the faults of its [`TestBacking`].
    pub fn make(self) -> (Cache, Area, Arc<Faults>) {
        let (backing, faults) = TestBacking::new(self.backing_bytes, self.block_bytes);
        let (cache, area) = self.make_on(Box::new(backing));
        (cache, area, faults)
    }

    /// The cache and its one area, with a backing of the caller's.
    pub fn make_on(self, backing: Box<dyn Backing>) -> (Cache, Area) {
        let config = Config {
            pages_max: self.pages,
            ram_bytes: self.ram_bytes,
            ram_bytes_max: self.ram_bytes,
            pool_bytes_max: self.pool_bytes,
            algorithm: self.compressor.parse().expect("a known compressor"),
            seals_backing: self.seals_backing,
        };
        let cache = Cache::new(config, backing).expect("a small cache can be made");
        let area = cache.add_area(self.pages).expect("the only area");
        (cache, area)
    }
}

impl Cache {
    /// The byte range of a page's own record on the backing; `None` when it has no such record.
    pub fn record_of(&self, key: SwapEntry) -> Option<Range<usize>> {
        match self.index.view().peek(key).state() {
            State::Placed(extent) => {
                let start = extent.place.byte() as usize;
                Some(start..start + self.slots.bytes_to_read(extent))
            }
            _ => None,
        }
    }

    /// The node of a page's own object in the pool.
    pub fn node_of(&self, key: SwapEntry) -> Option<usize> {
        match self.index.view().peek(key).state() {
            State::Pooled(object) => Some(self.pool.node_of_object(object.handle)),
            _ => None,
        }
    }

    /// True if a page's object in the pool is not shared.
    pub fn has_object(&self, key: SwapEntry) -> bool {
        matches!(self.index.view().peek(key).state(), State::Pooled(_))
    }

    /// Flips one bit of a page's object in the pool, as bad memory does. `None` when the page has
    /// no object of its own in the pool, or the object has no such bit. For a page of a unit, this
    /// damages the unit's first piece.
    pub fn damage(&self, key: SwapEntry, bit: usize) -> Option<()> {
        let view = self.index.view();
        let locked = view.lock(key)?;
        let object = match locked.state() {
            State::Pooled(object) => object,
            State::Member(member) => {
                drop(locked);
                return self.damage(member.unit, bit);
            }
            _ => return None,
        };
        let mut bytes = vec![0; object.form.bytes.into()];
        let header = self.pool.read(object.handle, &mut bytes);
        *bytes.get_mut(bit / 8)? ^= 1 << (bit % 8);
        self.pool.write(object.handle, header, &bytes);
        Some(())
    }
}

/// A cache beside its model: a map from key to the expected page.
pub struct Harness {
    /// The cache.
    pub cache: Cache,
    /// The one area in use.
    pub area: Area,
    /// The backing's faults.
    pub faults: Arc<Faults>,
    held: HashMap<u32, (Content, u64)>,
    pages: u32,
}

impl Harness {
    /// An empty cache and model.
    pub fn new(setup: Setup) -> Self {
        let (cache, area, faults) = setup.make();
        Self { cache, area, faults, held: HashMap::new(), pages: setup.pages }
    }

    fn key(&self, offset: u32) -> SwapEntry {
        self.area.entry(offset).expect("offsets are taken modulo the pages")
    }

    /// The number of pages in the model.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Applies an operation to both and compares the outcome. Panics where they differ.
    pub fn apply(&mut self, op: Op) {
        match op {
            Op::Store { offset, content, seed, through } => {
                self.store(offset, content, seed, through);
            }
            Op::Load(offset) => self.load(offset, false),
            Op::LoadMany(offset, count) => self.load_many(offset, count),
            Op::LoadExclusive(offset) => self.load(offset, true),
            Op::Invalidate(offset) => self.discard(offset, 1),
            Op::Discard(offset, count) => self.discard(offset, count),
            Op::Maintain => self.cache.maintain().expect("memory for a small cache"),
            Op::Recompress(units) => drop(self.cache.recompress(units)),
            // The model does not know if there is enough to learn.
            Op::Train => _ = self.cache.train(),
            Op::Shrink(bytes) => drop(self.cache.shrink(bytes)),
            Op::EmptySection(section) => drop(self.cache.empty_section(section)),
            Op::Section(section, comes) => self.set_section(section, comes),
            Op::Memory(bytes) => self.cache.follow_memory(bytes),
            Op::Set(name, value) => {
                // A codec may be missing from this build; then nothing changes.
                drop(self.cache.set_attribute(name, value));
            }
            Op::FailWrites(fail) => self.faults.fail_writes.store(fail, Relaxed),
            Op::FailReads(fail) => self.faults.fail_reads.store(fail, Relaxed),
            Op::Resume => self.cache.resume_writeback(),
            Op::Cpu(cpu, state, fails) => self.set_cpu(cpu, state, fails),
        }
    }

    /// The last online CPU stays, and a CPU whose step fails is unchanged.
    fn set_cpu(&self, cpu: usize, state: usize, fails: bool) {
        let (mut expected, mut names) = (self.cache.cpu_states(), self.cache.cpu_state_names());
        // The last state has another name, "online".
        names.remove(names.len() - 2);
        let (cpu, state) = (cpu % expected.len(), names[state % names.len()]);
        if fails {
            self.cache.fail_cpu_step(cpu, names[2]);
        }
        if self.cache.set_cpu(cpu, state).is_ok() {
            expected[cpu] = state;
        }
        assert_eq!(self.cache.cpu_states(), expected);
        assert!(expected.contains(&"online"));
    }

    /// A section has its requested state or its old one, but no state between.
    fn set_section(&self, section: usize, comes: bool) {
        let before = self.cache.section_states()[section];
        let (name, wanted) = match comes {
            true => ("online", SectionState::Online),
            false => ("offline", SectionState::Offline),
        };
        let is_set = self.cache.set_section(section, name).is_ok();
        let after = self.cache.section_states()[section];
        assert_eq!(after, if is_set { wanted } else { before });
    }

    fn store(&mut self, offset: u32, content: Content, seed: u64, through: bool) {
        let page = page_of(content, seed);
        let mut stored = self.cache.store(self.key(offset), &page);
        if through && stored != Store::Stored {
            stored = self.cache.store_through(self.key(offset), &page);
        }
        match stored {
            Store::Stored => drop(self.held.insert(offset, (content, seed))),
            Store::Rejected(_) => drop(self.held.remove(&offset)),
        }
    }

    fn load(&mut self, offset: u32, exclusive: bool) {
        let mut page = [0xcc; PAGE_BYTES];
        let load = match exclusive {
            true => self.cache.load_exclusive(self.key(offset), &mut page),
            false => self.cache.load(self.key(offset), &mut page),
        };
        let absent = matches!(load, Ok(Load::Absent));
        assert!(!absent || page == [0xcc; PAGE_BYTES], "page {offset} is absent and was changed");
        let is_hit = matches!(load, Ok(Load::Hit));
        self.check_loaded(offset, load, &page);
        if exclusive && is_hit {
            self.held.remove(&offset);
        }
    }

    fn load_many(&mut self, first: u32, count: u32) {
        let count = count.min(self.pages - first);
        let mut pages = vec![[0xcc; PAGE_BYTES]; count as usize];
        let mut told = 0;
        let loaded = |offset, load, page: &mut Page| {
            assert_eq!(offset, told, "each page is told of once, in order");
            told += 1;
            self.check_loaded(first + offset as u32, load, page);
            Ok::<_, Infallible>(())
        };
        let Ok(()) = self.cache.load_many(self.key(first), &mut pages, loaded);
        assert_eq!(told, count as usize);
    }

    fn check_loaded(&self, offset: u32, load: Result<Load, Error>, page: &Page) {
        match (load, self.held.get(&offset)) {
            (Ok(Load::Absent), None) => {}
            (Ok(Load::Hit), Some((content, seed))) => {
                let expected = page_of(*content, *seed);
                assert!(*page == expected, "page {offset} is not the stored one");
            }
            (Err(Error::Backing { .. }), Some(_)) if self.faults.fail_reads.load(Relaxed) => {}
            (got, held) => panic!("page {offset}: {got:?}, and the model says {held:?}"),
        }
    }

    fn discard(&mut self, offset: u32, count: u32) {
        for offset in offset..offset.saturating_add(count).min(self.pages) {
            self.cache.invalidate(self.key(offset));
            self.held.remove(&offset);
        }
    }

    /// Loads every page and recounts the cache.
    pub fn check(&mut self) {
        for offset in 0..self.pages {
            self.load(offset, false);
        }
        (0..self.pages).step_by(100).for_each(|first| self.load_many(first, 100));
        assert_eq!(self.cache.statistic("stored_pages"), Some(self.held.len() as u64));
        self.cache.check();
    }
}

/// The body of the fuzzer `cache_ops`: the first byte picks the configuration, [`decode_ops`]
/// decodes the rest. Panics where the cache and the model differ.
pub fn fuzz_cache_ops(bytes: &[u8]) {
    let Some((first, rest)) = bytes.split_first() else { return };
    const PAGES: u32 = 600;
    let setup = Setup {
        pages: PAGES,
        pool_bytes: if first & 1 == 0 { 1 << 20 } else { 3 << 20 },
        backing_bytes: [0, 2 << 20, 3 << 20, 8 << 20][usize::from(first >> 1 & 3)],
        block_bytes: if first & 8 == 0 { 512 } else { 4096 },
        compressor: Codec::CHOICES[usize::from(first >> 4) % Codec::CHOICES.len()].name(),
        seals_backing: rest.len().is_multiple_of(2),
        ..Setup::default()
    };
    let mut harness = Harness::new(setup);
    decode_ops(rest, PAGES).for_each(|op| harness.apply(op));
    harness.faults.fail_reads.store(false, Relaxed);
    harness.check();
}

/// Codecs with a zstd dictionary that was trained on pages of [`make_page`].
pub fn trained_codecs() -> Codecs {
    let mut codecs = Codecs::new(Algorithm { codec: Codec::Raw, level: 0 });
    let pages: Vec<Page> =
        (0..128).map(|seed| page_of(Content::ALL[2 + seed as usize % 2], seed)).collect();
    assert!(codecs.train(&pages), "text and pointers teach something");
    codecs
}

/// The body of the fuzzer `decompress_damaged`: the first byte picks the codec, the second the use
/// of the rest. The rest is the object to decode, or the seed of a page whose object is damaged:
/// bits flipped, then truncated. Panics where a whole object does not decode to its page. The
/// result of a damaged object does not matter, but no byte beyond the page may be written.
pub fn fuzz_decompress_damaged(codecs: &mut Codecs, bytes: &[u8]) {
    let [codec, mode, rest @ ..] = bytes else { return };
    let pick = |codecs: &[Codec]| codecs[usize::from(*codec) % codecs.len()];
    // The page lies between two fences.
    let mut memory = [[0xa5; PAGE_BYTES]; 3];
    if mode % 2 == 0 {
        let object = &rest[..rest.len().min(PAGE_BYTES)];
        let _ = codecs.decompress(pick(&Codec::ALL), object, &mut memory[1]);
    } else {
        let content = Content::pick(u64::from(mode >> 1));
        let (seed, damage) = rest.split_at(rest.len().min(2));
        let page = page_of(content, seed.iter().fold(0, |all, byte| all << 8 | u64::from(*byte)));
        codecs.set_algorithm(pick(Codec::CHOICES).name().parse().expect("its own name"));
        let mut object = [0; PAGE_BYTES];
        let Some((codec, length)) = codecs.compress(&page, &mut object) else { return };
        codecs.decompress(codec, &object[..length], &mut memory[1]).expect("a whole object");
        assert!(memory[1] == page, "{codec:?} does not give the page back");
        for [high, low, bits] in damage.as_chunks::<3>().0 {
            object[usize::from(u16::from_be_bytes([*high, *low])) % length] ^= bits;
        }
        let cut = damage
            .as_chunks::<3>()
            .1
            .first()
            .map_or(length, |byte| length * usize::from(*byte) / 255);
        let _ = codecs.decompress(codec, &object[..cut], &mut memory[1]);
    }
    assert!(memory[0].iter().chain(&memory[2]).all(|byte| *byte == 0xa5), "a decoder overran");
}
