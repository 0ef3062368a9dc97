//! Replays a trace and counts the touches that fault, by policy.
//!
//! Our policy, and our earlier policy, drive the model of the pager (`model`). The other policies
//! see each touch, which no pager can: they are limits and peers. [`Policy::Belady`] knows the
//! future.

use crate::costs::{POOL, STAGED};
use crate::counted_memory::{Memory, Traffic, Was};
use crate::model::{PagerModel, Touch};
use crate::order::PagerPolicy;
pub use crate::pager_memory::PAGE_BYTES;
use crate::pager_memory::PagerMemory;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// A policy by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// A policy that a pager can follow.
    Pager(PagerPolicy),
    /// The page that came in first leaves first.
    Fifo,
    /// The page that was touched longest ago leaves first.
    Lru,
    /// The page that is needed last leaves first: no policy has fewer misses.
    Belady,
}

impl Policy {
    /// All policies, ours first.
    pub const ALL: [Self; 5] = [Self::ORDER, Self::CLOCK, Self::Fifo, Self::Lru, Self::Belady];

    /// The pager's default policy.
    pub const ORDER: Self = Self::Pager(PagerPolicy::Order);

    /// See [`PagerPolicy::Clock`].
    pub const CLOCK: Self = Self::Pager(PagerPolicy::Clock);

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pager(policy) => policy.name(),
            Self::Fifo => "fifo",
            Self::Lru => "lru",
            Self::Belady => "belady",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("no policy is called {text:?}; give one of {known}")
        })
    }
}

/// A step of a trace. Pages are numbered from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A touch.
    Touch {
        /// The page.
        page: u32,
        /// Bytes that the page takes in the pool if it leaves before its next touch.
        bytes: u16,
        /// The touch is a write.
        is_write: bool,
        /// The content changes before the page leaves.
        changes: bool,
    },
    /// The program gives the page back, and does not touch it again.
    Gone {
        /// The page.
        page: u32,
    },
}

impl Step {
    fn page(self) -> u32 {
        match self {
            Self::Touch { page, .. } | Self::Gone { page } => page,
        }
    }
}

/// The touches of a trace, and the memory that they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayCounts {
    /// All touches.
    pub touches: u64,
    /// Touches of pages that were absent, or had never been touched.
    pub misses: u64,
    /// First touches of pages: misses that no policy can avoid.
    pub first: u64,
    /// Touches of pages on the backing.
    pub from_backing: u64,
    /// Touches of staged pages, which need no codec.
    pub staged: u64,
    /// The time of reads of the backing, ns.
    pub read_nanos: u64,
    /// Bytes that went to the backing.
    pub written: u64,
    /// The peak of the pool's bytes.
    pub pool_max: u64,
    /// The number of present pages, summed over the touches.
    pub there_sum: u64,
}

impl ReplayCounts {
    /// Touches of pages that had left, which depend on the policy. First touches do not depend on
    /// it.
    pub fn faults(&self) -> u64 {
        self.misses - self.first
    }

    /// The time that a program loses to faults, µs. First touches are not counted: they cost as
    /// much in any memory.
    pub fn lost_micros(&self) -> f64 {
        let from_pool = self.faults() - self.from_backing;
        from_pool as f64 * POOL + self.read_nanos as f64 / 1e3 + self.staged as f64 * STAGED
    }

    /// The mean number of present pages.
    pub fn there_mean(&self) -> u64 {
        self.there_sum / self.touches.max(1)
    }

    fn note(&mut self, was: Was, memory: &Memory) {
        self.touches += 1;
        self.misses += u64::from(was != Was::Memory);
        self.first += u64::from(was == Was::Nowhere);
        self.from_backing += u64::from(was == Was::Backing);
        self.there_sum += memory.there();
        self.pool_max = self.pool_max.max(memory.pool());
    }

    fn note_traffic(&mut self, Traffic { written, read_nanos }: Traffic) {
        self.written += written;
        self.read_nanos += read_nanos;
    }
}

/// Replays touches of pages, numbered from 0, in memory for `capacity` pages. Pages that left take
/// no memory. The first `skip` touches are not counted.
pub fn replay(policy: Policy, trace: &[u32], capacity: usize, skip: usize) -> ReplayCounts {
    let touch = |page: &u32| Step::Touch { page: *page, bytes: 0, is_write: false, changes: false };
    let steps: Vec<_> = trace.iter().map(touch).collect();
    let room = PagerMemory::of_bytes(capacity.max(1) as u64 * PAGE_BYTES);
    simulate(policy, &steps, None, room, skip)
}

