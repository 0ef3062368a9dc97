//! Pages that the tests of our own codecs share.

use crate::page::{PAGE_BYTES as PAGE, Page};

/// Marsaglia's xorshift64.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (((self.next() >> 32) * bound as u64) >> 32) as usize
    }

    /// A number from 1 to `most` with a random order of magnitude.
    pub(super) fn skewed(&mut self, most: usize) -> usize {
        let bits = 1 + self.below(usize::BITS as usize - most.leading_zeros() as usize);
        (1 + self.below(1 << bits)).min(most)
    }

    pub(super) fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    pub(super) fn page(&mut self) -> Page {
        std::array::from_fn(|_| self.byte())
    }
}

/// Asserts that a page is compressed, to the same object, exactly where there is space for it, and
/// that no byte beyond is written.
pub(super) fn assert_room(
    page: &Page,
    mut compress: impl FnMut(&Page, &mut [u8]) -> Option<usize>,
) {
    let mut object = vec![0; 2 * PAGE];
    let bytes = compress(page, &mut object).expect("twice a page is plenty");
    object.truncate(bytes);
    let mut out = vec![0xC3; object.len() + 64];
    for room in 0..out.len() {
        let len = compress(page, &mut out[..room]);
        assert_eq!(len, (room >= object.len()).then_some(object.len()));
        assert!(out[room..].iter().all(|byte| *byte == 0xC3));
        assert!(len.is_none() || out.starts_with(&object));
        out.fill(0xC3);
    }
}

pub(super) fn pointers(random: &mut Random) -> Page {
    let mut page = [0; PAGE];
    for word in page.chunks_exact_mut(8) {
        let value = match random.below(4) {
            0 => 0,
            1 => random.below(200) as u64,
            _ => 0x7F3A_5C00_0000 + 16 * random.below(1 << 18) as u64,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
    page
}

/// A page of literals and of copies from all over.
pub(super) fn mixed(random: &mut Random) -> Page {
    let mut bytes = Vec::with_capacity(2 * PAGE);
    let alphabet = random.skewed(256);
    let (longest, farthest) = (random.skewed(1000), random.skewed(PAGE));
    while bytes.len() < PAGE {
        let (len, dist) = (random.skewed(longest), random.skewed(farthest));
        for _ in 0..random.skewed(longest) {
            bytes.push(random.below(alphabet) as u8);
        }
        for _ in 0..len {
            bytes.push(bytes[bytes.len().saturating_sub(dist)]);
        }
    }
    bytes[..PAGE].try_into().unwrap()
}

pub(super) fn samples() -> Vec<Page> {
    let mut random = Random(0x1234_5678_9ABC_DEF1);
    let mut pages = vec![[0; PAGE], [0xFF; PAGE], [17; PAGE]];
    for step in [1, 2, 3, 4, 8, 16, 64] {
        pages.push(std::array::from_fn(|at| (at / step) as u8));
        pages.push(std::array::from_fn(|at| (at * step) as u8));
        pages.push(std::array::from_fn(|at| ((at / step) >> (8 * (at % step % 3))) as u8));
    }
    for period in (1..40).chain([255, 256, 257, 1023, 2047, 2048, 2049, 4000, 4090]) {
        let noise = random.page();
        pages.push(std::array::from_fn(|at| noise[at % period]));
    }
    for _ in 0..20 {
        pages.push(random.page());
        pages.push(pointers(&mut random));
        pages.push(mixed(&mut random));
    }
    pages
}
