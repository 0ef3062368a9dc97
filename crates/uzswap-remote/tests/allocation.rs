//! A page that comes back from a store needs no memory first.

#![allow(clippy::unwrap_used, reason = "tests")]

#[allow(dead_code, reason = "of both tests that use it")]
mod rig;

use rig::{PAGES, Rig, server};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use uzswap_remote::testing::Server;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, with a count of this thread's allocations.
struct Counting;

// SAFETY: every call is passed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn reads_of_a_store_allocate_nothing_whether_it_answers_or_not() {
    let Some(mut server) = server(&[]) else { return };
    let _replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("copies=1&max=64M&timeout=1"), 0).unwrap();
    rig.fill(0..PAGES, 0);
    assert_eq!(rig.check(0..100, 0), 0);
    let (reads, before) = (rig.figure("remote_reads"), ALLOCATIONS.get());
    assert_eq!(rig.check(0..PAGES, 0), 0);
    let allocated = ALLOCATIONS.get() - before;
    assert!(rig.figure("remote_reads") > reads + 1000);
    assert_eq!(allocated, 0);
    server.ask(&["FLUSHALL"]);
    let before = ALLOCATIONS.get();
    assert!(rig.check(0..500, 0) > 0);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    server.kill();
    let before = ALLOCATIONS.get();
    rig.check(0..1, 0);
    assert_eq!(ALLOCATIONS.get() - before, 0);
}
