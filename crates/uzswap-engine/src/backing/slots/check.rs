//! Recounts the slots at rest.

use super::Slots;
use crate::backing::segments::Use;
use crate::backing::shape::{BATCH, CLUSTER_SEGMENTS, Segment};
use crate::bits::Bits;
use crate::sync::atomic::Ordering::*;
use crate::sync::lock;
use uzswap_ranges::RangeIndex;

impl Slots {
    /// Recounts everything; panics with the difference. Returns the number of taken slots that are
    /// in no cache. The caller compares this number with its own count. The backing must be at
    /// rest.
    pub(crate) fn check(&self) -> usize {
        let (mut free_slots, mut free_segments, mut in_use, mut tables) = (0, 0, 0, 0);
        for (number, cluster) in (0..).zip(&self.clusters) {
            let cluster = lock(cluster);
            in_use += usize::from(cluster.in_use);
            assert!(
                cluster.table.is_some() || cluster.broken == 0,
                "of {number} there is no table"
            );
            tables += u32::from(cluster.table.is_some());
            let there = self.segments.count() - number as usize * CLUSTER_SEGMENTS;
            for (word, used) in cluster.used.iter().enumerate().take(there) {
                let segment = Segment(number * CLUSTER_SEGMENTS as u32 + word as u32);
                let state = self.segments.state(segment);
                let is_broken = cluster.broken & 1 << word != 0;
                assert_eq!(is_broken, state == Use::Singles, "{segment:?} is {state:?}");
                assert_eq!(*used == 0, state == Use::Free, "{segment:?} is {state:?}");
                assert!(is_broken || *used == 0 || *used == u64::MAX, "{segment:?} is in parts");
                free_slots += used.count_zeros() as usize;
                free_segments += usize::from(*used == 0);
            }
            assert_eq!(self.taken.get(number.into()).is_some(), cluster.in_use, "of {number}");
            let bits = || self.sets().map(|set| set.has(number as usize)).collect::<Vec<_>>();
            let before = bits();
            self.tell(number, &cluster);
            assert_eq!(bits(), before, "bits of cluster {number}");
        }
        self.sets().for_each(Bits::check);
        let cached: usize =
            self.caches.iter().map(|cache| cache.slots.len() + cache.returned.len()).sum();
        assert_eq!(self.free_segments.load(Acquire) as usize, free_segments, "free segments");
        assert_eq!(self.taken.check().items, in_use, "the range index and the clusters");
        assert_eq!(self.untaken.load(Acquire) as usize, self.clusters.len() - in_use);
        tables += lock(&self.spare_tables).len() as u32;
        assert_eq!(self.tables_made.load(Relaxed), tables, "tables");
        self.segments.count() * BATCH - free_slots - cached
    }
}
