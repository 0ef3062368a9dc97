//! Pages lie on the node of the processor that stored them, and leave a node that goes offline.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};
use uzswap_engine::backing::NoBacking;
use uzswap_engine::testing::{Content, page_of, skip};
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, SectionError, Store};
use uzswap_sys::cpu::CpuSet;
use uzswap_sys::node::Nodes;
use uzswap_sys::process;

const PAGES: u32 = 6000;

/// A cache of two nodes, each with every other CPU. The nodes are pretended, so the test runs on
/// every machine.
fn cache(pool_bytes: u64) -> (Cache, Area) {
    let config = Config {
        pages_max: PAGES,
        ram_bytes: pool_bytes,
        ram_bytes_max: pool_bytes,
        pool_bytes_max: pool_bytes,
        algorithm: "lz4".parse().unwrap(),
        seals_backing: false,
    };
    let nodes = Nodes::pretended(2, |cpu| cpu);
    let cache = Cache::with_nodes(config, Box::new(NoBacking), nodes).unwrap();
    let area = cache.add_area(PAGES).unwrap();
    (cache, area)
}

/// A CPU of each node; `None` if there is only one CPU.
fn cpus() -> Option<[usize; 2]> {
    let allowed = CpuSet::of_caller();
    let of = |node: usize| (0..64).find(|cpu| allowed.has(*cpu) && cpu % 2 == node);
    let found = of(0).zip(of(1)).map(|(first, second)| [first, second]);
    if found.is_none() {
        skip("CPUs of one node only");
    }
    found
}

fn run_on(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

fn page(offset: u32) -> [u8; PAGE_BYTES] {
    let content = [Content::Pointers, Content::Random, Content::Mixed];
    page_of(content[offset as usize % 3], offset.into())
}

/// Stores `pages` of the pages on a CPU of each node, by their offsets. The storing thread also
/// maintains, so that the reserve of a node does not depend on other threads.
fn store_on_both(cache: &Cache, area: Area, pages: u32, cpus: [usize; 2]) {
    std::thread::scope(|scope| {
        for (node, cpu) in cpus.into_iter().enumerate() {
            scope.spawn(move || {
                run_on(cpu);
                for offset in (0..pages).filter(|offset| *offset as usize % 2 == node) {
                    if offset / 2 % 64 == 0 {
                        cache.maintain().unwrap();
                    }
                    let key = area.entry(offset).unwrap();
                    assert_eq!(cache.store(key, &page(offset)), Store::Stored, "{offset}");
                }
            });
        }
    });
}

fn check(cache: &Cache, area: Area, pages: u32) {
    let mut got = [0; PAGE_BYTES];
    for offset in 0..pages {
        assert_eq!(cache.load(area.entry(offset).unwrap(), &mut got).unwrap(), Load::Hit);
        assert!(got == page(offset), "page {offset} is wrong");
    }
    cache.check();
}

/// The percentage of pages on the node of the CPU that stored them.
fn local_percent(cache: &Cache, area: Area, pages: u32) -> u32 {
    let is_local =
        |offset: &u32| cache.node_of(area.entry(*offset).unwrap()) == Some(*offset as usize % 2);
    (0..pages).filter(is_local).count() as u32 * 100 / pages
}

#[test]
fn pages_lie_where_they_were_stored_while_there_is_room() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    store_on_both(&cache, area, PAGES, cpus);
    let local = local_percent(&cache, area, PAGES);
    println!("{local} % on the node of the CPU that stored them");
    assert!(local >= 95, "{local} %");
    let elsewhere = cache.statistic("pool_stores_elsewhere").unwrap();
    assert!(elsewhere <= u64::from(PAGES) / 20, "{elsewhere}");
    let nodes: Vec<_> = cache.sections().iter().map(|(n, _)| cache.node_of_section(*n)).collect();
    assert!(nodes.contains(&0) && nodes.contains(&1), "{nodes:?}");
    check(&cache, area, PAGES);
}

/// Incompressible pages use up a node's reserve before a thread that must wait for a processor has
/// made more.
#[test]
fn stores_wait_a_moment_for_memory_of_their_node_that_another_thread_makes() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    let [is_there, is_done] = [const { AtomicBool::new(false) }; 2];
    std::thread::scope(|scope| {
        let maintaining = scope.spawn(|| {
            // The daemon's thread raises its priority, too. If that is not permitted, the load of
            // this machine decides.
            let _ = process::raise_priority();
            cache.wait_for_work(Duration::from_millis(1));
            is_there.store(true, SeqCst);
            while !is_done.load(SeqCst) {
                cache.wait_for_work(Duration::from_millis(10));
                // The time until a CPU is free; a reserve lasts as long.
                std::thread::sleep(Duration::from_millis(2));
                cache.maintain().unwrap();
            }
        });
        let storing = cpus.into_iter().enumerate().map(|(node, cpu)| {
            let (cache, is_there) = (&cache, &is_there);
            scope.spawn(move || {
                run_on(cpu);
                while !is_there.load(SeqCst) {
                    std::thread::yield_now();
                }
                let mut noise = page_of(Content::Random, node as u64);
                for offset in (0..PAGES).filter(|offset| *offset as usize % 2 == node) {
                    noise[..4].copy_from_slice(&offset.to_ne_bytes());
                    assert_eq!(cache.store(area.entry(offset).unwrap(), &noise), Store::Stored);
                }
            })
        });
        storing.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
        is_done.store(true, SeqCst);
        cache.ring();
        maintaining.join().unwrap();
    });
    let local = local_percent(&cache, area, PAGES);
    println!("{local} % on the node of the CPU that stored them");
    assert!(local >= 95, "{local} %");
    cache.check();
}

