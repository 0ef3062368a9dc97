//! `locks`: threads that swap out at the same time, and the cost of their locks, over a plain
//! backing and a sealed one.
//!
//! Threads store pages of a real heap, each thread in its own part of the address space, into a
//! cache over a backing in memory. `raw`: no page meets the limit on its ratio, so each goes
//! straight to a slot of the backing. `lz4`: pages are compressed into a pool of 16 MiB and written
//! back in segments. A second run profiles the locks: it counts acquisitions, and measures wait
//! times and hold times. `acquisitions` predicts the throughput of more CPUs.

mod acquisitions;

use crate::bench::{Bench, Candidate, Turns};
use crate::corpus::{self, Program};
use crate::error::{Context, Failure};
use crate::faults;
use crate::figures::quantile;
use crate::peer::Peer;
use crate::plot::Plot;
use crate::ram::Ram;
use crate::report::{Section, Table};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};
use uzswap_engine::compress::prepare_thread;
use uzswap_engine::testing::Noise;
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, Page, Store};
use uzswap_sync::profile;
use uzswap_sys::cpu;

#[derive(Debug, Args)]
pub struct LocksArguments {
    /// Threads that store: 1,2,8,32, or with --count as many as CPUs.
    #[arg(long, value_delimiter = ',', value_parser = threads)]
    pub threads: Vec<usize>,
    /// Only count how often each lock is taken, with a thread for each CPU, and write the counts to
    /// a file.
    #[arg(long, value_name = "FILE", conflicts_with = "counts")]
    pub count: Option<PathBuf>,
    /// Only predict the throughput of more CPUs, from such a file and one thread here.
    #[arg(long, value_name = "FILE", conflicts_with = "threads")]
    pub counts: Option<PathBuf>,
    /// Pages to store, from `uzswap record`, instead of pages of a Python program.
    #[arg(long, value_name = "FILE")]
    pub pages: Option<PathBuf>,
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count @ 1..=4096) => Ok(count),
        _ => Err("give 1 to 4096".into()),
    }
}

const THREADS: [usize; 4] = [1, 2, 8, 32];

/// Backings; true if they are sealed.
const BACKINGS: [(&str, bool); 2] = [("plain", false), ("sealed", true)];

const CODECS: [&str; 2] = ["raw", "lz4"];

/// Each codec over each backing, with these numbers of threads.
pub fn settings(threads: &[usize]) -> Vec<LockSetting> {
    let mut settings = Vec::new();
    for codec in CODECS {
        for (backing, is_sealed) in BACKINGS {
            let threads = threads.iter();
            settings.extend(threads.map(|&threads| LockSetting {
                backing,
                is_sealed,
                codec,
                threads,
            }));
        }
    }
    settings
}
const POOL_BYTES: u64 = 16 << 20;

/// Threads of the fault table, and CPUs of the model.
const FAULT_THREADS: usize = 8;
const MODEL_CPUS: usize = 32;

/// A setting, which is measured once a round.
#[derive(Clone, Copy)]
pub struct LockSetting {
    pub backing: &'static str,
    is_sealed: bool,
    pub codec: &'static str,
    pub threads: usize,
}

impl Candidate for LockSetting {
    fn name(&self) -> String {
        format!("{}, {}, {}", self.codec, self.threads, self.backing)
    }
}

/// The cost of one kind of lock in one run.
#[derive(Debug, Clone, Serialize)]
pub struct LockCost {
    /// The type that the lock protects.
    pub name: String,
    /// Acquisitions per page.
    pub a_page: f64,
    pub waited_ns: f64,
    /// Mean time of one acquisition.
    pub held_ns: f64,
}

#[derive(Debug, Serialize)]
pub struct LockRun {
    pub kb_per_s: f64,
    /// Share of the CPUs that threads could have used but did not.
    pub idle: f64,
    /// From the run with a profile: acquisitions per page, and the share of all threads' time that
    /// they waited.
    pub a_page: f64,
    pub waiting: f64,
    pub kinds: Vec<LockCost>,
}

