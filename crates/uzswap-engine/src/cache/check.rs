//! Recounts a cache at rest from scratch and compares the result with its counts.

use super::Cache;
use crate::backing::segments::Use;
use crate::backing::shape::{SEGMENT_BYTES, SLOT_BYTES, Segment, Slot};
use crate::compress::Codec;
use crate::counters::Counter::*;
use crate::ids::{Handle, SwapEntry};
use crate::index::{List, State};
use crate::object::Extent;
use crate::unit::Units;
use std::collections::HashMap;
use std::sync::atomic::Ordering;

#[derive(Default)]
struct Recount {
    objects: Vec<(SwapEntry, Handle)>,
    extents: Vec<Extent>,
    sharers: HashMap<u32, u32>,
    /// Taken positions of each unit.
    members: HashMap<u32, u16>,
    pieces: HashMap<u32, usize>,
    records: Vec<SwapEntry>,
    stored: u64,
    filled: u64,
    shared: u64,
    recompressed: u64,
    object_bytes: u64,
    pool_pages: u64,
    backing_pages: u64,
}

impl Cache {
    /// Recounts everything; panics with the difference. No other thread may use the cache.
    pub fn check(&self) {
        let mut count = Recount::default();
        for (first, entries) in self.index.view().trunks() {
            for (offset, entry) in (0..).zip(entries) {
                let key = SwapEntry(first.0 + offset);
                let word = entry.peek();
                assert!(!word.is_in_flight(), "{key:?} is in flight, at rest");
                self.recount(&mut count, key, word.state());
            }
        }
        self.check_lists(&count);
        self.check_shares(&count);
        self.check_units(&count);
        self.check_segments(&mut count.extents);
        self.pool.check(&count.objects);
        let counted = |counter| self.counters.get(counter);
        assert_eq!(counted(StoredPages), count.stored, "stored_pages");
        assert_eq!(counted(SameFilledPages), count.filled, "same_filled_pages");
        assert_eq!(counted(SharedPages), count.shared, "shared_pages");
        assert_eq!(self.pool_pages(), count.pool_pages, "pool_pages");
        assert_eq!(counted(BackingPages), count.backing_pages, "backing_pages");
        assert_eq!(counted(RecompressedPages), count.recompressed, "recompressed_pages");
        assert_eq!(counted(CompressedBytes), count.object_bytes, "compressed_bytes");
    }

    fn recount(&self, count: &mut Recount, key: SwapEntry, state: State) {
        let is_record = self.shares.contains(key);
        if state == State::Absent {
            return;
        }
        let is_piece = self.units.contains(key);
        if is_record {
            count.records.push(key);
        } else if is_piece {
            let first = key.0 - key.0 % crate::unit::PIECES as u32;
            *count.pieces.entry(first).or_default() += 1;
        } else {
            count.stored += 1;
        }
        if let State::Pooled(object) = state {
            assert_eq!(object.form.codec == Codec::Piece, is_piece, "{key:?}");
            count.pool_pages += u64::from(!is_piece);
        }
        if let State::Placed(extent) = state {
            assert_eq!(extent.form.codec == Codec::Piece, is_piece, "{key:?}");
            count.backing_pages += u64::from(!is_piece);
            if self.slots.is_single(extent.place) {
                let owner = self.slots.owner(Slot::at(extent.place.byte()));
                assert_eq!(owner, key, "owner of the slot at {:?}", extent.place);
            }
        }
        match state {
            State::Absent => {}
            State::Filled(_) => count.filled += 1,
            State::Pooled(object) => {
                count.objects.push((key, object.handle));
                count.object_bytes += u64::from(object.form.bytes);
            }
            State::Placed(extent) => count.extents.push(extent),
            State::Shared(record) => {
                assert!(!is_record && self.shares.contains(record));
                *count.sharers.entry(record.0).or_default() += 1;
                count.shared += 1;
            }
            State::Member(member) => {
                assert!(!is_piece && self.units.contains(member.unit));
                let bit = 1 << member.position;
                let taken = count.members.entry(member.unit.0).or_default();
                assert!(*taken & bit == 0, "two pages at {member:?}");
                *taken |= bit;
                count.recompressed += 1;
            }
        }
    }

    fn check_lists(&self, count: &Recount) {
        let mut listed = Vec::new();
        let view = self.index.view();
        for (list, is_cold) in [(List::Lru, false), (List::Cold, true)] {
            for key in view.listed(list) {
                assert_eq!(view.peek(key).is_cold(), is_cold, "list of {key:?}");
                assert!(is_cold || !self.units.contains(key), "{key:?} is to be recompressed");
                listed.push(key.0);
            }
        }
        let mut pooled: Vec<u32> = count.objects.iter().map(|(key, _)| key.0).collect();
        listed.sort_unstable();
        pooled.sort_unstable();
        assert_eq!(listed, pooled, "the LRU lists each object of the pool, once");
    }

    fn check_shares(&self, count: &Recount) {
        assert_eq!(count.records.len(), count.sharers.len(), "records without sharers, or reverse");
        for record in &count.records {
            let kept = self.shares.count(*record).load(Ordering::Relaxed);
            assert_eq!(Some(&kept), count.sharers.get(&record.0), "sharers of {record:?}");
        }
    }

    fn check_units(&self, count: &Recount) {
        for (unit, taken) in self.units.all() {
            let found = count.members.get(&unit.0).copied().unwrap_or(0);
            assert_eq!(taken, found, "pages in unit {unit:?}");
            let pieces = count.pieces.get(&unit.0).copied().unwrap_or(0);
            assert_eq!(pieces > 0, taken != 0, "{pieces} pieces of unit {unit:?}");
            if taken != 0 {
                let first = Units::pieces(unit).next().map(|key| self.index.view().peek(key));
                let first = first.map(|word| word.state());
                assert!(matches!(first, Some(State::Pooled(_) | State::Placed(_))), "{unit:?}");
            }
        }
        let (sparse, believed) = self.units.sparse_counts();
        assert_eq!(sparse, believed, "units that have lost a quarter of their pages");
    }

    fn check_segments(&self, extents: &mut [Extent]) {
        extents.sort_unstable_by_key(|extent| extent.place);
        let segments = &self.slots.segments;
        let mut live: HashMap<Segment, usize> = HashMap::new();
        let mut end = 0;
        for extent in extents {
            assert!(extent.place.byte() >= end, "{extent:?} overlaps the one before");
            let bytes = self.slots.bytes_of(*extent);
            end = extent.place.byte() + bytes as u64;
            let segment = Segment::of(extent.place);
            assert!(end <= segment.start() + SEGMENT_BYTES as u64);
            let state = segments.state(segment);
            assert!(
                matches!(state, Use::Written | Use::Singles | Use::Lost),
                "{extent:?} in one {state:?}"
            );
            *live.entry(segment).or_default() += bytes;
        }
        let mut slots = 0;
        for segment in segments.all() {
            let expected = live.get(&segment).copied().unwrap_or(0);
            assert_eq!(segments.live(segment), expected, "live bytes of {segment:?}");
            slots += match segments.state(segment) {
                Use::Free => 0,
                Use::Singles => expected / SLOT_BYTES,
                Use::Open | Use::Written | Use::Cleaning | Use::Lost => SEGMENT_BYTES / SLOT_BYTES,
            };
        }
        assert_eq!(self.slots.check(), slots, "slots that are taken");
    }
}
