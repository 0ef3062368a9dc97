//! Running programs are brought below a limit: a group by its own limit, processes that share their
//! group by paging them out from here.
//!
//! On version 2 of the cgroup interface the limit is `memory.high`, above which nobody is killed.
//! On version 1 there is one limit, which is raised where it cannot be held (relief.rs).

use crate::device::ledger;
use crate::error::Failure;
use crate::policy::pressure::{Pressure, Processes};
use crate::policy::relief::{Limited, Relief};
use crate::stdio::say;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::{Group, Version};
use uzswap_sys::map::Mapped;
use uzswap_sys::process;

/// By how much at a time: as a share of the goal, and at least, bytes.
const STEP_DIVISOR: u64 = 16;
const STEP_BYTES_MIN: u64 = 4 << 20;

/// The share of ten seconds, percent, that processes may wait for memory.
const WAITING_MAX: f64 = 50.0;

/// How long they are left alone after that.
const REST: Duration = Duration::from_secs(10);

/// So much is paged out between two looks at the effect.
const CHUNK_BYTES: usize = 4 << 20;

/// How those fare that are squeezed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    /// Well.
    Good,
    /// They wait for memory more than they may.
    Bad,
    /// They did until a moment ago.
    Resting,
}

/// Tells the mood.
pub struct PressureWatch {
    name: String,
    pressure: Pressure,
    rests_until: Option<Instant>,
}

impl PressureWatch {
    /// Over processes, which people call by a name.
    pub fn over(processes: Processes, name: &str) -> Self {
        Self { name: name.to_owned(), pressure: Pressure::on(processes), rests_until: None }
    }

    /// Looks once, five times a second.
    pub fn look(&mut self) -> Mood {
        let waiting = self.pressure.look();
        if waiting > WAITING_MAX {
            if self.rests_until.is_none() {
                say!(
                    "uzswap: {} waits for memory {waiting:.0} % of the time; it gets more for now",
                    self.name
                );
            }
            self.rests_until = Some(Instant::now() + REST);
            return Mood::Bad;
        }
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return Mood::Resting;
        }
        self.rests_until = None;
        Mood::Good
    }
}

/// A target that is brought below a goal.
pub trait Squeeze {
    /// True if there is a process.
    fn is_there(&self) -> bool;
    /// Bytes in memory.
    fn current(&self) -> u64;
    /// Acts once, five times a second.
    fn tick(&mut self, mood: Mood);
}

fn step(goal: u64) -> u64 {
    (goal / STEP_DIVISOR).max(STEP_BYTES_MIN)
}

/// The file with a group's limit.
pub fn limit_file(group: &Group) -> PathBuf {
    group.path().join(match group.version() {
        Version::V1 => "memory.limit_in_bytes",
        Version::V2 => "memory.high",
    })
}

/// The attributes that are about to be changed, the limit first.
pub fn attributes(group: &Group) -> Vec<(PathBuf, String)> {
    let other = group.path().join(match group.version() {
        Version::V1 => "memory.oom_control",
        Version::V2 => "memory.zswap.max",
    });
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        // Of the killer's switch, which is one of several lines: its value.
        let value = text.lines().next()?.trim_start_matches("oom_kill_disable ").trim();
        Some((path, value.to_owned()))
    };
    [limit_file(group), other].into_iter().filter_map(read).collect()
}

/// A group that is not ours: one limit alone is changed.
struct Borrowed {
    group: Group,
    /// The former limit, bytes.
    most: u64,
}

impl Limited for Borrowed {
    fn waits(&self) -> bool {
        self.group.waits_for_memory()
    }

    fn suspend_oom_killer(&self, suspend: bool) -> io::Result<()> {
        self.group.suspend_oom_killer(suspend)
    }

    fn limit(&self, bytes: u64) -> io::Result<()> {
        fs::write(limit_file(&self.group), bytes.min(self.most).to_string())
    }
}

