//! Counters, by the names that operators of zswap and zram know.
//!
//! Each CPU counts on cache lines of its own; [`Statistic::value`] adds them up. Figures that the
//! cache itself has (sizes of the pool and of tables) are not counted but read.

use crate::backing::RemoteFigures;
use crate::cache::Cache;
use crate::compress::Codec;
use crate::pool::ClassStats;
use crate::times::Counted;
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use uzswap_sys::cpu;

macro_rules! counters {
    ($($variant:ident $name:literal $doc:literal)*) => {
        /// A counter.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Counter { $($variant),* }

        /// Name and meaning of each counter, in the order of [`Counter`].
        const COUNTERS: [(&str, &str, Counter); COUNT] = [$(($name, $doc, Counter::$variant)),*];

        /// Number of counters.
        const COUNT: usize = [$($name),*].len();
    };
}

counters! {
    StoredPages "stored_pages" "Pages stored, in any form: same-filled, in the pool, on the backing."
    SameFilledPages "same_filled_pages" "Stored pages that are one word repeated; they take no memory besides their index entry."
    IncompressiblePages "stored_incompressible_pages" "Objects in the pool that are raw pages, because no codec made them smaller."
    PoolLz4 "pool_pages_lz4" "Those of pool_pages that lz4 compressed."
    PoolZstd "pool_pages_zstd" "Those of pool_pages that zstd compressed."
    PoolLzo "pool_pages_lzo" "Those of pool_pages that lzo compressed."
    PoolDeflate "pool_pages_deflate" "Those of pool_pages that deflate compressed."
    PoolWkdm "pool_pages_wkdm" "Those of pool_pages that wkdm compressed."
    BackingPages "backing_pages" "Pages whose object is on the backing (a shared object counts once)."
    SharedPages "shared_pages" "Pages that share one object with others."
    RecompressedPages "recompressed_pages" "Pages whose object is part of a unit of up to sixteen, compressed as one while idle, in the pool or on the backing (a shared object counts once)."
    CompressedBytes "compressed_bytes" "Bytes of the objects in the pool, without headers and without the allocator's waste."
    Stores "stores" "Pages stored since the start."
    StoresFilled "stores_same_filled" "Stores of pages that are one word repeated."
    StoresUnchanged "stores_unchanged" "Stores of a page whose copy in the pool was still the same: nothing was compressed."
    StoresDictionary "stores_dictionary" "Stores of pages that were compressed with a dictionary."
    StoresNumbers "stores_numbers" "Stores of pages of numbers that were made smaller by taking them apart."
    DictionaryBytes "dictionary_trial_bytes" "Bytes of the objects of every 32nd page that zstd compresses, with the newest dictionary if there is one. The difference to dictionary_plain_bytes is its gain."
    DictionaryPlainBytes "dictionary_plain_bytes" "Bytes of the same pages' objects without a dictionary."
    DuplicateEntry "duplicate_entry" "Stores that replaced an older copy under the same key."
    DuplicatePages "duplicate_pages" "Stores that found an identical page and shared its object."
    Loads "loads" "Pages loaded since the start."
    LoadsFilled "loads_same_filled" "Loads answered from the index alone."
    LoadsRecompressed "loads_recompressed" "Loads of pages that were compressed as one with others."
    LoadsBacking "loads_backing" "Loads that read from the backing."
    BackingReads "backing_reads" "Reads of the backing: one for a page, or for a run of neighbours."
    Absent "loads_absent" "Loads of pages that are not stored."
    Recompressed "recompressions" "Pages recompressed since the start."
    RecompressPoor "recompress_poor" "Pages that recompression did not change, because they gained too little."
    Invalidates "invalidates" "Pages dropped because their owner no longer needs them."
    RejectDisabled "reject_disabled" "Stores rejected because `enabled` is off."
    RejectCompressPoor "reject_compress_poor" "Stores rejected because the page did not compress to `max_compression_ratio` percent."
    RejectAlloc "reject_alloc_fail" "Stores rejected because there was no memory for the object or its index entry."
    RejectReclaim "reject_reclaim_fail" "Stores rejected because the pool was at its limit and nothing could be written back."
    PoolLimitHit "pool_limit_hit" "Times that a store found the pool at its limit."
    WrittenBack "written_back_pages" "Objects written back to the backing since the start: a page, or a piece of a unit of pages."
    WrittenThrough "written_through_pages" "Rejected pages written straight to the backing, uncompressed."
    SecondChances "second_chances" "Pages that writeback spared because they were loaded since its last pass."
    BackingBytesWritten "backing_bytes_written" "Bytes written to the backing, padding included."
    BackingBytesRead "backing_bytes_read" "Bytes of records read from the backing."
    SegmentsCleaned "segments_cleaned" "Segments of the backing whose live records were copied elsewhere."
    BackingFull "backing_full" "Times that writeback found no space on the backing."
    WritebackFail "writeback_fail" "Writes to the backing that failed; writeback stops at the first."
    DecompressFail "decompress_fail" "Loads that found the stored copy damaged."
    ReadFail "read_fail" "Loads that the backing answered with an error."
    ObjectsMoved "pages_compacted" "Objects moved to free frames of the pool."
}

