//! The base of all benchmarks: sizes, rounds in which configurations take turns, and the report.
//!
//! A benchmark is a module with a function `run(&Bench, &Arguments) -> Result<Section, Failure>`,
//! a line in `main.rs`, and its smoke size in tests/tests/show/bench.rs. It measures with
//! [`Bench::take_turns`].

use crate::error::{Context, Failure};
use crate::figures::median;
use crate::machine::{self, Lock};
use crate::report::{Report, Section};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Options of every benchmark.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Fewer rounds of smaller sizes: all benchmarks in a quarter of an hour.
    #[arg(long, global = true)]
    pub quick: bool,
    /// The smallest sizes, to see that everything works.
    #[arg(long, global = true, hide = true, conflicts_with = "quick")]
    pub smoke: bool,
    /// Rounds; each measures every configuration once.
    #[arg(long, global = true, value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: Option<u16>,
    /// Folder for report.md, report.html and results.json. Sections of other benchmarks there stay.
    #[arg(long, global = true, value_name = "DIR")]
    pub report: Option<PathBuf>,
}

/// A flag that SIGINT and SIGTERM set. A benchmark checks it between two steps.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn catch() -> Result<Self, Failure> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, flag.clone()).context("signals")?;
        }
        Ok(Self(flag))
    }

    /// True if a signal came.
    pub fn came(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// An error if a signal came.
    pub fn check(&self) -> Result<(), Failure> {
        match self.came() {
            true => Err(Failure::new("interrupted; the machine is as it was")),
            false => Ok(()),
        }
    }
}

/// One of the compared configurations.
pub trait Candidate {
    /// Its name in tables.
    fn name(&self) -> String;
    /// The reason why the candidate cannot be measured here, if there is one.
    fn missing(&self) -> Option<String> {
        None
    }
}

/// The measurements of one candidate.
#[derive(Debug, Serialize)]
pub struct Turns<T> {
    pub name: String,
    /// The reason why values are missing, if some are.
    pub missing: Option<String>,
    /// One value a round.
    pub rounds: Vec<T>,
}

impl<T> Turns<T> {
    /// The median of a figure over the rounds; NaN if it was not measured.
    pub fn median(&self, figure: impl Fn(&T) -> f64) -> f64 {
        median(self.rounds.iter().map(figure))
    }

    /// The median, over the rounds, of a figure of this value and the other's in the same round.
    /// The machine's other load affects both values.
    pub fn paired(&self, other: &Self, figure: impl Fn(&T, &T) -> f64) -> f64 {
        median(self.rounds.iter().zip(&other.rounds).map(|(own, other)| figure(own, other)))
    }

    /// A row of a table: the name and `cells`, or the name and the reason why there are no values.
    pub fn row(&self, cells: impl FnOnce(&Self) -> Vec<String>) -> Vec<String> {
        let mut row = vec![self.name.clone()];
        match &self.missing {
            Some(why) => row.push(why.clone()),
            None => row.extend(cells(self)),
        }
        row
    }
}

/// A running benchmark, or several.
pub struct Bench {
    options: Options,
    /// Checked between steps.
    pub interrupt: Interrupt,
    report: RefCell<Report>,
    prefix: RefCell<String>,
    /// Failures since the last section.
    failed: RefCell<Vec<String>>,
    _lock: Lock,
}

impl Bench {
    /// Checks that the report can be written, and undoes the changes of a benchmark that was
    /// killed.
    pub fn begin(options: &Options) -> Result<Self, Failure> {
        let report = Report::open(options.report.as_deref())?;
        let lock = machine::recover()?;
        Ok(Self {
            options: options.clone(),
            interrupt: Interrupt::catch()?,
            report: RefCell::new(report),
            prefix: RefCell::new(String::new()),
            failed: RefCell::default(),
            _lock: lock,
        })
    }

    /// The value for the requested size.
    pub fn pick<T>(&self, smoke: T, quick: T, full: T) -> T {
        match (self.options.smoke, self.options.quick) {
            (true, _) => smoke,
            (_, true) => quick,
            _ => full,
        }
    }