/// Calls a function with a cache of this setting, which has a maintaining thread.
fn with_cache<T>(
    setting: LockSetting,
    pages: u32,
    ram: &Ram,
    body: impl FnOnce(&Cache, Area) -> T,
) -> Result<T, Failure> {
    let config = Config {
        pages_max: pages,
        ram_bytes: POOL_BYTES,
        ram_bytes_max: POOL_BYTES,
        pool_bytes_max: POOL_BYTES,
        algorithm: setting.codec.parse().context("compressor")?,
        seals_backing: setting.is_sealed,
    };
    let cache = Cache::new(config, ram.backing()).context("a cache")?;
    let area = cache.add_area(pages).ok_or_else(|| Failure::new("no room for an area"))?;
    let set = |name, value| cache.set_attribute(name, value).context(name);
    set("same_pages_enabled", "N")?;
    if setting.codec == "raw" {
        set("max_compression_ratio", "99")?;
    }
    let stop = AtomicBool::new(false);
    Ok(thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Relaxed) {
                cache.wait_for_work(Duration::from_millis(20));
                // Stores report missing memory themselves.
                let _ = cache.maintain();
            }
            profile::flush();
        });
        let value = body(&cache, area);
        stop.store(true, Relaxed);
        cache.ring();
        value
    }))
}

fn store(cache: &Cache, area: Area, offset: u32, page: &Page) -> bool {
    let Some(key) = area.entry(offset) else { return false };
    cache.store(key, page) == Store::Stored || cache.store_through(key, page) == Store::Stored
}

/// The CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The type that a lock protects: `Entrys` for `[uzswap_engine::index::Entry; 4096]`.
pub fn short(name: &str) -> String {
    let last = name.rsplit("::").next().unwrap_or(name);
    match last.split_once("; ") {
        Some((of, _)) => format!("{of}s"),
        None => last.replace(['>', ']'], ""),
    }
}

/// The time in which all threads stored the pages.
pub struct Took {
    time: Duration,
    cpu: Duration,
}

/// Stores `count` pages, evenly by all threads.
pub fn swap_out(
    setting: LockSetting,
    count: u32,
    pages: &[Page],
    ram: &Ram,
) -> Result<Took, Failure> {
    let threads = setting.threads as u32;
    let share = count / threads;
    let barrier = Barrier::new(setting.threads);
    let (took, held) = with_cache(setting, count, ram, |cache, area| {
        // Makes trunks and slots, as in a cache in use.
        for offset in (0..count).step_by(4096) {
            store(cache, area, offset, &pages[0]);
            let _ = cache.maintain();
        }
        profile::flush();
        drop(profile::take());
        let work = |number: u32| {
            prepare_thread();
            barrier.wait();
            let start = (Instant::now(), cpu_time());
            let mut held = 0;
            for offset in number * share..(number + 1) * share {
                held +=
                    u32::from(store(cache, area, offset, &pages[offset as usize % pages.len()]));
            }
            let end = (Instant::now(), cpu_time());
            profile::flush();
            (start, end, held)
        };
        thread::scope(|scope| {
            let work = &work;
            let all: Vec<_> =
                (0..threads).map(|number| scope.spawn(move || work(number))).collect();
            let all: Option<Vec<_>> = all.into_iter().map(|thread| thread.join().ok()).collect();
            let all = all.unwrap_or_default();
            let start = all.iter().map(|(start, ..)| *start).min();
            let end = all.iter().map(|(_, end, _)| *end).max();
            let took = start
                .zip(end)
                .map(|(start, end)| Took { time: end.0 - start.0, cpu: end.1 - start.1 });
            (took, all.iter().map(|(.., held)| held).sum::<u32>())
        })
    })?;
    match took.filter(|_| held == share * threads) {
        Some(took) => Ok(took),
        None => Err(Failure::new(format!("{held} of {} pages were taken", share * threads))),
    }
}

