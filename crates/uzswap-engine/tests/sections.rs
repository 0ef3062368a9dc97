//! Sections go on line and off line while pages are stored and loaded. No page is lost. The message
//! about a section that cannot go off line names the section and the reason.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use uzswap_engine::backing::NoBacking;
use uzswap_engine::testing::{Content, Setup, page_of};
use uzswap_engine::{Area, Cache, Config, Load, PAGE_BYTES, SectionError, SectionState, Store};
use uzswap_sys::shared;

const SECTION: usize = 2 << 20;

fn page(offset: u32, round: u32) -> [u8; PAGE_BYTES] {
    let content = [Content::Text, Content::Pointers, Content::Random, Content::Mixed];
    page_of(content[(offset + round) as usize % 4], u64::from(offset) << 32 | u64::from(round))
}

fn store(cache: &Cache, area: Area, offset: u32, round: u32) {
    let key = area.entry(offset).unwrap();
    if offset.is_multiple_of(50) {
        cache.maintain().unwrap();
    }
    while cache.store(key, &page(offset, round)) != Store::Stored {
        cache.maintain().unwrap();
    }
}

fn check(cache: &Cache, area: Area, pages: u32, round: u32) {
    let mut got = [0; PAGE_BYTES];
    for offset in 0..pages {
        let load = cache.load(area.entry(offset).unwrap(), &mut got).unwrap();
        assert_eq!(load, Load::Hit, "page {offset} is lost");
        assert!(got == page(offset, round), "page {offset} is wrong");
    }
    cache.check();
}

fn count(cache: &Cache, state: SectionState) -> usize {
    cache.section_states().into_iter().filter(|other| *other == state).count()
}

/// The section with the most frames in use.
fn fullest(cache: &Cache) -> usize {
    cache.sections().into_iter().max_by_key(|(_, used)| *used).unwrap().0
}

#[test]
fn bad_input_changes_nothing() {
    let (cache, area, _) = Setup { ram_bytes: 8 << 20, ..Setup::default() }.make();
    (0..300).for_each(|offset| store(&cache, area, offset, 0));
    let before = cache.section_states();
    assert_eq!(before.len(), 4);
    let said = |section, state: &str| cache.set_section(section, state).unwrap_err().to_string();
    assert_eq!(said(4, "offline"), "there is no section 4; the last one is 3");
    assert_eq!(
        said(usize::MAX, "online"),
        format!("there is no section {}; the last one is 3", usize::MAX)
    );
    for state in ["", "absent", "going-offline", "asleep"] {
        let expected =
            format!("'{state}' is no state to bring a section to; use online or offline");
        assert_eq!(said(0, state), expected);
    }
    assert_eq!(cache.section_states(), before);
    for section in 1..4 {
        cache.set_section(section, "offline").unwrap();
    }
    let message = said(0, "offline");
    assert!(message.contains("section 0 is the last one"), "{message}");
    assert_eq!(cache.section_states()[0], SectionState::Online);
    assert!(matches!(cache.empty_section(1), Err(SectionError::Standing { state: "offline", .. })));
    check(&cache, area, 300, 0);
}

