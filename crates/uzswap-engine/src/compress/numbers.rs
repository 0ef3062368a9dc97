//! A page of numbers taken apart, so that the common part of its words takes no space.
//!
//! ```text
//! words → decimals as integers → differences between neighbours
//!       → planes: all lowest bits, then all second ones …
//! ```
//! The words of an array are similar and never equal, so a codec finds few matches in them. A
//! difference has few bits; the planes of all other bits are zeros, which compress to nothing.
//! Floats that were rounded to some decimals, such as prices, look like noise to their last bit;
//! counted in hundredths they are small integers. docs/design/formats.md has figures.

use super::Undecodable;
use crate::page::{PAGE_BYTES, Page};
use std::hint::black_box;

/// The input of [`together`] besides the planes: the way the page was taken apart, and its first
/// number.
pub(super) type PlanesHeader = [u8; HEADER_BYTES];
/// Bytes of a [`PlanesHeader`].
pub(super) const HEADER_BYTES: usize = 1 + size_of::<u64>();
/// The header of a page that was not taken apart.
pub(super) const AS_IT_IS: PlanesHeader = [0xff; HEADER_BYTES];

/// Words of a page; words of a block, whose planes are made together; blocks of a page.
const WORDS: usize = PAGE_BYTES / size_of::<u64>();
const BLOCK: usize = 64;
const BLOCKS: usize = WORDS / BLOCK;

/// The first word of a sample, of one block, that decides if a page is worth a full check.
const LOOK: usize = WORDS / 2;

/// The difference between a word and its predecessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Difference {
    /// By exclusive or: for labels and noise, whose order means nothing.
    Bits = 0,
    /// A 64-bit difference.
    Word = 1,
    /// Two 32-bit differences.
    Halves = 2,
}

const STEPS: [Difference; 3] = [Difference::Bits, Difference::Word, Difference::Halves];

/// The factors that make integers of decimals.
const POWERS: [f64; 9] = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8];

/// 1.5 × 2⁵²: a float near this value has its integer in its last bits. An addition thus converts
/// integers and floats up to 2⁵¹, many at a time.
const MAGIC: f64 = 6_755_399_441_055_744.0;
const INTEGER_MAX: u64 = 1 << 51;
/// The exponents of floats from 10⁻⁸ to 2⁵¹.
const EXPONENTS: std::ops::RangeInclusive<u64> = 1023 - 27..=1023 + 51;

/// Takes a page apart if its numbers have less than `most` bytes in all.
pub(super) fn take_apart(page: &Page, most: usize, planes: &mut Page) -> Option<PlanesHeader> {
    let bytes = page.as_chunks::<8>().0;
    let word = |at: usize| u64::from_le_bytes(bytes[at]);
    let mut look: [u64; BLOCK] = std::array::from_fn(|at| word(LOOK + at));
    let looks_decimal = to_integers(&mut look).is_some();
    if costs(&look).iter().all(|(cost, _)| cost * BLOCKS >= most) {
        return None;
    }
    let mut words: [u64; WORDS] = std::array::from_fn(word);
    let power = looks_decimal.then(|| to_integers(&mut words)).flatten();
    let (least, step) = costs(&words).into_iter().min_by_key(|(cost, _)| *cost)?;
    if least >= most {
        return None;
    }
    let mut differences = [0; WORDS];
    differ(step, &words, &mut differences);
    let lanes = planes.as_chunks_mut::<8>().0;
    for (at, block) in differences.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        transpose(block);
        for (plane, bits) in block.iter().enumerate() {
            lanes[plane * BLOCKS + at] = bits.to_le_bytes();
        }
    }
    let how = step as u8 | power.map_or(0, |power| (power as u8 + 1) << 4);
    let mut header = [how; HEADER_BYTES];
    header[1..].copy_from_slice(&words[0].to_le_bytes());
    Some(header)
}

