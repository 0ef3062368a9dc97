//! `fault` and `swapout`: the times of paging in and out, beside zswap and zram.
//!
//! All run the same program ([`crate::touch`]) with the same pages. The cgroup has room for all
//! pages, so that no page must leave while others come in.

use crate::bench::{Bench, Candidate, Turns};
use crate::corpus::Program;
use crate::error::{Context, Failure};
use crate::faults::{self, Faults};
use crate::figures::quantile;
use crate::machine::Changes;
use crate::peer::{Peer, Room};
use crate::plot::Plot;
use crate::report::{Section, Table};
use crate::timed_memory::TAKEN_OVER;
use crate::touch::{FAULT_NS_MIN, Touched};
use clap::Args;
use std::fs;

#[derive(Debug, Args)]
pub struct FaultArguments {
    /// Memory of the program, MiB [default: 128].
    #[arg(long, value_parser = clap::value_parser!(u16).range(16..))]
    pub mib: Option<u16>,
    /// Compressors of ours.
    #[arg(long, value_delimiter = ',', default_value = "lz4,zstd")]
    pub compressors: Vec<String>,
    /// Rows whose names begin with these texts [default: all].
    #[arg(long, value_delimiter = ';')]
    pub only: Vec<String>,
}

/// In the steady state the program uses this multiple of its memory.
const STEADY_RATIO: usize = 4;

fn device(compressor: &str, name: &str) -> Peer {
    let options = ["--pool", "1G", "--backing", "none", "--compressor", compressor];
    Peer::Uzswap { name: name.into(), options: options.map(str::to_owned).into() }
}

fn peers(arguments: &FaultArguments) -> Vec<Peer> {
    let compressors = &arguments.compressors;
    let mut peers =
        vec![Peer::Zswap { compressor: "lzo".into() }, Peer::Zram { compressor: "lz4".into() }];
    peers.extend(compressors.iter().map(|name| device(name, &format!("swap device, {name}"))));
    let region = |name: &String, handlers| Peer::Region { compressor: name.clone(), handlers };
    // The first is the default of regions.
    let own = "lz4:0".to_owned();
    let more = compressors.iter().filter(|name| **name != own);
    peers.extend([&own].into_iter().chain(more).map(|name| region(name, false)));
    peers.push(region(&own, true));
    peers.push(Peer::IN_PROCESS);
    let is_asked = |peer: &Peer| arguments.only.iter().any(|name| peer.name().starts_with(name));
    peers.retain(|peer| arguments.only.is_empty() || is_asked(peer));
    peers
}

struct FaultSetting {
    mib: usize,
    /// The program, and the file of pages.
    program: String,
    pages: String,
}

impl FaultSetting {
    fn new(bench: &Bench, arguments: &FaultArguments) -> Result<Self, Failure> {
        let own = std::env::current_exe().context("the path of this program")?;
        Ok(Self {
            mib: arguments.mib.map_or(bench.pick(32, 64, 128), usize::from),
            program: own.display().to_string(),
            pages: Program::Python.file()?.display().to_string(),
        })
    }

    fn touch(&self, bench: &Bench, peer: &Peer, more: &[String]) -> Result<Touched, Failure> {
        let mut changes = Changes::begin();
        // The program changes read-ahead, so read-ahead is restored at the end.
        let read_ahead = "/proc/sys/vm/page-cluster";
        let value = fs::read_to_string(read_ahead).context(read_ahead)?;
        changes.set(read_ahead, value.trim())?;
        // Enough for the pages, for the page cache of their file, and for the program.
        let room_mib = match peer {
            // A program is taken over when less than a quarter of its memory is left. Then it needs
            // less.
            Peer::InProcess { .. } => self.mib + TAKEN_OVER / (1 << 20) + self.mib / 8,
            _ => self.mib * 3 / 2 + 256,
        };
        let memory = (room_mib << 20) as u64;
        let mut command = vec![
            self.program.clone(),
            "touch".into(),
            format!("--pages={}", self.pages),
            format!("--mib={}", self.mib),
        ];
        command.extend_from_slice(more);
        command.extend(peer.memory_options(room_mib));
        let measured =
            peer.run(&mut changes, Room::beside_the_pool(memory), &command, &bench.interrupt)?;
        serde_json::from_str(&measured.stdout).context("the program's output")
    }

