//! Times the range index beside its peers: `cargo run --release --package uzswap-ranges --features
//! testing --example compare [ROUNDS]`.
//!
//! Two tables. *Items*: 100 000 ranges of size 1 at random keys, split among the threads: each
//! thread inserts its part (fill), looks up each of its keys (check), removes them (delete); the
//! time is that of the average thread. *Allocation*: 16 threads, each with 64 ranges and a hint of
//! its own, take a range by `insert_hole` and give the oldest back, in a space where others' ranges
//! stand close together. Each figure is the median of the rounds, which are run in turn, so that
//! what else runs on the machine meets all alike.

use crossbeam_skiplist::SkipMap;
use std::collections::{HashSet, VecDeque};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
use uzswap_ranges::tree::{LockedMap, LockedTree};
use uzswap_ranges::{Hole, Insert, Item, RangeIndex, SkipList};

const ITEMS: u64 = 100_000;
const ALLOCATORS: u64 = 16;
/// Length of a run, ranges that a thread has at a time, its part of the space, and how many of
/// others stand in it.
const RUN: Duration = Duration::from_millis(60);
const HELD: usize = 64;
const PART: u64 = 1 << 20;
const STANDING: u64 = 4000;

/// What is timed: an index, or a map that only has the operations of the first table.
trait Peer: Sync {
    /// What a thread needs.
    type Own: Default;

    fn insert(&self, key: u64, own: &mut Self::Own);
    fn holds(&self, key: u64) -> bool;
    fn remove(&self, key: u64) -> bool;
}

impl<I: RangeIndex> Peer for I {
    type Own = I::Preload;

    fn insert(&self, key: u64, own: &mut Self::Own) {
        let inserted = RangeIndex::insert(self, Item { key, size: 1, value: key }, own);
        assert_eq!(inserted, Insert::Inserted);
    }

    fn holds(&self, key: u64) -> bool {
        self.get(key).is_some_and(|item| item.value == key)
    }

    fn remove(&self, key: u64) -> bool {
        RangeIndex::remove(self, key).is_some()
    }
}

/// A map of keys: it does not see whether ranges overlap, and cannot find a hole and take it.
struct Crossbeam(SkipMap<u64, (u64, u64)>);

impl Peer for Crossbeam {
    type Own = ();

    fn insert(&self, key: u64, (): &mut ()) {
        self.0.insert(key, (1, key));
    }

    fn holds(&self, key: u64) -> bool {
        self.0.get(&key).is_some_and(|entry| entry.value().1 == key)
    }

    fn remove(&self, key: u64) -> bool {
        self.0.remove(&key).is_some()
    }
}

/// Different keys in no order.
fn keys(count: u64) -> Vec<u64> {
    let mut random = 88_172_645_463_325_252_u64;
    let next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random >> 16
    };
    let keys: Vec<u64> = std::iter::repeat_with(next).take(count as usize).collect();
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len(), "a key came twice");
    keys
}

/// The average thread's time of each step, from when the last thread was ready for it.
fn items(peer: &impl Peer, keys: &[u64], threads: usize) -> [Duration; 3] {
    let barrier = Barrier::new(threads);
    let work = |part: &[u64]| {
        let mut own = Default::default();
        let timed = |step: &mut dyn FnMut(u64)| {
            let ready = Instant::now();
            barrier.wait();
            part.iter().for_each(|key| step(*key));
            (ready, Instant::now())
        };
        [
            timed(&mut |key| peer.insert(key, &mut own)),
            timed(&mut |key| assert!(peer.holds(key))),
            timed(&mut |key| assert!(peer.remove(key))),
        ]
    };
    let times: Vec<[(Instant, Instant); 3]> = thread::scope(|scope| {
        let parts = keys.chunks(keys.len().div_ceil(threads));
        let running: Vec<_> = parts.map(|part| scope.spawn(|| work(part))).collect();
        running.into_iter().map(|thread| thread.join().expect("a thread failed")).collect()
    });
    std::array::from_fn(|step| {
        let start = times.iter().map(|time| time[step].0).max().expect("a thread");
        let sum: Duration = times.iter().map(|time| time[step].1 - start).sum();
        sum / threads as u32
    })
}

