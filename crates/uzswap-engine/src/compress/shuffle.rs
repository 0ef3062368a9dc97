//! A page of numbers with the bytes of one place beside each other: all first bytes of its 64-bit
//! words, then all second ones.
//!
//! The sign and exponent of floats that belong together are nearly the same, their last bytes are
//! noise. Side by side no codec finds much in them: there are no two equal words. Apart, the former
//! compress well and the latter cost no more than before. HDF5 and Blosc know it as the shuffle
//! filter. What is made of single precision or 32-bit integers is as good: their places come twice.

use crate::page::{PAGE_BYTES, Page};

/// Bytes of a word, and so lanes of a page.
const LANES: usize = 8;
const WORDS: usize = PAGE_BYTES / LANES;

/// A page whose words share so many bytes with the word before is worth a try: half a lane. Noise
/// shares 16.
const SHARED_BYTES: u32 = WORDS as u32 / 2;

/// Bytes compared before their count leaves eight bits.
const STRIDE: usize = 128;

/// Whether words often share bytes with those before them.
pub(super) fn is_promising(page: &Page) -> bool {
    let pairs = page[LANES..].chunks(STRIDE).zip(page.chunks(STRIDE));
    let shared = |(own, before): (&[u8], &[u8])| -> u32 {
        own.iter().zip(before).map(|(own, before)| u8::from(own == before)).sum::<u8>().into()
    };
    pairs.map(shared).sum::<u32>() >= SHARED_BYTES
}

/// Takes the bytes of words apart.
pub(super) fn shuffle(page: &Page, out: &mut Page) {
    let words = page.as_chunks::<LANES>().0;
    let lanes = out.as_chunks_mut::<LANES>().0;
    for (at, block) in words.as_chunks::<LANES>().0.iter().enumerate() {
        for (lane, bytes) in transposed(block).into_iter().enumerate() {
            lanes[lane * WORDS / LANES + at] = bytes;
        }
    }
}

/// Puts them together again.
pub(super) fn unshuffle(page: &Page, out: &mut Page) {
    let lanes = page.as_chunks::<LANES>().0;
    let words = out.as_chunks_mut::<LANES>().0;
    for (at, block) in words.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        *block = transposed(&std::array::from_fn(|lane| lanes[lane * WORDS / LANES + at]));
    }
}

/// Eight words of eight bytes with rows and columns exchanged: halves of the square, then quarters
/// of these, then bytes.
fn transposed(block: &[[u8; LANES]; LANES]) -> [[u8; LANES]; LANES] {
    let mut rows = block.map(u64::from_le_bytes);
    for (step, low) in
        [(4, 0x0000_0000_ffff_ffff_u64), (2, 0x0000_ffff_0000_ffff), (1, 0x00ff_00ff_00ff_00ff)]
    {
        for row in (0..LANES).filter(|row| row & step == 0) {
            let other = row + step;
            let exchanged = (rows[row] >> (8 * step) ^ rows[other]) & low;
            rows[other] ^= exchanged;
            rows[row] ^= exchanged << (8 * step);
        }
    }
    rows.map(u64::to_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::samples::{Random, samples};

    #[test]
    fn bytes_of_one_place_lie_side_by_side() {
        let page: Page = std::array::from_fn(|at| Random(at as u64 + 1).byte());
        let mut out = [0; PAGE_BYTES];
        shuffle(&page, &mut out);
        for (at, byte) in page.iter().enumerate() {
            assert_eq!(out[at % LANES * WORDS + at / LANES], *byte, "byte {at}");
        }
    }

    #[test]
    fn what_was_taken_apart_is_put_together() {
        for page in samples() {
            let (mut apart, mut back) = ([1; PAGE_BYTES], [2; PAGE_BYTES]);
            shuffle(&page, &mut apart);
            unshuffle(&apart, &mut back);
            assert!(back == page);
        }
    }

    #[test]
    fn floats_are_promising_and_noise_is_not() {
        let mut random = Random(3);
        assert!(!is_promising(&random.page()));
        let mut sum = 100.0;
        let mut page = [0; PAGE_BYTES];
        for word in page.as_chunks_mut::<LANES>().0 {
            sum += random.below(1000) as f64 / 999.0 - 0.5;
            *word = f64::to_ne_bytes(sum);
        }
        assert!(is_promising(&page));
        assert!(is_promising(&[0; PAGE_BYTES]), "every byte is as the one before");
        // Exactly as many as it takes.
        let mut page: Page = std::array::from_fn(|at| (at / LANES * 7) as u8);
        page.iter_mut()
            .skip(LANES)
            .step_by(2 * LANES)
            .for_each(|byte| *byte = byte.wrapping_sub(7));
        assert_eq!(page.iter().zip(&page[LANES..]).filter(|(a, b)| a == b).count(), 256);
        assert!(is_promising(&page));
        page[4090] ^= 0xff;
        page[PAGE_BYTES - LANES] ^= 0xff;
        assert!(!is_promising(&page));
    }
}
