//! `ranges`: the range index, beside other ordered maps.
//!
//! *Items*: 100 000 ranges of size 1 at random keys, split among the threads. Each thread inserts
//! its part (fill), looks up each of its keys (check) and removes them (delete). The time is that
//! of the average thread. *Allocation*: 16 threads take a range by `insert_hole` and free their
//! oldest. Each thread has 64 ranges and its own hint. The space also has dense ranges of other
//! threads.

use crate::bench::{Bench, Candidate, Turns};
use crate::error::Failure;
use crate::plot::Plot;
use crate::report::{Section, Table};
use crossbeam_skiplist::SkipMap;
use std::collections::{HashSet, VecDeque};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
use uzswap_ranges::tree::{LockedMap, LockedTree};
use uzswap_ranges::{Hole, Insert, Item, RangeIndex, SkipList};

const ALLOCATORS: u64 = 16;
/// The duration of a run, the ranges that a thread holds at a time, a thread's part of the space,
/// and the other ranges in that part.
const RUN: Duration = Duration::from_millis(60);
const HELD: usize = 64;
const PART: u64 = 1 << 20;
const STANDING: u64 = 4000;

/// A measured index, or a map that has only the operations of the first table.
trait Peer: Sync {
    /// The state of a thread.
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

/// A map of keys. It ignores overlaps, and cannot find and take a hole.
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

/// Distinct keys in random order.
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

/// The average thread's time for each step, since the last thread was ready to begin.
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

/// The way in which an allocating thread chooses its hint.
#[derive(Clone, Copy, PartialEq)]
enum Hint {
    /// The hint is always the start of the thread's own part of the space.
    First,
    /// The end of the range that it took last.
    Next,
}

/// A space with ranges of 24 and gaps of up to 7 between, too small for most requests.
fn standing<I: RangeIndex>(index: &I) {
    let mut own = I::Preload::default();
    for part in 0..ALLOCATORS {
        for n in 0..STANDING {
            let item = Item { key: part * PART + n * 28 + n % 4, size: 24, value: 0 };
            assert_eq!(index.insert(item, &mut own), Insert::Inserted);
        }
    }
}

/// The time of an allocation and a free: the length of the run divided by the operations of all
/// threads.
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

/// The compared indexes.
#[derive(Clone, Copy, PartialEq)]
enum Which {
    SkipList,
    RedBlack,
    BTree,
    Crossbeam,
}

impl Which {
    const ALL: [Self; 4] = [Self::SkipList, Self::RedBlack, Self::BTree, Self::Crossbeam];

    fn name(self) -> &'static str {
        match self {
            Self::SkipList => "skiplist",
            Self::RedBlack => "red-black tree, one lock",
            Self::BTree => "BTreeMap, one lock",
            Self::Crossbeam => "crossbeam-skiplist",
        }
    }
}

/// An index that a number of threads fills.
struct Filled(Which, usize);

impl Candidate for Filled {
    fn name(&self) -> String {
        self.0.name().into()
    }
}

/// An index in which threads allocate.
struct Allocating(Which, Hint);

impl Candidate for Allocating {
    fn name(&self) -> String {
        self.0.name().into()
    }
}

pub fn run(bench: &Bench) -> Result<Section, Failure> {
    let count = bench.pick(2_000, 100_000, 100_000);
    let keys = keys(count);
    let rounds = bench.rounds(5, 31);
    let mut filled = Vec::new();
    for threads in [1, 2, 4] {
        filled.extend(Which::ALL.map(|which| Filled(which, threads)));
    }
    let times = bench.take_turns(&filled, rounds, |Filled(which, threads)| {
        let ms = match which {
            Which::SkipList => items(&SkipList::new(), &keys, *threads),
            Which::RedBlack => items(&LockedTree::new(), &keys, *threads),
            Which::BTree => items(&LockedMap::new(), &keys, *threads),
            Which::Crossbeam => items(&Crossbeam(SkipMap::new()), &keys, *threads),
        };
        Ok(ms.map(|time| time.as_secs_f64() * 1e3))
    })?;
    let mut rows = Vec::new();
    let mut plot = Plot::new("fill", "Fill, check and delete", "threads", "ms of a thread, in all");
    for which in Which::ALL {
        let mut points = Vec::new();
        for (Filled(_, threads), turn) in filled.iter().zip(&times).filter(|(f, _)| f.0 == which) {
            let step = |step: usize| turn.median(|ms| ms[step]);
            let all = turn.median(|ms| ms.iter().sum());
            let mut row = vec![which.name().to_owned(), threads.to_string()];
            row.extend([step(0), step(1), step(2), all].map(|ms| format!("{ms:.2}")));
            rows.push(row);
            points.push([*threads as f64, all]);
        }
        plot = plot.series(which.name(), points);
    }
    let header = ["index", "threads", "fill (ms)", "check", "delete", "in all"];
    let section = Section::new("ranges", "The range index").text(format!(
        "{count} ranges at random keys, split among the threads: time of the average thread; \
         medians of {rounds} rounds."
    ));
    let section = section.table(Table::new(&header, rows)).plot(plot);
    allocation(bench, section, rounds)?.raw("items", &times)
}

/// Adds the table of allocation.
fn allocation(bench: &Bench, section: Section, rounds: usize) -> Result<Section, Failure> {
    let mut candidates = Vec::new();
    for hint in [Hint::First, Hint::Next] {
        // A map that cannot find a hole has no row.
        candidates.extend(Which::ALL[..3].iter().map(|which| Allocating(*which, hint)));
    }
    let times = bench.take_turns(&candidates, rounds, |Allocating(which, hint)| {
        let time = match which {
            Which::SkipList => allocate(&SkipList::new(), *hint),
            Which::RedBlack => allocate(&LockedTree::new(), *hint),
            Which::BTree | Which::Crossbeam => allocate(&LockedMap::new(), *hint),
        };
        Ok(time.as_secs_f64() * 1e9)
    })?;
    let (first, next) = times.split_at(3);
    let rows = first.iter().zip(next).map(|(a, b)| {
        let ns = |turn: &Turns<f64>| format!("{:.0}", turn.median(|ns| *ns));
        let times = |turn: &Turns<f64>, own| format!("{:.1}", turn.paired(own, |a, b| a / b));
        vec![a.name.clone(), ns(a), times(a, &first[0]), ns(b), times(b, &next[0])]
    });
    let header = ["index", "first fit (ns)", "times", "next fit (ns)", "times"];
    let table = Table::new(&header, rows.collect());
    section
        .text(format!(
            "{ALLOCATORS} threads take and give back ranges: time for one of each. First fit: each \
             looks from the start of its part, past {STANDING} ranges of others; next fit: from the \
             end of the last."
        ))
        .table(table)
        .raw("allocation", &times)
}