/// How an allocating thread chooses its hint.
#[derive(Clone, Copy, PartialEq)]
enum Hint {
    /// Always the start of its own part of the space: the first range that fits.
    First,
    /// The end of the last range it took.
    Next,
}

/// A space in which ranges of 24 stand with gaps of up to 7 between: room for the small only.
fn standing<I: RangeIndex>(index: &I) {
    let mut own = I::Preload::default();
    for part in 0..ALLOCATORS {
        for n in 0..STANDING {
            let item = Item { key: part * PART + n * 28 + n % 4, size: 24, value: 0 };
            assert_eq!(index.insert(item, &mut own), Insert::Inserted);
        }
    }
}

/// Time for an allocation and a free: the time of the run over those of all threads.
fn allocate<I: RangeIndex>(index: &I, hint: Hint) -> Duration {
    standing(index);
    let stop = AtomicBool::new(false);
    let work = |part: u64| {
        let (mut own, mut held) = (I::Preload::default(), VecDeque::new());
        let (mut at, mut count) = (part * PART, 0);
        while !stop.load(Relaxed) {
            let size = 1 << (count % 5);
            let within = 0..ALLOCATORS * PART;
            let hole = Hole { hint: at, size, align: 1, within, value: part };
            let key = index.insert_hole(&hole, &mut own).expect("there is room");
            held.push_back(key);
            if hint == Hint::Next {
                at = key + size;
            }
            if held.len() > HELD {
                let oldest = held.pop_front().expect("it is not empty");
                assert!(index.remove(oldest).is_some());
            }
            count += 1;
        }
        count
    };
    let start = Instant::now();
    let count: u32 = thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = (0..ALLOCATORS).map(|part| scope.spawn(move || work(part))).collect();
        thread::sleep(RUN);
        stop.store(true, Relaxed);
        running.into_iter().map(|thread| thread.join().expect("a thread failed")).sum()
    });
    start.elapsed() / count
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() {
    let rounds: usize =
        std::env::args().nth(1).map_or(9, |rounds| rounds.parse().expect("a number of rounds"));
    let keys = keys(ITEMS);
    println!("{ITEMS} items: fill / check / delete, ms of the average thread");
    let names =
        ["skiplist", "red-black tree, one lock", "BTreeMap, one lock", "crossbeam-skiplist"];
    for threads in [1, 2, 4] {
        let mut times: [Vec<[Duration; 3]>; 4] = Default::default();
        for _ in 0..rounds {
            times[0].push(items(&SkipList::new(), &keys, threads));
            times[1].push(items(&LockedTree::new(), &keys, threads));
            times[2].push(items(&LockedMap::new(), &keys, threads));
            times[3].push(items(&Crossbeam(SkipMap::new()), &keys, threads));
        }
        println!("{threads} threads");
        for (name, times) in names.iter().zip(times) {
            let ms = |step: usize, times: &[[Duration; 3]]| {
                let times: Vec<_> = times.iter().map(|time| time[step]).collect();
                let least = times.iter().min().copied().unwrap_or_default();
                format!(
                    "{:6.2} ({:6.2})",
                    median(times).as_secs_f64() * 1e3,
                    least.as_secs_f64() * 1e3
                )
            };
            println!("  {name:26} {} / {} / {}", ms(0, &times), ms(1, &times), ms(2, &times));
        }
    }
    println!("allocation and free, {ALLOCATORS} threads: ns each");
    for (hint, name) in [(Hint::First, "first fit"), (Hint::Next, "next fit")] {
        let mut times: [Vec<Duration>; 3] = Default::default();
        for _ in 0..rounds {
            times[0].push(allocate(&SkipList::new(), hint));
            times[1].push(allocate(&LockedTree::new(), hint));
            times[2].push(allocate(&LockedMap::new(), hint));
        }
        println!("{name}");
        for (name, times) in names.iter().zip(times) {
            println!("  {name:26} {:8}", median(times).as_nanos());
        }
    }
}
