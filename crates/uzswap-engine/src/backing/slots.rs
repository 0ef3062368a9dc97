//! The backing's space: slots, segments and clusters.
//!
//! | | bytes | |
//! |---|---|---|
//! | slot | 4 KiB | for a page written through |
//! | segment | 64 slots | filled and written whole by writeback |
//! | cluster | 8 segments | a lock, a bit for each slot; discarded whole |
//!
//! A *batch* is 64 slots. A segment is one batch. Each CPU has a cache of single slots, which come
//! from clusters and go back to them by batches. Each CPU works in a cluster of its own while there
//! are free clusters. The range index has the clusters in use as taken ranges. Bits show which
//! clusters in use have free space.
//!
//! **Space.** `free_segments` counts wholly free segments. A thread that takes a segment first
//! decrements the count, so that it always finds one. Slots in a CPU's cache are not free for other
//! CPUs. A thread that finds no other slot drains the caches, so that "none" means none anywhere.
//! The maintaining thread drains a cache that was not used since its last call.
//!
//! **Tables.** A page written through fills its slot. So a table has the page's owner, and its tag
//! if pages are sealed. A cluster has such a table while one of its segments is broken up.
//!
//! **Locks.** A CPU's cache, then a cluster, then the spare tables. Bits change under their
//! cluster's lock and are read without it.

use super::segments::{Segments, Use};
use super::shape::{
    BATCH, CLUSTER_SEGMENTS, CLUSTER_SLOTS, SEGMENT_BYTES, SLOT_BYTES, Segment, Slot,
};
use super::singles::{ClusterTable, Tables};
use crate::backing::Backing;
use crate::backing::record::{Layout, RECORD_BYTES_MAX};
use crate::backing::seal::Tag;
use crate::bits::Bits;
use crate::durable::Durable;
use crate::ids::{Place, SwapEntry};
use crate::object::Extent;
use crate::percpu::PerCpu;
use crate::sync::atomic::{AtomicU32, Ordering::*};
use crate::sync::{Backoff, Mutex, lock};
use std::convert::Infallible;
use std::sync::Arc;
use uzswap_ranges::{Hole, Preload, RangeIndex, SkipList};

/// Segments that only cleaning may take, so that it always makes progress.
pub(crate) const RESERVED: usize = 2;

/// Clusters with free single slots that are tried for a batch before a new segment is broken up.
const VISITS: usize = 8;

/// The taken slots of a cluster.
struct Cluster {
    /// A word for each segment, a bit for each slot. All bits are set in a segment that is taken
    /// whole, and beyond the backing's end.
    used: [u64; CLUSTER_SEGMENTS],
    /// Segments that are given out slot by slot.
    broken: u8,
    /// True if the cluster is taken in the range index, so that its free slots may be given out.
    in_use: bool,
    /// The cluster's table, for pages written through.
    table: Option<ClusterTable>,
}

impl Cluster {
    fn table(&mut self) -> &mut ClusterTable {
        self.table.as_mut().expect("a segment of the cluster is broken up")
    }
}

/// Spare tables, of 2 or 10 KiB, while clusters lack tables: enough for 16 MiB written through
/// between two calls of the maintaining thread.
const TABLES_READY: usize = 8;
/// The maximum number of unused tables that are kept until the maintaining thread's next call.
const TABLES_MAX: usize = 8 * TABLES_READY;

/// Number of sets that order clusters by the fill of their emptiest broken-up segment.
const FILLS: usize = 8;

/// The slots of a CPU.
struct SlotCache {
    /// The cluster from which slots were last taken, if there is one.
    current: Option<u32>,
    /// Slots that are taken and not yet given out; the last is given out next.
    slots: Vec<Slot>,
    /// Slots that were given back and are not yet free.
    returned: Vec<Slot>,
    /// Memory for the range index, so that taking a cluster allocates nothing.
    preload: Preload,
    /// True if this cache was used since the maintaining thread's last call.
    touched: bool,
}

/// See the module.
pub(crate) struct Slots {
    pub(crate) segments: Segments,
    clusters: Box<[Mutex<Cluster>]>,
    /// The clusters in use.
    taken: SkipList,
    /// The number of clusters not in use.
    untaken: AtomicU32,
    /// Clusters in use with a free segment.
    with_segments: Bits,
    /// Clusters in use with a free slot in a segment that is broken up.
    with_slots: Bits,
    /// These clusters, by the number of taken slots in their emptiest broken-up segment.
    by_fill: [Bits; FILLS],
    /// Clusters in use without a taken slot.
    empty: Bits,
    /// The number of completely free segments, in clusters in use and in others.
    free_segments: AtomicU32,
    caches: PerCpu<SlotCache>,
    pub(crate) layout: Layout,
    /// Tables without a cluster, and the number of all tables.
    spare_tables: Mutex<Vec<ClusterTable>>,
    tables_made: AtomicU32,
    tables: Tables,
    /// Slots that a cache takes or gives back together.
    batch: usize,
}