/// The thread that maintains everything else is busy.
#[test]
fn the_memory_of_each_node_comes_by_a_thread_of_its_own() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    cache.wait_for_work(Duration::ZERO);
    let is_done = AtomicBool::new(false);
    assert_eq!(cache.nodes_to_keep(), [0, 1]);
    let free_on = |node: usize| {
        let sections = cache.sections().into_iter();
        let of_node = sections.filter(|(number, _)| cache.node_of_section(*number) == node);
        of_node.map(|(_, used)| (2 << 20) - used).sum::<usize>()
    };
    std::thread::scope(|scope| {
        for node in cache.nodes_to_keep() {
            let (cache, is_done) = (&cache, &is_done);
            cache.wait_for_work_on(node, Duration::ZERO);
            scope.spawn(move || {
                while !is_done.load(SeqCst) {
                    // A store wakes this thread in time, or memory comes too late.
                    cache.wait_for_work_on(node, Duration::from_secs(60));
                    cache.maintain_node(node).unwrap();
                }
            });
        }
        let storing = cpus.into_iter().enumerate().map(|(node, cpu)| {
            let (cache, free_on) = (&cache, &free_on);
            scope.spawn(move || {
                run_on(cpu);
                let mut noise = page_of(Content::Random, node as u64);
                for offset in (0..PAGES).filter(|offset| *offset as usize % 2 == node) {
                    noise[..4].copy_from_slice(&offset.to_ne_bytes());
                    assert_eq!(cache.store(area.entry(offset).unwrap(), &noise), Store::Stored);
                    // Pages are stored at any time, and memory comes when its thread runs.
                    let began = Instant::now();
                    while offset % 32 < 2 && free_on(node) < 1 << 20 {
                        assert!(began.elapsed() < Duration::from_secs(30), "none on node {node}");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
            })
        });
        let stored: Vec<_> = storing.collect();
        let outcomes: Vec<_> = stored.into_iter().map(|thread| thread.join()).collect();
        is_done.store(true, SeqCst);
        cache.ring();
        outcomes.into_iter().for_each(Result::unwrap);
    });
    let local = local_percent(&cache, area, PAGES);
    println!("{local} % on the node of the CPU that stored them");
    assert!(local >= 95, "{local} %");
    cache.check();
}

#[test]
fn the_maintaining_thread_leaves_a_node_s_memory_to_the_node_s_own_thread() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    let of_second = || {
        let numbers = cache.sections().into_iter().map(|(number, _)| number);
        numbers.filter(|number| cache.node_of_section(*number) == 1).count()
    };
    // Uses its own thread, which is bound to a CPU.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            run_on(cpus[1]);
            let store = |offset| {
                let key = area.entry(offset).unwrap();
                assert_eq!(
                    cache.store(key, &page_of(Content::Random, offset.into())),
                    Store::Stored
                );
            };
            let before = of_second();
            (0..300).for_each(store);
            cache.maintain().unwrap();
            assert_eq!(of_second(), before + 1, "there is no other thread");
            cache.wait_for_work_on(1, Duration::ZERO);
            (300..800).for_each(store);
            cache.maintain().unwrap();
            assert_eq!(of_second(), before + 1);
            cache.maintain_node(0).unwrap();
            assert_eq!(of_second(), before + 1);
            cache.maintain_node(1).unwrap();
            assert_eq!(of_second(), before + 2);
            (0..800).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
            cache.maintain().unwrap();
            assert_eq!(of_second(), before + 2, "nor is any given back");
            cache.maintain_node(1).unwrap();
            assert!(of_second() < before + 2);
        });
    });
    cache.check();
}

#[test]
fn a_node_that_goes_leaves_nothing_behind_and_stores_go_to_the_nearest() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    store_on_both(&cache, area, 3000, cpus);
    let on_second = |cache: &Cache| {
        cache.sections().iter().filter(|(number, _)| cache.node_of_section(*number) == 1).count()
    };
    assert!(on_second(&cache) > 0);
    cache.set_node(1, "offline").unwrap();
    assert_eq!((on_second(&cache), cache.nodes()), (0, vec![true, false]));
    check(&cache, area, 3000);
    store_on_both(&cache, area, PAGES, cpus);
    assert_eq!(on_second(&cache), 0);
    assert!(local_percent(&cache, area, PAGES) <= 50);
    check(&cache, area, PAGES);
    // The node comes back, and new pages use it.
    cache.set_node(1, "online").unwrap();
    (0..PAGES).for_each(|offset| cache.invalidate(area.entry(offset).unwrap()));
    cache.maintain().unwrap();
    store_on_both(&cache, area, PAGES, cpus);
    assert!(local_percent(&cache, area, PAGES) >= 95);
    check(&cache, area, PAGES);
}

