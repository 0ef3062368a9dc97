//! The layout of the memory that outlives the process (see [`crate::durable`]).
//!
//! | part | in units of |
//! |---|---|
//! | header | |
//! | directory: the frame of each trunk of the index | 4 bytes a trunk |
//! | sections that are on line | 4 bytes a section |
//! | table of tags of each cluster | 4 bytes a cluster |
//! | use of each segment | 4 bytes a segment |
//! | dictionaries | 16 KiB |
//! | tables of tags | 8 KiB |
//! | descriptors of zspages | 24 KiB |
//! | frames of trunks | 64 KiB |
//! | sections | 2 MiB |
//!
//! Each trunk has a home, the frame with the trunk's number, and is mostly there. The processor can
//! thus fetch an entry before it has read the directory, which for a terabyte fits in no cache.

use crate::backing::seal::Tag;
use crate::backing::shape::{CLUSTER_BYTES, CLUSTER_SLOTS, SEGMENT_BYTES};
use crate::compress::DICTIONARY_BYTES;
use crate::durable::{DICTIONARIES_MAX, Durable, DurableArray, Parts};
use crate::error::SetupError;
use crate::index::{TRUNK_BYTES, TRUNK_ENTRIES};
use crate::page::PAGE_BYTES;
use crate::pool::{SECTION_BYTES, Zspage};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// "uzswap" and the version of this layout. A change of any type in this memory, or of an entry's
/// word, needs another version.
const MAGIC: u64 = u64::from_be_bytes(*b"uzswap\0\x02");

/// Frames for spare and retired trunks, besides the frames for the trunks of all keys.
const FRAMES_MORE: usize = 64;

/// Bytes of a huge page, on most machines.
const HUGE_BYTES: usize = 2 << 20;

/// An index of this many keys lies in huge pages. The entries of such an index take 64 MiB, so huge
/// pages waste little.
const HUGE_KEYS: u32 = 1 << 22;

const TAGS_BYTES: usize = CLUSTER_SLOTS * size_of::<Tag>();

/// Bytes of the descriptors that are made together.
const DESCRIPTORS_BYTES: usize = Zspage::CHUNK * size_of::<Zspage>();

const _: () = assert!(DESCRIPTORS_BYTES.is_multiple_of(PAGE_BYTES));
const _: () = assert!(TAGS_BYTES.is_multiple_of(PAGE_BYTES));

/// The numbers that determine the place of everything. These sizes must be the same in a take-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Keys of the index.
    pub(crate) keys: u32,
    /// Sections that the pool may have.
    pub(crate) sections: usize,
    /// Bytes of the backing.
    pub(crate) backing_bytes: u64,
    /// True if the backing is sealed.
    pub(crate) is_sealed: bool,
}

impl Shape {
    /// Opens a file from [`uzswap_sys::shared::create`]: a new one, or one with a cache of this
    /// shape. Fails without memory, or if the file has a cache of another shape.
    pub(crate) fn open(self, file: OwnedFd) -> Result<Arc<Durable>, SetupError> {
        let durable = Durable::open(file, MAGIC, self.words(), self.parts())?;
        durable.ok_or(SetupError::Left)
    }

    fn words(self) -> [u64; 4] {
        let is_sealed = u64::from(self.is_sealed);
        [u64::from(self.keys), self.sections as u64, self.backing_bytes, is_sealed]
    }

    fn trunks(self) -> usize {
        (self.keys as usize).div_ceil(TRUNK_ENTRIES)
    }

    fn segments(self) -> usize {
        (self.backing_bytes / SEGMENT_BYTES as u64) as usize
    }

    fn clusters(self) -> usize {
        self.segments().div_ceil(CLUSTER_BYTES / SEGMENT_BYTES)
    }

    /// The place of each part.
    fn parts(self) -> Parts {
        let mut end = PAGE_BYTES;
        let mut part = |unit: usize, count: usize, align: usize| {
            let start = end.next_multiple_of(align);
            end = start + (unit * count).next_multiple_of(PAGE_BYTES);
            DurableArray { start, unit, count }
        };
        let mut pages = |unit: usize, count: usize| part(unit, count, PAGE_BYTES);
        Parts {
            directory: pages(size_of::<u32>(), self.trunks()),
            sections_on_line: pages(size_of::<u32>(), self.sections),
            tag_homes: pages(size_of::<u32>(), self.clusters()),
            segments: pages(size_of::<u32>(), self.segments()),
            dictionaries: pages(DICTIONARY_BYTES, DICTIONARIES_MAX),
            tags: pages(TAGS_BYTES, self.clusters()),
            descriptors: pages(DESCRIPTORS_BYTES, self.sections),
            trunks: part(TRUNK_BYTES, self.trunks() + FRAMES_MORE, HUGE_BYTES),
            are_trunks_huge: self.keys >= HUGE_KEYS,
            sections: part(SECTION_BYTES, self.sections, PAGE_BYTES),
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// If a part moves, [`MAGIC`] needs another version.
    #[test]
    fn every_part_is_where_version_2_has_it() {
        let shape =
            Shape { keys: 10_000_000, sections: 100, backing_bytes: 1 << 30, is_sealed: true };
        let parts = shape.parts();
        let first = [parts.directory, parts.sections_on_line, parts.tag_homes, parts.segments];
        assert_eq!(first.map(|part| part.start), [4096, 16_384, 20_480, 24_576]);
        let second = [parts.dictionaries, parts.tags, parts.descriptors];
        assert_eq!(second.map(|part| part.start), [40_960, 1_089_536, 5_283_840]);
        let third = [parts.trunks, parts.sections];
        assert_eq!(third.map(|part| part.start), [8_388_608, 172_621_824]);
    }
}
