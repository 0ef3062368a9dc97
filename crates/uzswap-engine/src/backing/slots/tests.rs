use super::*;
use crate::compress::Codec;
use crate::object::Form;
use crate::sync::atomic::AtomicU64;
use crate::testing::{Noise, stay_on_a_cpu};
use std::collections::HashSet;

const MIB: u64 = 1 << 20;

/// Starts all CPUs.
fn started(slots: Slots) -> Slots {
    (0..uzswap_sys::cpu::possible()).for_each(|cpu| slots.start_cpu(cpu));
    slots.provision();
    slots
}

fn slots(bytes: u64) -> Slots {
    started(Slots::new(bytes, Layout::Sealed, None))
}

fn broken_up(slots: &Slots) -> usize {
    let segments = slots.segments.all();
    segments.filter(|segment| slots.segments.state(*segment) == Use::Singles).count()
}

/// The taken segments, and the single slots.
#[derive(Default)]
struct TakenSlots {
    segments: Vec<Segment>,
    slots: Vec<Slot>,
    all: HashSet<Slot>,
}

impl TakenSlots {
    fn add_segment(&mut self, segment: Segment) {
        let first = segment.0 * BATCH as u32;
        for slot in (first..first + BATCH as u32).map(Slot) {
            assert!(self.all.insert(slot), "{slot:?} of {segment:?} is handed out twice");
        }
        self.segments.push(segment);
    }

    fn add_slot(&mut self, slot: Slot) {
        assert!(self.all.insert(slot), "{slot:?} is handed out twice");
        self.slots.push(slot);
    }

    fn give_segment(&mut self, slots: &Slots, at: usize) {
        let segment = self.segments.swap_remove(at);
        self.all.retain(|slot| slot.segment() != segment);
        slots.give_segment(segment, Use::Open);
    }

    fn give_slot(&mut self, slots: &Slots, at: usize) {
        let slot = self.slots.swap_remove(at);
        self.all.remove(&slot);
        slots.give_slot(slot);
    }

    fn give_all(&mut self, slots: &Slots) {
        while !self.segments.is_empty() {
            self.give_segment(slots, 0);
        }
        while !self.slots.is_empty() {
            self.give_slot(slots, 0);
        }
    }
}

#[test]
fn any_sequence_keeps_free_and_used_the_whole() {
    for (seed, bytes, batch) in [(1, 2 * MIB, 64), (2, 7 * MIB + 300_000, 64), (3, 9 * MIB, 1)] {
        let slots = Slots::with_batch(bytes, Layout::Sealed, batch);
        let slots = started(slots);
        let (mut noise, mut taken) = (Noise::new(seed), TakenSlots::default());
        let total = slots.segments.count() * BATCH;
        for step in 0..20_000 {
            // The backing fills and empties in turn.
            let fills = step / 2000 % 2 == 0;
            match noise.below(if fills { 8 } else { 14 }) {
                0..2 => {
                    if let Some(segment) = slots.take_segment(RESERVED) {
                        taken.add_segment(segment);
                    }
                }
                2..7 => {
                    if let Some(slot) = slots.take_slot(0) {
                        taken.add_slot(slot);
                    }
                }
                7 => slots.discard_empty(|offset, bytes| {
                    let first = Slot::at(offset).0;
                    let range = first..first + (bytes / SLOT_BYTES as u64) as u32;
                    assert!(!range.map(Slot).any(|slot| taken.all.contains(&slot)));
                }),
                8 => slots.drain_idle(),
                9 if !taken.segments.is_empty() => {
                    let at = noise.below(taken.segments.len() as u64) as usize;
                    taken.give_segment(&slots, at);
                }
                _ if !taken.slots.is_empty() => {
                    let at = noise.below(taken.slots.len() as u64) as usize;
                    taken.give_slot(&slots, at);
                }
                _ => {}
            }
            slots.provision();
            if step % 100 == 0 {
                assert_eq!(slots.check(), taken.all.len());
            }
        }
        taken.give_all(&slots);
        slots.drain();
        assert_eq!(slots.check(), 0);
        assert_eq!(slots.free_segments.load(Acquire) as usize * BATCH, total, "all is free");
    }
}

