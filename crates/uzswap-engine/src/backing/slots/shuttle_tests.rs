//! Threads that use the same slots, under a scheduler that tries many orders.

use super::*;
use crate::shuttle_tests::explore;
use shuttle::thread;
use std::sync::Arc;

/// Two clusters; caches that take and give four slots at a time.
fn slots() -> Arc<Slots> {
    let slots = Slots::with_batch(4 << 20, Layout::Sealed, 4);
    (0..uzswap_sys::cpu::possible()).for_each(|cpu| slots.start_cpu(cpu));
    slots.provision();
    Arc::new(slots)
}

fn run(slots: &Arc<Slots>, threads: Vec<Box<dyn FnOnce(&Slots) -> Vec<Slot> + Send>>) -> Vec<Slot> {
    let running: Vec<_> = threads
        .into_iter()
        .map(|body| {
            let slots = slots.clone();
            thread::spawn(move || body(&slots))
        })
        .collect();
    let mut taken: Vec<_> = running.into_iter().flat_map(|t| t.join().unwrap()).collect();
    taken.sort_unstable();
    assert!(taken.windows(2).all(|pair| pair[0] != pair[1]), "a slot is handed out twice");
    assert_eq!(slots.check(), taken.len(), "a slot is lost");
    taken
}

#[test]
fn slots_are_taken_while_they_are_drained() {
    explore(|| {
        let slots = slots();
        let first = slots.take_slot(0).unwrap();
        let mut taken = run(
            &slots,
            vec![
                Box::new(|slots| (0..3).map(|_| slots.take_slot(0).unwrap()).collect()),
                Box::new(|slots| {
                    slots.drain();
                    slots.drain_idle();
                    vec![]
                }),
                Box::new(move |slots| {
                    let mine = slots.take_slot(0).unwrap();
                    slots.give_slot(first);
                    vec![mine]
                }),
            ],
        );
        taken.drain(..).for_each(|slot| slots.give_slot(slot));
        slots.drain();
        assert_eq!(slots.check(), 0);
        assert_eq!(slots.free_segments.load(Acquire), 16);
    });
}

#[test]
fn a_batch_is_freed_while_its_cluster_is_discarded() {
    explore(|| {
        let slots = slots();
        let batch: Vec<_> = (0..4).map(|_| slots.take_slot(0).unwrap()).collect();
        let segment = slots.take_segment(0).unwrap();
        (0..2).for_each(|_| slots.drain_idle());
        let discard = |slots: &Slots| {
            slots.discard_empty(|offset, bytes| {
                // Other threads may take slots now, but not these.
                let range = Slot::at(offset)..Slot::at(offset + bytes);
                let segment = slots.take_segment(0).unwrap();
                assert!(!range.contains(&Slot::at(segment.start())), "discarded while in use");
                slots.give_segment(segment, Use::Open);
            });
            vec![]
        };
        run(
            &slots,
            vec![
                Box::new(move |slots| {
                    batch.into_iter().for_each(|slot| slots.give_slot(slot));
                    vec![]
                }),
                Box::new(move |slots| {
                    slots.give_segment(segment, Use::Open);
                    vec![slots.take_slot(0).unwrap()]
                }),
                Box::new(discard),
            ],
        );
    });
}

#[test]
fn the_last_segments_go_to_one_thread_each() {
    explore(|| {
        let slots = slots();
        let mut segments: Vec<_> = (0..12).map(|_| slots.take_segment(0).unwrap()).collect();
        let last = segments.pop().unwrap();
        // Four segments are free: two for the threads, one for slots, and a reserved one.
        let take = |slots: &Slots| {
            let segment = slots.take_segment(1).unwrap();
            (0..BATCH as u32).map(|slot| Slot(segment.0 * BATCH as u32 + slot)).collect()
        };
        let others = segments.len() * BATCH;
        let running: Vec<_> = [take, take, |slots: &Slots| vec![slots.take_slot(1).unwrap()]]
            .into_iter()
            .map(|body| {
                let slots = slots.clone();
                thread::spawn(move || body(&slots))
            })
            .collect();
        slots.give_segment(last, Use::Open);
        let mut taken: Vec<Slot> = running.into_iter().flat_map(|t| t.join().unwrap()).collect();
        taken.sort_unstable();
        assert!(taken.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(slots.check(), others + taken.len());
    });
}
