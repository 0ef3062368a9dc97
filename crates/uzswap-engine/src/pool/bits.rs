//! A set of numbers below a bound, of which the lowest and the highest are found in a few steps.
//!
//! A bit for each number, and above each 64 words one word that says which of them have any. So a
//! pool of a terabyte, half a million sections, finds one that has room in four steps.

/// See the module.
pub(super) struct Bits {
    /// From the numbers' own to a single word.
    levels: Vec<Box<[u64]>>,
}

impl Bits {
    /// The empty set.
    pub(super) fn new(bound: usize) -> Self {
        let mut levels = Vec::new();
        let mut bits = bound;
        loop {
            bits = bits.div_ceil(64).max(1);
            levels.push(vec![0; bits].into_boxed_slice());
            if bits == 1 {
                return Self { levels };
            }
        }
    }

    /// Puts a number in, or takes it out.
    pub(super) fn set(&mut self, number: usize, is_in: bool) {
        let mut at = number;
        for level in &mut self.levels {
            let (word, bit) = (&mut level[at / 64], 1 << (at % 64));
            let before = *word;
            *word = if is_in { before | bit } else { before & !bit };
            if (before == 0) == (*word == 0) {
                return;
            }
            at /= 64;
        }
    }

    pub(super) fn has(&self, number: usize) -> bool {
        self.levels[0][number / 64] & 1 << (number % 64) != 0
    }

    /// The lowest number.
    pub(super) fn first(&self) -> Option<usize> {
        self.find(u64::trailing_zeros)
    }

    /// The highest number.
    pub(super) fn last(&self) -> Option<usize> {
        self.find(|word| 63 - word.leading_zeros())
    }

    /// The number to which `pick` leads: it names a bit of a word that has some.
    fn find(&self, pick: impl Fn(u64) -> u32) -> Option<usize> {
        self.levels.iter().rev().try_fold(0, |at, level| {
            let word = level[at];
            (word != 0).then(|| at * 64 + pick(word) as usize)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_ends_are_those_of_a_set() {
        for bound in [1, 64, 65, 4096, 5000, 70_000] {
            let (mut bits, mut model) = (Bits::new(bound), BTreeSet::new());
            let mut noise = bound as u64 | 1;
            for _ in 0..if cfg!(miri) { 100 } else { 3000 } {
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
            }
        }
    }
}
