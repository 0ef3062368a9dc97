//! The share of time in which processes wait for memory.

use std::fs;
use std::time::{Duration, Instant};
use uzswap_sys::cgroup::{Group, Version};
use uzswap_sys::pressure;
use uzswap_sys::process::{self, Activity};

/// The share is averaged over this time.
const AVERAGED: Duration = Duration::from_secs(10);

/// The processes that are watched.
#[derive(Debug, Clone)]
pub enum Processes {
    /// All processes in a group.
    Of(Group),
    /// A process and its descendants.
    From(i32),
}

impl Processes {
    /// Their process numbers.
    pub fn list(&self) -> Vec<i32> {
        match self {
            Self::Of(group) => group.processes(),
            Self::From(pid) => process::tree(*pid),
        }
    }

    fn major_faults(&self) -> u64 {
        match self {
            Self::Of(group) => group.usage().major_faults,
            Self::From(_) => {
                let activities = self.list().into_iter().filter_map(Activity::of);
                activities.map(|activity| activity.major_faults).sum()
            }
        }
    }

    /// The kernel's figure (PSI), for groups of version 2 unless the kernel was booted with
    /// `psi=0`.
    fn told(&self) -> Option<f64> {
        match self {
            Self::Of(group) if group.version() == Version::V2 => {
                let told = fs::read_to_string(group.path().join("memory.pressure")).ok()?;
                pressure::average(&told, "some")
            }
            _ => None,
        }
    }
}

/// The share of time in which processes wait for memory. Without the kernel's figure we estimate
/// it: the share of looks at which a thread waited for a device, with major faults since the last
/// look.
pub struct Pressure {
    processes: Processes,
    major_faults: u64,
    share: f64,
    looked: Instant,
}

impl Pressure {
    /// Watches processes, which count as not waiting at first.
    pub fn on(processes: Processes) -> Self {
        let major_faults = processes.major_faults();
        Self { major_faults, processes, share: 0.0, looked: Instant::now() }
    }

    /// Looks, several times a second. Returns the share of the last ten seconds, percent.
    pub fn look(&mut self) -> f64 {
        if let Some(share) = self.processes.told() {
            return share;
        }
        let major_faults = self.processes.major_faults();
        let faults = major_faults > self.major_faults;
        self.major_faults = major_faults;
        let waits = faults && self.processes.list().into_iter().any(process::has_waiting_thread);
        // Weighted by time, since a limit that the kernel is slow to set delays the next look.
        let time = std::mem::replace(&mut self.looked, Instant::now()).elapsed();
        let weight = 1.0 - (-time.as_secs_f64() / AVERAGED.as_secs_f64()).exp();
        self.share += weight * (if waits { 100.0 } else { 0.0 } - self.share);
        self.share
    }
}
