//! The skiplist with leaves of four slots, one thread.

use crate::leaf::SLOTS;
use crate::testing::{Harness, Op, decode_ops, items};
use crate::{Hole, Insert, Item, Preload, RangeIndex, SkipList};

fn item(key: u64, size: u64) -> Item {
    Item { key, size, value: !key }
}

fn list(items: impl IntoIterator<Item = Item>) -> (SkipList, Preload) {
    let (list, mut preload) = (SkipList::new(), Preload::with_seed(7));
    for item in items {
        assert_eq!(list.insert(item, &mut preload), Insert::Inserted);
    }
    (list, preload)
}

fn hole(hint: u64, size: u64, align: u64, end: u64) -> Hole {
    Hole { hint, size, align, within: 0..end, value: 5 }
}

#[test]
fn an_empty_list_answers() {
    let (list, _) = list([]);
    assert_eq!((list.first(), list.last()), (None, None));
    for point in [0, 1, u64::MAX - 1, u64::MAX] {
        assert_eq!((list.get(point), list.lookup(point), list.remove(point)), (None, None, None));
        assert_eq!(list.lookup_locked(point, |item| item), None);
        assert_eq!(list.leaf(point, &mut Vec::new()), None);
    }
    assert_eq!(list.check().free, u64::MAX);
}

#[test]
fn ranges_contain_their_points_and_no_others() {
    let (list, mut preload) = list([item(10, 5), item(u64::MAX - 3, 3)]);
    assert_eq!(list.lookup(9), None);
    assert_eq!(list.lookup(10), Some(item(10, 5)));
    assert_eq!(list.lookup(14), Some(item(10, 5)));
    assert_eq!(list.lookup(15), None);
    assert_eq!(list.get(11), None);
    assert_eq!(list.lookup(u64::MAX - 1).map(|item| item.size), Some(3));
    for (key, size) in [(8, 3), (10, 1), (12, 1), (14, 9), (1, 100), (10, 5)] {
        let refused = Insert::Overlaps(item(10, 5));
        assert_eq!(list.insert(item(key, size), &mut preload), refused);
    }
    assert_eq!(list.insert(item(15, 1), &mut preload), Insert::Inserted);
    assert_eq!(list.insert(item(9, 1), &mut preload), Insert::Inserted);
    assert_eq!(list.check().taken, 10);
}

#[test]
#[should_panic(expected = "beyond the space")]
fn a_range_beyond_the_space_is_a_bug() {
    let _ = SkipList::new().insert(item(u64::MAX - 1, 2), &mut Preload::default());
}

#[test]
#[should_panic(expected = "an empty range")]
fn an_empty_range_is_a_bug() {
    let _ = SkipList::new().insert(item(3, 0), &mut Preload::default());
}

#[test]
fn leaves_filled_in_order_are_full() {
    let (list, _) = list((0..100).map(|n| item(n, 1)));
    assert_eq!(list.check().leaves, 100 / SLOTS);
    assert_eq!(list.first(), Some(item(0, 1)));
    assert_eq!(list.last(), Some(item(99, 1)));
    let mut leaf = Vec::new();
    assert_eq!(list.leaf(0, &mut leaf), Some(SLOTS as u64));
    assert_eq!(leaf.len(), SLOTS);
    assert_eq!(items(&list, 50).len(), 50);
}

#[test]
fn removal_drops_leaves_and_gives_their_span_away() {
    let (list, mut preload) = list((0..100).map(|n| item(2 * n, 1)));
    (0..100).filter(|n| n % 10 != 0).for_each(|n| {
        assert_eq!(list.remove(2 * n), Some(item(2 * n, 1)));
        assert_eq!(list.remove(2 * n), None);
        list.check();
    });
    assert_eq!(list.check().items, 10);
    assert!(list.check().leaves <= 11);
    // From the last item of one leaf to the first of the next, over the boundary between them.
    for n in 0..9 {
        let wide = item(20 * n + 1, 19);
        assert_eq!(list.insert(wide, &mut preload), Insert::Inserted);
        assert_eq!(list.lookup(20 * n + 19), Some(wide));
        list.check();
    }
}

#[test]
fn an_item_in_the_next_leaf_is_in_the_way() {
    let (list, mut preload) = list((0..8).map(|n| item(10 * n, 1)));
    for n in 0..7 {
        let wide = item(10 * n + 5, 6);
        let other = Insert::Overlaps(item(10 * n + 10, 1));
        assert_eq!(list.insert(wide, &mut preload), other);
    }
    assert_eq!(list.check().items, 8);
}

