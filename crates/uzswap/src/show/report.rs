//! The report that `run` prints at the end.

use crate::policy::load::Suspensions;
use crate::show::stats::Stats;
use crate::size;
use serde::Serialize;
use uzswap_sys::cgroup::Usage;

#[derive(Debug, Serialize)]
pub struct Report {
    /// Wall-clock time of the command, seconds.
    pub seconds: f64,
    pub exit_code: u8,
    /// The command's memory limit, bytes.
    pub memory_limit: u64,
    /// Peak of the command's memory, bytes.
    pub memory_peak: u64,
    /// Peak of the command's swapped memory, bytes, sampled five times a second.
    pub swap_peak: u64,
    pub major_faults: u64,
    /// The command's processes that the kernel killed for want of memory.
    pub oom_kills: u64,
    /// Peak of the pool, bytes, sampled five times a second.
    pub pool_peak: u64,
    /// Bytes of pages for one byte of pool at that time.
    pub ratio: f64,
    /// The share of stored pages whose slots the kernel had freed: the mean of the samples, 0 to 1.
    pub dead_share: f64,
    /// True if other runs used the same cache. The counts are then for all runs.
    pub is_shared: bool,
    /// How often a killed daemon was replaced. Counts from before the last replacement are missing.
    pub daemons_replaced: u64,
    /// The transport of requests: `ublk` or `fuse`.
    pub transport: String,
    /// The acts of load control, if it was requested.
    pub load_control: Option<Suspensions>,
    /// All counts of the cache.
    #[serde(flatten)]
    pub stats: Stats,
    /// The features that were missing.
    pub notes: Vec<String>,
}

/// The peaks of figures that rise and fall.
#[derive(Debug, Default, Clone, Copy)]
pub struct Peak {
    /// Bytes of the pool.
    pub pool: u64,
    /// Bytes of pages for one byte of pool at that time.
    pub ratio: f64,
    /// Bytes in memory.
    pub memory: u64,
    /// Bytes swapped out.
    pub swapped: u64,
    /// Sums over the samples: stored pages, and stored pages whose slots are free.
    held_pages: u64,
    dead_pages: u64,
    /// Runs that use the cache.
    pub runs: u64,
    pub daemons_replaced: u64,
}

impl Peak {
    /// The report of a cache that this many runs use.
    pub fn of(runs: u64) -> Self {
        Self { runs, ..Self::default() }
    }

    /// Takes a sample.
    pub fn update(&mut self, stats: &Stats, usage: Usage) {
        let pool = stats.get("pool_total_size");
        if pool > self.pool {
            (self.pool, self.ratio) = (pool, stats.ratio().unwrap_or(0.0));
        }
        self.memory = self.memory.max(usage.current);
        self.swapped = self.swapped.max(usage.swapped);
        self.held_pages += stats.get("stored_pages");
        self.dead_pages += stats.get("dead_pages");
    }

    /// See [`Report::dead_share`].
    pub fn dead_share(&self) -> f64 {
        self.dead_pages as f64 / self.held_pages.max(1) as f64
    }
}

impl Report {
    /// The report in some ten lines.
    pub fn text(&self) -> String {
        let get = |name: &str| self.stats.get(name);
        let us = |name: &str| get(name) as f64 / 1000.0;
        let rejected = get("reject_compress_poor")
            + get("reject_alloc_fail")
            + get("reject_reclaim_fail")
            + get("reject_disabled");
        let mut text = format!(
            "uzswap: {:.1} s in {} of {} memory, {} major faults\n",
            self.seconds,
            size::show(self.memory_peak),
            size::show(self.memory_limit),
            self.major_faults,
        );
        text += &format!(
            "  swapped   {} pages out, {} in; {} at its peak\n",
            get("pages_swapped_out"),
            get("pages_swapped_in"),
            size::show(self.swap_peak),
        );
        text += &format!(
            "  stored    {} pages: {} same-filled, {} identical to another; {} rejected, {} written \
             back\n",
            get("stores"),
            get("stores_same_filled"),
            get("duplicate_pages"),
            rejected,
            get("written_back_pages"),
        );
        text += &format!(
            "  pool      {} at its peak, ratio {:.2} : 1 ({}); {:.0} % of the pages dead\n",
            size::show(self.pool_peak),
            self.ratio,
            self.stats.parameters.get("compressor").map_or("?", String::as_str),
            self.dead_share * 100.0,
        );
        text += &format!(
            "  backing   {} written, {} read\n",
            size::show(get("backing_bytes_written")),
            size::show(get("backing_bytes_read")),
        );
        if get("remote_limit") > 0 {
            text += &format!(
                "  remote    {} written, {} reads in {:.0} us (p50), {:.0} us (p99); {} errors, {} \
                 segments lost\n",
                size::show(get("remote_bytes_written")),
                get("remote_reads"),
                us("remote_read_ns_p50"),
                us("remote_read_ns_p99"),
                get("remote_errors"),
                get("remote_lost"),
            );
        }
        text += &format!(
            "  faults    served in {:.1} us (p50), {:.1} us (p99), over {}\n",
            us("fault_ns_p50"),
            us("fault_ns_p99"),
            self.transport,
        );
        text += &self.happenings();
        text
    }

    /// The lines that some runs lack.
    fn happenings(&self) -> String {
        let get = |name: &str| self.stats.get(name);
        let mut text = String::new();
        if self.is_shared {
            text += "  shared    other runs used the cache too: pages, pool and faults include theirs\n";
        }
        if self.daemons_replaced > 0 {
            text += &format!(
                "  daemon    was killed {} times, and another one went on; the counts are those of the last daemon\n",
                self.daemons_replaced
            );
        }
        if let Some(suspended) = self.load_control {
            text += &format!("  {suspended}\n");
        }
        if self.oom_kills > 0 {
            text += &format!(
                "  {} processes were killed for lack of memory: give more --memory, --pool or --backing\n",
                self.oom_kills
            );
        }
        let lost = get("decompress_fail") + get("read_fail");
        if lost > 0 {
            text += &format!("  LOST: {lost} loads failed; their processes got SIGBUS\n");
        }
        if !self.stats.writeback_error.is_empty() {
            text += &format!("  writeback stopped: {}\n", self.stats.writeback_error);
        }
        text
    }
}
