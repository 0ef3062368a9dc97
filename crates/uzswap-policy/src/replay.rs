//! A pager without memory: which touches of a trace fault, by policy.
//!
//! Ours is the model of `uzswap-region`: a hand, a staging area, and [`Order`] as it is used there.
//! The others know each touch, as no pager does: they are limits and peers. [`Policy::Belady`]
//! knows the future as well.

use crate::order::{self, Order, Seen, Verdict};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::str::FromStr;

/// A policy by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Ours.
    Order,
    /// The order of coming with a second chance, by faults alone: ours before it had levels.
    Clock,
    /// The page that came first leaves first.
    Fifo,
    /// The page that was touched longest ago leaves first.
    Lru,
    /// The page that is needed last leaves first: no policy has fewer misses.
    Belady,
}

impl Policy {
    /// All of them, ours first.
    pub const ALL: [Self; 5] = [Self::Order, Self::Clock, Self::Fifo, Self::Lru, Self::Belady];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Clock => "clock",
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

/// The touches of a trace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// All of them.
    pub touches: u64,
    /// Those of pages that were out, or had never been touched.
    pub misses: u64,
    /// Those of pages on their way out, which need no codec.
    pub staged: u64,
}

/// Replays touches of pages, numbered from 0, in memory for `capacity` of them. The first `skip`
/// touches are not counted.
pub fn replay(policy: Policy, trace: &[u32], capacity: usize, skip: usize) -> Counts {
    let pages = trace.iter().max().map_or(0, |most| *most as usize + 1);
    let capacity = capacity.max(1);
    let missed: Vec<bool> = match policy {
        Policy::Order | Policy::Clock => {
            let mut pager = Pager::new(pages, capacity, policy == Policy::Order);
            trace.iter().for_each(|page| pager.touch(*page as usize));
            return pager.counts(skip);
        }
        Policy::Fifo => queue(trace, pages, capacity, |_| 0),
        Policy::Lru => queue(trace, pages, capacity, |touch| touch + 1),
        Policy::Belady => {
            let next = next_touches(trace, pages);
            // The key that is removed is the smallest.
            queue(trace, pages, capacity, |touch| usize::MAX - next[touch])
        }
    };
    let counted = missed.get(skip..).unwrap_or_default();
    let misses = counted.iter().filter(|missed| **missed).count() as u64;
    Counts { touches: counted.len() as u64, misses, staged: 0 }
}

/// Removes the page with the smallest key when there is no room. `key` is that of a page after a
/// touch, 0: it keeps that of its coming.
fn queue(trace: &[u32], pages: usize, capacity: usize, key: impl Fn(usize) -> usize) -> Vec<bool> {
    let mut keys: Vec<Option<usize>> = vec![None; pages];
    let mut there = BTreeSet::new();
    let touches = trace.iter().enumerate().map(|(touch, page)| {
        let page = *page as usize;
        let had = keys[page];
        if had.is_none() && there.len() == capacity {
            let (_, leaves) = there.pop_first().expect("the capacity is at least 1");
            keys[leaves] = None;
        }
        let new = match (key(touch), had) {
            (0, Some(had)) => had,
            (0, None) => touch + 1,
            (key, _) => key,
        };
        if let Some(had) = had {
            there.remove(&(had, page));
        }
        there.insert((new, page));
        keys[page] = Some(new);
        had.is_none()
    });
    touches.collect()
}

