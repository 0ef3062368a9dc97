//! Page → bytes → page.
//!
//! A [`Codec`] is a format. Every object has its codec, so objects survive a change of the
//! `compressor` attribute. An [`Algorithm`] is a codec with a level, for new pages. [`Codecs`] has
//! one CPU's contexts, made once. Afterwards neither direction allocates, on a thread that has
//! called [`prepare_thread`].

mod deflate;
mod dictionary;
mod lz4;
mod lzo;
mod numbers;
#[cfg(test)]
mod samples;
mod unit;
mod wkdm;
mod zstd;

pub(crate) use dictionary::{DICTIONARY_BYTES, Dictionaries, Encoder, SAMPLES, dictionary_of};
pub(crate) use unit::{GROUP_PAGES, UNIT_BYTES_MAX, UNIT_PAGES, UnitDecoder, UnitEncoder};
pub(crate) use zstd::{Trial, WithDictionary};

use crate::page::{PAGE_BYTES, Page};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A format of objects. The numbers are stored in index words and on the backing: never reuse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// The page itself, if it does not compress.
    Raw = 0,
    /// LZ4 block format.
    Lz4 = 1,
    /// Zstandard frames without the magic number.
    Zstd = 2,
    /// LZO1X.
    Lzo = 3,
    /// Raw deflate.
    Deflate = 4,
    /// WKdm, for memory rather than files.
    Wkdm = 5,
    /// A piece of a unit of recompressed pages. A piece is not a page by itself, and cannot be
    /// chosen.
    Piece = 6,
    /// LZ4 of a page of numbers taken apart. `lz4` chooses this format by page.
    Lz4Numbers = 9,
    /// Zstandard of a page of numbers taken apart. `zstd` chooses this format by page.
    ZstdNumbers = 10,
}

impl Codec {
    /// Bits that a codec's number takes.
    pub const BITS: u32 = 4;
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Raw,
        Self::Lz4,
        Self::Zstd,
        Self::Lzo,
        Self::Deflate,
        Self::Wkdm,
        Self::Piece,
        Self::Lz4Numbers,
        Self::ZstdNumbers,
    ];
    /// The values of `compressor`.
    pub const CHOICES: &[Self] = Self::ALL.split_at(Self::Piece as usize).0;

    /// The codec of a number from an index word, which only has known numbers.
    pub(crate) fn from_bits(bits: u8) -> Self {
        Self::try_from_bits(bits).expect("only known codecs are ever stored")
    }

    /// The codec of a number from outside, such as a record on the backing.
    pub(crate) fn try_from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| *codec as u8 == bits)
    }

    /// The name by which `compressor` knows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Lzo => "lzo",
            Self::Deflate => "deflate",
            Self::Wkdm => "wkdm",
            Self::Piece => "piece",
            Self::Lz4Numbers => "lz4, numbers",
            Self::ZstdNumbers => "zstd, numbers",
        }
    }

    /// The codec for pages of numbers.
    fn for_numbers(self) -> Option<Self> {
        match self {
            Self::Lz4 => Some(Self::Lz4Numbers),
            Self::Zstd => Some(Self::ZstdNumbers),
            _ => None,
        }
    }

    /// True if this format is for pages of numbers.
    pub(crate) fn is_for_numbers(self) -> bool {
        matches!(self, Self::Lz4Numbers | Self::ZstdNumbers)
    }

    /// Levels that `compressor` accepts, and the level of a name without one.
    fn levels(self) -> (std::ops::RangeInclusive<i32>, i32) {
        match self {
            Self::Raw | Self::Lzo | Self::Wkdm => (0..=0, 0),
            Self::Piece | Self::Lz4Numbers | Self::ZstdNumbers => (0..=0, 0),
            // From 1 on the library's acceleration: higher is faster and larger. 0 and −1 are our
            // own encoders, faster and smaller.
            Self::Lz4 => (lz4::BY_PAGE..=64, lz4::BY_PAGE),
            // On heap pages −1 gives nearly the size of 1 in two thirds of its time
            // (docs/benchmarks.md).
            Self::Zstd => (-100..=19, -1),
            Self::Deflate => (1..=12, 1),
        }
    }
}

