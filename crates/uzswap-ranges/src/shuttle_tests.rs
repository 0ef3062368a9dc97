//! Threads on neighbouring leaves, under a scheduler that tries many orders.
//!
//! Leaves have four slots here. Each test fills a few leaves and runs threads where the leaves
//! meet. Then it compares the list with the threads' records, and recounts it. A use of a freed
//! leaf is a panic (see `link`).

use crate::leaf::SLOTS;
use crate::testing::items;
use crate::{Hole, Insert, Item, Preload, RangeIndex, SkipList};
use shuttle::rand::Rng;
use shuttle::thread;
use std::sync::Arc;

/// Schedules tried for each test.
fn schedules() -> usize {
    if std::env::var_os("UZSWAP_FULL").is_some() { 20_000 } else { 500 }
}

/// Half of the schedules switch threads at every step. The other half delays a thread at a few
/// points, so that another thread makes a series of changes between two of its steps.
fn explore(test: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(test, schedules() / 2);
    shuttle::check_pct(test, schedules() / 2, 3);
}

fn item(key: u64, size: u64) -> Item {
    Item { key, size, value: key }
}

/// The changes of one thread to the list.
#[derive(Default)]
struct Done {
    inserted: Vec<Item>,
    removed: Vec<Item>,
    preload: Preload,
}

