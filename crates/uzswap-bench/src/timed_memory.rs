//! The memory of the timed programs: anonymous memory that the kernel swaps, or a region.

use crate::error::{Context, Failure};
use crate::floor;
use clap::Args;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;
use uzswap_engine::{PAGE_BYTES, Page};
use uzswap_region::{Advice, Mode, Pager, RegionVec};
use uzswap_sys::cgroup::Hierarchy;
use uzswap_sys::map::Mapping;

/// The kind of memory, and its content.
#[derive(Debug, Args)]
pub struct MemoryArguments {
    /// Pages to fill the memory with, one after another.
    #[arg(long)]
    pub pages: PathBuf,
    /// Memory to fill, MiB.
    #[arg(long)]
    pub mib: usize,
    /// A region with this compressor, instead of memory that the kernel swaps.
    #[arg(long, value_name = "COMPRESSOR")]
    pub region: Option<String>,
    /// Separate threads serve the region's faults.
    #[arg(long)]
    pub handlers: bool,
    /// Memory whose faults are served without a cache, instead.
    #[arg(long)]
    pub floor: bool,
    /// The program runs in-process, and is taken over before anything is timed.
    #[arg(long)]
    pub in_process: bool,
    /// The region's budget, MiB.
    #[arg(long, default_value_t = 0)]
    pub budget_mib: u64,
}

/// Pages of one page-out: of the order of a policy daemon's process_madvise.
pub const CHUNK_PAGES: usize = 512;
/// Pages that may stay in memory or in the swap cache after a push-out.
const STAYING_PAGES_MAX: usize = 64;

/// Memory that a program uses on top, to be taken over, and the time for the takeover.
pub const TAKEN_OVER: usize = 64 << 20;
const TAKE_OVER: Duration = Duration::from_millis(300);

/// Time limit for emptying the swap cache.
const EMPTY_MAX: Duration = Duration::from_secs(5);

const STAT_REFRESH: &str = "/proc/sys/vm/stat_refresh";

/// Memory that is full of pages.
pub enum Memory {
    /// Anonymous memory that the kernel swaps.
    Swapped(Mapping),
    /// A region of ours.
    Region(RegionVec<Page>),
    /// Memory whose pages always come back with their first content.
    Floor(Mapping),
}

/// The times of a push-out.
#[derive(Default)]
pub struct Out {
    /// ns a page, for each request.
    pub request_ns: Vec<u64>,
    /// ns a page, until all pages were out.
    pub all_ns: f64,
}

impl Memory {
    /// Makes the memory and fills it.
    pub fn new(arguments: &MemoryArguments) -> Result<Self, Failure> {
        let bytes = arguments.mib << 20;
        if arguments.floor {
            let mut pages = vec![[0; PAGE_BYTES]; bytes / PAGE_BYTES];
            fill(&mut pages, &arguments.pages)?;
            return floor::memory(pages).map(Self::Floor);
        }
        let mut memory = match &arguments.region {
            None => Self::Swapped(Mapping::reserved(bytes).context("memory")?),
            Some(compressor) => {
                let mode = if arguments.handlers { Mode::HandlerThreads } else { Mode::InThread };
                let pager = Pager::builder().compressor(compressor).mode(mode);
                let pager = pager.memory(arguments.budget_mib << 20).build().context("a pager")?;
                let pages = pager.vec_zeroed(bytes / PAGE_BYTES).context("a region")?;
                Self::Region(pages)
            }
        };
        // A program is watched after it allocates much through the C library. The mapping above
        // comes from the kernel.
        drop(black_box(vec![0u8; 16 << 20]));
        fill(memory.pages_mut(), &arguments.pages)?;
        if arguments.in_process {
            let more = vec![1u8; TAKEN_OVER];
            std::thread::sleep(TAKE_OVER);
            drop(black_box(more));
        }
        Ok(memory)
    }

    pub fn pages(&self) -> &[Page] {
        match self {
            Self::Swapped(mapping) | Self::Floor(mapping) => mapping.as_slice().as_chunks().0,
            Self::Region(pages) => pages,
        }
    }