impl Slots {
    /// A backing of `bytes`, rounded down to segments, all free.
    pub(crate) fn new(bytes: u64, layout: Layout, durable: Option<&Arc<Durable>>) -> Self {
        let mut slots = Self::with_batch(bytes, layout, BATCH);
        if let Some(durable) = durable {
            slots.segments = Segments::durable(durable);
            slots.tables = Tables::new(layout == Layout::Sealed, Some(durable));
        }
        slots
    }

    /// Tells the backing of each segment that becomes free.
    pub(crate) fn with_backing(self, backing: &Arc<dyn Backing>) -> Self {
        Self { segments: self.segments.with_backing(backing), ..self }
    }

    pub(crate) fn with_batch(bytes: u64, layout: Layout, batch: usize) -> Self {
        let segments = (bytes / SEGMENT_BYTES as u64) as usize;
        let clusters = segments.div_ceil(CLUSTER_SEGMENTS);
        let cluster = |number: usize| {
            let beyond = |word| number * CLUSTER_SEGMENTS + word >= segments;
            let used = std::array::from_fn(|word| if beyond(word) { u64::MAX } else { 0 });
            Mutex::new(Cluster { used, broken: 0, in_use: false, table: None })
        };
        Self {
            segments: Segments::new(segments),
            clusters: (0..clusters).map(cluster).collect(),
            taken: SkipList::new(),
            untaken: AtomicU32::new(clusters as u32),
            with_segments: Bits::new(clusters),
            with_slots: Bits::new(clusters),
            by_fill: std::array::from_fn(|_| Bits::new(clusters)),
            empty: Bits::new(clusters),
            free_segments: AtomicU32::new(segments as u32),
            caches: PerCpu::new(usize::MAX),
            layout,
            spare_tables: Mutex::new(Vec::with_capacity(TABLES_MAX)),
            tables_made: AtomicU32::new(0),
            tables: Tables::new(layout == Layout::Sealed, None),
            batch,
        }
    }

    /// True if no more than the reserved segments are free.
    pub(crate) fn is_short(&self) -> bool {
        self.free_segments.load(Acquire) as usize <= RESERVED
    }

    /// True if the page at `place` was written through: it has a slot of its own, and no header.
    pub(crate) fn is_single(&self, place: Place) -> bool {
        self.segments.state(Segment::of(place)) == Use::Singles
    }

    /// Bytes to read of a record.
    pub(crate) fn bytes_to_read(&self, extent: Extent) -> usize {
        if self.is_single(extent.place) { SLOT_BYTES } else { self.layout.bytes(extent.form) }
    }

    /// Bytes that a record takes.
    pub(crate) fn bytes_of(&self, extent: Extent) -> usize {
        if self.is_single(extent.place) {
            SLOT_BYTES
        } else {
            self.layout.record_bytes(extent.form)
        }
    }

    /// The tag of the page in a slot. The caller's entry has this place.
    pub(crate) fn tag(&self, slot: Slot) -> Tag {
        let (number, at) = table_home(slot);
        lock(&self.clusters[number]).table().tag(at)
    }

    /// The owner of the page that was last written to a slot of a broken-up segment.
    pub(crate) fn owner(&self, slot: Slot) -> SwapEntry {
        let (number, at) = table_home(slot);
        lock(&self.clusters[number]).table().owner(at)
    }

    /// Notes the owner of the page that the caller writes to `slot`, and its tag if it is sealed.
    pub(crate) fn note_page(&self, slot: Slot, owner: SwapEntry, tag: Option<Tag>) {
        let (number, at) = table_home(slot);
        let mut cluster = lock(&self.clusters[number]);
        let table = cluster.table();
        table.set_owner(at, owner);
        tag.into_iter().for_each(|tag| table.set_tag(at, tag));
    }

    /// Notes that a record became live.
    pub(crate) fn add(&self, extent: Extent) {
        self.segments.add(Segment::of(extent.place), self.bytes_of(extent));
    }

    /// Notes that a record is no longer referred to.
    pub(crate) fn remove(&self, extent: Extent) {
        let segment = Segment::of(extent.place);
        if self.is_single(extent.place) {
            self.segments.remove(segment, SLOT_BYTES);
            self.give_slot(Slot::at(extent.place.byte()));
        } else if self.segments.remove(segment, self.layout.record_bytes(extent.form)) {
            self.give_segment(segment, Use::Open);
        }
    }