/// Replays steps in memory that present pages and the pool share. The first `skip` steps are not
/// counted.
///
/// `places` has the place of each page: pages of one place follow each other, and neighbours have
/// consecutive places. With it, the policies of the pager bring in neighbours as the pager does.
pub fn simulate(
    policy: Policy,
    steps: &[Step],
    places: Option<&[u32]>,
    room: PagerMemory,
    skip: usize,
) -> ReplayCounts {
    let pages = steps.iter().map(|step| step.page()).max().map_or(0, |most| most as usize + 1);
    match policy {
        Policy::Pager(policy) => {
            let mut pager = PagerModel::new(pages, room, policy, places);
            let mut counts = ReplayCounts::default();
            for (at, step) in steps.iter().enumerate() {
                if at == skip {
                    counts = ReplayCounts::default();
                }
                match *step {
                    Step::Touch { page, bytes, is_write, changes } => {
                        let page = page as usize;
                        let (from, is_staged) =
                            pager.touch(Touch { page, bytes, is_write, changes });
                        counts.note(from, pager.memory());
                        counts.staged += u64::from(is_staged);
                    }
                    Step::Gone { page } => pager.give_back(page as usize),
                }
                counts.note_traffic(pager.take_traffic());
            }
            if skip >= steps.len() && skip > 0 { ReplayCounts::default() } else { counts }
        }
        Policy::Fifo => queue(steps, pages, room, skip, |_| 0),
        Policy::Lru => queue(steps, pages, room, skip, |touch| touch + 1),
        Policy::Belady => {
            let next = next_touches(steps, pages);
            // The key that is removed is the smallest.
            queue(steps, pages, room, skip, |touch| usize::MAX - next[touch])
        }
    }
}

/// Removes the page with the smallest key when there is no room. `key` gives a page's key after a
/// touch. With 0 the page keeps the key with which it came in.
fn queue(
    steps: &[Step],
    pages: usize,
    room: PagerMemory,
    skip: usize,
    key: impl Fn(usize) -> usize,
) -> ReplayCounts {
    let mut counts = ReplayCounts::default();
    let mut memory = Memory::new(pages, room);
    // The key of each page, and its bytes in the pool.
    let mut known = vec![(0, 0); pages];
    let mut there = BTreeSet::new();
    for (at, step) in steps.iter().enumerate() {
        let page = step.page() as usize;
        let (had, _) = known[page];
        let from = memory.place(page);
        if from == Was::Memory {
            there.remove(&(had, page));
        }
        let Step::Touch { bytes, .. } = *step else {
            memory.drop_page(page);
            continue;
        };
        if from != Was::Memory {
            while !memory.has_room()
                && let Some((_, leaves)) = there.pop_first()
            {
                memory.leave(leaves, known[leaves].1);
            }
            memory.come(page);
        }
        match from {
            Was::Pool => memory.count_load(0),
            Was::Backing => memory.count_load(1),
            Was::Nowhere | Was::Memory => {}
        }
        let traffic = memory.take_traffic();
        let new = match (key(at), from) {
            (0, Was::Memory) => had,
            (0, _) => at + 1,
            (key, _) => key,
        };
        there.insert((new, page));
        known[page] = (new, bytes);
        if at >= skip {
            counts.note(from, &memory);
            counts.note_traffic(traffic);
        }
    }
    counts
}

