//! Recovers the backing's space as another process left it. The taken slots are those of the
//! records that the index refers to.

use super::{Cluster, Slots, home, table_home};
use crate::backing::segments::Use;
use crate::backing::shape::{CLUSTER_SEGMENTS, Segment, Slot};
use crate::ids::SwapEntry;
use crate::object::Extent;
use crate::sync::atomic::Ordering::*;
use crate::sync::lock;
use std::io;
use uzswap_ranges::{Hole, Preload, RangeIndex};

impl Slots {
    /// Takes the segments over, without live records. Called once, before [`Self::retake`].
    pub(crate) fn adopt(&self) {
        self.segments.adopt();
    }

    /// Notes that a record of `owner` is live. `false` if that is impossible: the record's place is
    /// free, beyond the end, or another page's. Fails without memory, or if the record's tag is
    /// lost.
    pub(crate) fn retake(&self, owner: SwapEntry, extent: Extent) -> io::Result<bool> {
        let segment = Segment::of(extent.place);
        if segment.0 as usize >= self.segments.count() {
            return Ok(false);
        }
        let state = self.segments.state(segment);
        if state == Use::Singles {
            let slot = Slot::at(extent.place.byte());
            let (number, word) = home(segment);
            let mut cluster = lock(&self.clusters[number as usize]);
            let is_new = cluster.used[word] & slot.bit() == 0;
            cluster.used[word] |= slot.bit();
            cluster.broken |= 1 << word;
            if !is_new || slot.start() != extent.place.byte() {
                return Ok(false);
            }
            if cluster.table.is_none() {
                cluster.table = Some(self.tables.retake(number)?);
            }
            cluster.table().set_owner(table_home(slot).1, owner);
        }
        self.add(extent);
        Ok(state != Use::Free)
    }

    /// Frees everything without a live record. Returns the segments to which a write may still be
    /// under way; they stay taken until the caller gives them back. Fails without memory, or if the
    /// state that was left is damaged.
    pub(crate) fn recover(&self) -> io::Result<Vec<Segment>> {
        let (mut open, mut tables) = (Vec::new(), Vec::new());
        for number in 0..self.clusters.len() as u32 {
            let mut cluster = lock(&self.clusters[number as usize]);
            let free = self.recover_cluster(number, &mut cluster, &mut open);
            self.free_segments.fetch_sub(self.segments_of(number) - free, AcqRel);
            self.tables.note(number, cluster.table.as_ref());
            tables.extend(cluster.table.as_ref().map(|table| table.number));
            cluster.in_use = !self.is_empty(number, &cluster);
            if cluster.in_use {
                self.take_number(number);
            }
            self.tell(number, &cluster);
        }
        self.tables_made.store(tables.len() as u32, Relaxed);
        tables.sort_unstable();
        self.tables.recover(&tables);
        Ok(open)
    }

    fn segments_of(&self, number: u32) -> u32 {
        let there = self.segments.count() - number as usize * CLUSTER_SEGMENTS;
        there.min(CLUSTER_SEGMENTS) as u32
    }

    /// Sets the bits of a cluster's segments by their uses. Returns the number of free segments.
    fn recover_cluster(&self, number: u32, cluster: &mut Cluster, open: &mut Vec<Segment>) -> u32 {
        let mut free = 0;
        for word in 0..self.segments_of(number) as usize {
            let segment = Segment(number * CLUSTER_SEGMENTS as u32 + word as u32);
            let live = self.segments.live(segment);
            match self.segments.state(segment) {
                // Records become live after their write, so no write is under way.
                was @ (Use::Open | Use::Written | Use::Cleaning | Use::Lost) if live > 0 => {
                    self.segments.turn(segment, was, Use::Written);
                    cluster.used[word] = u64::MAX;
                }
                Use::Open => {
                    cluster.used[word] = u64::MAX;
                    open.push(segment);
                }
                Use::Singles if live > 0 => {}
                was => {
                    self.segments.turn(segment, was, Use::Free);
                    cluster.used[word] = 0;
                    cluster.broken &= !(1 << word);
                    free += 1;
                }
            }
        }
        free
    }

    /// Takes a cluster in the range index.
    fn take_number(&self, number: u32) {
        let mut preload = Preload::default();
        self.taken.preload(&mut preload);
        let (at, within) = (u64::from(number), 0..self.clusters.len() as u64);
        let hole = Hole { hint: at, size: 1, align: 1, within, value: 0 };
        let taken = self.taken.insert_hole(&hole, &mut preload);
        assert_eq!(taken, Some(at), "clusters are taken once each, in order");
        self.untaken.fetch_sub(1, AcqRel);
    }
}