/// Of each touch, when the same page is touched next; as late as can be if never.
fn next_touches(trace: &[u32], pages: usize) -> Vec<usize> {
    let mut last = vec![usize::MAX - 1; pages];
    let mut next = vec![0; trace.len()];
    for (touch, page) in trace.iter().enumerate().rev() {
        next[touch] = std::mem::replace(&mut last[*page as usize], touch);
    }
    next
}

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Nowhere,
    There {
        passes: u8,
    },
    /// In the staging area, as the entry with this number.
    Staged {
        entry: u64,
    },
    /// In the cache: so many pages had left before.
    Out {
        departed: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Page {
    place: Place,
    level: u8,
}

/// The model of the pager.
struct Pager {
    pages: Vec<Page>,
    capacity: usize,
    has_levels: bool,
    there: usize,
    staged: usize,
    staging: VecDeque<(usize, u64)>,
    entries: u64,
    hand: usize,
    departed: u64,
    order: Order,
    seen: Seen,
    /// Of each touch: a miss, a touch of a staged page, or neither.
    events: Vec<Event>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Hit,
    Staged,
    Miss,
}

impl Pager {
    fn new(pages: usize, capacity: usize, has_levels: bool) -> Self {
        Self {
            pages: vec![Page { place: Place::Nowhere, level: 0 }; pages],
            capacity,
            has_levels,
            there: 0,
            staged: 0,
            staging: VecDeque::new(),
            entries: 0,
            hand: 0,
            departed: 0,
            order: Order::default(),
            seen: Seen::default(),
            events: Vec::new(),
        }
    }

    fn counts(&self, skip: usize) -> Counts {
        let counted = self.events.get(skip..).unwrap_or_default();
        let of = |event| counted.iter().filter(|one| **one == event).count() as u64;
        Counts { touches: counted.len() as u64, misses: of(Event::Miss), staged: of(Event::Staged) }
    }

    fn touch(&mut self, page: usize) {
        let Page { place, level } = self.pages[page];
        let event = match place {
            Place::There { .. } => Event::Hit,
            Place::Staged { .. } => {
                self.staged -= 1;
                self.seen.returned[usize::from(level)] += 1;
                self.pages[page].level = order::raised(level);
                Event::Staged
            }
            Place::Nowhere | Place::Out { .. } => {
                while self.there + self.staged >= self.capacity {
                    self.evict();
                }
                if let Place::Out { departed } = place {
                    self.come_back(page, self.departed - departed);
                }
                Event::Miss
            }
        };
        if event != Event::Hit {
            self.pages[page].place = Place::There { passes: 0 };
            self.there += 1;
        }
        self.events.push(event);
        let is_short = self.there + self.staged + self.capacity / 64 >= self.capacity;
        while is_short && self.staged < self.capacity / 32 {
            self.stage();
        }
    }

    fn come_back(&mut self, page: usize, distance: u64) {
        let (level, capacity) = (self.pages[page].level, self.capacity as u64);
        if order::is_return(distance, capacity) {
            self.seen.returned[usize::from(level)] += 1;
        }
        self.pages[page].level = order::level_of_return(level, distance, capacity);
    }

    /// Moves one page to the staging area.
    fn stage(&mut self) {
        self.order.tend(self.seen, self.capacity as u64);
        let begin = self.hand;
        let mut round = 0;
        while self.there > 0 {
            let page = self.hand;
            self.hand = (page + 1) % self.pages.len();
            if let Place::There { passes } = self.pages[page].place {
                let verdict = match self.has_levels {
                    true => self.order.judge(self.pages[page].level, passes, round),
                    false if passes == 0 => Verdict::Stays { passes: 1 },
                    false => Verdict::Leaves,
                };
                match verdict {
                    Verdict::Stays { passes } => self.pages[page].place = Place::There { passes },
                    Verdict::Leaves => {
                        self.entries += 1;
                        self.pages[page].place = Place::Staged { entry: self.entries };
                        self.staging.push_back((page, self.entries));
                        self.there -= 1;
                        self.staged += 1;
                        return;
                    }
                }
            }
            if self.hand == 0 {
                self.order.end_pass();
            }
            round += u32::from(self.hand == begin);
        }
    }

    /// Stores the page that was staged first.
    fn evict(&mut self) {
        loop {
            match self.staging.pop_front() {
                Some((page, entry)) if self.pages[page].place == Place::Staged { entry } => {
                    self.pages[page].place = Place::Out { departed: self.departed };
                    self.departed += 1;
                    self.staged -= 1;
                    return;
                }
                // It was touched meanwhile.
                Some(_) => {}
                None => self.stage(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of every pattern, and those that there may be: a fifth, and little less than that.
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

    /// So many of 100 touches go to a fifth of the pages, which lie here and there.
    fn hot(percent: u32) -> impl Fn(&mut Noise, u32) -> u32 {
        move |noise, _| match noise.below(100) < percent {
            true => noise.below(PAGES / 5) * 5,
            false => noise.below(PAGES),
        }
    }

    fn scan_beside(noise: &mut Noise, touch: u32) -> u32 {
        if touch.is_multiple_of(5) { touch / 5 % PAGES } else { hot(95)(noise, touch) }
    }

    /// The page of rank r is touched as often as 1 / r.
    fn zipf(noise: &mut Noise, _: u32) -> u32 {
        let share = f64::from(noise.below(1 << 24)) / f64::from(1 << 24);
        let rank = f64::from(PAGES).powf(share) as u32 - 1;
        rank.wrapping_mul(7919) % PAGES
    }

    fn round(_: &mut Noise, touch: u32) -> u32 {
        touch % (CAPACITY as u32 * 5 / 4)
    }

    /// The pages in use are others from time to time.
    fn phases(noise: &mut Noise, touch: u32) -> u32 {
        match noise.below(100) < 95 {
            true => (noise.below(PAGES / 8) * 5 + touch / PAGES * 7919) % PAGES,
            false => noise.below(PAGES),
        }
    }

    /// The pages in use move on, the newest are used most.
    fn moving(noise: &mut Noise, touch: u32) -> u32 {
        let back = (u64::from(noise.below(6000)) * u64::from(noise.below(6000)) / 6000) as u32;
        (touch / 10 + 6000 - back) % PAGES
    }

    /// Of 1000 touches, those that miss, and those of staged pages.
    fn shares(policy: Policy, trace: &[u32]) -> (u64, u64) {
        let counts = replay(policy, trace, CAPACITY, trace.len() / 2);
        (counts.misses * 1000 / counts.touches, counts.staged * 1000 / counts.touches)
    }

    #[test]
    fn pages_in_use_stay_and_nothing_else_suffers() {
        // In percent of the misses of the order of coming with a second chance, and of those of
        // LRU, which knows each touch: as many as ours may have.
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
            assert_eq!(replay(policy, &[], 4, 0), Counts::default());
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
    fn a_name_that_is_none_is_told_with_those_that_are() {
        assert_eq!("belady".parse(), Ok(Policy::Belady));
        let error = "lfu".parse::<Policy>().expect_err("no such policy");
        assert_eq!(
            error,
            "no policy is called \"lfu\"; give one of order, clock, fifo, lru, belady"
        );
    }
}
