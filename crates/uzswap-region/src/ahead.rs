//! Read-ahead: while a program uses pages in order, brings in those that it will touch next.
//!
//! A fault that is about to bring in a whole window asks for the window behind it, and a thread
//! decodes that window at the same time. If the program touches these pages first, it waits for
//! those that are being brought in, and brings in the others itself. The read-ahead thread never
//! waits for memory: without room it reads nothing ahead.

use crate::core::Inner;
use crate::core::space::Space;
use crate::lane::Count;
use crate::page::transition::UNCHANGED;
use crate::page::word::Kind;
use crate::staging::BATCH;
use uzswap_policy::ahead::Way;

impl Inner {
    /// The work of the thread that reads ahead.
    pub(crate) fn run_ahead(&self) {
        uzswap_engine::compress::prepare_thread();
        while !self.is_stopping() {
            let Some((region, page)) = self.ahead.next() else { continue };
            let space = self.regions().get(&region).cloned();
            if let Some(space) = space {
                self.read_ahead(&space, page);
            }
        }
    }

    /// Brings in the stored pages of a window.
    fn read_ahead(&self, space: &Space, first: u32) {
        let end = first.saturating_add(BATCH as u32).min(space.pages());
        let mut lane = self.lanes.ahead();
        let mut page = first;
        while page < end {
            let word = space.load(page);
            if word.kind() != Kind::Stored || !self.has_credit(&mut lane) || !space.take(page, word)
            {
                break;
            }
            let window = ((end - page) as usize, Way::Up);
            let brought = self.fill_many(&mut lane, space, page, window, (word, 0));
            if brought == 0 {
                // This page is the last, or there is no buffer for more than one.
                space.put(page, UNCHANGED, word);
                break;
            }
            page += brought as u32;
        }
        lane.count(Count::Ahead, u64::from(page - first));
    }
}
