//! Other processes of the tree read and write this process's memory, and ask for its pages by
//! visits of `uzswap_tree`. The watching thread brings the pages in and pins them until the visit
//! is over. So the visitor's call finds the pages, and no page leaves while the kernel writes it.
//!
//! The watching thread waits neither for room nor for a page that another thread has, because only
//! it gives the pager a larger budget. A guest for which there is no room stays in line.

use crate::Agent;
use crate::stage::{self, Stage};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use uzswap_region::Pager;
use uzswap_sys::map::PAGE_BYTES;
use uzswap_tree::{Guest, Tree, VISIT_BYTES_MAX, clock};

/// Guests that are served at a time. Further guests stay in line.
const GUESTS: usize = 64;
/// The pages of a visit.
const PAGES: usize = VISIT_BYTES_MAX as usize / PAGE_BYTES;
/// All visits together may pin this part of the budget, but at least a page.
const PART: u64 = 8;
/// Pages for which room is made at a time.
const STEP: usize = 32;
/// The time for which a guest waits for room, in milliseconds. Then some pages come in for the
/// guest beyond the budget, and other pages leave. In a suspended process there is never room, and
/// its pages leave again soon.
const PATIENCE: u64 = 200;
const PATIENCE_SUSPENDED: u64 = 10;
/// The time until the next look while a guest waits.
pub const SOON: Duration = Duration::from_millis(1);

/// A visit, and its pinned pages.
#[derive(Clone, Copy)]
struct Pinned {
    guest: Guest,
    pages: [u64; PAGES / 64],
}

impl Pinned {
    fn new(guest: Guest) -> Self {
        Self { guest, pages: [0; PAGES / 64] }
    }

    /// The address of a page. A visitor may ask for any.
    fn address(&self, page: usize) -> usize {
        let first = self.guest.from as usize / PAGE_BYTES * PAGE_BYTES;
        first.saturating_add(page * PAGE_BYTES)
    }

    fn count(&self) -> u64 {
        self.pages.iter().map(|part| u64::from(part.count_ones())).sum()
    }

    /// Pins up to `most` pages, until there is no room or another thread has the next page. Returns
    /// the number of pages, including those that are not adopted.
    fn pin(&mut self, agent: &Agent, most: usize, may_exceed: bool) -> usize {
        for page in 0..most {
            let is_step = page % STEP == 0;
            if is_step && !agent.pager.make_room(STEP) && (page > 0 || !may_exceed) {
                return page;
            }
            match agent.pager.pin_now(self.address(page)) {
                Some(true) => self.pages[page / 64] |= 1 << (page % 64),
                Some(false) => {}
                None => return page,
            }
        }
        most
    }

    fn unpin(&self) {
        let is_pinned = |page: &usize| self.pages[page / 64] >> (page % 64) & 1 != 0;
        for page in (0..PAGES).filter(is_pinned) {
            Pager::unpin(self.address(page)..self.address(page) + PAGE_BYTES);
        }
    }
}

/// The guests whose pages are pinned, and the wait of those in line.
struct Guests {
    pinned: [Option<Pinned>; GUESTS],
    /// The time since which a guest has waited for room, in milliseconds of the system's clock.
    waits_since: Option<u64>,
}

static GUESTS_NOW: Mutex<Guests> = Mutex::new(Guests { pinned: [None; GUESTS], waits_since: None });

/// Unpins a forked child's copies of pinned pages: no process visits the child yet.
pub fn forget() {
    each(|guests| guests.end(|_| true));
}

fn each<R>(work: impl FnOnce(&mut Guests) -> R) -> R {
    work(&mut GUESTS_NOW.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Serves the guests, and ends visits that are over; true if a guest waits. Called by the watching
/// thread while no fork is under way.
pub fn attend(agent: &Agent, tree: &Tree) -> bool {
    let is_host = stage::now() == Stage::Managed;
    tree.set_host(is_host);
    each(|guests| {
        guests.end(|guest| !tree.is_visiting(guest));
        let mut waits = false;
        for guest in tree.guests().filter(|_| is_host) {
            waits |= !guests.serve(agent, tree, &guest);
        }
        if !waits {
            guests.waits_since = None;
        }
        waits
    })
}

impl Guests {
    /// Ends the visits that are over.
    fn end(&mut self, is_over: impl Fn(&Guest) -> bool) {
        for place in &mut self.pinned {
            if let Some(over) = place.take_if(|pinned| is_over(&pinned.guest)) {
                over.unpin();
            }
        }
    }

    /// Brings pages in for a guest. `false` if the guest has to wait.
    fn serve(&mut self, agent: &Agent, tree: &Tree, guest: &Guest) -> bool {
        let all: u64 = self.pinned.iter().flatten().map(Pinned::count).sum();
        let most = (agent.pager.memory() / PART / PAGE_BYTES as u64).saturating_sub(all);
        let Some(place) = self.pinned.iter_mut().find(|place| place.is_none()) else {
            return false;
        };
        let offset = guest.from as usize % PAGE_BYTES;
        let pages = (offset + guest.bytes as usize).div_ceil(PAGE_BYTES).min(PAGES);
        let pages = pages.min(if all == 0 { most.max(1) } else { most } as usize);
        let patience = if tree.is_suspended() { PATIENCE_SUSPENDED } else { PATIENCE };
        let since = *self.waits_since.get_or_insert_with(clock);
        let mut pinned = Pinned::new(*guest);
        let there = pinned.pin(agent, pages, clock() >= since + patience);
        let granted = if there > 0 { tree.grant(guest, there as u32) } else { None };
        match granted {
            Some(granted) => *place = Some(Pinned { guest: granted, ..pinned }),
            None => pinned.unpin(),
        }
        there > 0
    }
}