impl Counter {
    /// The counter of a codec's pages in the pool; `None`: its objects are no pages.
    pub(crate) fn of_codec(codec: Codec) -> Option<Self> {
        Some(match codec {
            Codec::Raw => Self::IncompressiblePages,
            Codec::Lz4 | Codec::Lz4Numbers => Self::PoolLz4,
            Codec::Zstd | Codec::ZstdNumbers => Self::PoolZstd,
            Codec::Lzo => Self::PoolLzo,
            Codec::Deflate => Self::PoolDeflate,
            Codec::Wkdm => Self::PoolWkdm,
            Codec::Piece => return None,
        })
    }
}

/// See the module.
pub(crate) struct Counters {
    /// For the counting CPU, so that CPUs do not share lines. Counts of a CPU that goes stay.
    stripes: Box<[CachePadded<[AtomicI64; COUNT]>]>,
}

impl Counters {
    pub(crate) fn new() -> Self {
        let stripe = |_| CachePadded::new(std::array::from_fn(|_| AtomicI64::new(0)));
        Self { stripes: (0..cpu::possible()).map(stripe).collect() }
    }

    pub(crate) fn add(&self, counter: Counter, count: i64) {
        let stripe = &self.stripes[cpu::current() % self.stripes.len()];
        stripe[counter as usize].fetch_add(count, Relaxed);
    }

    pub(crate) fn increment(&self, counter: Counter) {
        self.add(counter, 1);
    }

    /// The sum over CPUs. A page counted up on one CPU and down on another is right in the sum.
    /// While others count, a gauge may be off by unfinished calls, and is never shown below zero.
    pub(crate) fn get(&self, counter: Counter) -> u64 {
        let sum: i64 =
            self.stripes.iter().map(|stripe| stripe[counter as usize].load(Relaxed)).sum();
        sum.try_into().unwrap_or(0)
    }
}

/// One statistic: a counter, or a figure read from its part.
pub struct Statistic {
    /// Its name, and that of its control file.
    pub name: &'static str,
    /// Its meaning.
    pub doc: &'static str,
    source: Source,
}

enum Source {
    Counter(Counter),
    Figure(fn(&Cache) -> u64),
}

const fn figure(name: &'static str, doc: &'static str, ask: fn(&Cache) -> u64) -> Statistic {
    Statistic { name, doc, source: Source::Figure(ask) }
}

const FIGURES: [Statistic; 26] = [
    figure(
        "pool_pages",
        "Pages whose object is in the pool (a shared object counts once).",
        Cache::pool_pages,
    ),
    figure(
        "pool_idle_pages",
        "Objects in the pool that were not used for recompress_idle_seconds, at the last check; 0 while that is off.",
        |cache| cache.recompression.idle_pages() as u64,
    ),
    figure(
        "pool_total_size",
        "Bytes of memory of the objects: frames in use, with the allocator's waste in them.",
        |cache| cache.pool.bytes() as u64,
    ),
    figure(
        "pool_reserve_size",
        "Bytes of memory kept free in the pool, so that a store needs none from the kernel.",
        |cache| cache.pool.free_bytes() as u64,
    ),
    figure("pool_slack_size", "Bytes of pool_total_size that compaction could free.", |cache| {
        cache.pool.slack_bytes() as u64
    }),
    figure(
        "pool_limit",
        "Bytes that pool_total_size may reach: the lower of max_pool_percent and max_pool_bytes.",
        |cache| cache.pool.limit() as u64,
    ),
    figure(
        "pool_stores_elsewhere",
        "Objects in another node's memory than that of the CPU that stored them, because it had no space.",
        |cache| cache.pool.stored_elsewhere(),
    ),
    figure(
        "metadata_size",
        "Bytes of all other memory that grows with the stored pages: index, descriptors, tables, dictionaries.",
        |cache| cache.metadata_bytes() as u64,
    ),
    figure(
        "dictionaries",
        "Trained dictionaries; all stay, for the pages compressed with them.",
        |cache| cache.training.dictionaries().count() as u64,
    ),
    figure(
        "dictionary_size",
        "Bytes of the dictionaries and their encoder; part of metadata_size.",
        |cache| cache.dictionary_bytes() as u64,
    ),
    figure("backing_total_size", "Bytes of the backing.", |cache| cache.backing.bytes()),
    figure(
        "backing_sealed",
        "1 when writes to the backing are encrypted and authenticated.",
        |cache| cache.seal.is_some().into(),
    ),
    figure("backing_live_size", "Bytes of the live records on the backing.", |cache| {
        cache.slots.segments.live_bytes()
    }),
    figure(
        "writeback_stopped",
        "1 when a write to the backing failed and writeback waits to be resumed.",
        |cache| cache.writeback.has_failed().into(),
    ),
    figure("remote_up", "1 while the store in another machine's memory answers.", |cache| {
        cache.backing.remote().is_up.into()
    }),
    figure("remote_size", "Bytes of our segments at that store.", |cache| {
        cache.backing.remote().bytes
    }),
    figure("remote_limit", "Bytes that they may take there; 0: there is no store.", |cache| {
        cache.backing.remote().bytes_max
    }),
    figure("remote_reads", "Reads that the store answered.", |cache| cache.backing.remote().reads),
    figure("remote_bytes_read", "Bytes of these reads.", |cache| cache.backing.remote().bytes_read),
    figure("remote_read_ns_p50", "Median time of such a read, ns.", |cache| {
        cache.remote_read_ns(0.5)
    }),
    figure("remote_read_ns_p99", "99th percentile of that time, ns.", |cache| {
        cache.remote_read_ns(0.99)
    }),
    figure("remote_writes", "Segments written to the store.", |cache| {
        cache.backing.remote().writes
    }),
    figure("remote_bytes_written", "Bytes of these segments.", |cache| {
        cache.backing.remote().bytes_written
    }),
    figure(
        "remote_errors",
        "Requests to the store that failed or were not answered in time.",
        |cache| cache.backing.remote().errors,
    ),
    figure(
        "remote_lost",
        "Segments that the store no longer had, or had only a part of.",
        |cache| cache.backing.remote().lost,
    ),
    figure("remote_full", "Segments that the store refused because it was full.", |cache| {
        cache.backing.remote().full
    }),
];

