//! A set of numbers below a bound, in which the next number from anywhere is found quickly.
//!
//! A bit for each number, a count of the set bits for each 64 words, a count for each 64 counts, up
//! to one count of all. A search among the 8 million clusters of 16 TiB reads at most 64 words on
//! each of four levels, and mostly one.
//!
//! **Threads** may change different numbers at the same time, without a lock. The caller serializes
//! changes of one number. A count is never too small: it grows before a bit is set, and shrinks
//! after a bit is cleared. No search thus misses a number that is already in the set.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

/// Words that a count covers, and counts that a count of the next level covers.
const FAN: usize = 64;
/// The low bits of a number, which select a bit of its word.
const FAN_SHIFT: usize = FAN.ilog2() as usize;

/// See the module.
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
    /// The lowest level counts words, the highest has one count of all.
    counts: Vec<Box<[AtomicU32]>>,
}

impl Bits {
    /// The empty set.
    pub(crate) fn new(bound: usize) -> Self {
        let words: Box<[_]> = (0..bound.div_ceil(FAN)).map(|_| AtomicU64::new(0)).collect();
        let (mut counts, mut count) = (Vec::new(), words.len());
        loop {
            count = count.div_ceil(FAN).max(1);
            counts.push((0..count).map(|_| AtomicU32::new(0)).collect());
            if count == 1 {
                return Self { words, counts };
            }
        }
    }

    /// Puts a number in, or takes it out.
    pub(crate) fn set(&self, number: usize, is_in: bool) {
        // A caller that keeps a set up to date mostly changes nothing, so this reads first.
        if self.has(number) == is_in {
            return;
        }
        let (word, bit) = (&self.words[number / FAN], 1 << (number % FAN));
        if is_in {
            self.counts_of(number).for_each(|count| _ = count.fetch_add(1, AcqRel));
            word.fetch_or(bit, Release);
        } else {
            word.fetch_and(!bit, Release);
            self.counts_of(number).for_each(|count| _ = count.fetch_sub(1, AcqRel));
        }
    }

    /// The counts, one per level, that include this number's bit.
    fn counts_of(&self, number: usize) -> impl Iterator<Item = &AtomicU32> {
        (2..).zip(&self.counts).map(move |(level, counts)| &counts[number >> (level * FAN_SHIFT)])
    }

    pub(crate) fn has(&self, number: usize) -> bool {
        self.words[number / FAN].load(Acquire) & 1 << (number % FAN) != 0
    }

    /// The lowest number.
    pub(crate) fn first(&self) -> Option<usize> {
        self.find(self.counts.len(), 0, 0, false)
    }

    /// The highest number.
    pub(crate) fn last(&self) -> Option<usize> {
        self.find(self.counts.len(), 0, 0, true)
    }

    /// The numbers in the set that are at least `from`, and then the smaller ones.
    pub(crate) fn from(&self, from: usize) -> impl Iterator<Item = usize> {
        self.between(from, usize::MAX).chain(self.between(0, from))
    }

    fn between(&self, mut from: usize, to: usize) -> impl Iterator<Item = usize> {
        std::iter::from_fn(move || {
            let found = self.find(self.counts.len(), 0, from, false)?;
            from = found + 1;
            (found < to).then_some(found)
        })
    }

    /// The first or the last number, not below `from`, in the word or count `at` of a level. `from`
    /// is also in this word or count, or below it.
    fn find(&self, level: usize, at: usize, from: usize, is_last: bool) -> Option<usize> {
        let Some(below) = level.checked_sub(1) else {
            let word = self.words[at].load(Acquire) & u64::MAX << from.saturating_sub(at * FAN);
            let bit = if is_last { word.checked_ilog2() } else { Some(word.trailing_zeros()) };
            return bit.filter(|_| word != 0).map(|bit| at * FAN + bit as usize);
        };
        if self.counts[below][at].load(Acquire) == 0 {
            return None;
        }
        let there = below.checked_sub(1).map_or(self.words.len(), |at| self.counts[at].len());
        let first = (at * FAN).max(from >> (level * FAN_SHIFT));
        let mut members = first..there.min((at + 1) * FAN);
        let next = || if is_last { members.next_back() } else { members.next() };
        std::iter::from_fn(next).find_map(|member| self.find(below, member, from, is_last))
    }

    /// Recounts; panics if a count is wrong. No thread may change the set during the call.
    pub(crate) fn check(&self) {
        let of_word = |word: &AtomicU64| word.load(Acquire).count_ones();
        let mut below: Vec<u32> = self.words.iter().map(of_word).collect();
        for counts in &self.counts {
            below = below.chunks(FAN).map(|members| members.iter().sum()).collect();
            below.resize(counts.len(), 0);
            let counts: Vec<u32> = counts.iter().map(|count| count.load(Acquire)).collect();
            assert_eq!(counts, below, "bits set");
        }
    }

    /// Bytes that the set takes.
    pub(crate) fn bytes(&self) -> usize {
        let counts: usize = self.counts.iter().map(|counts| size_of_val(&**counts)).sum();
        size_of_val(&*self.words) + counts
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn first_last_and_next_number_are_those_of_a_set() {
        for bound in [1, 64, 65, 4096, 5000, 70_000, 300_000] {
            let (bits, mut model) = (Bits::new(bound), BTreeSet::new());
            let mut noise = bound as u64 | 1;
            for step in 0..if cfg!(miri) { 100 } else { 3000 } {
                noise = noise.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let number = (noise >> 33) as usize % bound;
                let is_in = noise >> 32 & 1 == 0;
                bits.set(number, is_in);
                if is_in {
                    model.insert(number)
                } else {
                    model.remove(&number)
                };
                assert_eq!(bits.has(number), is_in);
                assert_eq!(bits.first(), model.first().copied());
                assert_eq!(bits.last(), model.last().copied());
                let from = number / 2;
                let next = bits.from(from).next();
                assert_eq!(next, model.range(from..).chain(&model).next().copied());
                if step % 100 == 0 {
                    let all = model.range(from..).chain(model.range(..from));
                    assert!(bits.from(from).eq(all.copied()));
                    bits.check();
                }
            }
        }
    }

    #[test]
    fn one_number_of_millions_is_found_without_a_look_at_all_words() {
        let bits = Bits::new(8 << 20);
        assert_eq!(
            bits.counts.iter().map(|counts| counts.len()).collect::<Vec<_>>(),
            [2048, 32, 1]
        );
        bits.set((8 << 20) - 1, true);
        // Reading every word would take 10^11 reads.
        let found = (0..1 << 20).filter(|from| bits.from(*from).next().is_some()).count();
        assert_eq!(found, 1 << 20);
    }
}
