//! `redis`: a server with more data than memory, beside zram, with equal memory in total.
//!
//! The measured command is a part of this program ([`serve`]). It starts the server, fills it, and
//! has Redis' own client request some keys at random, twice.

use crate::bench::{Bench, Turns};
use crate::corpus;
use crate::error::{Context, Failure};
use crate::machine::Changes;
use crate::peer::{Peer, Room};
use crate::report::{Section, Table};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use uzswap_engine::testing::Noise;

#[derive(Debug, Args)]
pub struct RedisArguments {
    /// Memory of server, client and pool together, MiB.
    #[arg(long, default_value_t = 256)]
    pub memory_mib: u64,
    /// Values of 1 KB [default: 400 000].
    #[arg(long)]
    pub keys: Option<usize>,
    /// Compressors of ours, besides the default.
    #[arg(long, value_delimiter = ',')]
    pub compressors: Vec<String>,
}

/// Arguments of the measured command.
#[derive(Debug, Args)]
pub struct ServeArguments {
    #[arg(long)]
    keys: usize,
    /// The number of requested keys, beginning with the first.
    #[arg(long)]
    asked: usize,
    #[arg(long)]
    requests: usize,
}

/// Its measurements.
#[derive(Debug, Serialize, Deserialize)]
struct RedisFigures {
    load_seconds: f64,
    /// Requests a second, for the first and the second time.
    rates: Vec<f64>,
    /// 99th percentiles of a request, ms.
    p99_ms: Vec<f64>,
}

/// Bytes of a value.
const VALUE: usize = 1000;
/// One key in this many is requested.
const ASKED: usize = 7;

pub fn run(bench: &Bench, arguments: &RedisArguments) -> Result<Section, Failure> {
    let keys = arguments.keys.unwrap_or(bench.pick(60_000, 400_000, 400_000));
    let asked = keys.div_ceil(ASKED).next_multiple_of(10_000);
    let requests = bench.pick(5_000, 20_000, 100_000);
    let memory = bench.pick(48, arguments.memory_mib, arguments.memory_mib) << 20;
    let in_process = |compressor| Peer::InProcess { compressor, is_controlled: true };
    let mut peers = vec![Peer::Zram { compressor: "lz4".into() }, in_process(None)];
    peers.extend(arguments.compressors.iter().cloned().map(Some).map(in_process));
    let own = std::env::current_exe().context("the path of this program")?;
    let command = [
        own.display().to_string(),
        "serve-redis".into(),
        format!("--keys={keys}"),
        format!("--asked={asked}"),
        format!("--requests={requests}"),
    ];
    let rounds = bench.rounds(2, 3);
    let turns = bench.take_turns(&peers, rounds, |peer| {
        let room = Room { memory, pool: Some(memory), slow_disk: false, time_max: None };
        let measured = peer.run(&mut Changes::begin(), room, &command, &bench.interrupt)?;
        serde_json::from_str::<RedisFigures>(&measured.stdout).context("the program's output")
    })?;
    Section::new("redis", "A server with more data than memory")
        .text(format!(
            "Redis with {keys} JSON values of 1 KB in {} MiB, what zram's pool takes included; \
             {requests} GETs of the first {asked} keys at random from 50 clients (redis-benchmark), \
             twice; medians of {rounds} rounds, 'against' of those in pairs.",
            memory >> 20
        ))
        .table(table(&turns))
        .raw("turns", &turns)
}

fn table(turns: &[Turns<RedisFigures>]) -> Table {
    let rows = turns.iter().map(|own| {
        own.row(|own| {
            let mut row = vec![format!("{:.1}", own.median(|run| run.load_seconds))];
            for turn in 0..2 {
                let rate = |run: &RedisFigures| run.rates[turn];
                row.push(format!("{:.0}", own.median(rate)));
                let against = own.paired(&turns[0], |own, zram| rate(own) / rate(zram));
                row.push(format!("{against:.2}"));
                row.push(format!("{:.2}", own.median(|run| run.p99_ms[turn])));
            }
            row
        })
    });
    let first = ["held by", "load (s)", "first: GET/s", "against", "p99 (ms)"];
    let second = ["second: GET/s", "against", "p99 (ms)"];
    let header: Vec<_> = first.into_iter().chain(second).collect();
    Table::new(&header, rows.collect())
}

/// The measured command: prints a [`RedisFigures`] as JSON.
pub fn serve(arguments: &ServeArguments) -> Result<(), Failure> {
    let (server, socket) = corpus::server()?;
    let began = Instant::now();
    let stream = UnixStream::connect(&socket).context("redis-server")?;
    load(&stream, arguments.keys).context("redis-server")?;
    let mut served =
        RedisFigures { load_seconds: began.elapsed().as_secs_f64(), rates: vec![], p99_ms: vec![] };
    for _ in 0..2 {
        // Time for work after the load, such as paging out.
        std::thread::sleep(Duration::from_secs(1));
        let (rate, p99) = ask(&socket, arguments)?;
        served.rates.push(rate);
        served.p99_ms.push(p99);
    }
    drop(server);
    println!("{}", serde_json::to_string(&served).context("the figures")?);
    Ok(())
}

/// Requests a second, and their 99th percentile, ms.
fn ask(socket: &Path, arguments: &ServeArguments) -> Result<(f64, f64), Failure> {
    let [requests, asked] = [arguments.requests, arguments.asked].map(|number| number.to_string());
    let output = Command::new("redis-benchmark")
        .args(["--csv", "-n", &requests, "-r", &asked, "-s"])
        .arg(socket)
        .args(["GET", "key:__rand_int__"])
        .stdin(Stdio::null())
        .output()
        .context("redis-benchmark")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // A header, then a line: name, requests a second, and the latencies mean, least, p50, p95, p99.
    let line = text.lines().last().unwrap_or_default();
    let mut fields = line.split(',').skip(1).map(|field| field.trim_matches('"').parse::<f64>());
    let (rate, p99) = (fields.next(), fields.nth(4));
    match (rate, p99) {
        (Some(Ok(rate)), Some(Ok(p99))) => Ok((rate, p99)),
        _ => Err(Failure::new(format!("redis-benchmark said: {line}"))),
    }
}

/// Sets values like those of a shop, partly common and partly random.
fn load(stream: &UnixStream, keys: usize) -> std::io::Result<()> {
    let mut noise = Noise::new(17);
    let mut values = corpus::Values::begin(stream)?;
    for number in 0..keys {
        let mut value = format!(r#"{{"id":"{:016x}","lines":["#, noise.word());
        while value.len() < VALUE {
            let (item, price) = (noise.below(5000), noise.below(100_000));
            let text = format!(r#"{{"item":{item},"price":{price},"quantity":{}}},"#, item % 7);
            value += &text;
        }
        value.truncate(VALUE);
        values.set(&format!("key:{number:012}"), &value)?;
    }
    values.end()
}
