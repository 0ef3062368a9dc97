//! `locks`, predicted for more CPUs than the machine has.
//!
//! `--count` runs on a machine with many CPUs, which may be emulated. It counts how often locks are
//! taken for a page, how often threads waited for them, and the share of the busiest lock of a
//! kind. `--counts` uses these counts on a machine with real times, where hold times are measured
//! with one thread. The model has a queue for each kind of lock. It has none for kinds with a lock
//! for each CPU: with a thread on each CPU, no thread waits for these. It does not use the waits of
//! `--count`, which are an upper bound: emulated CPUs on few real ones are stopped while they hold
//! locks.

use crate::bench::{Bench, Turns};
use crate::error::{Context, Failure};
use crate::figures::MachineFacts;
use crate::locks::{self, LockRun, LockSetting, LocksArguments, short};
use crate::report::{Section, Table};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use uzswap_engine::PAGE_BYTES;
use uzswap_sync::profile;
use uzswap_sys::cpu;

/// Rows for a setting: the locks that limit it most.
const SHOWN: usize = 3;

/// A lock with fewer acquisitions per page has no row.
const SELDOM: f64 = 0.001;

/// The counts of a machine.
#[derive(Serialize, Deserialize)]
struct LockCounts {
    machine: MachineFacts,
    threads: usize,
    pages: u64,
    settings: Vec<CountedSetting>,
}

#[derive(Serialize, Deserialize)]
struct CountedSetting {
    codec: String,
    backing: String,
    kinds: Vec<LockCount>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct LockCount {
    /// The type that the lock protects.
    name: String,
    acquisitions: u64,
    /// Acquisitions that had to wait.
    waited_for: u64,
    /// Acquisitions of the busiest lock.
    of_the_busiest: u64,
}

/// Kinds with a lock for each CPU.
const PER_CPU: [&str; 2] = ["Scratch", "SlotCache"];

impl LockCount {
    /// The name with its module: some types in several modules have the same name.
    fn shown(&self) -> String {
        let name = short(&self.name);
        self.name.rsplit("::").nth(1).map_or(name.clone(), |module| format!("{module}::{name}"))
    }

    fn of_the_busiest(&self) -> f64 {
        self.of_the_busiest as f64 / self.acquisitions.max(1) as f64
    }
}

/// Counts acquisitions, and writes the counts to a file.
pub fn count(bench: &Bench, arguments: &LocksArguments, file: &Path) -> Result<Section, Failure> {
    let threads = arguments.threads.first().copied().unwrap_or_else(cpu::allowed);
    let (count, pages, ram) = locks::load(bench, arguments)?;
    let stored = count / threads * threads;
    let settings = locks::settings(&[threads]);
    let turns = bench.take_turns(&settings, 1, |setting| {
        profile::tell_apart(true);
        profile::switch(true);
        let swapped_out = locks::swap_out(*setting, count as u32, &pages, &ram);
        profile::switch(false);
        profile::tell_apart(false);
        let kind = |kind: profile::LockProfile| LockCount {
            name: kind.name.to_owned(),
            acquisitions: kind.acquisitions,
            waited_for: kind.contended,
            of_the_busiest: kind.of_the_busiest(),
        };
        swapped_out.map(|_| profile::take().into_iter().map(kind).collect::<Vec<_>>())
    })?;
    let mut section = Section::new("locks", "How often locks are taken").text(format!(
        "{threads} threads store {stored} pages of a Python heap into a cache over memory. Locks that \
         are taken less than once for {:.0} pages are left out. *Waited for* is an upper bound where \
         CPUs are emulated: one that has a lock may stand still with it.",
        1.0 / SELDOM
    ));
    let mut counted = Vec::new();
    for (setting, turn) in settings.iter().zip(turns) {
        // The failure is reported at the end.
        let Some(kinds) = turn.rounds.into_iter().next() else { continue };
        let title = format!("{}, {} backing:", setting.codec, setting.backing);
        section = section.text(title).table(table(kinds.clone(), stored));
        let (codec, backing) = (setting.codec.into(), setting.backing.into());
        counted.push(CountedSetting { codec, backing, kinds });
    }
    let machine = MachineFacts::here();
    let counts = LockCounts { machine, threads, pages: stored as u64, settings: counted };
    let text = serde_json::to_vec(&counts).context("counts")?;
    fs::write(file, text).context(&file.display().to_string())?;
    section.raw("counts", &counts)
}

fn table(mut kinds: Vec<LockCount>, pages: usize) -> Table {
    kinds.retain(|kind| kind.acquisitions as f64 >= SELDOM * pages as f64);
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.acquisitions));
    let rows = kinds.iter().map(|kind| {
        let acquisitions = kind.acquisitions as f64;
        vec![
            kind.shown(),
            format!("{:.3}", acquisitions / pages as f64),
            format!("{:.2}", kind.waited_for as f64 / acquisitions * 100.0),
            format!("{:.1}", kind.of_the_busiest() * 100.0),
        ]
    });
    let header = ["lock", "acquisitions a page", "waited for (%)", "of the busiest one (%)"];
    Table::new(&header, rows.collect())
}

