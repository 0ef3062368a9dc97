//! `uzswap status`: what every cache on this machine holds.

use crate::cli::StatusArguments;
use crate::error::Failure;
use crate::session::{State, mount_of};
use crate::size;
use crate::stats::{Stats, sessions};
use serde::Serialize;
use std::path::{Path, PathBuf};

#[derive(Serialize)]
struct Session {
    folder: PathBuf,
    alive: bool,
    #[serde(flatten)]
    state: State,
    #[serde(flatten)]
    stats: Stats,
}

impl Session {
    fn read(folder: PathBuf) -> Option<Self> {
        let state = State::read(&folder).ok()?;
        let alive = state.daemon.is_some_and(|daemon| daemon.is_alive());
        // A dead daemon's files would answer with errors.
        let stats = if alive { Stats::read(&mount_of(&folder)) } else { Stats::default() };
        Some(Self { folder, alive, state, stats })
    }
}

/// Prints it.
pub fn status(arguments: &StatusArguments) -> Result<(), Failure> {
    if !uzswap_sys::process::is_root() {
        return Err(Failure::new("only root may read the figures; use sudo"));
    }
    let all: Vec<Session> = sessions().into_iter().filter_map(Session::read).collect();
    if arguments.json {
        let json = serde_json::to_string_pretty(&all);
        println!("{}", json.map_err(|error| Failure::new(error.to_string()))?);
    } else if all.is_empty() {
        println!("no cache is running; start one with `uzswap run` or `uzswap serve`");
    }
    if !arguments.json {
        all.iter().for_each(print);
    }
    Ok(())
}

fn print(session: &Session) {
    let stats = &session.stats;
    let get = |name: &str| stats.get(name);
    let device = session.state.device.as_deref().unwrap_or(Path::new("no device"));
    println!("{}  {}", session.folder.display(), device.display());
    if !session.alive {
        println!("  its daemon is gone; the next `uzswap run` or `serve` cleans up");
        return;
    }
    let parameter = |name: &str| stats.parameters.get(name).map_or("?", String::as_str);
    println!(
        "  pool      {} of {} for {} of pages, {} ({:.2} : 1, {})",
        size::show(get("pool_total_size")),
        size::show(get("pool_limit")),
        size::show(stats.original_bytes()),
        parameter("compressor"),
        stats.ratio().unwrap_or(0.0),
        "tables ".to_owned() + &size::show(get("metadata_size")),
    );
    println!(
        "  pages     {} held: {} in the pool, {} same-filled, {} sharing another's object, {} on the \
         backing",
        get("stored_pages"),
        get("pool_pages"),
        get("same_filled_pages"),
        get("shared_pages"),
        get("backing_pages"),
    );
    println!(
        "  backing   {} live of {}; {} written, {} read",
        size::show(get("backing_live_size")),
        size::show(get("backing_total_size")),
        size::show(get("backing_bytes_written")),
        size::show(get("backing_bytes_read")),
    );
    println!(
        "  rejected  {} poorly compressed, {} without memory, {} at the limit, {} switched off",
        get("reject_compress_poor"),
        get("reject_alloc_fail"),
        get("reject_reclaim_fail"),
        get("reject_disabled"),
    );
    println!(
        "  traffic   {} pages in, {} out, {} discarded; reads served in {} us (p50), {} us (p99)",
        get("pages_swapped_in"),
        get("pages_swapped_out"),
        get("pages_discarded"),
        get("fault_ns_p50") as f64 / 1000.0,
        get("fault_ns_p99") as f64 / 1000.0,
    );
    if !stats.writeback_error.is_empty() {
        println!(
            "  WRITEBACK STOPPED: {}; nothing is lost; mend it and echo Y > \
             {}/parameters/writeback_enabled",
            stats.writeback_error,
            mount_of(&session.folder).display()
        );
    }
    let lost = get("decompress_fail") + get("read_fail");
    if lost > 0 {
        println!("  LOST: {lost} loads failed; the processes that needed them got SIGBUS");
    }
}