#[test]
fn bad_input_changes_nothing() {
    let (cache, _) = cache(16 << 20);
    let before = cache.nodes();
    let said = |node, state: &str| cache.set_node(node, state).unwrap_err().to_string();
    assert_eq!(said(2, "offline"), "there is no node 2; the last one is 1");
    assert!(said(1, "away").contains("'away' is no state"));
    assert_eq!(cache.nodes(), before);
    cache.set_node(0, "offline").unwrap();
    let last = cache.set_node(1, "offline").unwrap_err();
    assert!(matches!(last, SectionError::LastNode { node: 1 }), "{last}");
    assert_eq!(cache.nodes(), [false, true]);
    cache.check();
}

#[test]
fn nodes_come_and_go_under_load_and_every_page_is_right() {
    let Some(cpus) = cpus() else { return };
    let (cache, area) = cache(64 << 20);
    store_on_both(&cache, area, 3000, cpus);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (node, cpu) in cpus.into_iter().enumerate() {
            let (cache, is_done) = (&cache, &is_done);
            scope.spawn(move || {
                run_on(cpu);
                let mut got = [0; PAGE_BYTES];
                while !is_done.load(SeqCst) {
                    for offset in (0..3000).filter(|offset| *offset as usize % 2 == node) {
                        let key = area.entry(offset).unwrap();
                        assert_eq!(cache.load(key, &mut got).unwrap(), Load::Hit);
                        assert!(got == page(offset), "page {offset} is wrong");
                        cache.invalidate(key);
                        while cache.store(key, &got) != Store::Stored {
                            cache.maintain().unwrap();
                        }
                    }
                }
            });
        }
        let mut gone = 0;
        for turn in 0..if std::env::var_os("UZSWAP_FULL").is_some() { 1000 } else { 40 } {
            cache.maintain().unwrap();
            gone += usize::from(cache.set_node(turn % 2, "offline").is_ok());
            cache.set_node(turn % 2, "online").unwrap();
        }
        is_done.store(true, SeqCst);
        assert!(gone > 20, "{gone} times");
    });
    check(&cache, area, 3000);
}

/// This needs a machine that has nodes. The kernel reports the node of each page of this process.
#[test]
fn memory_lies_on_real_nodes() {
    let machine = Nodes::of_machine();
    let with_memory = machine.with_memory().unwrap_or_default();
    if with_memory.len() < 2 {
        skip("a machine with one node");
        return;
    }
    let config = Config {
        pages_max: PAGES,
        ram_bytes: 64 << 20,
        ram_bytes_max: 64 << 20,
        pool_bytes_max: 64 << 20,
        algorithm: "lz4".parse().unwrap(),
        seals_backing: false,
    };
    let cache = Cache::with_nodes(config, Box::new(NoBacking), machine.clone()).unwrap();
    let area = cache.add_area(PAGES).unwrap();
    let allowed = CpuSet::of_caller();
    for node in with_memory.iter().copied() {
        let of_node = |cpu: &usize| {
            allowed.has(*cpu) && {
                run_on(*cpu);
                machine.here() == node
            }
        };
        assert!((0..64).any(|cpu| of_node(&cpu)), "no CPU of node {node}");
        let mut local = 0;
        for offset in 0..PAGES / 2 {
            if offset % 50 == 0 {
                cache.maintain().unwrap();
            }
            let key = area.entry(offset).unwrap();
            cache.invalidate(key);
            assert_eq!(cache.store(key, &page(offset)), Store::Stored);
            local += u32::from(cache.node_of(key) == Some(node));
        }
        println!("node {node}: {} % local", local * 100 / (PAGES / 2));
        assert!(local * 100 >= 95 * (PAGES / 2), "{local} of {} on node {node}", PAGES / 2);
        check(&cache, area, PAGES / 2);
    }
    // Pages by node, over all of the process's mappings, before the other nodes are left.
    let on_node = |node: usize| {
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap();
        let field = format!("N{node}=");
        let counts = maps.split_whitespace().filter_map(|word| word.strip_prefix(&field));
        counts.map(|count| count.parse::<usize>().unwrap()).sum::<usize>()
    };
    let node = with_memory[1];
    let before = on_node(node);
    cache.set_node(node, "offline").unwrap();
    let after = on_node(node);
    println!("node {node}: {before} pages of the process, {after} without the pool's");
    assert!(after + 512 < before, "{before}, then {after}");
    check(&cache, area, PAGES / 2);
}
