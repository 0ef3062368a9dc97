//! The pause of a reader after a primary of a cluster is killed, and the pages that are lost.
//!
//! ```text
//! cargo run -p uzswap-remote --features testing --example failover [ROUNDS]
//! ```
//! Each round starts a cluster of six. One thread reads cold pages at random and checks them,
//! another stores other pages. After two seconds a primary is killed as by `kill -9`, and the
//! cluster promotes its replica. The last row is with `cluster-allow-reads-when-down yes`: our keys
//! are written once, so no server has an older value.

mod cold;

use cold::{Outcome, PAGES, filled, next, quantile, read, store};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, FileBacking, NoBacking};
use uzswap_remote::testing::Cluster;
use uzswap_remote::{Address, Connected};

/// The cluster declares a server dead after this time, ms.
const NODE_TIMEOUT: u32 = 1000;
const BEFORE: Duration = Duration::from_secs(2);
const WHOLE: Duration = Duration::from_secs(10);

/// The reads of a round.
#[derive(Default)]
struct Round {
    times: Vec<Duration>,
    lost: usize,
}

/// Reads while a primary is killed. With 0 copies, a disk has each page too.
fn round(copies: u32, reads_when_down: bool) -> Outcome<Round> {
    let mut cluster = Cluster::start(NODE_TIMEOUT);
    let value = if reads_when_down { "yes" } else { "no" };
    for server in &cluster.servers {
        server.ask(&["CONFIG", "SET", "cluster-allow-reads-when-down", value]);
    }
    let address = format!("copies={copies}&max=256M&timeout=60");
    let address = Address::parse(&cluster.backing(&address))?;
    let connected = Connected::to(&address)?;
    let (local, most): (Box<dyn Backing>, u64) = match copies {
        0 => {
            let file = tempfile::tempfile_in("/var/tmp")?;
            file.set_len(256 << 20)?;
            (Box::new(FileBacking::new(file, 256 << 20)?), 256 << 20)
        }
        _ => (Box::new(NoBacking), 0),
    };
    let tiers = connected.over(local, most)?;
    let (own, is_done, is_read) = (tiers.clone(), AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| own.run(|| is_done.load(Relaxed)));
        let outcome = (|| {
            let (cache, area) = filled(Box::new(tiers.clone()))?;
            let (cache, area) = (&cache, &area);
            let killed = cluster.primaries()[0];
            let mut round = Round::default();
            std::thread::scope(|scope| {
                let (is_read, is_killed) = (&is_read, &mut false);
                scope.spawn(move || {
                    // An error means that a write has failed. The next round tries again.
                    while !is_read.load(Relaxed) {
                        let _ = store(cache, area, PAGES..PAGES + 500);
                    }
                });
                let (began, mut state) = (Instant::now(), 7u32);
                while began.elapsed() < WHOLE {
                    if began.elapsed() > BEFORE && !std::mem::replace(is_killed, true) {
                        cluster.servers[killed].kill();
                    }
                    let start = Instant::now();
                    if !read(cache, area, next(&mut state) % PAGES) {
                        round.lost += 1;
                    }
                    round.times.push(start.elapsed());
                }
                is_read.store(true, Relaxed);
            });
            Ok(round)
        })();
        is_done.store(true, Relaxed);
        tiers.ring();
        outcome
    })
}

fn main() -> Outcome<()> {
    let rounds = std::env::args().nth(1).map_or(Ok(5), |text| text.parse())?;
    println!("{}", std::fs::read_to_string("/proc/loadavg")?.trim());
    println!(
        "| copies | rounds | reads | lost | p50 of a read | longest read of a round, p50 | p99 (the longest) |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (copies, reads_when_down) in [(0, false), (1, false), (1, true)] {
        let (mut all, mut longest, mut lost) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rounds {
            let Round { times, lost: here } = round(copies, reads_when_down)?;
            longest.extend(times.iter().max());
            all.extend(times);
            lost += here;
        }
        println!(
            "| {copies}{} | {rounds} | {} | {lost} | {:.0} µs | {:.0} ms | {:.0} ms |",
            if reads_when_down { ", reads when down" } else { "" },
            all.len(),
            quantile(&mut all, 0.5),
            quantile(&mut longest, 0.5) / 1000.0,
            quantile(&mut longest, 0.99) / 1000.0,
        );
    }
    Ok(())
}
