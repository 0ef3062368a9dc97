//! The command line.

mod traces;

pub use traces::{ReadTime, RecordArguments, SimulateArguments, TraceArguments};

use crate::address::Address;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use uzswap_engine::compress::Algorithm;
use uzswap_policy::order::PagerPolicy;

const EXAMPLE: &str = "Example:\n  uzswap run --memory 2G -- make -j8";

/// A compressed swap cache in user space, for programs that need more memory than there is.
#[derive(Debug, Parser)]
#[command(name = "uzswap", version, after_help = EXAMPLE)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in limited memory; its other pages are compressed, in RAM and on disk.
    #[command(
        after_help = "Examples:\n  uzswap run --memory 2G -- make -j8\n  sudo uzswap run --device --memory 2G --user me -- make -j8"
    )]
    Run(RunArguments),
    /// Give the whole machine a compressed swap device; SIGTERM removes it.
    #[command(
        after_help = "Example:\n  sudo uzswap serve --size 16G --pool 4G --compressor zstd:3"
    )]
    Serve(ServeArguments),
    /// Bring running programs below a memory limit, step by step. The limit lasts until this
    /// command ends, or until `uzswap detach`.
    #[command(after_help = "Example:\n  sudo uzswap attach --unit redis-server --memory 300M")]
    Attach(AttachArguments),
    /// End an attach and restore the former limits.
    #[command(after_help = "Example:\n  sudo uzswap detach --unit redis-server")]
    Detach(DetachArguments),
    /// Check or show the configuration of serve.
    #[command(after_help = "Example:\n  uzswap config check && sudo systemctl reload uzswap")]
    Config(ConfigArguments),
    /// Show the clients of a store in another machine's memory, or remove the segments of dead
    /// clients.
    #[command(after_help = "Example:\n  uzswap remote status valkey://cache.example:6379")]
    Remote(RemoteArguments),
    /// Show the stored pages, their places and ratio, and the reasons for rejected pages.
    #[command(after_help = "Example:\n  sudo uzswap status --json | jq '.[0].stats.stored_pages'")]
    Status(StatusArguments),
    /// Show the sections of the pool, 2 MiB of memory each, and take them offline or online.
    #[command(
        after_help = "Example, which moves the pages of section 4 and gives its 2 MiB back:\n  sudo uzswap memory offline 4"
    )]
    Memory(MemoryArguments),
    /// Show the status as it changes, with rates and the swapped processes. Keys change compressor
    /// and pool; q ends it.
    #[command(after_help = "Example:\n  sudo uzswap top --once")]
    Top(TopArguments),
    /// Show the last hour in a browser: print the address where --metrics serves the page, or serve
    /// it until Ctrl-C.
    #[command(after_help = "Example:\n  sudo uzswap dashboard")]
    Dashboard(DashboardArguments),
    /// Say which features work on this machine. For each of the others, name the missing part and
    /// the remedy.
    #[command(after_help = "Example:\n  sudo uzswap doctor")]
    Doctor(DoctorArguments),
    /// Undo the remains of killed runs: swap, loop devices, mounts, cgroups.
    #[command(after_help = "Example:\n  sudo uzswap clean")]
    Clean,
    /// Replace the running version by this one, after its installation. No page is lost; programs
    /// notice a pause.
    #[command(after_help = "Example:\n  sudo apt install ./uzswap.deb && sudo uzswap upgrade")]
    Upgrade,
    /// Write a running program's pages to a file for measurements, or the order in which a command
    /// touches its pages.
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
    /// Say how many faults a recorded program would have with more or less memory, or under another
    /// policy.
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
    /// At least 4 MiB. With `run --include-pool`, the default is half of --memory.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub pool: Option<u64>,
    /// Compressor of new pages: lz4, zstd, lzo, deflate, wkdm, raw; some with a level, as in
    /// zstd:3 [default: zstd; in-process lz4].
    ///
    /// Levels: lz4 -2 to 64, zstd -100 to 19, deflate 1 to 12. A higher level takes more time and
    /// less memory. The levels of lz4 from 1 on do the reverse: less time and more memory.
    #[arg(long, value_name = "NAME[:LEVEL]")]
    pub compressor: Option<Algorithm>,
    /// Where the coldest pages go: a file with a size, a block device, or none [default: an
    /// unnamed file in /var/tmp].
    ///
    /// With a size: a new file. Without: a file that was a backing before, or a block device, which
    /// is overwritten. A file that holds anything else, a symbolic link, and a file that another
    /// user owns or may write are refused. The unnamed file has half the size of the device, or
    /// half of the disk's free space if that is less. Where that is below 64 MiB, there is no file.
    ///
    /// With --in-process: a folder, and the size of the unnamed file that each process has there.
    /// The default is /var/tmp, with up to 16 times --memory.
    ///
    /// An address names a store in another machine's memory, Valkey or Redis. The store is used
    /// beside the file; a second --backing may name the file. `max` limits the bytes there.
    #[arg(long, value_name = "PATH[:SIZE]|none|valkey://HOST:PORT/?max=SIZE")]
    pub backing: Vec<OsString>,
    /// Replicas of the store that must have a page before the disk may forget it [default: 0].
    ///
    /// With 0 the disk keeps all pages, and the loss of the store costs only time.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=2))]
    pub remote_copies: Option<u8>,
    /// Seconds to wait for a page that only the store has [default: 10].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub remote_timeout: Option<u16>,
    /// File with the store's password on its first line [default: the variable
    /// UZSWAP_REMOTE_PASSWORD has the password].
    #[arg(long, value_name = "FILE")]
    pub remote_password_file: Option<PathBuf>,
    /// Write pages to the backing as they are, neither encrypted nor authenticated: for a disk that
    /// is encrypted itself.
    #[arg(long)]
    pub plain_backing: bool,
    /// How the kernel's requests reach the cache. `auto` takes ublk only where there are no loop
    /// devices.
    #[arg(long, value_enum, default_value_t = Transport::Auto)]
    pub transport: Transport,
    /// Threads that serve the device [default: six, and two more for each CPU].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(2..=256))]
    pub threads: Option<u16>,
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
    /// Loop devices if there are any, or else ublk.
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
    /// of the machine's memory is written as 'ram / 4' or 'min(ram / 2, 8G)'. 'available' is the
    /// machine's free memory or the control group's limit, less an eighth.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse, default_value = crate::size::AVAILABLE)]
    pub memory: u64,
    /// Page inside the command's processes, by a library that they preload; needs neither root nor
    /// swap. The pool is a part of --memory [default where no swap device can be made].
    #[arg(long, conflicts_with = "device")]
    pub in_process: bool,
    /// Swap to uzswap's device, which works for any program and needs root [default where the
    /// device can be made].
    #[arg(long)]
    pub device: bool,
    /// Count the pool and the daemon as parts of --memory: the command gets the rest.
    ///
    /// The command gets at least a quarter. Without this option, pool and daemon take memory beside
    /// --memory.
    #[arg(long)]
    pub include_pool: bool,
    /// While many processes swap more than they compute, let no more of them run than there are
    /// CPUs.
    ///
    /// The others are suspended, and each gets its turn: for builds and batches of workers.
    /// In-process this is the default. With the swap device it needs cgroup v2 mounted somewhere.
    #[arg(long, conflicts_with = "no_load_control")]
    pub load_control: bool,
    /// Let all processes run at the same time, however much they swap.
    #[arg(long)]
    pub no_load_control: bool,
    /// In-process, the policy that decides which page leaves: order or clock [default: order].
    ///
    /// `uzswap simulate` compares the policies on a recorded program.
    #[arg(long, value_name = "NAME")]
    pub policy: Option<PagerPolicy>,
    /// Run the command as this user, with their groups and home [default: the caller; under sudo,
    /// root].
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// Largest size of the swap device, before compression [default: the machine's memory, and at
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
    /// If the process shares its cgroup with others, no limit is set. Instead uzswap pages out the
    /// memory above --memory again and again, and pages that the process uses come back (Linux
    /// 5.10).
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
    /// The limit comes down step by step. When the processes wait for memory more than half of the
    /// time, the limit goes up again for ten seconds.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub memory: u64,
    /// Largest size of the swap device, before compression [default: the machine's memory, and at
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

