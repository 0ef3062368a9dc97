//! Pins pages in memory, because the kernel reads or writes them for a call of the program, or of
//! another process.

use crate::core::registry;
use crate::core::space::Space;
use crate::fault::Credit;
use crate::page::transition::PINNED;
use crate::page::word::{Kind, Word};
use crate::pager::Pager;
use crate::staging::BATCH;
use crate::window::find;
use std::ops::Range;
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::fault_signals::{self, Blocked};
use uzswap_sys::uffd::Fault;

impl Pager {
    /// Brings in the first run of adopted pages in a range, and keeps these pages in memory until
    /// [`Self::unpin`]: the kernel is going to read or write them. Returns their addresses. `None`
    /// if no page of the range is adopted, or if each has as many pins as can be counted.
    pub fn pin(&self, range: Range<usize>) -> Option<Range<usize>> {
        let mut pinned: Option<Range<usize>> = None;
        for at in (range.start / PAGE_BYTES * PAGE_BYTES..range.end).step_by(PAGE_BYTES) {
            let is_pinned =
                find(at).is_some_and(|(space, page)| space.bring_in(page, Word::pinned));
            match &mut pinned {
                Some(pinned) if is_pinned => pinned.end = at + PAGE_BYTES,
                Some(_) => break,
                None if is_pinned => pinned = Some(at..at + PAGE_BYTES),
                None => {}
            }
        }
        pinned
    }

    /// Pins the page at an address like [`Self::pin`], but does not wait for room. Without room it
    /// exceeds the budget, which [`Self::make_room`] avoids. This is for a thread for which others
    /// wait. False if the page is not adopted; `None` if another thread has it at this moment.
    pub fn pin_now(&self, address: usize) -> Option<bool> {
        let Some((space, page)) = find(address) else { return Some(false) };
        loop {
            let word = space.load(page);
            match word.kind() {
                Kind::Untouched => return Some(false),
                Kind::Busy => return None,
                Kind::Resident => {
                    if space.change(page, PINNED, word, word.pinned()?) {
                        return Some(true);
                    }
                }
                Kind::Staged | Kind::Stored | Kind::Empty => {
                    let _blocked = Blocked::all();
                    let fault = Fault { address, is_write: true, instruction: 0 };
                    if space.take(page, word) {
                        let fill = || self.inner().fill(space, page, word, (fault, Credit::Taken));
                        fault_signals::on_own_stack(fill);
                    }
                }
            }
        }
    }

    /// Makes pages leave until there is room for `pages` pages, unless none can leave at present.
    /// True if there is room.
    pub fn make_room(&self, pages: usize) -> bool {
        let inner = self.inner();
        let has_room = || inner.budget.room() >= pages as i64;
        // A step makes room for a quarter of a batch.
        let steps = 8 + 8 * pages / BATCH;
        for _ in 0..steps {
            let mut is_moving = has_room();
            if is_moving {
                return true;
            }
            let _blocked = Blocked::all();
            fault_signals::on_own_stack(|| is_moving = inner.reclaim_here());
            if !is_moving {
                inner.budget.ring();
                return has_room();
            }
        }
        has_room()
    }

    /// Pins a range, if all of it is adopted and present. If none of it is adopted, pins nothing,
    /// and returns no page. Returns `None` if only parts are adopted and present. Unlike
    /// [`Self::pin`] it does not call the C library, and uses only the vector registers that any
    /// x86-64 has.
    pub fn pin_present(range: Range<usize>) -> Option<Range<usize>> {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let mut pinned = start..start;
        let mut at = start;
        while at < range.end {
            let space = registry::find(at).filter(|space| space.is_window());
            match space.and_then(|space| space.pin_present(space.page_of(at))) {
                Some(true) if pinned.end == at => pinned.end += PAGE_BYTES,
                None if pinned.is_empty() => {}
                other => {
                    if other == Some(true) {
                        pinned = at..at + PAGE_BYTES;
                    }
                    Self::unpin(pinned);
                    return None;
                }
            }
            at += PAGE_BYTES;
        }
        Some(pinned)
    }

    /// Ends [`Self::pin`] and [`Self::pin_present`] for the range that they returned; like the
    /// latter it leaves vector registers alone.
    pub fn unpin(pinned: Range<usize>) {
        let mut at = pinned.start;
        while at < pinned.end {
            if let Some((space, page)) = find(at) {
                space.unpin(page);
            }
            at += PAGE_BYTES;
        }
    }
}

impl Space {
    /// Brings a page in and changes its word while it is present. Returns `false` if the page is
    /// not adopted, or if its word cannot be changed.
    pub(crate) fn bring_in(&self, page: u32, to: impl Fn(Word) -> Option<Word>) -> bool {
        loop {
            let word = self.load(page);
            match word.kind() {
                Kind::Untouched => return false,
                Kind::Resident => {
                    let Some(to) = to(word) else { return false };
                    if self.change(page, PINNED, word, to) {
                        return true;
                    }
                }
                _ => {
                    let _blocked = Blocked::all();
                    let address = self.address(page);
                    let fault = Fault { address, is_write: true, instruction: 0 };
                    fault_signals::on_own_stack(|| self.pager.fault(self, page, fault));
                }
            }
        }
    }
}
