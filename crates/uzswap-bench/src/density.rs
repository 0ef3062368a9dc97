//! `density`: bytes of memory for a stored page, with all overhead.
//!
//! The kernel does not count all memory of zram and zswap. `mm_stat` and `/proc/meminfo` have the
//! sizes of their pools. The rest is added here from the sizes of their structures.

use crate::bench::{Bench, Candidate, Turns};
use crate::corpus::{self, Corpora, Corpus};
use crate::error::{Context, Failure};
use crate::figures::quantile;
use crate::hold::{Occupancy, freed};
use crate::machine::{Changes, ZRAM};
use crate::peer::{FOLDER, Peer, Room, zram_memory};
use crate::plot::Plot;
use crate::report::{Section, Table};
use clap::Args;
use rustix::fs::FallocateFlags;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use uzswap_engine::backing::NoBacking;
use uzswap_engine::compress::prepare_thread;
use uzswap_engine::testing::Noise;
use uzswap_engine::{Cache, Config, Load, PAGE_BYTES, Page, Store, SwapEntry};

#[derive(Debug, Args)]
pub struct DensityArguments {
    /// Compressors of ours.
    #[arg(long, value_delimiter = ',', default_value = "lz4,lz4:-1,lz4:0,wkdm,zstd,zstd:3")]
    pub compressors: Vec<String>,
}

/// Besides an object, a page in zram takes `struct zram_table_entry`, 16 bytes, and zsmalloc's
/// handle, 8 (drivers/block/zram/zram_drv.h, mm/zsmalloc.c; Linux 6.18).
const ZRAM_METADATA_BYTES: u64 = 16 + 8;
/// In zswap: `struct zswap_entry`, 56 bytes, zsmalloc's handle, and a pointer in an xarray
/// (mm/zswap.c; Linux 6.18). Pages of zeros take none of these: the swap layer keeps a bit for
/// each.
const ZSWAP_METADATA_BYTES: u64 = 56 + 8 + 8;

/// Random loads that are timed.
const LOADS: usize = 5000;

/// Pages stored between two calls of `maintain`, as often as the daemon's thread runs.
const BATCH_PAGES: usize = 64;

enum PageHolder {
    Zram(Peer),
    Zswap(Peer),
    Ours(String),
    /// Without dictionaries.
    Plain(String),
    /// After recompression: each page that gains from it is in a unit.
    Recompressed(String),
}

impl Candidate for PageHolder {
    fn name(&self) -> String {
        match self {
            Self::Zram(peer) | Self::Zswap(peer) => peer.name(),
            Self::Ours(compressor) => format!("uzswap, {compressor}"),
            Self::Plain(compressor) => format!("uzswap, {compressor}, no dictionary"),
            Self::Recompressed(compressor) => format!("uzswap, {compressor}, recompressed"),
        }
    }

    fn missing(&self) -> Option<String> {
        match self {
            Self::Zram(peer) | Self::Zswap(peer) => peer.missing(),
            Self::Ours(_) | Self::Plain(_) | Self::Recompressed(_) => None,
        }
    }
}

/// Pages, and the file that has them.
struct Pages<'a> {
    name: &'a str,
    pages: &'a [Page],
    file: &'a Path,
}

impl PageHolder {
    fn measure(&self, bench: &Bench, given: &Pages<'_>) -> Result<Occupancy, Failure> {
        match self {
            Self::Zram(Peer::Zram { compressor }) => zram(compressor, given.pages),
            Self::Zram(peer) | Self::Zswap(peer) => zswap(peer, bench, given),
            Self::Ours(compressor) | Self::Plain(compressor) | Self::Recompressed(compressor) => {
                self.ours(compressor, given.pages)
            }
        }
    }

    fn ours(&self, compressor: &str, pages: &[Page]) -> Result<Occupancy, Failure> {
        let room = 2 * (pages.len() * PAGE_BYTES) as u64 + (64 << 20);
        let config = Config {
            pages_max: pages.len() as u32,
            ram_bytes: room,
            ram_bytes_max: room,
            pool_bytes_max: room,
            algorithm: compressor.parse().context("--compressors")?,
            seals_backing: true,
        };
        prepare_thread();
        let cache = Cache::new(config, Box::new(NoBacking)).context("the cache")?;
        let is_recompressed = matches!(self, Self::Recompressed(_));
        if matches!(self, Self::Plain(_)) {
            cache.set_attribute("dictionary_enabled", "N").context("dictionary_enabled")?;
        }
        let area = cache.add_area(pages.len() as u32);
        let area = area.ok_or_else(|| Failure::new("the cache has no room for the pages"))?;
        let keys: Vec<_> = area.entries().collect();
        for (number, (key, page)) in keys.iter().zip(pages).enumerate() {
            if number.is_multiple_of(BATCH_PAGES) {
                cache.maintain().context("memory for the cache")?;
            }
            if cache.store(*key, page) != Store::Stored {
                return Err(Failure::new("the cache rejected a page"));
            }
        }
        // This does the work that an idle daemon does in one or two minutes.
        let be_idle = || {
            for _ in 0..pages.len() / BATCH_PAGES {
                cache.maintain().context("memory for the cache")?;
                if is_recompressed {
                    cache.recompress(BATCH_PAGES);
                }
            }
            Ok::<_, Failure>(())
        };
        if is_recompressed {
            be_idle()?;
        }
        let total = |cache: &Cache| {
            let statistic = |name| cache.statistic(name).unwrap_or(0);
            statistic("pool_total_size") + statistic("metadata_size")
        };
        let full_bytes = total(&cache);
        let loads_ns = loads(&cache, &keys)?;
        let mut half_pages = pages.len();
        for page in freed(pages.len()) {
            cache.invalidate(keys[page]);
            half_pages -= 1;
        }
        be_idle()?;
        let full_pages = pages.len();
        Ok(Occupancy { full_pages, full_bytes, half_pages, half_bytes: total(&cache), loads_ns })
    }
}

