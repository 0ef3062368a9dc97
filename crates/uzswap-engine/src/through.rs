//! Pages that the pool does not take, written straight to the backing.
//!
//! ```text
//! store_through   take a slot → write the page → into the index
//! packing         the segments with fewest such pages → their slots move → the segments are free
//! ```
//! Such a page takes one slot, without a header, and its tag is kept in memory (see
//! `backing::slots`): who it belongs to is known from the index alone. So a segment that is given
//! out slot by slot cannot be cleaned as others are. Where free slots are many and free segments
//! few, the index is walked once, and what is found in the emptiest of those segments is moved into
//! free slots of the others.

use crate::backing::seal::Identity;
use crate::backing::segments::{Segment, Use};
use crate::backing::slots::{RESERVED, SLOT_BYTES, Slot};
use crate::cache::{Cache, Reject, Store};
use crate::compress::Codec;
use crate::ids::{Place, SwapEntry};
use crate::index::{Extent, Form, State, View};
use crate::page::{PAGE_BYTES, Page, checksum_of, content_hash};
use crate::stats::Counter::*;
use crate::writeback::Failure;

/// The form of a page written through.
const RAW: Form = Form { bytes: PAGE_BYTES as u16, codec: Codec::Raw };

impl Slot {
    /// A page written through to it.
    fn extent(self) -> Extent {
        Extent { place: Place::at(self.start()), form: RAW }
    }
}

/// Slots of a segment.
const SEGMENT_SLOTS: usize = u64::BITS as usize;

/// Segments emptied by one walk of the index.
const VICTIMS: usize = 8;

/// A page where every device can read and write it directly.
#[repr(align(4096))]
struct Aligned(Page);

const _: () = assert!(PAGE_BYTES == SLOT_BYTES);

impl Cache {
    /// Takes a page that [`Self::store`] rejected straight to the backing, uncompressed, as a page
    /// that the kernel's zswap rejects goes to the swap device. Waits for the write.
    pub fn store_through(&self, key: SwapEntry, page: &Page) -> Store {
        if !self.writeback_works() {
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

    /// Writes a page to its slot; what the entry must know to read it. `None` if it was not
    /// written.
    fn write_slot(&self, owner: SwapEntry, slot: Slot, page: &Page, checksum: u32) -> Option<u64> {
        let is_aligned = (page.as_ptr() as usize).is_multiple_of(self.backing.block_bytes());
        let (proof, written) = match &self.seal {
            Some(seal) => {
                let (generation, extent) = (seal.next(), slot.extent());
                let mut sealed = Aligned(*page);
                let tag = seal.seal(Identity { owner, extent, generation }, &mut sealed.0);
                self.slots.set_tag(slot, tag);
                (generation.0, self.backing.write(slot.start(), &sealed.0))
            }
            None if is_aligned => (checksum.into(), self.backing.write(slot.start(), page)),
            None => (checksum.into(), self.backing.write(slot.start(), &Aligned(*page).0)),
        };
        if let Err(error) = written {
            self.fail(Failure { what: "write", byte: slot.start(), error });
            return None;
        }
        self.counters.add(BackingBytesWritten, PAGE_BYTES as i64);
        Some(proof)
    }

    /// Moves pages written through together, until there are free segments where there were free
    /// slots; whether that won any. Called with the writer's lock held.
    pub(crate) fn pack_singles(&self) -> bool {
        self.slots.drain();
        self.pack(self.emptiest())
    }

    fn pack(&self, victims: [Option<Segment>; VICTIMS]) -> bool {
        let held = victims.map(|victim| self.slots.hold(victim?));
        let is_held = |place| held.iter().flatten().any(|held| held.has(place));
        let view = self.index.view();
        'walk: for (first, entries) in view.trunks().filter(|_| held.iter().any(Option::is_some)) {
            for (offset, entry) in (0..).zip(entries) {
                let State::Placed(extent) = entry.peek().state() else { continue };
                let key = SwapEntry(first.0 + offset);
                if is_held(extent.place) && !self.move_single(&view, key, extent) {
                    break 'walk;
                }
            }
        }
        held.into_iter().flatten().for_each(|held| self.slots.let_go(held));
        self.slots.drain();
        let is_free = |victim: &&Segment| self.slots.segments.state(**victim) != Use::Singles;
        let won = victims.iter().flatten().filter(is_free).count();
        self.counters.add(SegmentsCleaned, won as i64);
        won > 0
    }

    /// The segments with the fewest pages written through, as many as the free slots of the others
    /// have room for.
    fn emptiest(&self) -> [Option<Segment>; VICTIMS] {
        let mut fewest = [None; VICTIMS];
        let mut room = 0;
        for (segment, live) in self.slots.singles() {
            room += SEGMENT_SLOTS - live;
            let at = fewest.partition_point(|other| other.is_some_and(|(_, few)| few <= live));
            if at < VICTIMS {
                fewest[at..].rotate_right(1);
                fewest[at] = Some((segment, live));
            }
        }
        fewest.map(|candidate: Option<(Segment, usize)>| {
            // Its own free slots are no room for it.
            let (segment, live) = candidate.filter(|_| room >= SEGMENT_SLOTS)?;
            room -= SEGMENT_SLOTS;
            (live < SEGMENT_SLOTS).then_some(segment)
        })
    }

    /// Moves a page to another slot of a segment that is broken up; `false` if there is none, or
    /// the backing fails: then the page stays where it is.
    fn move_single(&self, view: &View<'_>, key: SwapEntry, from: Extent) -> bool {
        let Some(locked) = view.lock(key) else { return true };
        // A record may have the form and the place of a page that was here before.
        if locked.state() != State::Placed(from) || !self.slots.is_single(from.place) {
            return true;
        }
        // More than there are: no segment is broken up for this.
        let Some(slot) = self.slots.take_slot(usize::MAX) else { return false };
        let mut page = Aligned([0; PAGE_BYTES]);
        let byte = from.place.byte();
        if let Err(error) = self.backing.read(byte, &mut page.0) {
            self.fail(Failure { what: "read", byte, error });
            self.slots.give_slot(slot);
            return false;
        }
        let Ok(held) = self.open_held(key, from, locked.proof(), &mut page.0) else {
            // It stays where it is, an error to whoever loads it.
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
    use crate::testing::{Content, Setup, page_of};

    #[test]
    fn a_segment_that_was_freed_and_filled_with_records_since_it_was_picked_is_left_alone() {
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
        let victims = cache.emptiest();
        let victim = victims[0].expect("one of three has room in the others");
        // Before it is held: its last page goes, and writeback takes it.
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
}
