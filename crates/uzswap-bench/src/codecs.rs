//! `codecs`: the size and speed of each compressor on real pages.
//!
//! Pages of one repeated word are left out, as in the cache. Before compression each page is read,
//! since a store first computes its checksum. No code reads an object before it is decompressed. A
//! page that does not fit counts as raw.

use crate::bench::{Bench, Candidate, Turns};
use crate::corpus::{self, Corpora, Corpus};
use crate::error::{Context, Failure};
use crate::plot::Plot;
use crate::report::{Section, Table};
use clap::Args;
use serde::Serialize;
use std::hint::black_box;
use std::time::Instant;
use uzswap_engine::compress::{Codec, Codecs, prepare_thread};
use uzswap_engine::{PAGE_BYTES, Page};

#[derive(Debug, Args)]
pub struct CodecsArguments {
    /// Compressors to measure; with "+dictionary", zstd trains one on other pages first.
    #[arg(long, value_delimiter = ',', default_values_t = ALGORITHMS.map(String::from))]
    pub compressors: Vec<String>,
}

const ALGORITHMS: [&str; 13] = [
    "raw",
    "wkdm",
    "lz4:0",
    "lz4",
    "lz4:1",
    "lz4:-1",
    "lzo",
    "zstd",
    "zstd+dictionary",
    "zstd:1",
    "zstd:3",
    "zstd:3+dictionary",
    "deflate",
];

/// Pages of a corpus that train a dictionary: as many as the cache uses.
const SAMPLES: usize = 128;

/// Measured pages of each corpus.
const PAGES: usize = 2000;

/// Pages compressed between two clock reads; their objects fit in a cache.
const BATCH_PAGES: usize = 64;

struct Algorithm(String);

impl Candidate for Algorithm {
    fn name(&self) -> String {
        self.0.clone()
    }
}

/// The figures of a compressor in one round.
#[derive(Debug, Serialize)]
struct CodecFigures {
    out_ns: f64,
    in_ns: f64,
    /// Bytes of the object of each page.
    #[serde(skip)]
    sizes: Vec<usize>,
    ratio: f64,
}

/// The engine's name of the compressor, and true if it has a dictionary.
fn split(name: &str) -> (&str, bool) {
    name.strip_suffix("+dictionary").map_or((name, false), |algorithm| (algorithm, true))
}

fn measure(name: &str, pages: &[Page], samples: &[Page]) -> Result<CodecFigures, Failure> {
    let (algorithm, has_dictionary) = split(name);
    let mut codecs = Codecs::new(algorithm.parse().context("compressor")?);
    if has_dictionary && !codecs.train(samples) {
        return Err(Failure::new(format!("{name}: no dictionary can be trained on these pages")));
    }
    let mut objects = vec![(Codec::Raw, 0, [0; PAGE_BYTES]); pages.len()];
    let mut out_ns = 0;
    for (pages, objects) in pages.chunks(BATCH_PAGES).zip(objects.chunks_mut(BATCH_PAGES)) {
        black_box(pages.as_flattened().iter().fold(0u8, |all, byte| all ^ byte));
        objects.iter_mut().for_each(|(.., object)| object.fill(0));
        let start = Instant::now();
        for (page, (codec, bytes, object)) in pages.iter().zip(objects) {
            if let Some(made) = codecs.compress(black_box(page), object) {
                (*codec, *bytes) = made;
            }
        }
        out_ns += start.elapsed().as_nanos();
    }
    let sizes = objects.iter().map(|(_, bytes, _)| if *bytes > 0 { *bytes } else { PAGE_BYTES });
    let sizes: Vec<usize> = sizes.collect();
    objects.retain(|(_, bytes, _)| *bytes > 0);
    let mut page = [0; PAGE_BYTES];
    let mut whole = 0;
    let start = Instant::now();
    for (codec, bytes, object) in &objects {
        let done = codecs.decompress(*codec, &object[..*bytes], &mut page);
        whole += usize::from(done.is_ok());
        black_box(&page);
    }
    let in_ns = start.elapsed().as_nanos();
    if whole < objects.len() {
        return Err(Failure::new(format!("{name}: an object that it cannot decode")));
    }
    Ok(CodecFigures {
        out_ns: out_ns as f64 / pages.len() as f64,
        in_ns: in_ns as f64 / objects.len().max(1) as f64,
        ratio: (pages.len() * PAGE_BYTES) as f64 / sizes.iter().sum::<usize>() as f64,
        sizes,
    })
}

