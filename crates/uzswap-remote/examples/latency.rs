//! Times of a cold page: from a store, by a bare client of it, and from a disk.
//!
//! ```text
//! cargo run --release -p uzswap-remote --features testing --example latency [ADDRESS]
//! ```
//! It starts servers of its own, and reads from ADDRESS beside them. Pages are read at random, one
//! after the other, and checked.

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, FileBacking, NoBacking};
use uzswap_engine::compress::prepare_thread;
use uzswap_engine::{Area, Cache, Config, Load, Page, Store};
use uzswap_remote::testing::{Cluster, Server};
use uzswap_remote::{Address, Connected};

const PAGES: u32 = 20_000;
const READS: u32 = 20_000;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Half noise.
fn page(number: u32) -> Page {
    let mut state = u64::from(number) | 1 << 40;
    let mut page = [0; 4096];
    for byte in &mut page[..2048] {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        *byte = (state >> 56) as u8;
    }
    page
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    format!("p50 {:.0} us, p99 {:.0} us", at(0.5), at(0.99))
}

/// A number at random.
fn next(state: &mut u32) -> u32 {
    *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    *state >> 8
}

/// A cache over a backing, with all pages in it.
fn filled(backing: Box<dyn Backing>) -> Outcome<(Cache, Area)> {
    let config = Config {
        pages_max: 1 << 20,
        ram_bytes: 1 << 30,
        ram_bytes_max: 1 << 30,
        pool_bytes_max: 2 << 20,
        algorithm: "lz4".parse()?,
        seals_backing: true,
    };
    let cache = Cache::new(config, backing)?;
    let area = cache.add_area(PAGES).ok_or("no room for pages")?;
    prepare_thread();
    for number in 0..PAGES {
        let key = area.entry(number).ok_or("no such page")?;
        while cache.store(key, &page(number)) != Store::Stored {
            cache.maintain()?;
        }
        if number % 64 == 0 {
            cache.maintain()?;
        }
    }
    cache.shrink(1 << 30);
    Ok((cache, area))
}

/// Stores pages in a cache over a backing and reads them at random.
fn measure(name: &str, backing: Box<dyn Backing>) -> Outcome<()> {
    let began = Instant::now();
    let (cache, area) = filled(backing)?;
    let rate = f64::from(PAGES) / began.elapsed().as_secs_f64();
    let mut times = Vec::new();
    let mut state = 7u32;
    for _ in 0..READS {
        let (number, mut content) = (next(&mut state) % PAGES, [0; 4096]);
        let key = area.entry(number).ok_or("no such page")?;
        let began = Instant::now();
        let loaded = cache.load(key, &mut content)?;
        times.push(began.elapsed());
        assert!(loaded == Load::Hit && content == page(number), "page {number}");
    }
    let get = |figure: &str| cache.statistic(figure).unwrap_or(0);
    println!(
        "{name}: {}, of which the store took {:.0} us; {rate:.0} pages a second out, {} bytes a page",
        percentiles(times),
        get("remote_read_ns_p50") as f64 / 1000.0,
        get("backing_bytes_written") / u64::from(PAGES),
    );
    Ok(())
}

/// Reads pages at random while a server of a cluster is killed and its replica promoted.
fn failover() -> Outcome<()> {
    let mut cluster = Cluster::start(1000);
    let address = Address::parse(&cluster.backing("copies=1&max=256M&timeout=60"))?;
    let tiers = Connected::to(&address)?.over(Box::new(NoBacking), 0)?;
    let (own, is_done) = (tiers.clone(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| own.run(|| is_done.load(Relaxed)));
        let outcome = (|| {
            let (cache, area) = filled(Box::new(tiers.clone()))?;
            let killed = cluster.primaries()[0];
            let (mut times, mut lost, began) = (Vec::new(), 0, Instant::now());
            let mut state = 7u32;
            while began.elapsed() < Duration::from_secs(10) {
                if times.len() == 2000 {
                    cluster.servers[killed].kill();
                }
                let (at, mut content) = (next(&mut state) % PAGES, [0; 4096]);
                let start = Instant::now();
                match cache.load(area.entry(at).expect("in the area"), &mut content) {
                    Ok(_) => assert!(content == page(at), "page {at}"),
                    Err(_) => lost += 1,
                }
                times.push(start.elapsed());
            }
            let most = times.iter().max().copied().unwrap_or_default();
            let count = times.len();
            println!(
                "cluster, one of three primaries killed: {}, at most {most:.1?}; {lost} of {count} lost",
                percentiles(times)
            );
            Ok(())
        })();
        is_done.store(true, Relaxed);
        tiers.ring();
        outcome
    })
}

/// Asks for as many bytes of a value as a record has, on a socket alone.
fn bare(port: u16) -> Outcome<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;
    let value = vec![7; 261_888];
    write!(stream, "*3\r\n$3\r\nSET\r\n$4\r\nbare\r\n${}\r\n", value.len())?;
    stream.write_all(&value)?;
    stream.write_all(b"\r\n")?;
    let mut answer = [0; 8192];
    let _ = stream.read(&mut answer)?;
    let mut times = Vec::new();
    let mut state = 7u32;
    for _ in 0..READS {
        let first = next(&mut state) % 250_000;
        let (from, to) = (first.to_string(), (first + 2099).to_string());
        let command = format!(
            "*4\r\n$8\r\nGETRANGE\r\n$4\r\nbare\r\n${}\r\n{from}\r\n${}\r\n{to}\r\n",
            from.len(),
            to.len()
        );
        let began = Instant::now();
        stream.write_all(command.as_bytes())?;
        let mut there = 0;
        while there < 2100 + "$2100\r\n\r\n".len() {
            there += stream.read(&mut answer[there..])?;
        }
        times.push(began.elapsed());
    }
    println!("bare client, 2100 bytes: {}", percentiles(times));
    Ok(())
}

fn main() -> Outcome<()> {
    let file = tempfile::tempfile_in("/var/tmp")?;
    file.set_len(256 << 20)?;
    measure("disk", Box::new(FileBacking::new(file, 256 << 20)?))?;
    let server = Server::start(&[]);
    let _replica = Server::replica_of(&server);
    bare(server.port())?;
    let own = [
        ("store, TCP", server.backing("copies=1&max=256M")),
        ("store, socket", format!("unix://{}?copies=1&max=256M", server.socket().display())),
    ];
    let given = std::env::args().nth(1).map(|address| ("store", address));
    for (name, address) in given.into_iter().chain(own) {
        let tiers = Connected::to(&Address::parse(&address)?)?.over(Box::new(NoBacking), 0)?;
        measure(name, Box::new(tiers.clone()))?;
        tiers.clear();
    }
    bare(server.port())?;
    failover()
}
