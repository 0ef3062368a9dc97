//! Threads of the cache, under a scheduler that tries many orders.
//!
//! Each test makes a small cache, starts a few threads on a handful of keys, and recounts
//! everything at the end. Trunks have eight entries here, so that a cache is made quickly.

use crate::ids::SwapEntry;
use crate::index::{Index, State, TRUNK_ENTRIES, Word};
use crate::testing::{Content, Faults, Setup, page_of};
use crate::{Area, Cache, Load, PAGE_BYTES, Page, Store};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Schedules of each kind that are tried for each test.
fn schedules() -> usize {
    if std::env::var_os("UZSWAP_FULL").is_some() { 10_000 } else { 300 }
}

/// Half of the schedules switch at random. In the others there are only a few switches, which finds
/// faults that need one thread to get far while another waits.
pub(crate) fn explore(test: impl Fn() + Send + Sync + 'static) {
    let mut config = shuttle::Config::new();
    config.stack_size = 1 << 20; // Pages live on the stack.
    let test = Arc::new(test);
    let again = test.clone();
    let random = RandomScheduler::new(schedules());
    shuttle::Runner::new(random, config.clone()).run(move || test());
    let few_switches = PctScheduler::new(3, schedules());
    shuttle::Runner::new(few_switches, config).run(move || again());
}

fn cache(backing_bytes: usize) -> (Arc<Cache>, Area, Arc<Faults>) {
    let ram_bytes = 16 << 20;
    let setup =
        Setup { pages: 16, ram_bytes, pool_bytes: ram_bytes, backing_bytes, ..Setup::default() };
    let (cache, area, faults) = setup.make();
    (Arc::new(cache), area, faults)
}

fn page(seed: u64) -> Page {
    page_of(Content::Pointers, seed)
}

fn store(cache: &Cache, area: Area, offset: u32, seed: u64) {
    let stored = cache.store(area.entry(offset).unwrap(), &page(seed));
    assert_eq!(stored, Store::Stored);
}

/// Loads a page and finds which of `seeds` it is; `None` when it is absent.
fn load(cache: &Cache, area: Area, offset: u32, seeds: &[u64]) -> Option<u64> {
    let mut got = [0; PAGE_BYTES];
    match cache.load(area.entry(offset).unwrap(), &mut got).unwrap() {
        Load::Absent => None,
        Load::Hit => {
            let seed = seeds.iter().copied().find(|seed| page(*seed) == got);
            Some(seed.expect("a page that was never stored"))
        }
    }
}

/// Runs the closures as threads on one cache, and recounts when all have ended.
fn race(
    backing_bytes: usize,
    before: impl FnOnce(&Cache, Area),
    threads: Vec<Box<dyn FnOnce(&Cache, Area) + Send>>,
) -> (Arc<Cache>, Area) {
    let (cache, area, _) = cache(backing_bytes);
    before(&cache, area);
    let running: Vec<_> = threads
        .into_iter()
        .map(|body| {
            let cache = cache.clone();
            thread::spawn(move || body(&cache, area))
        })
        .collect();
    running.into_iter().for_each(|thread| thread.join().unwrap());
    cache.check();
    (cache, area)
}

#[test]
fn cpus_come_and_go_beside_stores_and_loads() {
    explore(|| {
        let cpu = uzswap_sys::cpu::possible() - 1;
        let (cache, area) = race(
            2 << 20,
            move |cache, area| {
                cache.set_cpu(cpu, "online").unwrap();
                store(cache, area, 0, 1);
            },
            vec![
                Box::new(move |c, _| {
                    // A single CPU stays.
                    let _ = c.set_cpu(cpu, "offline");
                    c.set_cpu(cpu, "online").unwrap();
                }),
                Box::new(|c, a| {
                    let stored = c.store_through(a.entry(1).unwrap(), &page(2));
                    assert_eq!(stored, Store::Stored);
                    assert_eq!(load(c, a, 1, &[2]), Some(2));
                    c.invalidate(a.entry(1).unwrap());
                }),
                Box::new(|c, a| {
                    assert_eq!(load(c, a, 0, &[1]), Some(1));
                    store(c, a, 0, 3);
                }),
            ],
        );
        assert_eq!(load(&cache, area, 0, &[3]), Some(3));
    });
}