/// All compressors on one corpus.
#[derive(Serialize)]
struct OnCorpus {
    corpus: &'static str,
    turns: Vec<Turns<CodecFigures>>,
}

impl OnCorpus {
    fn of(&self, name: &str) -> Option<&Turns<CodecFigures>> {
        self.turns.iter().find(|turns| turns.name == name)
    }

    /// Takes for each page the fastest compressor among `choice`, sorted by speed, whose object is
    /// at most 5 % larger than zstd's. Returns time and size, both relative to zstd's.
    fn oracle(&self, choice: &[&str]) -> Option<[f64; 2]> {
        let zstd = self.of("zstd")?;
        let choice = choice.iter().map(|name| self.of(name)).collect::<Option<Vec<_>>>()?;
        let sizes = |turns: &Turns<CodecFigures>| Some(turns.rounds.first()?.sizes.clone());
        let zstd_sizes = sizes(zstd)?;
        let of_choice = choice.iter().map(|turns| sizes(turns)).collect::<Option<Vec<_>>>()?;
        let ns: Vec<f64> = choice.iter().map(|turns| turns.median(|run| run.out_ns)).collect();
        let zstd_ns = zstd.median(|run| run.out_ns);
        let (mut time, mut bytes) = (0.0, 0);
        for (page, zstd_bytes) in zstd_sizes.iter().enumerate() {
            let small = |at: &usize| of_choice[*at][page] * 100 <= zstd_bytes * 105;
            let chosen = (0..choice.len()).find(small);
            time += chosen.map_or(zstd_ns, |at| ns[at]);
            bytes += chosen.map_or(*zstd_bytes, |at| of_choice[at][page]);
        }
        let zstd_time = zstd_ns * zstd_sizes.len() as f64;
        Some([time / zstd_time, bytes as f64 / zstd_sizes.iter().sum::<usize>() as f64])
    }
}

pub fn run(bench: &Bench, arguments: &CodecsArguments) -> Result<Section, Failure> {
    let algorithms = arguments.compressors.iter().cloned().map(Algorithm);
    let algorithms: Vec<_> = algorithms.collect();
    for Algorithm(name) in &algorithms {
        let (algorithm, _) = split(name);
        algorithm.parse::<uzswap_engine::compress::Algorithm>().context("--compressors")?;
    }
    let Corpora { found, missing } = corpus::corpora(bench)?;
    prepare_thread();
    let (count, rounds) = (bench.pick(100, PAGES / 2, PAGES), bench.rounds(5, 15));
    let mut all = Vec::new();
    for Corpus { name, pages, .. } in &found {
        let step = (pages.len() / count).max(1);
        let every = |step, from| pages.iter().skip(from).step_by(step).copied();
        // Other pages than the measured ones, if there are others.
        let samples: Vec<Page> = every((pages.len() / SAMPLES).max(1), step / 2).collect();
        let measured: Vec<Page> = every(step, 0).take(count).collect();
        let turns =
            bench.take_turns(&algorithms, rounds, |a| measure(&a.0, &measured, &samples))?;
        all.push(OnCorpus { corpus: name, turns });
    }
    let mut section = Section::new("codecs", "Compressors").text(format!(
        "{count} pages of each corpus, medians of {rounds} rounds. Nanoseconds a page out \
         (compressing) and in (decompressing), and the ratio of pages' bytes to objects'."
    ));
    for direction in ["out", "in"] {
        section = section.plot(pareto(&all, direction));
    }
    let header = ["compressor", "out (ns)", "in (ns)", "ratio"];
    for on in &all {
        section = section.text(format!("{}:", on.corpus)).table(Table::new(&header, rows(on)));
    }
    for (name, why) in missing {
        section = section.text(format!("{name}: not measured. {why}"));
    }
    section.text("What was aimed at:").table(targets(&all)).raw("corpora", &all)
}

fn rows(on: &OnCorpus) -> Vec<Vec<String>> {
    let rows = on.turns.iter().map(|own| {
        own.row(|own| {
            vec![
                format!("{:.0}", own.median(|run| run.out_ns)),
                format!("{:.0}", own.median(|run| run.in_ns)),
                format!("{:.2}", own.median(|run| run.ratio)),
            ]
        })
    });
    rows.collect()
}