#[test]
fn no_slot_is_found_only_when_none_is_free_anywhere() {
    let slots = slots(4 * MIB);
    let mut taken = TakenSlots::default();
    while let Some(slot) = slots.take_slot(0) {
        taken.add_slot(slot);
    }
    assert_eq!(taken.all.len(), 1024, "every slot");
    assert!(slots.take_segment(0).is_none());
    // The slots in the cache of the present CPU.
    let slot = taken.slots.pop().unwrap();
    slots.give_slot(slot);
    assert_eq!(slots.take_slot(0), Some(slot));
    taken.slots.push(slot);
    taken.give_all(&slots);
    slots.drain();
    let segments: Vec<_> = std::iter::from_fn(|| slots.take_segment(RESERVED)).collect();
    assert_eq!(segments.len(), 16 - RESERVED);
    assert!(slots.take_slot(RESERVED).is_none(), "the rest is reserved");
    assert!(slots.take_segment(0).is_some());
}

#[test]
fn a_cache_takes_and_gives_back_a_batch_at_a_time() {
    stay_on_a_cpu();
    let slots = slots(64 * MIB);
    let first: Vec<_> = (0..64).map(|_| slots.take_slot(0).unwrap()).collect();
    assert!(first.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0), "neighbours, in order");
    assert_eq!(slots.check(), 64);
    let next = slots.take_slot(0).unwrap();
    let broken = broken_up(&slots);
    first[1..].iter().for_each(|slot| slots.give_slot(*slot));
    assert_eq!(broken_up(&slots), broken, "63 are not a batch");
    slots.give_slot(first[0]);
    assert_eq!(broken_up(&slots), broken - 1, "64 are, and a segment is free");
    slots.give_slot(next);
}

#[test]
fn a_cache_that_was_not_used_since_the_last_look_is_drained() {
    stay_on_a_cpu();
    let slots = slots(8 * MIB);
    let slot = slots.take_slot(0).unwrap();
    slots.give_slot(slot);
    slots.drain_idle();
    assert_eq!(broken_up(&slots), 1, "it was used");
    slots.drain_idle();
    assert_eq!(broken_up(&slots), 0);
}

#[test]
fn a_wholly_free_cluster_is_discarded_and_goes_back_to_the_range_index() {
    let slots = slots(8 * MIB);
    let clusters = |slots: &Slots| slots.taken.check().items;
    let segments: Vec<_> = (0..17).map(|_| slots.take_segment(0).unwrap()).collect();
    assert_eq!(clusters(&slots), 3);
    segments.iter().for_each(|segment| slots.give_segment(*segment, Use::Open));
    let mut discarded = Vec::new();
    slots.discard_empty(|offset, bytes| discarded.push((offset, bytes)));
    let currents: Vec<_> = slots.caches.iter().filter_map(|cache| cache.current).collect();
    let others = (0..4).filter(|number| !currents.contains(number));
    let was_used = |number: &u32| segments.iter().any(|segment| home(*segment).0 == *number);
    let expected: Vec<_> =
        others.filter(was_used).map(|number| (u64::from(number) * 2 * MIB, 2 * MIB)).collect();
    assert_eq!(discarded, expected, "all but those that CPUs are in");
    assert!(!discarded.is_empty());
    (0..2).for_each(|_| slots.drain_idle());
    slots.discard_empty(|_, _| {});
    assert_eq!(clusters(&slots), 0, "no CPU is in any now");
    slots.check();
    assert_eq!(slots.free_segments.load(Acquire), 32);
}

/// Compared with a scan of every segment. Only as many clusters are searched as there are victims.
#[test]
fn the_emptiest_segments_are_found_to_within_an_eighth() {
    let slots = slots(64 * MIB);
    let mut noise = Noise::new(5);
    let mut taken: Vec<Slot> = std::iter::from_fn(|| slots.take_slot(RESERVED)).collect();
    // Each segment keeps its own number of slots.
    let share: Vec<u64> = slots.segments.all().map(|_| 1 + noise.below(64)).collect();
    taken.retain(|slot| {
        let stays = noise.below(64) < share[slot.segment().0 as usize];
        if !stays {
            slots.give_slot(*slot);
        }
        stays
    });
    let extent = |slot: Slot| {
        let form = Form { bytes: SLOT_BYTES as u16, codec: Codec::Raw };
        Extent { place: Place::at(slot.start()), form }
    };
    taken.iter().for_each(|slot| slots.add(extent(*slot)));
    slots.drain();
    while !taken.is_empty() {
        let live = |segment: &Segment| slots.segments.live(*segment) / SLOT_BYTES;
        let is_single = |segment: &Segment| slots.segments.state(*segment) == Use::Singles;
        let all = slots.segments.all().filter(is_single).map(|segment| live(&segment));
        let mut all: Vec<usize> = all.filter(|live| *live < BATCH).collect();
        all.sort_unstable();
        let found: Vec<Segment> = slots.emptiest().into_iter().flatten().collect();
        assert!(found.is_sorted_by_key(live), "the emptiest first");
        assert!(all.is_empty() || !found.is_empty());
        for (found, least) in found.iter().zip(all) {
            assert!(
                live(found) < least + BATCH / FILLS,
                "{found:?} has {}, of {least}",
                live(found)
            );
        }
        for _ in 0..taken.len().min(200) {
            let slot = taken.swap_remove(noise.below(taken.len() as u64) as usize);
            slots.remove(extent(slot));
        }
        slots.drain();
        slots.check();
    }
}

