//! A pager without memory: the model of `uzswap-region`. It has a hand, a staging area, and
//! [`Order`] as it is used there.

use crate::counted_memory::{Memory, Was};
use crate::order::{self, Order, Seen, Verdict};
use std::collections::VecDeque;

/// The state of a page for the hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageState {
    Nowhere,
    There {
        passes: u8,
    },
    /// In the staging area, as the entry with this number.
    Staged {
        entry: u64,
    },
    /// In the cache: so many pages had left before.
    Out {
        departed: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Page {
    place: PageState,
    level: u8,
    /// In the pool, if it leaves now.
    bytes: u16,
}

/// See the module.
pub(crate) struct PagerModel {
    pages: Vec<Page>,
    memory: Memory,
    has_levels: bool,
    staged: usize,
    staging: VecDeque<(usize, u64)>,
    entries: u64,
    hand: usize,
    departed: u64,
    order: Order,
    seen: Seen,
    written: u64,
}

impl PagerModel {
    pub(crate) fn new(pages: usize, memory: u64, has_levels: bool) -> Self {
        Self {
            pages: vec![Page { place: PageState::Nowhere, level: 0, bytes: 0 }; pages],
            memory: Memory::new(pages, memory),
            has_levels,
            staged: 0,
            staging: VecDeque::new(),
            entries: 0,
            hand: 0,
            departed: 0,
            order: Order::default(),
            seen: Seen::default(),
            written: 0,
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Bytes that went to the backing since the last call.
    pub(crate) fn take_written(&mut self) -> u64 {
        std::mem::take(&mut self.written)
    }

    /// A touch of a page, which takes so many bytes in the pool after it. Where the page was, and
    /// true if it was staged.
    pub(crate) fn touch(&mut self, page: usize, bytes: u16) -> (Was, bool) {
        let from = self.memory.place(page);
        let Page { place, level, .. } = self.pages[page];
        let is_staged = matches!(place, PageState::Staged { .. });
        match place {
            PageState::There { .. } => {}
            PageState::Staged { .. } => {
                self.staged -= 1;
                self.seen.returned[usize::from(level)] += 1;
                self.pages[page].level = order::raised(level);
            }
            PageState::Nowhere | PageState::Out { .. } => {
                while !self.memory.has_room() {
                    self.evict();
                }
                if let PageState::Out { departed } = place {
                    self.come_back(page, self.departed - departed);
                }
                self.memory.come(page);
            }
        }
        if !matches!(place, PageState::There { .. }) {
            self.pages[page].place = PageState::There { passes: 0 };
        }
        self.pages[page].bytes = bytes;
        let capacity = self.memory.capacity();
        let is_short = self.memory.there() as usize + capacity / 64 >= capacity;
        while is_short && self.staged < capacity / 32 && self.may_stage() {
            self.stage();
        }
        (from, is_staged)
    }

    /// The program gives a page back.
    pub(crate) fn give_back(&mut self, page: usize) {
        self.staged -= usize::from(matches!(self.pages[page].place, PageState::Staged { .. }));
        self.pages[page] = Page { place: PageState::Nowhere, level: 0, bytes: 0 };
        self.memory.drop_page(page);
    }

    fn come_back(&mut self, page: usize, distance: u64) {
        let (level, capacity) = (self.pages[page].level, self.memory.capacity() as u64);
        if order::is_return(distance, capacity) {
            self.seen.returned[usize::from(level)] += 1;
        }
        self.pages[page].level = order::level_of_return(level, distance, capacity);
    }

    /// True if a page is there that is not staged.
    fn may_stage(&self) -> bool {
        self.memory.there() as usize > self.staged
    }

    /// Moves one page to the staging area.
    fn stage(&mut self) {
        self.order.tend(self.seen, self.memory.capacity() as u64);
        let begin = self.hand;
        let mut round = 0;
        while self.may_stage() {
            let page = self.hand;
            self.hand = (page + 1) % self.pages.len();
            if let PageState::There { passes } = self.pages[page].place {
                let verdict = match self.has_levels {
                    true => self.order.judge(self.pages[page].level, passes, round),
                    false if passes == 0 => Verdict::Stays { passes: 1 },
                    false => Verdict::Leaves,
                };
                match verdict {
                    Verdict::Stays { passes } => {
                        self.pages[page].place = PageState::There { passes }
                    }
                    Verdict::Leaves => {
                        self.entries += 1;
                        self.pages[page].place = PageState::Staged { entry: self.entries };
                        self.staging.push_back((page, self.entries));
                        self.staged += 1;
                        return;
                    }
                }
            }
            if self.hand == 0 {
                self.order.end_pass();
            }
            round += u32::from(self.hand == begin);
        }
    }

    /// Stores the page that was staged first.
    fn evict(&mut self) {
        loop {
            match self.staging.pop_front() {
                Some((page, entry)) if self.pages[page].place == PageState::Staged { entry } => {
                    self.pages[page].place = PageState::Out { departed: self.departed };
                    self.departed += 1;
                    self.staged -= 1;
                    self.written += self.memory.leave(page, self.pages[page].bytes);
                    return;
                }
                // It was touched, or given back, meanwhile.
                Some(_) => {}
                None => self.stage(),
            }
        }
    }
}