/// Puts a page together again. The input is not trusted.
pub(super) fn together(
    header: &PlanesHeader,
    planes: &Page,
    page: &mut Page,
) -> Result<(), Undecodable> {
    if *header == AS_IT_IS {
        *page = *planes;
        return Ok(());
    }
    let [how, first @ ..] = *header;
    let step = STEPS.into_iter().find(|step| *step as u8 == how & 0xf).ok_or(Undecodable)?;
    let power = usize::from(how >> 4).checked_sub(1);
    if power.is_some_and(|power| power >= POWERS.len()) {
        return Err(Undecodable);
    }
    let lanes = planes.as_chunks::<8>().0;
    let mut words = [0; WORDS];
    for (at, block) in words.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        for (plane, bits) in block.iter_mut().enumerate() {
            *bits = u64::from_le_bytes(lanes[plane * BLOCKS + at]);
        }
        transpose(block);
    }
    words[0] = u64::from_le_bytes(first);
    add_up(step, &mut words);
    if let Some(power) = power {
        let float_of = if rounds_to_nearest() { float_of } else { float_in_any_mode };
        words.iter_mut().for_each(|word| *word = float_of(*word, POWERS[power]));
    }
    for (bytes, word) in page.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    Ok(())
}

/// Turns words, taken as floats, into integers with the least power of ten that makes all of them
/// integers; returns the power. Without such a power, or if all are zero, the words stay.
fn to_integers(words: &mut [u64]) -> Option<usize> {
    let is_decimal = |word: u64, power: f64| {
        let integer = integer_of(word, power);
        // Outside of this range the conversion depends on the machine's infinities.
        integer.wrapping_add(INTEGER_MAX) <= 2 * INTEGER_MAX && float_of(integer, power) == word
    };
    // In heaps the first word that is not zero fails this test.
    let may_be = |word: &u64| *word == 0 || EXPONENTS.contains(&(word >> 52 & 0x7ff));
    if !words.iter().all(may_be) || words.iter().all(|word| *word == 0) || !rounds_to_nearest() {
        return None;
    }
    let mut power = 0;
    for &word in &*words {
        while !is_decimal(word, POWERS[power]) {
            power += 1;
            if power == POWERS.len() {
                return None;
            }
        }
    }
    words.iter_mut().for_each(|word| *word = integer_of(*word, POWERS[power]));
    Some(power)
}

/// True if this thread rounds to the nearest, as nearly all do. A program may have set other
/// rounding for the thread that takes a page apart, or for the thread that puts it together.
fn rounds_to_nearest() -> bool {
    // The float nearest to a third is below a third, and the one nearest to a tenth is above a
    // tenth.
    let quotients = [3.0_f64, 10.0].map(|by| (black_box(1.0) / black_box(by)).to_bits());
    quotients == [0x3fd5_5555_5555_5555, 0x3fb9_9999_9999_999a]
}

/// The integer nearest to a float times `power`, if that fits an integer; otherwise any integer.
fn integer_of(float: u64, power: f64) -> u64 {
    (f64::from_bits(float) * power + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits())
}

/// The float next to an integer over `power`.
fn float_of(integer: u64, power: f64) -> u64 {
    ((f64::from_bits(integer.wrapping_add(MAGIC.to_bits())) - MAGIC) / power).to_bits()
}