/// A run, with a second one for the profile.
pub fn measure(
    setting: LockSetting,
    count: u32,
    pages: &[Page],
    ram: &Ram,
) -> Result<LockRun, Failure> {
    let took = swap_out(setting, count, pages, ram)?;
    let cpus = cpu::allowed().min(setting.threads);
    profile::switch(true);
    let profiled = swap_out(setting, count, pages, ram);
    profile::switch(false);
    let elapsed = profiled?.time.as_nanos() as f64;
    let all = profile::take();
    let per_page = |number: f64| number / f64::from(count);
    let kinds = all.iter().map(|kind| LockCost {
        name: kind.name.to_owned(),
        a_page: per_page(kind.acquisitions as f64),
        waited_ns: kind.waited.as_nanos() as f64,
        held_ns: kind.held.as_nanos() as f64 / kind.acquisitions.max(1) as f64,
    });
    let kinds: Vec<LockCost> = kinds.collect();
    Ok(LockRun {
        kb_per_s: f64::from(count) * PAGE_BYTES as f64 / 1024.0 / took.time.as_secs_f64(),
        // The maintaining thread may use CPUs that the storing threads leave idle.
        idle: (1.0 - took.cpu.as_secs_f64() / (took.time.as_secs_f64() * cpus as f64)).max(0.0),
        a_page: kinds.iter().map(|kind| kind.a_page).sum(),
        waiting: kinds.iter().map(|kind| kind.waited_ns).sum::<f64>()
            / (elapsed * (setting.threads + 1) as f64),
        kinds,
    })
}

/// The time that reading the clock adds to the hold time of a lock, ns.
pub fn clock_ns() -> f64 {
    const TIMES: u32 = 100_000;
    profile::flush();
    drop(profile::take());
    profile::switch(true);
    let empty = uzswap_sync::Mutex::new(());
    (0..TIMES).for_each(|_| drop(uzswap_sync::lock(&empty)));
    profile::switch(false);
    profile::flush();
    let held: Duration = profile::take().iter().map(|kind| kind.held).sum();
    held.as_nanos() as f64 / f64::from(TIMES)
}

/// The number of locks of a kind that all CPUs share; `None` if there is a lock for each CPU, each
/// cluster in use, or each page.
fn shared(kind: &str) -> Option<usize> {
    match short(kind).as_str() {
        "SegmentWriter" | "Inner" => Some(1),
        "List" => Some(16),
        // Some ten classes have most objects of a heap.
        "Class" => Some(10),
        _ => None,
    }
}

/// Pages a second on `cpus` CPUs. A page takes a CPU `page_ns`, of which `demand_ns` under one of
/// `locks` locks. This is mean value analysis of a closed network with a queue for each lock.
pub fn predict(cpus: usize, page_ns: f64, demand_ns: f64, locks: f64) -> f64 {
    let each = demand_ns / locks;
    let think = page_ns - demand_ns;
    let (mut queue, mut rate) = (0.0, 0.0);
    for count in 1..=cpus {
        let wait = each * (1.0 + queue);
        rate = count as f64 / (think + wait * locks);
        queue = rate * wait;
    }
    rate * 1e9
}

/// The prediction for a setting, from its run with one thread: kB/s, and the lock that limits it.
fn prediction(turn: &Turns<LockRun>, clock_ns: f64) -> (f64, String) {
    let kb = PAGE_BYTES as f64 / 1024.0;
    let page_ns = 1e9 * kb / turn.median(|run| run.kb_per_s);
    let mut least = (MODEL_CPUS as f64 / page_ns * 1e9 * kb, "none".to_owned());
    for kind in turn.rounds.iter().flat_map(|run| &run.kinds) {
        let demand = kind.a_page * (kind.held_ns - clock_ns).max(0.0);
        let Some(locks) = shared(&kind.name) else { continue };
        let rate = predict(MODEL_CPUS, page_ns, demand.min(page_ns), locks as f64) * kb;
        if rate < least.0 {
            least = (rate, short(&kind.name));
        }
    }
    least
}

