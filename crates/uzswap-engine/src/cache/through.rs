//! Pages that the pool rejects, written straight to the backing.
//!
//! ```text
//! store_through   take a slot → write the page → into the index
//! packing         the segments with fewest such pages → their slots move → the segments are free
//! ```
//! Such a page takes one slot, without a header: its owner and its tag are in memory (see
//! `backing::slots`). A segment that is given out slot by slot can therefore not be cleaned as
//! others are. If there are many free slots and few free segments, the pages of the emptiest such
//! segments move into free slots of the others.

use super::writeback::FailedRequest;
use super::{Cache, Reject, Store};
use crate::backing::seal::Identity;
use crate::backing::segments::Use;
use crate::backing::shape::{SLOT_BYTES, Segment, Slot};
use crate::backing::slots::{RESERVED, VICTIMS};
use crate::compress::Codec;
use crate::counters::Counter::*;
use crate::ids::{Place, SwapEntry};
use crate::index::{State, View};
use crate::object::{Extent, Form};
use crate::page::{PAGE_BYTES, Page, checksum_of, content_hash};

/// The form of a page written through.
const RAW: Form = Form { bytes: PAGE_BYTES as u16, codec: Codec::Raw };

impl Slot {
    /// The extent of a page written through to this slot.
    fn extent(self) -> Extent {
        Extent { place: Place::at(self.start()), form: RAW }
    }
}

/// An aligned page, as every device can read and write it.
#[repr(align(4096))]
struct Aligned(Page);

const _: () = assert!(PAGE_BYTES == SLOT_BYTES);

impl Cache {
    /// Writes a page that [`Self::store`] rejected straight to the backing, uncompressed. When
    /// zswap rejects a page, the kernel likewise writes it to the swap device. Waits for the write.
    pub fn store_through(&self, key: SwapEntry, page: &Page) -> Store {
        if !self.writeback_works() || !self.backing.takes_pages() {
            return Store::Rejected(Reject::ReclaimFail);
        }
        let slot = self
            .take_space(|slots| slots.take_slot(RESERVED))
            .or_else(|| self.clean_for(|slots| slots.take_slot(RESERVED)));
        let Some(slot) = slot else {
            self.counters.increment(BackingFull);
            self.ring();
            return Store::Rejected(Reject::ReclaimFail);
        };
        let checksum = checksum_of(content_hash(page));
        let Some(proof) = self.write_slot(key, slot, page, checksum) else {
            self.slots.give_slot(slot);
            return Store::Rejected(Reject::ReclaimFail);
        };
        let view = self.index.view();
        let made = || view.lock_made(key).ok();
        let Some(locked) = made().or_else(|| self.wait_for(made)) else {
            self.slots.give_slot(slot);
            self.ring();
            return Store::Rejected(Reject::AllocFail);
        };
        let extent = slot.extent();
        self.slots.add(extent);
        self.dispose(locked.written_through(extent, proof));
        self.counters.increment(WrittenThrough);
        Store::Stored
    }

    /// Writes a page to its slot and returns the proof for its entry; `None` if the write failed.
    fn write_slot(&self, owner: SwapEntry, slot: Slot, page: &Page, checksum: u32) -> Option<u64> {
        let is_aligned = (page.as_ptr() as usize).is_multiple_of(self.backing.block_bytes());
        let (proof, written) = match &self.seal {
            Some(seal) => {
                let (generation, extent) = (seal.next(), slot.extent());
                let mut sealed = Aligned(*page);
                let tag = seal.seal(Identity { owner, extent, generation }, &mut sealed.0);
                self.slots.note_page(slot, owner, Some(tag));
                (generation.0, self.backing.write_page(slot.start(), &sealed.0))
            }
            None => {
                self.slots.note_page(slot, owner, None);
                let at = slot.start();
                let written = match is_aligned {
                    true => self.backing.write_page(at, page),
                    false => self.backing.write_page(at, &Aligned(*page).0),
                };
                (checksum.into(), written)
            }
        };
        if let Err(error) = written {
            self.fail(FailedRequest { what: "write", byte: slot.start(), error });
            return None;
        }
        self.counters.add(BackingBytesWritten, PAGE_BYTES as i64);
        Some(proof)
    }

