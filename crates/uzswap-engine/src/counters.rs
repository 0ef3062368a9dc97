//! Counters, by the names that operators of zswap and zram know.
//!
//! Each CPU counts on cache lines of its own; [`Counters::get`] adds them up.

use crate::compress::Codec;
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use uzswap_sys::cpu;

macro_rules! counters {
    ($($variant:ident $name:literal $doc:literal)*) => {
        /// A counter.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Counter { $($variant),* }

        /// Name and meaning of each counter, in the order of [`Counter`].
        pub(crate) const COUNTERS: [(&str, &str, Counter); COUNT] =
            [$(($name, $doc, Counter::$variant)),*];

        /// Number of counters.
        pub(crate) const COUNT: usize = [$($name),*].len();
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
    /// The counter of a codec's pages in the pool; `None` if its objects are not pages.
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
    /// The counts of each CPU, so that CPUs do not share lines. The counts of a CPU that goes stay.
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
    /// While other threads count, a gauge may be off by unfinished calls, and is never shown below
    /// zero.
    pub(crate) fn get(&self, counter: Counter) -> u64 {
        let sum: i64 =
            self.stripes.iter().map(|stripe| stripe[counter as usize].load(Relaxed)).sum();
        sum.try_into().unwrap_or(0)
    }
}