/// Times of loads and stores of a page, ns. The threads use random pages of twice their memory:
/// each touch brings a page in and puts another out.
#[derive(Debug, Serialize)]
struct Touches {
    load_ns: Vec<u64>,
    store_ns: Vec<u64>,
}

fn touch(
    setting: LockSetting,
    pages: &[Page],
    touches: usize,
    ram: &Ram,
) -> Result<Touches, Failure> {
    let count = pages.len() as u32;
    let lost = AtomicBool::new(false);
    let times = with_cache(setting, count, ram, |cache, area| {
        for (offset, page) in (0..count).zip(pages) {
            store(cache, area, offset, page);
        }
        let work = |number: usize| {
            prepare_thread();
            let (mut noise, mut page) = (Noise::new(number as u64 + 1), [0; PAGE_BYTES]);
            let mut times = Vec::with_capacity(touches);
            for _ in 0..touches {
                // A page of this thread's own. Between a rejected store and its write-through a
                // page is absent. The storing thread must make sure that no other thread reads it.
                let own = noise.below((pages.len() / setting.threads) as u64) as usize;
                let offset = (own * setting.threads + number) as u32;
                let Some(key) = area.entry(offset) else { continue };
                let start = Instant::now();
                let loaded = cache.load(key, &mut page);
                let load = start.elapsed();
                let whole = matches!(loaded, Ok(Load::Hit)) && page == pages[offset as usize];
                // A program would have to store another page now. This stores the loaded page
                // again, under the same key.
                let start = Instant::now();
                let stored = store(cache, area, offset, &page);
                times.push((load.as_nanos() as u64, start.elapsed().as_nanos() as u64));
                if !whole || !stored {
                    lost.store(true, Relaxed);
                }
            }
            times
        };
        thread::scope(|scope| {
            let work = &work;
            let all = (0..setting.threads).map(|number| scope.spawn(move || work(number)));
            let all: Vec<_> = all.collect();
            all.into_iter().flat_map(|t| t.join().unwrap_or_default()).collect::<Vec<_>>()
        })
    })?;
    match lost.load(Relaxed) {
        true => Err(Failure::new("a page came back wrong, or was not taken")),
        false => {
            let (load_ns, store_ns) = times.into_iter().unzip();
            Ok(Touches { load_ns, store_ns })
        }
    }
}

fn report(
    section: Section,
    codec: &str,
    settings: &[LockSetting],
    turns: &[Turns<LockRun>],
) -> Section {
    let of_codec: Vec<_> =
        settings.iter().zip(turns).filter(|(setting, _)| setting.codec == codec).collect();
    let title = format!("Swap-out, {codec}");
    let mut plot = Plot::new(&format!("out-{codec}"), &title, "threads", "MB/s").log_x();
    let mut rows = Vec::new();
    for (backing, _) in BACKINGS {
        let mut points = Vec::new();
        for (setting, turn) in of_codec.iter().filter(|(setting, _)| setting.backing == backing) {
            let first = of_codec.iter().find(|(s, _)| s.threads == setting.threads);
            let ratio =
                first.map_or(1.0, |(_, first)| turn.paired(first, |a, b| a.kb_per_s / b.kb_per_s));
            points.push([setting.threads as f64, turn.median(|run| run.kb_per_s) / 1024.0]);
            rows.push(vec![
                backing.to_owned(),
                setting.threads.to_string(),
                format!("{:.0}", turn.median(|run| run.kb_per_s)),
                format!("{ratio:.2}"),
                format!("{:.2}", turn.median(|run| run.waiting) * 100.0),
                format!("{:.1}", turn.median(|run| run.idle) * 100.0),
                format!("{:.2}", turn.median(|run| run.a_page)),
            ]);
        }
        plot = plot.series(backing, points);
    }
    let header = [
        "backing",
        "threads",
        "kB/s",
        "to plain",
        "waiting (% of threads' time)",
        "CPUs idle (%)",
        "locks a page",
    ];
    section.text(format!("Codec {codec}:")).table(Table::new(&header, rows)).plot(plot)
}

