//! Several processes of a tree, as numbers: they grow, ask, are taken over, pin pages, starve, are
//! suspended and die at any step. All decisions are the library's own, and the shares are the
//! tree's. Time advances by milliseconds, and everything else follows from a seed.

use crate::decide::{self, Action, COST, Managed, Observation, Unmanaged, decide};
use uzswap_policy::idle::{EVERY, FaultCounts, Idleness};
use uzswap_tree::share::{Allowance, FAVOUR, Other, Own, share};
use uzswap_tree::{MANAGED_MIN, SILENT_MAX};

const MIB: u64 = 1 << 20;
/// Bytes that a program asks for between two checks.
const OFTEN: u64 = 4 * MIB;
/// Bytes that a pager takes out in a millisecond.
const RECLAIMED: u64 = MIB;
/// Bytes of pages that are moving in the least budget.
const MOVING: u64 = MIB;
/// Memory shrinks to this part when it is compressed.
const COMPRESSED: u64 = 3;
/// The longest history, in milliseconds.
const END: u64 = 60_000;
/// Looks of 100 ms, during which all may exceed their allowance: while calls are looked for, while
/// a process is taken over, and while pages leave.
const LOOKS: u64 = 4;

/// Numbers by chance (SplitMix64).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }

    fn is_one_in(&mut self, count: u64) -> bool {
        self.next().is_multiple_of(count)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    Unwatched,
    Watched,
    Wanted,
    /// Memory is being adopted until this time.
    Adopting {
        until: u64,
        budget: u64,
    },
    Managed,
    Refused,
    Over,
}

#[derive(Clone, Debug)]
struct Member {
    begins: u64,
    /// The millisecond in which the process is killed, whatever it does.
    dies: u64,
    is: Is,
    /// Memory that the program has written. `goal`, the next field, is the memory with which the
    /// program ends.
    data: u64,
    goal: u64,
    /// Bytes that the program writes in a millisecond.
    speed: u64,
    /// It asks before it writes. Otherwise it has been watched from the start.
    asks: bool,
    cannot_be_taken_over: bool,
    /// Room for compressed pages beside the budget.
    backing: u64,
    knows_calls: bool,
    asked: u64,
    /// The time until which a thread waits for the take-over.
    waits_until: u64,
    next_look: u64,
    reserved: u64,
    budget: u64,
    /// Pages of the pager's, and the empty cache.
    resident: u64,
    cache: u64,
    /// Bytes that a call has pinned; then `call`, the further bytes that it needs.
    pinned: u64,
    call: u64,
    /// Pages that the pager found unable to leave.
    stuck: u64,
    is_starved: bool,
    hopeless: u32,
    is_patient: bool,
    held_until: u64,
    idleness: Idleness,
    next_count: u64,
    /// Milliseconds for which the process has had more than its allowance, without a pager.
    beyond: u64,
}

impl Member {
    fn by(chance: &mut Chance) -> Self {
        let asks = !chance.is_one_in(3);
        Self {
            begins: chance.between(0, 3000),
            dies: if chance.is_one_in(3) { chance.between(0, 10_000) } else { u64::MAX },
            is: if asks { Is::Unwatched } else { Is::Watched },
            data: 0,
            goal: chance.between(1, 200) * MIB,
            speed: 1 << chance.between(14, 22),
            asks,
            cannot_be_taken_over: chance.is_one_in(8),
            backing: chance.between(0, 1) * chance.between(0, 400) * MIB,
            knows_calls: false,
            asked: 0,
            waits_until: 0,
            next_look: 0,
            reserved: 0,
            budget: 0,
            resident: 0,
            cache: chance.between(2, 7) * MIB,
            pinned: 0,
            call: 0,
            stuck: 0,
            is_starved: false,
            hopeless: 0,
            is_patient: true,
            held_until: 0,
            idleness: Idleness::default(),
            next_count: 0,
            beyond: 0,
        }
    }