    /// True if `live` bytes of records, packed as tightly as possible, would leave more than the
    /// reserved segments free.
    pub(crate) fn cleaning_can_win(&self, live: u64) -> bool {
        // One segment for single slots, and one to be won.
        let usable = self.segments.count().saturating_sub(RESERVED + 2) as u64;
        live <= usable * (SEGMENT_BYTES - RECORD_BYTES_MAX) as u64
    }

    /// Takes a segment to fill, if more than `reserved` are free.
    pub(crate) fn take_segment(&self, reserved: usize) -> Option<Segment> {
        let mut cache = self.caches.lock_here();
        cache.touched = true;
        let segment = self.claim(1, reserved).then(|| self.take_claimed(&mut cache)).flatten()?;
        let opened = self.segments.turn(segment, Use::Free, Use::Open);
        assert!(opened, "a free {segment:?} is {:?}", self.segments.state(segment));
        Some(segment)
    }

    /// Gives back a segment without live records, which only the caller uses.
    pub(crate) fn give_segment(&self, segment: Segment, was: Use) {
        let freed = self.segments.turn(segment, was, Use::Free);
        assert!(freed && self.segments.live(segment) == 0, "{segment:?} is not the caller's");
        let (number, word) = home(segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        debug_assert!(cluster.used[word] == u64::MAX && cluster.broken & 1 << word == 0);
        cluster.used[word] = 0;
        self.tell(number, &cluster);
        drop(cluster);
        self.free_segments.fetch_add(1, AcqRel);
    }

    /// Takes one slot; `None` if no more than `reserved` segments, and no other slot, are free.
    pub(crate) fn take_slot(&self, reserved: usize) -> Option<Slot> {
        self.try_take_slot(reserved).or_else(|| {
            // Other CPUs' caches may have free slots.
            self.drain();
            self.try_take_slot(reserved)
        })
    }

    fn try_take_slot(&self, reserved: usize) -> Option<Slot> {
        let mut cache = self.caches.lock_here();
        cache.touched = true;
        if cache.slots.is_empty() {
            self.fill(&mut cache, reserved);
        }
        cache.slots.pop()
    }

    /// Gives a slot back.
    pub(crate) fn give_slot(&self, slot: Slot) {
        let mut cache = self.caches.lock_here();
        cache.touched = true;
        cache.returned.push(slot);
        if cache.returned.len() == self.batch {
            let cache = &mut *cache;
            self.free(&mut cache.returned);
        }
    }

    /// Frees every slot in the caches.
    pub(crate) fn drain(&self) {
        self.caches.iter().for_each(|mut cache| self.empty_cache(&mut cache));
    }

    /// Makes the cache of a CPU that comes up. Allocates.
    pub(crate) fn start_cpu(&self, cpu: usize) {
        let cache = || SlotCache {
            current: None,
            slots: Vec::with_capacity(self.batch),
            returned: Vec::with_capacity(self.batch),
            preload: self.preload(),
            touched: false,
        };
        let Ok(()) = self.caches.start(cpu, || Ok::<_, Infallible>(cache()));
    }

    /// Frees the slots of a CPU that goes.
    pub(crate) fn stop_cpu(&self, cpu: usize) {
        self.caches.stop(cpu, |cache| self.empty_cache(cache));
    }

    /// CPUs with a cache.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn cpus_count(&self) -> usize {
        self.caches.count()
    }

    fn preload(&self) -> Preload {
        let mut preload = Preload::default();
        self.taken.preload(&mut preload);
        preload
    }

    /// Adds a table to the spare ones; returns the table if there is no space for it.
    fn keep_spare(&self, table: ClusterTable) -> Option<ClusterTable> {
        let mut spare = lock(&self.spare_tables);
        if spare.len() == TABLES_MAX {
            return Some(table);
        }
        spare.push(table);
        None
    }

    /// Bytes of all tables.
    pub(crate) fn bytes(&self) -> usize {
        let bits: usize = self.sets().map(Bits::bytes).sum();
        let clusters = self.clusters.len() * size_of::<Mutex<Cluster>>();
        let tables = self.tables_made.load(Relaxed) as usize * self.tables.bytes_each();
        self.segments.bytes() + clusters + bits + self.taken.bytes() + tables
    }

    /// Decrements the count of free segments by `count`, if at least `reserved` stay.
    fn claim(&self, count: usize, reserved: usize) -> bool {
        let claim = |free: u32| {
            let left = (free as usize).checked_sub(count)?;
            (left >= reserved).then_some(left as u32)
        };
        self.free_segments.fetch_update(AcqRel, Acquire, claim).is_ok()
    }