/// The throughput that a kind of lock permits.
struct Bound {
    kb_per_s: f64,
    kind: LockCount,
    held_ns: f64,
}

/// Predicts the throughput from a file of counts.
pub fn predict(bench: &Bench, arguments: &LocksArguments, file: &Path) -> Result<Section, Failure> {
    let what = file.display().to_string();
    let counts: LockCounts = serde_json::from_slice(&fs::read(file).context(&what)?)
        .context(&format!("{what}: --count did not write it"))?;
    let (count, pages, ram) = locks::load(bench, arguments)?;
    let settings = locks::settings(&[1]);
    let rounds = bench.rounds(3, 7);
    let turns = bench.take_turns(&settings, rounds, |setting| {
        locks::measure(*setting, count as u32, &pages, &ram)
    })?;
    let clock_ns = locks::clock_ns();
    let (mut rates, mut bounds) = (Vec::new(), Vec::new());
    for (setting, turn) in settings.iter().zip(&turns) {
        let kinds = counted(&counts, setting)?;
        let one = fastest(turn);
        let own = bounds_of(kinds, &counts, turn, clock_ns);
        let all = one * counts.threads as f64;
        let least = own.first().filter(|bound| bound.kb_per_s < all * 0.995);
        let rate = least.map_or(all, |bound| bound.kb_per_s);
        let name = least.map_or("none".into(), |bound| bound.kind.shown());
        let [codec, backing] = [setting.codec, setting.backing].map(str::to_owned);
        rates.push(vec![
            codec.clone(),
            backing.clone(),
            format!("{one:.0}"),
            format!("{rate:.0}"),
            format!("{:.1}", rate / one),
            name,
        ]);
        bounds.extend(own.iter().take(SHOWN).map(|bound| {
            vec![
                codec.clone(),
                backing.clone(),
                bound.kind.shown(),
                format!("{:.3}", bound.kind.acquisitions as f64 / counts.pages as f64),
                format!("{:.1}", bound.kind.of_the_busiest() * 100.0),
                format!("{:.0}", bound.held_ns),
                format!("{:.0}", bound.kb_per_s),
            ]
        }));
    }
    let header =
        ["codec", "backing", "kB/s, one thread", "kB/s, predicted", "times one", "bounded by"];
    let of_each = [
        "codec",
        "backing",
        "lock",
        "acquisitions a page",
        "of the busiest one (%)",
        "held (ns)",
        "kB/s, if only it counted",
    ];
    Section::new("locks", "What locks would let many CPUs do")
        .text(format!(
            "A prediction, not a measurement: {} CPUs with a thread each, if nothing but locks holds \
             them up. How often each lock is taken for a page was counted on {}; how long it is held \
             was measured here, with one thread, the least of {rounds} rounds: what else the machine \
             does only makes it longer. Each kind of lock is a queue (mean value analysis), \
             as if all of the kind were as busy as the busiest, and the slowest counts. Those of \
             which each CPU has one are left out.",
            counts.threads,
            counts.machine.line()
        ))
        .table(Table::new(&header, rates))
        .text("The locks that bound each most:")
        .table(Table::new(&of_each, bounds))
        .raw("counts", &counts)?
        .raw("turns", &turns)
}

