//! The thread that drives the engine's maintenance.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uzswap_engine::Cache;
use uzswap_sys::cpu::{self, CpuSet};
use uzswap_sys::{pressure, process};

/// How often to look without being called.
const INTERVAL: Duration = Duration::from_millis(100);

/// How often to look how much memory there is: which control group is ours takes a walk over the
/// mounts, of which there may be thousands.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

/// The machine is short of memory when less than this share of it is available,
const SHORT_DIVISOR: u64 = 50;
/// or less than this one and programs stand still for want of memory, so long in a hundred. Alone
/// that says nothing: a program in a group with a limit stands still for its own pages, which this
/// very pool holds.
const SCARCE_DIVISOR: u64 = 10;
const STANDS_STILL_PERCENT: f64 = 10.0;

/// How much to give back at a time when it is, bytes.
const SHRINK_BYTES: usize = 16 << 20;

/// Runs [`Cache::maintain`] whenever there is something to do, until dropped.
pub struct Maintainer {
    cache: Arc<Cache>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Maintainer {
    /// Starts the thread.
    pub fn start(cache: Arc<Cache>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (run_cache, run_stop) = (cache.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("uzswap-maintain".into());
        let thread = thread.stack_size(256 << 10).spawn(move || run(&run_cache, &run_stop))?;
        Ok(Self { cache, stop, thread: Some(thread) })
    }
}

fn run(cache: &Cache, stop: &AtomicBool) {
    // The threads that store run before ordinary ones, and wait for us when memory runs short.
    // Not permitted in a container without CAP_SYS_NICE: then they do not either.
    let _ = process::raise_priority();
    let start = Instant::now();
    let (mut idle_at, mut memory_at) = (Duration::ZERO, Duration::ZERO);
    while !stop.load(Relaxed) {
        cache.wait_for_work(INTERVAL);
        // No memory for the reserve: stores write back or are rejected, and it is tried again.
        let _ = cache.maintain();
        let shrinks = cache.attribute("shrinker_enabled").is_some_and(|value| value == "Y");
        if shrinks && is_short_of_memory() {
            cache.shrink(SHRINK_BYTES);
        }
        let now = start.elapsed();
        if now - idle_at >= INTERVAL {
            // What is on line, in our cpuset and in our affinity: no source says more, or sooner
            // where there are no uevents, as in a container. An error: there is no memory for what
            // a CPU has. It does without, and is tried again.
            let _ = cache.follow_cpus(&CpuSet::of_caller());
            if now - memory_at >= MEMORY_INTERVAL {
                memory_at = now;
                follow_memory(cache);
            }
            cache.idle(now);
            // From its end, so that what it takes is a share of the interval.
            idle_at = start.elapsed();
        }
    }
}

fn follow_memory(cache: &Cache) {
    // Not known: it stays as it was.
    let _ = cpu::memory_of_caller().map(|bytes| cache.follow_memory(bytes));
    // A page in use, or no room: it is tried again.
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
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}
