//! A cache over a store, with pages whose content is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, FileBacking, NoBacking};
use uzswap_engine::compress::prepare_thread;
use uzswap_engine::testing::skip;
use uzswap_engine::{Area, Cache, Config, Load, Page, Store, SwapEntry};
use uzswap_remote::testing::{Server, await_that, has_server};
use uzswap_remote::{Address, Connected, Tiers};

/// Pages of a test, some 11 MB when compressed.
pub const PAGES: u32 = 8000;

/// A page with its own content, which compresses to a third.
fn page(number: u32, round: u32) -> Page {
    let mut state = u64::from(number) << 32 | u64::from(round) | 1;
    let mut page = [0; 4096];
    for chunk in page.chunks_exact_mut(16) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        chunk[..5].copy_from_slice(&state.to_be_bytes()[..5]);
        chunk[5] = number as u8;
    }
    page
}

/// A cache over a store, with its background thread.
pub struct Rig {
    cache: Arc<Cache>,
    tiers: Tiers,
    area: Area,
    is_done: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Rig {
    /// A cache over a store and a local file of `local` bytes; 0 for none.
    pub fn new(address: &str, local: u64) -> Result<Self, String> {
        let address = Address::parse(address).map_err(|error| error.to_string())?;
        let connected = Connected::to(&address).map_err(|error| error.to_string())?;
        let backing: Box<dyn Backing> = if local == 0 {
            Box::new(NoBacking)
        } else {
            let file = tempfile::tempfile_in("/var/tmp").unwrap();
            let bytes = connected.file_bytes(local);
            file.set_len(bytes).unwrap();
            Box::new(FileBacking::new(file, bytes).unwrap())
        };
        let tiers = connected.over(backing, local).map_err(|error| error.to_string())?;
        let config = Config {
            pages_max: 1 << 20,
            ram_bytes: 1 << 30,
            ram_bytes_max: 1 << 30,
            pool_bytes_max: 2 << 20,
            algorithm: "lz4".parse().unwrap(),
            seals_backing: true,
        };
        let cache = Arc::new(Cache::new(config, Box::new(tiers.clone())).unwrap());
        let area = cache.add_area(1 << 16).unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (tiers, is_done) = (tiers.clone(), is_done.clone());
            move || tiers.run(|| is_done.load(Relaxed))
        });
        Ok(Self { cache, tiers, area, is_done, thread: Some(thread) })
    }

    /// The backing, which may outlive the rig.
    pub fn tiers(&self) -> Tiers {
        self.tiers.clone()
    }

    fn key(&self, number: u32) -> SwapEntry {
        self.area.entry(number).unwrap()
    }

    /// Stores pages. Waits while there is no room for a page.
    pub fn fill(&self, numbers: impl Iterator<Item = u32>, round: u32) {
        prepare_thread();
        let until = Instant::now() + Duration::from_secs(60);
        for number in numbers {
            while self.cache.store(self.key(number), &page(number, round)) != Store::Stored {
                assert!(Instant::now() < until, "no room: {:?}", self.cache.writeback_failure());
                self.cache.maintain().unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            if number % 64 == 0 {
                self.cache.maintain().unwrap();
            }
        }
        self.cache.shrink(1 << 20);
    }

    /// Loads pages and checks their content. Returns the number of errors.
    pub fn check(&self, numbers: impl Iterator<Item = u32>, round: u32) -> usize {
        prepare_thread();
        let mut errors = 0;
        for number in numbers {
            let mut content = [0; 4096];
            match self.cache.load(self.key(number), &mut content) {
                Ok(Load::Hit) => assert!(content == page(number, round), "page {number}"),
                Ok(Load::Absent) => panic!("page {number} is absent"),
                Err(_) => errors += 1,
            }
        }
        errors
    }

    pub fn figure(&self, name: &str) -> u64 {
        self.cache.statistic(name).unwrap()
    }

    /// Waits until the store has a copy of each segment on the disk.
    pub fn await_copies(&self) {
        let is_quiet = || {
            let before = self.figure("remote_writes");
            std::thread::sleep(Duration::from_millis(700));
            before > 0 && before == self.figure("remote_writes")
        };
        await_that("copies are written", is_quiet);
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.is_done.store(true, Relaxed);
        self.tiers.ring();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
            self.cache.check();
        }
    }
}

/// A server, if its program is installed.
pub fn server(arguments: &[&str]) -> Option<Server> {
    if !has_server() {
        skip("no server: ./setup tests installs it");
        return None;
    }
    Some(Server::start(arguments))
}

/// Bytes of the leases of all caches.
pub fn lease_bytes(server: &Server) -> u64 {
    let leases = server.keys("uz:*:lease");
    leases.iter().map(|key| server.ask(&["STRLEN", key]).parse::<u64>().unwrap()).sum()
}

/// Damages each segment of the client `me`, in three ways in turn: another segment's content,
/// flipped bytes, a missing end.
pub fn damage(server: &Server) {
    const CUT: &str = "redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, 9999))";
    const TURN: &str = "for at = 0, 262143, 509 do redis.call('SETRANGE', KEYS[1], at, '?') end";
    let mut keys = server.keys("uz:me:*");
    keys.retain(|key| !key.ends_with(":lease"));
    for (at, two) in keys.chunks(2).enumerate() {
        match at % 3 {
            0 if two.len() == 2 => {
                server.ask(&["RENAME", &two[0], "kept"]);
                server.ask(&["RENAME", &two[1], &two[0]]);
                server.ask(&["RENAME", "kept", &two[1]]);
            }
            1 => two.iter().for_each(|key| _ = server.ask(&["EVAL", TURN, "1", key])),
            _ => two.iter().for_each(|key| _ = server.ask(&["EVAL", CUT, "1", key])),
        }
    }
}
