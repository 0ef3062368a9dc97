//! Brings running programs below a limit: a group by the group's own limit, processes that share
//! their group by paging them out from here.
//!
//! On version 2 of the cgroup interface the limit is `memory.high`, above which the kernel kills no
//! process. On version 1 there is one limit, which is raised while the group cannot keep to it
//! (relief.rs).

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

/// The step by which the limit comes down: its share of the goal, and its least size.
const STEP_DIVISOR: u64 = 16;
const STEP_BYTES_MIN: u64 = 4 << 20;

/// The share of time that processes may wait for memory, percent of ten seconds.
const WAITING_MAX: f64 = 50.0;

/// The time for which the limit stays up after the processes waited more than [`WAITING_MAX`].
const REST: Duration = Duration::from_secs(10);

/// Bytes that are paged out between two looks at the effect.
const CHUNK_BYTES: usize = 4 << 20;

/// How the squeezed processes fare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mood {
    /// The processes wait little.
    Good,
    /// The processes wait for memory more than they may.
    Bad,
    /// The processes waited a short time ago.
    Resting,
}

/// Watches the mood of processes.
pub struct PressureWatch {
    name: String,
    pressure: Pressure,
    rests_until: Option<Instant>,
}

impl PressureWatch {
    /// Watches processes that have this name for people.
    pub fn over(processes: Processes, name: &str) -> Self {
        Self { name: name.to_owned(), pressure: Pressure::on(processes), rests_until: None }
    }

    /// Returns the mood; called five times a second.
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

/// A target whose memory is to fall below a goal.
pub trait Squeeze {
    /// True if a process of the target is left.
    fn is_there(&self) -> bool;
    /// Bytes in memory.
    fn current(&self) -> u64;
    /// Acts; called five times a second.
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

/// The attributes that `attach` changes, the limit first.
pub fn attributes(group: &Group) -> Vec<(PathBuf, String)> {
    let other = group.path().join(match group.version() {
        Version::V1 => "memory.oom_control",
        Version::V2 => "memory.zswap.max",
    });
    let read = |path: PathBuf| {
        let text = fs::read_to_string(&path).ok()?;
        // memory.oom_control has several lines, and the first is the killer's switch.
        let value = text.lines().next()?.trim_start_matches("oom_kill_disable ").trim();
        Some((path, value.to_owned()))
    };
    [limit_file(group), other].into_iter().filter_map(read).collect()
}

/// A group that is not ours. Only one of its limits is changed.
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

pub struct SqueezeGroup {
    group: Group,
    relief: Relief<Borrowed>,
    goal: u64,
    /// The present limit, on its way to the goal.
    limit: u64,
}

impl SqueezeGroup {
    /// `before`: the attributes as the keeper has written them down.
    pub fn new(group: &Group, goal: u64, before: &[(PathBuf, String)]) -> Result<Self, Failure> {
        // From here on no other process attaches, but another process may have attached before.
        if attributes(group) != before {
            let path = group.path().display();
            return Err(Failure::new(format!("the limits of {path} have just changed; try again")));
        }
        if ledger::zswap_is_on() {
            // Without such an attribute, the keeper has switched zswap off.
            group.refuse_zswap();
        }
        let limit = group.usage().current.max(goal);
        // An error means that the value is "max".
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
                // At most a step below the present usage: swapping out takes time.
                let next = self.limit.min(self.current()).saturating_sub(step(self.goal));
                self.limit = next.max(self.goal);
            }
        }
        self.relief.set_limit(self.limit);
        self.relief.tick();
    }
}

/// Squeezes a process and its descendants, in a group with others. No limit is set. Memory above
/// the goal is paged out, in order of addresses, and comes back when it is used.
pub struct SqueezeProcess {
    pid: i32,
    goal: u64,
    /// The place at which the next step begins: an index in the list of processes, and an address.
    next: (usize, usize),
}

impl SqueezeProcess {
    /// Will page out a process and its descendants, down to `goal` bytes.
    pub fn new(pid: i32, goal: u64) -> Self {
        Self { pid, goal, next: (0, 0) }
    }

    /// Pages out this many bytes, or all bytes if there are fewer.
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
                    // An error means that the range is locked or unmapped, or the process is gone.
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
