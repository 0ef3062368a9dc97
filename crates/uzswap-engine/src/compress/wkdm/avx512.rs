//! WKdm, 16 words at a time.
//!
//! Words of a group depend on earlier ones of the same slot, so each slot gets a mask of its words.
//! Then "the last one before me" is a mask, a count of leading zeros and a permutation. Only the
//! dictionary, a single register, passes from group to group.

#![expect(
    unsafe_code,
    reason = "instructions that not every processor has: the code needs a value that only their detection makes"
)]

use super::{Counts, GROUP, LOW, LOW_BITS, MULTIPLIER, Masks, Parts};
use crate::page::Page;
use std::arch::x86_64::*;

/// Proof that the processor has the instructions of this file.
#[derive(Clone, Copy)]
pub(super) struct Vector(());

impl Vector {
    pub(super) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512cd")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2")
            && is_x86_feature_detected!("gfni")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("popcnt");
        has_all.then_some(Self(()))
    }

    /// Writes the object of `page`.
    pub(super) fn compress(self, parts: &mut Parts, page: &Page, out: &mut [u8]) -> Option<usize> {
        // SAFETY: only `detect` makes `self`, and it has checked all the features.
        unsafe { compress(parts, page, out) }
    }

    /// Restores `page` from an object; fails if the bytes are not one.
    pub(super) fn decompress(
        self,
        parts: &mut Parts,
        object: &[u8],
        page: &mut Page,
    ) -> Option<()> {
        // SAFETY: as in `compress`.
        unsafe { decompress(parts, object, page) }
    }
}

#[target_feature(
    enable = "avx512f,avx512bw,avx512cd,avx512vl,avx512vbmi,avx512vbmi2,gfni,bmi2,popcnt"
)]
fn compress(parts: &mut Parts, page: &Page, out: &mut [u8]) -> Option<usize> {
    let counts = split(page, parts);
    parts.pack(counts, out)
}

#[target_feature(
    enable = "avx512f,avx512bw,avx512cd,avx512vl,avx512vbmi,avx512vbmi2,gfni,bmi2,popcnt"
)]
fn decompress(parts: &mut Parts, object: &[u8], page: &mut Page) -> Option<()> {
    parts.unpack(object)?;
    join(parts, page);
    Some(())
}

/// Vectors and arrays of bytes of the same size, valid with any bits.
macro_rules! window {
    ($load:ident, $store:ident, $vector:ty, $bytes:literal) => {
        /// Loads the bytes that begin at `at`.
        #[inline(always)]
        fn $load(bytes: &[u8], at: usize) -> $vector {
            let window: [u8; $bytes] = *bytes[at..].first_chunk().expect("sections have slack");
            // SAFETY: any bytes are a valid vector; sizes are compared by the compiler.
            unsafe { std::mem::transmute(window) }
        }

        /// Writes to the bytes that begin at `at`.
        #[inline(always)]
        fn $store(bytes: &mut [u8], at: usize, vector: $vector) {
            let window = bytes[at..].first_chunk_mut().expect("sections have slack");
            // SAFETY: any vector is valid bytes; sizes are compared by the compiler.
            *window = unsafe { std::mem::transmute::<$vector, [u8; $bytes]>(vector) };
        }
    };
}

window!(load_64, store_64, __m512i, 64);
window!(load_32, store_32, __m256i, 32);
window!(load_16, store_16, __m128i, 16);

#[inline]
#[target_feature(enable = "avx512f")]
fn slots(words: __m512i) -> __m512i {
    let keys = _mm512_srli_epi32::<LOW_BITS>(words);
    _mm512_srli_epi32::<28>(_mm512_mullo_epi32(keys, _mm512_set1_epi32(MULTIPLIER as i32)))
}

/// For each slot, a mask of its words among `which`: the transposition of a matrix of 16 by 16
/// bits, in blocks of 8 by 8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn members(slots: __m512i, which: __mmask16) -> __m512i {
    // Byte 8 × block + row of a block, its rows in the order of the instruction. The blocks are the
    // lower and the upper halves of the words' one-hot slots, eight words to a block.
    const BLOCKS: [u8; 64] = {
        let mut from = [0; 64];
        let mut to = 0;
        while to < 32 {
            let (block, row) = (to / 8, to % 8);
            let word = block % 2 * 8 + 7 - row;
            from[to] = (4 * word + block / 2) as u8;
            to += 1;
        }
        from
    };
    // Byte 4 × slot + half of a mask.
    const HALVES: [u8; 64] = {
        let mut from = [0; 64];
        let mut slot = 0;
        while slot < 16 {
            let byte = slot / 8 * 16 + slot % 8;
            from[4 * slot] = byte as u8;
            from[4 * slot + 1] = byte as u8 + 8;
            slot += 1;
        }
        from
    };
    let one_hot = _mm512_maskz_sllv_epi32(which, _mm512_set1_epi32(1), slots);
    let blocks = _mm512_permutexvar_epi8(load_64(&BLOCKS, 0), one_hot);
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
    let transposed = _mm512_gf2p8affine_epi64_epi8::<0>(identity, blocks);
    _mm512_maskz_permutexvar_epi8(0x3333_3333_3333_3333, load_64(&HALVES, 0), transposed)
}

/// The number of each mask's highest word, in its lower four bits; garbage where there is none.
#[inline]
#[target_feature(enable = "avx512f,avx512cd")]
fn last(masks: __m512i) -> __m512i {
    _mm512_xor_si512(_mm512_lzcnt_epi32(masks), _mm512_set1_epi32(31))
}

