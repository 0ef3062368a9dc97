//! Identical pages: finds entries that might have the page that is being stored.
//!
//! A table from content hash to keys, small and lossy. A bucket is one cache line, a new key
//! replaces an old one, and a key stays when its entry goes. The caller compares each candidate
//! byte by byte. A lost key thus costs only a page that is kept twice.

use crate::ids::SwapEntry;
use crate::table::ChunkedTable;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering::Relaxed};

/// The number of keys in a bucket: as many as fit in a cache line, with a byte of hash each.
const WAYS: usize = 12;

#[repr(align(64))]
struct Bucket {
    keys: [AtomicU32; WAYS],
    /// Seven bits of the hash and the lowest bit set; 0 where there is no key.
    tags: [AtomicU8; WAYS],
}

const _: () = assert!(size_of::<Bucket>() == 64);

/// Buckets that are made at a time: 64 KiB, for some 25 MiB of pool.
const CHUNK: usize = 1024;

/// See the module.
pub(crate) struct Candidates {
    buckets: ChunkedTable<Bucket, CHUNK>,
    /// The number of chunks in use, a power of two.
    count: AtomicUsize,
}

impl Candidates {
    /// Bytes of pool for each key of the table, which takes 5.3 bytes. In a pool of heap pages this
    /// many bytes have two objects, so the table lacks the older half of the pages. With a key for
    /// each object, all metadata would exceed 32 bytes a page.
    const POOL_BYTES_PER_KEY: usize = 2048;
    const POOL_BYTES_PER_CHUNK: usize = CHUNK * WAYS * Self::POOL_BYTES_PER_KEY;

    /// A table for a pool of at most `pool_bytes_max`; no chunk is made yet.
    pub(crate) fn new(pool_bytes_max: usize) -> Self {
        let chunks = pool_bytes_max.div_ceil(Self::POOL_BYTES_PER_CHUNK).next_power_of_two();
        Self { buckets: ChunkedTable::new(chunks * CHUNK), count: AtomicUsize::new(0) }
    }

    fn chunks_for(&self, pool_bytes: usize) -> usize {
        // Rounded down to a power of two: the table may be half too short, but never twice too
        // long.
        let wanted = (pool_bytes / Self::POOL_BYTES_PER_CHUNK).max(1);
        (1 << wanted.ilog2()).min(self.buckets.chunks())
    }

    /// Grows the table for a pool of `pool_bytes`. After a doubling half of the keys are not found;
    /// new ones soon replace them. Allocates. Errors: no memory.
    pub(crate) fn provision(&self, pool_bytes: usize) -> io::Result<()> {
        let wanted = self.chunks_for(pool_bytes);
        let bucket = || Bucket {
            keys: std::array::from_fn(|_| AtomicU32::new(0)),
            tags: std::array::from_fn(|_| AtomicU8::new(0)),
        };
        for chunk in self.buckets.made()..wanted {
            self.buckets.make(chunk, bucket)?;
        }
        self.count.fetch_max(wanted, Relaxed);
        Ok(())
    }

    fn bucket(&self, hash: u64) -> Option<(&Bucket, u8)> {
        let count = self.count.load(Relaxed);
        if count == 0 {
            return None;
        }
        // The low half is the object's checksum; these bits are of the high half.
        let number = (hash >> 32) as usize & (count * CHUNK - 1);
        Some((self.buckets.get(number)?, (hash >> 57) as u8 | 1))
    }

    /// Keys stored with a page of this hash, or of a similar one.
    pub(crate) fn find(&self, hash: u64) -> impl Iterator<Item = SwapEntry> {
        let found = self.bucket(hash);
        (0..WAYS).filter_map(move |way| {
            let (bucket, tag) = found?;
            (bucket.tags[way].load(Relaxed) == tag)
                .then(|| SwapEntry(bucket.keys[way].load(Relaxed)))
        })
    }

    /// Notes that `key` has a page of this hash. If `instead` is given, `key` takes its place.
    pub(crate) fn insert(&self, hash: u64, key: SwapEntry, instead: Option<SwapEntry>) {
        let Some((bucket, tag)) = self.bucket(hash) else { return };
        let holds = |way: &usize, other: SwapEntry| {
            bucket.tags[*way].load(Relaxed) == tag && bucket.keys[*way].load(Relaxed) == other.0
        };
        let way = (0..WAYS)
            .find(|way| holds(way, instead.unwrap_or(key)))
            .or_else(|| (0..WAYS).find(|way| bucket.tags[*way].load(Relaxed) == 0))
            // Otherwise an arbitrary way, since the hash of a new page is random enough.
            .unwrap_or((hash >> 44) as usize % WAYS);
        // A reader may see one of these stores without the other. The reader then compares the
        // pages.
        bucket.keys[way].store(key.0, Relaxed);
        bucket.tags[way].store(tag, Relaxed);
    }

    /// Bytes that the table takes.
    pub(crate) fn bytes(&self) -> usize {
        self.buckets.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_found_until_others_push_it_out() {
        let table = Candidates::new(1 << 30);
        table.insert(7 << 40, SwapEntry(1), None);
        assert_eq!(table.find(7 << 40).count(), 0, "nothing is provisioned");
        table.provision(1).unwrap();
        let hash = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for i in 0..1000 {
            table.insert(hash(i), SwapEntry(i as u32), None);
            assert!(table.find(hash(i)).any(|key| key == SwapEntry(i as u32)));
        }
        table.insert(hash(5), SwapEntry(77), Some(SwapEntry(5)));
        let found: Vec<_> = table.find(hash(5)).collect();
        assert!(found.contains(&SwapEntry(77)) && !found.contains(&SwapEntry(5)), "{found:?}");
    }

    #[test]
    fn the_table_grows_with_the_pool() {
        let table = Candidates::new(1 << 30);
        table.provision(1).unwrap();
        let small = table.bytes();
        table.provision(40 << 20).unwrap();
        assert_eq!(table.bytes(), small);
        table.provision(200 << 20).unwrap();
        assert!(table.bytes() > 7 * small);
    }
}