    fn lives(&self, now: u64) -> bool {
        self.begins <= now && self.is != Is::Over
    }

    fn used(&self) -> u64 {
        match self.is {
            Is::Managed => self.resident + COST,
            Is::Over => 0,
            _ => self.data,
        }
    }

    /// Memory that it has in spite of every order.
    fn floor(&self) -> u64 {
        match self.is {
            Is::Refused => 0,
            Is::Managed => decide::least_managed(COST, self.pager_least()),
            _ => decide::least_unmanaged(self.data),
        }
    }

    fn pager_least(&self) -> u64 {
        self.cache + self.stuck + MOVING
    }

    /// Memory in addition to the budget: the others get their shares as if this process gave its
    /// memory back.
    fn on_top(&self) -> u64 {
        if self.is == Is::Refused { self.data } else { 0 }
    }

    fn out_most(&self) -> u64 {
        (self.budget / 2 + self.backing) * COMPRESSED
    }

    /// Writes for a millisecond.
    fn run(&mut self, now: u64) {
        if self.is == Is::Wanted {
            assert!(now < self.waits_until, "a thread that asks waits in vain: {self:?}");
            return;
        }
        if now < self.held_until {
            return;
        }
        let more = self.speed.min(self.goal - self.data);
        if self.is == Is::Managed {
            if self.call > 0 {
                return self.go_on_with_call();
            }
            let out = self.data + more - self.resident.min(self.data + more);
            self.is_starved = self.resident + more > self.budget && out > self.out_most();
            if self.is_starved {
                if !self.is_patient {
                    // The program ends with a message that no memory is left.
                    self.is = Is::Over;
                }
                return;
            }
            self.resident = (self.resident + more).min(self.budget.max(self.resident));
        }
        self.data += more;
        if self.asks {
            self.asked += more;
        }
        if self.data == self.goal {
            self.is = Is::Over;
        }
    }
}

impl Member {
    /// Pins more pages for a call, which ends when all are present. The empty cache and pinned
    /// pages cannot leave.
    fn go_on_with_call(&mut self) {
        // The process pins one page after another. With its least memory, the next pages have room.
        let more = self.speed.min(self.call).min(MOVING);
        let is_stuck = self.cache + self.pinned + more > self.budget;
        assert!(!is_stuck || self.is_patient, "it ends for want of its least: {self:?}");
        self.is_starved = is_stuck;
        self.stuck = if is_stuck { self.pinned } else { 0 };
        if is_stuck {
            return;
        }
        self.pinned += more;
        self.call -= more;
        self.resident = self.resident.max(self.pinned);
        if self.call == 0 {
            self.pinned = 0;
        }
    }
}