/// Time and ratio of each compressor over all corpora, with equal weights.
fn pareto(all: &[OnCorpus], direction: &str) -> Plot {
    let does = if direction == "out" { "Compressing" } else { "Decompressing" };
    let title = format!("{does} a page: time and ratio over all corpora");
    let mut plot = Plot::new(direction, &title, "time a page (us)", "ratio").log_x().dots();
    let names = all.first().map(|on| on.turns.iter().map(|turns| turns.name.clone()));
    for name in names.into_iter().flatten() {
        let of: Vec<_> = all.iter().filter_map(|on| on.of(&name)).collect();
        let mean = |figure: &dyn Fn(&CodecFigures) -> f64| {
            of.iter().map(|turns| turns.median(figure)).sum::<f64>() / of.len() as f64
        };
        let ns = mean(&|run| if direction == "out" { run.out_ns } else { run.in_ns });
        // The ratio of the sums of bytes, not the mean of ratios.
        plot = plot.series(&name, vec![[ns / 1e3, 1.0 / mean(&|run| 1.0 / run.ratio)]]);
    }
    plot
}

fn targets(all: &[OnCorpus]) -> Table {
    let mut rows = Vec::new();
    let mut row = |what: &str, aim: &str, values: Vec<Option<String>>| {
        let mut row = vec![what.to_owned(), aim.to_owned()];
        row.extend(values.into_iter().map(|value| value.unwrap_or("not measured".into())));
        rows.push(row);
    };
    let each = |figure: &dyn Fn(&OnCorpus) -> Option<String>| all.iter().map(figure).collect();
    let ns = |name: &'static str, figure: fn(&CodecFigures) -> f64| {
        move |on: &OnCorpus| Some(format!("{:.0}", on.of(name)?.median(figure)))
    };
    row("wkdm, out (ns)", "1000 at most", each(&ns("wkdm", |run| run.out_ns)));
    row("wkdm, in (ns)", "700 at most", each(&ns("wkdm", |run| run.in_ns)));
    // lz4:1 is the library's encoder, which zram uses.
    let against = |name: &'static str, figure: fn(&CodecFigures) -> f64| {
        move |on: &OnCorpus| {
            let lz4 = on.of("lz4:1")?;
            let paired = on.of(name)?.paired(lz4, |own, lz4| figure(own) / figure(lz4));
            Some(format!("{paired:.2}"))
        }
    };
    let out = |run: &CodecFigures| run.out_ns;
    row("lz4:0, time out against lz4:1", "0.70 at most", each(&against("lz4:0", out)));
    row("lz4:0, ratio against lz4:1", "0.95 at least", each(&against("lz4:0", |run| run.ratio)));
    row("lz4, time out against lz4:1", "below 1", each(&against("lz4", out)));
    row("lz4, time in against lz4:1", "below 1", each(&against("lz4", |run| run.in_ns)));
    row("lz4, ratio against lz4:1", "0.97 at least", each(&against("lz4", |run| run.ratio)));
    let oracle = |at: usize| {
        move |on: &OnCorpus| {
            Some(format!("{:.2}", on.oracle(&["raw", "wkdm", "lz4:0", "lz4"])?[at]))
        }
    };
    row("choice by page, perfect: time against zstd", "below 1", each(&oracle(0)));
    row("choice by page, perfect: size against zstd", "1.05 at most", each(&oracle(1)));
    let mut header = vec!["", "aim"];
    header.extend(all.iter().map(|on| on.corpus));
    Table::new(&header, rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::testing::{Content, page_of};

    #[test]
    fn a_round_measures_sizes_and_times() {
        let pages: Vec<Page> = (0..70).map(|seed| page_of(Content::Text, seed)).collect();
        let figures = measure("zstd", &pages, &[]).unwrap();
        assert_eq!(figures.sizes.len(), 70);
        assert!(figures.ratio > 2.0 && figures.out_ns > 0.0 && figures.in_ns > 0.0);
        assert!(measure("zip", &pages, &[]).is_err());
        assert!(measure("zstd+dictionary", &pages, &[]).is_err(), "nothing to train on");
        let trained = measure("zstd+dictionary", &pages, &pages).unwrap();
        assert!(trained.ratio > figures.ratio);
        assert!(figures.sizes.iter().all(|bytes| *bytes < PAGE_BYTES));
    }
}
