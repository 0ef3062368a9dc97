//! What a region holds is what was put there, in the memory that it was given.

use uzswap_region::{Advice, Error, Mode, Pager, RegionVec};

const MIB: usize = 1 << 20;

fn modes() -> Vec<Mode> {
    let modes = [Mode::InThread, Mode::HandlerThreads];
    modes.into_iter().filter(|mode| mode.check().is_ok()).collect()
}

/// Values of which some pages compress well, some badly, some to nothing.
fn value(i: usize) -> u64 {
    let mixed = (i as u64 ^ i as u64 >> 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match i / 512 % 16 {
        0 => 0,
        1 => mixed,
        2 => 42,
        _ if i.is_multiple_of(8) => (i / 512) as u64 * 0x1_0000 + mixed % 64,
        _ => (i / 512) as u64,
    }
}

#[test]
fn four_times_the_budget_comes_back_as_it_was() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(64 * MIB / 8).unwrap();
        assert!(values.iter().step_by(512).take(100).all(|value| *value == 0));
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        for i in 0..values.len() {
            assert_eq!(values[i], value(i), "element {i} in {mode}");
        }
        let mut at = 1;
        for round in 0..200_000 {
            at = (at * 5 + 12_345) % values.len();
            assert_eq!(values[at], value(at), "round {round}");
        }
        let stats = pager.stats();
        let used = stats.get("memory_used").unwrap();
        assert!(used <= pager.memory() * 102 / 100, "{used} bytes of 16 MiB");
        assert!(stats.get("faults").unwrap() > 1000 && stats.get("stored_pages").unwrap() > 4000);
    }
}

#[test]
fn pages_go_out_and_come_back_and_are_dropped_when_told() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut values: RegionVec<u64> = pager.vec_zeroed(4 * MIB / 8).unwrap();
    values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
    values.advise(0..values.len(), Advice::PageOut).unwrap();
    assert_eq!(pager.stats().get("stored_pages"), Some(1024));
    assert!((0..values.len()).all(|i| values[i] == value(i)));
    // A copy is kept, so nothing is compressed anew.
    values.advise(0..values.len(), Advice::PageOut).unwrap();
    let unchanged = pager.stats().get("stores_unchanged").unwrap();
    assert!(unchanged > 500, "{unchanged} stores of pages that had not changed");
    values[5] = 7;
    values.clear(512..1030).unwrap();
    assert!((512..1030).all(|i| values[i] == 0));
    assert_eq!((values[5], values[1030], values[511]), (7, value(1030), value(511)));
}

#[test]
fn who_goes_on_in_order_is_read_ahead_of() {
    for mode in modes() {
        let pager = Pager::builder().memory("16M").mode(mode).build().unwrap();
        let mut values: RegionVec<u64> = pager.vec_zeroed(8 * MIB / 8).unwrap();
        values.iter_mut().enumerate().for_each(|(i, slot)| *slot = value(i));
        // The thread that reads ahead may find that we were faster, each time.
        let is_read_ahead = (0..100).any(|_| {
            values.advise(0..values.len(), Advice::PageOut).unwrap();
            assert!((0..values.len()).all(|i| values[i] == value(i)));
            pager.stats().get("read_ahead_pages").unwrap() > 0
        });
        assert!(is_read_ahead, "{mode}: {}", pager.stats());
    }
}

#[test]
fn pages_that_were_only_read_go_out_too() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let values: RegionVec<u64> = pager.vec_zeroed(4 * MIB / 8).unwrap();
    for _ in 0..2 {
        assert!(values.iter().all(|value| *value == 0));
        values.advise(0..values.len(), Advice::PageOut).unwrap();
        let stats = pager.stats();
        assert_eq!((stats.get("stored_pages"), stats.get("pool_pages")), (Some(1024), Some(0)));
    }
}

#[test]
fn what_is_pinned_stays_and_system_calls_can_be_given_it() {
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    let mut bytes: RegionVec<u8> = pager.vec_zeroed(4 * MIB).unwrap();
    let pinned = bytes.pin(4096..3 * 4096).unwrap();
    bytes.advise(0..4 * MIB, Advice::PageOut).unwrap();
    let mut zero = std::fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut zero, &mut bytes[4096..3 * 4096]).unwrap();
    drop(pinned);
    let was = bytes[4096..3 * 4096].to_vec();
    bytes.advise(0..4 * MIB, Advice::PageOut).unwrap();
    let failed = std::io::Read::read_exact(&mut zero, &mut bytes[4096..3 * 4096]).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EFAULT));
    assert_eq!(bytes[4096..3 * 4096], was);
    assert!(matches!(bytes.pin(0..9 * MIB), Err(Error::Range { .. })));
}

#[test]
fn wrong_use_is_refused_with_a_remedy() {
    let error = |builder: uzswap_region::PagerBuilder| builder.build().unwrap_err().to_string();
    assert!(error(Pager::builder()).contains("budget is 0"));
    assert!(error(Pager::builder().memory("1M")).contains("8388608"));
    assert!(error(Pager::builder().memory("12Q")).contains("512M"));
    assert!(error(Pager::builder().memory("16M").compressor("lz5")).contains("zstd"));
    assert!(error(Pager::builder().memory("16M").backing("/no/such:4M")).contains("No such file"));
    let pager = Pager::builder().memory("16M").mode(Mode::InThread).build().unwrap();
    assert!(pager.map(0).unwrap_err().to_string().contains("at least 1"));
    assert!(pager.map(1 << 46).unwrap_err().to_string().contains("addresses"));
    let stack = 0u8;
    // SAFETY: no region has this address.
    let error = unsafe { pager.unmap(std::ptr::from_ref(&stack) as usize) }.unwrap_err();
    assert!(error.to_string().contains("not the start of a region"), "{error}");
}