struct World {
    seed: u64,
    total: u64,
    now: u64,
    all: Vec<Member>,
    chance: Chance,
    /// The mean number of milliseconds between two calls that pin pages.
    call_every: u64,
    /// The favour of the first processes, which changes by chance.
    favour: u64,
    /// Milliseconds since all have had more than they may.
    beyond: u64,
    managed: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut chance = Chance(seed);
        let total = chance.between(32, 256) * MIB;
        let all = (0..chance.between(1, 9)).map(|_| Member::by(&mut chance)).collect();
        Self { seed, total, now: 0, all, chance, call_every: 500, favour: 0, beyond: 0, managed: 0 }
    }

    /// Four to nine processes whose least memory together exceeds the budget, each with room on the
    /// backing.
    fn crowded(seed: u64) -> Self {
        let mut world = Self::new(seed);
        let count = world.chance.between(4, 9);
        (world.total, world.call_every) = (32 * MIB, 50);
        world.all = (0..count).map(|_| Member::by(&mut world.chance)).collect();
        for process in &mut world.all {
            (process.begins, process.dies, process.goal) = (0, u64::MAX, 60 * MIB);
            (process.cannot_be_taken_over, process.backing) = (false, 400 * MIB);
            process.speed = 1 << 17;
        }
        world
    }

    fn allowance(&self, of: usize) -> Allowance {
        let other = |(at, process): (usize, &Member)| {
            let used = process.used();
            let is_counted = at != of && process.lives(self.now) && used >= SILENT_MAX;
            is_counted.then_some(Other {
                used,
                reserved: process.reserved,
                least: process.floor(),
                is_starved: process.is_starved,
                is_left_alone: false,
                is_behind: at > of,
                is_idle: false,
                is_before: (process.begins, at) < (self.all[of].begins, of),
            })
        };
        let others: Vec<_> = self.all.iter().enumerate().filter_map(other).collect();
        let small = |process: &&Member| process.lives(self.now) && process.used() < SILENT_MAX;
        let silent: u64 = self.all.iter().filter(small).map(Member::used).sum();
        let own = &self.all[of];
        let own = Own {
            used: own.used(),
            least: own.floor(),
            is_starved: own.is_starved,
            favour: self.favour,
            is_idle: false,
            cpus: 2,
        };
        share(self.total.saturating_sub(silent), own, &others)
    }

    /// The program has asked for much: see `request.rs`.
    fn request(&mut self, of: usize) {
        let allowance = self.allowance(of).bytes;
        let now = self.now;
        let process = &mut self.all[of];
        process.asked = 0;
        let wanted = process.data + OFTEN;
        if wanted < SILENT_MAX || !matches!(process.is, Is::Unwatched | Is::Watched) {
            return;
        }
        process.is = Is::Watched;
        process.reserved = COST;
        if decide::is_too_much(wanted, allowance) {
            process.is = Is::Wanted;
            process.waits_until = now + decide::PATIENCE.as_millis() as u64;
            process.next_look = process.next_look.min(now + 1);
        }
    }

    /// The watching thread looks, and acts.
    fn look(&mut self, of: usize) {
        let (now, given) = (self.now, self.allowance(of));
        let process = &mut self.all[of];
        let seen = match process.is {
            Is::Managed => Observation::Managed(Managed {
                is_starved: process.is_starved,
                may_hope: given.may_hope,
                hopeless: process.hopeless,
                is_suspended: now < process.held_until,
                is_slowed: decide::is_slowed(given.ahead, 2, now, of as u64),
                is_read: false,
                is_recorded: false,
                allowance: given.bytes,
                soon: given.soon,
                kept_idle: process.idleness.most(),
                shared: 0,
                whole_most: u64::MAX,
                besides: COST,
                budget: process.budget,
                least: process.pager_least(),
            }),
            is => Observation::Unmanaged(Unmanaged {
                is_wanted: is == Is::Wanted,
                is_refused: is == Is::Refused,
                is_recorded: false,
                used: process.data,
                allowance: given.bytes,
            }),
        };
        let wait = match decide(&seen) {
            Action::TakeOver { budget } => {
                process.is = Is::Adopting { until: now + self.chance.between(5, 100), budget };
                return;
            }
            Action::LookAhead { wait } => {
                let took = if process.knows_calls { 0 } else { self.chance.between(10, 130) };
                process.knows_calls = true;
                wait.as_millis() as u64 + took
            }
            Action::Wait { wait } => wait.as_millis() as u64,
            Action::Keep(keep) => {
                process.hopeless = keep.hopeless;
                process.is_patient = keep.is_patient;
                process.budget = keep.budget.unwrap_or(process.budget);
                if now >= process.next_count {
                    // Every second process is idle; the others fault by chance.
                    let own = if of.is_multiple_of(2) { 0 } else { self.chance.between(0, 100) };
                    let faults = FaultCounts { own, others: 1000, processes: 3 };
                    let used = process.used();
                    process.idleness = match process.is_starved || now < process.held_until {
                        true => Idleness::default(),
                        false => process.idleness.after(faults, used),
                    };
                    process.next_count = now + EVERY.as_millis() as u64;
                }
                keep.wait.as_millis() as u64
            }
            other => panic!("{other:?} of {seen:?}"),
        };
        process.next_look = now + wait;
    }

    fn step(&mut self) {
        self.now += 1;
        if self.chance.is_one_in(3000) {
            self.favour = self.chance.between(0, FAVOUR);
        }
        for of in 0..self.all.len() {
            let now = self.now;
            let process = &mut self.all[of];
            if !process.lives(now) {
                continue;
            }
            if now >= process.dies {
                process.is = Is::Over;
                continue;
            }
            if self.chance.is_one_in(10_000) && process.is == Is::Managed {
                process.held_until = now + self.chance.between(1, 2000);
            }
            if process.call == 0 && self.chance.is_one_in(self.call_every) {
                process.call = self.chance.between(1, 12) * MIB;
            }
            process.run(now);
            if let Is::Adopting { until, budget } = process.is
                && now >= until
            {
                process.reserved = 0;
                process.is = if process.cannot_be_taken_over { Is::Refused } else { Is::Managed };
                process.budget = budget;
                process.resident = process.data;
                process.next_look = now;
                self.managed += 1;
            }
            let process = &mut self.all[of];
            if process.is == Is::Managed && process.resident > process.budget {
                process.resident = process.resident.saturating_sub(RECLAIMED).max(process.budget);
            }
            if process.asked >= OFTEN {
                self.request(of);
            }
            let process = &self.all[of];
            let is_watched = !matches!(process.is, Is::Unwatched | Is::Adopting { .. } | Is::Over);
            if is_watched && now >= process.next_look {
                self.look(of);
            }
        }
        self.check();
    }

    fn check(&mut self) {
        let live = || self.all.iter().filter(|process| process.lives(self.now));
        let sum: u64 = live().map(Member::used).sum();
        let floor: u64 = live().map(Member::floor).sum();
        let on_top: u64 = live().map(Member::on_top).sum();
        // A budget that is nearly right stays.
        let most = self.total.max(floor) + on_top + self.total / 32;
        self.beyond = if sum > most { self.beyond + 1 } else { 0 };
        let all = &self.all;
        assert!(self.beyond < LOOKS * 100, "seed {}: {sum} of {most} bytes: {all:#?}", self.seed);
        for of in 0..self.all.len() {
            let allowance = self.allowance(of).bytes;
            let process = &mut self.all[of];
            let is_unmanaged = matches!(process.is, Is::Unwatched | Is::Watched | Is::Wanted);
            let is_beyond = is_unmanaged && process.data >= MANAGED_MIN && process.data > allowance;
            process.beyond = if is_beyond { process.beyond + 1 } else { 0 };
            assert!(process.beyond < LOOKS * 100, "nobody takes it over: {process:?}");
        }
    }
}

/// None of the processes ends with a message, and none waits for ever.
#[test]
fn processes_that_need_more_than_the_budget_all_go_on() {
    for seed in 0..100 {
        let mut world = World::crowded(seed);
        while world.all.iter().any(|process| process.is != Is::Over) {
            assert!(world.now < END, "seed {seed}: {:#?}", world.all);
            world.step();
        }
        let is_whole = |process: &Member| process.data == process.goal;
        assert!(world.all.iter().all(is_whole), "seed {seed}: {:#?}", world.all);
    }
}

/// Every history ends. A thread that waits for memory gets it, or its program ends with a message.
#[test]
fn processes_that_share_a_budget_keep_it_and_none_waits_for_ever() {
    let mut managed = 0;
    for seed in 0..300 {
        let mut world = World::new(seed);
        while world.now < 4000 || world.all.iter().any(|process| process.is != Is::Over) {
            assert!(world.now < END, "seed {seed}: {:#?}", world.all);
            world.step();
        }
        managed += world.managed;
    }
    assert!(managed > 300, "{managed} were taken over");
}
