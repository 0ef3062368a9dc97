//! The words of a region's pages: a tree, in one mapping that takes memory as it is touched.
//!
//! ```text
//! top     a word for each 16 MiB        refers to
//! group   64 words, for 256 KiB each    refer to
//! groups  of 64 words of pages, and the keys of these pages
//! marks   a bit for each word of the top, and of a group above others: it is divided
//! ```
//! A program may reserve terabytes and use a page here and there. So pages share a word while they
//! are alike: `Untouched`, `Empty`, or `Busy` while a thread changes all of them. When one page is
//! to differ, the word is *divided*: from then on it refers to a group, for good. So a group's
//! words always belong to the same pages, and a thread may read them at any time.
//!
//! A search for used pages follows the marks ([`Words::next`]). So unused pages cost the search
//! next to nothing: the marks of 8 TiB are 16 Ki words. A word is marked before it is divided, and
//! stays marked.
//!
//! A reservation costs 4 bytes for each 16 MiB, and a page that is used alone 544 bytes.

#![expect(
    unsafe_code,
    reason = "words and granules lie in a mapping: both are atomics, and the mapping stays as long as its owner"
)]

use super::transition::Transition;
use super::word::{Kind, Word};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::*};
use uzswap_engine::PAGE_BYTES;
use uzswap_sys::map::Mapping;

/// The binary logarithm of the number of words in a group.
const FAN_BITS: u32 = 6;
const FAN: u32 = 1 << FAN_BITS;
/// Pages of a word at the top.
const TOP_BITS: u32 = 2 * FAN_BITS;
/// Pages whose words are in one group.
pub(crate) const BLOCK: u32 = FAN;
/// Neighbouring pages whose keys are in order.
pub(crate) const UNIT: u32 = 16;
/// Units of a block.
pub(crate) const UNITS: usize = (BLOCK / UNIT) as usize;
/// The words of a group, and the words of its keys or marks.
const GROUP: usize = FAN as usize + UNITS;
/// The number of marks in one word.
const MARKS: u32 = u32::BITS;

const _: () =
    assert!(FAN / MARKS <= UNITS as u32, "the marks of a group are where others have keys");

pub(crate) struct Words {
    memory: Mapping,
    pages: u32,
    /// The number of groups in use.
    groups: AtomicU32,
}

/// A word, and the pages to which it belongs.
pub(crate) struct Found<'a> {
    pub(crate) slot: &'a AtomicU32,
    pub(crate) word: Word,
    /// The number of pages is two to this power.
    bits: u32,
    page: u32,
}

impl Found<'_> {
    pub(crate) fn is_shared(&self) -> bool {
        self.bits > 0
    }

    /// True if dividing this word gives each of its pages a word of its own.
    pub(crate) fn is_block(&self) -> bool {
        self.bits == FAN_BITS
    }

    pub(crate) fn first(&self) -> u32 {
        self.page >> self.bits << self.bits
    }

    /// The end of its pages, which may be beyond the region.
    pub(crate) fn end(&self) -> u32 {
        self.first() + (1 << self.bits)
    }

    /// True if all of its pages are in a range.
    pub(crate) fn is_within(&self, pages: &Range<u32>) -> bool {
        pages.start <= self.first() && self.end() <= pages.end
    }

    /// Makes the pages `Busy`, if the word has not changed since.
    pub(crate) fn take(&self) -> bool {
        debug_assert!(self.word.kind() != Kind::Busy);
        let busy = Word::busy(self.word.kind());
        self.slot.compare_exchange(self.word.0, busy.0, AcqRel, Relaxed).is_ok()
    }

    /// Changes a page's own word, if the word has not changed since it was found.
    pub(crate) fn change(&self, by: &Transition, to: Word) -> bool {
        debug_assert!(!self.is_shared() && self.word.kind() != Kind::Busy);
        by.check(|| (self.word.kind(), to.kind()));
        self.slot.compare_exchange(self.word.0, to.0, AcqRel, Relaxed).is_ok()
    }
}

