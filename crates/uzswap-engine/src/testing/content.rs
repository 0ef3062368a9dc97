//! Pages to store.

use crate::{PAGE_BYTES, Page};

/// Deterministic noise (xorshift64*).
#[derive(Debug, Clone)]
pub struct Noise(u64);

impl Noise {
    /// The same seed gives the same noise.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 64 bits.
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.word() % end
    }
}

/// The kind of a page's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Zeros.
    Zero,
    /// One word repeated.
    Filled,
    /// Words of a small vocabulary.
    Text,
    /// 64-bit pointers into a few areas and to 64 types, small integers, and some noise.
    Pointers,
    /// Noise, which no codec compresses.
    Random,
    /// Part noise, part zeros.
    Mixed,
    /// Double precision floats, each near its predecessor.
    Numbers,
    /// Double precision floats near their predecessors, rounded to hundredths.
    Prices,
}

impl Content {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Zero,
        Self::Filled,
        Self::Text,
        Self::Pointers,
        Self::Random,
        Self::Mixed,
        Self::Numbers,
        Self::Prices,
    ];

    /// A content, by a random number.
    pub fn pick(number: u64) -> Self {
        Self::ALL[(number % Self::ALL.len() as u64) as usize]
    }
}

/// Writes a page of some content; the same seed gives the same page.
pub fn make_page(content: Content, seed: u64, page: &mut Page) {
    let mut noise = Noise::new(seed);
    let (words, _) = page.as_chunks_mut::<8>();
    match content {
        Content::Zero => page.fill(0),
        Content::Filled => {
            words.fill((seed % 251).wrapping_mul(0x0101_0101_0101_0101).to_ne_bytes())
        }
        Content::Text => {
            const WORDS: [&[u8; 8]; 8] = [
                b"memory, ",
                b"swapped ",
                b"out and ",
                b"back in ",
                b"by page ",
                b"fault.  ",
                b"The next",
                b" entry: ",
            ];
            words.iter_mut().for_each(|word| *word = *WORDS[noise.below(8) as usize]);
        }
        Content::Pointers => words.iter_mut().for_each(|word| {
            let value = match noise.below(64) {
                0 => noise.word(),
                1..16 => noise.below(256),
                16..40 => 0x5500_0000_0000 + noise.below(64) * 0x1040,
                area => 0x7f00_0000_0000 + ((area % 3) << 32) + (noise.below(4096) << 4),
            };
            *word = value.to_ne_bytes();
        }),
        Content::Random => words.iter_mut().for_each(|word| *word = noise.word().to_ne_bytes()),
        Content::Mixed => words.iter_mut().enumerate().for_each(|(i, word)| {
            *word = if i % 4 == 0 { noise.word() } else { 0 }.to_ne_bytes();
        }),
        Content::Numbers => {
            let mut sum = 100.0;
            for word in words {
                sum += noise.below(2001) as f64 / 100_000.0 - 0.01;
                *word = f64::to_ne_bytes(sum);
            }
        }
        Content::Prices => {
            let mut hundredths = noise.below(1_000_000) as i64;
            for word in words {
                hundredths += noise.below(201) as i64 - 100;
                *word = f64::to_ne_bytes(hundredths as f64 / 100.0);
            }
        }
    }
}

/// A page of some content, by value.
pub fn page_of(content: Content, seed: u64) -> Page {
    let mut page = [0; PAGE_BYTES];
    make_page(content, seed, &mut page);
    page
}