#[test]
fn the_newest_store_wins_and_readers_see_whole_pages() {
    explore(|| {
        let (cache, area) = race(
            0,
            |cache, area| store(cache, area, 0, 1),
            vec![
                Box::new(|c, a| {
                    store(c, a, 0, 2);
                    assert_ne!(load(c, a, 0, &[1, 2, 3]), Some(1));
                }),
                Box::new(|c, a| store(c, a, 0, 3)),
                Box::new(|c, a| assert!(load(c, a, 0, &[1, 2, 3]).is_some())),
            ],
        );
        assert!(matches!(load(&cache, area, 0, &[2, 3]), Some(2 | 3)));
    });
}

#[test]
fn invalidates_race_with_loads_and_stores() {
    explore(|| {
        race(
            0,
            |cache, area| store(cache, area, 0, 1),
            vec![
                Box::new(|c, a| c.invalidate(a.entry(0).unwrap())),
                Box::new(|c, a| _ = load(c, a, 0, &[1, 2])),
                Box::new(|c, a| store(c, a, 0, 2)),
                Box::new(|c, a| {
                    let mut got = [0; PAGE_BYTES];
                    let _ = c.load_exclusive(a.entry(0).unwrap(), &mut got).unwrap();
                }),
            ],
        );
    });
}

#[test]
fn identical_pages_are_shared_and_left_in_any_order() {
    explore(|| {
        let (cache, area) = race(
            0,
            |cache, area| {
                // Two entries with one page. The first such pair makes a few spare records.
                store(cache, area, 0, 1);
                store(cache, area, 1, 1);
                cache.maintain().unwrap();
                cache.invalidate(area.entry(1).unwrap());
                store(cache, area, 1, 1);
                assert_eq!(cache.statistic("shared_pages"), Some(2));
            },
            vec![
                Box::new(|c, a| store(c, a, 2, 1)),
                Box::new(|c, a| {
                    store(c, a, 3, 1);
                    c.invalidate(a.entry(3).unwrap());
                }),
                Box::new(|c, a| c.invalidate(a.entry(0).unwrap())),
                Box::new(|c, a| {
                    assert_eq!(load(c, a, 1, &[1]), Some(1));
                    store(c, a, 1, 2);
                }),
            ],
        );
        assert_eq!(load(&cache, area, 2, &[1]), Some(1));
        assert_eq!(load(&cache, area, 1, &[2]), Some(2));
    });
}

#[test]
fn the_last_to_leave_races_with_one_that_joins() {
    explore(|| {
        let (cache, area) = race(
            0,
            |cache, area| {
                store(cache, area, 0, 1);
                store(cache, area, 1, 1);
                cache.maintain().unwrap();
                cache.invalidate(area.entry(1).unwrap());
                store(cache, area, 1, 1);
                assert_eq!(cache.statistic("shared_pages"), Some(2));
                cache.invalidate(area.entry(0).unwrap());
            },
            vec![
                Box::new(|c, a| store(c, a, 2, 1)),
                Box::new(|c, a| c.invalidate(a.entry(1).unwrap())),
            ],
        );
        assert_eq!(load(&cache, area, 2, &[1]), Some(1));
        assert_eq!(load(&cache, area, 1, &[]), None);
    });
}

