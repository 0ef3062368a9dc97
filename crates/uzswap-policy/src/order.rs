//! The order in which pages leave a process.
//!
//! ```text
//! a page comes back soon after it left: its level rises   → it stays for the passes of that level
//! pages of a level that leave come back less than others  → that level's passes become fewer
//! ```
//! A pager does not see touches of a present page. It sees that a page comes back, and how many
//! other pages left since that page did. A page therefore has a *level*: the number of consecutive
//! times that it came back soon. Each level has a *tenure*: how often the hand passes a page of
//! that level before the page leaves. The tenures follow the returns. When a program turns to other
//! pages, its old pages of a high level do not come back. Soon they stay no longer than new pages.
//!
//! Distances are in pages that left. Sizes are relative to the capacity: the pages that fit.

use std::fmt;
use std::str::FromStr;

/// Levels of a page: 0 to 3.
pub const LEVELS: usize = 4;

/// Passes of the hand that a page can stay for.
pub const PASSES_MAX: u8 = 15;

/// Rounds of the hand, in one search, with full tenures. Each later round halves the tenures, so
/// that the search finds a page.
const ROUNDS: u32 = 2;

/// A level's tenure changes by this part when its pages come back more often, or less often, than
/// pages of all levels do.
const STEP: f32 = 0.02;

/// The least difference between these rates that changes a tenure, as a part of the mean rate, or
/// of the mean's distance to 1 if that is less.
const MARGIN: f32 = 0.3;

/// Fewer remembered departures of a level say nothing about it.
const DEPARTURES_MIN: f32 = 8.0;

/// A page returns if it comes back before `capacity / HORIZON` pages have left.
const HORIZON: u64 = 8;

/// Departures after which tenures are set again.
pub const TEND_EVERY: u64 = 64;

/// The gain from a copy, relative to the gain from a page in its room: compressing takes 3 µs, a
/// fault 10. If pages compress to half, it takes the room of one copy to hold one more page
/// uncompressed.
const COPY_WORTH: f32 = 0.3;

/// The policies that a pager can follow: they need no more than its faults.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PagerPolicy {
    /// Orders pages by levels and tenures: see the module.
    #[default]
    Order,
    /// First in, first out, with a second chance. Before there were levels, it was the only policy.
    Clock,
}

impl PagerPolicy {
    /// All policies, the default first.
    pub const ALL: [Self; 2] = [Self::Order, Self::Clock];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Clock => "clock",
        }
    }
}

impl fmt::Display for PagerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PagerPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(" or ");
            format!("no pager can follow a policy {text:?}; give {known}")
        })
    }
}

/// The decision on the page that the hand has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It stays.
    Stays {
        /// The new count of passes.
        passes: u8,
    },
    /// It leaves.
    Leaves,
}

/// True if a page has come back so soon that it should not have left.
pub fn is_return(distance: u64, capacity: u64) -> bool {
    distance < capacity / HORIZON
}

/// The level of a page that comes back from the cache. The page left with `level`, and `distance`
/// pages have left since.
pub fn level_of_return(level: u8, distance: u64, capacity: u64) -> u8 {
    if distance < capacity { raised(level) } else { 0 }
}

/// The level of a page that proved to be in use.
pub fn raised(level: u8) -> u8 {
    (level + 1).min(LEVELS as u8 - 1)
}

/// The observations of a pager from the beginning.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen {
    /// Pages of each level that came back soon by [`is_return`], or from the staging area.
    pub returned: [u64; LEVELS],
    /// Pages that left while the cache had a copy of them.
    pub compared: u64,
    /// Those pages of `compared` that had not changed.
    pub unchanged: u64,
}

/// See the module. One for all pages that share a memory.
#[derive(Debug, Clone)]
pub struct Order {
    policy: PagerPolicy,
    /// Passes of each level.
    tenure: [f32; LEVELS],
    /// The pages that left, and the pages that came back; later pages count more.
    departed: [f32; LEVELS],
    returned: [f32; LEVELS],
    /// Pages that were compared and had not changed; later ones count more.
    compared: f32,
    unchanged: f32,
    /// The last observations.
    seen: Seen,
    /// Departures since tenures were last set.
    since: u64,
    /// The departures in a pass of the hand (later passes count more), and in the present pass.
    in_pass: f32,
    in_this_pass: u64,
    noise: u64,
}