fn counted<'a>(counts: &'a LockCounts, setting: &LockSetting) -> Result<&'a [LockCount], Failure> {
    let is_it =
        |own: &&CountedSetting| own.codec == setting.codec && own.backing == setting.backing;
    let own = counts.settings.iter().find(is_it);
    let missing = || format!("{}, {} backing: it was not counted", setting.codec, setting.backing);
    own.map(|own| &own.kinds[..]).ok_or_else(|| Failure::new(missing()))
}

/// The throughput of the fastest round in kB/s. That round had the least other load.
fn fastest(turn: &Turns<LockRun>) -> f64 {
    turn.rounds.iter().map(|run| run.kb_per_s).fold(f64::NAN, f64::max)
}

/// The throughput that each kind of lock permits, the lowest first. Locks that a single thread
/// never takes are left out, since their hold time is unknown.
fn bounds_of(
    kinds: &[LockCount],
    counts: &LockCounts,
    turn: &Turns<LockRun>,
    clock_ns: f64,
) -> Vec<Bound> {
    let kb = PAGE_BYTES as f64 / 1024.0;
    let page_ns = 1e9 * kb / fastest(turn);
    let bound = |kind: &LockCount| {
        let own = turn.rounds.iter().flat_map(|run| &run.kinds).filter(|own| own.name == kind.name);
        let held_ns = own.map(|own| (own.held_ns - clock_ns).max(0.0)).reduce(f64::min)?;
        let demand = kind.acquisitions as f64 / counts.pages as f64 * held_ns;
        let locks = 1.0 / kind.of_the_busiest();
        let rate = locks::predict(counts.threads, page_ns, demand.min(page_ns), locks);
        Some(Bound { kb_per_s: rate * kb, kind: kind.clone(), held_ns })
    };
    let is_shared = |kind: &&LockCount| !PER_CPU.contains(&&*short(&kind.name));
    let mut bounds: Vec<Bound> = kinds.iter().filter(is_shared).filter_map(bound).collect();
    bounds.sort_by(|a, b| a.kb_per_s.total_cmp(&b.kb_per_s));
    bounds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(held: &[(&str, f64)]) -> LockRun {
        let kind = |(name, held_ns): &(&str, f64)| {
            let (name, held_ns) = ((*name).to_owned(), *held_ns);
            locks::LockCost { name, held_ns, a_page: 1.0, waited_ns: 0.0 }
        };
        let kinds = held.iter().map(kind).collect();
        LockRun { kb_per_s: 4e6, idle: 0.0, a_page: 2.0, waiting: 0.0, kinds }
    }

    #[test]
    fn one_lock_bounds_the_rate_and_a_lock_for_each_cpu_does_not() {
        let kind = |name: &str, of_the_busiest| LockCount {
            name: name.into(),
            acquisitions: 6400,
            waited_for: 0,
            of_the_busiest,
        };
        let kinds = [
            kind("of many", 100),
            kind("Single", 6400),
            kind("scratch::Scratch", 6400),
            kind("not with one thread", 6400),
        ];
        let counts = LockCounts {
            machine: MachineFacts::here(),
            threads: 64,
            pages: 6400,
            settings: Vec::new(),
        };
        let least = run(&[("of many", 510.0), ("Single", 510.0), ("scratch::Scratch", 510.0)]);
        let rounds = vec![run(&[("Single", 9000.0)]), least];
        let turn = Turns { name: "raw".into(), missing: None, rounds };
        let bounds = bounds_of(&kinds, &counts, &turn, 10.0);
        let names: Vec<_> = bounds.iter().map(|bound| &bound.kind.name[..]).collect();
        assert_eq!(names, ["Single", "of many"]);
        // 1 us a page, half of it under one lock: 64 CPUs are as fast as two.
        assert!((7.9e6..=8e6).contains(&bounds[0].kb_per_s), "{}", bounds[0].kb_per_s);
        assert!(bounds[1].kb_per_s > 1e8, "{}", bounds[1].kb_per_s);
    }
}