    /// Takes a free segment, for which the caller has decremented the count. `None` only if a
    /// cluster must be taken and the range index has no spare memory: the next call of
    /// [`Self::provision`] makes some.
    fn take_claimed(&self, cache: &mut SlotCache) -> Option<Segment> {
        let mut backoff = Backoff::new();
        loop {
            if let Some(segment) = cache.current.and_then(|number| self.take_in(number)) {
                return Some(segment);
            }
            let starved = !self.take_cluster(cache);
            if let Some(segment) = cache.current.and_then(|number| self.take_in(number)) {
                return Some(segment);
            }
            for number in numbers(&self.with_segments, cache.current.unwrap_or(0)) {
                if let Some(segment) = self.take_in(number) {
                    cache.current = Some(number);
                    return Some(segment);
                }
            }
            if starved {
                self.free_segments.fetch_add(1, AcqRel);
                return None;
            }
            // Other threads took the segments of this cluster. The segment that was counted for
            // this call is in another cluster.
            backoff.wait();
        }
    }

    /// Makes a free cluster the current one, if there is a free cluster. `false` if there may be
    /// such a cluster, but the memory to take it was not prepared.
    fn take_cluster(&self, cache: &mut SlotCache) -> bool {
        if self.untaken.load(Acquire) == 0 {
            return true;
        }
        if !cache.preload.is_ready() {
            return false;
        }
        let within = 0..self.clusters.len() as u64;
        let hole =
            Hole { hint: cache.current.map_or(0, u64::from), size: 1, align: 1, within, value: 0 };
        if let Some(key) = self.taken.insert_hole(&hole, &mut cache.preload) {
            self.untaken.fetch_sub(1, AcqRel);
            let number = key as u32;
            let mut cluster = lock(&self.clusters[number as usize]);
            cluster.in_use = true;
            self.tell(number, &cluster);
            cache.current = Some(number);
        }
        true
    }

    /// Takes a segment of one cluster.
    fn take_in(&self, number: u32) -> Option<Segment> {
        if !self.with_segments.has(number as usize) {
            return None;
        }
        let mut cluster = lock(&self.clusters[number as usize]);
        let word = cluster.used.iter().position(|used| *used == 0).filter(|_| cluster.in_use)?;
        cluster.used[word] = u64::MAX;
        self.tell(number, &cluster);
        Some(Segment(number * CLUSTER_SEGMENTS as u32 + word as u32))
    }

    /// Fills an empty cache with a batch of slots, from segments that are already broken up, or
    /// from a segment that this call breaks up.
    fn fill(&self, cache: &mut SlotCache, reserved: usize) {
        for number in numbers(&self.with_slots, cache.current.unwrap_or(0)).take(VISITS) {
            self.take_slots(number, &mut cache.slots);
            if cache.slots.len() == self.batch {
                break;
            }
        }
        if cache.slots.is_empty() {
            self.break_up(cache, reserved);
        }
        // Slots are given out from last to first, so this gives the order of the device.
        cache.slots.reverse();
    }

    /// Fills an empty cache from a segment that is broken up for it, if one can be taken.
    fn break_up(&self, cache: &mut SlotCache, reserved: usize) {
        if !self.claim(1, reserved) {
            return;
        }
        let Some(segment) = self.take_claimed(cache) else { return };
        let (number, word) = home(segment);
        let mut cluster = lock(&self.clusters[number as usize]);
        cluster.used[word] = 0;
        if cluster.table.is_none() {
            cluster.table = lock(&self.spare_tables).pop();
            self.tables.note(number, cluster.table.as_ref());
        }
        if cluster.table.is_none() {
            // The segment is free again; the next call of `provision` makes a table for it.
            self.tell(number, &cluster);
            self.free_segments.fetch_add(1, AcqRel);
            return;
        }
        let broken = self.segments.turn(segment, Use::Free, Use::Singles);
        assert!(broken, "a free {segment:?} is {:?}", self.segments.state(segment));
        cluster.broken |= 1 << word;
        self.take_of(&mut cluster, segment, &mut cache.slots);
        self.tell(number, &cluster);
    }

    /// Adds single slots of one cluster to `slots`, up to a batch.
    fn take_slots(&self, number: u32, slots: &mut Vec<Slot>) {
        let mut cluster = lock(&self.clusters[number as usize]);
        for word in 0..CLUSTER_SEGMENTS {
            if cluster.broken & 1 << word != 0 {
                let segment = Segment(number * CLUSTER_SEGMENTS as u32 + word as u32);
                self.take_of(&mut cluster, segment, slots);
            }
        }
        self.tell(number, &cluster);
    }

