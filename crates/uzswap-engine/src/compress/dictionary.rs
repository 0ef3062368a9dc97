//! Dictionaries: the common parts of a program's pages, trained on some of them.
//!
//! A zstd frame names its dictionary in its header, by a number from 1: one byte more. A dictionary
//! lives as long as the cache, because any object may need it, in memory or on the backing.
//! docs/design/dictionaries.md has the figures behind the constants.

use crate::durable::{DICTIONARIES_MAX, Durable};
use crate::page::{PAGE_BYTES, Page};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use zstd_safe::{CDict, CompressionLevel, DDict, train_from_buffer};

/// Bytes of a dictionary: 32 KiB gain nothing more, 8 KiB lose a tenth of the gain.
pub(crate) const DICTIONARY_BYTES: usize = 16 << 10;

/// Pages to train one on: more gain nothing, and take longer.
pub(crate) const SAMPLES: usize = 128;

/// The offset of a dictionary's number, 32 bits (RFC 8878, section 5).
const NUMBER_AT: std::ops::Range<usize> = 4..8;

const _: () = assert!(DICTIONARIES_MAX <= u8::MAX as usize, "a frame names it in one byte");

/// The dictionaries that objects may need. All CPUs share them; one thread at a time trains.
pub(crate) struct Dictionaries {
    /// The first has number 1. Slots are filled from the front.
    made: [OnceLock<Dictionary>; DICTIONARIES_MAX],
    /// The memory to which dictionaries are also written, for a process that takes the cache over.
    durable: Option<Arc<Durable>>,
}

struct Dictionary {
    /// The source of an encoder of another level.
    content: Vec<u8>,
    decoder: DDict<'static>,
}

/// A dictionary prepared for a level.
pub(crate) struct Encoder {
    level: i32,
    pub(super) prepared: CDict<'static>,
    /// True if the dictionary gains enough. Otherwise every 32nd page is only tried with it.
    is_worth_it: AtomicBool,
}

impl Default for Dictionaries {
    /// No dictionary yet.
    fn default() -> Self {
        Self { made: [const { OnceLock::new() }; DICTIONARIES_MAX], durable: None }
    }
}

impl Dictionaries {
    /// The dictionaries of a cache that is taken over, if there are some. New ones are written to
    /// `durable`.
    pub(crate) fn kept_in(durable: Option<&Arc<Durable>>) -> io::Result<Self> {
        let dictionaries = Self { durable: durable.cloned(), ..Self::default() };
        let kept = durable.filter(|durable| durable.is_held()).map(Durable::dictionaries);
        for (slot, content) in dictionaries.made.iter().zip(kept.transpose()?.unwrap_or_default()) {
            let decoder = DDict::try_create(&content);
            let decoder = decoder.ok_or(io::ErrorKind::OutOfMemory)?;
            let _ = slot.set(Dictionary { content, decoder });
        }
        Ok(dictionaries)
    }

    /// Trains one more. True if there was memory, and something to learn in the pages. Takes some
    /// 30 ms, and 6 MiB for that time.
    pub(crate) fn train(&self, samples: &[Page]) -> bool {
        let Some(number) = self.made.iter().position(|slot| slot.get().is_none()) else {
            return false;
        };
        let Some(dictionary) = Dictionary::train(number as u32 + 1, samples) else { return false };
        // Written before an object needs the dictionary.
        let kept = self.durable.as_ref().map(|d| d.keep_dictionary(number, &dictionary.content));
        if kept.is_some_and(|kept| kept.is_err()) {
            return false;
        }
        self.made[number].set(dictionary).is_ok()
    }

    /// The number of dictionaries.
    pub(crate) fn count(&self) -> usize {
        self.made.iter().filter_map(OnceLock::get).count()
    }

    /// Makes an encoder of the newest dictionary; `None` when there is none, or no memory.
    pub(crate) fn encoder(&self, level: i32) -> Option<Arc<Encoder>> {
        let newest = self.made.iter().map_while(OnceLock::get).last()?;
        let prepared = CDict::try_create(&newest.content, prepared_level(level))?;
        Some(Arc::new(Encoder { level, prepared, is_worth_it: AtomicBool::new(true) }))
    }

    /// Decodes objects of the dictionary with this number.
    pub(super) fn decoder(&self, number: u8) -> Option<&DDict<'static>> {
        let slot = self.made.get(usize::from(number).checked_sub(1)?)?;
        slot.get().map(|dictionary| &dictionary.decoder)
    }

    /// Bytes of all dictionaries.
    pub(crate) fn bytes(&self) -> usize {
        let made = self.made.iter().filter_map(OnceLock::get);
        made.map(|one| one.content.capacity() + one.decoder.sizeof()).sum()
    }
}

impl Dictionary {
    fn train(number: u32, samples: &[Page]) -> Option<Self> {
        let mut content = Vec::new();
        content.try_reserve_exact(DICTIONARY_BYTES).ok()?;
        content.resize(DICTIONARY_BYTES, 0);
        let sizes = [PAGE_BYTES; SAMPLES];
        let samples = &samples[..samples.len().min(SAMPLES)];
        let sizes = &sizes[..samples.len()];
        let bytes = train_from_buffer(&mut content[..], samples.as_flattened(), sizes).ok()?;
        content.truncate(bytes);
        content.get_mut(NUMBER_AT)?.copy_from_slice(&number.to_le_bytes());
        let decoder = DDict::try_create(&content)?;
        Some(Self { content, decoder })
    }
}

impl Encoder {
    /// Its level as requested.
    pub(crate) fn level(&self) -> i32 {
        self.level
    }

    pub(crate) fn is_worth_it(&self) -> bool {
        self.is_worth_it.load(Relaxed)
    }