/// The float, computed by integers alone, for any rounding mode of this thread. Takes some ten
/// times as long as `float_of`.
fn float_in_any_mode(integer: u64, power: f64) -> u64 {
    let magnitude = u128::from((integer as i64).unsigned_abs() & (2 * INTEGER_MAX - 1));
    if magnitude == 0 {
        return 0;
    }
    let up = magnitude.leading_zeros();
    let (divisor, dividend) = (power as u128, magnitude << up);
    let (quotient, rest) = (dividend / divisor, dividend % divisor);
    // Rounds to 53 bits: to the nearest, and of two equally near to the even one.
    let down = u128::BITS - quotient.leading_zeros() - f64::MANTISSA_DIGITS;
    let below = quotient & ((1 << down) - 1);
    let half = 1 << (down - 1);
    let mantissa = quotient >> down;
    let is_up = below > half || below == half && (rest > 0 || mantissa & 1 == 1);
    // A mantissa of 54 bits carries into the exponent, as it should.
    let exponent = i64::from(down) - i64::from(up) + i64::from(f64::MANTISSA_DIGITS) - 1 + 1023;
    let bits = ((exponent as u64) << 52) + (mantissa as u64 - (1 << 52)) + u64::from(is_up);
    integer & 1 << 63 | bits
}

/// For each step, the bytes of all planes that are not only zeros. Each block of words has its own
/// planes.
fn costs(words: &[u64]) -> [(usize, Difference); 3] {
    STEPS.map(|step| {
        let blocks = words[1..].chunks(BLOCK).zip(words.chunks(BLOCK));
        let planes = blocks.map(|(block, before)| {
            let pairs = block.iter().zip(before);
            pairs.fold(0, |all, (word, before)| all | difference(step, *word, *before)).count_ones()
        });
        (planes.sum::<u32>() as usize * BLOCK / 8, step)
    })
}

/// The difference of each word from its predecessor; zero for the first.
fn differ(step: Difference, words: &[u64; WORDS], out: &mut [u64; WORDS]) {
    out[0] = 0;
    for (out, pair) in out[1..].iter_mut().zip(words.windows(2)) {
        *out = difference(step, pair[1], pair[0]);
    }
}

#[inline(always)]
fn difference(step: Difference, word: u64, before: u64) -> u64 {
    match step {
        Difference::Bits => word ^ before,
        Difference::Word => folded(word.wrapping_sub(before)),
        Difference::Halves => {
            let (high, low) = ((word >> 32).wrapping_sub(before >> 32), word.wrapping_sub(before));
            u64::from(folded_half(high as u32)) << 32 | u64::from(folded_half(low as u32))
        }
    }
}

/// The opposite of [`differ`]. The first word is no difference.
fn add_up(step: Difference, words: &mut [u64; WORDS]) {
    fn each(words: &mut [u64; WORDS], sum: impl Fn(u64, u64) -> u64) {
        let mut before = words[0];
        for word in &mut words[1..] {
            *word = sum(*word, before);
            before = *word;
        }
    }
    match step {
        Difference::Bits => each(words, |difference, before| difference ^ before),
        Difference::Word => {
            each(words, |difference, before| unfolded(difference).wrapping_add(before))
        }
        Difference::Halves => each(words, |difference, before| {
            let high = unfolded_half((difference >> 32) as u32).wrapping_add((before >> 32) as u32);
            let low = unfolded_half(difference as u32).wrapping_add(before as u32);
            u64::from(high) << 32 | u64::from(low)
        }),
    }
}

/// Small differences of either sign as small numbers: 0, −1, 1, −2 …
fn folded(difference: u64) -> u64 {
    difference << 1 ^ (difference as i64 >> 63) as u64
}

fn unfolded(number: u64) -> u64 {
    number >> 1 ^ (number & 1).wrapping_neg()
}

fn folded_half(difference: u32) -> u32 {
    difference << 1 ^ (difference as i32 >> 31) as u32
}

fn unfolded_half(number: u32) -> u32 {
    number >> 1 ^ (number & 1).wrapping_neg()
}

