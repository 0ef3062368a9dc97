//! How many pages to bring in at a fault: one, or many where a program goes through its memory in
//! order.
//!
//! Each lane remembers where the last faults of its processor would go on if they were in order, up
//! or down. A fault at such a place makes the window four times as long, up to 64 pages; any other
//! starts with a window of one. So random access pays for a look and two entries in a table.

use crate::budget::Bell;
use crate::staging::BATCH;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A program's advice on its accesses; kept in a region's `advice`.
pub(crate) const NORMAL: u8 = 0;
pub(crate) const SEQUENTIAL: u8 = 1;
pub(crate) const RANDOM: u8 = 2;

/// Marks a region's number where a stream is one of first writes to guarded pages.
pub(crate) const WRITES: u32 = 1 << 31;

/// Streams that a lane tells apart.
const STREAMS: usize = 32;

/// Which way a program goes through its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Way {
    #[default]
    Up,
    Down,
}

impl Way {
    /// The page that is `pages` further on, if a region can have it.
    pub(crate) fn from(self, page: u32, pages: usize) -> Option<u32> {
        match self {
            Self::Up => page.checked_add(pages as u32),
            Self::Down => page.checked_sub(pages as u32),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Stream {
    region: u32,
    next: u32,
    window: u32,
    way: Way,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Streams {
    streams: [Stream; STREAMS],
}

fn slot(region: u32, page: u32) -> usize {
    (region.wrapping_mul(31).wrapping_add(page).wrapping_mul(0x9e37_79b1) >> 27) as usize % STREAMS
}

impl Streams {
    /// How many pages to bring in from `page` on, and which way.
    pub(crate) fn window(&self, region: u32, page: u32, advice: u8) -> (usize, Way) {
        let stream = self.streams[slot(region, page)];
        let goes_on = (stream.region, stream.next) == (region, page) && stream.window > 0;
        match advice {
            RANDOM => (1, Way::Up),
            _ if goes_on => ((stream.window as usize * 4).min(BATCH), stream.way),
            SEQUENTIAL => (BATCH, Way::Up),
            _ => (1, Way::Up),
        }
    }

    /// Remembers how many pages were brought in from `page` on. One may be the first of either way.
    pub(crate) fn brought(&mut self, region: u32, page: u32, pages: usize, way: Way) {
        self.expect(region, way.from(page, pages), pages, way);
        if pages == 1 {
            let other = if way == Way::Up { Way::Down } else { Way::Up };
            self.expect(region, other.from(page, 1), 1, other);
        }
    }

    /// Expects a stream, that had a window of `pages`, to go on at `next`.
    pub(crate) fn expect(&mut self, region: u32, next: Option<u32>, pages: usize, way: Way) {
        if let Some(next) = next {
            self.streams[slot(region, next)] = Stream { region, next, window: pages as u32, way };
        }
    }
}

/// The last request for a window that is to be read ahead: see [`crate::ahead`].
#[derive(Default)]
pub(crate) struct Ahead {
    /// A region in the upper half, a page in the lower; no region is 0.
    asked: AtomicU64,
    bell: Bell,
}

impl Ahead {
    /// Asks for a window of pages.
    pub(crate) fn ask(&self, region: u32, page: u32) {
        self.asked.store(u64::from(region) << 32 | u64::from(page), Relaxed);
        self.bell.ring();
    }

    /// The word that the thread that reads ahead waits for.
    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Waits until something is asked for, or for a mere ring.
    pub(crate) fn next(&self) -> Option<(u32, u32)> {
        self.bell.wait();
        let asked = self.asked.swap(0, Relaxed);
        (asked != 0).then_some(((asked >> 32) as u32, asked as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_where_faults_are_in_order_and_nowhere_else() {
        for way in [Way::Up, Way::Down] {
            let mut streams = Streams::default();
            let (mut page, mut windows) = (1000, Vec::new());
            for _ in 0..5 {
                let (window, found) = streams.window(7, page, NORMAL);
                assert!(window == 1 || found == way);
                streams.brought(7, page, window, found);
                windows.push(window);
                page = way.from(page, window).unwrap();
            }
            assert_eq!(windows, [1, 4, 16, 64, 64]);
            assert_eq!(streams.window(7, page + 1, NORMAL).0, 1);
            assert_eq!(streams.window(8, page, NORMAL).0, 1);
            assert_eq!(streams.window(7, page, RANDOM).0, 1);
        }
    }

    #[test]
    fn nothing_is_expected_before_the_first_page() {
        let mut streams = Streams::default();
        streams.brought(7, 0, 1, Way::Up);
        assert_eq!(streams.window(7, 1, NORMAL), (4, Way::Up));
        assert_eq!(streams.window(7, u32::MAX, NORMAL).0, 1);
    }
}