#[test]
fn a_page_is_found_to_be_identical_while_it_goes() {
    explore(|| {
        let (cache, area) = race(
            2 << 20,
            |cache, area| {
                store(cache, area, 0, 1);
                store(cache, area, 1, 1);
                cache.maintain().unwrap();
                (0..2).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
                store(cache, area, 2, 7);
                store(cache, area, 4, 9);
            },
            vec![
                Box::new(|c, a| store(c, a, 3, 7)),
                Box::new(|c, a| {
                    store(c, a, 2, 8);
                    assert_eq!(load(c, a, 2, &[7, 8]), Some(8));
                }),
                Box::new(|c, a| store(c, a, 5, 9)),
                Box::new(|c, _| _ = c.shrink(usize::MAX)),
            ],
        );
        for (offset, seed) in [(2, 8), (3, 7), (4, 9), (5, 9)] {
            assert_eq!(load(&cache, area, offset, &[seed]), Some(seed));
        }
    });
}

#[test]
fn moving_objects_races_with_everything() {
    explore(|| {
        let (cache, area) = race(
            0,
            |cache, area| {
                (0..8).for_each(|offset| store(cache, area, offset, u64::from(offset)));
                cache.maintain().unwrap();
                // New objects go to this section too, because a section that is emptied gets none.
                cache.pool.bring_online(1).unwrap();
            },
            vec![
                Box::new(|c, _| _ = c.empty_section(0)),
                Box::new(|c, a| (0..3).for_each(|o| _ = load(c, a, o, &[o.into(), 11]))),
                Box::new(|c, a| {
                    store(c, a, 1, 11);
                    assert_eq!(load(c, a, 1, &[1, 11]), Some(11));
                }),
                Box::new(|c, a| c.invalidate(a.entry(2).unwrap())),
            ],
        );
        assert_eq!(load(&cache, area, 1, &[1, 11]), Some(11));
        for offset in [0, 3, 4, 5, 6, 7] {
            assert_eq!(load(&cache, area, offset, &[u64::from(offset)]), Some(offset.into()));
        }
    });
}

#[test]
fn writeback_races_with_newer_stores_loads_and_invalidates() {
    explore(|| {
        let (cache, area) = race(
            2 << 20,
            |cache, area| (0..4).for_each(|offset| store(cache, area, offset, offset.into())),
            vec![
                Box::new(|c, _| _ = c.shrink(usize::MAX)),
                Box::new(|c, a| store(c, a, 0, 10)),
                Box::new(|c, a| c.invalidate(a.entry(1).unwrap())),
                Box::new(|c, a| {
                    assert_eq!(load(c, a, 2, &[2]), Some(2));
                    assert_eq!(load(c, a, 3, &[3]), Some(3));
                }),
            ],
        );
        assert_eq!(load(&cache, area, 0, &[10]), Some(10));
        assert_eq!(load(&cache, area, 1, &[]), None);
        assert_eq!(load(&cache, area, 3, &[3]), Some(3));
    });
}

#[test]
fn an_exclusive_load_drops_the_page_whatever_moves_it() {
    explore(|| {
        let (cache, area) = race(
            2 << 20,
            |cache, area| {
                (0..4).for_each(|offset| store(cache, area, offset, offset.into()));
                cache.maintain().unwrap();
            },
            vec![
                Box::new(|c, a| {
                    let mut got = [0; PAGE_BYTES];
                    assert_eq!(c.load_exclusive(a.entry(0).unwrap(), &mut got).unwrap(), Load::Hit);
                    assert!(got == page(0));
                    assert_eq!(load(c, a, 0, &[]), None);
                }),
                Box::new(|c, _| _ = c.empty_section(0)),
                Box::new(|c, _| _ = c.shrink(usize::MAX)),
            ],
        );
        assert_eq!(load(&cache, area, 0, &[]), None);
        assert_eq!(load(&cache, area, 1, &[1]), Some(1));
    });
}

