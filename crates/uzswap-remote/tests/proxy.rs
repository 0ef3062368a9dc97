//! A proxy between cache and store harms replies: a reader never sees a wrong byte.

#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "of all tests that use it")]
mod rig;

use rig::{PAGES, Rig, server};
use std::time::{Duration, Instant};
use uzswap_remote::testing::{Harm, Proxy, Server, await_that};

/// Each kind of damage; true if it makes the client abandon a connection.
const HARMS: [(Harm, bool); 9] = [
    (Harm::Swapped, false),
    (Harm::Replayed, false),
    (Harm::Truncated, false),
    (Harm::Flipped, false),
    (Harm::Zeroed, false),
    (Harm::Longer, true),
    (Harm::Cut, true),
    (Harm::Delayed(Duration::from_millis(20)), false),
    (Harm::Delayed(Duration::from_millis(500)), true),
];

/// The pages to read for a kind of harm: fewer if it delays each read.
fn reads(harm: Harm) -> std::ops::Range<u32> {
    if matches!(harm, Harm::Delayed(_)) { 0..300 } else { 0..PAGES }
}

#[test]
fn a_harmed_reply_is_replaced_by_the_local_copy() {
    let Some(server) = server(&[]) else { return };
    let proxy = Proxy::before(server.port(), true);
    let rig = Rig::new(&proxy.backing(""), 64 << 20).unwrap();
    // An older write of each segment, for replays.
    for round in 0..2 {
        rig.fill(0..PAGES, round);
        rig.await_copies();
    }
    for (harm, _) in HARMS {
        let before = proxy.harmed();
        proxy.set(harm);
        for _ in 0..20 {
            assert_eq!(rig.check(reads(harm), 1), 0, "{harm:?}");
            if proxy.harmed() > before + 2 {
                break;
            }
        }
        assert!(proxy.harmed() > before, "{harm:?}: no read was harmed");
        proxy.set(Harm::None);
        await_that("it is used again", || rig.figure("remote_up") == 1);
        rig.fill(0..PAGES, 1);
        rig.await_copies();
    }
}

#[test]
fn a_harmed_reply_is_an_error_on_its_page_where_the_store_has_the_only_copy() {
    let Some(server) = server(&[]) else { return };
    let _replica = Server::replica_of(&server);
    let proxy = Proxy::before(server.port(), true);
    let rig = Rig::new(&proxy.backing("copies=1&max=64M&timeout=2"), 0).unwrap();
    for round in 0..2 {
        rig.fill(0..PAGES, round);
    }
    assert_eq!(rig.check(0..PAGES, 1), 0);
    for (harm, is_left) in HARMS {
        let before = proxy.harmed();
        proxy.set(harm);
        let began = Instant::now();
        let mut errors = rig.check(reads(harm), 1);
        // After the last kind, the client may still read from the replica.
        for _ in 0..50 {
            if proxy.harmed() == before {
                std::thread::sleep(Duration::from_millis(100));
                errors += rig.check(reads(harm), 1);
            }
        }
        let (harmed, took) = (proxy.harmed() - before, began.elapsed());
        println!("{harm:?}: {harmed} replies were harmed, {errors} errors, in {took:.1?}");
        assert!(harmed > 0, "{harm:?}: no read was harmed");
        match harm {
            // The reply comes in time.
            Harm::Delayed(_) if !is_left => assert_eq!(errors, 0, "{harm:?}"),
            // The client abandons the connection, and the replica has the page.
            _ if is_left => assert_eq!(errors, 0, "{harm:?}"),
            _ => assert!(errors > 100, "{harm:?}: {errors}"),
        }
        proxy.set(Harm::None);
        await_that("it is used again", || rig.figure("remote_up") == 1);
        // Only the damaged reads have failed.
        assert_eq!(rig.check(0..PAGES, 1), 0, "{harm:?}");
    }
}
