//! How many pages to bring in at a fault: one, or many where a program goes through its memory in
//! order.
//!
//! Each lane remembers where the last faults of its processor would go on if they were in order. A
//! fault at such a place doubles the window, up to 64 pages; any other starts with a window of one.
//! So random access pays for a look and an entry in a table.

use crate::staging::BATCH;

/// What a program may say of its accesses; kept in a region's `advice`.
pub(crate) const NORMAL: u8 = 0;
pub(crate) const SEQUENTIAL: u8 = 1;
pub(crate) const RANDOM: u8 = 2;

/// Streams that a lane tells apart.
const STREAMS: usize = 32;

#[derive(Clone, Copy, Default)]
struct Stream {
    region: u32,
    next: u32,
    window: u32,
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
    /// How many pages to bring in from `page` on.
    pub(crate) fn window(&self, region: u32, page: u32, advice: u8) -> usize {
        let stream = self.streams[slot(region, page)];
        let goes_on = (stream.region, stream.next) == (region, page) && stream.window > 0;
        match advice {
            RANDOM => 1,
            SEQUENTIAL => BATCH,
            _ if goes_on => (stream.window as usize * 4).min(BATCH),
            _ => 1,
        }
    }

    /// Remembers what was brought in.
    pub(crate) fn brought(&mut self, region: u32, page: u32, pages: usize) {
        self.expect(region, page.wrapping_add(pages as u32), pages);
    }

    /// Expects a stream, that had a window of `pages`, to go on at `next`.
    pub(crate) fn expect(&mut self, region: u32, next: u32, pages: usize) {
        self.streams[slot(region, next)] = Stream { region, next, window: pages as u32 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_where_faults_are_in_order_and_nowhere_else() {
        let mut streams = Streams::default();
        let (mut page, mut windows) = (100, Vec::new());
        for _ in 0..5 {
            let window = streams.window(7, page, NORMAL);
            streams.brought(7, page, window);
            windows.push(window);
            page += window as u32;
        }
        assert_eq!(windows, [1, 4, 16, 64, 64]);
        assert_eq!(streams.window(7, page + 1, NORMAL), 1);
        assert_eq!(streams.window(8, page, NORMAL), 1);
        assert_eq!(streams.window(7, page, RANDOM), 1);
    }
}
