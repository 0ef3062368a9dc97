//! The place of each segment: on the local disk, at the store, or both.
//!
//! ```text
//!         write              copied               its local place is needed
//! free ──→ WRITING ─→ LOCAL ────────→ LOCAL|REMOTE ────────→ REMOTE        (each ─→ free)
//! ```
//! Each segment has a word: flags, and the number of its write, which is a part of its key. The
//! word changes atomically, so a thread that copies a segment notices a newer write. A *slot* is a
//! place on the local disk. Another segment gets the slot only after LOCAL is gone from the word.
//! So a reader that finds the same word before and after its read has read the right slot.
//!
//! The table may be in memory that outlives the process. Then each slot is written before the word
//! that relies on it, and a word gives its slot up before another segment gets the slot.

#![expect(
    unsafe_code,
    reason = "memory that several processes map, one after the other: one of them serves at a time; it holds atomics, or data of a single thread"
)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};
use uzswap_sys::map::PAGE_BYTES;
use uzswap_sys::shared::{Part, SharedMemory};

/// The store has the segment.
pub(crate) const REMOTE: u64 = 1;
/// The local disk has the segment.
pub(crate) const LOCAL: u64 = 2;
/// The segment is being written.
pub(crate) const WRITING: u64 = 4;
/// The segment is written page by page, and is only local.
pub(crate) const PAGES: u64 = 8;
const NUMBER_SHIFT: u32 = 4;
/// No slot.
pub(crate) const NONE: u32 = u32::MAX;

/// In memory that outlives the process: bytes of the header, and of the two words of a segment.
const HEADER_BYTES: usize = 4096;
const ROW_BYTES: usize = 16;

/// The number of the write.
pub(crate) fn number(word: u64) -> u64 {
    word >> NUMBER_SHIFT
}

pub(crate) fn word(number: u64, flags: u64) -> u64 {
    number << NUMBER_SHIFT | flags
}

/// The first words of the memory that outlives the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableHeader {
    /// The part of the keys that marks this cache.
    pub(crate) epoch: u64,
    pub(crate) segments: usize,
    /// Lines for reads from the store: two for each of its servers.
    pub(crate) readers: usize,
}

/// The places of all segments.
pub(crate) struct SegmentTable {
    words: Box<[AtomicU64]>,
    slots: Box<[AtomicU32]>,
    /// Bytes written to each segment.
    lengths: Box<[AtomicU32]>,
    kept: Option<Mutex<Part>>,
}

