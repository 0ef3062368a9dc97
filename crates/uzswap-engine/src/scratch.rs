//! Buffers of a thread that compresses or decompresses a page: one set per CPU.

use crate::compress::{
    Algorithm, Codec, Codecs, Dictionaries, Encoder, Prepared, Trial, UNIT_BYTES_MAX, Undecodable,
    UnitDecoder, WithDictionary,
};
use crate::page::{PAGE_BYTES, Page};
use crate::table::boxed;
use std::sync::Arc;

/// Contexts and buffers. A thread holds their lock even while a size class gives out an object, but
/// never while it waits for the backing or for memory. Other contexts are made without the lock,
/// and exchanged under it.
pub(crate) struct Scratch {
    codecs: Codecs,
    /// The object just made. It could not be made in the pool, because its size was not known
    /// before.
    made: Page,
    /// A copy of an object of the pool: decoders get memory that no other thread can write.
    pub(crate) object: Page,
    /// A page decompressed for comparison.
    pub(crate) page: Page,
    /// The buffers for pages in units, made with the first unit.
    unit: Option<UnitScratch>,
}

/// Buffers to decompress a page of a unit.
pub(crate) struct UnitScratch {
    decoder: UnitDecoder,
    /// The needed part of a unit.
    bytes: Box<[u8]>,
}

impl UnitScratch {
    /// `None` without memory.
    pub(crate) fn new() -> Option<Self> {
        Some(Self { decoder: UnitDecoder::new()?, bytes: boxed(UNIT_BYTES_MAX, || 0).ok()? })
    }
}

impl Scratch {
    pub(crate) fn new(algorithm: Algorithm, dictionaries: Arc<Dictionaries>) -> Self {
        Self {
            codecs: Codecs::with_dictionaries(algorithm, dictionaries),
            made: [0; PAGE_BYTES],
            object: [0; PAGE_BYTES],
            page: [0; PAGE_BYTES],
            unit: None,
        }
    }

    /// True if this has the buffers for [`Self::decompress_member`].
    pub(crate) fn has_unit(&self) -> bool {
        self.unit.is_some()
    }

    /// Takes the buffers for [`Self::decompress_member`], once.
    pub(crate) fn provide_unit(&mut self, unit: &mut Option<UnitScratch>) {
        self.unit = self.unit.take().or_else(|| unit.take());
    }

    /// Copies a unit's start for [`Self::decompress_member`].
    pub(crate) fn keep_unit(&mut self, bytes: &[u8]) {
        let unit = self.unit.as_mut().expect("made before the first unit");
        unit.bytes[..bytes.len()].copy_from_slice(bytes);
    }

    /// Decompresses a page of the copied unit, of which `bytes` were copied.
    pub(crate) fn decompress_member(
        &mut self,
        bytes: usize,
        position: u8,
        page: &mut Page,
    ) -> Result<(), Undecodable> {
        let unit = self.unit.as_mut().expect("made before the first unit");
        unit.decoder.page(&unit.bytes[..bytes], position.into(), page).map(drop)
    }

    /// See [`Codecs::uses`].
    pub(crate) fn uses(&self, algorithm: Algorithm) -> bool {
        self.codecs.uses(algorithm)
    }

    /// See [`Codecs::exchange`].
    pub(crate) fn exchange(&mut self, prepared: &mut Prepared) {
        self.codecs.exchange(prepared);
    }

    /// See [`Codecs::uses_dictionary`].
    pub(crate) fn uses_dictionary(&self, encoder: Option<&Arc<Encoder>>) -> bool {
        self.codecs.uses_dictionary(encoder)
    }

    /// See [`Codecs::exchange_dictionary`].
    pub(crate) fn exchange_dictionary(&mut self, with: &mut Option<WithDictionary>) {
        self.codecs.exchange_dictionary(with);
    }

    /// See [`Codecs::take_trial`].
    pub(crate) fn take_trial(&mut self) -> Option<Trial> {
        self.codecs.take_trial()
    }

    /// Compresses a page to at most `bytes_max` bytes, if that is possible.
    pub(crate) fn compress(&mut self, page: &Page, bytes_max: usize) -> Option<(Codec, &[u8])> {
        let (codec, bytes) = self.codecs.compress(page, &mut self.made[..bytes_max])?;
        Some((codec, &self.made[..bytes]))
    }

    /// Decompresses the first `bytes` of `self.object` into `page`.
    pub(crate) fn decompress(
        &mut self,
        codec: Codec,
        bytes: usize,
        page: &mut Page,
    ) -> Result<(), Undecodable> {
        self.codecs.decompress(codec, &self.object[..bytes], page)
    }

    /// Decompresses the first `bytes` of `self.object` into `self.page`.
    pub(crate) fn decompress_here(
        &mut self,
        codec: Codec,
        bytes: usize,
    ) -> Result<(), Undecodable> {
        self.codecs.decompress(codec, &self.object[..bytes], &mut self.page)
    }
}
