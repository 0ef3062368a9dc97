//! The page: the unit that comes in and must go out unchanged.

/// Bytes in a page.
pub const PAGE_BYTES: usize = 4096;

/// One page of a program's memory, by value.
pub type Page = [u8; PAGE_BYTES];

/// A page that repeats one 64-bit word, where the word is short enough for the index
/// ([`Pattern::BITS`] bits). Zero pages are the common case.
///
/// About 6 % of a phone's swapped pages are zeros and 2.5 % another word (zram, commit
/// 8e19d540d107). A repeated word that does not fit is stored like any other page: every codec
/// compresses it to some thirty bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pattern(u64);

impl Pattern {
    /// Width of [`Pattern::to_bits`].
    pub const BITS: u32 = 57;
    /// Set when both halves of the word are the low 32 bits.
    const REPEATED: u64 = 1 << (Self::BITS - 1);

    /// The pattern of `page`, if it has one.
    pub fn of(page: &Page) -> Option<Self> {
        let (words, _) = page.as_chunks::<8>();
        let first = words[0];
        if words[1] != first || words.iter().any(|word| *word != first) {
            return None;
        }
        Self::from_word(u64::from_ne_bytes(first))
    }

    fn from_word(word: u64) -> Option<Self> {
        let low = word & 0xffff_ffff;
        if word >> 32 == low && low != 0 {
            Some(Self(Self::REPEATED | low))
        } else {
            (word < Self::REPEATED).then_some(Self(word))
        }
    }

    fn word(self) -> u64 {
        if self.0 & Self::REPEATED != 0 {
            let low = self.0 & 0xffff_ffff;
            low << 32 | low
        } else {
            self.0
        }
    }

    /// Writes the page of this pattern.
    pub fn fill(self, page: &mut Page) {
        let word = self.word().to_ne_bytes();
        let (words, _) = page.as_chunks_mut::<8>();
        words.fill(word);
    }

    /// The bits for the index word.
    pub(crate) fn to_bits(self) -> u64 {
        self.0
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }
}

/// The content hash of a page (XXH3, 64 bits). Its low half is the checksum that each object has;
/// its high half finds identical pages.
///
/// The hash is of the page, not of the compressed bytes. The hash thus also catches a codec that
/// decodes wrongly, and costs 187 ns with every codec.
pub fn content_hash(page: &Page) -> u64 {
    xxhash_rust::xxh3::xxh3_64(page)
}

/// The checksum half of [`content_hash`].
pub fn checksum_of(hash: u64) -> u32 {
    hash as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(word: u64) -> Page {
        let mut page = [0; PAGE_BYTES];
        page.chunks_exact_mut(8).for_each(|c| c.copy_from_slice(&word.to_ne_bytes()));
        page
    }

    #[test]
    fn patterns_round_trip() {
        for word in [0, 1, 0xff, u64::MAX, 0x5a5a_5a5a_5a5a_5a5a, 0x7fff_1234_5678, 1 << 55] {
            let page = filled(word);
            let pattern = Pattern::of(&page).unwrap_or_else(|| panic!("{word:#x} is a pattern"));
            let back = Pattern::from_bits(pattern.to_bits());
            assert!(back.to_bits() >> Pattern::BITS == 0, "{word:#x} fits the index word");
            let mut out = [1; PAGE_BYTES];
            back.fill(&mut out);
            assert_eq!(out, page, "{word:#x}");
        }
    }

    #[test]
    fn a_word_too_long_for_the_index_is_no_pattern() {
        assert_eq!(Pattern::of(&filled(0x8123_4567_89ab_cdef)), None);
    }

    #[test]
    fn a_single_different_byte_is_no_pattern() {
        for at in [0, 7, 8, 2048, PAGE_BYTES - 1] {
            let mut page = filled(0);
            page[at] = 1;
            assert_eq!(Pattern::of(&page), None, "byte {at}");
        }
    }
}
