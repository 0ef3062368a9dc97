//! Statistics: the counters, and figures that the parts of the cache have (sizes of the pool and of
//! tables), which are not counted but read.

use super::Cache;
use crate::backing::RemoteFigures;
use crate::compress::Codec;
use crate::counters::{COUNT, COUNTERS, Counter};
use crate::pool::ClassStats;
use crate::times::Counted;

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
    figure(
        "remote_size",
        "Bytes of our segments at the store in another machine's memory.",
        |cache| cache.backing.remote().bytes,
    ),
    figure(
        "remote_limit",
        "Bytes that our segments may take at the store; 0: there is no store.",
        |cache| cache.backing.remote().bytes_max,
    ),
    figure("remote_reads", "Reads that the store answered.", |cache| cache.backing.remote().reads),
    figure("remote_bytes_read", "Bytes of the reads that the store answered.", |cache| {
        cache.backing.remote().bytes_read
    }),
    figure("remote_read_ns_p50", "Median time of a read that the store answered, ns.", |cache| {
        cache.remote_read_ns(0.5)
    }),
    figure(
        "remote_read_ns_p99",
        "99th percentile of the time of a read that the store answered, ns.",
        |cache| cache.remote_read_ns(0.99),
    ),
    figure("remote_writes", "Segments written to the store.", |cache| {
        cache.backing.remote().writes
    }),
    figure("remote_bytes_written", "Bytes of the segments written to the store.", |cache| {
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

    /// The times of the reads that the store answered; `None` if there is no store.
    pub fn remote_read_times(&self) -> Option<Counted> {
        self.backing.remote_read_times()
    }

    fn remote_read_ns(&self, share: f64) -> u64 {
        self.remote_read_times().and_then(|times| times.quantile_ns(share)).unwrap_or(0)
    }

    /// The value of a statistic by its name; `None` when there is no such statistic.
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

    /// Bytes by which [`Self::memory_bytes`] is about to grow: a part of the next section. This
    /// part grows as the pool's free memory is used. A front end with a budget sets these bytes
    /// aside, so that the section does not exceed the budget.
    pub fn memory_bytes_ahead(&self) -> usize {
        self.pool.bytes_ahead(self.reserve.reserve_bytes())
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