    /// The number of rounds: as requested, or one, `quick` or `full`.
    pub fn rounds(&self, quick: usize, full: usize) -> usize {
        self.options.rounds.map_or(self.pick(1, quick, full), usize::from)
    }

    /// Sets the name of the running measurement, which stands before the bar.
    pub fn label(&self, text: &str) {
        *self.prefix.borrow_mut() = text.to_owned();
    }

    /// A bar with the remaining time.
    pub fn progress(&self, steps: usize) -> ProgressBar {
        let bar = ProgressBar::new(steps as u64);
        let template = "{prefix} {wide_bar} {pos}/{len} {msg}, {eta} left";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_prefix(self.prefix.borrow().clone());
        bar.enable_steady_tick(std::time::Duration::from_millis(250));
        bar
    }

    /// Measures every candidate once a round, in turns: A B C, A B C. A candidate that fails is not
    /// measured again. The measurement of the others continues, so that hours of work are not lost.
    pub fn take_turns<C: Candidate, T>(
        &self,
        candidates: &[C],
        rounds: usize,
        measure: impl FnMut(&C) -> Result<T, Failure>,
    ) -> Result<Vec<Turns<T>>, Failure> {
        self.take_turns_until(candidates, |_| rounds, |_| false, measure)
    }

    /// Measures candidates in turn, each for its own number of rounds. A candidate is not measured
    /// again after a value for which `is_last` is true.
    pub fn take_turns_until<C: Candidate, T>(
        &self,
        candidates: &[C],
        rounds: impl Fn(&C) -> usize,
        is_last: impl Fn(&T) -> bool,
        mut measure: impl FnMut(&C) -> Result<T, Failure>,
    ) -> Result<Vec<Turns<T>>, Failure> {
        let turns = candidates.iter().map(|candidate| Turns {
            name: candidate.name(),
            missing: candidate.missing(),
            rounds: Vec::new(),
        });
        let mut turns: Vec<_> = turns.collect();
        let bar = self.progress(candidates.iter().map(&rounds).sum());
        for round in 0..candidates.iter().map(&rounds).max().unwrap_or(0) {
            let pairs = candidates.iter().zip(&mut turns);
            for (candidate, turn) in pairs.filter(|(candidate, _)| round < rounds(candidate)) {
                self.interrupt.check()?;
                bar.set_message(turn.name.clone());
                let is_done = turn.missing.is_some() || turn.rounds.last().is_some_and(&is_last);
                match (!is_done).then(|| measure(candidate)) {
                    None => {}
                    Some(Ok(value)) => turn.rounds.push(value),
                    Some(Err(failure)) => {
                        self.interrupt.check()?;
                        self.failed.borrow_mut().push(format!("{}: {failure}", turn.name));
                        turn.missing = Some(format!("failed: {failure}"));
                    }
                }
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(turns)
    }

    /// Prints a section, and updates the report with it. Fails if measurements have failed, which
    /// the report lacks.
    pub fn publish(&self, section: Section) -> Result<(), Failure> {
        println!("{}", section.markdown(None));
        self.report.borrow_mut().add(section)?;
        match self.failed.take() {
            failed if failed.is_empty() => Ok(()),
            failed => Err(Failure::new(failed.join("; "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_one_round() {
        let turns =
            |rounds: &[f64]| Turns { name: "x".into(), missing: None, rounds: rounds.to_vec() };
        // In the last round the machine was busy, which affects both.
        let (a, b) = (turns(&[1.0, 1.1, 8.0]), turns(&[2.0, 2.2, 16.0]));
        assert_eq!(b.paired(&a, |own, other| own / other), 2.0);
        assert!(turns(&[]).median(|value| *value).is_nan());
    }

    #[test]
    fn a_missing_kind_of_swap_is_a_row_with_the_reason() {
        let turns: Turns<f64> =
            Turns { name: "zram".into(), missing: Some("no zram".into()), rounds: Vec::new() };
        assert_eq!(turns.row(|_| vec!["1".into()]), ["zram", "no zram"]);
    }
}
