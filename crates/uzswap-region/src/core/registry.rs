//! Address → region, for threads that fault: a few loads, no lock.
//!
//! Regions begin at multiples of 2 MiB ([`UNIT`]). A table of 256 Ki entries, one for each GiB of
//! the address space, refers to tables of 512 entries, one for each unit. A region that covers a
//! whole GiB is in the first table itself. So a region of a terabyte costs 8 KiB here. Tables are
//! never freed.
//!
//! A region leaves the tables before it is freed, and is freed when no handler thread can use it
//! any more. A program that touches a region's memory during the unmap has a bug, as with any
//! memory.

#![expect(
    unsafe_code,
    reason = "a signal handler finds regions by address: a region leaves the table before it goes"
)]

use super::space::Space;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

/// Alignment of regions.
pub(crate) const UNIT: usize = 2 << 20;
const GIB: usize = 1 << 30;
const UNITS: usize = GIB / UNIT;
/// Addresses of user space have 47 bits on x86-64 and 48 on arm64. A program may request addresses
/// of up to 56 bits (five levels of page tables), which would make the table 256 times as large. We
/// refuse addresses beyond the table ([`covers`]). Untouched parts of the table's 4 MiB take no
/// memory.
const GIBS: usize = 1 << (48 - 30);
/// No region ends beyond this address.
pub(crate) const END: usize = GIBS * GIB;

struct UnitTable([AtomicPtr<Space>; UNITS]);

struct RegistryEntry {
    /// A region that covers the whole GiB.
    whole: AtomicPtr<Space>,
    /// The regions that cover parts of the GiB.
    parts: AtomicPtr<UnitTable>,
}

static SLOTS: [RegistryEntry; GIBS] = [const {
    RegistryEntry {
        whole: AtomicPtr::new(std::ptr::null_mut()),
        parts: AtomicPtr::new(std::ptr::null_mut()),
    }
}; GIBS];

/// Held while a region is added or removed.
static CHANGE: Mutex<()> = Mutex::new(());

/// The region that an address lies in.
pub(crate) fn find(address: usize) -> Option<&'static Space> {
    let slot = SLOTS.get(address / GIB)?;
    let mut found = slot.whole.load(Ordering::Acquire);
    if found.is_null() {
        let table = slot.parts.load(Ordering::Acquire);
        // SAFETY: a table, once made, stays.
        let table = unsafe { table.as_ref() }?;
        found = table.0[address % GIB / UNIT].load(Ordering::Acquire);
    }
    // SAFETY: a region in the tables lives until it is taken out; see the module for threads that
    // may still use it then.
    unsafe { found.as_ref() }.filter(|space| space.contains(address))
}

/// True if a region may lie at these addresses.
pub(crate) fn covers(addresses: &Range<usize>) -> bool {
    addresses.end <= END
}

/// Enters a region, which lies at addresses that the table covers.
pub(crate) fn add(space: &Space) {
    set(space, std::ptr::from_ref(space).cast_mut());
}

pub(crate) fn remove(space: &Space) {
    set(space, std::ptr::null_mut());
}

fn set(space: &Space, to: *mut Space) {
    let _held = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    let end = (space.base() + space.bytes()).next_multiple_of(UNIT);
    let mut at = space.base();
    while at < end {
        let slot = &SLOTS[at / GIB];
        if at.is_multiple_of(GIB) && end - at >= GIB {
            slot.whole.store(to, Ordering::Release);
            at += GIB;
            continue;
        }
        // In a fork, a region of the parent may have had these addresses.
        slot.whole.store(std::ptr::null_mut(), Ordering::Release);
        if slot.parts.load(Ordering::Acquire).is_null() {
            let none = || AtomicPtr::new(std::ptr::null_mut());
            let table = Box::new(UnitTable(std::array::from_fn(|_| none())));
            slot.parts.store(Box::into_raw(table), Ordering::Release);
        }
        // SAFETY: made above, and stays.
        let table = unsafe { &*slot.parts.load(Ordering::Acquire) };
        table.0[at % GIB / UNIT].store(to, Ordering::Release);
        at += UNIT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_address_is_beyond_the_table_unnoticed() {
        let end = 1 << 48;
        assert!(covers(&(end - GIB..end)) && !covers(&(end - GIB..end + 1)));
        // Five levels, and the kernel's own part.
        for address in [0, end - 1, end, 1 << 56, usize::MAX] {
            assert!(find(address).is_none(), "{address:#x}");
        }
    }
}