    /// Sets whether pages are compressed with this dictionary, or only tried with it.
    pub(crate) fn set_worth_it(&self, is_worth_it: bool) {
        self.is_worth_it.store(is_worth_it, Relaxed);
    }

    /// Bytes that the encoder takes.
    pub(crate) fn bytes(&self) -> usize {
        self.prepared.sizeof()
    }
}

/// With a dictionary level 1 takes no longer than −1, and makes objects some 8 % smaller.
fn prepared_level(level: i32) -> CompressionLevel {
    if level == -1 { 1 } else { level }
}

/// The number of the dictionary that a frame without magic number needs, if it needs one: a byte
/// behind the frame's descriptor and its window (RFC 8878, section 3.1.1.1).
pub(crate) fn dictionary_of(frame: &[u8]) -> Option<u8> {
    const NUMBER_BITS: u8 = 0b11;
    const SINGLE_SEGMENT: u8 = 1 << 5;
    let descriptor = *frame.first()?;
    let window_bytes = usize::from(descriptor & SINGLE_SEGMENT == 0);
    let has_number = descriptor & NUMBER_BITS == 1;
    has_number.then(|| frame.get(1 + window_bytes).copied())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compress::samples::{Random, pointers};
    use crate::compress::{Algorithm, Codec, Codecs, Undecodable, WithDictionary};

    fn pages() -> Vec<Page> {
        let mut random = Random(7);
        let mut page = || {
            let mut page = pointers(&mut random);
            page[1000..].fill(0); // Keeps each object below a quarter of a page.
            page
        };
        (0..SAMPLES).map(|_| page()).collect()
    }

    fn zstd(dictionaries: Arc<Dictionaries>) -> Codecs {
        Codecs::with_dictionaries(Algorithm { codec: Codec::Zstd, level: -1 }, dictionaries)
    }

    fn object(codecs: &mut Codecs, page: &Page) -> Vec<u8> {
        let mut out = [0; PAGE_BYTES];
        let (codec, bytes) = codecs.compress(page, &mut out).unwrap();
        assert_eq!(codec, Codec::Zstd);
        out[..bytes].to_vec()
    }

    #[test]
    fn objects_name_the_dictionary_that_they_need() {
        let pages = pages();
        let shared = Arc::new(Dictionaries::default());
        let mut codecs = zstd(shared.clone());
        let mut objects = vec![object(&mut codecs, &pages[0])];
        assert_eq!(dictionary_of(&objects[0]), None);
        for number in 1..=3 {
            assert!(codecs.train(&pages));
            objects.push(object(&mut codecs, &pages[0]));
            assert_eq!(dictionary_of(objects.last().unwrap()), Some(number));
        }
        // Uses another CPU's contexts, which have compressed no page with these dictionaries.
        for codecs in [&mut codecs, &mut zstd(shared)] {
            for object in objects.iter().chain(objects.iter().rev()) {
                let mut page = [0; PAGE_BYTES];
                codecs.decompress(Codec::Zstd, object, &mut page).unwrap();
                assert!(page == pages[0]);
            }
        }
        for number in [0, 4, 17, 255] {
            let mut object = objects[1].clone();
            object[1] = number;
            let got = codecs.decompress(Codec::Zstd, &object, &mut [0; PAGE_BYTES]);
            assert_eq!(got, Err(Undecodable), "number {number}");
        }
        assert!(
            zstd(Arc::default())
                .decompress(Codec::Zstd, &objects[1], &mut [0; PAGE_BYTES])
                .is_err()
        );
    }

    #[test]
    fn a_page_of_another_kind_is_no_larger_than_without() {
        let (mut random, mut codecs) = (Random(3), zstd(Arc::default()));
        let noisy = |random: &mut Random| {
            let mut page = random.page();
            page[1500..].fill(0);
            page
        };
        let others: Vec<Page> = (0..100).map(|_| noisy(&mut random)).collect();
        let without: Vec<usize> = others.iter().map(|p| object(&mut codecs, p).len()).collect();
        assert!(codecs.train(&pages()));
        for (page, without) in others.iter().zip(without) {
            assert!(object(&mut codecs, page).len() <= without);
        }
    }

    #[test]
    fn an_object_that_does_not_fit_is_refused_and_counted_in_a_trial() {
        let mut codecs = zstd(Arc::default());
        assert!(codecs.train(&pages()));
        let page = Random(1).page();
        let mut trials = 0;
        for _ in 0..64 {
            assert_eq!(codecs.compress(&page, &mut [0; 100]), None);
            let trial = codecs.take_trial();
            trials += u32::from(trial.is_some());
            assert!(trial.is_none_or(|t| (t.with, t.without) == (PAGE_BYTES, PAGE_BYTES)));
        }
        assert_eq!(trials, 2);
    }

    #[test]
    fn an_encoder_of_another_level_makes_objects_that_decode() {
        let (pages, shared) = (pages(), Arc::new(Dictionaries::default()));
        assert!(shared.encoder(3).is_none(), "there is no dictionary");
        assert!(shared.train(&pages));
        let mut codecs = zstd(shared.clone());
        for level in [-3, -1, 1, 9, 19] {
            let encoder = shared.encoder(level);
            assert_eq!(encoder.as_ref().map(|encoder| encoder.level()), Some(level));
            codecs.exchange_dictionary(&mut encoder.and_then(WithDictionary::new));
            let (object, mut page) = (object(&mut codecs, &pages[5]), [0; PAGE_BYTES]);
            assert_eq!(dictionary_of(&object), Some(1), "level {level}");
            codecs.decompress(Codec::Zstd, &object, &mut page).unwrap();
            assert!(page == pages[5]);
        }
        codecs.exchange_dictionary(&mut None);
        assert_eq!(dictionary_of(&object(&mut codecs, &pages[5])), None);
    }
}
