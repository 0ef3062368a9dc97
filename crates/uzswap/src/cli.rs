//! The command line.

mod traces;

pub use traces::{RecordArguments, SimulateArguments, TraceArguments};

use crate::address::Address;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use uzswap_engine::compress::Algorithm;

const EXAMPLE: &str = "Example:\n  sudo uzswap run --memory 2G -- make -j8";

/// A compressed swap cache in user space: programs that need more memory than there is.
#[derive(Debug, Parser)]
#[command(name = "uzswap", version, about, after_help = EXAMPLE)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in limited memory, the rest of it compressed in RAM and on disk.
    #[command(after_help = "Example:\n  sudo uzswap run --memory 2G --user me -- make -j8")]
    Run(RunArguments),
    /// Give the whole machine a compressed swap device; SIGTERM takes it away again.
    #[command(
        after_help = "Example:\n  sudo uzswap serve --size 16G --pool 4G --compressor zstd:3"
    )]
    Serve(ServeArguments),
    /// Bring running programs below a limit, gently, until this ends or detach is called.
    #[command(after_help = "Example:\n  sudo uzswap attach --unit redis-server --memory 300M")]
    Attach(AttachArguments),
    /// End an attach and restore the former limits.
    #[command(after_help = "Example:\n  sudo uzswap detach --unit redis-server")]
    Detach(DetachArguments),
    /// Check, or show, how serve is configured.
    #[command(after_help = "Example:\n  uzswap config check && sudo systemctl reload uzswap")]
    Config(ConfigArguments),
    /// Show the clients of a store in another machine's memory, or remove dead ones' segments.
    #[command(after_help = "Example:\n  uzswap remote status valkey://cache.example:6379")]
    Remote(RemoteArguments),
    /// Show the stored pages, their place and ratio, and the rejected pages with the reasons.
    #[command(after_help = "Example:\n  sudo uzswap status --json | jq '.[0].stats.stored_pages'")]
    Status(StatusArguments),
    /// Show the sections of memory that the pool lies in, and take them off or bring them back.
    #[command(
        after_help = "Example, which moves what section 4 holds elsewhere and gives its 2 MiB \
                      back:\n  sudo uzswap memory offline 4"
    )]
    Memory(MemoryArguments),
    /// Show the same all the time, with rates and the swapped processes, and change compressor and
    /// pool by keys; q ends it.
    #[command(after_help = "Example:\n  sudo uzswap top --once")]
    Top(TopArguments),
    /// Show the last hour in a browser: prints where --metrics serves it, or else serves it until
    /// Ctrl-C.
    #[command(after_help = "Example:\n  sudo uzswap dashboard")]
    Dashboard(DashboardArguments),
    /// Tell the features that work on this machine, and for each other one the missing part and its
    /// remedy.
    #[command(after_help = "Example:\n  sudo uzswap doctor")]
    Doctor(DoctorArguments),
    /// Undo the remains of killed runs: swap, loop devices, mounts, cgroups.
    #[command(after_help = "Example:\n  sudo uzswap clean")]
    Clean,
    /// Have this program go on where the one that serves now is, after another version was
    /// installed: no page is lost, programs notice a pause.
    #[command(after_help = "Example:\n  sudo apt install ./uzswap.deb && sudo uzswap upgrade")]
    Upgrade,
    /// Measure it beside the kernel's own swap, zswap and zram.
    #[command(after_help = "Example:\n  sudo uzswap bench fault")]
    Bench(BenchArguments),
    /// Write the pages of a running program to a file, to measure with; or the order in which a
    /// command touches its pages.
    #[command(
        override_usage = "uzswap record --pid <PID> --out <FILE>\n       uzswap record --accesses \
                          <FILE> [OPTIONS] -- <COMMAND>...",
        after_help = "Examples:\n  sudo uzswap record --pid 4711 --out heap.pages\n  uzswap record \
                      --accesses sort.trace -- sort numbers"
    )]
    Record(RecordArguments),
    /// Sum up a trace of accesses, print or cut it, or export it for libCacheSim.
    #[command(after_help = "Example:\n  uzswap trace sort.trace --print --to 20")]
    Trace(TraceArguments),
    /// Tell how many faults a recorded program would have in other memory, or by another policy.
    #[command(after_help = "Example:\n  uzswap simulate sort.trace --memory 64M,128M")]
    Simulate(SimulateArguments),
    /// The process that serves the device; started by the keeper.
    #[command(hide = true)]
    Daemon(InheritArguments),
    /// The process that is responsible for the changes on the machine; started by run.
    #[command(hide = true)]
    Keeper(InheritArguments),
    /// The process that serves metrics; started by run and serve.
    #[command(hide = true)]
    Exporter(ExporterArguments),
    /// Make an area and switch it on; started by the keeper.
    #[command(hide = true)]
    SwitchOn,
    /// Take slots of the areas; started by the keeper.
    #[command(hide = true)]
    HoldSlots,
    /// Switch areas off; started by the keeper.
    #[command(hide = true)]
    SwitchOff(SwitchOffArguments),
    /// Wait to be placed in a cgroup and become the command; started by run.
    #[command(hide = true)]
    Enter(EnterArguments),
}