    /// Gathers pages written through in fewer segments, so that free slots become free segments.
    /// True if a segment became free. The caller holds the writer's lock.
    pub(crate) fn pack_singles(&self) -> bool {
        self.slots.drain();
        self.pack(self.slots.emptiest())
    }

    /// Moves the pages of victims elsewhere, the emptiest first. A reserved segment stays broken
    /// up, so each of its other slots has a page written through, or none.
    fn pack(&self, victims: [Option<Segment>; VICTIMS]) -> bool {
        let view = self.index.view();
        // Reserves all victims, so that none takes the pages of another.
        let mut held = victims.map(|victim| self.slots.reserve(victim?));
        let mut won = 0;
        for (at, victim) in victims.into_iter().enumerate() {
            let (Some(victim), Some(own)) = (victim, held[at].take()) else { continue };
            let left = &mut held[at + 1..];
            let move_out = |slot| self.move_single(&view, self.slots.owner(slot), slot.extent());
            let has_moved = own.others().all(|slot| {
                move_out(slot) || {
                    // The fullest of the other victims takes pages and keeps its own.
                    let mut fullest = left.iter_mut().rev().filter_map(Option::take);
                    self.writeback_works()
                        && fullest.any(|other| {
                            self.slots.release(other);
                            move_out(slot)
                        })
                }
            });
            self.slots.drain();
            self.slots.release(own);
            won += i64::from(self.slots.segments.state(victim) != Use::Singles);
            // No pages of other victims are to move into this segment, even if some of its pages
            // had to stay.
            held[at] = self.slots.reserve(victim);
            if !has_moved {
                break;
            }
        }
        held.into_iter().flatten().for_each(|held| self.slots.release(held));
        self.counters.add(SegmentsCleaned, won);
        won > 0
    }