impl Words {
    /// The words of `pages` pages, all `Untouched`.
    pub(crate) fn new(pages: u32) -> io::Result<Self> {
        let groups = tops(pages) + pages.div_ceil(FAN) as usize;
        let bytes = (first_group(pages) + groups * GROUP) * size_of::<AtomicU32>();
        let memory = Mapping::for_pages(bytes, PAGE_BYTES)?;
        // A forked child reads the words.
        memory.set_inherited(0, memory.len(), true)?;
        Ok(Self { memory, pages, groups: AtomicU32::new(0) })
    }

    fn slot(&self, at: usize) -> &AtomicU32 {
        &self.slots(at..at + 1)[0]
    }

    fn slots(&self, range: Range<usize>) -> &[AtomicU32] {
        assert!(range.end <= self.memory.len() / size_of::<AtomicU32>());
        let first = self.memory.as_ptr().cast::<AtomicU32>();
        // SAFETY: the words are aligned and inside the mapping, which `self` keeps. All accesses
        // are atomic, and zero is a valid word.
        unsafe { std::slice::from_raw_parts(first.add(range.start), range.len()) }
    }

    /// The index of a group's first word.
    fn group(&self, group: u32) -> usize {
        first_group(self.pages) + group as usize * GROUP
    }

    /// The word of a page, its own or a shared one.
    pub(crate) fn find(&self, page: u32) -> Found<'_> {
        assert!(page < self.pages);
        let mut slot = self.slot((page >> TOP_BITS) as usize);
        let mut bits = TOP_BITS;
        loop {
            let word = look_at(slot);
            let Some(group) = word.group() else { return Found { slot, word, bits, page } };
            bits -= FAN_BITS;
            slot = self.slot(self.group(group) + (page >> bits & (FAN - 1)) as usize);
        }
    }

    /// A new group for the pages of a word that is about to be divided. Its words are all alike.
    pub(crate) fn add(&self, found: &Found<'_>, word: Word) -> u32 {
        let group = self.groups.fetch_add(1, Relaxed);
        let first = self.group(group);
        (first..first + FAN as usize).for_each(|at| self.slot(at).store(word.0, Relaxed));
        self.mark(found);
        group
    }

    fn mark(&self, found: &Found<'_>) {
        let at = found.page >> found.bits;
        let (marks, at) = match found.bits {
            TOP_BITS => (tops(self.pages), at),
            _ => (self.marks_below(found.page >> TOP_BITS).expect("found there"), at & (FAN - 1)),
        };
        // The mark is published with the word.
        self.slot(marks + (at / MARKS) as usize).fetch_or(1 << (at % MARKS), Relaxed);
    }

    /// The index at which the marks of a top word's group begin. `None` if the word is not divided.
    fn marks_below(&self, top: u32) -> Option<usize> {
        let word = look_at(self.slot(top as usize));
        Some(self.group(word.group()?) + FAN as usize)
    }

    /// The first mark at or after `at`, of the `count` marks that begin at a word.
    fn next_marked(&self, marks: usize, at: u32, count: u32) -> Option<u32> {
        let mut from = at % MARKS;
        let words = at / MARKS..count.div_ceil(MARKS);
        let all = self.slots(marks + words.start as usize..marks + words.end as usize);
        for (word, of_word) in words.zip(all) {
            let left = look_at(of_word).0 >> from << from;
            if left != 0 {
                return Some(word * MARKS + left.trailing_zeros());
            }
            from = 0;
        }
        None
    }

    /// The first page, beginning with `page`, whose own word is wanted.
    pub(crate) fn next(&self, page: u32, is_wanted: impl Fn(Word) -> bool) -> Option<u32> {
        let mut at = page;
        while at < self.pages {
            let block = self.next_divided(at)?;
            at = at.max(block);
            let end = block.saturating_add(BLOCK).min(self.pages);
            // A mark is set before its word is divided.
            if let Some(own) = self.own_words(at) {
                let mut words = self.slots(own..own + (end - at) as usize).iter();
                if let Some(beyond) = words.position(|word| is_wanted(look_at(word))) {
                    return Some(at + beyond as u32);
                }
            }
            at = end;
        }
        None
    }

    /// The first block that ends behind a page and whose words are marked as divided.
    fn next_divided(&self, page: u32) -> Option<u32> {
        let tops = tops(self.pages);
        let (mut top, mut middle) = (page >> TOP_BITS, page >> FAN_BITS & (FAN - 1));
        loop {
            let next = self.next_marked(tops, top, tops as u32)?;
            if next > top {
                (top, middle) = (next, 0);
            }
            let marks = self.marks_below(top);
            if let Some(middle) = marks.and_then(|marks| self.next_marked(marks, middle, FAN)) {
                return Some(top << TOP_BITS | middle << FAN_BITS);
            }
            (top, middle) = (top + 1, 0);
        }
    }

    pub(crate) fn of_group(&self, group: u32, at: usize) -> &AtomicU32 {
        assert!(at < FAN as usize);
        self.slot(self.group(group) + at)
    }

    /// For each unit of a page's block, the number of its keys plus 1, or 0. `None` if the page has
    /// no word of its own.
    pub(crate) fn keys(&self, page: u32) -> Option<[&AtomicU32; UNITS]> {
        let keys = self.own_words(page / BLOCK * BLOCK)? + FAN as usize;
        Some(std::array::from_fn(|unit| self.slot(keys + unit)))
    }

    /// The index of a page's own word; its block's later words follow. `None` if the page has no
    /// word of its own.
    fn own_words(&self, page: u32) -> Option<usize> {
        assert!(page < self.pages);
        let top = look_at(self.slot((page >> TOP_BITS) as usize));
        let middle = self.group(top.group()?) + (page >> FAN_BITS & (FAN - 1)) as usize;
        let block = look_at(self.slot(middle)).group()?;
        Some(self.group(block) + (page & (FAN - 1)) as usize)
    }

    /// Pages of memory that groups have taken: some of these are not touched yet.
    pub(crate) fn group_pages(&self, groups: u32) -> i64 {
        let pages = |words: usize| (words * size_of::<AtomicU32>()).div_ceil(PAGE_BYTES) as i64;
        pages(self.group(groups)) - pages(self.group(0))
    }

    pub(crate) fn groups(&self) -> u32 {
        self.groups.load(Relaxed)
    }

    /// Bytes of the top, and of its marks.
    pub(crate) fn top_bytes(&self) -> usize {
        first_group(self.pages) * size_of::<AtomicU32>()
    }
}

