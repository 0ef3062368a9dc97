//! A model of the pager in `uzswap-region`, without memory. It has a hand, a staging area, windows
//! ahead and kept copies, and uses [`Order`] as the pager does.

use crate::ahead::{NORMAL, Streams, WINDOW_MAX, Way, window_max};
use crate::counted_memory::{Memory, PlaceOnBacking, Traffic, Was};
use crate::order::{self, LEVELS, Order, PagerPolicy, Seen, Verdict};
use crate::pager_memory::{PAGE_BYTES, PagerMemory};
use std::collections::VecDeque;

/// One region for all streams, since their places differ.
const REGION: u32 = 1;

/// Lanes of the machine for which the model decides.
const LANES: usize = 3;

/// The state of a page for the hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageState {
    Nowhere,
    /// `is_used`: a touch brought the page in, not a fault on a page beside it.
    There {
        passes: u8,
        is_used: bool,
    },
    /// In the staging area, as the entry with this number.
    Staged {
        entry: u64,
        is_used: bool,
    },
    /// In the cache. `departed`: the number of pages that left before this page; `None` if no touch
    /// had brought this page in.
    Out {
        departed: Option<u64>,
    },
}

#[derive(Debug, Clone, Copy)]
struct Page {
    state: PageState,
    level: u8,
    /// Bytes in the pool if the page leaves now.
    bytes: u16,
    copy: Copied,
}

/// The cache's copy of a present page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Copied {
    Not,
    Same,
    /// The page has changed since it came in, unknown to the pager.
    Different,
}

const NOWHERE: Page = Page { state: PageState::Nowhere, level: 0, bytes: 0, copy: Copied::Not };

/// A touch of a page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) page: usize,
    /// Bytes in the pool if the page leaves before its next touch.
    pub(crate) bytes: u16,
    /// The touch is a write.
    pub(crate) is_write: bool,
    /// The content changes before the page leaves.
    pub(crate) changes: bool,
}

/// See the module.
pub(crate) struct PagerModel<'a> {
    pages: Vec<Page>,
    memory: Memory,
    /// The place of each page, in ascending order; neighbours have consecutive places. `None` if
    /// each fault brings in one page.
    places: Option<&'a [u32]>,
    /// The last page that came to a place.
    at_place: Vec<u32>,
    streams: Streams,
    /// Pages that came from the cache since copies were last dropped.
    loaded: Vec<usize>,
    staged: usize,
    staging: VecDeque<(usize, u64)>,
    entries: u64,
    hand: usize,
    departed: u64,
    order: Order,
    seen: Seen,
    /// The pages on the backing that the present load brings in: the place of each in the memory,
    /// and on the backing.
    to_read: Vec<(u32, PlaceOnBacking)>,
}

/// No page has come to this place.
const NO_PAGE: u32 = u32::MAX;

impl<'a> PagerModel<'a> {
    pub(crate) fn new(
        pages: usize,
        room: PagerMemory,
        policy: PagerPolicy,
        places: Option<&'a [u32]>,
    ) -> Self {
        let ends = places.and_then(<[u32]>::last).map_or(0, |last| *last as usize + 1);
        let mut at_place = vec![NO_PAGE; ends];
        // A place without a page in the trace gets a page that the program never touches. A window
        // brings this page in like the others.
        let between = |two: &[u32]| two[0] + 1..two[1];
        let blanks = places.into_iter().flat_map(|places| places.windows(2).flat_map(between));
        let mut all = pages;
        for place in blanks {
            at_place[place as usize] = all as u32;
            all += 1;
        }
        // Memory that the pager has charged for pages to come: a window of one lane, and half of
        // each lane's credit.
        let window = window_max((room.bytes() / PAGE_BYTES) as usize, LANES) + LANES * 16;
        let charged = places.map_or(0, |_| window as u64 * PAGE_BYTES);
        Self {
            pages: vec![NOWHERE; all],
            memory: Memory::new(all, room.less(charged)),
            places,
            at_place,
            streams: Streams::default(),
            loaded: Vec::new(),
            staged: 0,
            staging: VecDeque::new(),
            entries: 0,
            hand: 0,
            departed: 0,
            order: Order::by(policy),
            seen: Seen::default(),
            to_read: Vec::new(),
        }
    }

    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The traffic with the backing since the last call.
    pub(crate) fn take_traffic(&mut self) -> Traffic {
        self.memory.take_traffic()
    }

