//! A pager that records writes down each touch of a page that is not there, with the size of it.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use uzswap_region::{Mode, Pager, RegionVec};
use uzswap_trace::{Header, Log, Trace, What};

const MIB: usize = 1 << 20;
/// Numbers of a page.
const EACH: usize = 512;

fn trace_of(work: impl FnOnce(&Pager)) -> Trace {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let header = Header {
        room: 1 << 18,
        asked: 0,
        memory: 8 << 20,
        processes: 0,
        compressor: "lz4".into(),
        program: "test".into(),
    };
    Log::create(&path, &header).unwrap();
    let pager = Pager::builder().memory("8M").mode(Mode::InThread).accesses(&path).build();
    let pager = pager.unwrap();
    work(&pager);
    drop(pager);
    Trace::read(&path).unwrap()
}

#[test]
fn each_touch_of_a_page_that_is_not_there_is_written_down() {
    if Mode::InThread.check().is_err() {
        return uzswap_engine::testing::skip("userfaultfd is denied");
    }
    let pages = 32 * MIB / 4096;
    let mut base = 0;
    let trace = trace_of(|pager| {
        let mut values: RegionVec<u64> = pager.vec_zeroed(pages * EACH).unwrap();
        base = values.as_ptr() as u64 / 4096;
        // In order, which a pager that does not record brings in 64 pages at a time.
        for page in 0..pages {
            for (at, value) in values[page * EACH..][..EACH].iter_mut().enumerate() {
                *value = if page % 4 == 0 { 42 } else { (page * at) as u64 };
            }
        }
        let sum: u64 = (0..pages).map(|page| values[page * EACH]).sum();
        assert_eq!(sum, 42 * pages as u64 / 4);
        values.clear(0..EACH * 10).unwrap();
    });
    assert_eq!((trace.header.lost(), trace.header.processes), (0, 1));
    let mut touches: BTreeMap<u64, Vec<What>> = BTreeMap::new();
    for event in &trace.events {
        assert!((base..base + pages as u64).contains(&event.page), "{event:?}");
        touches.entry(event.page - base).or_default().push(event.what);
    }
    assert_eq!(touches.len(), pages);
    assert!(touches.values().all(|whats| whats[0] == What::New));
    // Of 32 MiB at most 8 are there when the second pass begins, and it brings in the rest one by
    // one: its touches are seen, whatever their order.
    let of = |what| trace.events.iter().filter(move |event| event.what == what);
    assert!(of(What::Back).count() >= pages * 3 / 4, "{}", of(What::Back).count());
    assert!(of(What::New).all(|event| event.is_write && event.site != 0 && event.bytes == 0));
    assert!(of(What::Back).all(|event| !event.is_write && event.site != 0));
    for event in of(What::Back).chain(of(What::Left)) {
        let is_filled = (event.page - base).is_multiple_of(4);
        assert_eq!(event.is_same_filled, is_filled, "{event:?}");
        assert_eq!(event.bytes == 0, is_filled, "{event:?}");
    }
    assert_eq!(
        of(What::Gone).map(|event| event.page - base).collect::<Vec<_>>(),
        Vec::from_iter(0..10)
    );
    let times = trace.events.iter().map(|event| event.micros);
    assert!(times.clone().max() > times.min(), "time goes on");
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_of_the_pager() {
    let pager = Pager::builder().memory("8M").accesses("/nowhere/trace").build();
    assert!(pager.unwrap_err().to_string().starts_with("/nowhere/trace: No such file"));
}