/// All statistics, counters first.
pub static STATISTICS: [Statistic; COUNT + FIGURES.len()] = {
    let mut all = [const { figure("", "", |_| 0) }; COUNT + FIGURES.len()];
    let mut i = 0;
    while i < COUNT {
        let (name, doc, counter) = COUNTERS[i];
        all[i] = Statistic { name, doc, source: Source::Counter(counter) };
        i += 1;
    }
    while i < all.len() {
        let Statistic { name, doc, source: Source::Figure(ask) } = FIGURES[i - COUNT] else {
            unreachable!()
        };
        all[i] = figure(name, doc, ask);
        i += 1;
    }
    all
};

impl Statistic {
    /// Its value now.
    pub fn value(&self, cache: &Cache) -> u64 {
        match self.source {
            Source::Counter(counter) => cache.counters.get(counter),
            Source::Figure(ask) => ask(cache),
        }
    }
}

impl Cache {
    /// Pages whose object is in the pool.
    pub(crate) fn pool_pages(&self) -> u64 {
        let counters = Codec::CHOICES.iter().filter_map(|codec| Counter::of_codec(*codec));
        counters.map(|counter| self.counters.get(counter)).sum()
    }

    /// Figures of a store in another machine's memory.
    pub fn remote(&self) -> RemoteFigures {
        self.backing.remote()
    }

    /// How long the reads took that this store answered; `None`: there is no store.
    pub fn remote_read_times(&self) -> Option<Counted> {
        self.backing.remote_read_times()
    }

    fn remote_read_ns(&self, share: f64) -> u64 {
        self.remote_read_times().and_then(|times| times.quantile_ns(share)).unwrap_or(0)
    }

    /// The value of a statistic by its name; `None` when there is no such.
    pub fn statistic(&self, name: &str) -> Option<u64> {
        STATISTICS.iter().find(|s| s.name == name).map(|s| s.value(self))
    }

    /// The pool's size classes: their shape and how full they are.
    pub fn class_stats(&self) -> Vec<ClassStats> {
        self.pool.class_stats()
    }

    /// Bytes of memory of the cache: the pool with its reserve, all metadata, the buffers of
    /// writeback. Contexts of codecs and the code are not included: some hundred KiB for each CPU.
    pub fn memory_bytes(&self) -> usize {
        self.pool.mapped_bytes() + self.bytes_besides_pool()
    }

    /// The part of [`Self::memory_bytes`] that is not the pool's.
    pub fn bytes_besides_pool(&self) -> usize {
        self.metadata_bytes() + self.writeback.bytes()
    }

    /// Bytes of the index, descriptors, tables and dictionaries, headers of objects included.
    pub(crate) fn metadata_bytes(&self) -> usize {
        self.index.bytes()
            + self.shares.bytes()
            + self.units.bytes()
            + self.candidates.bytes()
            + self.pool.metadata_bytes()
            + self.slots.bytes()
            + self.dictionary_bytes()
    }
}