/// The times of random loads, ns.
fn loads(cache: &Cache, keys: &[SwapEntry]) -> Result<Vec<u64>, Failure> {
    let mut noise = Noise::new(5);
    let mut page = [0; PAGE_BYTES];
    let time = |_| {
        let key = keys[noise.below(keys.len() as u64) as usize];
        let began = Instant::now();
        match cache.load(key, &mut page) {
            Ok(Load::Hit) => Ok(began.elapsed().as_nanos() as u64),
            _ => Err(Failure::new("the cache lost a page")),
        }
    };
    (0..LOADS).map(time).collect()
}

fn zram(compressor: &str, pages: &[Page]) -> Result<Occupancy, Failure> {
    let mut changes = Changes::begin();
    let bytes = (pages.len() * PAGE_BYTES) as u64;
    changes.zram(compressor, bytes)?;
    let device = "/dev/zram0";
    let mut file = File::options().write(true).open(device).context(device)?;
    file.write_all(pages.as_flattened()).context(device)?;
    file.sync_all().context(device)?;
    let total = |live: usize| zram_memory() + live as u64 * ZRAM_METADATA_BYTES;
    let full_bytes = total(pages.len());
    let mut live = pages.len();
    for page in freed(pages.len()) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let at = (page * PAGE_BYTES) as u64;
        rustix::fs::fallocate(&file, hole, at, PAGE_BYTES as u64).context(device)?;
        live -= 1;
    }
    fs::write(format!("{ZRAM}/compact"), "1").context("zram0: compact")?;
    // The table stays as large as the device.
    let half_bytes = zram_memory() + live as u64 * 8 + pages.len() as u64 * 16;
    let full_pages = pages.len();
    Ok(Occupancy { full_pages, full_bytes, half_pages: live, half_bytes, loads_ns: Vec::new() })
}

/// Starts a process that fills its memory with the pages and has them swapped out.
fn zswap(peer: &Peer, bench: &Bench, given: &Pages<'_>) -> Result<Occupancy, Failure> {
    let own = std::env::current_exe().context("the path of this program")?;
    let command = [
        own.display().to_string(),
        "hold".into(),
        format!("--pages={}", given.file.display()),
        format!("--count={}", given.pages.len()),
    ];
    let memory = 2 * (given.pages.len() * PAGE_BYTES) as u64 + (128 << 20);
    let measured =
        peer.run(&mut Changes::begin(), Room::beside_the_pool(memory), &command, &bench.interrupt)?;
    let mut held: Occupancy =
        serde_json::from_str(&measured.stdout).context("the program's output")?;
    // So far these are the bytes of the pool alone.
    held.full_bytes += held.full_pages as u64 * ZSWAP_METADATA_BYTES;
    held.half_bytes += held.half_pages as u64 * ZSWAP_METADATA_BYTES;
    held.full_pages = given.pages.len();
    held.half_pages = given.pages.len() - freed(given.pages.len()).count();
    Ok(held)
}

/// All holders with the pages of one corpus.
#[derive(serde::Serialize)]
struct OnCorpus {
    corpus: String,
    turns: Vec<Turns<Occupancy>>,
}