#[test]
fn holes_are_found_from_the_hint_and_then_from_the_start() {
    let (list, mut preload) = list([item(0, 10), item(20, 10), item(35, 5)]);
    let mut take = |hole: Hole| list.insert_hole(&hole, &mut preload);
    assert_eq!(take(hole(0, 5, 1, 100)), Some(10));
    assert_eq!(take(hole(21, 5, 1, 100)), Some(30));
    assert_eq!(take(hole(50, 5, 16, 100)), Some(64));
    assert_eq!(take(hole(90, 11, 1, 100)), Some(40));
    assert_eq!(take(hole(69, 40, 1, 100)), None);
    assert_eq!(take(hole(200, 5, 1, 100)), Some(15));
    assert_eq!(take(hole(0, 14, 8, 69)), None);
    assert_eq!(take(Hole { within: 70..80, ..hole(0, 10, 1, 0) }), Some(70));
    assert_eq!(take(Hole { within: 75..75, ..hole(0, 1, 1, 0) }), None);
    assert_eq!(take(hole(0, u64::MAX, 1, u64::MAX)), None);
    let everything = hole(u64::MAX, 1 << 63, 1 << 62, u64::MAX);
    assert_eq!(take(everything), Some(1 << 62));
    list.check();
}

#[test]
fn a_hole_may_lie_over_the_end_of_a_leaf() {
    let (list, mut preload) = list((0..12).map(|n| item(10 * n, 10)));
    // The last of one leaf and the first of the next: neither span has space for twenty.
    assert!(list.remove(30).is_some() && list.remove(40).is_some());
    assert_eq!(list.insert_hole(&hole(0, 20, 1, 120), &mut preload), Some(30));
    assert_eq!(list.check().taken, 120);
    assert_eq!(list.insert_hole(&hole(0, 1, 1, 120), &mut preload), None);
}

#[test]
fn a_full_space_has_no_hole_and_an_emptied_one_has() {
    let (list, mut preload) = list([]);
    for n in 0..50 {
        assert_eq!(
            list.insert_hole(&hole(n * 37 % 200, 4, 4, 200), &mut preload).map(|k| k % 4),
            Some(0)
        );
    }
    assert_eq!(list.insert_hole(&hole(7, 1, 1, 200), &mut preload), None);
    assert_eq!(list.check().taken, 200);
    (0..50).for_each(|n| assert!(list.remove(4 * n).is_some()));
    assert_eq!(list.check().leaves, 1);
    assert_eq!(list.insert_hole(&hole(7, 200, 1, 200), &mut preload), Some(0));
}

#[test]
fn bytes_follow_the_leaves() {
    let (list, _) = list([]);
    let empty = list.bytes();
    let (list, _) = self::list((0..100).map(|n| item(n, 1)));
    assert!(list.bytes() > 20 * empty);
    (0..100).for_each(|n| _ = list.remove(n));
    assert_eq!(list.bytes(), empty);
}

/// Many operations with leaves of four: tests/model.rs has the same with leaves of full size.
#[test]
fn the_list_is_a_map() {
    let mut random = 88_172_645_463_325_252_u64;
    let rounds = match () {
        () if cfg!(miri) => 1,
        () if std::env::var_os("UZSWAP_FULL").is_some() => 3000,
        () => 60,
    };
    let ops = if cfg!(miri) { 120 } else { 1000 };
    for round in 0..rounds {
        let bytes: Vec<u8> = (0..ops * 8)
            .map(|_| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random >> 32) as u8
            })
            .collect();
        let mut harness = Harness::new(SkipList::new(), Preload::with_seed(round));
        for op in decode_ops(&bytes, 400, ops / 2) {
            harness.apply(op);
            harness.check();
        }
        (0..400).for_each(|point| harness.apply(Op::Remove(point)));
        harness.check();
        assert_eq!(harness.index.check().leaves, 1);
    }
}

/// A few threads on a few leaves; tests/stress.rs has many threads on many leaves. This one is for
/// Miri, which also shows threads old values where the memory order allows them.
#[test]
fn a_few_threads_on_a_few_leaves_lose_nothing() {
    const THREADS: u64 = 3;
    let list = SkipList::new();
    let rounds = if cfg!(miri) { 20 } else { 5000 };
    let work = |thread: u64| {
        let (list, mut preload) = (&list, Preload::with_seed(thread));
        for n in 0..rounds {
            let own = item(1000 + (n * 7 % 50) * THREADS + thread, 1);
            assert_eq!(list.insert(own, &mut preload), Insert::Inserted);
            let key = list.insert_hole(&hole(n % 90, 5, 1, 100), &mut preload);
            assert_eq!(list.lookup(own.key), Some(own));
            assert!(list.last().is_some_and(|item| item.key >= own.key));
            if n % 3 > 0 {
                assert_eq!(list.remove(own.key), Some(own));
            }
            if let Some(key) = key {
                assert_eq!(list.lookup(key + 4).map(|item| item.key), Some(key));
                assert_eq!(list.remove(key).map(|item| item.size), Some(5));
            }
            if n % 3 == 0 {
                assert!(items(list, 0).contains(&own));
                assert_eq!(list.remove(own.key), Some(own));
            }
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| _ = scope.spawn(move || work(thread)))
    });
    assert_eq!(list.check().items, 0);
    assert_eq!(list.check().leaves, 1);
}
