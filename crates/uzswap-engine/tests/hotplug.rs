//! CPUs come and go while pages are stored and loaded; a step that fails changes nothing.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use uzswap_engine::testing::{Content, Setup, page_of, skip};
use uzswap_engine::{Cache, CpuError, CpuState, Load, PAGE_BYTES, Store};
use uzswap_sys::cpu::{self, CpuSet};

fn cache() -> Cache {
    Setup { backing_bytes: 8 << 20, ..Setup::default() }.make().0
}

/// CPUs that are online, of a cache that has just been made.
fn online(cache: &Cache) -> Vec<usize> {
    let states = cache.cpu_states();
    (0..states.len()).filter(|cpu| states[*cpu] == "online").collect()
}

/// A CPU that can be taken offline; `None` if there is only one CPU.
fn spare(cache: &Cache) -> Option<usize> {
    let online = online(cache);
    if online.len() < 2 {
        skip("a machine with one CPU");
    }
    online.get(1).copied()
}

/// Adds states that note their steps.
fn add_noting(cache: &Cache, names: [&'static str; 2]) -> Arc<Mutex<Vec<String>>> {
    let steps = Arc::new(Mutex::new(Vec::new()));
    for name in names {
        let (up, down) = (steps.clone(), steps.clone());
        let state = CpuState::new(
            name,
            ["", ""],
            move |_, cpu| {
                up.lock().unwrap().push(format!("{cpu} +{name}"));
                Ok(())
            },
            move |_, cpu| {
                down.lock().unwrap().push(format!("{cpu} -{name}"));
                Ok(())
            },
        );
        cache.add_cpu_state(state).unwrap();
    }
    steps.lock().unwrap().clear();
    steps
}

#[test]
fn going_down_is_the_exact_reverse_of_coming_up() {
    let cache = cache();
    let Some(cpu) = spare(&cache) else { return };
    let steps = add_noting(&cache, ["one", "two"]);
    let took = || std::mem::take(&mut *steps.lock().unwrap());
    cache.set_cpu(cpu, "offline").unwrap();
    assert_eq!(took(), [format!("{cpu} -two"), format!("{cpu} -one")]);
    assert_eq!(cache.cpu_states()[cpu], "offline");
    cache.set_cpu(cpu, "one").unwrap();
    assert_eq!(took(), [format!("{cpu} +one")]);
    assert_eq!(cache.cpu_states()[cpu], "one");
    cache.set_cpu(cpu, "online").unwrap();
    assert_eq!(took(), [format!("{cpu} +two")]);
    cache.check();
}

#[test]
fn a_step_that_fails_is_undone_in_both_directions_at_every_state() {
    let cache = cache();
    let Some(cpu) = spare(&cache) else { return };
    add_noting(&cache, ["one", "two"]);
    let names = cache.cpu_state_names();
    let levels = names.len() - 1;
    let set = |level: usize| cache.set_cpu(cpu, names[level.min(levels)]);
    for (from, to) in (0..levels).flat_map(|from| (0..levels).map(move |to| (from, to))) {
        // Each state on the way, in the order in which it is met.
        let (low, high) = (from.min(to), from.max(to));
        for (failing, name) in names.iter().enumerate().take(high + 1).skip(low + 1) {
            set(from).unwrap();
            let before = cache.cpu_states();
            cache.fail_cpu_step(cpu, name);
            let error = set(to).unwrap_err();
            let CpuError::Step { state, stays, .. } = &error else { panic!("{error}") };
            assert_eq!((state, *stays), (name, None), "{from} to {to}: {error}");
            assert_eq!(cache.cpu_states(), before, "{from} to {to}, {failing} fails");
            cache.check();
        }
        set(from).unwrap();
        set(to).unwrap();
    }
    set(levels).unwrap();
}

#[test]
fn a_cpu_s_state_that_cannot_be_added_is_not_there() {
    let cache = cache();
    let (names, states) = (cache.cpu_state_names(), cache.cpu_states());
    let started = Arc::new(AtomicUsize::new(0));
    let (up, down) = (started.clone(), started.clone());
    let last = *online(&cache).last().unwrap();
    let state = CpuState::new(
        "front",
        ["", ""],
        move |_, cpu| {
            if cpu == last {
                return Err(std::io::ErrorKind::OutOfMemory.into());
            }
            up.fetch_add(1, SeqCst);
            Ok(())
        },
        move |_, _| {
            down.fetch_sub(1, SeqCst);
            Ok(())
        },
    );
    let error = cache.add_cpu_state(state).unwrap_err();
    assert!(error.to_string().contains("front"), "{error}");
    assert_eq!((cache.cpu_state_names(), cache.cpu_states()), (names, states));
    assert_eq!(started.load(SeqCst), 0, "those that were started are stopped");
}

#[test]
fn bad_input_changes_nothing() {
    let cache = cache();
    let before = cache.cpu_states();
    let said = |cpu, state| cache.set_cpu(cpu, state).unwrap_err().to_string();
    let beyond = cpu::possible();
    assert_eq!(
        said(beyond, "online"),
        format!("there is no CPU {beyond}; the last one is {}", beyond - 1)
    );
    assert_eq!(
        said(0, "asleep"),
        "'asleep' is no state of a CPU; use one of offline, codecs, slots, buffer, online"
    );
    for other in online(&cache).into_iter().skip(1) {
        cache.set_cpu(other, "offline").unwrap();
    }
    let last = online(&cache)[0];
    for state in ["offline", "codecs", "slots"] {
        let message = said(last, state);
        assert!(message.contains("is the last one that is online"), "{message}");
    }
    cache.follow_cpus(&CpuSet::of_caller()).unwrap();
    (0..before.len()).for_each(|cpu| drop(cache.set_cpu(cpu, before[cpu])));
    assert_eq!(cache.cpu_states(), before);
}

#[test]
fn cpus_that_the_process_may_use_are_followed_and_one_set_by_hand_stays() {
    let cache = cache();
    let Some(cpu) = spare(&cache) else { return };
    let (all, first): (CpuSet, CpuSet) =
        (online(&cache).into_iter().collect(), online(&cache).into_iter().take(1).collect());
    cache.follow_cpus(&all).unwrap();
    cache.set_cpu(cpu, "slots").unwrap();
    cache.follow_cpus(&all).unwrap();
    assert_eq!(cache.cpu_states()[cpu], "slots", "nothing has changed");
    cache.follow_cpus(&first).unwrap();
    assert_eq!(online(&cache).len(), 1);
    assert_eq!(cache.cpu_states()[cpu], "offline");
    cache.follow_cpus(&all).unwrap();
    assert_eq!(cache.cpu_states()[cpu], "online");
    // Moves from one CPU to another: the new CPU comes up before the old one goes down.
    let second: CpuSet = std::iter::once(cpu).collect();
    cache.follow_cpus(&first).unwrap();
    cache.follow_cpus(&second).unwrap();
    assert_eq!(online(&cache), [cpu]);
    // No CPU is allowed, so the last one stays.
    let none: CpuSet = std::iter::empty().collect();
    assert!(matches!(cache.follow_cpus(&none), Err(CpuError::Last { .. })));
    assert_eq!(online(&cache), [cpu]);
}

#[test]
fn cpus_come_and_go_under_load_and_every_page_is_right() {
    let setup = Setup { backing_bytes: 32 << 20, compressor: "zstd", ..Setup::default() };
    let (cache, area, _) = setup.make();
    let Some(cpu) = spare(&cache) else { return };
    let is_done = AtomicBool::new(false);
    let key = |offset: u32| area.entry(offset).unwrap();
    let page = |offset: u32, round: u32| {
        page_of(
            Content::pick((offset + round).into()),
            (u64::from(offset) << 32) + u64::from(round),
        )
    };
    std::thread::scope(|scope| {
        let (cache, is_done, page) = (&cache, &is_done, &page);
        let workers: Vec<_> = (0..4)
            .map(|thread| {
                scope.spawn(move || {
                    let mut round = 0;
                    while !is_done.load(SeqCst) {
                        round += 1;
                        for offset in (0..3000).skip(thread).step_by(4) {
                            let mut got = [0; PAGE_BYTES];
                            if round > 1 {
                                let loaded = cache.load(key(offset), &mut got).unwrap();
                                assert_eq!(loaded, Load::Hit);
                                assert!(got == page(offset, round - 1), "page {offset} is wrong");
                            }
                            while cache.store(key(offset), &page(offset, round)) != Store::Stored {
                                cache.maintain().unwrap();
                            }
                        }
                    }
                    round
                })
            })
            .collect();
        for turn in 0..if std::env::var_os("UZSWAP_FULL").is_some() { 20_000 } else { 500 } {
            let names = cache.cpu_state_names();
            cache.set_cpu(cpu, names[turn % (names.len() - 1)]).unwrap();
            cache.set_cpu(cpu, "online").unwrap();
            if turn % 50 == 0 {
                cache.set_attribute("compressor", ["lz4", "zstd", "wkdm"][turn / 50 % 3]).unwrap();
                cache.recompress(4);
                cache.train();
            }
        }
        is_done.store(true, SeqCst);
        let rounds: Vec<u32> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
        assert!(rounds.iter().all(|rounds| *rounds > 0), "{rounds:?}");
    });
    cache.check();
}
