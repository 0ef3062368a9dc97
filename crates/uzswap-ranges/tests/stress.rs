//! Many threads on one index: nothing overlaps, nothing is lost, free and used add up.
//!
//! Run by `./check --full` under the thread sanitizer too.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use uzswap_ranges::testing::items;
use uzswap_ranges::tree::{LockedMap, LockedTree};
use uzswap_ranges::{Hole, Insert, Item, RangeIndex, SkipList};

const THREADS: u64 = 8;

/// Operations of each thread.
fn rounds() -> u64 {
    if std::env::var_os("UZSWAP_FULL").is_some() { 1_000_000 } else { 50_000 }
}

/// Random numbers, of one thread.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % end
    }
}

/// The points of a space, each with the thread that has it. The test fails if two threads get the
/// same point.
struct Owners(Vec<AtomicU64>);

impl Owners {
    fn new(space: u64) -> Self {
        Self((0..space).map(|_| AtomicU64::new(0)).collect())
    }

    fn swap(&self, item: Item, from: u64, to: u64) {
        for point in item.key..item.end() {
            let was = self.0[point as usize].swap(to, Relaxed);
            assert_eq!(was, from, "point {point} of {item:?}");
        }
    }
}

/// The work of one thread: takes ranges, by hint or by key, gives them back, and looks up its own
/// and other threads' ranges.
fn churn<I: RangeIndex>(index: &I, owners: &Owners, thread: u64, space: u64) -> Vec<Item> {
    let me = thread + 1;
    let mut random = Random(me.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut preload = I::Preload::default();
    let mut mine: Vec<Item> = Vec::new();
    for _ in 0..rounds() {
        let (at, size) = (random.below(space - 16), 1 + random.below(16));
        match random.below(8) {
            0..2 => {
                let align = 1 << random.below(4);
                let hole = Hole { hint: at, size, align, within: 0..space, value: me };
                if let Some(key) = index.insert_hole(&hole, &mut preload) {
                    assert!(key % align == 0 && key + size <= space);
                    mine.push(Item { key, size, value: me });
                    owners.swap(mine[mine.len() - 1], 0, me);
                }
            }
            2 => {
                let item = Item { key: at, size, value: me };
                match index.insert(item, &mut preload) {
                    Insert::Inserted => {
                        owners.swap(item, 0, me);
                        mine.push(item);
                    }
                    Insert::Overlaps(other) => {
                        assert!(other.key < item.end() && item.key < other.end());
                    }
                }
            }
            3..6 if !mine.is_empty() => {
                let item = mine.swap_remove(random.below(mine.len() as u64) as usize);
                owners.swap(item, me, 0);
                assert_eq!(index.remove(item.key), Some(item));
            }
            6 if !mine.is_empty() => {
                let item = mine[random.below(mine.len() as u64) as usize];
                let point = item.key + random.below(item.size);
                assert_eq!(index.lookup(point), Some(item), "an item was lost");
                assert_eq!(index.get(item.key), Some(item), "an item was lost");
                assert_eq!(index.lookup_locked(point, |item| item), Some(item));
            }
            _ => {
                let found = index.lookup(at);
                assert!(found.is_none_or(|item| item.key <= at && at < item.end()));
                let mut leaf = Vec::new();
                let next = index.leaf(at, &mut leaf);
                assert!(
                    leaf.iter().all(|item| item.key >= at && next.is_none_or(|n| item.end() <= n))
                );
                assert!(leaf.is_sorted_by(|a, b| a.end() <= b.key), "{leaf:?}");
            }
        }
    }
    mine
}

/// Runs the threads, and compares their items at the end with those of the index.
fn run<I: RangeIndex>(index: &I, space: u64) {
    let owners = Owners::new(space);
    let mut all: Vec<Item> = thread::scope(|scope| {
        let owners = &owners;
        let churn = |thread| scope.spawn(move || churn(index, owners, thread, space));
        let threads: Vec<_> = (0..THREADS).map(churn).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("a thread failed")).collect()
    });
    all.sort_by_key(|item| item.key);
    assert_eq!(items(index, 0), all);
    let totals = index.check();
    assert_eq!(totals.items, all.len());
    assert_eq!(totals.taken, all.iter().map(|item| item.size).sum::<u64>());
    all.iter().for_each(|item| assert!(index.remove(item.key).is_some()));
    assert_eq!(index.check().free, u64::MAX);
}

#[test]
fn ranges_taken_by_many_threads_never_overlap() {
    // A few leaves, so that threads meet; and some hundred.
    for space in [600, 40_000] {
        let list = SkipList::new();
        run(&list, space);
        assert_eq!(list.check().leaves, 1);
    }
}

#[test]
fn ranges_taken_by_many_threads_never_overlap_in_the_locked_trees() {
    run(&LockedTree::new(), 600);
    run(&LockedMap::new(), 600);
}

/// Every lookup without a lock finds the items that no thread removes.
#[test]
fn items_that_stay_are_always_found() {
    const STAY: u64 = 97;
    let (list, done) = (SkipList::new(), AtomicBool::new(false));
    let mut preload = uzswap_ranges::Preload::default();
    for key in 0..100 {
        let item = Item { key: key * STAY, size: 1, value: 0 };
        assert_eq!(list.insert(item, &mut preload), Insert::Inserted);
    }
    thread::scope(|scope| {
        let (list, done) = (&list, &done);
        scope.spawn(move || {
            let mut random = Random(5);
            while !done.load(Relaxed) {
                let key = random.below(100) * STAY;
                assert!(list.lookup(key).is_some(), "{key} is not found");
                assert_eq!(items(list, 0).iter().filter(|item| item.key % STAY == 0).count(), 100);
                assert_eq!(list.first().map(|item| item.key), Some(0));
                assert!(list.last().is_some_and(|item| item.key >= 99 * STAY));
            }
        });
        let fill = |part: u64| {
            let mut preload = uzswap_ranges::Preload::default();
            for _ in 0..rounds() / 1000 {
                let keys = (0..100 * STAY).filter(|key| key % STAY != 0 && key % 2 == part);
                for key in keys.clone() {
                    let item = Item { key, size: 1, value: 0 };
                    assert_eq!(list.insert(item, &mut preload), Insert::Inserted);
                }
                keys.for_each(|key| assert!(list.remove(key).is_some()));
            }
        };
        let fillers: Vec<_> = (0..2).map(|part| scope.spawn(move || fill(part))).collect();
        fillers.into_iter().for_each(|filler| filler.join().expect("a thread failed"));
        done.store(true, Relaxed);
    });
    assert_eq!(list.check().items, 100);
}