/// The kinds of locks, with the most threads.
fn kinds(turn: &Turns<LockRun>) -> Table {
    let mut rows = Vec::new();
    if let Some(run) = turn.rounds.last() {
        let mut kinds = run.kinds.clone();
        kinds.sort_by(|a, b| b.a_page.total_cmp(&a.a_page));
        rows.extend(kinds.iter().map(|kind| {
            let waited = kind.waited_ns / 1e6;
            vec![
                short(&kind.name),
                format!("{:.3}", kind.a_page),
                format!("{:.0}", kind.held_ns),
                format!("{waited:.1}"),
            ]
        }));
    }
    Table::new(&["lock", "acquisitions a page", "held (ns)", "waited in all (ms)"], rows)
}

/// Number of pages to store, the pages, and the memory of the backing.
pub fn load(bench: &Bench, arguments: &LocksArguments) -> Result<(usize, Vec<Page>, Ram), Failure> {
    let count = bench.pick(4096, 32_768, 131_072);
    let pages_max = bench.pick(2000, 16_000, 16_000);
    let pages = match &arguments.pages {
        Some(file) => corpus::read("recorded", file.clone(), pages_max)?,
        None => Program::Python.corpus(pages_max)?,
    };
    let ram = Ram::new((count * PAGE_BYTES * 5 / 4).next_multiple_of(256 << 10));
    Ok((count, pages.pages, ram))
}

/// Measures, counts or predicts.
pub fn run(bench: &Bench, arguments: &LocksArguments) -> Result<Section, Failure> {
    if let Some(file) = &arguments.count {
        return acquisitions::count(bench, arguments, file);
    }
    if let Some(file) = &arguments.counts {
        return acquisitions::predict(bench, arguments, file);
    }
    let (count, pages, ram) = load(bench, arguments)?;
    let threads = Some(&arguments.threads[..]).filter(|threads| !threads.is_empty());
    let settings = settings(threads.unwrap_or(&THREADS));
    let rounds = bench.rounds(3, 7);
    let turns = bench
        .take_turns(&settings, rounds, |setting| measure(*setting, count as u32, &pages, &ram))?;
    let mut section = Section::new("locks", "Threads that swap out at once").text(format!(
        "Sequential stores of a Python heap, {} MiB in all, into a cache over memory; medians of \
         {rounds} rounds, in pairs. Locks were profiled in runs of their own.",
        (count * PAGE_BYTES) >> 20
    ));
    for codec in CODECS {
        section = report(section, codec, &settings, &turns);
    }
    for codec in CODECS {
        let is_last = |setting: &LockSetting| setting.codec == codec;
        let last = settings.iter().zip(&turns).rfind(|(setting, _)| is_last(setting));
        if let Some((setting, turn)) = last {
            let text =
                format!("Locks with a sealed backing, {codec}, {} threads:", setting.threads);
            section = section.text(text).table(kinds(turn));
        }
    }
    let clock_ns = clock_ns();
    let with_one = settings.iter().zip(&turns).filter(|(setting, _)| setting.threads == 1);
    let rows = with_one.map(|(setting, turn)| {
        let (rate, lock) = prediction(turn, clock_ns);
        vec![setting.codec.into(), setting.backing.into(), format!("{rate:.0}"), lock]
    });
    section = section
        .text(format!(
            "A prediction, not a measurement: {MODEL_CPUS} CPUs with a thread each, if nothing but \
             locks holds them up. Acquisitions and hold times were measured with one thread; each \
             kind of lock is a queue (mean value analysis), and the slowest counts."
        ))
        .table(Table::new(&["codec", "backing", "kB/s, predicted", "bounded by"], rows.collect()));
    let section = faults(bench, section, &pages, &ram)?;
    device_faults(bench, section)?.raw("turns", &turns)
}