    fn steady(&self, bench: &Bench, peer: &Peer, touches: usize) -> Result<Faults, Failure> {
        let own_mib = self.mib / STEADY_RATIO;
        let mut options = peer.memory_options(own_mib * 2);
        // A region's budget does not limit the rest of the program.
        let limit_mib = match peer {
            Peer::InProcess { .. } => own_mib * 2,
            _ if options.is_empty() => own_mib,
            _ => self.mib * 2 + 256,
        };
        options.extend([format!("--mib={}", self.mib), format!("--touches={touches}")]);
        faults::measure(bench, peer, (limit_mib << 20) as u64, &options)
    }
}

const SHARES: [f64; 4] = [0.5, 0.9, 0.99, 0.999];

fn us(ns: f64) -> String {
    format!("{:.1}", ns / 1e3)
}

/// The median, over the rounds, of the ratio to the better of zswap and zram.
fn against<T>(turns: &[Turns<T>], own: &Turns<T>, figure: impl Fn(&T) -> f64) -> String {
    let is_kernels = |turn: &&Turns<T>| turn.name.starts_with('z') && !turn.rounds.is_empty();
    let kernel = turns.iter().filter(is_kernels);
    let best = kernel.min_by(|a, b| a.median(&figure).total_cmp(&b.median(&figure)));
    best.map_or("-".into(), |best| {
        format!("{:.2}", own.paired(best, |own, best| figure(own) / figure(best)))
    })
}

/// Measures faults.
pub fn fault(bench: &Bench, arguments: &FaultArguments) -> Result<Section, Failure> {
    let setting = FaultSetting::new(bench, arguments)?;
    let peers = peers(arguments);
    let rounds = bench.rounds(3, 5);
    let with_floor: Vec<_> = peers.iter().cloned().chain([Peer::Floor]).collect();
    let turns = bench.take_turns(&with_floor, rounds, |peer| setting.touch(bench, peer, &[]))?;
    let touches = bench.pick(2_000, 10_000, 40_000);
    let steady = bench.take_turns(&peers, rounds, |peer| setting.steady(bench, peer, touches))?;
    let p50 = |run: &Touched| quantile(&run.random_ns, 0.5) as f64;
    let p99 = |run: &Touched| quantile(&run.random_ns, 0.99) as f64;
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let of = |share| own.median(|run| quantile(&run.random_ns, share) as f64);
            let mut row: Vec<_> = SHARES.map(|share| us(of(share))).into();
            row.push(against(&turns, own, p50));
            row.push(against(&turns, own, p99));
            let early = |run: &Touched| {
                run.random_ns.iter().filter(|ns| **ns < FAULT_NS_MIN).count() as f64
            };
            row.push(format!("{:.0}", own.median(early)));
            row
        })
    });
    let header =
        ["pages in", "p50 (us)", "p90", "p99", "p99.9", "p50 against", "p99 against", "no fault"];
    let random = Table::new(&header, rows.collect());
    let mut plot = Plot::new("cdf", "Faults in random order", "time (us)", "faults (%)").log_x();
    for own in &turns {
        let us = own.rounds.iter().flat_map(|run| &run.random_ns).map(|ns| *ns as f64 / 1e3);
        plot = plot.distribution(&own.name, us.collect());
    }
    let mut recompressed = vec![device("zstd", "swap device, zstd, recompressed")];
    recompressed.retain(|peer| arguments.only.is_empty() || peers.contains(peer));
    let more = ["--recompressed".to_owned()];
    let cold = bench.take_turns(&recompressed, rounds, |peer| setting.touch(bench, peer, &more))?;
    Section::new("fault", "A fault")
        .text(format!(
            "{} MiB of a Python heap, all pushed out, then each page touched once with room for \
             all; medians of {rounds} rounds. 'Against' is the better of the kernel's two. 'No \
             fault' counts touches below {FAULT_NS_MIN} ns, whose page had not left. The last row \
             is what a region cannot do without: a signal and one call that copies the page in.",
            setting.mib
        ))
        .text("Random order, one thread, page-cluster 0:")
        .table(random)
        .plot(plot)
        .text("In order with the machine's page-cluster, and random order from two threads:")
        .table(others(&turns))
        .text(format!(
            "Steady state: random touches of {} MiB in {} MiB, page-cluster 0, so that a page \
             leaves for each that comes. The pool lies beside that memory; a region's is in its \
             budget, so that it has {} MiB, and in-process all that the program has is in as much.",
            setting.mib,
            setting.mib / STEADY_RATIO,
            setting.mib / STEADY_RATIO * 2
        ))
        .table(steadily(&steady))
        .text(
            "Pages that have been cold and were compressed again, sixteen as one. Random order, one \
             thread, page-cluster 0:",
        )
        .table(coldly(&cold))
        .raw("turns", &turns)?
        .raw("steady", &steady)?
        .raw("recompressed", &cold)
}