    /// Touches a page. Returns the page's place before, and true if it was staged.
    pub(crate) fn touch(&mut self, touch: Touch) -> (Was, bool) {
        let page = touch.page;
        let from = self.memory.place(page);
        if let Some(places) = self.places {
            self.at_place[places[page] as usize] = page as u32;
        }
        let Page { state, level, .. } = self.pages[page];
        match state {
            PageState::There { .. } => {}
            PageState::Staged { is_used, .. } => {
                self.staged -= 1;
                self.seen.returned[usize::from(level)] += u64::from(is_used);
                self.pages[page].level = order::raised(level);
                self.pages[page].state = PageState::There { passes: 0, is_used: true };
            }
            PageState::Nowhere | PageState::Out { .. } => self.fault(page, state),
        }
        self.pages[page].bytes = touch.bytes;
        let is_fault = !matches!(state, PageState::There { .. });
        if self.pages[page].copy == Copied::Same && touch.is_write && is_fault {
            // The pager sees this write, so it drops the copy, which is out of date.
            self.pages[page].copy = Copied::Different;
            self.drop_copy(page);
        } else if self.pages[page].copy == Copied::Same && touch.changes {
            self.pages[page].copy = Copied::Different;
        }
        self.reclaim();
        (from, matches!(state, PageState::Staged { .. }))
    }

    /// The program gives a page back.
    pub(crate) fn give_back(&mut self, page: usize) {
        self.staged -= usize::from(matches!(self.pages[page].state, PageState::Staged { .. }));
        self.pages[page] = NOWHERE;
        self.memory.drop_page(page);
    }

    /// Brings a page in, and its neighbours if the program goes through its memory in order.
    fn fault(&mut self, page: usize, state: PageState) {
        self.bring_in(page);
        let came = match self.places {
            Some(places) => self.bring_around(places, page, state),
            None => {
                if matches!(state, PageState::Out { .. }) {
                    self.end_load();
                }
                1
            }
        };
        // If several pages came in, the order learns nothing about this one.
        self.pages[page].state = PageState::There { passes: 0, is_used: came == 1 };
        match state {
            PageState::Out { departed } if came == 1 => {
                let distance = departed.map(|departed| self.departed - departed);
                self.come_back(page, distance);
                self.loaded.push(page);
            }
            _ => self.pages[page].level = 0,
        }
    }

    /// Brings in the neighbours of a page that faulted, up to the first in another state. Returns
    /// the number of pages, the faulting page included.
    fn bring_around(&mut self, places: &[u32], page: usize, state: PageState) -> usize {
        let place = places[page];
        let (window, way) = self.streams.window(REGION, place, NORMAL);
        let window = window.min(window_max(self.memory.capacity(), LANES));
        let is_stored = matches!(state, PageState::Out { .. });
        let mut came = 1;
        while came < window
            && let Some(other) = way.from(place, came)
            && self.bring_neighbour(other, is_stored)
        {
            came += 1;
        }
        if is_stored {
            self.end_load();
        }
        let is_stream = window == WINDOW_MAX && is_stored;
        let ahead = way.from(place, window).filter(|_| is_stream);
        if let Some(ahead) = ahead {
            let back = if way == Way::Up { 0 } else { window as u32 - 1 };
            let first = ahead.saturating_sub(back);
            let end = first + WINDOW_MAX as u32;
            if (first..end).take_while(|other| self.bring_neighbour(*other, true)).count() > 0 {
                self.end_load();
            }
        }
        self.streams.brought(REGION, place, came, way);
        if ahead.is_some() {
            self.streams.expect(REGION, way.from(place, 2 * window), came, way);
        }
        came
    }

    /// Brings in the page at a place near a faulting page: a page of the cache if `is_stored`,
    /// otherwise a page of zeros. `false` if the place has no such page.
    fn bring_neighbour(&mut self, place: u32, is_stored: bool) -> bool {
        let Some(last) = self.at_place.get(place as usize).copied() else { return false };
        let found = if is_stored { self.stored_at(last) } else { self.next_at(place, last) };
        let Some(page) = found else { return false };
        self.bring_in(page);
        self.at_place[place as usize] = page as u32;
        self.pages[page].level = 0;
        self.pages[page].state = PageState::There { passes: 0, is_used: false };
        true
    }

    /// The page that was last at a place, if it is out.
    fn stored_at(&self, last: u32) -> Option<usize> {
        let is_out = |page: &Page| matches!(page.state, PageState::Out { .. });
        self.pages.get(last as usize).filter(|page| is_out(page)).map(|_| last as usize)
    }

    /// The page that next comes to a place as zeros, if the place has no page now.
    fn next_at(&self, place: u32, last: u32) -> Option<usize> {
        let places = self.places?;
        if last == NO_PAGE {
            // Pages are numbered by place, and pages of one place in the order in which they come.
            return Some(places.partition_point(|at| *at < place));
        }
        let last = last as usize;
        let is_free = self.pages[last].state == PageState::Nowhere;
        let is_blank = last >= places.len();
        let next = if is_blank { last } else { last + 1 };
        (is_free && (is_blank || places.get(next) == Some(&place))).then_some(next)
    }