/// A group.
pub struct SqueezeGroup {
    group: Group,
    relief: Relief<Borrowed>,
    goal: u64,
    /// The present goal.
    limit: u64,
}

impl SqueezeGroup {
    /// `before`: the keeper's record of it.
    pub fn new(group: &Group, goal: u64, before: &[(PathBuf, String)]) -> Result<Self, Failure> {
        // Nobody else attaches from here on, but may have until now.
        if attributes(group) != before {
            let path = group.path().display();
            return Err(Failure::new(format!("the limits of {path} have just changed; try again")));
        }
        if ledger::zswap_is_on() {
            // Without such a switch the keeper has switched it off.
            group.refuse_zswap();
        }
        let limit = group.usage().current.max(goal);
        // Not a number: "max".
        let most = before.first().and_then(|(_, value)| value.parse().ok()).unwrap_or(u64::MAX);
        let relief = Relief::new(Borrowed { group: group.clone(), most }, limit);
        Ok(Self { group: group.clone(), relief, goal, limit })
    }
}

impl Squeeze for SqueezeGroup {
    fn is_there(&self) -> bool {
        self.group.path().exists()
    }

    fn current(&self) -> u64 {
        self.group.usage().current
    }

    fn tick(&mut self, mood: Mood) {
        match mood {
            Mood::Bad => self.limit = self.limit.saturating_add(step(self.goal)),
            Mood::Resting => {}
            Mood::Good => {
                // No further than a step below the present usage: it takes time to swap out.
                let next = self.limit.min(self.current()).saturating_sub(step(self.goal));
                self.limit = next.max(self.goal);
            }
        }
        self.relief.set_limit(self.limit);
        self.relief.tick();
    }
}

/// A process and its descendants, in a group with others. They have no limit: memory above the goal
/// is paged out, in the order of addresses, and comes back as it is used.
pub struct SqueezeProcess {
    pid: i32,
    goal: u64,
    /// Where to go on: a place in the list of processes, and an address.
    next: (usize, usize),
}

impl SqueezeProcess {
    /// Brings it below `goal` bytes.
    pub fn new(pid: i32, goal: u64) -> Self {
        Self { pid, goal, next: (0, 0) }
    }

    /// Pages out so many bytes, or all there are.
    fn page_out(&mut self, bytes: u64) {
        let mut left = bytes;
        let processes = process::tree(self.pid);
        if processes.is_empty() {
            return;
        }
        for _ in 0..=processes.len() {
            let (index, from) = self.next;
            let pid = processes[index % processes.len()];
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            let heap = maps.lines().filter_map(Mapped::parse).filter(Mapped::is_heap);
            let heap = heap.map(|mapped| mapped.range.start.max(from)..mapped.range.end);
            for range in heap {
                for start in range.clone().step_by(CHUNK_BYTES) {
                    let end = range.end.min(start + CHUNK_BYTES);
                    let before = process::anonymous_bytes(pid).unwrap_or(0);
                    // An error: it is locked, unmapped or gone by now.
                    let _ = process::page_out(pid, start..end);
                    let after = process::anonymous_bytes(pid).unwrap_or(0);
                    left = left.saturating_sub(before.saturating_sub(after));
                    self.next = (index, end);
                    if left == 0 {
                        return;
                    }
                }
            }
            self.next = ((index + 1) % processes.len(), 0);
        }
    }
}

impl Squeeze for SqueezeProcess {
    fn is_there(&self) -> bool {
        process::start_time(self.pid).is_some()
    }

    fn current(&self) -> u64 {
        process::tree(self.pid).into_iter().filter_map(process::anonymous_bytes).sum()
    }

    fn tick(&mut self, mood: Mood) {
        let above = self.current().saturating_sub(self.goal);
        if mood == Mood::Good && above > 0 {
            self.page_out(above.min(step(self.goal)));
        }
    }
}