fn others(turns: &[Turns<Touched>]) -> Table {
    let header =
        ["pages in", "in order (us)", "against", "1 thread (pages/s)", "2 threads", "gain"];
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            vec![
                us(own.median(|run| run.in_order_ns)),
                against(turns, own, |run| run.in_order_ns),
                format!("{:.0}", own.median(|run| run.rates[0])),
                format!("{:.0}", own.median(|run| run.rates[1])),
                format!("{:.2}", own.median(|run| run.rates[1] / run.rates[0])),
            ]
        })
    });
    Table::new(&header, rows.collect())
}

fn steadily(turns: &[Turns<Faults>]) -> Table {
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let of = |share| own.median(|run| run.quantile(share) as f64);
            let mut row: Vec<_> = SHARES.map(|share| us(of(share))).into();
            row.push(us(own.median(Faults::mean)));
            row.push(against(turns, own, |run| run.quantile(0.5) as f64));
            row.push(against(turns, own, |run| run.quantile(0.99) as f64));
            row.push(against(turns, own, Faults::mean));
            row
        })
    });
    let header = ["pages in", "p50 (us)", "p90", "p99", "p99.9", "mean"];
    let against = ["p50 against", "p99 against", "mean against"];
    let header: Vec<_> = header.into_iter().chain(against).collect();
    Table::new(&header, rows.collect())
}

fn coldly(turns: &[Turns<Touched>]) -> Table {
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let of = |share| own.median(|run| quantile(&run.random_ns, share) as f64);
            let mut row: Vec<_> = SHARES.map(|share| us(of(share))).into();
            let share = own.median(|run| run.recompressed as f64 / run.pages as f64);
            row.push(format!("{:.0}", share * 100.0));
            row
        })
    });
    let header = ["pages in", "p50 (us)", "p90", "p99", "p99.9", "recompressed (%)"];
    Table::new(&header, rows.collect())
}

/// Measures page-outs.
pub fn swapout(bench: &Bench, arguments: &FaultArguments) -> Result<Section, Failure> {
    let setting = FaultSetting::new(bench, arguments)?;
    let outs = bench.pick(1, 3, 4);
    let rounds = bench.rounds(3, 5);
    let more = [format!("--outs={outs}")];
    let peers = peers(arguments);
    let turns = bench.take_turns(&peers, rounds, |peer| setting.touch(bench, peer, &more))?;
    let all = |run: &Touched| crate::figures::median(run.all_out_ns.iter().copied());
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let mut row = vec![
                us(own.median(all)),
                format!("{:.0}", PAGE_MB * 1e9 / own.median(all)),
                against(&turns, own, all),
            ];
            let of = |share| own.median(|run| quantile(&run.out_ns, share) as f64);
            row.extend(SHARES.map(|share| us(of(share))));
            row
        })
    });
    let header =
        ["pages out", "all (us)", "MB/s", "against", "asked: p50 (us)", "p90", "p99", "p99.9"];
    let table = Table::new(&header, rows.collect());
    let mut plot = Plot::new("cdf", "Page-outs of 512 pages", "time a page (us)", "page-outs (%)");
    for own in &turns {
        let us = own.rounds.iter().flat_map(|run| &run.out_ns).map(|ns| *ns as f64 / 1e3);
        plot = plot.distribution(&own.name, us.collect());
    }
    Section::new("swapout", "A page out")
        .text(format!(
            "{} MiB of a Python heap pushed out by one thread, {outs} times, every page changed in \
             between; medians of {rounds} rounds. Microseconds a page until all had left, writes \
             awaited, and of each request for 512 pages until it returned: the swap device \
             compresses on its own threads meanwhile. 'Against' is the better of the kernel's two.",
            setting.mib
        ))
        .table(table)
        .plot(plot.log_x())
        .raw("turns", &turns)
}

const PAGE_MB: f64 = 4096.0 / 1e6;