/// The compression of new pages: `lz4`, `zstd`, `zstd:3`, `raw` …
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Algorithm {
    /// The format.
    pub codec: Codec,
    /// Its level, in the codec's own meaning.
    pub level: i32,
}

/// The text names no algorithm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AlgorithmError {
    /// No such codec.
    #[error("unknown compressor '{name}'; use one of {known}")]
    Unknown {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The codec has no such level.
    #[error("compressor {codec} has no level '{level}'; levels are {low} to {high}")]
    Level {
        /// The codec's name.
        codec: &'static str,
        /// The requested level.
        level: String,
        /// Lowest level.
        low: i32,
        /// Highest level.
        high: i32,
    },
}

impl FromStr for Algorithm {
    type Err = AlgorithmError;

    fn from_str(text: &str) -> Result<Self, AlgorithmError> {
        let (name, level) = match text.split_once(':') {
            Some((name, level)) => (name, Some(level)),
            None => (text, None),
        };
        let known = || Codec::CHOICES.iter().copied();
        let codec = known().find(|codec| codec.name() == name).ok_or_else(|| {
            let known = known().map(Codec::name).collect::<Vec<_>>().join(", ");
            AlgorithmError::Unknown { name: name.into(), known }
        })?;
        let (levels, default) = codec.levels();
        let Some(text) = level else { return Ok(Self { codec, level: default }) };
        match text.parse() {
            Ok(level) if levels.contains(&level) => Ok(Self { codec, level }),
            _ => Err(AlgorithmError::Level {
                codec: codec.name(),
                level: text.into(),
                low: *levels.start(),
                high: *levels.end(),
            }),
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.level == self.codec.levels().1 {
            f.write_str(self.codec.name())
        } else {
            write!(f, "{}:{}", self.codec.name(), self.level)
        }
    }
}

/// The bytes do not decode to exactly one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Undecodable;

/// One codec's contexts.
trait Compressor {
    /// Compresses `page` into `out`; the bytes written, or `None` when they would not fit.
    fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<usize>;

    /// Decompresses `object` into `page`. No bytes in `object` make this read or write out of
    /// bounds.
    fn decompress(&mut self, object: &[u8], page: &mut Page) -> Result<(), Undecodable>;
}

/// Allocates the calling thread's memory: the hash table of the lz4 library (16 KiB), the record of
/// the epochs, and stack, which becomes memory only when it is touched. Each thread that stores or
/// loads calls it before its first page.
pub fn prepare_thread() {
    drop(crate::sync::pin());
    let _ = lz4::Lz4::new().compress(&[0; PAGE_BYTES], &mut [0; 64]);
    touch_stack();
}

/// Stack that is touched ahead. The deepest path, a load of a page in a unit on the backing, took
/// 36 KiB from a thread's start.
const STACK_BYTES: usize = 64 << 10;

#[inline(never)]
fn touch_stack() {
    std::hint::black_box(&mut [0u8; STACK_BYTES]);
}

/// If a page's object is larger than this, the page may consist of numbers, and compress better
/// when these are taken apart.
const NUMBERS_BYTES_MIN: usize = PAGE_BYTES / 4;

/// Taking numbers apart must gain one part in this many: decoding takes longer.
const NUMBERS_GAIN: usize = 16;

/// Contexts for an algorithm, made before a thread waits for the lock of [`Codecs`].
pub(crate) struct Prepared {
    algorithm: Algorithm,
    context: CodecContext,
}

enum CodecContext {
    /// The level of codecs without levels, and of those that cannot be chosen.
    None,
    Lz4,
    Zstd(zstd::Plain),
    Deflate(deflate::Deflate),
}

impl Prepared {
    pub(crate) fn new(algorithm: Algorithm) -> Self {
        let context = match algorithm.codec {
            Codec::Lz4 => CodecContext::Lz4,
            Codec::Zstd => CodecContext::Zstd(zstd::Plain::new(algorithm.level)),
            Codec::Deflate => CodecContext::Deflate(deflate::Deflate::new(algorithm.level)),
            Codec::Raw | Codec::Lzo | Codec::Wkdm | Codec::Piece => CodecContext::None,
            Codec::Lz4Numbers | Codec::ZstdNumbers => CodecContext::None,
        };
        Self { algorithm, context }
    }
}

/// The contexts of all codecs, for one thread at a time.
pub struct Codecs {
    algorithm: Algorithm,
    lz4: lz4::Lz4,
    zstd: zstd::Zstd,
    lzo: lzo::Lzo,
    deflate: deflate::Deflate,
    wkdm: wkdm::Wkdm,
    /// A page of numbers taken apart, and its object.
    planes: Page,
    object: Page,
}

impl Codecs {
    /// Contexts that compress with `algorithm` and decompress everything.
    pub fn new(algorithm: Algorithm) -> Self {
        Self::with_dictionaries(algorithm, Arc::default())
    }