/// The item of `words` for each mask's highest word; `otherwise` where there is none.
#[inline]
#[target_feature(enable = "avx512f,avx512cd")]
fn of_last(masks: __m512i, words: __m512i, otherwise: __m512i) -> __m512i {
    let any = _mm512_test_epi32_mask(masks, masks);
    _mm512_mask_permutexvar_epi32(otherwise, any, last(masks), words)
}

/// For word i, a mask of the words before it; with `and_itself` = 1, of itself as well.
const fn before(and_itself: usize) -> [u8; 64] {
    let mut masks = [0; 64];
    let mut i = 0;
    while i < GROUP {
        let [a, b] = (((1u32 << (i + and_itself)) - 1) as u16).to_le_bytes();
        masks[4 * i] = a;
        masks[4 * i + 1] = b;
        i += 1;
    }
    masks
}

/// [`super::split`].
#[target_feature(
    enable = "avx512f,avx512bw,avx512cd,avx512vl,avx512vbmi,avx512vbmi2,gfni,bmi2,popcnt"
)]
fn split(page: &Page, parts: &mut Parts) -> Counts {
    const BEFORE: [u8; 64] = before(0);
    let before = load_64(&BEFORE, 0);
    let low = _mm512_set1_epi32(LOW as i32);
    let mut counts = Counts::default();
    let mut dictionary = _mm512_setzero_si512();
    let (groups, _) = page.as_chunks::<64>();
    for (group, tags) in groups.iter().zip(parts.tags.as_chunks_mut::<4>().0) {
        let words = load_64(group, 0);
        let slots = slots(words);
        let nonzero = _mm512_test_epi32_mask(words, words);
        let members = members(slots, nonzero);
        let earlier = _mm512_and_si512(_mm512_permutexvar_epi32(slots, members), before);
        let old = of_last(earlier, words, _mm512_permutexvar_epi32(slots, dictionary));
        dictionary = of_last(members, words, dictionary);
        let differ = _mm512_xor_si512(old, words);
        let old = _mm512_mask_cmple_epu32_mask(nonzero, differ, low);
        let exact = _mm512_mask_testn_epi32_mask(nonzero, differ, differ);
        let literal = nonzero & !old;
        let partial = old & !exact;
        *tags = Masks { old, whole: exact | literal }.to_bytes();

        let literals = _mm512_maskz_compress_epi32(literal, words);
        store_64(&mut parts.literals, 4 * counts.literals, literals);
        counts.literals += literal.count_ones() as usize;
        let slots = _mm_maskz_compress_epi8(old, _mm512_cvtepi32_epi8(slots));
        store_16(&mut parts.slots, counts.slots, slots);
        counts.slots += old.count_ones() as usize;
        let lows = _mm512_cvtepi32_epi16(_mm512_and_si512(words, low));
        store_32(&mut parts.lows, 2 * counts.lows, _mm256_maskz_compress_epi16(partial, lows));
        counts.lows += partial.count_ones() as usize;
    }
    counts
}

/// [`super::join`].
#[target_feature(
    enable = "avx512f,avx512bw,avx512cd,avx512vl,avx512vbmi,avx512vbmi2,gfni,bmi2,popcnt"
)]
fn join(parts: &Parts, page: &mut Page) {
    const UP_TO: [u8; 64] = before(1);
    let up_to = load_64(&UP_TO, 0);
    let low = _mm512_set1_epi32(LOW as i32);
    let mut counts = Counts::default();
    let mut dictionary = _mm512_setzero_si512();
    let (groups, _) = page.as_chunks_mut::<64>();
    for (group, tags) in groups.iter_mut().zip(parts.tags.as_chunks::<4>().0) {
        let Masks { old, whole } = Masks::from_bytes(*tags);
        let literal = whole & !old;
        let partial = old & !whole;

        // The compiler must not expand directly from memory: that instruction is ten times slower.
        let literals = load_64(&parts.literals, 4 * counts.literals);
        counts.literals += literal.count_ones() as usize;
        let lows = _mm512_cvtepu16_epi32(load_32(&parts.lows, 2 * counts.lows));
        counts.lows += partial.count_ones() as usize;
        let old_slots = _mm512_cvtepu8_epi32(load_16(&parts.slots, counts.slots));
        counts.slots += old.count_ones() as usize;
        let brought = _mm512_maskz_expand_epi32(literal, literals);
        let brought = _mm512_mask_expand_epi32(brought, partial, lows);
        let slots = _mm512_maskz_expand_epi32(literal, slots(literals));
        let slots = _mm512_mask_expand_epi32(slots, old, old_slots);

        // The upper bits of a word are those of the last literal in its slot, up to the word
        // itself. The lower bits are those of the last literal or partial word in that slot. If the
        // group has no such word, the dictionary has the bits.
        let members = members(slots, old | whole);
        let earlier = _mm512_and_si512(_mm512_permutexvar_epi32(slots, members), up_to);
        let listed = _mm512_permutexvar_epi32(slots, dictionary);
        let uppers = _mm512_and_si512(earlier, _mm512_set1_epi32(i32::from(literal)));
        let lowers = _mm512_and_si512(earlier, _mm512_set1_epi32(i32::from(literal | partial)));
        let upper = of_last(uppers, brought, listed);
        let lower = of_last(lowers, brought, listed);
        // Where the mask `low` has a 1, `lower`; else `upper`.
        let words = _mm512_ternarylogic_epi32::<0xCA>(low, lower, upper);
        let words = _mm512_maskz_mov_epi32(old | whole, words);
        dictionary = of_last(members, words, dictionary);
        store_64(group, 0, words);
    }
}
