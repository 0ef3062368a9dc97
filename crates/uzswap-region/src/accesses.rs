//! The recording of a program's accesses, if the pager was made with a trace to write.
//!
//! Such a pager only records. Its budget is for pages alone, with the pool beside it, so that the
//! number of present pages is constant. Each fault brings in one page, so each touch of an absent
//! page is recorded. Without a trace, a fault only reads `Inner::log`. That field never changes
//! after the pager is made, and lies beside the other fields of `Inner` that each fault reads.

use crate::core::Inner;
use crate::core::space::Space;
use crate::page::word::{Kind, Word};
use uzswap_engine::{PAGE_BYTES, Placement};
use uzswap_sys::uffd::Fault;
use uzswap_trace::{Event, Log, What};

impl Inner {
    /// Makes the pager write a trace.
    pub(crate) fn recording(mut self, log: Option<Log>) -> Self {
        if log.is_some() {
            // Then each page has a compressed size of its own (no units), and no page is on a disk.
            let most = u64::MAX.to_string();
            for (name, value) in [("max_pool_bytes", &*most), ("recompress_idle_seconds", "0")] {
                self.cache.set_attribute(name, value).expect("a value of it");
            }
        }
        self.log = log;
        self
    }

    /// Writes down a fault at a page that is `Busy` and had this word.
    #[cold]
    pub(crate) fn note_touch(&self, log: &Log, space: &Space, page: u32, was: Word, fault: Fault) {
        let what = match was.kind() {
            Kind::Staged => What::Staged,
            Kind::Stored => What::Back,
            _ => What::New,
        };
        let event = self.event(what, space, page);
        log.add(Event { is_write: fault.is_write, site: fault.instruction as u32, ..event });
    }

    /// Records that a page left and was compressed. A page of which the cache had a copy is not
    /// recorded.
    pub(crate) fn note_left(&self, space: &Space, page: u32, was: Word) {
        if let Some(log) = self.log.as_ref().filter(|_| was.copy_bits() == 0) {
            log.add(self.event(What::Left, space, page));
        }
    }

    /// Writes down that the program gave a page back.
    pub(crate) fn note_gone(&self, space: &Space, page: u32) {
        if let Some(log) = &self.log {
            log.add(self.event(What::Gone, space, page));
        }
    }

    fn event(&self, what: What, space: &Space, page: u32) -> Event {
        let kept = match what {
            What::Back | What::Left => self.cache.kept(space.key(page)),
            What::New | What::Staged | What::Gone => Placement::Nowhere,
        };
        let bytes = match kept {
            Placement::Alone { bytes } | Placement::Shared { bytes } => bytes,
            Placement::Nowhere | Placement::SameFilled | Placement::InUnit => 0,
        };
        Event {
            what,
            page: (space.address(page) / PAGE_BYTES) as u64,
            // The log fills in the process and the time.
            process: 0,
            micros: 0,
            site: 0,
            bytes,
            is_write: false,
            is_same_filled: kept == Placement::SameFilled,
            is_identical: matches!(kept, Placement::Shared { .. }),
        }
    }
}