impl Done {
    /// The scheduler draws heights, so that a failure can be repeated.
    fn new() -> Self {
        Self { preload: Preload::with_seed(shuttle::rand::thread_rng().r#gen()), ..Self::default() }
    }

    fn insert(&mut self, list: &SkipList, item: Item) -> bool {
        let inserted = list.insert(item, &mut self.preload) == Insert::Inserted;
        self.inserted.extend(inserted.then_some(item));
        inserted
    }

    fn hole(&mut self, list: &SkipList, hint: u64, size: u64, end: u64) -> Option<u64> {
        let hole = Hole { hint, size, align: 1, within: 0..end, value: hint };
        let key = list.insert_hole(&hole, &mut self.preload)?;
        self.inserted.push(hole.item(key));
        Some(key)
    }

    fn remove(&mut self, list: &SkipList, key: u64) -> bool {
        let removed = list.remove(key);
        self.removed.extend(removed);
        removed.is_some()
    }
}

type Body = Box<dyn FnOnce(&SkipList, &mut Done) + Send>;

/// Runs the bodies as threads on one list, and compares the list with their records.
fn race(before: impl IntoIterator<Item = Item>, bodies: Vec<Body>) -> Arc<SkipList> {
    let list = Arc::new(SkipList::new());
    let mut first = Done::new();
    before.into_iter().for_each(|item| assert!(first.insert(&list, item)));
    let running: Vec<_> = bodies
        .into_iter()
        .map(|body| {
            let list = list.clone();
            thread::spawn(move || {
                let mut done = Done::new();
                body(&list, &mut done);
                done
            })
        })
        .collect();
    let mut all = first.inserted;
    let mut gone = Vec::new();
    for thread in running {
        let done = thread.join().expect("a thread failed");
        all.extend(done.inserted);
        gone.extend(done.removed);
    }
    for item in gone {
        let at = all.iter().position(|other| *other == item).expect("removed, but never inserted");
        all.swap_remove(at);
    }
    all.sort_by_key(|item| item.key);
    list.check();
    assert_eq!(items(&*list, 0), all);
    list
}

/// `leaves` full leaves of items of size 1, ten apart.
fn leaves(leaves: u64) -> impl Iterator<Item = Item> {
    (0..leaves * SLOTS as u64).map(|n| item(n * 10, 1))
}

#[test]
fn one_key_has_one_owner() {
    explore(|| {
        race(
            leaves(1),
            (0..3)
                .map(|_| -> Body {
                    Box::new(|list, done| {
                        if done.insert(list, item(15, 3)) {
                            assert_eq!(list.get(15), Some(item(15, 3)));
                            assert!(done.remove(list, 15));
                        }
                        assert!(!done.insert(list, item(8, 3)));
                    })
                })
                .collect(),
        );
    });
}

#[test]
fn leaves_split_and_empty_beside_each_other() {
    explore(|| {
        race(
            leaves(3),
            vec![
                // Empties the second leaf, and works in the first and third on its sides.
                Box::new(|list, done| (4..8).for_each(|n| assert!(done.remove(list, n * 10)))),
                Box::new(|list, done| {
                    assert!(done.insert(list, item(35, 1)));
                    assert!(done.insert(list, item(36, 1)));
                }),
                Box::new(|list, done| {
                    (8..12).for_each(|n| assert!(done.remove(list, n * 10)));
                    assert!(done.insert(list, item(95, 1)));
                }),
            ],
        );
    });
}

#[test]
fn neighbouring_leaves_die_at_the_same_time() {
    explore(|| {
        let list = race(
            leaves(4),
            (1..4)
                .map(|leaf| -> Body {
                    Box::new(move |list, done| {
                        (0..4).for_each(|n| assert!(done.remove(list, (leaf * 4 + n) * 10)));
                    })
                })
                .collect(),
        );
        assert_eq!(list.check().leaves, 1);
    });
}

#[test]
fn a_leaf_dies_while_it_is_being_linked() {
    explore(|| {
        race(
            leaves(2),
            vec![
                // Splits the first leaf: 20 and 30 move to a new one. The second thread empties it.
                Box::new(|list, done| assert!(done.insert(list, item(5, 1)))),
                Box::new(|list, done| {
                    assert!(done.remove(list, 20));
                    assert!(done.remove(list, 30));
                    assert!(done.insert(list, item(25, 1)));
                }),
                Box::new(|list, done| (4..8).for_each(|n| assert!(done.remove(list, n * 10)))),
            ],
        );
    });
}

#[test]
fn a_boundary_moves_under_a_wide_range() {
    explore(|| {
        race(
            leaves(3),
            vec![
                // From behind 30, the last item of the first leaf, over the boundary at 40.
                Box::new(|list, done| {
                    done.remove(list, 40);
                    done.insert(list, item(32, 15));
                    assert_eq!(list.lookup(50), Some(item(50, 1)));
                }),
                Box::new(|list, done| {
                    done.insert(list, item(45, 1));
                    done.remove(list, 45);
                    done.insert(list, item(38, 4));
                }),
                Box::new(|list, done| {
                    (5..8).for_each(|n| _ = list.lookup(n * 10));
                    (6..8).for_each(|n| assert!(done.remove(list, n * 10)));
                    done.insert(list, item(47, 1));
                }),
            ],
        );
    });
}

/// While the second leaf is removed, the boundary of its left neighbour passes its place.
#[test]
fn a_boundary_passes_a_leaf_that_is_going() {
    explore(|| {
        race(
            leaves(3),
            vec![
                Box::new(|list, done| (8..12).for_each(|n| assert!(done.remove(list, n * 10)))),
                Box::new(|list, done| {
                    (4..8).rev().for_each(|n| {
                        assert!(done.insert(list, item(n + 100, 1)));
                        assert!(done.remove(list, n * 10));
                    });
                    done.insert(list, item(32, 65));
                    done.remove(list, 32);
                    assert!(list.lookup(105).is_some());
                }),
            ],
        );
    });
}

/// While the second leaf is linked on its levels, its start moves to the right, and a new leaf
/// takes its old place.
#[test]
fn a_leaf_is_linked_behind_those_before_it() {
    explore(|| {
        race(
            (0..4).map(|n| item(n * 10, 1)),
            vec![
                // Makes a leaf that begins at 20.
                Box::new(|list, done| assert!(done.insert(list, item(5, 1)))),
                Box::new(|list, done| {
                    assert!(done.insert(list, item(40, 1)));
                    assert!(done.remove(list, 20));
                    assert!(done.insert(list, item(12, 17)));
                    assert!(done.remove(list, 12));
                    (21..25).for_each(|key| assert!(done.insert(list, item(key, 1))));
                    assert!(done.remove(list, 22));
                }),
            ],
        );
    });
}

#[test]
fn holes_are_taken_once() {
    explore(|| {
        let list = race(
            (0..12).filter(|n| ![3, 4, 8].contains(n)).map(|n| item(n * 10, 10)),
            vec![
                Box::new(|list, done| assert!(done.hole(list, 0, 10, 120).is_some())),
                Box::new(|list, done| assert!(done.hole(list, 40, 10, 120).is_some())),
                Box::new(|list, done| {
                    if let Some(key) = done.hole(list, 0, 10, 120) {
                        assert!(done.remove(list, key));
                    }
                }),
                Box::new(|list, done| assert!(done.remove(list, 100) && done.remove(list, 110))),
            ],
        );
        let mut done = Done::new();
        while done.hole(&list, 50, 1, 120).is_some() {}
        assert_eq!(list.check().taken, 120);
    });
}

#[test]
fn a_hole_over_a_boundary_appears_while_others_look() {
    explore(|| {
        let list = race(
            (0..12).map(|n| item(n * 10, 10)),
            vec![
                Box::new(|list, done| {
                    (3..9).for_each(|n| assert!(done.remove(list, n * 10)));
                    // Everything that was freed, except the other thread's range.
                    assert!(done.hole(list, 0, 20, 120).is_some());
                }),
                Box::new(|list, done| _ = done.hole(list, 20, 25, 120)),
            ],
        );
        let mut done = Done::new();
        while done.hole(&list, 0, 1, 120).is_some() {}
        assert_eq!(list.check().taken, 120);
    });
}

#[test]
fn an_item_that_stays_is_found_whatever_happens_around_it() {
    explore(|| {
        let stays = [item(0, 1), item(70, 1), item(110, 1)];
        let look = move |list: &SkipList, _: &mut Done| {
            for item in stays {
                assert_eq!(list.lookup(item.key), Some(item));
                assert_eq!(list.lookup_locked(item.key, |item| item), Some(item));
            }
            assert_eq!(list.first(), Some(stays[0]));
            assert_eq!(list.last(), Some(stays[2]));
            let all = items(list, 0);
            assert!(stays.iter().all(|item| all.contains(item)), "{all:?}");
            assert!(all.is_sorted_by_key(|item| item.key));
        };
        race(
            leaves(3),
            vec![
                Box::new(look),
                Box::new(move |list, done| {
                    let goes = (1..11).filter(|n| *n != 7);
                    goes.for_each(|n| assert!(done.remove(list, n * 10)));
                }),
                Box::new(|list, done| {
                    done.insert(list, item(71, 1));
                    done.insert(list, item(5, 3));
                    done.insert(list, item(65, 1));
                    done.insert(list, item(72, 1));
                }),
            ],
        );
    });
}