impl Default for Order {
    fn default() -> Self {
        Self {
            policy: PagerPolicy::Order,
            tenure: [1.0; LEVELS],
            departed: [1.0; LEVELS],
            returned: [0.5; LEVELS],
            compared: 1.0,
            unchanged: 0.5,
            seen: Seen::default(),
            since: 0,
            in_pass: 0.0,
            in_this_pass: 0,
            noise: 0x9e37_79b9_7f4a_7c15,
        }
    }
}

impl Order {
    /// An order that follows `policy`.
    pub fn by(policy: PagerPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Decides on a present page. The hand has passed the page `passes` times since it came in.
    /// `round` counts the hand's rounds in this search. A page that leaves is counted.
    pub fn judge(&mut self, level: u8, passes: u8, round: u32) -> Verdict {
        match (self.policy, passes) {
            (PagerPolicy::Order, _) => self.judge_by_level(level, passes, round),
            (PagerPolicy::Clock, 0) => Verdict::Stays { passes: 1 },
            (PagerPolicy::Clock, _) => Verdict::Leaves,
        }
    }

    fn judge_by_level(&mut self, level: u8, passes: u8, round: u32) -> Verdict {
        let tenure = self.tenure[usize::from(level)];
        let noise = self.noise();
        // A tenure of 1.3 is a tenure of 2 for every third page, and of 1 for the others.
        let whole = tenure as u8 + u8::from(noise & 0xffff < (tenure.fract() * 65536.0) as u64);
        if passes < whole >> round.saturating_sub(ROUNDS - 1) {
            return Verdict::Stays { passes: passes + 1 };
        }
        // Half of the pages leave, by chance. A program that loops over more pages than fit will
        // next need the page that came in first. So that page must not always leave first.
        if round < ROUNDS && noise >> 63 == 0 {
            return Verdict::Stays { passes };
        }
        self.departed[usize::from(level)] += 1.0;
        self.since += 1;
        self.in_this_pass += 1;
        Verdict::Leaves
    }

    /// By level, true if the cache's copy of a page that stays is worth its room.
    ///
    /// The copy saves compressing the page again, if the page does not change. Without the copy,
    /// its room could hold a part of another page while this page stays. That would save faults, at
    /// the rate at which pages come back.
    pub fn keeps_copies(&self, capacity: u64) -> [bool; LEVELS] {
        if self.in_pass == 0.0 {
            return [false; LEVELS];
        }
        let (departed, returned) = self.sums();
        let horizon = (capacity / HORIZON).max(1) as f32;
        let gain = returned / departed * self.in_pass / horizon;
        let worth = self.unchanged / self.compared * COPY_WORTH;
        self.tenure.map(|tenure| gain * (tenure + 0.5) < worth)
    }

    /// Notes that the hand has completed a round.
    pub fn end_pass(&mut self) {
        let departed = self.in_this_pass as f32;
        self.in_pass = if self.in_pass == 0.0 { departed } else { (self.in_pass + departed) / 2.0 };
        self.in_this_pass = 0;
    }

    /// Sets the tenures by the returns, after [`TEND_EVERY`] departures.
    pub fn tend(&mut self, seen: Seen, capacity: u64) {
        if self.since < TEND_EVERY {
            return;
        }
        for (level, count) in seen.returned.into_iter().enumerate() {
            self.returned[level] += count.saturating_sub(self.seen.returned[level]) as f32;
        }
        self.compared += seen.compared.saturating_sub(self.seen.compared) as f32;
        self.unchanged += seen.unchanged.saturating_sub(self.seen.unchanged) as f32;
        self.seen = seen;
        let (departed, came_back) = self.sums();
        let mean = (came_back / departed).min(1.0);
        for level in 0..LEVELS {
            if self.departed[level] < DEPARTURES_MIN {
                continue;
            }
            let rate = self.returned[level] / self.departed[level];
            let tenure = &mut self.tenure[level];
            let step = STEP * (self.since / TEND_EVERY) as f32 * (1.0 + *tenure);
            if rate > mean + MARGIN * mean.min(1.0 - mean) {
                *tenure = (*tenure + step).min(PASSES_MAX.into());
            } else if rate < mean - MARGIN * mean {
                *tenure = (*tenure - step).max(0.0);
            }
        }
        // A departure is forgotten after a quarter of the capacity has left.
        let fades = (1.0 - self.since as f32 / (capacity / 4).max(4 * TEND_EVERY) as f32).max(0.5);
        for level in 0..LEVELS {
            self.departed[level] *= fades;
            self.returned[level] *= fades;
        }
        self.compared *= fades;
        self.unchanged *= fades;
        self.since = 0;
    }

    fn sums(&self) -> (f32, f32) {
        (self.departed.iter().sum(), self.returned.iter().sum())
    }

    /// xorshift64*, whose upper bits are the better ones.
    fn noise(&mut self) -> u64 {
        self.noise ^= self.noise >> 12;
        self.noise ^= self.noise << 25;
        self.noise ^= self.noise >> 27;
        self.noise.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: u64 = 6400;

    /// Lets pages of each level leave, and a share of them come back.
    fn live(order: &mut Order, turns: u64, of_levels: [(u64, f32); LEVELS]) {
        let mut seen = order.seen;
        for _ in 0..turns {
            for (level, (pages, share)) in of_levels.into_iter().enumerate() {
                for _ in 0..pages {
                    while order.judge(level as u8, PASSES_MAX, 0) != Verdict::Leaves {}
                }
                seen.returned[level] += (pages as f32 * share) as u64;
            }
            order.tend(seen, CAPACITY);
        }
    }

    #[test]
    fn levels_rise_with_returns_and_fall_with_one_absence() {
        let mut level = 0;
        for expected in [1, 2, 3, 3] {
            level = level_of_return(level, CAPACITY - 1, CAPACITY);
            assert_eq!(level, expected);
        }
        assert_eq!(level_of_return(level, CAPACITY, CAPACITY), 0);
        assert!(is_return(CAPACITY / HORIZON - 1, CAPACITY));
        assert!(!is_return(CAPACITY / HORIZON, CAPACITY));
    }

    #[test]
    fn pages_of_a_level_that_comes_back_stay_and_those_of_others_leave_immediately() {
        let mut order = Order::default();
        live(&mut order, 200, [(40, 0.1), (0, 0.0), (0, 0.0), (40, 0.9)]);
        assert_eq!(order.judge(3, PASSES_MAX - 1, 0), Verdict::Stays { passes: PASSES_MAX });
        let stays = |verdict| matches!(verdict, Verdict::Stays { passes: 1.. });
        assert!((0..100).all(|_| !stays(order.judge(0, 0, 0))), "{order:?}");
        // The program turns to other pages.
        live(&mut order, 200, [(40, 0.5), (0, 0.0), (0, 0.0), (40, 0.0)]);
        assert!((0..100).all(|_| !stays(order.judge(3, 0, 0))), "{order:?}");
    }

    #[test]
    fn levels_that_come_back_alike_have_the_same_tenure() {
        let mut order = Order::default();
        live(&mut order, 200, [(20, 0.5); LEVELS]);
        assert_eq!(order.tenure, [1.0; LEVELS]);
    }

    #[test]
    fn a_search_ends_however_long_the_tenures() {
        let mut order = Order { tenure: [PASSES_MAX.into(); LEVELS], ..Order::default() };
        let mut passes = 0;
        let rounds = (0..).take_while(|round| match order.judge(3, passes, *round) {
            Verdict::Stays { passes: more } => {
                passes = more;
                true
            }
            Verdict::Leaves => false,
        });
        assert!(rounds.count() <= 5);
    }

    #[test]
    fn a_copy_is_kept_where_pages_stay_clean_and_seldom_come_back() {
        let mut order = Order::default();
        let kept = |order: &Order| [0, 3].map(|level| order.keeps_copies(CAPACITY)[level]);
        assert_eq!(kept(&order), [false, false], "nothing is known before the hand came round");
        live(&mut order, 100, [(64, 0.02), (0, 0.0), (0, 0.0), (0, 0.0)]);
        order.end_pass();
        order.in_pass = CAPACITY as f32;
        (order.compared, order.unchanged) = (100.0, 90.0);
        assert_eq!(kept(&order), [true, true]);
        order.unchanged = 10.0;
        assert_eq!(kept(&order), [false, false], "it would be compressed again anyhow");
        order.unchanged = 90.0;
        live(&mut order, 100, [(40, 0.1), (0, 0.0), (0, 0.0), (40, 0.9)]);
        assert_eq!(kept(&order), [false, false], "its room holds a page that comes back");
    }
}