/// Swaps rows and columns of a square of bits: halves of the square, then quarters of these, down
/// to bits.
fn transpose(rows: &mut [u64; BLOCK]) {
    /// A function for each step, so that each is compiled for as many rows at once as possible.
    fn exchange<const STEP: usize>(rows: &mut [u64; BLOCK], low: u64) {
        for row in (0..BLOCK).filter(|row| row & STEP == 0) {
            let other = row + STEP;
            let exchanged = (rows[row] >> STEP ^ rows[other]) & low;
            rows[other] ^= exchanged;
            rows[row] ^= exchanged << STEP;
        }
    }
    exchange::<32>(rows, 0x0000_0000_ffff_ffff);
    exchange::<16>(rows, 0x0000_ffff_0000_ffff);
    exchange::<8>(rows, 0x00ff_00ff_00ff_00ff);
    exchange::<4>(rows, 0x0f0f_0f0f_0f0f_0f0f);
    exchange::<2>(rows, 0x3333_3333_3333_3333);
    exchange::<1>(rows, 0x5555_5555_5555_5555);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::samples::{Random, samples};

    fn page_of(word: impl FnMut(usize) -> u64) -> Page {
        let words: Vec<[u8; 8]> = (0..WORDS).map(word).map(u64::to_le_bytes).collect();
        words.as_flattened().try_into().unwrap()
    }

    /// Takes a page apart and puts it together; returns the way it was taken apart, and the bytes
    /// in planes that are not zeros.
    fn pass(page: &Page) -> (u8, usize) {
        let (mut planes, mut back) = ([1; PAGE_BYTES], [2; PAGE_BYTES]);
        let header = take_apart(page, usize::MAX, &mut planes).unwrap();
        together(&header, &planes, &mut back).unwrap();
        assert!(back == *page, "{header:?}");
        (header[0], planes.as_chunks::<64>().0.iter().filter(|p| **p != [0; 64]).count() * 64)
    }

    #[test]
    fn every_page_that_is_taken_apart_is_put_together() {
        for page in samples() {
            pass(&page);
        }
        let mut random = Random(77);
        for bits in 1..64 {
            let walk = std::cell::Cell::new(random.next());
            let mut step = || {
                walk.set(
                    walk.get().wrapping_add(random.next() >> bits).wrapping_sub(1 << (63 - bits)),
                );
                walk.get()
            };
            pass(&page_of(|_| step()));
            pass(&page_of(|_| step() << 32 | step() & 0xffff_ffff));
        }
    }

    #[test]
    fn bits_of_one_place_lie_side_by_side() {
        let mut random = Random(5);
        let labels: Vec<u64> = (0..WORDS).map(|_| random.next() & 0xf000).collect();
        let mut planes = [0; PAGE_BYTES];
        let header = take_apart(&page_of(|at| labels[at]), usize::MAX, &mut planes).unwrap();
        assert_eq!(header[0], Difference::Bits as u8);
        assert_eq!(header[1..], labels[0].to_le_bytes());
        for at in 1..WORDS {
            let difference = labels[at] ^ labels[at - 1];
            for plane in 0..64 {
                let byte = planes[plane * 64 + at / 8];
                assert_eq!(
                    u64::from(byte >> (at % 8) & 1),
                    difference >> plane & 1,
                    "{plane} {at}"
                );
            }
        }
    }

    #[test]
    fn each_kind_of_array_is_taken_apart_in_its_own_way() {
        let mut random = Random(3);
        // Times in microseconds, each up to 2000 after its predecessor.
        let mut time = 1_700_000_000_000_000;
        let times = page_of(|_| {
            time += random.below(2000) as u64;
            time
        });
        assert_eq!(pass(&times), (Difference::Word as u8, 11 * 64));
        // Two floats of single precision in a word.
        let (mut a, mut b) = (100_f32, 200_f32);
        let singles = page_of(|_| {
            a += random.below(1000) as f32 / 1000.0 - 0.5;
            b += random.below(1000) as f32 / 1000.0 - 0.5;
            u64::from(a.to_bits()) << 32 | u64::from(b.to_bits())
        });
        let (how, bytes) = pass(&singles);
        assert!(how == Difference::Halves as u8 && bytes < 48 * 64, "{how} {bytes}");
        // Prices in cents, and whole numbers, as floats.
        let mut cents = 12_345_i64;
        let prices = page_of(|_| {
            cents += random.below(200) as i64 - 100;
            (cents as f64 / 100.0).to_bits()
        });
        assert_eq!(pass(&prices), (Difference::Word as u8 | 3 << 4, 8 * 64));
        let counts = page_of(|_| (random.below(32) as f64).to_bits());
        assert_eq!(pass(&counts), (Difference::Bits as u8 | 1 << 4, 5 * 64));
    }

    #[test]
    fn floats_that_are_no_decimals_are_never_taken_for_some() {
        let large = 2_f64.powi(60) + 256.0;
        for odd in [f64::NAN, f64::INFINITY, -0.0, 0.1 + 0.2, 1e300, 1e-9, 5e-324, large] {
            for at in [0, 5, WORDS / 2, WORDS - 1] {
                let prices = page_of(|i| if i == at { odd } else { i as f64 / 100.0 }.to_bits());
                assert_eq!(pass(&prices).0 >> 4, 0, "{odd} at {at}");
            }
        }
        // The largest such integers: 2⁵¹ steps.
        for most in [1_i64 << 51, -(1 << 51)] {
            let page = page_of(|i| ((most - most.signum() * (i as i64 + 1)) as f64).to_bits());
            assert_eq!(pass(&page).0 >> 4, 1);
        }
        // The last words have more decimals than the words before them.
        let page = page_of(|i| (i as f64 / if i < 400 { 10.0 } else { 1e8 }).to_bits());
        assert_eq!(pass(&page).0 >> 4, 9);
    }

    #[test]
    fn decimals_are_divided_alike_however_a_thread_rounds() {
        assert!(rounds_to_nearest());
        let mut random = Random(21);
        for power in POWERS {
            for bits in 13..64 {
                for _ in 0..200 {
                    let magnitude = random.next() >> bits;
                    for integer in [magnitude, magnitude.wrapping_neg()] {
                        let expected = (integer as i64 as f64 / power).to_bits();
                        assert_eq!(float_of(integer, power), expected, "{integer} / {power}");
                        assert_eq!(
                            float_in_any_mode(integer, power),
                            expected,
                            "{integer} / {power}"
                        );
                    }
                }
            }
        }
        // Damaged integers become arbitrary floats.
        for bit in 0..64 {
            float_in_any_mode(1 << bit, 1e8);
        }
    }

    #[test]
    fn noise_and_heaps_are_left_alone() {
        let (mut random, mut planes) = (Random(9), [0; PAGE_BYTES]);
        assert_eq!(take_apart(&random.page(), PAGE_BYTES * 15 / 16, &mut planes), None);
        for _ in 0..100 {
            let page = crate::compress::samples::pointers(&mut random);
            assert_eq!(take_apart(&page, PAGE_BYTES / 3, &mut planes), None);
        }
        // Numbers in the sample, noise elsewhere.
        let noise = random.page();
        let page = page_of(|at| {
            let word = u64::from_le_bytes(noise.as_chunks().0[at]);
            if (LOOK..LOOK + BLOCK).contains(&at) { word & 0xff } else { word }
        });
        assert_eq!(take_apart(&page, PAGE_BYTES * 3 / 4, &mut planes), None);
    }

    #[test]
    fn any_bytes_are_put_together_to_something_or_refused() {
        let (mut random, mut page) = (Random(4), [0; PAGE_BYTES]);
        for how in 0..=u8::MAX {
            let mut header = [0; HEADER_BYTES];
            header.iter_mut().for_each(|byte| *byte = random.byte());
            header[0] = how;
            let known = how & 0xf < 3 && how >> 4 <= POWERS.len() as u8;
            assert_eq!(together(&header, &random.page(), &mut page).is_ok(), known, "{how}");
        }
        let noise = random.page();
        assert_eq!(together(&AS_IT_IS, &noise, &mut page), Ok(()));
        assert!(page == noise);
    }
}