    /// Contexts for objects that may need these dictionaries.
    pub(crate) fn with_dictionaries(algorithm: Algorithm, dictionaries: Arc<Dictionaries>) -> Self {
        let mut codecs = Self {
            algorithm,
            lz4: lz4::Lz4::new(),
            zstd: zstd::Zstd::new(dictionaries),
            lzo: lzo::Lzo::new(),
            deflate: deflate::Deflate::new(deflate::Deflate::LEVEL),
            wkdm: wkdm::Wkdm::new(),
            planes: [0; PAGE_BYTES],
            object: [0; PAGE_BYTES],
        };
        codecs.set_algorithm(algorithm);
        codecs
    }

    /// Compresses with `algorithm` from now on. Allocates: see `exchange`.
    pub fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.exchange(&mut Prepared::new(algorithm));
    }

    /// True if these contexts compress with this algorithm.
    pub(crate) fn uses(&self, algorithm: Algorithm) -> bool {
        self.algorithm == algorithm
    }

    /// Compresses with another algorithm from now on. Leaves the contexts of the old algorithm in
    /// `prepared` for the caller to drop.
    pub(crate) fn exchange(&mut self, prepared: &mut Prepared) {
        self.algorithm = prepared.algorithm;
        match &mut prepared.context {
            CodecContext::None => {}
            CodecContext::Lz4 => self.lz4.set_level(prepared.algorithm.level),
            CodecContext::Zstd(zstd) => self.zstd.exchange(zstd),
            CodecContext::Deflate(deflate) => std::mem::swap(&mut self.deflate, deflate),
        }
    }

    /// True if zstd uses this dictionary.
    pub(crate) fn uses_dictionary(&self, encoder: Option<&Arc<Encoder>>) -> bool {
        self.zstd.uses_dictionary(encoder)
    }

    /// Makes zstd use another dictionary, or none. Leaves the old dictionary in `with` for the
    /// caller to drop.
    pub(crate) fn exchange_dictionary(&mut self, with: &mut Option<WithDictionary>) {
        self.zstd.exchange_dictionary(with);
    }

    /// Trains a dictionary on the first 128 of the pages, and makes zstd use it. True if there was
    /// memory, and something to learn in the pages.
    pub fn train(&mut self, samples: &[Page]) -> bool {
        let is_trained = self.zstd.dictionaries.train(samples);
        if is_trained {
            let encoder = self.zstd.dictionaries.encoder(self.zstd.level());
            self.exchange_dictionary(&mut encoder.and_then(WithDictionary::new));
        }
        is_trained
    }

    /// The gain of a dictionary on the last page, if that page was a trial.
    pub(crate) fn take_trial(&mut self) -> Option<Trial> {
        self.zstd.trial.take()
    }

    /// Compresses a page into at most `out.len()` bytes; `None` when it does not fit.
    pub fn compress(&mut self, page: &Page, out: &mut [u8]) -> Option<(Codec, usize)> {
        let plain = match self.algorithm.codec {
            Codec::Raw => {
                out.get_mut(..PAGE_BYTES)?.copy_from_slice(page);
                Some(PAGE_BYTES)
            }
            Codec::Lz4 => self.lz4.compress(page, out),
            Codec::Zstd => self.zstd.compress(page, out),
            Codec::Lzo => self.lzo.compress(page, out),
            Codec::Deflate => self.deflate.compress(page, out),
            Codec::Wkdm => self.wkdm.compress(page, out),
            Codec::Piece | Codec::Lz4Numbers | Codec::ZstdNumbers => None,
        };
        let numbers = self.compress_numbers(page, plain, out);
        numbers.or_else(|| Some((self.algorithm.codec, plain?)))
    }