#[test]
fn slots_that_are_held_are_not_handed_out() {
    let slots = slots(2 * MIB);
    let slot = slots.take_slot(0).unwrap();
    slots.drain();
    let held = slots.reserve(slot.segment()).unwrap();
    assert!(held.others().eq([slot]));
    assert!(slots.reserve(slot.segment()).is_none(), "it has none that could be held");
    let other = slots.take_slot(0).unwrap();
    assert_ne!(other.segment(), slot.segment());
    slots.release(held);
    slots.give_slot(slot);
    slots.give_slot(other);
    slots.drain();
    assert!(slots.reserve(slot.segment()).is_none(), "it is free");
    assert_eq!(slots.check(), 0);
}

/// No slot is given out twice and none is lost, in any order of threads: `UZSWAP_FULL=1` for 10^8
/// operations.
#[test]
fn eight_threads_share_out_every_slot_once() {
    const THREADS: u64 = 8;
    let full = std::env::var_os("UZSWAP_FULL").is_some();
    let operations: u64 = if full { 100_000_000 } else { 800_000 };
    let slots = slots(24 * MIB);
    // A bit for each slot: the thread that takes the slot sets it, and clears it on return.
    let owned: Vec<AtomicU64> = (0..24 * MIB / SEGMENT_BYTES as u64).map(|_| 0.into()).collect();
    let take = |segment: Segment, bits: u64| {
        let before = owned[segment.0 as usize].fetch_or(bits, Relaxed);
        assert_eq!(before & bits, 0, "a slot of {segment:?} is handed out twice");
    };
    let give = |segment: Segment, bits: u64| {
        let before = owned[segment.0 as usize].fetch_and(!bits, Relaxed);
        assert_eq!(before & bits, bits, "a slot of {segment:?} was not taken");
    };
    let work = |thread: u64| {
        let (mut noise, mut singles) = (Noise::new(thread + 1), Vec::<Slot>::new());
        let mut segments = Vec::<Segment>::new();
        for step in 0..operations / THREADS {
            let many = step / 4096 % 3 != 2;
            match noise.below(64) {
                0 => segments.extend(slots.take_segment(RESERVED).inspect(|s| take(*s, u64::MAX))),
                1 => {
                    if let Some(segment) = segments.pop() {
                        give(segment, u64::MAX);
                        slots.give_segment(segment, Use::Open);
                    }
                }
                2 if step % 64 == 0 => slots.discard_empty(|_, _| {}),
                2 if step % 64 == 1 => slots.drain(),
                2 if step % 64 == 2 => slots.drain_idle(),
                what if (what < 34) == many => {
                    if let Some(slot) = slots.take_slot(RESERVED) {
                        take(slot.segment(), slot.bit());
                        singles.push(slot);
                    }
                }
                _ if !singles.is_empty() => {
                    let at = noise.below(singles.len() as u64) as usize;
                    let slot = singles.swap_remove(at);
                    give(slot.segment(), slot.bit());
                    slots.give_slot(slot);
                }
                _ => {}
            }
            if step % 1024 == 0 {
                slots.provision();
            }
        }
        for segment in segments {
            give(segment, u64::MAX);
            slots.give_segment(segment, Use::Open);
        }
        for slot in singles {
            give(slot.segment(), slot.bit());
            slots.give_slot(slot);
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| {
            drop(scope.spawn({
                let work = &work;
                move || work(thread)
            }))
        });
    });
    slots.drain();
    assert_eq!(slots.check(), 0, "every slot is back");
    assert_eq!(slots.free_segments.load(Acquire) as usize, owned.len());
}