#[test]
fn a_failed_writeback_loses_nothing() {
    explore(|| {
        let (cache, area, faults) = cache(2 << 20);
        (0..4).for_each(|offset| store(&cache, area, offset, offset.into()));
        faults.fail_writes.store(true, Relaxed);
        let shrinking = {
            let cache = cache.clone();
            thread::spawn(move || _ = cache.shrink(usize::MAX))
        };
        store(&cache, area, 0, 10);
        cache.invalidate(area.entry(1).unwrap());
        shrinking.join().unwrap();
        cache.check();
        assert_eq!(load(&cache, area, 0, &[10]), Some(10));
        assert_eq!(load(&cache, area, 2, &[2]), Some(2));
        faults.fail_writes.store(false, Relaxed);
        cache.resume_writeback();
        cache.shrink(usize::MAX);
        cache.check();
        assert_eq!(load(&cache, area, 2, &[2]), Some(2));
        assert!(cache.is_on_backing(area.entry(2).unwrap()));
    });
}

#[test]
fn a_page_whose_write_through_failed_is_not_held_though_writeback_is_resumed_at_once() {
    explore(|| {
        let (cache, area, faults) = cache(2 << 20);
        faults.fail_writes.store(true, Relaxed);
        let resuming = {
            let cache = cache.clone();
            thread::spawn(move || cache.resume_writeback())
        };
        let stored = cache.store_through(area.entry(0).unwrap(), &page(1));
        assert!(matches!(stored, Store::Rejected(_)), "nothing was written");
        resuming.join().unwrap();
        let says_why = cache.writeback_failure().is_some();
        assert_eq!(says_why, !cache.writeback_works(), "stopped without a reason, or the reverse");
        assert_eq!(load(&cache, area, 0, &[]), None);
        cache.check();
    });
}

#[test]
fn stores_write_back_side_by_side() {
    explore(|| {
        let (cache, area) = race(
            4 << 20,
            |cache, area| (0..6).for_each(|offset| store(cache, area, offset, offset.into())),
            vec![
                Box::new(|c, a| {
                    c.write_back_one();
                    c.invalidate(a.entry(2).unwrap());
                }),
                Box::new(|c, a| {
                    store(c, a, 0, 10);
                    c.write_back_one();
                }),
                Box::new(|c, a| {
                    assert_eq!(c.store_through(a.entry(7).unwrap(), &page(7)), Store::Stored);
                    assert!(load(c, a, 1, &[1]).is_some());
                    c.invalidate(a.entry(1).unwrap());
                }),
                Box::new(|c, _| c.maintain().unwrap()),
            ],
        );
        for (offset, seed) in [(0, 10), (3, 3), (4, 4), (5, 5), (7, 7)] {
            assert_eq!(load(&cache, area, offset, &[seed]), Some(seed));
        }
        assert_eq!(load(&cache, area, 1, &[]), None);
    });
}

#[test]
fn an_empty_trunk_is_freed_while_pages_come_and_go() {
    explore(|| {
        let (cache, area) = race(
            0,
            |cache, area| store(cache, area, 0, 1),
            vec![
                Box::new(|c, a| {
                    c.invalidate(a.entry(0).unwrap());
                    store(c, a, 1, 2);
                    assert_eq!(load(c, a, 1, &[2]), Some(2));
                }),
                Box::new(|c, _| {
                    c.maintain().unwrap();
                    c.maintain().unwrap();
                }),
                Box::new(|c, a| {
                    let _ = load(c, a, 0, &[1]);
                    let _ = load(c, a, 1, &[2]);
                    c.invalidate(a.entry(0).unwrap());
                }),
            ],
        );
        assert_eq!(load(&cache, area, 0, &[]), None);
        assert_eq!(load(&cache, area, 1, &[2]), Some(2));
    });
}