/// Where the configuration of `serve` is. Its drop-ins are in the folder of this name with `.d`
/// appended.
pub const CONFIGURATION: &str = "/etc/uzswap/uzswap.conf";

/// `uzswap serve`.
#[derive(Debug, Args)]
#[command(args_override_self = true)]
pub struct ServeArguments {
    /// Largest size of the swap device, before compression: for example 16G, or 'ram / 2'.
    #[arg(long, value_name = "SIZE", value_parser = crate::size::parse)]
    pub size: Option<u64>,
    /// The cache.
    #[command(flatten)]
    pub cache: CacheArguments,
    /// File that sets the options not given here; its drop-ins are in FILE.d/*.conf [default:
    /// /etc/uzswap/uzswap.conf, if there is one].
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
    /// Show each client of the store, its segments, and whether it lives.
    #[command(after_help = "Example:\n  uzswap remote status valkey://cache.example:6379 --json")]
    Status(RemoteStatusArguments),
    /// Remove the segments of clients that have given no sign of life for a minute.
    ///
    /// A client that is only cut off loses its segments, too. Without this command, segments expire
    /// a day after their client ends.
    #[command(after_help = "Example:\n  uzswap remote gc valkey://cache.example:6379")]
    Gc(StoreArguments),
}

/// Which store.
#[derive(Debug, Args)]
pub struct StoreArguments {
    /// Its address, as for --backing.
    pub address: String,
    /// File with the password on its first line [default: the variable UZSWAP_REMOTE_PASSWORD has
    /// the password].
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
    /// Print the errors of the configuration by file and line; status 0 if there are none.
    #[command(after_help = "Example:\n  uzswap config check")]
    Check(ConfigFileArguments),
    /// Show each setting, with the file and line that set it.
    #[command(after_help = "Example:\n  uzswap config show --json")]
    Show(ConfigShowArguments),
    /// Print the configuration of zram-generator as a configuration of uzswap.
    ///
    /// Nothing is changed. A setting that uzswap does not have becomes a comment with the reason.
    #[command(after_help = "Example:\n  uzswap config import | sudo tee /etc/uzswap/uzswap.conf")]
    Import(ConfigImportArguments),
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct ConfigFileArguments {
    /// The file; drop-ins are in FILE.d/*.conf [default: /etc/uzswap/uzswap.conf].
    pub file: Option<PathBuf>,
}

/// `uzswap config import`.
#[derive(Debug, Args)]
pub struct ConfigImportArguments {
    /// The file of zram-generator [default: /etc/systemd/zram-generator.conf].
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
    /// Bring all pages of a process of an in-process run into memory, and keep them there until
    /// this command ends. Debuggers and profilers see only pages that are in memory.
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
    /// Move the pages of a section to other sections, or to the backing, and give its memory back
    /// to the kernel.
    ///
    /// The section gets no memory until it is brought online.
    Offline {
        /// The section's number; or a node, as in node1: all sections there.
        section: String,
    },
    /// Allow a section, or a node, to have memory again.
    Online {
        /// The section's number, or a node.
        section: String,
    },
}

/// `uzswap top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Print the status once, as text, with the rates of one interval.
    #[arg(long)]
    pub once: bool,
    /// Seconds between two readings.
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
    /// Id of the process that started `enter`. `enter` ends with that process.
    #[arg(long)]
    pub owner: i32,
    /// The descriptor from which `enter` reads a word before it executes the command.
    #[arg(long)]
    pub gate: i32,
    /// The user to become.
    #[arg(long)]
    pub user: Option<String>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    pub command: Vec<OsString>,
}