    /// Makes room for a page, and counts it. The cache keeps its copy.
    fn bring_in(&mut self, page: usize) {
        while !self.memory.has_room() {
            self.evict();
        }
        if let Some(place) = self.memory.on_backing(page) {
            let in_memory = self.places.and_then(|places| places.get(page));
            self.to_read.push((in_memory.copied().unwrap_or_default(), place));
        }
        self.memory.come_beside_copy(page);
        if matches!(self.pages[page].state, PageState::Out { .. }) {
            self.pages[page].copy = Copied::Same;
        }
    }

    /// Counts a load of neighbours that has ended, and its reads. One read covers neighbours whose
    /// records follow each other.
    fn end_load(&mut self) {
        let mut to_read = std::mem::take(&mut self.to_read);
        to_read.sort_unstable_by_key(|(place, _)| *place);
        let is_one = |(before, one): &(u32, PlaceOnBacking),
                      (place, other): &(u32, PlaceOnBacking)| {
            *place == before + 1 && one.is_followed_by(*other)
        };
        self.memory.count_load(to_read.chunk_by(is_one).count() as u64);
    }

    fn come_back(&mut self, page: usize, distance: Option<u64>) {
        let (level, capacity) = (self.pages[page].level, self.memory.capacity() as u64);
        let Some(distance) = distance else {
            self.pages[page].level = 0;
            return;
        };
        if order::is_return(distance, capacity) {
            self.seen.returned[usize::from(level)] += 1;
        }
        self.pages[page].level = order::level_of_return(level, distance, capacity);
    }

    /// Stages pages ahead of need.
    fn reclaim(&mut self) {
        let capacity = self.memory.capacity();
        let is_short = self.memory.there() as usize + capacity / 64 >= capacity;
        if !is_short {
            return;
        }
        let keeps = self.order.keeps_copies(capacity as u64);
        for page in std::mem::take(&mut self.loaded) {
            if !self.keeps_copy(page, keeps) {
                self.drop_copy(page);
            }
        }
        while self.staged < capacity / 32 && self.may_stage() {
            self.stage();
        }
    }

    /// True if a copy of the page is worth its room.
    fn keeps_copy(&self, page: usize, keeps: [bool; LEVELS]) -> bool {
        !self.memory.is_mostly_pool() && keeps[usize::from(self.pages[page].level)]
    }

    fn drop_copy(&mut self, page: usize) {
        if self.pages[page].copy != Copied::Not {
            self.pages[page].copy = Copied::Not;
            self.memory.drop_copy(page);
        }
    }

    /// True if some present page is not staged.
    fn may_stage(&self) -> bool {
        self.memory.there() as usize > self.staged
    }

    /// Moves one page to the staging area.
    fn stage(&mut self) {
        let capacity = self.memory.capacity() as u64;
        self.order.tend(self.seen, capacity);
        let keeps = self.order.keeps_copies(capacity);
        let begin = self.hand;
        let mut round = 0;
        while self.may_stage() {
            let page = self.hand;
            self.hand = (page + 1) % self.pages.len();
            if let PageState::There { passes, is_used } = self.pages[page].state {
                let verdict = match is_used {
                    true => self.order.judge(self.pages[page].level, passes, round),
                    false => Verdict::Leaves,
                };
                match verdict {
                    Verdict::Stays { passes } => {
                        self.pages[page].state = PageState::There { passes, is_used };
                        if !self.keeps_copy(page, keeps) {
                            self.drop_copy(page);
                        }
                    }
                    Verdict::Leaves => {
                        self.entries += 1;
                        self.pages[page].state = PageState::Staged { entry: self.entries, is_used };
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
                Some((page, entry)) => {
                    let PageState::Staged { entry: own, is_used } = self.pages[page].state else {
                        continue; // The page was touched or given back meanwhile.
                    };
                    if own != entry {
                        continue;
                    }
                    let departed = is_used.then_some(self.departed);
                    self.pages[page].state = PageState::Out { departed };
                    self.departed += 1;
                    self.staged -= 1;
                    let copy = std::mem::replace(&mut self.pages[page].copy, Copied::Not);
                    self.seen.compared += u64::from(copy != Copied::Not);
                    self.seen.unchanged += u64::from(copy == Copied::Same);
                    self.memory.leave(page, self.pages[page].bytes);
                    return;
                }
                None => self.stage(),
            }
        }
    }
}
