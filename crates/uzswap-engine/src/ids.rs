//! The numbers that name things. Each kind has its own type, so that none is mistaken for another.

/// The key of a page: an area's base plus the page's offset in it.
///
/// Areas ([`Area`]) share one space of 2^32 pages (16 TiB). A key thus takes 32 bits as the owner
/// of an object, in the LRU's links, and among the candidates for identical pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SwapEntry(pub(crate) u32);

/// A range of keys: one swap device, one region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    pub(crate) first: u32,
    pub(crate) pages: u32,
}

impl Area {
    /// Pages in the area.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The key of page `offset` (in pages, from the area's start); `None` beyond its end.
    pub fn entry(&self, offset: u32) -> Option<SwapEntry> {
        (offset < self.pages).then(|| SwapEntry(self.first + offset))
    }

    /// All entries of the area, in order.
    pub fn entries(&self) -> impl Iterator<Item = SwapEntry> + use<> {
        (self.first..self.first + self.pages).map(SwapEntry)
    }

    pub(crate) fn contains(&self, entry: SwapEntry) -> bool {
        entry.0.wrapping_sub(self.first) < self.pages
    }
}

/// The place of an object in the pool: a zspage and an index in it. It is opaque and never an
/// address: an object that compaction moves gets another handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle(pub(crate) u64);

impl Handle {
    /// Width of a handle.
    pub(crate) const BITS: u32 = Self::ZSPAGE_BITS + Self::INDEX_BITS;
    const ZSPAGE_BITS: u32 = 28;
    const INDEX_BITS: u32 = 10;

    pub(crate) fn new(zspage: u32, index: u16) -> Self {
        debug_assert!(zspage >> Self::ZSPAGE_BITS == 0 && index >> Self::INDEX_BITS == 0);
        Self(u64::from(zspage) << Self::INDEX_BITS | u64::from(index))
    }

    pub(crate) fn zspage(self) -> u32 {
        (self.0 >> Self::INDEX_BITS) as u32
    }

    pub(crate) fn index(self) -> u16 {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as u16
    }
}

/// Where a record begins on the backing, in units of [`Place::UNIT`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub(crate) u64);

impl Place {
    /// Width of a place: 2^40 units of 16 bytes reach 16 TiB.
    pub(crate) const BITS: u32 = 40;
    /// Alignment of records on the backing, bytes.
    pub const UNIT: u64 = 16;

    pub(crate) fn at(byte: u64) -> Self {
        debug_assert!(byte.is_multiple_of(Self::UNIT) && byte / Self::UNIT < 1 << Self::BITS);
        Self(byte / Self::UNIT)
    }

    /// Offset on the backing, bytes.
    pub fn byte(self) -> u64 {
        self.0 * Self::UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_round_trip_at_their_limits() {
        for (zspage, index) in [(0, 0), (1, 1023), ((1 << 28) - 1, 512)] {
            let handle = Handle::new(zspage, index);
            assert_eq!((handle.zspage(), handle.index()), (zspage, index));
            assert_eq!(handle.0 >> Handle::BITS, 0);
        }
    }

    #[test]
    fn an_area_has_no_entry_beyond_its_end() {
        let area = Area { first: 100, pages: 3 };
        assert_eq!(area.entry(2), Some(SwapEntry(102)));
        assert_eq!(area.entry(3), None);
        assert!(area.contains(SwapEntry(100)) && !area.contains(SwapEntry(99)));
        assert!(!area.contains(SwapEntry(103)));
    }
}
