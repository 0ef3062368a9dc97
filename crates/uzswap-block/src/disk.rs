//! The storage behind the device: the cache, or plain memory for comparison.

use std::sync::{Arc, PoisonError, RwLock};
use uzswap_engine::{Area, Cache, Load, PAGE_BYTES, Page, Store, SwapEntry};

/// Why a request failed, which decides the error for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskError {
    /// Offset or length is not in whole pages, or beyond the end.
    Range,
    /// The page cannot be stored. The kernel keeps it in memory.
    Full,
    /// The page cannot be read back.
    Lost,
}

/// A disk of pages. Offsets and lengths are in bytes, multiples of the page.
pub trait Disk: Send + Sync {
    /// Its size.
    fn bytes(&self) -> u64;

    /// Reads pages. A page that was never written or was discarded reads as zeros.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DiskError>;

    /// Writes pages. After an error any of these pages may have been stored.
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DiskError>;

    /// Forgets pages.
    fn discard(&self, offset: u64, bytes: u64) -> Result<(), DiskError>;

    /// True if reading the page at `offset` waits for a slower device.
    fn is_slow(&self, offset: u64) -> bool;
}

fn check_range(disk: &dyn Disk, offset: u64, bytes: u64) -> Result<(), DiskError> {
    let page = PAGE_BYTES as u64;
    let end = offset.checked_add(bytes).ok_or(DiskError::Range)?;
    let aligned = offset.is_multiple_of(page) && bytes.is_multiple_of(page);
    if aligned && end <= disk.bytes() { Ok(()) } else { Err(DiskError::Range) }
}

/// The cache as a disk: one area of it.
pub struct CacheDisk {
    cache: Arc<Cache>,
    area: Area,
}

impl CacheDisk {
    /// Takes an area of `pages` pages; `None` if the cache's address space has no room for it.
    pub fn new(cache: Arc<Cache>, pages: u32) -> Option<Self> {
        let area = cache.add_area(pages)?;
        Some(Self { cache, area })
    }

    fn entry(&self, offset: u64) -> Result<SwapEntry, DiskError> {
        let page = u32::try_from(offset / PAGE_BYTES as u64).map_err(|_| DiskError::Range)?;
        self.area.entry(page).ok_or(DiskError::Range)
    }

    fn store(&self, entry: SwapEntry, page: &Page) -> Result<(), DiskError> {
        if self.cache.store(entry, page) == Store::Stored
            || self.cache.store_through(entry, page) == Store::Stored
        {
            Ok(())
        } else {
            Err(DiskError::Full)
        }
    }
}

impl Disk for CacheDisk {
    fn bytes(&self) -> u64 {
        u64::from(self.area.pages()) * PAGE_BYTES as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DiskError> {
        check_range(self, offset, out.len() as u64)?;
        let (pages, _) = out.as_chunks_mut::<PAGE_BYTES>();
        if pages.is_empty() {
            return Ok(());
        }
        self.cache.load_many(self.entry(offset)?, pages, |_, load, page| match load {
            Ok(Load::Hit) => Ok(()),
            Ok(Load::Absent) => {
                page.fill(0);
                Ok(())
            }
            Err(_) => Err(DiskError::Lost),
        })
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DiskError> {
        check_range(self, offset, bytes.len() as u64)?;
        let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
        for (at, page) in (offset..).step_by(PAGE_BYTES).zip(pages) {
            self.store(self.entry(at)?, page)?;
        }
        Ok(())
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<(), DiskError> {
        check_range(self, offset, bytes)?;
        for at in (offset..offset + bytes).step_by(PAGE_BYTES) {
            self.cache.invalidate(self.entry(at)?);
        }
        Ok(())
    }

    fn is_slow(&self, offset: u64) -> bool {
        self.entry(offset).is_ok_and(|entry| self.cache.is_on_backing(entry))
    }
}

/// Plain memory, to measure the cost of the transport by itself.
pub struct MemoryDisk {
    pages: RwLock<Vec<u8>>,
}

impl MemoryDisk {
    /// A disk of `bytes` zeros.
    pub fn new(bytes: usize) -> Self {
        Self { pages: RwLock::new(vec![0; bytes]) }
    }
}

impl Disk for MemoryDisk {
    fn bytes(&self) -> u64 {
        self.pages.read().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), DiskError> {
        check_range(self, offset, out.len() as u64)?;
        let pages = self.pages.read().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(&pages[offset as usize..][..out.len()]);
        Ok(())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DiskError> {
        check_range(self, offset, bytes.len() as u64)?;
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        pages[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn discard(&self, offset: u64, bytes: u64) -> Result<(), DiskError> {
        check_range(self, offset, bytes)?;
        let mut pages = self.pages.write().unwrap_or_else(PoisonError::into_inner);
        pages[offset as usize..][..bytes as usize].fill(0);
        Ok(())
    }

    fn is_slow(&self, _offset: u64) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_engine::backing::NoBacking;
    use uzswap_engine::{Config, STATISTICS};

    const PAGES: u32 = 1 << 18;

    fn disk() -> CacheDisk {
        let config = Config {
            pages_max: PAGES,
            ram_bytes: 64 << 20,
            ram_bytes_max: 64 << 20,
            pool_bytes_max: 8 << 20,
            algorithm: "lz4".parse().unwrap(),
            seals_backing: true,
        };
        let cache = Arc::new(Cache::new(config, Box::new(NoBacking)).unwrap());
        CacheDisk::new(cache, PAGES).unwrap()
    }

    /// The kernel reads the neighbours of a page that it needs, written or not.
    #[test]
    fn a_read_of_pages_that_were_never_written_makes_nothing() {
        let disk = disk();
        disk.write(4096, &[7; 4096]).unwrap();
        let before: Vec<_> = STATISTICS.iter().map(|s| (s.name, s.value(&disk.cache))).collect();
        let mut out = vec![1; 8 * 4096];
        // Reads around the written page, and where no page was ever written.
        for offset in [0, u64::from(PAGES) * 2048, (u64::from(PAGES) - 8) * 4096] {
            disk.read(offset, &mut out).unwrap();
            let has_page = offset == 0;
            assert_eq!(out[4096], if has_page { 7 } else { 0 });
            assert!(out[2 * 4096..].iter().all(|byte| *byte == 0));
        }
        let loads = ["loads", "loads_same_filled", "loads_absent"];
        let after = STATISTICS.iter().map(|s| (s.name, s.value(&disk.cache)));
        let changed = after.zip(before).filter(|(a, b)| a != b && !loads.contains(&a.0));
        assert_eq!(changed.collect::<Vec<_>>(), []);
    }

    #[test]
    fn index_memory_of_discarded_pages_is_given_back() {
        let disk = disk();
        let metadata = || disk.cache.statistic("metadata_size").unwrap();
        disk.cache.maintain().unwrap();
        let before = metadata();
        (0..4).for_each(|trunk| disk.write(trunk << 24, &[7; 4096]).unwrap());
        disk.cache.maintain().unwrap();
        let trunk = 4096 * 16;
        assert_eq!(metadata(), before + 4 * trunk);
        disk.discard(0, disk.bytes()).unwrap();
        disk.cache.maintain().unwrap();
        assert_eq!(metadata(), before);
    }
}