/// How the cache is made; the same for run and serve.
#[derive(Debug, Clone, Args)]
pub struct CacheArguments {
    /// Memory for compressed pages [default: half of the free memory beyond the limit].
    ///
    /// At least 4 MiB. With --include-pool half of --memory by default.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub pool: Option<u64>,
    /// Compressor of new pages: lz4, zstd, lzo, deflate, wkdm, raw; some with a level as in
    /// zstd:3 [default: zstd].
    ///
    /// Levels: lz4 -2 to 64, zstd -100 to 19, deflate from 1 to 12. A higher one takes more time
    /// and less memory; for lz4 it is the reverse, from 1 on.
    #[arg(long, value_name = "NAME[:LEVEL]")]
    pub compressor: Option<Algorithm>,
    /// Where the coldest pages go: a file with a size, a block device, or none [default: an
    /// unnamed file in /var/tmp].
    ///
    /// With a size: a new file. Without: a file that was a backing before, or a block device, which
    /// is overwritten. A file that holds anything else, a symbolic link, and a file that another
    /// user owns or may write are refused. The unnamed file is half as large as the device or as
    /// the free space of the disk, whichever is less; below 64 MiB there is none.
    ///
    /// With --in-process: a folder, and the size of the unnamed file that each process has there.
    ///
    /// An address is a store in another machine's memory, a Valkey or Redis: beside the file, which
    /// may be named by a second --backing. `max` limits the bytes there.
    #[arg(long, value_name = "PATH[:SIZE]|none|valkey://HOST:PORT/?max=SIZE")]
    pub backing: Vec<OsString>,
    /// Replicas of the store that must have a page before the disk may forget it [default: 0].
    ///
    /// With 0 the disk has all pages, and a store that is lost costs time alone.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=2))]
    pub remote_copies: Option<u8>,
    /// How long a page that only the store has is waited for, seconds [default: 10].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub remote_timeout: Option<u16>,
    /// The file with the store's password, on its first line; else UZSWAP_REMOTE_PASSWORD has it.
    #[arg(long, value_name = "FILE")]
    pub remote_password_file: Option<PathBuf>,
    /// Write pages to the backing as they are, neither encrypted nor authenticated: for a disk that
    /// is encrypted itself.
    #[arg(long)]
    pub plain_backing: bool,
    /// How the kernel's requests reach the cache: FUSE and loop devices, or ublk; by itself ublk
    /// only where there are no loop devices.
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    pub transport: Transport,
    /// Threads that serve the device [default: six and two for each CPU].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(2..=256))]
    pub threads: Option<u16>,
    /// How long a thread looks for the next request before it sleeps, microseconds.
    #[arg(long, value_name = "US", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    pub poll: u32,
    /// Serve metrics for Prometheus at ADDRESS/metrics, and a page that plots the last hour at
    /// ADDRESS/: a Unix socket's path, or a port of this machine, for example 127.0.0.1:9811.
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<Address>,
    /// Plain memory behind the device and no cache, to measure the transport by itself.
    #[arg(long, hide = true)]
    pub bare: bool,
}

/// See [`CacheArguments::transport`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// The first that there is.
    Auto,
    /// ublk.
    Ublk,
    /// FUSE and loop devices.
    Fuse,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Ublk => "ublk",
            Self::Fuse => "fuse",
        })
    }
}