    /// Moves a page to another slot of a broken-up segment. `false` if there is no such slot, or
    /// the backing fails: then the page stays.
    fn move_single(&self, view: &View<'_>, key: SwapEntry, from: Extent) -> bool {
        let Some(locked) = view.lock(key) else { return true };
        // A record may have the form and the place of a page that was here before.
        if locked.state() != State::Placed(from) || !self.slots.is_single(from.place) {
            return true;
        }
        // All segments are reserved, so that none is broken up for this.
        let Some(slot) = self.slots.take_slot(usize::MAX) else { return false };
        if Segment::of(slot.extent().place) == Segment::of(from.place) {
            // Only slots that pages have just left are free.
            self.slots.give_slot(slot);
            return false;
        }
        let mut page = Aligned([0; PAGE_BYTES]);
        let byte = from.place.byte();
        if let Err(error) = self.backing.read(byte, &mut page.0) {
            self.fail(FailedRequest { what: "read", byte, error });
            self.slots.give_slot(slot);
            return false;
        }
        let Ok(held) = self.open_read(key, from, locked.proof(), &mut page.0) else {
            // The page stays, and each load reports the error.
            self.slots.give_slot(slot);
            return true;
        };
        let checksum = held.checksum;
        let Some(proof) = self.write_slot(key, slot, &page.0, checksum) else {
            self.slots.give_slot(slot);
            return false;
        };
        let extent = slot.extent();
        self.slots.add(extent);
        self.dispose(locked.moved_on_backing(extent, proof));
        true
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::cache::Load;
    use crate::testing::{Content, Setup, page_of, stay_on_a_cpu};

    #[test]
    fn a_segment_that_was_freed_and_filled_with_records_since_it_was_picked_is_left_alone() {
        stay_on_a_cpu();
        let setup = Setup { backing_bytes: 4 << 20, ..Setup::default() };
        let (cache, area, _) = setup.make();
        let key = |offset| area.entry(offset).expect("in the area");
        let kept: [u32; 3] = [0, 64, 128];
        let noise = |offset: u32| page_of(Content::Random, offset.into());
        for offset in 0..192 {
            assert_eq!(cache.store_through(key(offset), &noise(offset)), Store::Stored);
        }
        let gone = (0..192).filter(|offset| !kept.contains(offset));
        gone.for_each(|offset| cache.invalidate(key(offset)));
        cache.slots.drain();
        let victims = cache.slots.emptiest();
        let victim = victims[0].expect("one of three has room in the others");
        // The segment's last page goes before the segment is reserved, and writeback takes the
        // segment.
        let last = kept.into_iter().find(|offset| {
            matches!(cache.index.view().peek(key(*offset)).state(),
                State::Placed(extent) if Segment::of(extent.place) == victim)
        });
        let last = last.expect("a page is in it");
        cache.invalidate(key(last));
        cache.slots.drain();
        let mixed = |offset: u32| page_of(Content::Mixed, offset.into());
        for offset in 200..900 {
            assert_eq!(cache.store(key(offset), &mixed(offset)), Store::Stored);
        }
        cache.shrink(usize::MAX);
        assert_eq!(cache.slots.segments.state(victim), Use::Written);
        cache.pack(victims);
        let assert_holds = |offset: u32, page: Page| {
            let mut back = [0; PAGE_BYTES];
            let loaded = cache.load(key(offset), &mut back);
            assert!(matches!(loaded, Ok(Load::Hit)) && back == page, "page {offset}: {loaded:?}");
        };
        (200..900).for_each(|offset| assert_holds(offset, mixed(offset)));
        let others = kept.into_iter().filter(|offset| *offset != last);
        others.for_each(|offset| assert_holds(offset, noise(offset)));
        cache.check();
    }

    /// Other pages use the slots again, and are moved with their own content.
    #[test]
    fn a_slot_is_that_of_the_page_that_was_written_there_last() {
        stay_on_a_cpu();
        for seals_backing in [false, true] {
            let setup = Setup { backing_bytes: 4 << 20, seals_backing, ..Setup::default() };
            let (cache, area, _) = setup.make();
            let key = |offset| area.entry(offset).expect("in the area");
            let noise = |offset: u32| page_of(Content::Random, offset.into());
            let place = |offset| match cache.index.view().peek(key(offset)).state() {
                State::Placed(extent) => extent.place,
                other => panic!("page {offset} is {other:?}"),
            };
            let through = |offset| {
                assert_eq!(cache.store_through(key(offset), &noise(offset)), Store::Stored);
                place(offset)
            };
            let before: Vec<_> = (0..192).map(through).collect();
            (0..192).for_each(|offset| cache.invalidate(key(offset)));
            cache.slots.drain();
            let after: Vec<_> = (1000..1192).map(through).collect();
            assert!(before.iter().all(|place| after.contains(place)), "other slots");
            // A few of each segment stay.
            let stays = |offset: &u32| offset.is_multiple_of(8);
            let gone = (1000..1192).filter(|offset| !stays(offset));
            gone.for_each(|offset| cache.invalidate(key(offset)));
            // The slots of three pages that are elsewhere now, and of a page that is gone.
            (0..4).for_each(|offset| {
                assert_eq!(cache.store(key(offset), &noise(offset)), Store::Stored)
            });
            cache.check();
            assert!(cache.pack_singles());
            assert_eq!(cache.counters.get(SegmentsCleaned), 2, "three are one");
            for offset in (1000..1192).filter(stays).chain(0..4) {
                let mut back = [0; PAGE_BYTES];
                assert!(matches!(cache.load(key(offset), &mut back), Ok(Load::Hit)));
                assert!(back == noise(offset), "page {offset}");
            }
            cache.check();
        }
    }
}
