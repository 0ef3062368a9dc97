//! Loading a page from a store allocates no memory.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../uzswap-ranges/tests/counting/mod.rs"]
mod counting;
#[allow(dead_code, reason = "of both tests that use it")]
mod rig;

use counting::allocations;
use rig::{PAGES, Rig, server};
use uzswap_remote::testing::Server;

#[test]
fn reads_of_a_store_allocate_nothing_whether_it_answers_or_not() {
    let Some(mut server) = server(&[]) else { return };
    let _replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("copies=1&max=64M&timeout=1"), 0).unwrap();
    rig.fill(0..PAGES, 0);
    assert_eq!(rig.check(0..100, 0), 0);
    let (reads, before) = (rig.figure("remote_reads"), allocations());
    assert_eq!(rig.check(0..PAGES, 0), 0);
    let allocated = allocations() - before;
    assert!(rig.figure("remote_reads") > reads + 1000);
    assert_eq!(allocated, 0);
    server.ask(&["FLUSHALL"]);
    let before = allocations();
    assert!(rig.check(0..500, 0) > 0);
    assert_eq!(allocations() - before, 0);
    server.kill();
    let before = allocations();
    rig.check(0..1, 0);
    assert_eq!(allocations() - before, 0);
}