    /// The pages, to be written.
    pub fn pages_mut(&mut self) -> &mut [Page] {
        match self {
            Self::Swapped(mapping) | Self::Floor(mapping) => {
                mapping.as_mut_slice().as_chunks_mut().0
            }
            Self::Region(pages) => pages,
        }
    }

    /// Pushes all pages out, and waits for unfinished writes.
    pub fn push_out(&mut self) -> Result<Out, Failure> {
        let count = self.pages().len();
        let mut out = Out::default();
        let start = Instant::now();
        for at in (0..count).step_by(CHUNK_PAGES) {
            let pages = CHUNK_PAGES.min(count - at);
            let began = Instant::now();
            match self {
                Self::Swapped(mapping) => {
                    mapping.page_out(at * PAGE_BYTES, pages * PAGE_BYTES).context("MADV_PAGEOUT")?
                }
                Self::Region(region) => {
                    region.advise(at..at + pages, Advice::PageOut).context("PageOut")?;
                }
                Self::Floor(mapping) => {
                    mapping.discard(at * PAGE_BYTES, pages * PAGE_BYTES).context("MADV_DONTNEED")?
                }
            }
            out.request_ns.push(began.elapsed().as_nanos() as u64 / pages as u64);
        }
        let is_swapped = matches!(self, Self::Swapped(_));
        while is_swapped && counter("nr_writeback")? > 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
        out.all_ns = start.elapsed().as_nanos() as f64 / count as f64;
        if let Self::Swapped(mapping) = self {
            empty_swap_cache(mapping)?;
        }
        Ok(out)
    }
}

/// Pages stay in the swap cache until memory is needed, if the device answers late. And the kernel
/// skips pages that another CPU has just used.
fn empty_swap_cache(memory: &Mapping) -> Result<(), Failure> {
    let group = Hierarchy::find().map(|hierarchy| hierarchy.own());
    let begin = Instant::now();
    loop {
        let staying = memory.resident_pages().context("mincore")?;
        if staying <= STAYING_PAGES_MAX {
            return Ok(());
        }
        // An error means that the kernel could not reclaim all, which the next check shows.
        let reclaimed = group.as_ref().map(|group| group.reclaim());
        memory.page_out(0, memory.len()).context("MADV_PAGEOUT")?;
        if begin.elapsed() > EMPTY_MAX {
            return Err(Failure::new(format!(
                "{staying} pages stay in memory although they were pushed out (reclaim: \
                 {reclaimed:?}); try again on a quiet machine"
            )));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A counter of /proc/vmstat, after a refresh.
fn counter(name: &str) -> Result<u64, Failure> {
    fs::write(STAT_REFRESH, "1").context(STAT_REFRESH)?;
    let text = fs::read_to_string("/proc/vmstat").context("/proc/vmstat")?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.ok_or_else(|| Failure::new(format!("/proc/vmstat has no {name}; it needs Linux 5.13")))
}

/// Fills memory with pages, all different. The file is read page by page: as a whole it would
/// exceed the memory of some configurations.
fn fill(memory: &mut [Page], path: &Path) -> Result<(), Failure> {
    let what = path.display().to_string();
    let mut file = BufReader::new(File::open(path).context(&what)?);
    let in_file = file.get_ref().metadata().context(&what)?.len() as usize / PAGE_BYTES;
    if in_file == 0 {
        return Err(Failure::new(format!("{what}: not even one page")));
    }
    let mut noise = Noise::new(7);
    for (number, page) in memory.iter_mut().enumerate() {
        if number > 0 && number.is_multiple_of(in_file) {
            file.rewind().context(&what)?;
        }
        let mut content = [0; PAGE_BYTES];
        file.read_exact(&mut content).context(&what)?;
        if number >= in_file {
            // Never the same page twice, since identical pages are kept once.
            let at = noise.below(PAGE_BYTES as u64 / 8) as usize * 8;
            content[at..at + 8].copy_from_slice(&noise.word().to_le_bytes());
        }
        *page = content;
    }
    Ok(())
}
