//! `uzswap simulate --fleet`: the memory that many machines would save, by the traces of programs.
//!
//! Nobody has published recordings of a fleet. So each machine here runs some of the given
//! programs. The result stands beside the figures that others have published of their fleets.

use crate::cli::{ReadTime, SimulateArguments};
use crate::commands::simulate::{PART, least, read, replay, short};
use crate::error::Failure;
use crate::stdio::show;
use std::path::Path;
use uzswap_policy::replay::{PAGE_BYTES, Policy, Step};
use uzswap_trace::Steps;

/// The machines, and the programs that each runs at a time.
const MACHINES: usize = 1000;
const PROGRAMS: usize = 20;

/// A program, with the memory of all its pages and the least in which it runs well.
struct Simulated {
    name: String,
    alone: u64,
    least: u64,
    /// The number of pages that come back in a second of the program's own time.
    back: f64,
}

/// Prints a line for each program, and the sums of the fleet.
pub fn fleet(arguments: &SimulateArguments) -> Result<(), Failure> {
    let policy = arguments.policy.first().copied().unwrap_or(Policy::ORDER);
    let files = [&arguments.file].into_iter().chain(&arguments.fleet);
    let all = files
        .map(|file| program(file, policy, arguments.backing))
        .collect::<Result<Vec<_>, _>>()?;
    show!("{:16} {:>9} {:>9} {:>6} {:>14}", "program", "alone", "least", "saved", "back a minute");
    for one in &all {
        let Simulated { name, alone, least, .. } = one;
        let (saved, back) = (saved(*alone, *least), minute(one.back, *alone));
        let (alone, least) = (short(*alone), short(*least));
        show!("{name:16} {alone:>9} {least:>9} {saved:>4.0} % {back:>12.0} %");
    }
    for line in summary(&all, policy) {
        show!("{line}");
    }
    Ok(())
}

fn program(file: &Path, policy: Policy, backing: ReadTime) -> Result<Simulated, Failure> {
    let (trace, steps) = read(file)?;
    let alone = most_pages(&steps) * PAGE_BYTES;
    let least = least(&trace, &steps, policy, backing).min(alone);
    // With memory for all pages, none leaves.
    let faults = if least < alone { replay(policy, &steps, (least, backing)).faults() } else { 0 };
    let back = faults as f64 / (steps.micros.max(1) as f64 / 1e6);
    Ok(Simulated { name: trace.header.program, alone, least, back })
}

/// The most pages that a program has at a time.
fn most_pages(steps: &Steps) -> u64 {
    let mut lives = vec![false; steps.pages];
    let (mut now, mut most) = (0u64, 0);
    for step in &steps.all {
        let (page, is_alive) = match *step {
            Step::Touch { page, .. } => (page, true),
            Step::Gone { page } => (page, false),
        };
        let was = std::mem::replace(&mut lives[page as usize], is_alive);
        now = now + u64::from(is_alive) - u64::from(was);
        most = most.max(now);
    }
    most
}

/// Percent of its memory that a program does without.
fn saved(alone: u64, least: u64) -> f64 {
    (alone - least) as f64 * 100.0 / alone as f64
}

/// The pages that come back in a minute, in percent of the memory.
fn minute(back: f64, alone: u64) -> f64 {
    back * 60.0 * PAGE_BYTES as f64 * 100.0 / alone as f64
}

fn summary(all: &[Simulated], policy: Policy) -> Vec<String> {
    let mut noise = 1u64;
    let mut next = || {
        noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (noise >> 33) as usize % all.len()
    };
    let mut machines: Vec<(f64, f64)> = (0..MACHINES)
        .map(|_| {
            let (mut alone, mut least, mut back) = (0, 0, 0.0);
            for one in (0..PROGRAMS).map(|_| &all[next()]) {
                (alone, least, back) = (alone + one.alone, least + one.least, back + one.back);
            }
            (saved(alone, least), minute(back, alone))
        })
        .collect();
    machines.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mean = |part: fn(&(f64, f64)) -> f64| {
        machines.iter().map(part).sum::<f64>() / machines.len() as f64
    };
    let (low, high) = (machines[MACHINES / 20].0, machines[MACHINES - MACHINES / 20].0);
    vec![
        format!(
            "a fleet of {MACHINES} machines saves {:.0} % of its memory (nine of ten machines {low:.0} \
             to {high:.0} %), and {:.0} % of it comes back each minute",
            mean(|machine| machine.0),
            mean(|machine| machine.1)
        ),
        format!(
            "assumed: each machine runs {PROGRAMS} of these programs, chosen alike, all the time; \
             each has the least memory with which faults take less than {:.0} % of its time, under \
             {policy}",
            PART * 100.0
        ),
        "published: 20 to 32 % saved (Meta, TMO, 2022); 32 % not used for two minutes, and 0.2 % \
         brought back a minute at most (Google, software-defined far memory, 2019)"
            .to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_one_program_save_as_much_as_the_program() {
        let one = Simulated { name: "one".into(), alone: 4000, least: 3000, back: 0.1 };
        let lines = summary(&[one], Policy::ORDER);
        assert!(lines[0].starts_with("a fleet of 1000 machines saves 25 % of its memory"));
        assert!(
            lines[0].contains("(nine of ten machines 25 to 25 %), and 614 % of it"),
            "{}",
            lines[0]
        );
        assert_eq!(lines.len(), 3);
    }
}