#[test]
fn a_lookup_races_with_the_removal_of_its_trunk() {
    explore(|| {
        let index = Arc::new(Index::new(3 * TRUNK_ENTRIES as u32, None));
        index.add_records(TRUNK_ENTRIES as u32).unwrap();
        index.add_area(2 * TRUNK_ENTRIES as u32).unwrap();
        index.provision().unwrap();
        let key = SwapEntry(TRUNK_ENTRIES as u32 + 3);
        index.view().ensure(key).unwrap();
        let held = Word::new(State::Shared(SwapEntry(1)));
        let spawn = |body: fn(&Index, SwapEntry, Word)| {
            let index = index.clone();
            thread::spawn(move || body(&index, key, held))
        };
        let threads = [
            spawn(|index, key, held| {
                let _absent = index.view().lock_made(key).unwrap().stored(held.state());
                assert_eq!(index.view().peek(key), held, "it is held, so it stays");
                let view = index.view();
                let stale = view.get(key).unwrap();
                let _held = view.lock(key).unwrap().dropped();
                // The object can be read, whether it was freed or not.
                assert_eq!(stale.peek().state(), State::Absent);
                drop(view);
                let _absent = index.view().lock_made(key).unwrap().stored(held.state());
            }),
            spawn(|index, _, _| (0..2).for_each(|_| _ = index.reclaim())),
            spawn(|index, key, held| {
                let view = index.view();
                let word = view.peek(key);
                assert!(word == held || word.state() == State::Absent);
                if let Some(locked) = view.lock(key) {
                    assert!(locked.word() == held || locked.word() == Word::ABSENT);
                }
            }),
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(index.view().peek(key), held);
    });
}

/// As many pages as recompression tries at a time; the first eight fit in a unit.
fn sixteen(cache: &Cache, area: Area) {
    (0..16).for_each(|offset| store(cache, area, offset, u64::from(offset)));
}

fn recompress_races(backing_bytes: usize, before: fn(&Cache, Area)) {
    explore(move || {
        let (cache, area) = race(
            backing_bytes,
            before,
            vec![
                Box::new(|c, _| _ = c.recompress(2)),
                Box::new(|c, a| {
                    store(c, a, 0, 100);
                    assert_eq!(load(c, a, 0, &[0, 100]), Some(100));
                    c.invalidate(a.entry(1).unwrap());
                    assert_eq!(load(c, a, 1, &[1]), None);
                }),
                Box::new(move |c, a| {
                    assert_eq!(load(c, a, 2, &[2]), Some(2));
                    if backing_bytes > 0 {
                        c.shrink(usize::MAX);
                    }
                    let mut got = [0; PAGE_BYTES];
                    assert_eq!(c.load_exclusive(a.entry(3).unwrap(), &mut got).unwrap(), Load::Hit);
                    assert_eq!(got, page(3));
                }),
            ],
        );
        assert_eq!(load(&cache, area, 0, &[100]), Some(100));
        assert_eq!(load(&cache, area, 1, &[1]), None);
        assert_eq!(load(&cache, area, 3, &[3]), None);
        for offset in (2..16).filter(|offset| *offset != 3) {
            let seed = u64::from(offset);
            assert_eq!(load(&cache, area, offset, &[seed]), Some(seed));
        }
    });
}

#[test]
fn recompression_races_with_stores_loads_and_invalidates() {
    recompress_races(0, sixteen);
}

#[test]
fn recompression_races_with_writeback() {
    recompress_races(2 << 20, sixteen);
}

/// The only unit loses half of its pages, so it is taken apart while other threads leave it.
#[test]
fn taking_a_unit_apart_races_with_leaving_it() {
    recompress_races(0, |cache, area| {
        sixteen(cache, area);
        assert_eq!(cache.recompress(1), 8);
        (4..8).for_each(|offset| store(cache, area, offset, u64::from(offset)));
    });
}

#[test]
fn leaving_a_unit_frees_it_once() {
    explore(|| {
        let leave = |offsets: std::ops::Range<u32>| {
            let leave = move |cache: &Cache, area: Area| {
                offsets.for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
            };
            Box::new(leave) as Box<dyn FnOnce(&Cache, Area) + Send>
        };
        let (cache, _) = race(
            0,
            |cache, area| {
                sixteen(cache, area);
                assert_eq!(cache.recompress(1), 8);
                (2..6).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
            },
            vec![leave(0..2), leave(6..8), Box::new(|c, a| _ = load(c, a, 0, &[0]))],
        );
        assert_eq!(cache.statistic("recompressed_pages"), Some(0));
        assert_eq!(cache.statistic("stored_pages"), Some(8));
    });
}
