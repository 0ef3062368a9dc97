//! The reason why a run had more memory than its limit.
//!
//! Each process keeps to its share of the limit, except for memory that the agent leaves alone. The
//! report names that memory. A share is never below the least memory of its process. If the least
//! memory of all processes together exceeds the limit, the run exceeds the limit while they all
//! run.
//!
//! A fork begins with pages that it shares with its parent. When a process writes to such a page,
//! the kernel copies the page. uzswap sees no fault, and so cannot make the process wait.

use crate::size;
use serde::Serialize;
use std::fmt;
use uzswap_sys::process::{self, Activity};
use uzswap_tree::{MANAGED_MIN, Member};

/// A run that had more than this share of its limit, percent, gives the reason.
const PERCENT: u64 = 115;

/// The processes of a run, as they were when they exceeded the limit most.
#[derive(Debug, Default, Serialize)]
pub struct Beyond {
    /// Anonymous memory of all processes, bytes.
    pub bytes: u64,
    pub processes: usize,
    /// Processes that were forked and still run the program of their parent.
    pub forks: usize,
    /// Anonymous memory of the forks, bytes.
    pub bytes_of_forks: u64,
    /// Processes whose pages are all in memory for a reader.
    pub whole: usize,
    /// The sum of all processes' least memory in bytes, and the limit.
    pub bytes_least: u64,
    pub limit: u64,
}

impl Beyond {
    /// Keeps the state of these processes if they exceed the limit by more than at any look before.
    pub fn look(&mut self, members: &[Member], limit: u64) {
        let bytes_of = |one: i32, reported: u64| match reported {
            // The process has not reported yet.
            0 => process::anonymous_bytes(one).unwrap_or(0),
            bytes => bytes,
        };
        let whole = members.iter().filter(|member| member.is_wanted_whole).count();
        let members = members.iter().map(|member| {
            let one = member.process as i32;
            let bytes = bytes_of(one, member.used);
            let least = if member.least == 0 { bytes.min(MANAGED_MIN) } else { member.least };
            (one, bytes, least)
        });
        let members: Vec<(i32, u64, u64)> = members.collect();
        let bytes = members.iter().map(|(_, bytes, _)| bytes).sum();
        if bytes <= self.bytes.max(limit) {
            return;
        }
        let is_fork = |one: i32| Activity::of(one).is_some_and(|found| found.is_fork);
        let of_forks: Vec<u64> =
            members.iter().filter(|(one, ..)| is_fork(*one)).map(|(_, bytes, _)| *bytes).collect();
        *self = Self {
            bytes,
            processes: members.len(),
            forks: of_forks.len(),
            bytes_of_forks: of_forks.iter().sum(),
            whole,
            bytes_least: members.iter().map(|(.., least)| least).sum(),
            limit,
        };
    }

    /// For the report of a run that had a peak of `peak` bytes; `None` if the memory that was left
    /// alone explains the peak.
    pub fn of(self, peak: u64, limit: u64, left_alone: u64) -> Option<Self> {
        (peak.saturating_sub(left_alone) > limit / 100 * PERCENT).then_some(self)
    }
}

impl fmt::Display for Beyond {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, processes, forks, bytes_of_forks, whole, bytes_least, limit } = self;
        let is_too_little = bytes_least > limit;
        let [bytes, of_forks, least, limit] =
            [bytes, bytes_of_forks, bytes_least, limit].map(|bytes| size::show(*bytes));
        match (processes, forks) {
            (1.., _) if is_too_little => write!(
                f,
                "{processes} processes had {bytes}: {limit} are too few for so many at once, which \
                 need {least} to go on; raise --memory or start fewer"
            ),
            _ if *whole > 0 => write!(
                f,
                "{whole} of {processes} processes, with {bytes} in all, had all of their pages in \
                 memory for a reader (uzswap status --bring-in)"
            ),
            (0, _) => write!(f, "for less than a fifth of a second, between two looks"),
            (_, 0) => write!(
                f,
                "{processes} processes had {bytes}: as some grew, the shares of the others were cut, \
                 and their pages left only after that"
            ),
            _ => write!(
                f,
                "{forks} of {processes} processes were forks, with {of_forks} of {bytes}: a write \
                 copies a page that a fork shares with its parent, and does not wait for memory"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_says_why_it_exceeded_its_limit_unless_programs_left_alone_explain_it() {
        const MIB: u64 = 1 << 20;
        let seen = || Beyond {
            bytes: 200 * MIB,
            processes: 4,
            forks: 3,
            bytes_of_forks: 150 * MIB,
            whole: 0,
            bytes_least: 60 * MIB,
            limit: 100 * MIB,
        };
        assert!(seen().of(114 * MIB, 100 * MIB, 0).is_none());
        assert!(seen().of(200 * MIB, 100 * MIB, 90 * MIB).is_none());
        let told = seen().of(200 * MIB, 100 * MIB, 0).unwrap().to_string();
        assert!(told.starts_with("3 of 4 processes were forks, with 150 MiB of 200 MiB"), "{told}");
        let told = Beyond { forks: 0, ..seen() }.to_string();
        assert!(told.starts_with("4 processes had 200 MiB"), "{told}");
        let told = Beyond { whole: 1, ..seen() }.to_string();
        assert!(told.starts_with("1 of 4 processes, with 200 MiB in all, had all"), "{told}");
        let told = Beyond { bytes_least: 120 * MIB, ..seen() }.to_string();
        assert!(told.contains("100 MiB are too few for so many at once"), "{told}");
        assert!(told.contains("need 120 MiB to go on; raise --memory or start fewer"), "{told}");
        assert!(Beyond::default().to_string().contains("between two looks"));
    }
}
