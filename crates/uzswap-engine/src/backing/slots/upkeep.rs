//! Work of the maintaining thread: memory ahead of need, idle caches, empty clusters.

use super::{RESERVED, SlotCache, Slots, TABLES_READY, numbers};
use crate::backing::shape::{CLUSTER_BYTES, CLUSTER_SEGMENTS, SEGMENT_BYTES};
use crate::sync::atomic::Ordering::*;
use crate::sync::lock;
use std::mem::swap;
use uzswap_ranges::RangeIndex;

/// Clusters discarded at a time: the kernel may take a while for each call.
const DISCARDS: usize = 16;

impl Slots {
    /// Prepares the memory to take clusters. Allocates.
    pub(crate) fn provision(&self) {
        let lacks = |cache: &SlotCache| !cache.preload.is_ready();
        let give = |cache: &mut SlotCache, preload: &mut _| swap(&mut cache.preload, preload);
        self.caches.provide(lacks, || Some(self.preload()), give);
        self.provision_tables();
    }

    /// After an error the next call tries again.
    fn provision_tables(&self) {
        let lacks = || {
            let all_have = self.tables_made.load(Relaxed) as usize >= self.clusters.len();
            !all_have && lock(&self.spare_tables).len() < TABLES_READY
        };
        while lacks() {
            let Ok(table) = self.tables.make() else { return };
            self.tables_made.fetch_add(1, Relaxed);
            lock(&self.spare_tables).push(table);
        }
        loop {
            let mut spare = lock(&self.spare_tables);
            let surplus = if spare.len() > 2 * TABLES_READY { spare.pop() } else { None };
            drop(spare);
            let Some(surplus) = surplus else { return };
            self.tables_made.fetch_sub(1, Relaxed);
            self.tables.free(surplus);
        }
    }

    /// Drains caches that were not used since the last call.
    pub(crate) fn drain_idle(&self) {
        for mut cache in self.caches.iter_free() {
            if !std::mem::take(&mut cache.touched) {
                self.empty_cache(&mut cache);
                cache.current = None;
            }
        }
    }

    /// Gives clusters without a taken slot back to the range index, after `discard` has told the
    /// device of the cluster's offset and length. Allocates.
    pub(crate) fn discard_empty(&self, mut discard: impl FnMut(u64, u64)) {
        let is_current = |number: u32| self.caches.any_may(|cache| cache.current == Some(number));
        for number in numbers(&self.empty, 0).filter(|number| !is_current(*number)).take(DISCARDS) {
            let first = number as usize * CLUSTER_SEGMENTS;
            let segments = CLUSTER_SEGMENTS.min(self.segments.count() - first);
            // Decrements the count, so that no thread looks for these segments. While space is
            // short, they are not worth a discard.
            if !self.claim(segments, RESERVED) {
                return;
            }
            let mut cluster = lock(&self.clusters[number as usize]);
            let is_empty = cluster.in_use && self.is_empty(number, &cluster);
            if is_empty {
                cluster.in_use = false;
                self.tell(number, &cluster);
                let table = cluster.table.take();
                self.tables.note(number, None);
                drop(cluster);
                self.tables_made.fetch_sub(table.iter().count() as u32, Relaxed);
                table.into_iter().for_each(|table| self.tables.free(table));
                let bytes = segments * SEGMENT_BYTES;
                discard(u64::from(number) * CLUSTER_BYTES as u64, bytes as u64);
                let item = self.taken.remove(number.into());
                assert!(item.is_some(), "a cluster in use is taken in the range index");
                self.untaken.fetch_add(1, AcqRel);
            }
            self.free_segments.fetch_add(segments as u32, AcqRel);
        }
    }
}
