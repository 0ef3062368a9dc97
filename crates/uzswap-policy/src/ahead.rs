//! Decides how many pages a fault brings in: one page, or many where a program reads its memory in
//! order.
//!
//! For each processor, a pager remembers the next page of each recent stream: the page behind the
//! last window, or the page in front of it. A fault at such a page makes the stream's window four
//! times as long, up to 64 pages. Any other fault starts with a window of one page. Random access
//! thus costs a look-up and two entries in a table.

/// The maximum number of pages that a fault brings in.
pub const WINDOW_MAX: usize = 64;

/// The program gives no advice on its accesses.
pub const NORMAL: u8 = 0;
/// The program says that it goes through its memory in order.
pub const SEQUENTIAL: u8 = 1;
/// The program says that it goes through its memory in no order.
pub const RANDOM: u8 = 2;

/// Added to a region's number for a stream of first writes to guarded pages.
pub const WRITES: u32 = 1 << 31;

/// Streams that a pager remembers.
const STREAMS: usize = 32;

/// Which way a program goes through its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Way {
    /// To higher addresses.
    #[default]
    Up,
    /// To lower addresses.
    Down,
}

impl Way {
    /// The page that is `pages` further on, if a region can have it.
    pub fn from(self, page: u32, pages: usize) -> Option<u32> {
        match self {
            Self::Up => page.checked_add(pages as u32),
            Self::Down => page.checked_sub(pages as u32),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    region: u32,
    next: u32,
    window: u32,
    way: Way,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Streams {
    streams: [Stream; STREAMS],
}

/// The maximum number of pages for a fault: a 16th of `capacity`, so that the program touches the
/// last page before these pages are the oldest. Each of the `lanes` also keeps a buffer for this
/// many pages; all buffers are a quarter of the memory at most.
pub fn window_max(capacity: usize, lanes: usize) -> usize {
    (capacity / 16.max(4 * lanes)).clamp(1, WINDOW_MAX)
}

fn slot(region: u32, page: u32) -> usize {
    (region.wrapping_mul(31).wrapping_add(page).wrapping_mul(0x9e37_79b1) >> 27) as usize % STREAMS
}

impl Streams {
    /// The number of pages to bring in, beginning with `page`, and the direction.
    pub fn window(&self, region: u32, page: u32, advice: u8) -> (usize, Way) {
        let stream = self.streams[slot(region, page)];
        let goes_on = (stream.region, stream.next) == (region, page) && stream.window > 0;
        match advice {
            RANDOM => (1, Way::Up),
            _ if goes_on => ((stream.window as usize * 4).min(WINDOW_MAX), stream.way),
            SEQUENTIAL => (WINDOW_MAX, Way::Up),
            _ => (1, Way::Up),
        }
    }

    /// Remembers that `pages` pages came in, beginning with `page`. A single page may begin a
    /// stream in either direction.
    pub fn brought(&mut self, region: u32, page: u32, pages: usize, way: Way) {
        self.expect(region, way.from(page, pages), pages, way);
        if pages == 1 {
            let other = if way == Way::Up { Way::Down } else { Way::Up };
            self.expect(region, other.from(page, 1), 1, other);
        }
    }

    /// Expects that a stream with a window of `pages` continues at `next`.
    pub fn expect(&mut self, region: u32, next: Option<u32>, pages: usize, way: Way) {
        if let Some(next) = next {
            self.streams[slot(region, next)] = Stream { region, next, window: pages as u32, way };
        }
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
    fn a_window_is_a_small_part_of_the_memory() {
        assert_eq!([4096, 200, 15].map(|pages| window_max(pages, 2)), [64, 12, 1]);
        assert_eq!(window_max(4096, 128), 8, "all lanes have a buffer");
    }

    #[test]
    fn nothing_is_expected_before_the_first_page() {
        let mut streams = Streams::default();
        streams.brought(7, 0, 1, Way::Up);
        assert_eq!(streams.window(7, 1, NORMAL), (4, Way::Up));
        assert_eq!(streams.window(7, u32::MAX, NORMAL).0, 1);
    }
}
