//! State of pages written through: a table for each cluster that has some.

use super::seal::Tag;
use super::shape::CLUSTER_SLOTS;
use crate::crash_points::DurableAtomic;
use crate::durable::{Durable, Values};
use crate::ids::SwapEntry;
use crate::sync::{Mutex, lock};
use crate::table::boxed;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// A table with an item for each slot of a cluster.
pub(super) struct ClusterTable {
    /// The owner of the page that was last written to each slot. A hint: that page may have gone or
    /// moved since.
    owners: Box<[SwapEntry; CLUSTER_SLOTS]>,
    /// The tags of sealed pages, two words for each slot. The tags are in the memory that outlives
    /// the process, if there is such memory.
    tags: Values<TagWord>,
    /// The number of these tags in that memory.
    pub(super) number: u32,
}

type TagWord = DurableAtomic<AtomicU64>;

const _: () = assert!(size_of::<Tag>() == 2 * size_of::<TagWord>());

impl ClusterTable {
    fn new(tags: Values<TagWord>, number: u32) -> io::Result<Self> {
        let owners = boxed(CLUSTER_SLOTS, || SwapEntry(0))?;
        Ok(Self { owners: owners.try_into().expect("one for each slot"), tags, number })
    }

    pub(super) fn owner(&self, at: usize) -> SwapEntry {
        self.owners[at]
    }

    pub(super) fn set_owner(&mut self, at: usize, owner: SwapEntry) {
        self.owners[at] = owner;
    }

    pub(super) fn tag(&self, at: usize) -> Tag {
        let halves = [2 * at, 2 * at + 1].map(|at| self.tags[at].load(Relaxed).to_ne_bytes());
        let mut tag = Tag::default();
        tag.iter_mut().zip(halves.as_flattened()).for_each(|(to, byte)| *to = *byte);
        tag
    }

    pub(super) fn set_tag(&self, at: usize, tag: Tag) {
        let (halves, _) = tag.as_chunks::<8>();
        for (word, half) in self.tags[2 * at..].iter().zip(halves) {
            word.store(u64::from_ne_bytes(*half), Relaxed);
        }
    }
}

/// Makes and frees tables.
pub(super) struct Tables {
    is_sealed: bool,
    /// Memory that outlives the process, with the number of each cluster's tags plus one.
    durable: Option<(Arc<Durable>, Values<DurableAtomic<AtomicU32>>)>,
    unused: Mutex<UnusedTags>,
}

#[derive(Default)]
struct UnusedTags {
    given_back: Vec<u32>,
    /// All numbers below this were used.
    used: u32,
}

impl Tables {
    pub(super) fn new(is_sealed: bool, durable: Option<&Arc<Durable>>) -> Self {
        let durable = durable.filter(|_| is_sealed);
        let durable = durable.map(|durable| (durable.clone(), durable.tag_homes()));
        Self { is_sealed, durable, unused: Mutex::new(UnusedTags::default()) }
    }

    /// Makes a table. Errors: no memory.
    pub(super) fn make(&self) -> io::Result<ClusterTable> {
        let Some((durable, homes)) = &self.durable else {
            let words = if self.is_sealed { CLUSTER_SLOTS * 2 } else { 0 };
            return ClusterTable::new(Values::Own(boxed(words, TagWord::default)?), 0);
        };
        let mut unused = lock(&self.unused);
        let number = unused.given_back.pop().unwrap_or_else(|| {
            unused.used += 1;
            unused.used - 1
        });
        drop(unused);
        let made = if (number as usize) < homes.len() {
            durable.tags(number as usize).and_then(|tags| ClusterTable::new(tags, number))
        } else {
            Err(io::ErrorKind::OutOfMemory.into())
        };
        if made.is_err() {
            lock(&self.unused).given_back.push(number);
        }
        made
    }

    pub(super) fn free(&self, table: ClusterTable) {
        if let Some((durable, _)) = &self.durable {
            let number = table.number as usize;
            durable.release_tags(number..number + 1);
            lock(&self.unused).given_back.push(table.number);
        }
    }

    /// Notes the table of a cluster, or that the cluster has no table.
    pub(super) fn note(&self, cluster: u32, table: Option<&ClusterTable>) {
        if let Some((_, homes)) = &self.durable {
            homes[cluster as usize].store(table.map_or(0, |table| table.number + 1), Release);
        }
    }

    /// Bytes of a table.
    pub(super) fn bytes_each(&self) -> usize {
        let of_slot = size_of::<SwapEntry>() + if self.is_sealed { size_of::<Tag>() } else { 0 };
        CLUSTER_SLOTS * of_slot
    }

    /// The table of a cluster that had one in the previous process, with its tags and no owners
    /// yet. Fails without memory, or if the tags are lost.
    pub(super) fn retake(&self, cluster: u32) -> io::Result<ClusterTable> {
        let Some((durable, homes)) = &self.durable else { return self.make() };
        let number = homes[cluster as usize].load(Acquire).checked_sub(1);
        match number.filter(|number| (*number as usize) < homes.len()) {
            Some(number) => ClusterTable::new(durable.tags(number as usize)?, number),
            None => Err(io::Error::other("a cluster has lost its tags")),
        }
    }

    /// Frees all tags that are not in `used`.
    pub(super) fn recover(&self, used: &[u32]) {
        let Some((durable, homes)) = &self.durable else { return };
        let mut unused = lock(&self.unused);
        unused.used = used.iter().max().map_or(0, |last| last + 1);
        // Spare tags without a cluster are behind the last used tags, or in a gap.
        let gaps = gaps(used, homes.len());
        let before = gaps.iter().flat_map(|gap| gap.clone()).map(|number| number as u32);
        unused.given_back = before.take_while(|number| *number < unused.used).collect();
        gaps.into_iter().for_each(|gap| durable.release_tags(gap));
    }
}

/// The numbers below `end` that are not among `used`, as ranges: the kernel is called once for each
/// range, however large the backing is.
fn gaps(used: &[u32], end: usize) -> Vec<Range<usize>> {
    let mut used: Vec<_> = used.iter().map(|number| *number as usize).collect();
    used.sort_unstable();
    used.dedup();
    let starts = std::iter::once(0).chain(used.iter().map(|number| number + 1));
    let ends = used.iter().copied().chain([end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_segments_are_given_back_in_rows() {
        // One call for an empty backing of 16 TiB.
        assert_eq!(gaps(&[], 8 << 20), std::slice::from_ref(&(0..8 << 20)));
        assert_eq!(gaps(&[5, 2, 3, 2], 8), [0..2, 4..5, 6..8]);
        assert_eq!(gaps(&[0, 1], 2), []);
    }
}