    fn take_of(&self, cluster: &mut Cluster, segment: Segment, slots: &mut Vec<Slot>) {
        let (_, word) = home(segment);
        while slots.len() < self.batch && cluster.used[word] != u64::MAX {
            let bit = cluster.used[word].trailing_ones();
            cluster.used[word] |= 1 << bit;
            slots.push(Slot(segment.0 * BATCH as u32 + bit));
        }
    }

    fn empty_cache(&self, cache: &mut SlotCache) {
        self.free(&mut cache.slots);
        self.free(&mut cache.returned);
    }

    /// Frees slots, one cluster after the other.
    fn free(&self, slots: &mut Vec<Slot>) {
        slots.sort_unstable();
        for of_cluster in slots.chunk_by(|a, b| home(a.segment()).0 == home(b.segment()).0) {
            let (number, _) = home(of_cluster[0].segment());
            let mut cluster = lock(&self.clusters[number as usize]);
            for of_segment in of_cluster.chunk_by(|a, b| a.segment() == b.segment()) {
                let bits = of_segment.iter().map(|slot| slot.bit()).sum();
                self.clear(&mut cluster, of_segment[0].segment(), bits);
            }
            self.tell(number, &cluster);
        }
        slots.clear();
    }

    /// Clears bits of a broken-up segment; a segment without bits is free again.
    fn clear(&self, cluster: &mut Cluster, segment: Segment, bits: u64) {
        let (_, word) = home(segment);
        let taken = cluster.used[word] & bits == bits && cluster.broken & 1 << word != 0;
        assert!(taken || bits == 0, "a slot of {segment:?} is given back that nobody has");
        cluster.used[word] &= !bits;
        if cluster.used[word] == 0 && cluster.broken & 1 << word != 0 {
            cluster.broken &= !(1 << word);
            let freed = self.segments.turn(segment, Use::Singles, Use::Free);
            assert!(freed && self.segments.live(segment) == 0, "{segment:?} has live slots");
            if cluster.broken == 0 {
                cluster.table = cluster.table.take().and_then(|table| self.keep_spare(table));
                self.tables.note(home(segment).0, cluster.table.as_ref());
            }
            self.free_segments.fetch_add(1, AcqRel);
        }
    }

    /// Updates the sets for a cluster.
    fn tell(&self, number: u32, cluster: &Cluster) {
        let has_slot =
            |word: &usize| cluster.broken & 1 << word != 0 && cluster.used[*word] != u64::MAX;
        let taken = |word: usize| cluster.used[word].count_ones() as usize;
        let fewest = (0..CLUSTER_SEGMENTS).filter(has_slot).map(taken).min();
        let at = number as usize;
        self.with_segments.set(at, cluster.in_use && cluster.used.contains(&0));
        self.with_slots.set(at, fewest.is_some());
        for (fill, set) in self.by_fill.iter().enumerate() {
            set.set(at, fewest.is_some_and(|taken| taken * FILLS / BATCH == fill));
        }
        self.empty.set(at, cluster.in_use && self.is_empty(number, cluster));
    }

    /// All sets of clusters.
    fn sets(&self) -> impl Iterator<Item = &Bits> {
        [&self.with_segments, &self.with_slots, &self.empty].into_iter().chain(&self.by_fill)
    }

    fn is_empty(&self, number: u32, cluster: &Cluster) -> bool {
        let there = self.segments.count() - number as usize * CLUSTER_SEGMENTS;
        cluster.used.iter().take(there).all(|used| *used == 0)
    }
}

/// The clusters of a set, from `from` on and then from the first.
fn numbers(bits: &Bits, from: u32) -> impl Iterator<Item = u32> {
    bits.from(from as usize).map(|number| number as u32)
}

/// The cluster of a segment, and the index of the segment's word in it.
fn home(segment: Segment) -> (u32, usize) {
    let per_cluster = CLUSTER_SEGMENTS as u32;
    (segment.0 / per_cluster, (segment.0 % per_cluster) as usize)
}

/// The cluster of a slot, and its index in the cluster's table.
fn table_home(slot: Slot) -> (usize, usize) {
    (slot.0 as usize / CLUSTER_SLOTS, slot.0 as usize % CLUSTER_SLOTS)
}

mod check;
mod left;
mod packing;
pub(crate) use packing::VICTIMS;
#[cfg(all(test, feature = "shuttle"))]
mod shuttle_tests;
#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
mod upkeep;
