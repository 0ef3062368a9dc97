//! Reduces a history whose transcripts differ: drops operations while they still differ.

use super::run::{Rig, Setup};
use std::time::{Duration, Instant};

/// Drops lines while `differs` holds, many at first and single lines at the end. A block without
/// the operation above it does nothing, so its lines can be dropped later.
pub fn shrink(rig: &Rig, history: &str, way: Setup, time: Duration) -> String {
    let deadline = Instant::now() + time;
    let mut lines: Vec<String> = history.lines().map(str::to_owned).collect();
    let mut size = lines.len().div_ceil(2);
    loop {
        let (mut at, mut has_dropped) = (0, false);
        while at < lines.len() {
            if Instant::now() > deadline {
                return text(&lines);
            }
            let mut fewer = lines.clone();
            fewer.drain(at..(at + size).min(lines.len()));
            if differs(rig, &text(&fewer), way) {
                (lines, has_dropped) = (fewer, true);
            } else {
                at += size;
            }
        }
        if size == 1 && !has_dropped {
            return text(&lines);
        }
        size = size.div_ceil(2);
    }
}

fn text(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// True if one of three runs in-process differs from two equal runs alone.
pub fn differs(rig: &Rig, history: &str, way: Setup) -> bool {
    let alone = rig.run(history, Setup::Alone).told;
    (0..3).any(|_| rig.run(history, way).told != alone)
        && rig.run(history, Setup::Alone).told == alone
}