/// Reads a word. Tests count these reads.
fn look_at(word: &AtomicU32) -> Word {
    #[cfg(test)]
    tests::STEPS.set(tests::STEPS.get() + 1);
    Word(word.load(Acquire))
}

/// Words at the top.
fn tops(pages: u32) -> usize {
    pages.div_ceil(1 << TOP_BITS) as usize
}

/// Words before the groups: the top, and its marks.
fn first_group(pages: u32) -> usize {
    tops(pages) + tops(pages).div_ceil(MARKS as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::collections::BTreeSet;

    thread_local! {
        /// The number of words that this thread has read.
        pub(super) static STEPS: Cell<u64> = const { Cell::new(0) };
    }

    /// Gives a page a word of its own, which differs from that of its neighbours.
    fn set(words: &Words, page: u32, word: Word) {
        loop {
            let found = words.find(page);
            if !found.is_shared() {
                return found.slot.store(word.0, Relaxed);
            }
            let group = words.add(&found, found.word);
            found.slot.store(Word::divided(group).0, Relaxed);
        }
    }

    #[test]
    fn a_tebibyte_has_few_words_until_its_pages_differ() {
        const TEBIBYTE: u32 = 1 << 28;
        let words = Words::new(TEBIBYTE).unwrap();
        let (mut at, mut steps) = (0, 0);
        while at < TEBIBYTE {
            let found = words.find(at);
            assert!(found.word == Word::UNTOUCHED && found.is_shared() && found.first() == at);
            found.slot.store(Word::EMPTY.0, Relaxed);
            (at, steps) = (found.end(), steps + 1);
        }
        assert_eq!((steps, words.top_bytes()), (1 << 16, (256 << 10) + (8 << 10)));
        assert_eq!(words.memory.resident_pages().unwrap(), 64);
        // Each page lies by itself, far from the others.
        let page = |i: u32| i.wrapping_mul(0x9e37_79b1) % TEBIBYTE;
        (0..1000).for_each(|i| set(&words, page(i), Word::RESIDENT));
        for at in (0..1000).map(page) {
            assert_eq!(words.find(at).word, Word::RESIDENT);
            let beside = [at ^ 1, at ^ 64, at ^ 4096].map(|page| words.find(page).word);
            assert!(beside.iter().all(|word| [Word::EMPTY, Word::RESIDENT].contains(word)));
            assert!(words.keys(at).is_some() && words.keys(at ^ 64).is_none());
        }
        let pages = words.memory.resident_pages().unwrap() as i64;
        assert_eq!(pages, 66 + words.group_pages(words.groups()));
        assert!(pages <= 66 + 1000 * 544 / 4096 + 1, "{pages} pages");
    }

    #[test]
    fn the_last_pages_have_words_too() {
        for pages in [1, 63, 64, 65, 4095, 4097, 3 * 4096 + 70] {
            let words = Words::new(pages).unwrap();
            (0..pages).for_each(|page| set(&words, page, Word::staged(page as usize, Word::EMPTY)));
            assert!((0..pages).all(|page| words.find(page).word.frame() == page as usize));
        }
    }

    #[test]
    fn a_search_for_used_pages_takes_no_steps_for_the_others() {
        const PAGES: u32 = 1 << 31;
        let words = Words::new(PAGES).unwrap();
        let is_resident = |word: Word| word.kind() == Kind::Resident;
        let used: BTreeSet<_> = (0..1000).map(|i: u32| i.wrapping_mul(0x9e37_79b1) >> 1).collect();
        used.iter().for_each(|page| set(&words, *page, Word::RESIDENT));
        let before = STEPS.get();
        let mut found = Vec::new();
        let mut next = words.next(0, is_resident);
        while let Some(page) = next {
            found.push(page);
            next = words.next(page + 1, is_resident);
        }
        assert!(found.into_iter().eq(used));
        // The search reads all marks of the top, and for each page the words of its block and of
        // the levels above.
        let steps = STEPS.get() - before;
        assert!(steps <= u64::from(PAGES >> TOP_BITS) / 32 + 1000 * (64 + 20), "{steps} steps");
    }

    #[test]
    fn the_next_page_is_the_one_that_a_walk_over_all_words_finds() {
        const LAST: u32 = 3 * 4096 + 70;
        let words = Words::new(LAST).unwrap();
        let own = |page: &u32| !words.find(*page).is_shared();
        for used in [4096 * 2 + 63, 5, LAST - 1, 64 * 7, 4095, 4096] {
            set(&words, used, Word::RESIDENT);
            // The block's word is divided, but none of these pages has a word of its own.
            let beside = words.find(used ^ 64);
            beside.is_shared().then(|| words.mark(&beside));
            for page in (0..LAST).step_by(29) {
                let resident = |at: &u32| words.find(*at).word == Word::RESIDENT;
                assert_eq!(words.next(page, |_| true), (page..LAST).find(own), "from {page}");
                let next = words.next(page, |word| word == Word::RESIDENT);
                assert_eq!(next, (page..LAST).find(resident), "from {page}");
            }
        }
        assert_eq!(words.next(LAST, |_| true), None);
    }
}