impl SegmentTable {
    /// A table of free segments without slots.
    pub(crate) fn new(segments: usize) -> Self {
        Self {
            words: (0..segments).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..segments).map(|_| AtomicU32::new(NONE)).collect(),
            lengths: (0..segments).map(|_| AtomicU32::new(0)).collect(),
            kept: None,
        }
    }

    /// Bytes of the memory that outlives the process.
    fn kept_bytes(segments: usize) -> usize {
        HEADER_BYTES + segments * ROW_BYTES
    }

    /// The header of a file; `None` if it is new.
    pub(crate) fn header(file: &OwnedFd) -> Option<TableHeader> {
        let mut header = [0; 24];
        let is_whole = rustix::io::pread(file, &mut header, 0) == Ok(header.len());
        let word = |at: usize| header[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (epoch, segments, readers) = (word(0)?, word(8)? as usize, word(16)? as usize);
        (is_whole && epoch != 0).then_some(TableHeader { epoch, segments, readers })
    }

    /// A table in a file that only this process uses from now on: as the last process has left it,
    /// or new with this header. Fails without memory.
    pub(crate) fn kept(file: OwnedFd, header: TableHeader) -> io::Result<Self> {
        let TableHeader { epoch, segments, readers } = header;
        let is_new = Self::header(&file).is_none();
        let bytes = Self::kept_bytes(segments).next_multiple_of(PAGE_BYTES);
        let memory = SharedMemory::map(file, bytes)?;
        // SAFETY: the file is mapped once, here, and the last process has ended.
        let parts = unsafe { memory.into_parts(bytes) }?;
        let part = parts.into_iter().next();
        let mut part = part.ok_or(io::ErrorKind::OutOfMemory)?;
        let mut table = Self::new(segments);
        if is_new {
            for segment in 0..segments {
                let [_, place] = row(segment);
                part.set_word(place, u64::from(NONE) << 32);
            }
            part.set_word(8, segments as u64);
            part.set_word(16, readers as u64);
            part.set_word(0, epoch);
        } else {
            for segment in 0..segments {
                let [at, place] = row(segment);
                let (word, place) = (part.word(at), part.word(place));
                // Either the write had ended, or the engine will free the segment.
                let is_written = word & WRITING != 0;
                let word = if is_written { word & !WRITING | LOCAL } else { word };
                let slot = (place >> 32) as u32;
                let word = if slot == NONE { word & !(LOCAL | PAGES) } else { word };
                table.words[segment] = AtomicU64::new(word);
                let slot = if word & LOCAL == 0 { NONE } else { slot };
                table.slots[segment] = AtomicU32::new(slot);
                table.lengths[segment] = AtomicU32::new(place as u32);
            }
        }
        table.kept = Some(Mutex::new(part));
        Ok(table)
    }

    pub(crate) fn count(&self) -> usize {
        self.words.len()
    }

    pub(crate) fn get(&self, segment: usize) -> u64 {
        self.words[segment].load(SeqCst)
    }

    pub(crate) fn slot(&self, segment: usize) -> u32 {
        self.slots[segment].load(SeqCst)
    }

    pub(crate) fn length(&self, segment: usize) -> usize {
        self.lengths[segment].load(Relaxed) as usize
    }

    /// Sets a segment's slot and length. The segment's word, which relies on them, is set later.
    pub(crate) fn set_place(&self, segment: usize, slot: u32, length: usize) {
        self.slots[segment].store(slot, SeqCst);
        self.lengths[segment].store(length as u32, Relaxed);
        self.keep(segment, 1, u64::from(slot) << 32 | length as u64);
    }

    /// Sets a segment's word. Returns the old word.
    pub(crate) fn swap(&self, segment: usize, new: u64) -> u64 {
        let old = self.words[segment].swap(new, SeqCst);
        self.keep(segment, 0, new);
        old
    }

    /// Changes a word if it is still `old`.
    pub(crate) fn change(&self, segment: usize, old: u64, new: u64) -> bool {
        let changed = self.words[segment].compare_exchange(old, new, SeqCst, SeqCst).is_ok();
        if changed {
            self.keep(segment, 0, new);
        }
        changed
    }

    fn keep(&self, segment: usize, which: usize, value: u64) {
        if let Some(kept) = &self.kept {
            let mut part = crate::store::lock(kept);
            // The newest value of the word: another thread may have changed it since.
            let value = if which == 0 { self.get(segment) } else { value };
            part.set_word(row(segment)[which], value);
        }
    }

    /// The segment with exactly these flags that was written first.
    pub(crate) fn oldest(&self, flags: u64) -> Option<usize> {
        let is_it = |word: &u64| word & (REMOTE | LOCAL | WRITING | PAGES) == flags;
        let words = self.words.iter().map(|word| word.load(Relaxed)).enumerate();
        words.filter(|(_, word)| is_it(word)).min_by_key(|(_, word)| *word).map(|(at, _)| at)
    }

    /// The segments that the store has.
    pub(crate) fn remote(&self) -> Vec<usize> {
        (0..self.count()).filter(|segment| self.get(*segment) & REMOTE != 0).collect()
    }

    /// The numbers of these segments' writes.
    pub(crate) fn remote_numbers(&self) -> Vec<u64> {
        self.remote().into_iter().map(|segment| number(self.get(segment))).collect()
    }

    /// A number above all used ones.
    pub(crate) fn next(&self) -> u64 {
        self.words.iter().map(|word| number(word.load(Relaxed))).max().unwrap_or(0) + 1
    }
}

fn row(segment: usize) -> [usize; 2] {
    let at = HEADER_BYTES + segment * ROW_BYTES;
    [at, at + 8]
}

#[cfg(test)]
mod tests {
    use super::*;
    use uzswap_sys::shared::create;

    #[test]
    fn a_table_is_taken_over_as_it_was_left() {
        let file = create("table").unwrap();
        let header = TableHeader { epoch: 7, segments: 8, readers: 4 };
        let table = || SegmentTable::kept(file.try_clone().unwrap(), header).unwrap();
        assert_eq!(SegmentTable::header(&file), None);
        let first = table();
        first.set_place(1, 5, 4096);
        first.swap(1, word(9, WRITING));
        first.set_place(2, 6, 8192);
        first.swap(2, word(10, LOCAL | REMOTE));
        assert!(first.change(2, word(10, LOCAL | REMOTE), word(10, REMOTE)));
        assert!(!first.change(2, word(10, LOCAL), word(10, 0)));
        drop(first);
        assert_eq!(SegmentTable::header(&file), Some(header));
        let table = table();
        assert_eq!((table.get(1), table.slot(1), table.length(1)), (word(9, LOCAL), 5, 4096));
        assert_eq!((table.get(2), table.slot(2), table.length(2)), (word(10, REMOTE), NONE, 8192));
        assert_eq!((table.get(0), table.slot(0), table.next()), (0, NONE, 11));
    }

    #[test]
    fn the_oldest_is_the_one_that_was_written_first() {
        let table = SegmentTable::new(4);
        for (segment, number, flags) in [(0, 5, LOCAL), (1, 3, LOCAL | REMOTE), (2, 4, LOCAL)] {
            table.swap(segment, word(number, flags));
        }
        assert_eq!(table.oldest(LOCAL), Some(2));
        assert_eq!(table.oldest(LOCAL | REMOTE), Some(1));
        assert_eq!(table.oldest(REMOTE), None);
        assert_eq!((table.remote(), table.remote_numbers()), (vec![1], vec![3]));
    }
}
