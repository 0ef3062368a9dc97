//! Chooses the places of our mappings in a program that does not know of them.
//!
//! The kernel puts a mapping into the highest hole that has room for it. The program may be about
//! to map memory in that hole again: memory that it has unmapped for a moment, or that its child
//! does not inherit. So ours lie where neither the kernel nor a program maps memory by itself.

use super::PAGE_BYTES;
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Below this are programs of fixed addresses, and memory of allocators that choose addresses by
/// chance (V8 chooses below 2^46). Beyond [`END`] are the stacks of the library that loads this one
/// (`uzswap_tree::front`), then other programs with their heaps, libraries and stacks.
const START: usize = 0x4000_0000_0000;
/// The end of the addresses at which our mappings are placed.
pub const END: usize = 0x4f00_0000_0000;

/// Mappings of at least this size may have huge pages, which begin at multiples of it.
const HUGE: usize = 2 << 20;

/// The place of the next mapping; 0 if the kernel chooses.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Places our mappings apart from the program's from now on. Their start is as random as the
/// address of this library.
pub fn set_apart() {
    const UNIT: usize = 64 << 10;
    let chance = (&raw const NEXT as usize / PAGE_BYTES) % ((END - START) / UNIT);
    // Done once: an error means that an earlier call has done it.
    let _ = NEXT.compare_exchange(0, START + chance * UNIT, Relaxed, Relaxed);
}

/// The place for a new mapping of ours. If the place is taken when it is mapped, the kernel
/// chooses.
pub fn next(bytes: usize) -> *mut c_void {
    let align = if bytes >= HUGE { HUGE } else { PAGE_BYTES };
    let place = |next: usize| {
        let at = next.next_multiple_of(align);
        if at.saturating_add(bytes) <= END { at } else { START }
    };
    let taken = NEXT.fetch_update(Relaxed, Relaxed, |next| {
        (next != 0).then(|| (place(next) + bytes).next_multiple_of(PAGE_BYTES))
    });
    taken.map_or(ptr::null_mut(), |next| ptr::without_provenance_mut(place(next)))
}