pub fn run(bench: &Bench, arguments: &DensityArguments) -> Result<Section, Failure> {
    let mut holders = vec![
        PageHolder::Zram(Peer::Zram { compressor: "lz4".into() }),
        PageHolder::Zswap(Peer::Zswap { compressor: "lzo".into() }),
    ];
    holders.extend(arguments.compressors.iter().cloned().map(PageHolder::Ours));
    let has_dictionary = |compressor: &&String| compressor.starts_with("zstd");
    holders.extend(
        arguments.compressors.iter().filter(has_dictionary).cloned().map(PageHolder::Plain),
    );
    let is_common = |compressor: &&String| ["lz4", "zstd"].contains(&compressor.as_str());
    holders.extend(
        arguments.compressors.iter().filter(is_common).cloned().map(PageHolder::Recompressed),
    );
    let Corpora { found, missing } = corpus::corpora(bench)?;
    let together: Vec<Page> = found.iter().flat_map(|corpus| &corpus.all).copied().collect();
    let file = Path::new(FOLDER).join("together.pages");
    let what = file.display().to_string();
    fs::write(&file, together.as_flattened()).context(&what)?;
    let mut given = Vec::new();
    for corpus in &found {
        given.push((corpus.name, &corpus.all[..], corpus.file.as_path()));
    }
    given.push(("together", &together[..], &file));
    let rounds = bench.rounds(1, 1);
    let mut all = Vec::new();
    for (name, pages, file) in given {
        let given = Pages { name, pages, file };
        let turns = bench.take_turns(&holders, rounds, |holder| holder.measure(bench, &given))?;
        all.push(OnCorpus { corpus: given.name.into(), turns });
    }
    fs::remove_file(&file).context(&what)?;
    let mut section = Section::new("density", "Memory for a page")
        .text(
            "What there was to hold. Same-filled pages are one word repeated; duplicates are \
             equal to an earlier page that is not.",
        )
        .table(shares(&found));
    for (name, why) in missing {
        section = section.text(format!("{name}: not measured. {why}"));
    }
    section
        .text(
            "Bytes of memory for a page, whatever it is, metadata counted: all pages of a corpus, \
             of all of them together, and of all of them against zram's. Ours has tables of 1 to \
             2 MiB at any size, which weigh most in the smallest columns, and beside these figures \
             a reserve of 2 MiB.",
        )
        .table(table(&all, Occupancy::full))
        .plot(plot(&all))
        .text("The same after half of the pages, at random, were freed, and the rest compacted:")
        .table(table(&all, Occupancy::half))
        .text(
            "How long the engine takes to give one of them back, all corpora together, at random \
             places: what a fault takes more than one without a codec. Recompressed pages are \
             decoded from the start of their unit.",
        )
        .table(loads_table(&all))
        .raw("corpora", &all)
}

fn shares(corpora: &[Corpus]) -> Table {
    let rows = corpora.iter().map(|corpus| {
        let share =
            |pages: usize| format!("{:.1} %", 100.0 * pages as f64 / corpus.all.len() as f64);
        vec![
            corpus.name.into(),
            corpus.all.len().to_string(),
            share(corpus.same_filled),
            share(corpus.duplicates),
        ]
    });
    Table::new(&["corpus", "pages", "same-filled", "duplicates"], rows.collect())
}

fn table(all: &[OnCorpus], bytes: fn(&Occupancy) -> f64) -> Table {
    let mut header = vec!["held by"];
    header.extend(all.iter().map(|on| on.corpus.as_str()));
    header.push("against zram");
    let Some(together) = all.last() else { return Table::new(&header, Vec::new()) };
    let zram = &together.turns[0];
    let rows = together.turns.iter().enumerate().map(|(at, own)| {
        own.row(|own| {
            let of = all.iter().map(|on| format!("{:.0}", on.turns[at].median(bytes)));
            let mut row: Vec<String> = of.collect();
            row.push(format!("{:.2}", own.paired(zram, |own, zram| bytes(own) / bytes(zram))));
            row
        })
    });
    Table::new(&header, rows.collect())
}

fn loads_table(all: &[OnCorpus]) -> Table {
    let turns = all.last().map_or(&[][..], |together| &together.turns);
    let ours = turns.iter().filter(|own| own.rounds.iter().any(|held| !held.loads_ns.is_empty()));
    let rows = ours.map(|own| {
        own.row(|own| {
            let us = |share| own.median(|held| quantile(&held.loads_ns, share) as f64 / 1000.0);
            [0.5, 0.9, 0.99].map(|share| format!("{:.1}", us(share))).into()
        })
    });
    Table::new(&["held by", "p50 (us)", "p90", "p99"], rows.collect())
}

/// Bytes a page of each holder, over all corpora.
fn plot(all: &[OnCorpus]) -> Plot {
    let title = "Memory for a page, all corpora together";
    let mut plot = Plot::new("bytes", title, "bytes a page", "").bars();
    for own in all.last().map_or(&[][..], |together| &together.turns) {
        plot = plot.series(&own.name, vec![[own.median(Occupancy::full), 0.0]]);
    }
    plot
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::testing::{Content, page_of};

    #[test]
    fn about_half_of_the_pages_are_freed_the_same_ones_each_time() {
        let first: Vec<_> = freed(10_000).collect();
        assert!((4_700..5_300).contains(&first.len()));
        assert!(freed(10_000).eq(first));
    }

    #[test]
    fn our_memory_falls_when_half_of_the_pages_are_freed() {
        let pages: Vec<Page> = (0..4000).map(|seed| page_of(Content::Text, seed)).collect();
        let held = PageHolder::Ours("lz4".into()).ours("lz4", &pages).unwrap();
        assert_eq!(held.full_pages, 4000);
        assert!(held.half_bytes < held.full_bytes * 3 / 4, "{held:?}");
        // Half a page of text from eight words compresses to less than a quarter of a page.
        assert!((100.0..2000.0).contains(&held.full()), "{held:?}");
    }
}
