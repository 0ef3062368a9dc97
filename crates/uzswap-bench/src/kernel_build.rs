//! `kernel-build`: a small kernel, many compile jobs, little memory.

use crate::bench::{Bench, Turns};
use crate::error::{Context, Failure};
use crate::install::{is_there, packages, shell};
use crate::machine::Changes;
use crate::peer::{FOLDER, Measured, Peer};
use crate::report::{Section, Table};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};

/// What to measure.
#[derive(Debug, Args)]
pub struct BuildArguments {
    /// Compile jobs at once.
    #[arg(long, short, default_value_t = 24)]
    pub jobs: usize,
    /// Memory of the build.
    #[arg(long, default_value = "384M", value_parser = size)]
    pub memory: u64,
    /// Part of the kernel to build; all of it unless given.
    #[arg(long)]
    pub target: Option<String>,
    /// Configurations: plain, zswap, zram, uzswap-NAME with the compressor's name.
    #[arg(long, value_delimiter = ',', default_value = "plain,zswap,zram,uzswap-lz4,uzswap-zstd")]
    pub peers: Vec<String>,
    /// Pool of ours [default: as `run` chooses it].
    #[arg(long)]
    pub pool: Option<String>,
}

fn size(text: &str) -> Result<u64, String> {
    parse_size::Config::new().with_binary().parse_size(text).map_err(|error| error.to_string())
}

/// Debian's package of kernel sources, and what building them takes.
const PACKAGES: [&str; 6] = ["linux-source-6.1", "make", "gcc", "flex", "bison", "bc"];
const ARCHIVE: &str = "/usr/src/linux-source-6.1.tar.xz";

/// The sources, unpacked and configured; made once.
fn sources() -> Result<PathBuf, Failure> {
    let folder = Path::new(FOLDER).join("linux");
    if folder.join(".ready").exists() {
        return Ok(folder);
    }
    if !Path::new(ARCHIVE).exists() || ["flex", "bison", "bc"].iter().any(|name| !is_there(name)) {
        packages(&PACKAGES)?;
    }
    eprintln!("uzswap bench: unpacking the kernel's sources");
    fs::create_dir_all(&folder).context(FOLDER)?;
    shell(&format!("tar xf {ARCHIVE} --strip-components=1"), &folder)?;
    shell("make -s tinyconfig && touch .ready", &folder)?;
    Ok(folder)
}

fn peer(name: &str, pool: Option<&str>) -> Result<Peer, Failure> {
    let lz4 = || "lz4".to_owned();
    Ok(match name {
        "plain" => Peer::Plain,
        "zswap" => Peer::Zswap { compressor: "lzo".into() },
        "zram" => Peer::Zram { compressor: lz4() },
        other => {
            let Some(compressor) = other.strip_prefix("uzswap-") else {
                let known = "plain, zswap, zram, uzswap-lz4, uzswap-zstd";
                return Err(Failure::new(format!("unknown configuration '{other}'; use {known}")));
            };
            let mut options = vec!["--compressor".to_owned(), compressor.to_owned()];
            options.extend(pool.into_iter().flat_map(|pool| ["--pool".into(), pool.to_owned()]));
            Peer::Uzswap { name: format!("uzswap, {compressor}"), options }
        }
    })
}

/// Measures.
pub fn run(bench: &Bench, arguments: &BuildArguments) -> Result<Section, Failure> {
    let pool = arguments.pool.as_deref();
    let peers = arguments.peers.iter().map(|name| peer(name, pool));
    let peers = peers.collect::<Result<Vec<_>, _>>()?;
    let folder = sources()?;
    let target = arguments.target.clone().unwrap_or_default();
    let script =
        format!("cd {} && make -s -j{} {target} >/dev/null", folder.display(), arguments.jobs);
    let command = ["sh".to_owned(), "-c".to_owned(), script];
    let rounds = bench.rounds(1, 1);
    let turns = bench.take_turns(&peers, rounds, |peer| {
        shell("make -s clean && sync && echo 3 > /proc/sys/vm/drop_caches", &folder)?;
        peer.run(&mut Changes::begin(), arguments.memory, &command, &bench.interrupt)
    })?;
    let header = [
        "swap",
        "time (s)",
        "CPU (s)",
        "pages in",
        "pages out",
        "major faults",
        "device (MB)",
        "pool peak (MB)",
    ];
    let rows = turns.iter().map(|own| own.row(cells)).collect();
    Section::new("kernel-build", "A kernel build in little memory")
        .text(format!(
            "Linux 6.1, tinyconfig, make -j{} {target} in {} MiB; medians of {rounds} rounds.",
            arguments.jobs,
            arguments.memory >> 20,
        ))
        .table(Table::new(&header, rows))
        .raw("turns", &turns)
}

fn cells(own: &Turns<Measured>) -> Vec<String> {
    let mb = |bytes: f64| format!("{:.0}", bytes / 1e6);
    vec![
        format!("{:.1}", own.median(|run| run.seconds)),
        format!("{:.1}", own.median(|run| run.cpu_seconds)),
        format!("{:.0}", own.median(|run| run.pages_in as f64)),
        format!("{:.0}", own.median(|run| run.pages_out as f64)),
        format!("{:.0}", own.median(|run| run.major_faults as f64)),
        mb(own.median(|run| (run.device_read + run.device_written) as f64)),
        mb(own.median(|run| run.pool_peak as f64)),
    ]
}