/// `uzswap run`.
#[derive(Debug, Args)]
pub struct RunArguments {
    /// Memory that the command and its children may use, together.
    ///
    /// At least 4 MiB. Sizes are in units of 1024: 512M, 4G, 1.5GiB, or a number of bytes. A part
    /// of the machine's memory is 'ram / 4' or 'min(ram / 2, 8G)'. 'available' is the machine's
    /// free memory or the control group's limit, less an eighth.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse, default_value = crate::size::AVAILABLE)]
    pub memory: u64,
    /// Keep the command's memory small inside of its processes, by a library that they preload:
    /// without root, without swap. The pool is a part of --memory. [default where the swap device
    /// cannot be]
    #[arg(long, conflicts_with = "device")]
    pub in_process: bool,
    /// Swap to a device of its own, which serves any program and needs root [default where it can
    /// be].
    #[arg(long)]
    pub device: bool,
    /// Count the pool and the daemon in: the command gets the rest of its memory.
    ///
    /// At least a quarter. Otherwise they take memory beside --memory.
    #[arg(long)]
    pub include_pool: bool,
    /// When many processes swap more than they compute, let no more run than there are CPUs.
    ///
    /// The others are held back, unnoticed, and each gets its turn: for builds and batches of
    /// workers. In-process it is so by itself; the swap device needs cgroup v2 mounted somewhere.
    #[arg(long, conflicts_with = "no_load_control")]
    pub load_control: bool,
    /// Let all run at once, however much they swap.
    #[arg(long)]
    pub no_load_control: bool,
    /// Run the command as this user, with their groups and home [default: as the caller, under sudo
    /// as root].
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Size of the swap device, before compression, at most [default: the machine's memory, and at
    /// least 16 times the limit].
    ///
    /// At least 16 MiB. The kernel gets a part of it at first, and more as it needs it.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArguments,
    /// Also write the report to a file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print neither the live view nor the report.
    #[arg(long, short)]
    pub quiet: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Running programs.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TargetArguments {
    /// A unit of systemd.
    #[arg(long, value_name = "NAME")]
    pub unit: Option<String>,
    /// A process, with its descendants.
    ///
    /// Where it shares its cgroup with others, it has no limit: memory above --memory is paged out
    /// as it comes, and used pages come back (Linux 5.10).
    #[arg(long, value_parser = clap::value_parser!(i32).range(1..))]
    pub pid: Option<i32>,
    /// A cgroup: its folder, or its name as in /proc/PID/cgroup.
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<PathBuf>,
}

/// `uzswap attach`.
#[derive(Debug, Args)]
pub struct AttachArguments {
    /// The target.
    #[command(flatten)]
    pub target: TargetArguments,
    /// Memory that its processes may use, together.
    ///
    /// The limit comes down step by step, and goes up again for ten seconds while they wait for
    /// memory half of the time.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub memory: u64,
    /// Size of the swap device, before compression, at most [default: the machine's memory, and at
    /// least 16 times the limit].
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArguments,
    /// Print only errors.
    #[arg(long, short)]
    pub quiet: bool,
}

/// `uzswap detach`.
#[derive(Debug, Args)]
pub struct DetachArguments {
    /// The target.
    #[command(flatten)]
    pub target: TargetArguments,
}

/// Where `serve` is configured; drop-ins are in a folder of this name with `.d` behind it.
pub const CONFIGURATION: &str = "/etc/uzswap/uzswap.conf";

/// `uzswap serve`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ServeArguments {
    /// Size of the swap device, before compression, at most: for example 16G, or 'ram / 2'.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArguments,
    /// The source of all options that are not given here: a file, and the drop-ins in FILE.d/*.conf
    /// [default: /etc/uzswap/uzswap.conf, if there is one].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

/// `uzswap remote`.
#[derive(Debug, Args)]
pub struct RemoteArguments {
    /// The command.
    #[command(subcommand)]
    pub what: RemoteCommand,
}

/// The commands for a store.
#[derive(Debug, Subcommand)]
pub enum RemoteCommand {
    /// Show each client, its segments there, and whether it lives.
    #[command(after_help = "Example:\n  uzswap remote status valkey://cache.example:6379 --json")]
    Status(RemoteStatusArguments),
    /// Remove the segments of clients that have not shown for a minute that they live. One that is
    /// only cut off loses them, too; without this they end a day after their client.
    #[command(after_help = "Example:\n  uzswap remote gc valkey://cache.example:6379")]
    Gc(StoreArguments),
}

/// Which store.
#[derive(Debug, Args)]
pub struct StoreArguments {
    /// Its address, as for --backing.
    pub address: String,
    /// The file with the password, on its first line; else UZSWAP_REMOTE_PASSWORD has it.
    #[arg(long, value_name = "FILE")]
    pub remote_password_file: Option<PathBuf>,
}

/// `uzswap remote status`.
#[derive(Debug, Args)]
pub struct RemoteStatusArguments {
    /// Which store.
    #[command(flatten)]
    pub store: StoreArguments,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `uzswap config`.
#[derive(Debug, Args)]
pub struct ConfigArguments {
    /// The command.
    #[command(subcommand)]
    pub what: ConfigCommand,
}

/// The commands for the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print its errors, by file and line; status 0 when there are none.
    #[command(after_help = "Example:\n  uzswap config check")]
    Check(ConfigFileArguments),
    /// Show each setting, and its place.
    #[command(after_help = "Example:\n  uzswap config show --json")]
    Show(ConfigShowArguments),
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct ConfigFileArguments {
    /// The file; drop-ins are in FILE.d/*.conf [default: /etc/uzswap/uzswap.conf].
    pub file: Option<PathBuf>,
}

/// `uzswap config show`.
#[derive(Debug, Args)]
pub struct ConfigShowArguments {
    /// Which one.
    #[command(flatten)]
    pub which: ConfigFileArguments,
    /// Print JSON: name, value, file and line of each setting.
    #[arg(long)]
    pub json: bool,
}

/// `uzswap status`.
#[derive(Debug, Args)]
pub struct StatusArguments {
    /// Print JSON: every attribute and statistic of every cache.
    #[arg(long)]
    pub json: bool,
    /// Have a process of an in-process run bring all of its pages in and keep them in until this
    /// command ends: debuggers and profilers see no others.
    #[arg(long, value_name = "PID", conflicts_with = "json")]
    pub bring_in: Option<u32>,
}

/// `uzswap memory`.
#[derive(Debug, Args)]
pub struct MemoryArguments {
    /// The change.
    #[command(subcommand)]
    pub change: Option<MemoryChange>,
}

/// A section is brought to a state.
#[derive(Debug, Clone, Subcommand)]
pub enum MemoryChange {
    /// Move the pages of a section to others, or to the backing, and give its memory back. It gets
    /// none before it is brought online.
    Offline {
        /// The section's number; or a node, as in node1: all sections there.
        section: String,
    },
    /// Let a section, or a node, have memory again.
    Online {
        /// The section's number, or a node.
        section: String,
    },
}

/// `uzswap top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Print it as text, once, with the rates of one interval.
    #[arg(long)]
    pub once: bool,
    /// Seconds from one look to the next.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=60))]
    pub interval: u64,
}

/// `uzswap dashboard`.
#[derive(Debug, Args)]
pub struct DashboardArguments {
    /// Where to serve the page, if --metrics is off.
    #[arg(value_name = "ADDRESS", default_value = "127.0.0.1:0")]
    pub address: Address,
}

/// `uzswap exporter`.
#[derive(Debug, Args)]
pub struct ExporterArguments {
    /// Where.
    pub address: Address,
}

/// `uzswap doctor`.
#[derive(Debug, Args)]
pub struct DoctorArguments {
    /// Print JSON: each check, and its findings.
    #[arg(long)]
    pub json: bool,
}

/// `uzswap bench`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct BenchArguments {
    /// Which benchmark and how; `uzswap bench help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "BENCH")]
    pub arguments: Vec<OsString>,
}

/// `uzswap daemon` and `uzswap keeper`.
#[derive(Debug, Args)]
pub struct InheritArguments {
    /// The lock that the parent holds: a descriptor's number.
    #[arg(long)]
    pub lock: Option<i32>,
    /// The start data, from the daemon that this process was before: a descriptor's number.
    #[arg(long)]
    pub start: Option<i32>,
}

/// `uzswap switch-off`.
#[derive(Debug, Args)]
pub struct SwitchOffArguments {
    /// The devices.
    pub devices: Vec<PathBuf>,
}

/// `uzswap enter`.
#[derive(Debug, Args)]
pub struct EnterArguments {
    /// The process that started it, and must not end before it.
    #[arg(long)]
    pub owner: i32,
    /// The descriptor that tells that it is placed.
    #[arg(long)]
    pub gate: i32,
    /// The user to become.
    #[arg(long)]
    pub user: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}
