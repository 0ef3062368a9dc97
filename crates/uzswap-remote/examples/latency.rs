//! Times of reading a cold page: from a disk, from a store in several ways, and by a bare client.
//!
//! ```text
//! cargo run -p uzswap-remote --features testing --example latency
//! ```
//! The example starts its own servers. It reads pages in random order, and checks them. The bare
//! client and the cache take turns, and read as many bytes of the same values, so that other load
//! on the machine affects both. A proxy in user space makes the delays, and has a row of its own.

mod cold;

use cold::{Outcome, PAGES, filled, next, quantile, read};
use rustix::time::{ClockId, clock_gettime};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, FileBacking, NoBacking};
use uzswap_remote::testing::{Harm, Proxy, Server};
use uzswap_remote::{Address, Connected};

/// Rounds, and the reads of each way in a round.
const ROUNDS: u32 = 10;
const READS: u32 = 1000;
/// Bytes that the bare client reads, the size of most records.
const RECORD_BYTES: usize = 2114;

/// CPU time of this process.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn cpu_of(server: &Server) -> Duration {
    let text = server.ask(&["INFO", "cpu"]);
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.parse().ok());
    let parts: [f64; 2] =
        ["used_cpu_user:", "used_cpu_sys:"].map(|name| field(name).unwrap_or(0.0));
    Duration::from_secs_f64(parts.iter().sum())
}

/// A client that only sends and receives, on one connection.
struct Bare<S> {
    stream: S,
    keys: Vec<String>,
    state: u32,
}

impl<S: Read + Write> Bare<S> {
    /// Reads the bytes of a record at random. Returns the time.
    fn read(&mut self) -> Outcome<Duration> {
        let key = &self.keys[next(&mut self.state) as usize % self.keys.len()];
        let from = next(&mut self.state) as usize % 250_000;
        let (first, last) = (from.to_string(), (from + RECORD_BYTES - 1).to_string());
        let mut answer = [0; 8192];
        let began = Instant::now();
        let command = format!(
            "*4\r\n$8\r\nGETRANGE\r\n${}\r\n{key}\r\n${}\r\n{first}\r\n${}\r\n{last}\r\n",
            key.len(),
            first.len(),
            last.len()
        );
        self.stream.write_all(command.as_bytes())?;
        let mut there = 0;
        while there < RECORD_BYTES + "$2114\r\n\r\n".len() {
            match self.stream.read(&mut answer[there..])? {
                0 => return Err("the server has gone".into()),
                count => there += count,
            }
        }
        Ok(began.elapsed())
    }
}

/// The keys of full segments.
fn keys(server: &Server) -> Vec<String> {
    let is_whole =
        |key: &String| server.ask(&["STRLEN", key]).parse().is_ok_and(|n: u64| n > 260_000);
    server.keys("uz:*").into_iter().filter(is_whole).collect()
}

/// Stores pages in a cache over a backing and reads them at random. Prints a row.
fn measure<S: Read + Write>(
    name: &str,
    backing: Box<dyn Backing>,
    server: Option<&Server>,
    after: impl FnOnce(),
    bare: impl FnOnce() -> Outcome<Option<Bare<S>>>,
) -> Outcome<()> {
    let (began, cpu_before) = (Instant::now(), cpu() + server.map(cpu_of).unwrap_or_default());
    let (cache, area) = filled(backing)?;
    let rate = f64::from(PAGES) / began.elapsed().as_secs_f64();
    let used = cpu() + server.map(cpu_of).unwrap_or_default() - cpu_before;
    let bytes = match server {
        Some(server) => server.value_bytes(),
        None => cache.statistic("backing_bytes_written").unwrap_or(0),
    };
    after();
    let mut bare = bare()?;
    let (mut times, mut bare_times, mut state) = (Vec::new(), Vec::new(), 7u32);
    let (mut server_cpu, mut own_cpu) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..ROUNDS {
        let before = (cpu(), server.map(cpu_of).unwrap_or_default());
        for _ in 0..READS {
            let number = next(&mut state) % PAGES;
            let began = Instant::now();
            assert!(read(&cache, &area, number), "page {number} is lost");
            times.push(began.elapsed());
        }
        own_cpu += cpu() - before.0;
        server_cpu += server.map(cpu_of).unwrap_or_default() - before.1;
        if let Some(bare) = &mut bare {
            for _ in 0..READS {
                bare_times.push(bare.read()?);
            }
        }
    }
    let reads = f64::from(ROUNDS * READS);
    let stored = cache.statistic("remote_read_ns_p50").unwrap_or(0) as f64 / 1000.0;
    let bare = quantile(&mut bare_times, 0.5);
    let or_none = |value: f64| if value > 0.0 { format!("{value:.0} µs") } else { String::new() };
    println!(
        "| {name} | {:.0} µs | {:.0} µs | {} | {} | {} | {:.0} + {:.0} µs | {rate:.0} | {:.0} µs | {} |",
        quantile(&mut times, 0.5),
        quantile(&mut times, 0.99),
        or_none(stored),
        or_none(bare),
        if bare > 0.0 { format!("{:.2}", stored / bare) } else { String::new() },
        cold::micros(&own_cpu) / reads,
        cold::micros(&server_cpu) / reads,
        cold::micros(&used) / f64::from(PAGES),
        bytes / u64::from(PAGES),
    );
    Ok(())
}

fn tiers(address: &str) -> Outcome<Box<dyn Backing>> {
    let connected = Connected::to(&Address::parse(address)?)?;
    Ok(Box::new(connected.over(Box::new(NoBacking), 0)?))
}

fn main() -> Outcome<()> {
    println!("{}", std::fs::read_to_string("/proc/loadavg")?.trim());
    println!(
        "| from | p50 | p99 | the read | a bare client | ratio | CPU of a read, ours + the server's | pages a second out | CPU of a page out | bytes a page |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let file = tempfile::tempfile_in("/var/tmp")?;
    file.set_len(256 << 20)?;
    let disk = Box::new(FileBacking::new(file, 256 << 20)?);
    measure::<TcpStream>("disk", disk, None, || (), || Ok(None))?;

    let server = Server::start(&[]);
    let _replica = Server::replica_of(&server);
    let parameters = "copies=1&max=256M";
    let own = tiers(&server.backing(parameters))?;
    measure(
        "store, TCP",
        own,
        Some(&server),
        || (),
        || {
            let stream = TcpStream::connect(("127.0.0.1", server.port()))?;
            stream.set_nodelay(true)?;
            Ok(Some(Bare { stream, keys: keys(&server), state: 7 }))
        },
    )?;
    server.ask(&["FLUSHALL"]);
    let socket = server.socket();
    let own = tiers(&format!("unix://{}?{parameters}", socket.display()))?;
    measure(
        "store, socket",
        own,
        Some(&server),
        || (),
        || Ok(Some(Bare { stream: UnixStream::connect(&socket)?, keys: keys(&server), state: 7 })),
    )?;
    for (name, delay) in [("no", 0), ("100 µs of", 100), ("1 ms of", 1000)] {
        server.ask(&["FLUSHALL"]);
        let proxy = Proxy::before(server.port(), false);
        let own = tiers(&proxy.backing(parameters))?;
        let name = format!("store, TCP by a proxy with {name} delay");
        let delay = Harm::Delayed(Duration::from_micros(delay));
        measure::<TcpStream>(&name, own, Some(&server), || proxy.set(delay), || Ok(None))?;
    }
    Ok(())
}