/// Adds the table of faults through the swap device.
fn device_faults(bench: &Bench, section: Section) -> Result<Section, Failure> {
    let peer = |name: &str, more: &[&str]| {
        // The backing is in memory, as in the other parts: they measure locks and no disk.
        let options = ["--compressor=lz4", "--pool=16M", "--backing=/dev/shm/uzswap-bench:1G"];
        let options = options.iter().chain(more).map(|option| (*option).to_owned()).collect();
        Peer::Uzswap { name: name.into(), options }
    };
    let peers = [peer("plain", &["--plain-backing"]), peer("sealed", &[])];
    let (memory_mib, touches) = (bench.pick(64, 256, 256), bench.pick(500, 4_000, 10_000));
    let options = [
        format!("--mib={memory_mib}"),
        format!("--threads={FAULT_THREADS}"),
        format!("--touches={touches}"),
    ];
    let memory = (memory_mib as u64) << 19;
    let turns = bench.take_turns(&peers, bench.rounds(2, 7), |peer| {
        faults::measure(bench, peer, memory, &options)
    })?;
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let us = |share| format!("{:.1}", own.median(|run| run.quantile(share) as f64) / 1e3);
            let against = own.paired(&turns[0], |own, first| {
                own.quantile(0.5) as f64 / first.quantile(0.5) as f64
            });
            vec![us(0.5), us(0.99), format!("{against:.2}")]
        })
    });
    let table = Table::new(&["backing", "p50 (us)", "p99", "p50 to plain"], rows.collect());
    section
        .text(format!(
            "The same through the swap device: {FAULT_THREADS} threads of a program touch its \
             {memory_mib} MiB at random, half of which it has, with a pool of 16 MiB and the rest \
             on a backing in memory."
        ))
        .table(table)
        .raw("device_faults", &turns)
}

fn faults(bench: &Bench, section: Section, pages: &[Page], ram: &Ram) -> Result<Section, Failure> {
    let settings = settings(&[FAULT_THREADS]);
    let touches = bench.pick(500, 5_000, 20_000);
    let pages = &pages[..pages.len().min(bench.pick(1000, 12_000, 12_000))];
    let rounds = bench.rounds(3, 7);
    let turns =
        bench.take_turns(&settings, rounds, |setting| touch(*setting, pages, touches, ram))?;
    let title = "Faults of eight threads";
    let mut plot = Plot::new("faults", title, "time (us)", "loads (%)").log_x();
    let mut rows = Vec::new();
    for (setting, turn) in settings.iter().zip(&turns) {
        let us = |values: fn(&Touches) -> &Vec<u64>, share| {
            format!("{:.2}", turn.median(|run| quantile(values(run), share) as f64) / 1e3)
        };
        let mut row = vec![setting.codec.into(), setting.backing.into()];
        row.extend([0.5, 0.99].map(|share| us(|run| &run.load_ns, share)));
        row.extend([0.5, 0.99].map(|share| us(|run| &run.store_ns, share)));
        rows.push(row);
        let all = turn.rounds.iter().flat_map(|run| &run.load_ns).map(|ns| *ns as f64 / 1e3);
        plot = plot.distribution(&format!("{}, {}", setting.codec, setting.backing), all.collect());
    }
    let header = ["codec", "backing", "load p50 (us)", "p99", "store p50 (us)", "p99"];
    Ok(section
        .text(format!(
            "{FAULT_THREADS} threads that touch pages at random: each touch loads a page and stores \
             one, as with twice the memory."
        ))
        .table(Table::new(&header, rows))
        .plot(plot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_bounds_the_rate_and_no_lock_does_not() {
        let page_ns = 1000.0;
        assert!((predict(1, page_ns, 500.0, 1.0) - 1e6).abs() < 1.0, "one CPU never waits");
        assert!((predict(32, page_ns, 0.0, 1.0) - 32e6).abs() < 1.0);
        let bound = predict(32, page_ns, 500.0, 1.0);
        assert!((1.9e6..=2e6).contains(&bound), "{bound}");
        let split = predict(32, page_ns, 500.0, 16.0);
        assert!((1.5e7..3.2e7).contains(&split), "{split}");
    }
}