    /// Compresses a page of numbers to less than `plain` bytes, its length otherwise.
    fn compress_numbers(
        &mut self,
        page: &Page,
        plain: Option<usize>,
        out: &mut [u8],
    ) -> Option<(Codec, usize)> {
        let codec = self.algorithm.codec.for_numbers()?;
        let plain = plain.unwrap_or(PAGE_BYTES - PAGE_BYTES / NUMBERS_GAIN);
        if plain <= NUMBERS_BYTES_MIN {
            return None;
        }
        let header = numbers::take_apart(page, plain, &mut self.planes)?;
        let room = (plain - plain / NUMBERS_GAIN).min(out.len());
        let object = self.object[..room].get_mut(header.len()..)?;
        let bytes = match codec {
            Codec::Lz4Numbers => self.lz4.compress_bytes(&self.planes, object)?,
            _ => self.zstd.compress_plain(&self.planes, object)?,
        };
        let end = header.len() + bytes;
        out[..header.len()].copy_from_slice(&header);
        out[header.len()..end].copy_from_slice(&object[..bytes]);
        Some((codec, end))
    }

    /// Decompresses an object of any codec.
    pub fn decompress(
        &mut self,
        codec: Codec,
        object: &[u8],
        page: &mut Page,
    ) -> Result<(), Undecodable> {
        match codec {
            Codec::Raw => {
                *page = *<&Page>::try_from(object).map_err(|_| Undecodable)?;
                Ok(())
            }
            Codec::Lz4 => self.lz4.decompress(object, page),
            Codec::Zstd => self.zstd.decompress(object, page),
            Codec::Lzo => self.lzo.decompress(object, page),
            Codec::Deflate => self.deflate.decompress(object, page),
            Codec::Wkdm => self.wkdm.decompress(object, page),
            Codec::Piece => Err(Undecodable),
            Codec::Lz4Numbers => {
                let (header, planes) = object.split_first_chunk().ok_or(Undecodable)?;
                self.lz4.decompress(planes, &mut self.planes)?;
                numbers::together(header, &self.planes, page)
            }
            Codec::ZstdNumbers => {
                let (header, planes) = object.split_first_chunk().ok_or(Undecodable)?;
                self.zstd.decompress(planes, &mut self.planes)?;
                numbers::together(header, &self.planes, page)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Content, page_of};

    fn pages() -> Vec<Page> {
        let mut noise = 0x9e37_79b9_7f4a_7c15u64;
        let mut next = move || {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            noise
        };
        let page = |word: &mut dyn FnMut(usize) -> u64| {
            let mut page = [0; PAGE_BYTES];
            for (i, chunk) in page.chunks_exact_mut(8).enumerate() {
                chunk.copy_from_slice(&word(i).to_ne_bytes());
            }
            page
        };
        vec![
            [0; PAGE_BYTES],
            page(&mut |i| i as u64),
            page(&mut |i| 0x7f00_0000_1000 + (i as u64 % 7) * 64),
            page(&mut |i| if i % 3 == 0 { next() } else { 42 }),
        ]
    }

    #[test]
    fn every_codec_gives_each_page_back() {
        let mut codecs = Codecs::new("lz4".parse().unwrap());
        for name in [
            "raw",
            "lz4",
            "lz4:0",
            "lz4:-1",
            "lz4:1",
            "lz4:8",
            "zstd",
            "zstd:-20",
            "zstd:3",
            "lzo",
            "deflate",
            "deflate:6",
            "wkdm",
        ] {
            codecs.set_algorithm(name.parse().unwrap());
            for page in pages() {
                let mut out = [0; PAGE_BYTES];
                let (codec, bytes) = codecs.compress(&page, &mut out).unwrap();
                let mut back = [1; PAGE_BYTES];
                codecs.decompress(codec, &out[..bytes], &mut back).unwrap();
                assert_eq!(back, page, "{name}");
                assert!(codec == Codec::Raw || bytes < PAGE_BYTES);
            }
        }
    }

    #[test]
    fn an_object_that_does_not_fit_is_refused() {
        let page = pages().pop().unwrap();
        for name in ["raw", "lz4", "lz4:0", "lz4:-1", "zstd", "lzo", "deflate", "wkdm"] {
            let mut codecs = Codecs::new(name.parse().unwrap());
            assert_eq!(codecs.compress(&page, &mut [0; 100]), None, "{name}");
        }
    }

    #[test]
    fn truncated_objects_are_undecodable() {
        let page = pages().pop().unwrap();
        for name in ["raw", "lz4", "lz4:0", "lz4:-1", "zstd", "lzo", "deflate", "wkdm"] {
            let mut codecs = Codecs::new(name.parse().unwrap());
            let mut out = [0; PAGE_BYTES];
            let (codec, bytes) = codecs.compress(&page, &mut out).unwrap();
            for cut in [0, 1, bytes / 2, bytes - 1] {
                let mut back = [0; PAGE_BYTES];
                let got = codecs.decompress(codec, &out[..cut], &mut back);
                assert_eq!(got, Err(Undecodable), "{name} cut at {cut} of {bytes}");
            }
        }
    }

    #[test]
    fn pages_of_numbers_are_taken_apart_where_it_makes_them_smaller() {
        let contents = [Content::Numbers, Content::Prices].map(|content| page_of(content, 7));
        for (numbers, (name, apart)) in contents.iter().flat_map(|page| {
            let names = [
                ("lz4", Codec::Lz4Numbers),
                ("lz4:0", Codec::Lz4Numbers),
                ("lz4:-1", Codec::Lz4Numbers),
                ("zstd", Codec::ZstdNumbers),
                ("zstd:3", Codec::ZstdNumbers),
            ];
            names.map(|name| (page, name))
        }) {
            let mut codecs = Codecs::new(name.parse().unwrap());
            let mut out = [0xc3; PAGE_BYTES];
            let (codec, bytes) = codecs.compress(numbers, &mut out).unwrap();
            assert_eq!(codec, apart, "{name}");
            let mut back = [0; PAGE_BYTES];
            codecs.decompress(codec, &out[..bytes], &mut back).unwrap();
            assert!(back == *numbers, "{name}");
            for cut in [0, 1, bytes / 2, bytes - 1] {
                let got = codecs.decompress(codec, &out[..cut], &mut back);
                assert_eq!(got, Err(Undecodable), "{name} cut at {cut} of {bytes}");
            }
            // Space only for the object of the page taken apart, and space for neither object. zstd
            // needs more space than it uses.
            let room = &mut out[..bytes + 32];
            assert_eq!(codecs.compress(numbers, room), Some((apart, bytes)));
            assert_eq!(codecs.compress(numbers, &mut out[..bytes / 2]), None);
            let text = codecs.compress(&page_of(Content::Text, 1), &mut out).unwrap().0;
            assert_eq!(text, name.parse::<Algorithm>().unwrap().codec, "text is left as it is");
        }
    }

    #[test]
    fn algorithms_are_read_and_written() {
        for text in [
            "lz4",
            "lz4:0",
            "lz4:-1",
            "lz4:1",
            "lz4:2",
            "zstd",
            "zstd:-5",
            "zstd:19",
            "raw",
            "lzo",
            "deflate:12",
        ] {
            assert_eq!(text.parse::<Algorithm>().unwrap().to_string(), text);
        }
        let zstd: Algorithm = "zstd:-1".parse().unwrap();
        assert_eq!(zstd.to_string(), "zstd", "the default level is not spelled out");
        assert_eq!("lz4:-2".parse::<Algorithm>().unwrap().to_string(), "lz4");
    }

    #[test]
    fn a_wrong_algorithm_is_refused_with_the_possible_ones() {
        let error = "lz5".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains("'lz5'") && error.contains("zstd"), "{error}");
        let error = "zstd:20".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.contains("-100 to 19"), "{error}");
        assert!("zstd:".parse::<Algorithm>().is_err());
        assert!("".parse::<Algorithm>().is_err());
        assert!("piece".parse::<Algorithm>().is_err());
        assert!("lz4, numbers".parse::<Algorithm>().is_err());
    }
}