/// For each touch, the step of the page's next touch; if there is none, a step after all others.
fn next_touches(steps: &[Step], pages: usize) -> Vec<usize> {
    let mut last = vec![usize::MAX - 1; pages];
    let mut next = vec![0; steps.len()];
    for (touch, step) in steps.iter().enumerate().rev() {
        next[touch] = std::mem::replace(&mut last[step.page() as usize], touch);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of every pattern, and the pages that fit: a little less than a fifth.
    const PAGES: u32 = 20_000;
    const CAPACITY: usize = 3_900;

    struct Noise(u64);

    impl Noise {
        fn below(&mut self, end: u32) -> u32 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            let word = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
            ((word * u64::from(end)) >> 32) as u32
        }
    }

    /// All pages once, then eight times as many touches by a pattern.
    fn trace(pattern: impl Fn(&mut Noise, u32) -> u32) -> Vec<u32> {
        let mut noise = Noise(88_172_645_463_325_252);
        (0..PAGES).chain((0..8 * PAGES).map(|touch| pattern(&mut noise, touch))).collect()
    }

    /// `percent` of the touches go to a fifth of the pages, which are scattered.
    fn hot(percent: u32) -> impl Fn(&mut Noise, u32) -> u32 {
        move |noise, _| match noise.below(100) < percent {
            true => noise.below(PAGES / 5) * 5,
            false => noise.below(PAGES),
        }
    }

    fn scan_beside(noise: &mut Noise, touch: u32) -> u32 {
        if touch.is_multiple_of(5) { touch / 5 % PAGES } else { hot(95)(noise, touch) }
    }

    /// Touches the page of rank r with a frequency proportional to 1 / r.
    fn zipf(noise: &mut Noise, _: u32) -> u32 {
        let share = f64::from(noise.below(1 << 24)) / f64::from(1 << 24);
        let rank = f64::from(PAGES).powf(share) as u32 - 1;
        rank.wrapping_mul(7919) % PAGES
    }

    fn round(_: &mut Noise, touch: u32) -> u32 {
        touch % (CAPACITY as u32 * 5 / 4)
    }

    /// The working set changes from time to time.
    fn phases(noise: &mut Noise, touch: u32) -> u32 {
        match noise.below(100) < 95 {
            true => (noise.below(PAGES / 8) * 5 + touch / PAGES * 7919) % PAGES,
            false => noise.below(PAGES),
        }
    }

    /// The pages in use move on; the newest are used most.
    fn moving(noise: &mut Noise, touch: u32) -> u32 {
        let back = (u64::from(noise.below(6000)) * u64::from(noise.below(6000)) / 6000) as u32;
        (touch / 10 + 6000 - back) % PAGES
    }

    /// The misses of 1000 touches, and the touches of staged pages.
    fn shares(policy: Policy, trace: &[u32]) -> (u64, u64) {
        let counts = replay(policy, trace, CAPACITY, trace.len() / 2);
        (counts.misses * 1000 / counts.touches, counts.staged * 1000 / counts.touches)
    }

    #[test]
    fn pages_in_use_stay_and_nothing_else_suffers() {
        // The most misses that ours may have, in percent of those of `clock`, and of those of LRU.
        type Pattern = Box<dyn Fn(&mut Noise, u32) -> u32>;
        let patterns: [(&str, Pattern, u64, u64); 8] = [
            ("hot 95", Box::new(hot(95)), 70, 100),
            ("hot 80", Box::new(hot(80)), 80, 90),
            ("scan beside", Box::new(scan_beside), 75, 80),
            ("zipf", Box::new(zipf), 92, 101),
            ("round", Box::new(round), 50, 50),
            ("phases", Box::new(phases), 105, 105),
            ("moving", Box::new(moving), 80, 95),
            ("random", Box::new(hot(0)), 101, 101),
        ];
        for (name, pattern, of_clock, of_lru) in patterns {
            let trace = trace(pattern);
            let [ours, clock, fifo, lru, best] = Policy::ALL.map(|policy| shares(policy, &trace));
            println!("{name}: {ours:?} clock {clock:?} fifo {fifo:?} lru {lru:?} best {best:?}");
            assert!(best.0 <= ours.0 && best.0 <= lru.0 && best.0 <= clock.0, "{name}");
            assert!(ours.0 * 100 <= clock.0 * of_clock, "{name}: {ours:?}, {clock:?}");
            assert!(ours.0 * 100 <= lru.0 * of_lru, "{name}: {ours:?}, {lru:?}");
            assert!(ours.1 <= 30, "{name}: touches of staged pages cost half of a fault: {ours:?}");
        }
    }

    #[test]
    fn known_policies_miss_as_by_hand() {
        let trace = [0, 1, 2, 0, 3, 0, 1, 2, 3];
        let misses = |policy| replay(policy, &trace, 3, 0).misses;
        // FIFO: 0 1 2 | 3 for 0, 0 for 1, 1 for 2, 2 for 3, 3 for 0.
        assert_eq!(misses(Policy::Fifo), 8);
        // LRU: 0 1 2 | 3 for 1, 1 for 2, 2 for 3, 3 for 0.
        assert_eq!(misses(Policy::Lru), 7);
        // Belady: 0 1 2 | 3 for 2, 2 for 0 or 1.
        assert_eq!(misses(Policy::Belady), 5);
        assert_eq!(replay(Policy::Lru, &trace, 3, 5).touches, 4);
        for policy in Policy::ALL {
            assert_eq!(replay(policy, &trace, 4, 0).misses, 4, "{policy}: each page comes once");
            assert_eq!(replay(policy, &[], 4, 0), ReplayCounts::default());
        }
    }

    /// The misses of libCacheSim 0.3.5 (its Python package), each page an object of size 1.
    #[test]
    fn known_policies_miss_as_those_of_libcachesim() {
        let trace = trace(hot(80));
        for (policy, of_capacities) in [
            (Policy::Fifo, [152_597, 91_072, 39_147]),
            (Policy::Lru, [152_128, 81_300, 34_452]),
            (Policy::Belady, [96_958, 43_484, 24_735]),
        ] {
            let misses = [1000, 3900, 12_000].map(|pages| replay(policy, &trace, pages, 0).misses);
            assert_eq!(misses, of_capacities, "{policy}");
        }
    }

    #[test]
    fn each_kind_of_touch_has_its_price() {
        let counts = ReplayCounts {
            touches: 100,
            misses: 30,
            first: 10,
            from_backing: 2,
            read_nanos: 250_000,
            staged: 4,
            ..ReplayCounts::default()
        };
        assert_eq!(counts.lost_micros(), 18.0 * POOL + 250.0 + 4.0 * STAGED);
    }

    #[test]
    fn an_unknown_policy_is_refused_with_the_known_ones() {
        assert_eq!("belady".parse(), Ok(Policy::Belady));
        let error = "lfu".parse::<Policy>().expect_err("no such policy");
        assert_eq!(
            error,
            "no policy is called \"lfu\"; give one of order, clock, fifo, lru, belady"
        );
    }
}
