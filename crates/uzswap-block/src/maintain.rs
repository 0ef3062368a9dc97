//! The threads that drive the engine's maintenance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_engine::Cache;
use uzswap_sys::cpu::{self, CpuSet};
use uzswap_sys::node::Nodes;
use uzswap_sys::{pressure, process};

/// The interval at which to look for work without a call.
const INTERVAL: Duration = Duration::from_millis(100);

/// The interval at which to read the size of memory. To find our control group, this reads every
/// mount, and there may be thousands.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

/// The machine is short of memory when less than this share of it is available,
const SHORT_DIVISOR: u64 = 50;
/// or less than this share, and programs stand still for want of memory for this percentage of
/// time. The percentage alone is not enough: a program in a group with a limit stands still for its
/// own pages, which this very pool holds.
const SCARCE_DIVISOR: u64 = 10;
const STANDS_STILL_PERCENT: f64 = 10.0;

/// Bytes to give back at a time.
const SHRINK_BYTES: usize = 16 << 20;

/// Runs [`Cache::maintain`] whenever there is work, until dropped. On a machine with several nodes,
/// runs [`Cache::maintain_node`] in a thread for each node with processors.
pub struct Maintainer {
    cache: Arc<Cache>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Maintainer {
    /// Starts the threads. A store waits until they have begun. A daemon that replaces another gets
    /// pages immediately, while its threads may still wait for a CPU.
    pub fn start(cache: Arc<Cache>) -> std::io::Result<Self> {
        cache.wait_for_work(Duration::ZERO);
        let stop = Arc::new(AtomicBool::new(false));
        let mut maintainer = Self { cache, stop, threads: Vec::new() };
        for node in maintainer.cache.nodes_to_keep() {
            maintainer.spawn(format!("uzswap-node{node}"), move |cache, stop| {
                keep_node(node, cache, stop);
            })?;
        }
        maintainer.spawn("uzswap-maintain".into(), run)?;
        maintainer.cache.ring();
        Ok(maintainer)
    }

    fn spawn(
        &mut self,
        name: String,
        body: impl FnOnce(&Cache, &AtomicBool) + Send + 'static,
    ) -> std::io::Result<()> {
        let (cache, stop) = (self.cache.clone(), self.stop.clone());
        let thread = std::thread::Builder::new().name(name).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            // When memory runs short, threads that store wait for this thread. They have priority
            // over ordinary threads, so this thread needs priority too. The call fails in a
            // container without CAP_SYS_NICE, where no thread has priority.
            let _ = process::raise_priority();
            body(&cache, &stop);
        })?;
        self.threads.push(thread);
        Ok(())
    }
}

fn keep_node(node: usize, cache: &Cache, stop: &AtomicBool) {
    // A processor of the node is to fill the node's memory with zeros. If we may use no processor
    // of the node, this thread runs on any processor.
    let _ = Nodes::of_machine().run_on(node);
    while !stop.load(Relaxed) {
        cache.wait_for_work_on(node, INTERVAL);
        // Errors are as for `maintain`, below.
        let _ = cache.maintain_node(node);
    }
}

fn run(cache: &Cache, stop: &AtomicBool) {
    let start = Instant::now();
    let (mut idle_at, mut memory_at) = (Duration::ZERO, Duration::ZERO);
    while !stop.load(Relaxed) {
        cache.wait_for_work(INTERVAL);
        // The call fails without memory for the reserve. Then stores write back or are rejected
        // until the next try succeeds.
        let _ = cache.maintain();
        let shrinks = cache.attribute("shrinker_enabled").is_some_and(|value| value == "Y");
        if shrinks && is_short_of_memory() {
            cache.shrink(SHRINK_BYTES);
        }
        let now = start.elapsed();
        if now - idle_at >= INTERVAL {
            // The CPUs that are online, in our cpuset and in our affinity. This source has them
            // all, and in a container, without uevents, no source is faster. The call fails without
            // memory for a CPU's resources. The CPU then works without them until the next try.
            let _ = cache.follow_cpus(&CpuSet::of_caller());
            if now - memory_at >= MEMORY_INTERVAL {
                memory_at = now;
                follow_memory(cache);
            }
            cache.idle(now);
            // After `idle`, so that the interval includes its own time.
            idle_at = start.elapsed();
        }
    }
}

fn follow_memory(cache: &Cache) {
    // After an error the limit is unchanged.
    let _ = cpu::memory_of_caller().map(|bytes| cache.follow_memory(bytes));
    // The call fails if a page is in use, or if there is no room. The next call tries again.
    let _ = cache.follow_nodes();
}

fn is_short_of_memory() -> bool {
    let Ok(memory) = cpu::memory_info() else { return false };
    let below = |divisor| memory.available < memory.total / divisor;
    let stands_still = || pressure::of_machine().is_ok_and(|share| share >= STANDS_STILL_PERCENT);
    below(SHORT_DIVISOR) || below(SCARCE_DIVISOR) && stands_still()
}

impl Drop for Maintainer {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        self.cache.ring();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, PoisonError};
    use uzswap_engine::backing::NoBacking;
    use uzswap_engine::testing::{Content, page_of};
    use uzswap_engine::{Config, Store};

    /// The names of the maintaining threads.
    fn threads() -> Vec<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        let names = tasks.filter_map(name).map(|name| name.trim().to_owned());
        let is_one = |name: &String| name == "uzswap-maintain" || name.starts_with("uzswap-node");
        let mut names: Vec<_> = names.filter(is_one).collect();
        names.sort_unstable();
        names
    }

    fn cache(nodes: Nodes) -> Cache {
        let config = Config {
            pages_max: 4096,
            ram_bytes: 16 << 20,
            ram_bytes_max: 16 << 20,
            pool_bytes_max: 16 << 20,
            algorithm: "lz4".parse().unwrap(),
            seals_backing: false,
        };
        Cache::with_nodes(config, Box::new(NoBacking), nodes).unwrap()
    }

    /// Tests that count the threads of the whole process hold this lock.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_store_before_the_maintaining_thread_has_begun_waits_for_that_thread() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        for round in 0..20 {
            let cache = Arc::new(cache(Nodes::pretended(1, |_| 0)));
            let area = cache.add_area(4096).unwrap();
            let mut offsets = 0..4096;
            let mut store = || {
                let offset = offsets.next().unwrap();
                let page = page_of(Content::Random, offset.into());
                cache.store(area.entry(offset).unwrap(), &page)
            };
            while store() == Store::Stored {}
            let _maintainer = Maintainer::start(cache.clone()).unwrap();
            assert_eq!(store(), Store::Stored, "round {round}");
        }
    }

    /// Waits until these are the threads.
    #[track_caller]
    fn assert_become(names: &[&str]) {
        let began = Instant::now();
        while threads() != names && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(threads(), names);
    }

    #[test]
    fn there_is_a_thread_for_each_node_with_processors_if_there_are_several() {
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let all = ["uzswap-maintain", "uzswap-node0", "uzswap-node1"];
        let served = cpu::possible().min(2);
        let of_two = if served == 2 { &all[..] } else { &all[..1] };
        for (nodes, names) in [(1, &all[..1]), (3, of_two)] {
            let nodes = Nodes::pretended(nodes, |cpu| cpu % served);
            let maintainer = Maintainer::start(Arc::new(cache(nodes))).unwrap();
            assert_become(names);
            drop(maintainer);
            // The kernel lists a thread for a moment after it has been joined.
            assert_become(&[]);
        }
    }
}