#[test]
fn pages_of_an_offline_section_are_elsewhere_and_it_stays_offline() {
    let setup = Setup { ram_bytes: 16 << 20, pool_bytes: 16 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    (0..3000).for_each(|offset| store(&cache, area, offset, 0));
    let section = fullest(&cache);
    cache.set_section(section, "offline").unwrap();
    assert!(cache.sections().iter().all(|(number, _)| *number != section));
    check(&cache, area, 3000, 0);
    // The pool grows again, around it.
    (0..3000).for_each(|offset| store(&cache, area, offset, 1));
    cache.maintain().unwrap();
    assert_eq!(cache.section_states()[section], SectionState::Offline);
    cache.set_section(section, "offline").unwrap();
    cache.set_section(section, "online").unwrap();
    assert_eq!(cache.section_states()[section], SectionState::Online);
    check(&cache, area, 3000, 1);
}

#[test]
fn the_backing_takes_pages_that_other_sections_have_no_room_for() {
    let setup = Setup {
        ram_bytes: 8 << 20,
        pool_bytes: 8 << 20,
        backing_bytes: 32 << 20,
        ..Setup::default()
    };
    let (cache, area, _) = setup.make();
    (0..3000).for_each(|offset| store(&cache, area, offset, 0));
    let written = || cache.statistic("written_back_pages").unwrap();
    let before = written();
    for left in (1..4).rev() {
        cache.set_section(fullest(&cache), "offline").unwrap();
        assert_eq!(count(&cache, SectionState::Offline), 4 - left);
        assert!(cache.pool_bytes() <= left * SECTION);
    }
    assert!(written() > before, "three sections of objects fit into one");
    check(&cache, area, 3000, 0);
    // A quarter of the pool suffices.
    (0..3000).for_each(|offset| store(&cache, area, offset, 1));
    check(&cache, area, 3000, 1);
}

#[test]
fn a_section_with_nowhere_to_go_says_how_much_and_is_online_again() {
    let setup = Setup { ram_bytes: 4 << 20, pool_bytes: 4 << 20, ..Setup::default() };
    let (cache, area, _) = setup.make();
    let stored = (0..3000).take_while(|offset| {
        let key = area.entry(*offset).unwrap();
        cache.maintain().unwrap();
        cache.store(key, &page(*offset, 0)) == Store::Stored
    });
    let pages = stored.count() as u32;
    assert!(pages < 3000, "the pool is full");
    let error = cache.set_section(0, "offline").unwrap_err();
    let SectionError::NoRoom { section: 0, objects, bytes } = error else { panic!("{error}") };
    assert!(objects > 0 && bytes <= SECTION, "{objects} objects, {bytes} bytes");
    assert_eq!(cache.section_states()[0], SectionState::Online);
    check(&cache, area, pages, 0);
}

#[test]
fn the_limit_in_percent_follows_the_machine() {
    let setup = Setup {
        ram_bytes: 64 << 20,
        pool_bytes: 64 << 20,
        backing_bytes: 64 << 20,
        ..Setup::default()
    };
    let (cache, area, _) = setup.make();
    cache.set_attribute("max_pool_percent", "20").unwrap();
    (0..3000).for_each(|offset| store(&cache, area, offset, 0));
    let limit = || cache.statistic("pool_limit").unwrap();
    assert_eq!(limit() >> 20, 12);
    cache.follow_memory(16 << 20);
    assert_eq!(limit() >> 10, (16 << 10) / 5);
    cache.maintain().unwrap();
    assert!(cache.pool_bytes() as u64 <= limit(), "what is above it is on the backing");
    check(&cache, area, 3000, 0);
    cache.follow_memory(64 << 20);
    assert_eq!(limit() >> 20, 12);
    // The pool cannot use more than it was made for.
    cache.set_attribute("max_pool_percent", "100").unwrap();
    cache.follow_memory(1 << 40);
    assert_eq!(limit(), 64 << 20);
}

#[test]
fn an_offline_section_stays_offline_when_another_process_takes_the_cache_over() {
    let file = shared::create("uzswap-sections").unwrap();
    let open = || {
        let config = Config {
            pages_max: 8192,
            ram_bytes: 8 << 20,
            ram_bytes_max: 16 << 20,
            pool_bytes_max: 8 << 20,
            algorithm: "lz4".parse().unwrap(),
            seals_backing: false,
        };
        let file = file.try_clone().unwrap();
        let cache = Cache::in_file(config, Box::new(NoBacking), file).unwrap();
        let area = cache.add_area(1000).unwrap();
        (cache, area)
    };
    let (cache, area) = open();
    (0..1000).for_each(|offset| store(&cache, area, offset, 0));
    cache.set_section(0, "offline").unwrap();
    cache.set_section(7, "offline").unwrap();
    let before = cache.section_states();
    assert_eq!(before.len(), 8);
    drop(cache);
    let (cache, area) = open();
    assert_eq!(cache.section_states(), before);
    check(&cache, area, 1000, 0);
    cache.set_section(0, "online").unwrap();
    drop(cache);
    let (cache, area) = open();
    assert_eq!(cache.section_states()[7], SectionState::Offline);
    assert_eq!(count(&cache, SectionState::Offline), 1);
    check(&cache, area, 1000, 0);
}

#[test]
fn sections_come_and_go_under_load_and_every_page_is_right() {
    let setup = Setup {
        ram_bytes: 16 << 20,
        pool_bytes: 12 << 20,
        backing_bytes: 32 << 20,
        ..Setup::default()
    };
    let (cache, area, _) = setup.make();
    (0..3000).for_each(|offset| store(&cache, area, offset, 0));
    let is_done = AtomicBool::new(false);
    let turns = if std::env::var_os("UZSWAP_FULL").is_some() { 2000 } else { 60 };
    let outcomes = std::thread::scope(|scope| {
        for thread in 0..3 {
            let (cache, is_done) = (&cache, &is_done);
            scope.spawn(move || {
                let mut round = 0;
                while !is_done.load(SeqCst) {
                    round += 1;
                    for offset in (0..3000).skip(thread).step_by(3) {
                        let mut got = [0; PAGE_BYTES];
                        let key = area.entry(offset).unwrap();
                        assert_eq!(cache.load(key, &mut got).unwrap(), Load::Hit);
                        assert!(got == page(offset, round - 1), "page {offset} is wrong");
                        store(cache, area, offset, round);
                    }
                }
                // All end with the same round, for the check.
                (0..3000).skip(thread).step_by(3).for_each(|o| store(cache, area, o, 0));
            });
        }
        let outcomes: Vec<_> = (0..turns)
            .map(|turn| {
                cache.maintain().unwrap();
                let section = turn % 8;
                let outcome = cache.set_section(section, "offline");
                let is_offline = cache.section_states()[section] == SectionState::Offline;
                assert_eq!(outcome.is_ok(), is_offline, "{outcome:?}");
                // A section that other threads are bringing online is online soon.
                while cache.set_section(section, "online").is_err() {
                    std::thread::yield_now();
                }
                if turn % 3 == 0 {
                    cache.follow_memory((8 + turn as u64 % 3 * 4) << 20);
                }
                outcome.is_ok()
            })
            .collect();
        is_done.store(true, SeqCst);
        outcomes
    });
    assert!(outcomes.iter().filter(|is_ok| **is_ok).count() > turns / 2, "{outcomes:?}");
    check(&cache, area, 3000, 0);
}
