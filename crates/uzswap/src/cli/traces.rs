//! The arguments of `record`, `trace` and `simulate`.

use clap::{ArgGroup, Args};
use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use uzswap_engine::compress::Algorithm;
use uzswap_policy::replay::Policy;

/// `uzswap record`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("recorded").args(["pid", "accesses"]).required(true)))]
pub struct RecordArguments {
    /// Record the pages of this running program, with their contents. Needs root.
    #[arg(long, requires = "out", conflicts_with = "command",
        value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// New file for the pages.
    #[arg(long, value_name = "FILE", requires = "pid")]
    pub out: Option<PathBuf>,
    /// Run a command, and write to this new file which pages it touches, without their contents.
    ///
    /// The command runs in-process within --memory. A touch of a page outside of it is a fault, and
    /// each fault is recorded. The command takes several times as long. See `uzswap trace` and
    /// `uzswap simulate`.
    #[arg(long, value_name = "FILE", requires = "command")]
    pub accesses: Option<PathBuf>,
    /// Memory for the pages of each process of the command. With less memory, more
    /// touches are recorded.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse, default_value = "16M",
        conflicts_with = "pid")]
    pub memory: u64,
    /// Largest size of the trace; later accesses are counted and not written.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse, default_value = "128M",
        conflicts_with = "pid")]
    pub max: u64,
    /// Compressor whose sizes of pages the trace has [default: lz4].
    #[arg(long, value_name = "NAME[:LEVEL]", conflicts_with = "pid")]
    pub compressor: Option<Algorithm>,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `uzswap trace`.
#[derive(Debug, Args)]
pub struct TraceArguments {
    /// The trace, from `uzswap record --accesses`.
    pub file: PathBuf,
    /// Print the events: number, time, process, page, kind, size, call site.
    #[arg(long, conflicts_with_all = ["cut", "export"])]
    pub print: bool,
    /// The first event to print.
    #[arg(long, value_name = "N", requires = "print", default_value_t = 0)]
    pub from: usize,
    /// The event before which to stop.
    #[arg(long, value_name = "M", requires = "print")]
    pub to: Option<usize>,
    /// Write the events from N to before M to the new file of --out.
    #[arg(long, value_name = "N..M", requires = "out", value_parser = range, conflicts_with = "export")]
    pub cut: Option<Range<usize>>,
    /// New file for the events.
    #[arg(long, value_name = "FILE", requires = "cut")]
    pub out: Option<PathBuf>,
    /// Write the touches to a new file as libCacheSim reads them (oracleGeneral), each page an
    /// object of its compressed size.
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,
}

/// `N..M`.
fn range(text: &str) -> Result<Range<usize>, String> {
    let ends = text.split_once("..").map(|(start, end)| (start.parse(), end.parse()));
    match ends {
        Some((Ok(start), Ok(end))) if start < end => Ok(start..end),
        _ => Err(format!("'{text}' is not a range of events; write for example 0..1000")),
    }
}

/// The time of a read of the backing, ns; `None` without a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadTime(pub Option<u64>);

/// `none`, or a number with `ns`, `us`, `ms` or `s`.
fn read_time(text: &str) -> Result<ReadTime, String> {
    if text == "none" {
        return Ok(ReadTime(None));
    }
    let unit_at = text.find(|one: char| one.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let nanos = match unit {
        "ns" => Some(1.0),
        "us" => Some(1e3),
        "ms" => Some(1e6),
        "s" => Some(1e9),
        _ => None,
    };
    let number = number.parse::<f64>().ok().filter(|number| *number >= 0.0);
    let time = number.zip(nanos).map(|(number, nanos)| (number * nanos) as u64);
    let wrong = || format!("'{text}' is no time of a read; write for example 100us, 8ms or none");
    time.map(|time| ReadTime(Some(time))).ok_or_else(wrong)
}

/// `uzswap simulate`.
#[derive(Debug, Args)]
pub struct SimulateArguments {
    /// The trace, from `uzswap record --accesses`.
    pub file: PathBuf,
    /// Memory for the pages and the pool together, one or several sizes.
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = crate::size::parse,
        required_unless_present_any = ["fit", "plot", "fleet"])]
    pub memory: Vec<u64>,
    /// Policies to compare: order, clock, fifo, lru, belady [default: all].
    ///
    /// `order` is the one that runs in-process. The last three see each touch, which no pager does,
    /// and bring in one page a fault. `belady` sees the future: with pages of one compressed size,
    /// no policy has fewer such faults.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub policy: Vec<Policy>,
    /// The time that a read of the backing takes, with its unit; or none.
    ///
    /// With a backing the pool gives up pages that the program does not touch, the more, the faster
    /// the backing is read. With `none` the pool keeps them, and a run ends where it has no room.
    #[arg(long, value_name = "TIME|none", default_value = "100us", value_parser = read_time)]
    pub backing: ReadTime,
    /// Print the least memory with which faults take less than a tenth of the program's time.
    #[arg(long, conflicts_with = "memory")]
    pub fit: bool,
    /// Draw faults over memory instead of printing them [memory: sixteen steps from the recorded
    /// size to that of all pages].
    #[arg(long, conflicts_with = "fit")]
    pub plot: bool,
    /// Estimate the memory that many machines would save if they ran the programs of FILE and of
    /// these traces. Prints its assumptions.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["fit", "plot", "memory"])]
    pub fleet: Vec<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_of_a_read_has_a_unit() {
        let times = ["none", "100us", "8ms", "1.5us", "0ns"].map(read_time);
        let expected = [None, Some(100_000), Some(8_000_000), Some(1500), Some(0)];
        assert_eq!(times, expected.map(|time| Ok(ReadTime(time))));
        for text in ["", "100", "us", "-1us", "1 hour", "nanus"] {
            assert!(read_time(text).is_err_and(|error| error.contains("is no time")), "{text}");
        }
    }
}
